"""QNLI (GLUE): one SQuAD question and one sentence a row; entailment means it answers.

Knows GLUE's four tab columns and the copy on the hub. Must not know any other corpus. The dev
split is made from SQuAD's: never train on one and test on the other.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from as2ray.corpora import files
from as2ray.corpora.base import HUB, Corpus, Item, Source
from as2ray.corpora.tables import gathered, labels, number

ON_HUB: Final = "nyu-mll/glue"
COLUMNS: Final = ["index", "question", "sentence", "label"]
MEANING: Final = {"entailment": 1, "not_entailment": 0}
HUB_MEANING: Final = {"0": 1, "1": 0}
FILES: Final = {"train": ("train.tsv",), "dev": ("dev.tsv",)}
PAIRS: Final = {"train": 104_743, "dev": 5_463}


def reader(split: str, source: Source) -> Iterator[pa.Table]:
    """The split with the rows of one question text gathered; ids count questions from 0."""
    if source == HUB:
        name = "validation" if split == "dev" else split
        yield from from_hub_rows(files.hub(ON_HUB, name, config="qnli"))
        return
    path = files.locate(Path(source), FILES[split])
    yield from _candidates(files.tsv(path, COLUMNS, header=True), MEANING, str(path))


def from_hub_rows(rows: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Candidates from tables with the columns of the hub's copy (label 0 = entailment)."""
    yield from _candidates(rows, HUB_MEANING, ON_HUB)


def inventory(source: Path) -> Iterator[Item]:
    """The pairs of each file."""
    for split, published in PAIRS.items():
        if path := files.present(source, FILES[split]):
            found = sum(t.num_rows for t in files.tsv(path, COLUMNS, header=True))
            yield Item(split, "pairs", published, found)


def _candidates(
    rows: Iterable[pa.Table], meaning: dict[str, int], source: str
) -> Iterator[pa.Table]:
    tables = [
        pa.table(
            {
                "question": t["question"],
                "candidate": t["sentence"],
                "label": labels(t, "label", meaning, source),
            }
        )
        for t in rows
    ]
    if tables:
        yield from number([gathered(pa.concat_tables(tables))])


CORPUS: Final = Corpus(
    name="qnli",
    about="SQuAD questions, each with single sentences of its paragraph",
    licence="CC BY-SA 4.0",
    files=FILES,
    reader=reader,
    inventory=inventory,
    hub=ON_HUB,
)
"""The corpus as the registry holds it."""
