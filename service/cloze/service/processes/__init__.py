"""Several processes that serve one port: front ends speak HTTP, engine processes run batches.

`supervisor` starts the processes and restarts those that die; `children` has one of them.
`frontend` and `engine_process` are the two kinds of process. `frames` turns requests and results
into messages, and carries them.
Without the setting `frontends`, one process does all of this: see `cloze.service.service`.
"""
