"""QNLI (GLUE): one SQuAD question and one sentence a row; entailment means it answers.

Knows GLUE's four tab columns and the copy on the hub. Must not know any other corpus. The dev
split is made from SQuAD's: never train on one and test on the other.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from as2ray.corpora.corpus import HUB, Corpus, ReleaseCount, Source
from as2ray.corpora.reader_utils import assign_question_ids, group_adjacent, parse_labels
from as2ray.tables import raw_files

HUB_DATASET: Final = "nyu-mll/glue"
COLUMNS: Final = ["index", "question", "sentence", "label"]
LABEL_VALUES: Final = {"entailment": 1, "not_entailment": 0}
HUB_LABEL_VALUES: Final = {"0": 1, "1": 0}
FILES: Final = {"train": ("train.tsv",), "dev": ("dev.tsv",)}
PAIR_COUNTS: Final = {"train": 104_743, "dev": 5_463}


def read_tables(split: str, source: Source) -> Iterator[pa.Table]:
    """The split with the rows of one question text gathered; ids count questions from 0."""
    if source == HUB:
        name = "validation" if split == "dev" else split
        yield from from_hub_rows(raw_files.read_hub(HUB_DATASET, name, config="qnli"))
        return
    path = raw_files.require_file(Path(source), FILES[split])
    yield from _build_tables(
        raw_files.read_tsv(path, COLUMNS, has_header=True), LABEL_VALUES, str(path)
    )


def from_hub_rows(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Candidates from tables with the columns of the hub's copy (label 0 = entailment)."""
    yield from _build_tables(tables, HUB_LABEL_VALUES, HUB_DATASET)


def count_release(source: Path) -> Iterator[ReleaseCount]:
    """The pairs of each file."""
    for split, published in PAIR_COUNTS.items():
        if path := raw_files.find_file(source, FILES[split]):
            found = sum(t.num_rows for t in raw_files.read_tsv(path, COLUMNS, has_header=True))
            yield ReleaseCount(split, "pairs", published, found)


def _build_tables(
    raw_tables: Iterable[pa.Table], label_values: dict[str, int], source: str
) -> Iterator[pa.Table]:
    tables = [
        pa.table(
            {
                "question": t["question"],
                "candidate": t["sentence"],
                "label": parse_labels(t, "label", label_values, source),
            }
        )
        for t in raw_tables
    ]
    if tables:
        yield from assign_question_ids([group_adjacent(pa.concat_tables(tables))])


CORPUS: Final = Corpus(
    name="qnli",
    description="SQuAD questions, each with single sentences of its paragraph",
    license="CC BY-SA 4.0",
    files=FILES,
    reader=read_tables,
    count_release=count_release,
    hub=HUB_DATASET,
)
"""The corpus as the registry holds it."""
