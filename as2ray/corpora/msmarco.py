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

from as2ray.corpora import files
from as2ray.corpora.base import Corpus, Item, Source
from as2ray.corpora.collection import SCHEMA, Collection, collected, numbers
from as2ray.errors import CorpusError
from as2ray.records import CANDIDATES

SHOWN: Final = 4_096
"""Candidates of a table that is handed on, at least."""

CHARACTERS: Final = 10_000
"""Of a document that are kept: 445 tokens, what the paper keeps, are far fewer."""


class Files(NamedTuple):
    """What a split is read from; for each the names it may have."""

    runs: tuple[str, ...]
    """Candidates: `query passage rank`, TREC's six columns, or `query passage query text`."""
    queries: tuple[str, ...]
    judgements: tuple[str, ...]
    collection: tuple[str, ...]


PASSAGES: Final = ("collection.tsv",)
DOCUMENTS: Final = ("msmarco-docs.tsv",)

FILES: Final = {
    "train": Files(
        ("run.train.tsv", "bm25.train.trec"), ("queries.train.tsv",), ("qrels.train.tsv",), PASSAGES
    ),
    "dev": Files(
        ("run.dev.small.tsv", "bm25.dev.trec"),
        ("queries.dev.small.tsv", "queries.dev.tsv"),
        ("qrels.dev.small.tsv", "qrels.dev.tsv"),
        PASSAGES,
    ),
    "doc-train": Files(
        ("msmarco-doctrain-top100",),
        ("msmarco-doctrain-queries.tsv",),
        ("msmarco-doctrain-qrels.tsv",),
        DOCUMENTS,
    ),
    "doc-dev": Files(
        ("msmarco-docdev-top100",),
        ("msmarco-docdev-queries.tsv",),
        ("msmarco-docdev-qrels.tsv",),
        DOCUMENTS,
    ),
}
"""The splits that are put together from four files."""

DL19: Final = "bm25_top100_dl19.json"
DL19_JUDGEMENTS: Final = "qrels.dl19-passage.txt"
LISTED: Final = ("train_sample.jsonl", "train.jsonl")

RELEVANT: Final = {"dl19": 2}
"""Lowest grade that counts as relevant; 1 elsewhere (the track's guidelines, section 5)."""


def reader(split: str, source: Source, *, depth: int = 100) -> Iterator[pa.Table]:
    """Whole questions, in the run's order.

    Args:
        split: `train` and `dev` are passages, `doc-train` and `doc-dev` documents; `dl19` is the
            track of 2019; `listed` has texts beside each query, one JSON object a line.
        source: The folder.
        depth: Of the run that are candidates.
    """
    if depth < 1:
        raise CorpusError(f"depth {depth}", expected="at least 1", mend="correct the option")
    folder = Path(source)
    if split == "dl19":
        with files.sound(str(files.locate(folder, (DL19,)))):
            yield from _tables(_dl19(folder, depth), RELEVANT["dl19"])
    elif split == "listed":
        path = files.locate(folder, LISTED)
        with files.sound(str(path)):
            yield from _tables(_listed(path), 1)
    else:
        yield from _tables(_joined(folder, FILES[split], depth, split.endswith("train")), 1)


class _Asked(NamedTuple):
    """A query with its candidates: id, text and grade of each."""

    id: str
    question: str
    candidates: list[tuple[str, str, int]]


def _tables(queries: Iterator[_Asked], least: int) -> Iterator[pa.Table]:
    schema = CANDIDATES.append(pa.field("grade", pa.int8()))
    rows: list[tuple[Any, ...]] = []
    for asked in queries:
        rows += [
            (asked.id, asked.question, f"{asked.id}-{id}", text, int(grade >= least), grade)
            for id, text, grade in asked.candidates
            if text.strip()
        ]
        if len(rows) >= SHOWN:
            yield _table(rows, schema)
            rows = []
    if rows:
        yield _table(rows, schema)


