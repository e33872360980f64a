"""Servers that people run today, measured beside ours."""
