"""Turns texts into tokens."""
