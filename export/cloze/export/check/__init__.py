"""What a graph must pass before it is published, and the rounding that it is checked for."""
