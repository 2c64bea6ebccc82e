"""Prints Table 1 of Mokrii et al. 2021 over several targets, each of its own study.

python -m pipelines.table_1 --studies '[output/squad, output/wikiqa]'
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from as2ray.errors import ConfigError, from_validation_error
from as2ray.evaluation.measures import EvaluationResult
from as2ray.evaluation.report import markdown_table
from as2ray.evaluation.seeds import align_by_question, average_over_seeds
from as2ray.experiments.command import exit_with_error
from as2ray.experiments.configuration import print_config, print_help, read_tree, validate

SIGNIFICANT = 0.01
"""Significance level of the paper's paired t-tests."""

Systems = Mapping[str, Mapping[int, EvaluationResult]]
"""Results by system (`START`, `START+SIZE`, `BM25`) and sample."""

Averages = Mapping[str, pa.Table]
"""Measures by question of each system, means over its samples."""

Cells = Mapping[str, Sequence[str]]
"""Zero-shot and full-shot cells of each start, with the paper's marks; empty without a result."""


@dataclass(frozen=True)
class StudyTable:
    """Table 1 of a study, as its `table1.json` has it."""

    measure: str
    targets: dict[str, dict[str, tuple[str, str]]]
    """Cells of each start, by target."""


def table_cells(systems: Systems, transfer_sources: Sequence[str], measure: str) -> Cells:
    """Returns the cells of Table 1 for one target.

    Args:
        systems: Results by system and sample.
        transfer_sources: Starts that were trained on other corpora.
        measure: Name of the measure.
    """
    averaged = _average(systems)
    cells = {}
    for start in [*transfer_sources, "BM25", "pseudo", "scratch"]:
        cells[start] = ["", ""]
        for place, name in enumerate((start, f"{start}+all")):
            if name in averaged:
                mean = np.mean(averaged[name][measure])
                cells[start][place] = f"{mean:.4f}{_mark(averaged, name, measure)}"
    return cells


def _average(systems: Systems) -> Averages:
    return {
        name: average_over_seeds([result.per_question for result in by_sample.values()])
        for name, by_sample in systems.items()
    }


def _mark(averaged: Averages, name: str, measure: str) -> str:
    """Returns the mark of a zero-shot result that differs from what it is compared with."""
    other, mark = ("BM25", "#") if name == "pseudo" else ("pseudo", "*")
    if name in ("BM25", "scratch") or "+" in name or other not in averaged:
        return ""
    # Of two that are equal on every question the p-value is no number, and they do not differ.
    return mark if _p_value(averaged, other, name, measure) < SIGNIFICANT else ""


def _p_value(averaged: Averages, first: str, second: str, measure: str) -> float:
    """Returns the p-value of the paired t-test over questions."""
    from scipy import stats

    pairs = align_by_question([averaged[first], averaged[second]], measure)
    return float(stats.ttest_rel(*pairs).pvalue)


def answer_questions(systems: Systems, transfer_sources: Sequence[str], measure: str) -> str:
    """Returns what the results say to the paper's research questions (section 5), as Markdown.

    Args:
        systems: Results by system and sample; `scratch+SIZE` and `START+SIZE` are few-shot.
        transfer_sources: Starts that were trained on other corpora.
        measure: Name of the measure.
    """
    averaged = _average(systems)
    means = {name: float(np.mean(table[measure])) for name, table in averaged.items()}
    rows: list[tuple[str, str, str, str, str]] = []

    def compare(question: str, name: str, other: str, if_lower: str = "lower") -> None:
        if name in means and means.get(other):
            change, p = means[name] / means[other] - 1, _p_value(averaged, other, name, measure)
            verdict = "equal" if change == 0 else "higher" if change > 0 else if_lower
            is_significant = "significant" if p < SIGNIFICANT else ""
            rows.append(
                (question, f"{name} against {other}", f"{change:+.1%}", verdict, is_significant)
            )

    sizes = [name.partition("+")[2] for name in means if re.fullmatch(r"scratch\+\w+", name)]
    sizes.sort(key=lambda size: int(size) if size.isdigit() else math.inf)
    is_above = [means[f"scratch+{size}"] > means["BM25"] for size in sizes]
    enough = next((size for n, size in enumerate(sizes) if all(is_above[n:])), "more than all")
    if sizes:
        rows.append(("RQ1", "questions from which on scratch is above BM25", enough, "", ""))
    compare("RQ2", "pseudo", "BM25")
    for source in transfer_sources:
        compare("RQ3", source, "BM25")
    for source in transfer_sources:
        compare("RQ4", source, "pseudo")
    for start, size in product([*transfer_sources, "pseudo"], sizes):
        compare("RQ5", f"{start}+{size}", start, "lower: a little bit is worse than none")
    columns = (measure, "comparison", "change", "", f"paired t-test, p < {SIGNIFICANT}")
    return markdown_table(columns, rows)


