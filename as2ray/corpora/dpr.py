"""Questions of Natural Questions and SQuAD on Wikipedia passages (DPR, Karpukhin et al. 2020).

A passage is relevant if BM25 found it and it contains the answer. The candidates of a question are
the contexts that the release lists for it, or the first passages of a run over all 21 million.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ConfigDict, PositiveInt, model_validator
from pydantic.dataclasses import dataclass

from as2ray.corpora.corpus import Corpus, CorpusOptions, Source
from as2ray.corpora.passage_collection import (
    COLLECTION_SCHEMA,
    open_collection,
    parse_passage_ids,
)
from as2ray.corpora.reader_utils import (
    NO_CANDIDATES,
    candidate_schema,
    read_columns,
    warn_of_missed_queries,
)
from as2ray.tables import raw_files
from as2ray.tables.schema import chunked_tables

FILES: Final = {
    "nq-train": ("biencoder-nq-train.json",),
    "nq-dev": ("biencoder-nq-dev.json",),
    "squad-train": ("biencoder-squad1-train.json",),
    "squad-dev": ("biencoder-squad1-dev.json",),
    "sample": ("biencoder_sample.json",),
}
PASSAGE_FILES: Final = ("psgs_w100.tsv",)
COLLECTIONS: Final = {"psgs_w100": PASSAGE_FILES}
"""Its size is that of Mokrii et al., Table 2."""

ContextList = Literal["positive_ctxs", "hard_negative_ctxs", "negative_ctxs"]
CONTEXT_LISTS: Final[tuple[ContextList, ...]] = get_args(ContextList)
"""Lists of contexts that the release has for each question; the first has the relevant ones."""

QUESTIONS_PER_TABLE: Final = 256

SCHEMA: Final = candidate_schema("document_id")
Row = tuple[str, str, str, str, int, str]
"""The values of a row in the order of `SCHEMA`; the document is the passage's title."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DPROptions(CorpusOptions):
    """Options of DPR."""

    context_lists: tuple[ContextList, ...] = CONTEXT_LISTS[:2]
    """Lists of the release whose passages are candidates."""
    run_file: str | None = None
    """Name of a TREC run beside the release, best first, which replaces its lists: the paper's is
    BM25's top 100 of `psgs_w100.tsv`. A question that is not in the run is left out of training,
    and elsewhere has one candidate, `NO_CANDIDATES`, if it has relevant passages. Training
    questions also have those that the run missed."""
    run_depth: PositiveInt = 100
    """Maximum number of candidates of a question that are taken from the run."""

    @model_validator(mode="after")
    def _check_positives(self) -> "DPROptions":
        if CONTEXT_LISTS[0] not in self.context_lists:
            raise ValueError(f"context_lists must contain {CONTEXT_LISTS[0]!r}")
        return self


def read_tables(split: str, source: Source, options: DPROptions) -> Iterator[pa.Table]:
    """Reads whole questions in the order of the release; `<split>-<n>` is question n, from 0.

    Args:
        split: One of `FILES`.
        source: The folder or one file.
        options: Options of the corpus.
    """
    path = raw_files.require_file(Path(source), FILES[split])
    if options.run_file is None:
        # A passage of two lists is labeled by the first of them in the order of the release.
        context_lists = [name for name in CONTEXT_LISTS if name in options.context_lists]
        questions = _read_context_lists(path, split, context_lists)
    else:
        questions = _read_run_candidates(path, split, options.run_file, options.run_depth)
    with raw_files.value_errors(str(path)):
        yield from chunked_tables(questions, SCHEMA, QUESTIONS_PER_TABLE)


def _read_context_lists(
    path: Path, split: str, context_lists: Sequence[ContextList]
) -> Iterator[list[Row]]:
    keys = ["question", *context_lists]
    for number, record in enumerate(raw_files.read_json_records(path)):
        question, *lists = raw_files.require_keys(record, keys, f"{path}, {number}")
        question_id = f"{split}-{number}"
        rows: dict[str, Row] = {}
        for name, contexts in zip(context_lists, lists):
            for context in contexts:
                id, title, text = _parse_context(context, f"{path}, question {number}")
                label = int(name == CONTEXT_LISTS[0])
                row = (question_id, question, f"{question_id}-{id}", text, label, title)
                # The release lists some passages twice; the first list that has one decides.
                rows.setdefault(id, row)
        yield sorted(rows.values(), key=lambda row: -row[4])


