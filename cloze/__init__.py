"""The front door: the command line. Each room is imported only when it is asked for."""
