"""A CUDA without a GPU: the runtime's provider places, chooses and launches as it would on an H100,
and no kernel computes anything.
"""
