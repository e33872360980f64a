"""The results of ``cloze bench``: the figures with the command, the machine and the versions."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cloze.bench_output import now, repeating_command
from cloze.model_store.store import Store
from cloze.tables import report

if TYPE_CHECKING:
    from cloze.bench.device import DeviceFigures, DevicePlan
    from cloze.bench.result import Result
    from cloze.bench.run_options import RunOptions


def device_result(
    plan: "DevicePlan", versions: dict[str, str], figures: "DeviceFigures"
) -> "Result":
    """Return the figures with the plan, the machine and the versions."""
    from cloze.bench.device import gpu_name
    from cloze.bench.machine import describe_machine
    from cloze.bench.result import Result
    from cloze.service.machine import available_cpus

    gpu = {"GPU": name} if (name := gpu_name(plan.device)) else {}
    return Result(
        command=repeating_command(),
        date=now(),
        machine=gpu | describe_machine(available_cpus()),
        versions={"Cloze": versions},
        model=f"{', '.join(plan.sizes)}, embed, on {gpu.get('GPU', 'a CPU')}",
        texts={
            "from": "random words",
            "lengths": "SQuAD 1.1's; short: mostly those of search questions",
        },
        turns=figures.turns,
        starts=figures.starts,
        cells=figures.cells,
        notes=figures.notes,
    )


def measure_run(options: "RunOptions") -> "Result":
    """Measure what the options select, and return the figures."""
    from cloze.bench.machine import describe_machine
    from cloze.bench.result import Result
    from cloze.bench.run import measure
    from cloze.bench.run_options import Selection
    from cloze.service.machine import available_cpus

    selection = Selection.of(options)
    open_first = next(iter(selection.engines.values()))
    turns, starts, described = [], [], {}
    for name, texts in selection.texts.items():
        lengths = open_first(texts.texts).lengths
        mean = sum(lengths) / len(lengths)
        described[name] = f"({texts.source}; {len(lengths)} of {mean:.1f} tokens on average)"
        engines = {title: partial(open_, texts.texts) for title, open_ in selection.engines.items()}
        plan = replace(options.plan, label=name if len(selection.texts) > 1 else "")
        measured = measure(engines, selection.servers, texts.texts, plan, report, lengths)
        turns += measured.turns
        starts += measured.starts
    store = Store(options.model_store)
    references = [store.manifest(name).reference for name in options.models]
    return Result(
        command=repeating_command(),
        date=now(),
        machine=describe_machine(available_cpus()),
        versions=selection.versions,
        model=f"{', '.join(references)}, {options.task}",
        texts=described,
        turns=turns,
        starts=starts,
    )


def measure_mix(
    mix: Mapping[str, float], *, model: str, seconds: float, **arguments: Any
) -> "Result":
    """Measure a server with each kind of request of a mix for itself."""
    from cloze.bench.run import Plan
    from cloze.bench.run_options import RunOptions

    plan = Plan(clients=(32,), shares=(0.7,), bulk=False, seconds=seconds, turns=1)
    options = RunOptions(
        models=(model,),
        texts=tuple(mix),
        count=2000,
        precisions=("auto",),
        device="cpu",
        frontends=(0,),
        checkpoint=None,
        backends=(),
        peers={},
        plan=plan,
        **arguments,
    )
    return measure_run(options)