def _parse_context(context: Any, source: str) -> tuple[str, str, str]:
    title, text = raw_files.require_keys(context, ["title", "text"], source)
    # The key is passage_id in Natural Questions' files, psg_id in SQuAD's.
    key = "passage_id" if "passage_id" in context else "psg_id"
    (id,) = raw_files.require_keys(context, [key], source)
    return str(id), title, text


def _read_run_candidates(
    path: Path, split: str, run_file: str, run_depth: int
) -> Iterator[list[Row]]:
    run_path, num_missed = raw_files.require_file(path.parent, (run_file,)), 0
    run, is_train = _read_run(run_path, run_depth), split.endswith("-train")
    passage_path = raw_files.require_file(path.parent, PASSAGE_FILES)
    with open_collection(_read_passages(passage_path), str(passage_path)) as passages:
        for number, record in enumerate(raw_files.read_json_records(path)):
            id, source = f"{split}-{number}", f"{path}, {number}"
            keys = ["question", CONTEXT_LISTS[0]]
            question, positives = raw_files.require_keys(record, keys, source)
            contexts = (_parse_context(context, source) for context in positives)
            relevant = {passage: (text, title) for passage, title, text in contexts}
            ids = run.get(id, [])
            texts = passages.read_texts(np.array(ids, np.int64))
            titles_and_texts = [text.split("\t", 1) for text in texts]
            rows = [
                (id, question, f"{id}-{passage}", text, int(str(passage) in relevant), title)
                for passage, (title, text) in zip(ids, titles_and_texts)
            ]
            if not is_train and relevant and not ids:
                num_missed += 1
                rows = [(id, question, f"{id}-none", NO_CANDIDATES, 0, "")]
            if rows and is_train:
                missed = {p: texts for p, texts in relevant.items() if int(p) not in ids}
                rows += [
                    (id, question, f"{id}-{p}", *t, 1, title) for p, (*t, title) in missed.items()
                ]
            yield rows
    warn_of_missed_queries(num_missed, run_path)


def _read_run(path: Path, depth: int) -> dict[str, list[int]]:
    """Returns the first `depth` passages of each question.

    `tables.trec.read_run` would hold all pairs of the run in memory.
    """
    passages_of: dict[str, list[int]] = defaultdict(list)
    for question, passage in read_columns(path, {0: str, 2: int}, num_columns=6):
        if len(passages_of[question]) < depth:
            passages_of[question].append(passage)
    return passages_of


def _read_passages(path: Path) -> Iterator[pa.Table]:
    """Reads title and text of each passage, joined by a tab; neither contains one."""
    for table in raw_files.read_tsv(path, ["id", "text", "title"], has_header=True):
        ids = parse_passage_ids(table["id"], str(path))
        columns = [_unquote(table[name]) for name in ("title", "text")]
        texts = pc.binary_join_element_wise(*columns, "\t").cast(pa.large_string())
        yield pa.table({"id": ids, "text": texts}, schema=COLLECTION_SCHEMA)


def read_collection(name: str, source: Path) -> Iterator[pa.Array]:
    """Reads the text of each passage of Wikipedia, without its title."""
    for table in _read_passages(raw_files.require_file(source, COLLECTIONS[name])):
        yield pc.replace_substring_regex(table["text"], "^[^\t]*\t", "")


def _unquote(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Removes the quotes that Python's csv module, which wrote the release, put around fields."""
    is_quoted = pc.match_substring_regex(column, '^".*"$')
    inside = pc.utf8_slice_codeunits(column, 1, -1)
    return pc.if_else(is_quoted, pc.replace_substring(inside, '""', '"'), column)


CORPUS: Final = Corpus(
    name="dpr",
    description="Questions of NQ and SQuAD; Wikipedia passages, some of which contain the answer",
    license="CC BY-NC 4.0 (passages and questions: CC BY-SA)",
    urls=(
        "https://dl.fbaipublicfiles.com/dpr/data/retriever/biencoder-nq-train.json.gz",
        "https://dl.fbaipublicfiles.com/dpr/data/retriever/biencoder-nq-dev.json.gz",
        "https://dl.fbaipublicfiles.com/dpr/data/retriever/biencoder-squad1-train.json.gz",
        "https://dl.fbaipublicfiles.com/dpr/data/retriever/biencoder-squad1-dev.json.gz",
        "https://dl.fbaipublicfiles.com/dpr/wikipedia_split/psgs_w100.tsv.gz",
    ),
    files=FILES,
    reader=read_tables,
    options_type=DPROptions,
    collections=COLLECTIONS,
    collection_reader=read_collection,
    collection_sizes={"psgs_w100": (21_000_000, 500_000)},
)
