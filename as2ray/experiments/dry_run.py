"""What an experiment would run: its stages, hours, sources and resources."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from as2ray.distributed.workers_config import WorkersConfig, bundle_resources
from as2ray.errors import CheckpointError, CorpusError
from as2ray.experiments.executor import check_stage
from as2ray.experiments.experiment import Experiment
from as2ray.experiments.stage import Stage, sorted_stages
from as2ray.experiments.store import Store

COLUMNS = ("stage", "kind", "data", "loss", "pairs", "updates", "batch", "hours", "state")


def dry_run(experiment: Experiment, store: Store, workers: WorkersConfig) -> str:
    """Describes a run that does not take place; needs no data, no model and no hub.

    Args:
        experiment: Its stages.
        store: Where complete stages are looked up.
        workers: Part of the cluster that a run would use.

    Returns:
        The named stages as a table, totals, what the stages to run read, and the resource plan. A
        row stands for all seeds that do not differ otherwise; its hours are those of one.

    Raises:
        As2rayError: The experiment cannot run.
    """
    stages, names = sorted_stages(experiment.targets), experiment.names()
    complete = store.find_all(stages)
    waiting = [stage for stage in stages if stage not in complete]
    sources: dict[str, None] = {}
    for stage in waiting:
        problem = ""
        try:
            check_stage(stage, complete, names)
        except (CheckpointError, CorpusError) as error:
            problem = f"missing: {error.problem}"
        source = stage.describe().get("source") or ""
        reads = [source] if source.startswith("missing") else [problem, source]
        sources |= dict.fromkeys(filter(None, reads))
    shown = set(experiment.stages.values())
    rows = []
    for stage in stages:
        columns = stage.describe()
        if stage in shown or columns:
            state = "stored" if stage in complete else "to run"
            columns = {"stage": stage, "kind": stage.kind, **columns, "state": state}
            rows.append(_format_row(columns, names))
    lines = _align([COLUMNS, *_join_seeds(rows)])
    hours, counts = sum(s.hours() for s in waiting), f"{len(stages)} stages, {len(complete)} stored"
    lines.append(f"{counts}; {hours:.1f} hours on one device, an NVIDIA H200")
    lines += ["", "reads:", *sources] if sources else []
    return "\n".join([*lines, "", f"resources: {_describe_workers(stages, workers)}"])


def _format_row(columns: Mapping[str, Any], names: Mapping[Stage, str]) -> tuple[str, ...]:
    cells = []
    for column in COLUMNS:
        value = columns.get(column)
        value = names[value] if isinstance(value, Stage) else value
        value = f"{value:.2f}" if isinstance(value, float) else value
        cells.append("-" if value is None else str(value))
    return tuple(cells)


def _join_seeds(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Returns the rows with one for all seeds of a stage, where nothing else differs."""
    seeds_of: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        seeds = re.findall(r"-seed(\d+)", row[0])[:1]
        pattern = rf"-seed{seeds[0]}\b" if seeds else "$^"
        key = tuple(re.sub(pattern, "-seed?", cell) for cell in row)
        seeds_of.setdefault(key, []).extend(seeds)
    return [
        tuple(cell.replace("-seed?", f"-seed{','.join(seeds)}") for cell in key)
        for key, seeds in seeds_of.items()
    ]


def _align(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _describe_workers(stages: list[Stage], workers: WorkersConfig) -> str:
    if not workers.num_workers:
        return "this process"
    bundle = " + ".join(f"{amount:g} {name}" for name, amount in bundle_resources(workers).items())
    num_runs = sum(stage.RESOURCES == "gang" for stage in stages)
    runs = f"{num_runs} training runs of {workers.num_workers} workers with {bundle} each"
    return f"{runs}; as many at the same time as fit on the cluster"
