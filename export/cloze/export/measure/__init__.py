"""Metrics on checkpoints and bundles, and their test data.

The quality gate and training use this package. The package does not import `cloze.export.train`.
"""
