"""Several processes behind one port: front ends speak HTTP and tokenize, an engine process a device runs batches.

`supervisor` starts them and restarts those that die; `frontend` and `engine_process` are what it starts; `remote` is the queue
as a front end sees it; `frames` are the bytes between them. Unless `frontends` is set, one process does all of it: see
`service.app`.
"""
