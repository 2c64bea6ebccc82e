"""MS MARCO passages and documents (Bajaj et al. 2016), and TREC Deep Learning 2019 (`dl19`).

The candidates of a query are the first 100 of a run (BM25's), as Mokrii et al. rerank them. A
training query also has its relevant passages that the run missed. A query of dev that has relevant
passages and no line in the run has one candidate, `NO_CANDIDATES`, so that it counts as 0. Queries
without a relevant passage stay (filter `raw`) or are left out (`no_all_negative`, as Mokrii et al.
train).

The hub's copy is of the question answering task (v2.1): the candidates of a query are the some ten
passages that its annotator saw, and those are relevant from which the answer was written.
"""

from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby, islice
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ConfigDict, NonNegativeInt
from pydantic.dataclasses import dataclass

from as2ray.corpora.corpus import HUB, Corpus, CorpusOptions, ReleaseCount, Source
from as2ray.corpora.passage_collection import (
    COLLECTION_SCHEMA,
    open_collection,
    parse_passage_id,
    parse_passage_ids,
)
from as2ray.corpora.reader_utils import (
    NO_CANDIDATES,
    Parsers,
    candidate_schema,
    read_columns,
    require_list,
    warn_of_missed_queries,
)
from as2ray.errors import CorpusError
from as2ray.tables import raw_files
from as2ray.tables.schema import chunked_tables

QUESTIONS_PER_TABLE: Final = 64

MAX_DOCUMENT_CHARACTERS: Final = 10_000
"""Characters of a document that are kept; Mokrii et al. keep 445 tokens, which are far fewer."""

SCHEMA: Final = candidate_schema("grade")


class SplitFiles(NamedTuple):
    """Possible names of three files of a split; the fourth is the collection."""

    runs: tuple[str, ...]
    """Candidates: `query passage rank`, TREC's six columns, or `query passage query text`."""
    queries: tuple[str, ...]
    qrels: tuple[str, ...]


FILES: Final = {
    "train": SplitFiles(
        ("run.train.tsv", "bm25.train.trec"), ("queries.train.tsv",), ("qrels.train.tsv",)
    ),
    "dev": SplitFiles(
        ("run.dev.small.tsv", "bm25.dev.trec"),
        ("queries.dev.small.tsv", "queries.dev.tsv"),
        ("qrels.dev.small.tsv", "qrels.dev.tsv"),
    ),
} | {
    f"doc-{part}": SplitFiles(
        (f"msmarco-doc{part}-top100",),
        (f"msmarco-doc{part}-queries.tsv",),
        (f"msmarco-doc{part}-qrels.tsv",),
    )
    for part in ("train", "dev")
}
"""Splits that are joined from four files."""

PASSAGE_FILES: Final = ("collection.tsv",)
DOCUMENT_FILES: Final = ("msmarco-docs.tsv",)
COLLECTIONS: Final = {"passages": PASSAGE_FILES, "documents": DOCUMENT_FILES}
"""Their sizes are those of Mokrii et al., Table 2."""
ADDRESS: Final = "https://msmarco.z22.web.core.windows.net/msmarcoranking"
DL19_FILE: Final = "bm25_top100_dl19.json"
DL19_QRELS: Final = "qrels.dl19-passage.txt"
LISTED_FILES: Final = ("train_sample.jsonl", "train.jsonl")

HUB_DATASET: Final = "microsoft/ms_marco"
HUB_CONFIG: Final = "v2.1"
HUB_SPLITS: Final = {"qa-train": "train", "qa-dev": "validation"}

