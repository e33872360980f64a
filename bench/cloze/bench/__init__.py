"""Measures the engine, the server and its peers on the same texts, in turns."""
