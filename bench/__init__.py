"""Measures the engine, the server and its peers on the same texts, in turns. Offline: nothing of the service imports it.

`texts` makes what is sent, `http_client` sends it, `load` decides when, `subjects` starts what is measured, `result` holds what
was found, `report` shows it, `compare` names what moved between two results.
"""
