"""WikiQA (Yang, Yih and Meek 2015): Bing questions, sentences of Wikipedia introductions.

Knows the release's seven tab columns and its copy on the hub. Must not know any other corpus.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from as2ray.corpora.corpus import HUB, Corpus, PublishedCounts, Source
from as2ray.corpora.reader_utils import assign_candidate_ids, parse_labels
from as2ray.tables import raw_files
from as2ray.tables.schema import TableCounts, split_by_question

COLUMNS: Final = [
    "QuestionID",
    "Question",
    "DocumentID",
    "DocumentTitle",
    "SentenceID",
    "Sentence",
    "Label",
]
HUB_DATASET: Final = "microsoft/wiki_qa"
HUB_COLUMNS: Final = {
    "QuestionID": "question_id",
    "Question": "question",
    "DocumentTitle": "document_title",
    "Sentence": "answer",
    "Label": "label",
}

FILES: Final = {split: (f"WikiQA-{split}.tsv",) for split in ("train", "dev", "test")}

# TANDA, Table 2, except that it prints 121 questions for dev clean where the pairs are 122's.
PUBLISHED_COUNTS: Final = tuple(
    PublishedCounts(split, filter, TableCounts(*numbers))
    for split, filter, *numbers in [
        ("train", "raw", 2118, 20360, 1040),
        ("train", "no_all_negative", 873, 8672, 1040),
        ("train", "clean", 857, 8651, 1019),
        ("dev", "raw", 296, 2733, 140),
        ("dev", "no_all_negative", 126, 1130, 140),
        ("dev", "clean", 122, 1126, 136),
        ("test", "raw", 633, 6165, 293),
        ("test", "no_all_negative", 243, 2351, 293),
        ("test", "clean", 237, 2341, 283),
    ]
)


def read_tables(split: str, source: Source) -> Iterator[pa.Table]:
    """The split from `WikiQA-<split>.tsv` or from the hub's `microsoft/wiki_qa`."""
    if source == HUB:
        name = "validation" if split == "dev" else split
        yield from from_hub_rows(raw_files.read_hub(HUB_DATASET, name))
        return
    path = raw_files.require_file(Path(source), FILES[split])
    yield from _build_tables(raw_files.read_tsv(path, COLUMNS, has_header=True), str(path))


def from_hub_rows(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Candidates from tables with the columns of the hub's copy."""
    back = {hub: ours for ours, hub in HUB_COLUMNS.items()}
    kept = (t.select(list(back)).rename_columns(list(back.values())) for t in tables)
    yield from _build_tables(kept, HUB_DATASET)


def _build_tables(raw_tables: Iterable[pa.Table], source: str) -> Iterator[pa.Table]:
    tables = (
        pa.table(
            {
                "question_id": t["QuestionID"],
                "question": t["Question"],
                "candidate": t["Sentence"],
                "label": parse_labels(t, "Label", {"0": 0, "1": 1}, source),
                "document_id": t[
                    "DocumentID" if "DocumentID" in t.column_names else "DocumentTitle"
                ],
            }
        )
        for t in raw_tables
    )
    yield from map(assign_candidate_ids, split_by_question(tables))


CORPUS: Final = Corpus(
    name="wikiqa",
    description="Questions of Bing's log; the sentences of a Wikipedia introduction, labelled by hand",
    license="Microsoft Research Data License (research only)",
    files=FILES,
    reader=read_tables,
    published_counts=PUBLISHED_COUNTS,
    hub=HUB_DATASET,
)
"""The corpus as the registry holds it."""