def format_table(targets: Mapping[str, Cells], measure: str) -> str:
    """Returns Table 1 as Markdown: zero-shot (ZS) and full-shot (FS) of each start on each target.

    Args:
        targets: Cells by target, of one study or of several.
        measure: Name of the measure.
    """
    columns = [measure, *(f"{target} {kind}" for target in targets for kind in ("ZS", "FS"))]
    rows: dict[str, list[str]] = {s: [s] for cells in targets.values() for s in cells}
    for start, row in rows.items():
        for cells in targets.values():
            row += cells.get(start, ("", ""))
    marks = "*: differs from pseudo; #: pseudo differs from BM25; paired t-test, p < 0.01."
    return f"{markdown_table(columns, rows.values())}\n\n{marks}"


def combine_studies(studies: Sequence[str]) -> str:
    """Puts the results of `pipelines.pseudo_label` on several targets side by side, as Markdown.

    Args:
        studies: Output folders of finished studies.

    Raises:
        ConfigError: No folder, one without results or with damaged ones, a target that occurs
            twice, or studies with different measures.
    """
    if not studies:
        raise ConfigError(
            "no study is given; Table 1 needs at least one",
            fix="--studies '[output/squad, output/wikiqa]'",
        )
    targets: dict[str, Cells] = {}
    measures: dict[str, str] = {}
    for study in studies:
        path = Path(study) / "table1.json"
        if not path.is_file():
            raise ConfigError(
                f"{study} has no table1.json, which a finished study writes",
                fix="run python -m pipelines.pseudo_label with this --output first",
            )
        try:
            results = TypeAdapter(StudyTable).validate_json(path.read_bytes())
        except ValidationError as error:
            raise ConfigError(
                f"{path} is damaged: {from_validation_error(error).problem}",
                fix="run python -m pipelines.pseudo_label with this --output again; it only makes "
                "what is missing",
            ) from error
        measures[study] = results.measure
        if repeated := sorted(targets.keys() & results.targets.keys()):
            raise ConfigError(
                f"{study} has the targets {repeated} again",
                fix="give the tests of the recipes different names",
            )
        targets |= results.targets
    if len(set(measures.values())) != 1:
        raise ConfigError(
            f"the studies must have one measure in common, and theirs are {measures}",
            fix="set the same first measure in the recipes",
        )
    return format_table(targets, next(iter(measures.values())))


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class TableOne:
    """Prints Table 1 over several targets."""

    studies: list[str]
    """Output folders of `pipelines.pseudo_label`."""


def command(arguments: Sequence[str]) -> None:
    """Runs the command line; exits with 2 on an error that a user can fix."""
    with exit_with_error():
        print_help([TableOne], arguments)
        config = validate(TableOne, read_tree([TableOne], arguments))
        print_config([config], arguments)
        sys.stdout.write(combine_studies(config.studies) + "\n")


if __name__ == "__main__":
    command(sys.argv[1:])