DL19_MIN_RELEVANT_GRADE: Final = 2
"""Lowest relevant grade of `dl19` (guidelines of the track, section 5); elsewhere it is 1."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class MSMARCOOptions(CorpusOptions):
    """Options of MS MARCO."""

    run_depth: NonNegativeInt = 100
    """Maximum number of candidates of a question that are taken from the run. With 0 there need be
    no run: candidates are the relevant passages, and queries without one are left out."""


class RawQuestion(NamedTuple):
    """A query with its candidates."""

    id: str
    question: str
    candidates: list[tuple[str, str, int]]
    """Id, text and grade of each."""


def read_tables(split: str, source: Source, options: MSMARCOOptions) -> Iterator[pa.Table]:
    """Reads whole questions in the order of the run.

    Args:
        split: `train` and `dev` are passages, `doc-train` and `doc-dev` documents; `dl19` is the
            track of 2019; `listed` has the texts of each query, one JSON object per line;
            `qa-train` and `qa-dev` are the question answering task, on the hub alone.
        source: The folder, or the hub.
        options: Options of the corpus.
    """
    folder, min_relevant_grade = Path(source), 1
    if split == "dl19":
        path = raw_files.require_file(folder, (DL19_FILE,))
        questions = _read_dl19(path, options.run_depth)
        min_relevant_grade = DL19_MIN_RELEVANT_GRADE
    elif split in HUB_SPLITS:
        if source != HUB:
            problem = f"corpus 'msmarco', split {split!r}: it is read from the hub alone"
            raise CorpusError(problem, fix="set --data_dirs.msmarco hub")
        path = Path(HUB_DATASET)
        questions = _read_hub_questions(split, options.hub_revision)
    elif split == "listed":
        path = raw_files.require_file(folder, LISTED_FILES)
        questions = _read_listed(path)
    else:
        path = folder
        questions = _join_files(folder, split, options.run_depth)
    groups = (_build_rows(question, min_relevant_grade) for question in questions)
    with raw_files.value_errors(str(path)):
        yield from chunked_tables(groups, SCHEMA, QUESTIONS_PER_TABLE)


def _build_rows(question: RawQuestion, min_relevant_grade: int) -> list[tuple[object, ...]]:
    query, text, candidates = question
    return [
        (query, text, f"{query}-{id}", candidate, int(grade >= min_relevant_grade), grade)
        for id, candidate, grade in candidates
        if candidate.strip()
    ]


def _join_files(folder: Path, split: str, depth: int) -> Iterator[RawQuestion]:
    """Joins run, queries, judgments and collection, some queries at a time."""
    run_names, *names_of_others = FILES[split]
    query_path, qrels_path = (raw_files.require_file(folder, names) for names in names_of_others)
    run_path = raw_files.require_file(folder, run_names) if depth else None
    is_document, is_train = split.startswith("doc-"), split.endswith("train")
    names = DOCUMENT_FILES if is_document else PASSAGE_FILES
    collection_path = raw_files.require_file(folder, names)
    query_texts, qrels = _read_queries(query_path), _read_qrels(qrels_path)
    missed = {q for q, grades in qrels.items() if q in query_texts and max(grades.values()) > 0}
    tables = _read_passages(collection_path, is_document)
    with open_collection(tables, str(collection_path)) as passages:
        lines_of_run = ([q, 0] for q in qrels) if run_path is None else _read_run(run_path)
        for query, lines in groupby(lines_of_run, key=lambda line: line[0]):
            if query not in query_texts:
                problem = f"query {query} of the run is not among the queries"
                raise CorpusError(problem, fix="use run and queries of the same release")
            missed.discard(query)
            grades = qrels.get(query, {})
            ids = [passage for _, passage in islice(lines, depth)]
            if is_train or not depth:
                ids += [id for id, grade in grades.items() if grade > 0 and id not in ids]
            texts = passages.read_texts(np.array(ids, np.int64))
            candidates = [(str(id), text, grades.get(id, 0)) for id, text in zip(ids, texts)]
            yield RawQuestion(str(query), query_texts[query], candidates)
    if run_path and not is_train:
        warn_of_missed_queries(len(missed), run_path)
        for query in sorted(missed):
            yield RawQuestion(str(query), query_texts[query], [("none", NO_CANDIDATES, 0)])


def read_collection(name: str, source: Path) -> Iterator[pa.Array]:
    """Reads the text of each passage or document."""
    path = raw_files.require_file(source, COLLECTIONS[name])
    for table in _read_passages(path, name == "documents"):
        yield table["text"]


def _read_passages(path: Path, is_document: bool) -> Iterator[pa.Table]:
    columns = ["id", "url", "title", "body"] if is_document else ["id", "text"]
    for table in raw_files.read_tsv(path, columns, has_header=False):
        if is_document:
            text = pc.binary_join_element_wise(table["title"], table["body"], " ")
            text = pc.utf8_slice_codeunits(text, 0, MAX_DOCUMENT_CHARACTERS)
        else:
            text = table["text"]
        ids = parse_passage_ids(table["id"], str(path))
        yield pa.table({"id": ids, "text": text.cast(pa.large_string())}, schema=COLLECTION_SCHEMA)


def _read_queries(path: Path) -> dict[int, str]:
    texts: dict[int, str] = {}
    for table in raw_files.read_tsv(path, ["id", "text"], has_header=False):
        ids = parse_passage_ids(table["id"], str(path)).to_pylist()
        texts |= dict(zip(ids, table["text"].to_pylist()))
    return texts


def _read_qrels(path: Path) -> dict[int, dict[int, int]]:
    qrels: dict[int, dict[int, int]] = defaultdict(dict)
    parsers: Parsers = {0: parse_passage_id, 2: parse_passage_id, 3: int}
    for query, passage, grade in read_columns(path, parsers, num_columns=4):
        qrels[query][passage] = grade
    return qrels


def _read_run(path: Path) -> Iterator[list[int]]:
    """Yields query and passage, best first within each query, rows of a query adjacent.

    `tables.trec.read_run` reads neither the release's own formats nor runs larger than memory.
    """
    with raw_files.open_text(path) as text:
        first = text.readline()
    # Three tabs: `query passage query text`, whose texts may have any number of words.
    is_trec = len(first.split()) == 6 and first.count("\t") != 3
    parsers = {0: parse_passage_id, 2 if is_trec else 1: parse_passage_id}
    return read_columns(path, parsers, num_columns=6 if is_trec else None)


def _read_dl19(path: Path, depth: int) -> Iterator[RawQuestion]:
    """Reads the queries of the track; one file has BM25's hits with their texts."""
    qrels = _read_qrels(raw_files.require_file(path.parent, (DL19_QRELS,)))
    keys = ["qid", "docid", "content", "rank"]
    for number, record in enumerate(raw_files.read_json_records(path), 1):
        source = f"{path}, query {number}"
        question, records = raw_files.require_keys(record, ["query", "hits"], source)
        hits = [raw_files.require_keys(hit, keys, source) for hit in records]
        hits = sorted(hits, key=lambda hit: int(hit[3]))[:depth]
        if hits:
            query = int(hits[0][0])
            grades = qrels.get(query, {})
            candidates = [(str(id), text, grades.get(int(id), 0)) for _, id, text, _ in hits]
            yield RawQuestion(str(query), question, candidates)


