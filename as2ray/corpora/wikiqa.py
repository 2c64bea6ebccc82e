"""WikiQA (Yang, Yih and Meek 2015): Bing questions, sentences of Wikipedia introductions."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from as2ray.corpora.corpus import HUB, Corpus, CorpusOptions, PublishedCounts, Source
from as2ray.corpora.reader_utils import assign_candidate_ids, select_columns
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
CANDIDATE_COLUMNS: Final = {
    "question_id": "QuestionID",
    "question": "Question",
    "candidate": "Sentence",
    "label": "Label",
    "document_id": "DocumentID",
}
HUB_DATASET: Final = "microsoft/wiki_qa"
HUB_COLUMNS: Final = {
    "question_id": "question_id",
    "question": "question",
    "candidate": "answer",
    "label": "label",
    "document_id": "document_title",
}
"""Columns of the hub's copy, by those of the candidates table."""

FILES: Final = {split: (f"WikiQA-{split}.tsv",) for split in ("train", "dev", "test")}

# TANDA, Table 2. It prints 121 questions for dev clean, but its number of pairs is that of 122.
PUBLISHED_COUNTS: Final = tuple(
    PublishedCounts(split, question_filter, TableCounts(*counts))
    for split, question_filter, *counts in [
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


def read_tables(split: str, source: Source, options: CorpusOptions) -> Iterator[pa.Table]:
    """Reads a split from `WikiQA-<split>.tsv` or from the hub's `microsoft/wiki_qa`."""
    if source == HUB:
        hub_split = "validation" if split == "dev" else split
        revision = options.hub_revision
        return from_hub_rows(raw_files.read_hub(HUB_DATASET, hub_split, revision=revision))
    path = raw_files.require_file(Path(source), FILES[split])
    rows = raw_files.read_tsv(path, COLUMNS, has_header=True)
    return _build_tables(rows, CANDIDATE_COLUMNS, str(path))


def from_hub_rows(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Converts tables with the columns of the hub's copy."""
    return _build_tables(tables, HUB_COLUMNS, HUB_DATASET)


def _build_tables(
    raw_tables: Iterable[pa.Table], columns: dict[str, str], source: str
) -> Iterator[pa.Table]:
    tables = (select_columns(t, columns, {"0": 0, "1": 1}, source) for t in raw_tables)
    return map(assign_candidate_ids, split_by_question(tables))


CORPUS: Final = Corpus(
    name="wikiqa",
    description="Questions of Bing's log; sentences of a Wikipedia introduction, labeled by hand",
    license="Microsoft Research Data License (research only)",
    urls=(
        "https://download.microsoft.com/download/E/5/F/E5FCFCEE-7005-4814-853D-DAA7C66507E0/WikiQACorpus.zip",
    ),
    files=FILES,
    reader=read_tables,
    published_counts=PUBLISHED_COUNTS,
    hub=HUB_DATASET,
)
