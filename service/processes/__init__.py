"""Several processes behind one port: front ends, and one engine process per device.

A front end answers HTTP and tokenizes; an engine process runs batches. `supervisor` starts and
restarts both; `frontend` and `engine_process` are their programs. `remote` is the queue as a front
end sees it; `frames` are the messages between them. Without the setting `frontends`, one process
does everything: see `service.app`.
"""
