"""Runs a bulk job: plans or resumes it, and passes its shards to the workers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cloze.bulk.errors import BulkError
from cloze.bulk.job import BulkJob, JobOptions, base_and_digest
from cloze.bulk.model_choice import check_parameters, choose_bundle
from cloze.bulk.plan import Shard
from cloze.bulk.run_folder import RunFolder, ShardReport
from cloze.bulk.sources import input_files, make_plan
from cloze.bulk.summary import Summary, summarize
from cloze.bulk.work import Progress
from cloze.service.settings import Settings

RunShards = Callable[[BulkJob, Sequence[Shard], Progress], list[ShardReport]]
"""(job, shards, on_rows) -> the reports of the shards."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """What a run reports while it runs.

    Attributes:
        on_plan: called with the number of rows that are to be written, and of those that are.
        on_rows: called after rows have been written.
    """

    report: Callable[[str], None]
    on_plan: Callable[[int, int], None]
    on_rows: Progress


def run_job(
    paths: Sequence[Path],
    output: Path,
    options: JobOptions,
    settings: Settings,
    run_shards: RunShards,
    watcher: Watcher,
) -> Summary:
    """Run a job, or what is left of it.

    Args:
        output: the folder of the results.
        settings: the settings of the engine, and the model.

    Raises:
        BulkError: the run cannot begin or go on.
    """
    output = output.resolve()
    for path in paths:
        if path.is_dir() and output.is_relative_to(path.resolve()):
            raise BulkError(f"the output {output} lies in the input {path}")
    file_format, files = input_files(paths)
    folder = RunFolder(output, options.format)
    folder.check_content()
    bundle = choose_bundle(settings, options.task, watcher.report)
    check_parameters(settings, bundle, options.task, options.parameters)
    # A resumed run does not read its text files again to find their rows.
    plan = folder.recorded_plan(files, options.shard_rows)
    if plan is None:
        plan = make_plan(file_format, files, options.shard_rows, watcher.report)
    job = BulkJob(options, *base_and_digest(bundle), settings, plan, output)
    job.check_columns()
    with folder.locked():
        folder.begin(job.identity(), plan)
        earlier = [folder.report(shard) for shard in plan.shards if folder.is_complete(shard)]
        done = {report.shard for report in earlier}
        shards = [shard for shard in plan.shards if shard.number not in done]
        begun = [report for shard in shards if (report := folder.begun(shard)) is not None]
        watcher.on_plan(plan.rows, sum(report.rows for report in (*earlier, *begun)))
        started = time.monotonic()
        reports = run_shards(job, shards, watcher.on_rows) if shards else []
        seconds = time.monotonic() - started
    return summarize(job, earlier, reports, seconds, begun)
