"""Servers and libraries in common use today, measured beside ours."""
