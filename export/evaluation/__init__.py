"""Metrics on checkpoints and bundles, and what they measure on. The quality gate and training use it.

Imports nothing of `export.train`.
"""
