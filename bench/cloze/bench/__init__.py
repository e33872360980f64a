"""Measures the engine, the server and its peers on the same texts, in turns.

`README.md` lists every module. The service never imports this package.
"""
