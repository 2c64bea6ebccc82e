"""Stages of pseudo-labels: questions that BM25 labels, and their split."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from as2ray.corpora.leaks import remove_leaks
from as2ray.errors import ConfigError
from as2ray.experiments.indexes import open_index
from as2ray.experiments.queries import QUERIES_PER_TASK, map_queries, read_queries
from as2ray.experiments.stage import Outputs, Stage, StageContext
from as2ray.experiments.store import Store
from as2ray.experiments.tables import read_table, write_table
from as2ray.retrieval.pseudo_labels import (
    PseudoLabelConfig,
    PseudoLabelResult,
    Query,
    label_queries,
    merge_pseudo_labels,
)
from as2ray.tables.schema import batched, count_table

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LabelledTable(Stage):
    """A candidates table of questions that BM25 labels."""

    RESOURCES = "pool"

    index: Stage
    queries: Stage
    """A table, or stored questions (`write_queries`)."""
    config: PseudoLabelConfig
    min_questions: int = 1
    """Minimum number of labelled questions; 2 if the table is split."""
    held_out: Stage | None = None
    """A table whose questions are left out, because it judges what the others train."""

    def run(self, context: StageContext) -> Outputs:
        """Labels the questions.

        Raises:
            CorpusError: No question has a positive and a negative.
            ConfigError: Fewer than `min_questions` have both.
        """
        queries = read_queries(context.path(self.queries))
        label = partial(_label_queries, context.store, context.path(self.index), self.config)
        groups = list(batched(queries, QUERIES_PER_TASK))
        labelled = merge_pseudo_labels(list(map_queries(context, label, groups)))
        rows, left_out = labelled.table, dict(labelled.skipped)
        if self.held_out is not None:
            rows = remove_leaks(rows, read_table(context.path(self.held_out)))
            num_leaked = count_table(labelled.table).num_questions - count_table(rows).num_questions
            left_out |= {"held out": num_leaked} if num_leaked else {}
        counts = count_table(rows)
        log.info("pseudo-labels: %s, left out %s", counts, left_out or "nothing")
        if (number := counts.num_questions) < self.min_questions:
            problem = f"{number} questions that BM25 can label of {len(queries)}"
            raise too_few_questions(f"{problem}, left out {left_out}")
        return {**write_table(rows, context.output), "left_out": left_out}


def _label_queries(
    store: Store, index: Path, config: PseudoLabelConfig, queries: Sequence[Query]
) -> PseudoLabelResult:
    return label_queries(open_index(store, index), queries, config)


def too_few_questions(problem: str) -> ConfigError:
    """Returns the error of a table that cannot be split."""
    return ConfigError(
        f"{problem}; at least two are needed, one to train on and one to select the checkpoint",
        fix="give a file of questions, or more documents",
    )


@dataclass(frozen=True, eq=False)
class SplitTable(Stage):
    """One part of the questions of a table that has at least two; neither part is empty."""

    table: Stage
    part: Literal["train", "dev"]
    share: int
    """About one of this number of questions goes to dev. It is chosen by a hash of the text, so it
    does not depend on the other questions."""

    def run(self, context: StageContext) -> Outputs:
        """Writes the rows of the part's questions."""
        ids: dict[str, list[str]] = {"train": [], "dev": []}
        for query in read_queries(context.path(self.table)):
            number = int.from_bytes(hashlib.sha256(query.text.encode()).digest()[:4])
            ids["dev" if number % self.share == 0 else "train"].append(query.id)
        for part, other in (("train", "dev"), ("dev", "train")):
            if not ids[part]:
                ids[part].append(ids[other].pop())
        rows = read_table(context.path(self.table))
        is_kept = pc.is_in(rows["question_id"], value_set=pa.array(ids[self.part]))
        return write_table(rows.filter(is_kept), context.output)
