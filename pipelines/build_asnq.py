"""Builds a corpus of answer sentences from pages with marked answers, as ASNQ was built.

    python -m pipelines.build_asnq --corpus nq --split train --output DIR --workers.num_data_cpus 32
    python -m pipelines.build_asnq --corpus squad --split dev --output DIR --workers.num_workers 0

Ray tasks (with `--workers.num_workers 0` this process) read records, split them into sentences and
grade these. The corpus does not depend on their number. Rejected records are written to
`quarantine.jsonl`, up to a limit. The report compares the counts of each grade with those of ASNQ
in TANDA, Table 1.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pydantic import ConfigDict, NonNegativeInt, model_validator
from pydantic.dataclasses import dataclass

from as2ray.corpora.asnq import GRADE_COUNTS
from as2ray.corpora.natural_questions import ASNQ_OPTIONS
from as2ray.corpora.preparation import prepare_splits
from as2ray.corpora.record_conversion import Quarantine, convert_in_process, with_quarantine
from as2ray.corpora.registry import get_corpus
from as2ray.distributed.build import convert_on_ray
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.experiments.stage import manifest, stage
from as2ray.tables.filters import QuestionFilter
from as2ray.text.sentences import versioned_name
from pipelines.recipe import command

log = logging.getLogger(__name__)

NUM_QUESTIONS = {"train": 57_242, "dev": 2_672}
"""Questions of ASNQ's splits."""

GRADE_DESCRIPTIONS = (
    "outside the long answer, without the short",
    "outside, with its words",
    "in the long answer, without the short",
    "in the long answer, with the short",
)
"""Of grades 1 to 4."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Recipe:
    """Builds a corpus of answer sentences from pages with marked answers."""

    corpus: str = "nq"
    """A corpus of pages with marked answers."""
    split: str = "train"
    """One of its splits."""
    corpus_options: dict[str, Any] = field(default_factory=dict)
    """Options of the corpus."""
    asnq_compatible: bool = False
    """Split Natural Questions' pages as ASNQ's were: as flat text, whatever the block tags."""
    question_filter: QuestionFilter = "raw"
    """Questions to keep: `raw`, `no_all_negative` or `clean`."""
    max_bad_records: NonNegativeInt = 0
    """Maximum number of rejected records."""

    @model_validator(mode="after")
    def _check_corpus(self) -> "Recipe":
        if self.asnq_compatible and self.corpus != "nq":
            raise ValueError(
                f"asnq_compatible is an option for corpus 'nq', not for {self.corpus!r}"
            )
        return self

    def resolved(self) -> dict[str, Any]:
        """Returns all options of the corpus.

        Raises:
            ConfigError: The corpus has no such option, or its conversion has no options.
        """
        asnq_options = ASNQ_OPTIONS if self.asnq_compatible else {}
        options = {**asnq_options, **self.corpus_options}
        return asdict(get_corpus(self.corpus).parse_options(options))


def run(
    recipe: Recipe,
    output: str | Path,
    workers: WorkersConfig,
    data_dirs: Mapping[str, str] | None = None,
) -> Path:
    """Builds the corpus unless it exists, and writes the report.

    Args:
        recipe: The corpus to build.
        output: Folder of the stages.
        workers: Part of the cluster to use: its `num_data_cpus`. Without workers, this process.
        data_dirs: Folder or file of the corpus; by default its folder in AS2RAY_DATA.

    Returns:
        The folder of the Parquet files.

    Raises:
        CorpusError: The corpus already consists of candidates, or too many records are rejected.
    """
    folder, options = Path(output).resolve(), recipe.resolved()
    quarantine = Quarantine(recipe.max_bad_records)
    convert_all = (
        convert_on_ray(workers.num_data_cpus) if workers.num_workers else convert_in_process
    )
    corpus = with_quarantine(get_corpus(recipe.corpus), quarantine, convert_all)
    source = (data_dirs or {}).get(recipe.corpus)
    name = f"{recipe.corpus}-{recipe.split}"
    inputs = {
        "corpus": recipe.corpus,
        "split": recipe.split,
        "corpus_options": options,
        "sentence_splitter": versioned_name(options["sentence_splitter"]),
        "question_filter": recipe.question_filter,
    }

    def make(part: Path) -> Mapping[str, Any]:
        shutil.rmtree(part / "release", ignore_errors=True)
        splits = {recipe.split: recipe.question_filter}
        release = prepare_splits(corpus, source, part / "release", splits, **options)
        for path in sorted((part / "release" / recipe.split).glob("*.parquet")):
            path.rename(part / path.name)
        shutil.rmtree(part / "release")
        quarantine.write(part / "quarantine.jsonl")
        entry = release["splits"][recipe.split]
        return {**entry, "grades": _grades(part), "bad": len(quarantine.rejected)}

    path = stage(folder / name, inputs, make)
    text = report(recipe, manifest(path))
    (folder / f"{name}.md").write_text(text)
    log.info("\n%s", text)
    return path


def report(recipe: Recipe, entries: Mapping[str, Any]) -> str:
    """Compares the counts by grade with ASNQ's (TANDA, Table 1), as Markdown.

    Args:
        recipe: The corpus that was built.
        entries: The manifest of its stage.
    """
    inputs, outputs = entries["inputs"], entries["outputs"]
    counts = outputs["counts"]
    split = recipe.split if recipe.split in NUM_QUESTIONS else "train"
    asnq_counts = GRADE_COUNTS["train" if split == "train" else "dev-all"]
    lines = [
        f"# {recipe.corpus}, {recipe.split}",
        "",
        f"{counts['num_questions']:,} questions, {counts['num_pairs']:,} pairs, "
        f"{counts['num_positives']:,} positives; {outputs['bad']:,} bad records left out; "
        f"fingerprint {outputs['fingerprint']}.",
        f"Options: {json.dumps(inputs['corpus_options'])}; sentence splitter "
        f"{inputs['sentence_splitter']}; filter {recipe.question_filter}. ASNQ's {split} split has "
        f"{NUM_QUESTIONS[split]:,} questions.",
        "",
        "| grade | sentences | here | per question | ASNQ | per question |",
        "|---|---|---|---|---|---|",
    ]
    for grade, (description, asnq_count) in enumerate(zip(GRADE_DESCRIPTIONS, asnq_counts), 1):
        count = outputs["grades"][str(grade)]
        lines.append(
            f"| {grade} | {description} | {count:,} "
            f"| {count / max(1, counts['num_questions']):.2f} "
            f"| {asnq_count:,} | {asnq_count / NUM_QUESTIONS[split]:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _grades(folder: Path) -> dict[str, int]:
    """Counts the rows of each grade in the Parquet files of a folder."""
    rows = np.zeros(5, np.int64)
    for path in folder.glob("*.parquet"):
        grade = pq.read_table(path, columns=["grade"])["grade"].to_numpy()
        rows += np.bincount(grade, minlength=5)
    return {str(grade): int(rows[grade]) for grade in range(1, 5)}


def main() -> None:
    """Runs the command line."""
    command(Recipe, run)


if __name__ == "__main__":
    main()
