"""Listens, speaks HTTP/1.1 on connections, and begins and ends a process."""
