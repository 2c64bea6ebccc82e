"""Pairs with WikiQA's texts for benchmarks; made-up ones for small runs."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa

from as2ray.corpora.preparation import read_split
from as2ray.tables.parquet import ParquetTable
from as2ray.tables.raw_files import RawFileNotFoundError
from as2ray.tables.schema import question_offsets
from benchmarks import asnq_shaped


def load_wikiqa_table(data_root: Path, small: bool) -> pa.Table:
    """Loads WikiQA's test split; a small run, or one without the release, has made-up words."""
    if not small:
        try:
            return read_split("wikiqa", "test", data_root / "wikiqa")
        except RawFileNotFoundError:
            sys.stderr.write("WikiQA is not under --data, so the texts are made up\n")
    with TemporaryDirectory() as folder:
        return ParquetTable.open(
            asnq_shaped.write_corpus(Path(folder) / "made-up", 4_000, None)
        ).to_table()


def sample_candidates(table: pa.Table, num_questions: int, num_candidates: int) -> pa.Table:
    """Returns questions of a table, each with as many candidates from the whole table.

    Args:
        table: A candidates table.
        num_questions: Number of questions, spread evenly over the table.
        num_candidates: Candidates of each, sampled with seed 0.
    """
    starts = question_offsets(table["question_id"])
    chosen = starts[np.linspace(0, len(starts) - 1, num_questions).astype(int)]
    generator = np.random.default_rng(0)
    rows = [generator.choice(table.num_rows, num_candidates, replace=False) for _ in chosen]
    candidates = table.take(pa.array(np.concatenate(rows)))
    questions = table.take(pa.array(np.repeat(chosen, num_candidates)))
    for name in ("question_id", "question"):
        candidates = candidates.set_column(
            candidates.column_names.index(name), name, questions[name]
        )
    return candidates
