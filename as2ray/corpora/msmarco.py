"""MS MARCO passages and documents (Bajaj et al. 2016): collection, queries, judgements, runs.

A query's candidates are the first 100 of a run (BM25's), as Mokrii et al. rerank them; training
queries have their relevant passages as well, where the run missed them. Queries without a relevant
passage stay (filter `raw`) or go (`no_all_negative`, as the paper trains). Knows MS MARCO's files
and those of the TREC Deep Learning track of 2019. Must not know any other corpus.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.corpora.corpus import Corpus, ReleaseCount, Source
from as2ray.corpora.passage_collection import (
    COLLECTION_SCHEMA,
    PassageCollection,
    open_collection,
    parse_passage_ids,
)
from as2ray.errors import CorpusError
from as2ray.tables import raw_files
from as2ray.tables.schema import CANDIDATE_SCHEMA

ROWS_PER_TABLE: Final = 4_096
"""Candidates of a table that is handed on, at least."""

MAX_DOCUMENT_CHARACTERS: Final = 10_000
"""Of a document that are kept: 445 tokens, what the paper keeps, are far fewer."""


class SplitFiles(NamedTuple):
    """What a split is read from; for each the names it may have."""

    runs: tuple[str, ...]
    """Candidates: `query passage rank`, TREC's six columns, or `query passage query text`."""
    queries: tuple[str, ...]
    qrels: tuple[str, ...]
    collection: tuple[str, ...]


PASSAGE_FILES: Final = ("collection.tsv",)
DOCUMENT_FILES: Final = ("msmarco-docs.tsv",)

FILES: Final = {
    "train": SplitFiles(
        ("run.train.tsv", "bm25.train.trec"),
        ("queries.train.tsv",),
        ("qrels.train.tsv",),
        PASSAGE_FILES,
    ),
    "dev": SplitFiles(
        ("run.dev.small.tsv", "bm25.dev.trec"),
        ("queries.dev.small.tsv", "queries.dev.tsv"),
        ("qrels.dev.small.tsv", "qrels.dev.tsv"),
        PASSAGE_FILES,
    ),
    "doc-train": SplitFiles(
        ("msmarco-doctrain-top100",),
        ("msmarco-doctrain-queries.tsv",),
        ("msmarco-doctrain-qrels.tsv",),
        DOCUMENT_FILES,
    ),
    "doc-dev": SplitFiles(
        ("msmarco-docdev-top100",),
        ("msmarco-docdev-queries.tsv",),
        ("msmarco-docdev-qrels.tsv",),
        DOCUMENT_FILES,
    ),
}
"""The splits that are put together from four files."""

DL19_FILE: Final = "bm25_top100_dl19.json"
DL19_QRELS: Final = "qrels.dl19-passage.txt"
LISTED_FILES: Final = ("train_sample.jsonl", "train.jsonl")

MIN_RELEVANT_GRADE: Final = {"dl19": 2}
"""Lowest grade that counts as relevant; 1 elsewhere (the track's guidelines, section 5)."""


def read_tables(split: str, source: Source, *, run_depth: int = 100) -> Iterator[pa.Table]:
    """Whole questions, in the run's order.

    Args:
        split: `train` and `dev` are passages, `doc-train` and `doc-dev` documents; `dl19` is the
            track of 2019; `listed` has texts beside each query, one JSON object a line.
        source: The folder.
        depth: Of the run that are candidates.
    """
    if run_depth < 1:
        raise CorpusError(
            f"depth {run_depth}; expected at least 1",
        )
    folder = Path(source)
    if split == "dl19":
        with raw_files.value_errors(str(raw_files.require_file(folder, (DL19_FILE,)))):
            yield from _build_tables(_read_dl19(folder, run_depth), MIN_RELEVANT_GRADE["dl19"])
    elif split == "listed":
        path = raw_files.require_file(folder, LISTED_FILES)
        with raw_files.value_errors(str(path)):
            yield from _build_tables(_read_listed(path), 1)
    else:
        yield from _build_tables(
            _join_files(folder, FILES[split], run_depth, split.endswith("train")), 1
        )


