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
from collections.abc import Mapping
from dataclasses import asdict, field
from dataclasses import dataclass as stage_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pydantic import ConfigDict, NonNegativeInt, model_validator
from pydantic.dataclasses import dataclass

from as2ray.corpora.asnq import GRADE_COUNTS
from as2ray.corpora.natural_questions import ASNQ_OPTIONS
from as2ray.corpora.record_conversion import (
    ConvertAll,
    Quarantine,
    convert_in_process,
    with_quarantine,
)
from as2ray.corpora.registry import get_corpus
from as2ray.errors import CorpusError
from as2ray.evaluation.report import markdown_table
from as2ray.experiments.command import Pipeline
from as2ray.experiments.experiment import Experiment, Finished
from as2ray.experiments.recipe import TableSpec
from as2ray.experiments.stage import NOT_IDENTITY, Outputs, Result, Stage, StageContext
from as2ray.experiments.tables import PreparedTable, prepared_table
from as2ray.progress import RESULT
from as2ray.tables.filters import QuestionFilter

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


@stage_dataclass(frozen=True, eq=False)
class BuiltCorpus(PreparedTable):
    """A corpus of graded candidates, as Parquet files."""

    RESOURCES = "data"

    max_bad_records: int = field(default=0, metadata=NOT_IDENTITY)

    def check(self, results: Mapping[Stage, Result]) -> None:
        """Refuses a corpus that already consists of candidates."""
        with_quarantine(get_corpus(self.spec.corpus), Quarantine())

    def run(self, context: StageContext) -> Outputs:
        """Converts the records, with workers in `num_data_cpus` tasks of Ray."""
        quarantine = Quarantine(self.max_bad_records)
        convert_all: ConvertAll = convert_in_process
        if context.workers.num_workers:
            from as2ray.distributed.build import convert_on_ray

            convert_all = convert_on_ray(context.workers.num_data_cpus)
        corpus = with_quarantine(get_corpus(self.spec.corpus), quarantine, convert_all)
        outputs = self.prepare(context, corpus)
        quarantine.write(context.output / "quarantine.jsonl")
        grades = _count_grades(context.output)
        return {**outputs, "grades": grades, "bad": len(quarantine.rejected)}


def build(recipe: Recipe, data_dirs: Mapping[str, str]) -> Experiment:
    """Returns the graph, which is one stage."""
    spec = TableSpec(recipe.corpus, recipe.split, recipe.question_filter, recipe.resolved())
    data_dir = prepared_table(spec, data_dirs).data_dir
    stage = BuiltCorpus(spec, data_dir=data_dir, max_bad_records=recipe.max_bad_records)
    experiment = Experiment()
    experiment.add(f"{recipe.corpus}-{recipe.split}", stage)
    return experiment


def report(recipe: Recipe, finished: Finished) -> None:
    """Writes the counts by grade beside those of ASNQ (TANDA, Table 1).

    Raises:
        CorpusError: The store has the corpus from a run that allowed more bad records.
    """
    name = f"{recipe.corpus}-{recipe.split}"
    for stage in finished.named(name).values():
        if (num_bad := finished.outputs(stage)["bad"]) > recipe.max_bad_records:
            raise CorpusError(
                f"{name} was built without {num_bad:,} bad records, which are in its "
                f"quarantine.jsonl, but max_bad_records={recipe.max_bad_records}",
                fix=f"allow them with --max_bad_records {num_bad}, or correct them in the release",
            )
        splitter = stage.identity({})["sentence_splitter"]
        text = format_counts(recipe, splitter, finished.outputs(stage))
        finished.write(f"{name}.md", text)
        log.info("\n%s", text, extra=RESULT)


def format_counts(recipe: Recipe, sentence_splitter: str, outputs: Outputs) -> str:
    """Compares the counts by grade with ASNQ's, as Markdown.

    Args:
        recipe: The corpus that was built.
        sentence_splitter: Name and version.
        outputs: What its stage reported.
    """
    counts = outputs["counts"]
    split = recipe.split if recipe.split in NUM_QUESTIONS else "train"
    asnq_counts = GRADE_COUNTS["train" if split == "train" else "dev-all"]
    rows = []
    for grade, (description, asnq_count) in enumerate(zip(GRADE_DESCRIPTIONS, asnq_counts), 1):
        count = outputs["grades"][str(grade)]
        mean, asnq_mean = count / max(1, counts["num_questions"]), asnq_count / NUM_QUESTIONS[split]
        numbers = (f"{count:,}", f"{mean:.2f}", f"{asnq_count:,}", f"{asnq_mean:.2f}")
        rows.append((str(grade), description, *numbers))
    columns = ("grade", "sentences", "here", "per question", "ASNQ", "per question")
    return (
        f"# {recipe.corpus}, {recipe.split}\n\n"
        f"{counts['num_questions']:,} questions, {counts['num_pairs']:,} pairs, "
        f"{counts['num_positives']:,} positives; {outputs['bad']:,} bad records left out; "
        f"fingerprint {outputs['fingerprint']}.\n"
        f"Options: {json.dumps(recipe.resolved())}; sentence splitter {sentence_splitter}; filter "
        f"{recipe.question_filter}. ASNQ's {split} split has {NUM_QUESTIONS[split]:,} questions."
        f"\n\n{markdown_table(columns, rows)}"
    )


def _count_grades(folder: Path) -> dict[str, int]:
    """Counts the rows of each grade in the Parquet files of a folder."""
    rows = np.zeros(5, np.int64)
    for path in folder.glob("*.parquet"):
        grade = pq.read_table(path, columns=["grade"])["grade"].to_numpy()
        rows += np.bincount(grade, minlength=5)
    return {str(grade): int(rows[grade]) for grade in range(1, 5)}


PIPELINE = Pipeline(Recipe, build, report)

if __name__ == "__main__":
    PIPELINE.command()
