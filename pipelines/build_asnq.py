"""A corpus of answer sentences out of pages with marked answers, as ASNQ was made.

    python -m pipelines.build_asnq --corpus nq --split train --output DIR --workers.data_cpus 32
    python -m pipelines.build_asnq --corpus squad --split dev --output DIR --workers.count 0

Records are read, cut into sentences and graded by tasks of the cluster (with `--workers.count 0`
in this process), and written in their order: the corpus is the same either way. Bad records are
set aside in `quarantine.jsonl`, up to a limit. The report holds the counts by grade beside those
that TANDA's Table 1 prints for ASNQ.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from as2ray.corpora.asnq import GRADE_COUNTS
from as2ray.corpora.natural_questions import ASNQ_OPTIONS
from as2ray.corpora.preparation import prepare_splits
from as2ray.corpora.record_conversion import Quarantine, convert_in_process, with_quarantine
from as2ray.corpora.registry import get_corpus
from as2ray.distributed.build import convert_on_ray
from as2ray.distributed.plan import WorkersConfig
from as2ray.errors import ConfigError
from as2ray.experiments.stage import manifest, stage
from as2ray.tables.filters import QuestionFilter
from as2ray.text.sentences import versioned_name
from pipelines.recipe import command

log = logging.getLogger(__name__)

QUESTIONS = {"train": 57_242, "dev": 2_672}
"""Of ASNQ's splits."""

MEANING = (
    "outside the long answer, without the short",
    "outside, with its words",
    "in the long answer, without the short",
    "in the long answer, with the short",
)
"""Of grades 1 to 4."""


@dataclass(frozen=True)
class Recipe:
    """What to build."""

    corpus: str = "nq"
    """A corpus of pages with marked answers."""
    split: str = "train"
    """One of its splits."""
    corpus_options: dict[str, Any] = field(default_factory=dict)
    """The corpus' own options."""
    asnq_compatible: bool = False
    """Cut Natural Questions' pages as ASNQ's were: joined flat, whatever the block tags."""
    question_filter: QuestionFilter = "raw"
    """Questions that are kept: `raw`, `no_all_negative` or `clean`."""
    max_bad_records: int = 0
    """Most bad records that may be left out."""

    def __post_init__(self) -> None:
        if self.max_bad_records < 0 or (self.asnq_compatible and self.corpus != "nq"):
            raise ConfigError(
                f"bad={self.max_bad_records}, compatible={self.asnq_compatible} for corpus {self.corpus!r}"
                "; expected bad >= 0; compatible for nq alone",
            )

    def resolved(self) -> dict[str, Any]:
        """All options of the corpus."""
        near = ASNQ_OPTIONS if self.asnq_compatible else {}
        return get_corpus(self.corpus).resolve({**near, **self.corpus_options})


def run(
    recipe: Recipe,
    output: str | Path,
    workers: WorkersConfig,
    data_dirs: Mapping[str, str] | None = None,
) -> Path:
    """Builds the corpus unless it is there, and writes the report; the folder of its Parquet files.

    Args:
        recipe: What to build.
        output: Folder of the stages.
        workers: Of the cluster; the tasks take `data_cpus`, or this process does it all.
        sources: For the corpus its folder or file; by default its place in AS2RAY_DATA.

    Raises:
        CorpusError: A corpus that is candidates already, or more bad records than allowed.
    """
    folder, options = Path(output).resolve(), recipe.resolved()
    quarantine = Quarantine(recipe.max_bad_records)
    how = convert_on_ray(workers.num_data_cpus) if workers.num_workers else convert_in_process
    corpus = with_quarantine(get_corpus(recipe.corpus), quarantine, how)
    source = (data_dirs or {}).get(recipe.corpus)
    name = f"{recipe.corpus}-{recipe.split}"
    identity = {
        "corpus": recipe.corpus,
        "split": recipe.split,
        "options": options,
        "splitter": versioned_name(options["splitter"]),
        "filter": recipe.question_filter,
    }

    def make(part: Path) -> Mapping[str, Any]:
        shutil.rmtree(part / "release", ignore_errors=True)
        wanted = {recipe.split: recipe.question_filter}
        found = prepare_splits(corpus, source, part / "release", wanted, **options)
        for path in sorted((part / "release" / recipe.split).glob("*.parquet")):
            path.rename(part / path.name)
        shutil.rmtree(part / "release")
        quarantine.write(part / "quarantine.jsonl")
        entry = found["splits"][recipe.split]
        return {**entry, "grades": _grades(part), "bad": len(quarantine.rejected)}

    made = stage(folder / name, identity, make)
    text = report(recipe, manifest(made))
    (folder / f"{name}.md").write_text(text)
    log.info("\n%s", text)
    return made


def report(recipe: Recipe, made: Mapping[str, Any]) -> str:
    """The counts by grade beside ASNQ's (TANDA, Table 1), as Markdown.

    Args:
        recipe: What was built.
        made: The manifest of the stage.
    """
    found, counts = made["found"], made["found"]["counts"]
    split = recipe.split if recipe.split in QUESTIONS else "train"
    published = GRADE_COUNTS["train" if split == "train" else "dev-all"]
    lines = [
        f"# {recipe.corpus}, {recipe.split}",
        "",
        f"{counts['questions']:,} questions, {counts['pairs']:,} pairs, {counts['positives']:,} "
        f"positives; {found['bad']:,} bad records left out; fingerprint {found['fingerprint']}.",
        f"Options: {json.dumps(made['identity']['options'])}; splitter "
        f"{made['identity']['splitter']}; filter {recipe.question_filter}. ASNQ's {split} split has "
        f"{QUESTIONS[split]:,} questions.",
        "",
        "| grade | sentences | here | a question | ASNQ | a question |",
        "|---|---|---|---|---|---|",
    ]
    for grade, (meaning, theirs) in enumerate(zip(MEANING, published), 1):
        ours = found["grades"][str(grade)]
        lines.append(
            f"| {grade} | {meaning} | {ours:,} | {ours / max(1, counts['questions']):.2f} "
            f"| {theirs:,} | {theirs / QUESTIONS[split]:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _grades(folder: Path) -> dict[str, int]:
    """Rows of each grade in the Parquet files of a folder."""
    rows = np.zeros(5, np.int64)
    for path in folder.glob("*.parquet"):
        grade = pq.read_table(path, columns=["grade"])["grade"].to_numpy()
        rows += np.bincount(grade, minlength=5)
    return {str(grade): int(rows[grade]) for grade in range(1, 5)}


def main() -> None:
    """The command line."""
    command(Recipe, run)


if __name__ == "__main__":
    main()