def _read_listed(path: Path) -> Iterator[RawQuestion]:
    """Reads `query`, `pos` and `neg`, the format of training data for embedding models."""
    keys = ["query", "pos", "neg"]
    for number, record in raw_files.read_json_lines(path):
        question, *lists = raw_files.require_keys(record, keys, f"{path}, {number}")
        positives, negatives = map(require_list, lists, keys[1:])
        texts = [*((text, 1) for text in positives), *((text, 0) for text in negatives)]
        # A repeated text is one candidate, relevant if it is relevant once.
        grades = dict(reversed(texts))
        candidates = [(str(k), text, grade) for k, (text, grade) in enumerate(grades.items())]
        yield RawQuestion(f"listed-{number}", question, candidates)


def _read_hub_questions(split: str, revision: str | None) -> Iterator[RawQuestion]:
    """Reads the hub's copy, whose rows are queries with columns of passages."""
    tables = raw_files.read_hub(HUB_DATASET, HUB_SPLITS[split], HUB_CONFIG, revision)
    for table in tables:
        for row in table.select(["query_id", "query", "passages"]).to_pylist():
            passages = zip(row["passages"]["passage_text"], row["passages"]["is_selected"])
            candidates = [(str(k), text, grade) for k, (text, grade) in enumerate(passages)]
            yield RawQuestion(str(row["query_id"]), row["query"].strip(), candidates)


def count_release(source: Path) -> Iterator[ReleaseCount]:
    """Counts the queries and relevant hits of the track."""
    if path := raw_files.find_file(source, (DL19_FILE,)):
        questions = list(_read_dl19(path, depth=100))
        grades = [grade for question in questions for _, _, grade in question.candidates]
        num_relevant = sum(grade >= DL19_MIN_RELEVANT_GRADE for grade in grades)
        yield ReleaseCount("dl19", "queries", 43, len(questions))
        yield ReleaseCount("dl19", "hits of grade 2 and 3", 846, num_relevant)


CORPUS: Final = Corpus(
    name="msmarco",
    description="Queries of a search engine; passages or documents found by BM25, sparsely judged",
    license="non-commercial research",
    urls=(
        f"{ADDRESS}/collectionandqueries.tar.gz",
        f"{ADDRESS}/msmarco-docs.tsv.gz",
        *(
            f"{ADDRESS}/msmarco-doc{part}-{name}.gz"
            for part in ("train", "dev")
            for name in ("top100", "queries.tsv", "qrels.tsv")
        ),
    ),
    files={split: names.runs for split, names in FILES.items()}
    | {"dl19": (DL19_FILE,), "listed": LISTED_FILES}
    | dict.fromkeys(HUB_SPLITS, ()),
    joined_files={
        split: (
            *(names.queries, names.qrels),
            DOCUMENT_FILES if split.startswith("doc-") else PASSAGE_FILES,
        )
        for split, names in FILES.items()
    },
    reader=read_tables,
    options_type=MSMARCOOptions,
    count_release=count_release,
    hub=HUB_DATASET,
    hub_splits=tuple(HUB_SPLITS),
    collections=COLLECTIONS,
    collection_reader=read_collection,
    collection_sizes={"passages": (8_800_000, 50_000), "documents": (3_200_000, 50_000)},
)
