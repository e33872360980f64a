"""Programs that run in the environments of peers. They do not import this package."""
