"""What the project measures again and again, outside of the wheel: ``python -m lab.soak``."""