class RawQuestion(NamedTuple):
    """A query with its candidates: id, text and grade of each."""

    id: str
    question: str
    candidates: list[tuple[str, str, int]]


def _build_tables(queries: Iterator[RawQuestion], min_relevant_grade: int) -> Iterator[pa.Table]:
    schema = CANDIDATE_SCHEMA.append(pa.field("grade", pa.int8()))
    rows: list[tuple[Any, ...]] = []
    for asked in queries:
        rows += [
            (
                asked.id,
                asked.question,
                f"{asked.id}-{id}",
                text,
                int(grade >= min_relevant_grade),
                grade,
            )
            for id, text, grade in asked.candidates
            if text.strip()
        ]
        if len(rows) >= ROWS_PER_TABLE:
            yield _build_table(rows, schema)
            rows = []
    if rows:
        yield _build_table(rows, schema)


def _build_table(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    return pa.table([pa.array(c, f.type) for c, f in zip(zip(*rows), schema)], schema=schema)


def _join_files(
    folder: Path, names: SplitFiles, depth: int, is_train: bool
) -> Iterator[RawQuestion]:
    """Run, queries, judgements and collection put together, some queries at a time."""
    paths = [raw_files.require_file(folder, of) for of in names]
    run, texts, judged = paths[0], _read_queries(paths[1]), _read_qrels(paths[2])
    with open_collection(_read_passages(paths[3]), str(paths[3])) as passages:
        asked = groupby(_read_run(run), key=lambda line: line[0])
        while some := [(q, [p for _, p in islice(lines, depth)]) for q, lines in islice(asked, 64)]:
            yield from _attach_texts(some, texts, judged, passages, is_train)


def _attach_texts(
    run_queries: Sequence[tuple[int, list[int]]],
    query_texts: Mapping[int, str],
    qrels: Mapping[int, Mapping[int, int]],
    passages: PassageCollection,
    is_train: bool,
) -> Iterator[RawQuestion]:
    for query, found in run_queries:
        if query not in query_texts:
            raise CorpusError(
                f"query {query} of a run has no text"
                "; expected queries and a run of the same release",
                fix="give the publisher's own files",
            )
        grades = qrels.get(query, {})
        missed = [p for p, grade in grades.items() if grade > 0 and p not in set(found)]
        ids = [*found, *(missed if is_train else [])]
        held = passages.read_texts(np.array(ids, np.int64))
        rows = [(str(p), text, grades.get(p, 0)) for p, text in zip(ids, held)]
        yield RawQuestion(str(query), query_texts[query], rows)


def _read_passages(path: Path) -> Iterator[pa.Table]:
    document = path.name.startswith(DOCUMENT_FILES[0])
    columns = ["id", "url", "title", "body"] if document else ["id", "text"]
    for table in raw_files.read_tsv(path, columns, has_header=False):
        text = table["text"] if not document else _join_title_and_body(table)
        ids = parse_passage_ids(table["id"], str(path))
        yield pa.table({"id": ids, "text": text.cast(pa.large_string())}, schema=COLLECTION_SCHEMA)


def _join_title_and_body(table: pa.Table) -> pa.ChunkedArray:
    """Title and body in one text, cut."""
    whole = pc.binary_join_element_wise(table["title"], table["body"], " ")
    return pc.utf8_slice_codeunits(whole, 0, MAX_DOCUMENT_CHARACTERS)


def _read_queries(path: Path) -> dict[int, str]:
    texts: dict[int, str] = {}
    for table in raw_files.read_tsv(path, ["id", "text"], has_header=False):
        ids = parse_passage_ids(table["id"], str(path)).to_pylist()
        texts |= dict(zip(ids, table["text"].to_pylist()))
    return texts


def _read_qrels(path: Path) -> dict[int, dict[int, int]]:
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for query, passage, grade in _read_columns(path, (0, 2, 3), 4):
        found[query][passage] = grade
    return found


def _read_run(path: Path) -> Iterator[tuple[int, int]]:
    """Query and passage, best first within each query, rows of a query adjacent."""
    with raw_files.open_text(path) as text:
        first = text.readline()
    # Three tabs: `query passage query text`, whose texts may be of any number of words.
    trec = len(first.split()) == 6 and first.count("\t") != 3
    for line in _read_columns(path, (0, 2) if trec else (0, 1), 6 if trec else 2):
        yield line[0], line[1]


def _read_columns(
    path: Path, columns: Sequence[int], min_columns: int
) -> Iterator[tuple[int, ...]]:
    with raw_files.open_text(path) as text:
        for number, line in enumerate(text, 1):
            parts = line.split()
            try:
                if len(parts) < min_columns:
                    raise ValueError(f"{len(parts)} columns")
                yield tuple(int(parts[place].removeprefix("D")) for place in columns)
            except ValueError as error:
                raise CorpusError(
                    f"{path}, line {number:,}: {line[:80]!r} ({error})"
                    "; expected columns of numbers, as MS MARCO or TREC publish them",
                    fix="give the publisher's own file",
                ) from error


def _read_dl19(folder: Path, depth: int) -> Iterator[RawQuestion]:
    """The track's queries with BM25's hits and their texts in one file."""
    judged = _read_qrels(raw_files.require_file(folder, (DL19_QRELS,)))
    path = raw_files.require_file(folder, (DL19_FILE,))
    for number, record in enumerate(raw_files.read_json_records(path), 1):
        where = f"{path}, query {number}"
        question, hits = raw_files.require_keys(record, ["query", "hits"], where)
        given = [
            raw_files.require_keys(h, ["qid", "docid", "content", "rank"], where) for h in hits
        ]
        given = sorted(given, key=lambda hit: int(hit[3]))[:depth]
        if given:
            query = int(given[0][0])
            grades = judged.get(query, {})
            rows = [(str(id), text, grades.get(int(id), 0)) for _, id, text, _ in given]
            yield RawQuestion(str(query), question, rows)


def _read_listed(path: Path) -> Iterator[RawQuestion]:
    """`query`, `pos` and `neg`, as trainers of embeddings publish MS MARCO."""
    for number, record in raw_files.read_json_lines(path):
        question, ours, others = raw_files.require_keys(
            record, ["query", "pos", "neg"], f"{path}, {number}"
        )
        texts = [*((text, 1) for text in ours), *((text, 0) for text in others)]
        # A text that is given twice is one candidate; what is relevant once is relevant.
        grades = dict(reversed(texts))
        rows = [(str(k), text, grade) for k, (text, grade) in enumerate(grades.items())]
        yield RawQuestion(f"listed-{number}", question, rows)


def count_release(source: Path) -> Iterator[ReleaseCount]:
    """The track's queries and relevant hits, as counted in the release."""
    if raw_files.find_file(source, (DL19_FILE,)) and not source.is_file():
        found = list(_read_dl19(source, 100))
        relevant = sum(grade >= 2 for asked in found for _, _, grade in asked.candidates)
        yield ReleaseCount("dl19", "queries", 43, len(found))
        yield ReleaseCount("dl19", "hits of grade 2 and 3", 846, relevant)


CORPUS: Final = Corpus(
    name="msmarco",
    description="Queries of a search engine; passages or documents that BM25 found, sparsely judged",
    license="non-commercial research",
    files={**{split: names.runs for split, names in FILES.items()}, "dl19": (DL19_FILE,)}
    | {"listed": LISTED_FILES},
    reader=read_tables,
    count_release=count_release,
)
"""The corpus as the registry holds it."""
