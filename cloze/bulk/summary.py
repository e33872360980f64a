"""The summary of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from cloze.bulk.job import BulkJob
from cloze.bulk.run_folder import ShardReport


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run has done.

    Attributes:
        rows: rows of the input, which are the rows of the output.
        errors: rows that have an error instead of a result.
        resumed_files: how many of them an earlier run had completed.
        seconds: time of this run, in which the model was opened.
        texts_per_s: answered rows of this run per second.
        tokens_per_s: tokens of this run per second.
        first_error: the file of the first row with an error, the row and the error.
        embedding_spaces: names of the spaces of the vectors; none without vectors.
    """

    output: str
    model: str
    precisions: list[str]
    rows: int
    errors: int
    truncated: int
    files: int
    resumed_files: int
    seconds: float
    texts_per_s: float
    tokens_per_s: float
    first_error: str
    embedding_spaces: list[str]

    def lines(self) -> list[str]:
        """Return the summary for a person."""
        resumed = f", {self.resumed_files} of them from an earlier run" * bool(self.resumed_files)
        # Less than ten per second have a digit after the point, so that a slow run is not "0".
        texts, tokens = (
            f"{rate:,.{int(0 < rate < 10)}f}" for rate in (self.texts_per_s, self.tokens_per_s)
        )
        done = f"{texts} texts/s, {tokens} tokens/s in {self.seconds:.1f} s"
        if self.files == self.resumed_files:
            done = "nothing was left to do"
        rows, files = _counted(self.rows, "row"), _counted(self.files, "file")
        errors, cut = _counted(self.errors, "row"), _counted(self.truncated, "text")
        spaces = ", ".join(self.embedding_spaces)
        space = f", embedding space {spaces}" * bool(spaces)
        return [
            f"{rows} in {files} in {self.output}{resumed}",
            f"{errors} with an error, {cut} cut",
            f"{done}; {self.model}, {', '.join(self.precisions)}{space}",
        ]


def summarize(
    job: BulkJob,
    earlier: Sequence[ShardReport],
    reports: Sequence[ShardReport],
    seconds: float,
    begun: Sequence[ShardReport] = (),
) -> Summary:
    """Return the summary of a run.

    Args:
        earlier: of the shards that an earlier run completed.
        reports: of the shards that this run completed, rows of earlier runs included.
        begun: of the rows that an earlier run wrote of these shards.
    """
    both = sorted([*earlier, *reports], key=lambda report: report.shard)
    answered = _answered(reports) - _answered(begun)
    tokens = sum(report.tokens for report in reports) - sum(report.tokens for report in begun)
    per_s = 1 / max(seconds, 1e-9)
    return Summary(
        output=str(job.output),
        model=job.model,
        precisions=sorted({report.precision for report in both}),
        rows=sum(report.rows for report in both),
        errors=sum(report.errors for report in both),
        truncated=sum(report.truncated for report in both),
        files=sum(report.files for report in both),
        resumed_files=sum(report.files for report in (*earlier, *begun)),
        seconds=round(seconds, 3),
        texts_per_s=round(answered * per_s, 1),
        tokens_per_s=round(tokens * per_s, 1),
        first_error=next((_located(job, r) for r in both if r.first_error), ""),
        embedding_spaces=sorted({r.embedding_space for r in both if r.embedding_space}),
    )


def _answered(reports: Sequence[ShardReport]) -> int:
    return sum(report.rows - report.errors for report in reports)


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _located(job: BulkJob, report: ShardReport) -> str:
    file = job.plan.files[job.plan.shards[report.shard].file].path
    return f"{file}, {report.first_error}"
