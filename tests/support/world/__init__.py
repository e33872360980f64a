"""The whole service in simulated time: one seed is one history of clients and faults.

The code of the service is the real one, from the bytes of a connection to the batches of a
scheduler. The world replaces what is below: the clock, the threads, the event loop, the sockets and
the engine. `kernel` and `network` have these, `server` starts the service on them, `clients` and
`history` have what happens, and `promises` what must be true. ``python -m tests.support.world``
runs many histories.
"""
