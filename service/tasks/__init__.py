"""What each task asks of the engine, and what it makes of the outputs. Knows tokens and logits; no HTTP, no queue.

Each task is one function ``prepare(tokenizer, ..., limits) -> Prepared``: the queries to run, and how to read what
comes back.
"""

from service.tasks.prepared import Prepared, TaskLimits

__all__ = ["Prepared", "TaskLimits"]
