"""One module per task: the inputs of the task, their encodings, and the decoding of the result.

The package depends neither on HTTP nor on the scheduler. To add a task, write a module with a
`TASK` and add the module to `TASKS`.

`rerank` and the two tasks of `token_ids` are not in `TASKS`, which every protocol offers for each
model with the heads. These three have the bodies of one protocol, whose routes name them.
"""

from typing import Final

from cloze.service.tasks import (
    embed,
    embed_all,
    embed_sparse,
    entities,
    fill_mask,
    nsp,
    qa,
    redact,
    score,
    similarity,
    text_classification,
    token_classification,
    zero_shot_classification,
)
from cloze.service.tasks.task import PreparedRequest, Task, TaskContext, TaskLimits

TASKS: Final[dict[str, Task]] = {
    module.TASK.name: module.TASK
    for module in (
        fill_mask,
        score,
        embed,
        embed_all,
        embed_sparse,
        similarity,
        nsp,
        qa,
        text_classification,
        token_classification,
        redact,
        zero_shot_classification,
        entities,
    )
}
"""The tasks of all protocols, by name."""

__all__ = ["TASKS", "PreparedRequest", "Task", "TaskContext", "TaskLimits"]
