"""Measures the engine, the server and its peers on the same texts, in turns.

`texts` makes the texts, `http_client` sends them, `load` decides when, `subjects` describes what is
measured, `run` measures, `result` holds the figures, `report` and `plots` present them, and
`compare` lists what changed between two results. `README.md` lists every module. The service never
imports this package.
"""
