"""QNLI (GLUE): one SQuAD question and one sentence per row; entailment means that it answers.

The dev split is made from SQuAD's dev split: do not train on one and test on the other.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from as2ray.corpora.corpus import HUB, Corpus, CorpusOptions, ReleaseCount, Source
from as2ray.corpora.reader_utils import assign_question_ids, group_adjacent, select_columns
from as2ray.tables import raw_files

HUB_DATASET: Final = "nyu-mll/glue"
COLUMNS: Final = ["index", "question", "sentence", "label"]
CANDIDATE_COLUMNS: Final = {"question": "question", "candidate": "sentence", "label": "label"}
LABEL_VALUES: Final = {"entailment": 1, "not_entailment": 0}
HUB_LABEL_VALUES: Final = {"0": 1, "1": 0}
FILES: Final = {"train": ("train.tsv",), "dev": ("dev.tsv",)}
PAIR_COUNTS: Final = {"train": 104_743, "dev": 5_463}


def read_tables(split: str, source: Source, options: CorpusOptions) -> Iterator[pa.Table]:
    """Reads a split, rows of the same question grouped; ids count the questions from 0."""
    if source == HUB:
        hub_split = "validation" if split == "dev" else split
        tables = raw_files.read_hub(HUB_DATASET, hub_split, "qnli", options.hub_revision)
        return from_hub_rows(tables)
    path = raw_files.require_file(Path(source), FILES[split])
    rows = raw_files.read_tsv(path, COLUMNS, has_header=True)
    return _build_tables(rows, LABEL_VALUES, str(path))


def from_hub_rows(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Converts tables with the columns of the hub's copy (label 0 is entailment)."""
    return _build_tables(tables, HUB_LABEL_VALUES, HUB_DATASET)


def count_release(source: Path) -> Iterator[ReleaseCount]:
    """Counts the pairs of each file."""
    for split, published in PAIR_COUNTS.items():
        if path := raw_files.find_file(source, FILES[split]):
            tables = raw_files.read_tsv(path, COLUMNS, has_header=True)
            yield ReleaseCount(split, "pairs", published, sum(t.num_rows for t in tables))


def _build_tables(
    raw_tables: Iterable[pa.Table], label_values: dict[str, int], source: str
) -> Iterator[pa.Table]:
    tables = [select_columns(t, CANDIDATE_COLUMNS, label_values, source) for t in raw_tables]
    if tables:
        yield from assign_question_ids([group_adjacent(pa.concat_tables(tables))], source)


CORPUS: Final = Corpus(
    name="qnli",
    description="SQuAD questions, each with single sentences of its paragraph",
    license="CC BY-SA 4.0",
    urls=("https://dl.fbaipublicfiles.com/glue/data/QNLIv2.zip",),
    files=FILES,
    reader=read_tables,
    count_release=count_release,
    hub=HUB_DATASET,
)