def _table(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    return pa.table([pa.array(c, f.type) for c, f in zip(zip(*rows), schema)], schema=schema)


def _joined(folder: Path, names: Files, depth: int, train: bool) -> Iterator[_Asked]:
    """Run, queries, judgements and collection put together, some queries at a time."""
    paths = [files.locate(folder, of) for of in names]
    run, texts, judged = paths[0], _queries(paths[1]), _judgements(paths[2])
    with collected(_passages(paths[3]), str(paths[3])) as passages:
        asked = groupby(_run(run), key=lambda line: line[0])
        while some := [(q, [p for _, p in islice(lines, depth)]) for q, lines in islice(asked, 64)]:
            yield from _asked(some, texts, judged, passages, train)


def _asked(
    some: Sequence[tuple[int, list[int]]],
    texts: Mapping[int, str],
    judged: Mapping[int, Mapping[int, int]],
    passages: Collection,
    train: bool,
) -> Iterator[_Asked]:
    for query, found in some:
        if query not in texts:
            raise CorpusError(
                f"query {query} of a run has no text",
                expected="queries and a run of the same release",
                mend="give the publisher's own files",
            )
        grades = judged.get(query, {})
        missed = [p for p, grade in grades.items() if grade > 0 and p not in set(found)]
        ids = [*found, *(missed if train else [])]
        held = passages.texts(np.array(ids, np.int64))
        rows = [(str(p), text, grades.get(p, 0)) for p, text in zip(ids, held)]
        yield _Asked(str(query), texts[query], rows)


def _passages(path: Path) -> Iterator[pa.Table]:
    document = path.name.startswith(DOCUMENTS[0])
    columns = ["id", "url", "title", "body"] if document else ["id", "text"]
    for table in files.tsv(path, columns, header=False):
        text = table["text"] if not document else _page(table)
        ids = numbers(table["id"], str(path))
        yield pa.table({"id": ids, "text": text.cast(pa.large_string())}, schema=SCHEMA)


def _page(table: pa.Table) -> pa.ChunkedArray:
    """Title and body in one text, cut."""
    whole = pc.binary_join_element_wise(table["title"], table["body"], " ")
    return pc.utf8_slice_codeunits(whole, 0, CHARACTERS)


def _queries(path: Path) -> dict[int, str]:
    texts: dict[int, str] = {}
    for table in files.tsv(path, ["id", "text"], header=False):
        ids = numbers(table["id"], str(path)).to_pylist()
        texts |= dict(zip(ids, table["text"].to_pylist()))
    return texts


def _judgements(path: Path) -> dict[int, dict[int, int]]:
    found: dict[int, dict[int, int]] = defaultdict(dict)
    for query, passage, grade in _lines(path, (0, 2, 3), 4):
        found[query][passage] = grade
    return found


def _run(path: Path) -> Iterator[tuple[int, int]]:
    """Query and passage, best first within each query, rows of a query adjacent."""
    with files.opened(path) as text:
        first = text.readline()
    # Three tabs: `query passage query text`, whose texts may be of any number of words.
    trec = len(first.split()) == 6 and first.count("\t") != 3
    for line in _lines(path, (0, 2) if trec else (0, 1), 6 if trec else 2):
        yield line[0], line[1]


def _lines(path: Path, places: Sequence[int], least: int) -> Iterator[tuple[int, ...]]:
    with files.opened(path) as text:
        for number, line in enumerate(text, 1):
            parts = line.split()
            try:
                if len(parts) < least:
                    raise ValueError(f"{len(parts)} columns")
                yield tuple(int(parts[place].removeprefix("D")) for place in places)
            except ValueError as error:
                raise CorpusError(
                    f"{path}, line {number:,}: {line[:80]!r} ({error})",
                    expected="columns of numbers, as MS MARCO or TREC publish them",
                    mend="give the publisher's own file",
                ) from error


def _dl19(folder: Path, depth: int) -> Iterator[_Asked]:
    """The track's queries with BM25's hits and their texts in one file."""
    judged = _judgements(files.locate(folder, (DL19_JUDGEMENTS,)))
    path = files.locate(folder, (DL19,))
    for number, record in enumerate(files.json_records(path), 1):
        where = f"{path}, query {number}"
        question, hits = files.need(record, ["query", "hits"], where)
        given = [files.need(h, ["qid", "docid", "content", "rank"], where) for h in hits]
        given = sorted(given, key=lambda hit: int(hit[3]))[:depth]
        if given:
            query = int(given[0][0])
            grades = judged.get(query, {})
            rows = [(str(id), text, grades.get(int(id), 0)) for _, id, text, _ in given]
            yield _Asked(str(query), question, rows)


def _listed(path: Path) -> Iterator[_Asked]:
    """`query`, `pos` and `neg`, as trainers of embeddings publish MS MARCO."""
    for number, record in files.json_lines(path):
        question, ours, others = files.need(record, ["query", "pos", "neg"], f"{path}, {number}")
        texts = [*((text, 1) for text in ours), *((text, 0) for text in others)]
        # A text that is given twice is one candidate; what is relevant once is relevant.
        grades = dict(reversed(texts))
        rows = [(str(k), text, grade) for k, (text, grade) in enumerate(grades.items())]
        yield _Asked(f"listed-{number}", question, rows)


def inventory(source: Path) -> Iterator[Item]:
    """The track's queries and relevant hits, as counted in the release."""
    if files.present(source, (DL19,)) and not source.is_file():
        found = list(_dl19(source, 100))
        relevant = sum(grade >= 2 for asked in found for _, _, grade in asked.candidates)
        yield Item("dl19", "queries", 43, len(found))
        yield Item("dl19", "hits of grade 2 and 3", 846, relevant)


CORPUS: Final = Corpus(
    name="msmarco",
    about="Queries of a search engine; passages or documents that BM25 found, sparsely judged",
    licence="non-commercial research",
    files={**{split: names.runs for split, names in FILES.items()}, "dl19": (DL19,)}
    | {"listed": LISTED},
    reader=reader,
    inventory=inventory,
)
"""The corpus as the registry holds it."""
