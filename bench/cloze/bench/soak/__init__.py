"""A soak of a real server: mixed traffic, faults on a schedule, and checks of what they left."""
