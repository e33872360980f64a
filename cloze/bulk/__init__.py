"""``cloze bulk``: results for the texts of large files, without a server.

A run divides its input into shards of rows, always in the same way. A worker turns a shard into a
file of results through the pipeline of the service. `local_run` has one worker in this process, and
`ray_run` has workers on a Ray cluster. The output folder records what is done, so that a run that
was killed continues.
"""
