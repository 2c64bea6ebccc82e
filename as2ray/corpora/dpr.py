"""Questions of Natural Questions and SQuAD on Wikipedia passages (Karpukhin et al. 2020).

A passage is relevant if BM25 found it and it contains the answer. Candidates are the contexts that
the release gives beside each question; or, with the option `run`, a run's first ones out of the
21M passages. Knows DPR's JSON and its passage file. Must not know any other corpus.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.corpora.corpus import Corpus, Source
from as2ray.corpora.passage_collection import (
    COLLECTION_SCHEMA,
    PassageCollection,
    open_collection,
    parse_passage_ids,
)
from as2ray.errors import CorpusError
from as2ray.tables import raw_files
from as2ray.tables.schema import CANDIDATE_SCHEMA

FILES: Final = {
    "nq-train": ("biencoder-nq-train.json",),
    "nq-dev": ("biencoder-nq-dev.json",),
    "squad-train": ("biencoder-squad1-train.json",),
    "squad-dev": ("biencoder-squad1-dev.json",),
    "sample": ("biencoder_sample.json",),
}
PASSAGE_FILES: Final = ("psgs_w100.tsv",)

CONTEXT_LISTS: Final = ("positive_ctxs", "hard_negative_ctxs", "negative_ctxs")
QUESTIONS_PER_TABLE: Final = 256
"""Questions of a table that is handed on."""


def read_tables(
    split: str,
    source: Source,
    *,
    context_lists: Sequence[str] = CONTEXT_LISTS[:2],
    run_file: str | None = None,
    run_depth: int = 100,
) -> Iterator[pa.Table]:
    """Whole questions, in the release's order; `<split>-<n>` is the n-th, from 0.

    Args:
        split: One of `FILES`.
        source: The folder or one file.
        contexts: Lists of the release whose passages are candidates; those of `positive_ctxs`
            are relevant.
        run: Name of a TREC run beside the release in place of its lists: the paper's BM25 top 100
            over `psgs_w100.tsv`. Questions that it does not have are left out.
        depth: Of the run that are candidates.
    """
    unknown = sorted(set(context_lists) - set(CONTEXT_LISTS))
    if unknown or CONTEXT_LISTS[0] not in context_lists or run_depth < 1:
        raise CorpusError(
            f"contexts {list(context_lists)}, depth {run_depth}"
            f"; expected {CONTEXT_LISTS[0]!r} and others of {list(CONTEXT_LISTS)}; a depth of at least 1",
        )
    path = raw_files.require_file(Path(source), FILES[split])
    if run_file is None:
        # A passage of two lists is what the first of them in the release's order says.
        ordered = [name for name in CONTEXT_LISTS if name in context_lists]
        with raw_files.value_errors(str(path)):
            yield from _build_tables(_read_context_lists(path, split, ordered))
        return
    folder = path.parent
    found = _read_run(raw_files.require_file(folder, (run_file,)), run_depth)
    passages = raw_files.require_file(folder, PASSAGE_FILES)
    with (
        open_collection(_read_passages(passages), str(passages)) as collection,
        raw_files.value_errors(str(path)),
    ):
        yield from _build_tables(_read_run_candidates(path, split, found, collection))


Row = tuple[str, str, str, str, int, str]
"""The columns of `CANDIDATES`, and the passage's title as its document."""


def _build_tables(questions: Iterator[list[Row]]) -> Iterator[pa.Table]:
    schema = CANDIDATE_SCHEMA.append(pa.field("document_id", pa.string()))
    rows: list[Row] = []
    for number, of_question in enumerate(questions, 1):
        rows += of_question
        if number % QUESTIONS_PER_TABLE == 0 and rows:
            yield _build_table(rows, schema)
            rows = []
    if rows:
        yield _build_table(rows, schema)


def _build_table(rows: Sequence[Row], schema: pa.Schema) -> pa.Table:
    return pa.table([pa.array(c, f.type) for c, f in zip(zip(*rows), schema)], schema=schema)


def _read_context_lists(
    path: Path, split: str, context_lists: Sequence[str]
) -> Iterator[list[Row]]:
    for number, record in enumerate(raw_files.read_json_records(path)):
        question, *lists = raw_files.require_keys(
            record, ["question", *context_lists], f"{path}, {number}"
        )
        rows: dict[str, Row] = {}
        for name, held in zip(context_lists, lists):
            for context in held:
                id, title, text = _parse_context(context, f"{path}, question {number}")
                named = f"{split}-{number}"
                label = int(name == CONTEXT_LISTS[0])
                # The release lists some passages twice; the first list that has one decides.
                rows.setdefault(id, (named, question, f"{named}-{id}", text, label, title))
        yield sorted(rows.values(), key=lambda row: -row[4])


def _parse_context(context: Any, source: str) -> tuple[str, str, str]:
    title, text = raw_files.require_keys(context, ["title", "text"], source)
    # Natural Questions' files say passage_id, SQuAD's psg_id.
    key = "passage_id" if "passage_id" in context else "psg_id"
    (id,) = raw_files.require_keys(context, [key], source)
    return str(id), title, text


def _read_run_candidates(
    path: Path, split: str, run: Mapping[str, list[int]], passages: PassageCollection
) -> Iterator[list[Row]]:
    for number, record in enumerate(raw_files.read_json_records(path)):
        named = f"{split}-{number}"
        question, positive = raw_files.require_keys(
            record, ["question", CONTEXT_LISTS[0]], f"{path}, {number}"
        )
        relevant = {_parse_context(context, f"{path}, {number}")[0] for context in positive}
        ids = run.get(named, [])
        held = [both.split("\t", 1) for both in passages.read_texts(np.array(ids, np.int64))]
        yield [
            (named, question, f"{named}-{id}", text, int(str(id) in relevant), title)
            for id, (title, text) in zip(ids, held)
        ]


def _read_run(path: Path, depth: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    with raw_files.open_text(path) as lines:
        for number, line in enumerate(lines, 1):
            parts = line.split()
            if len(parts) != 6 or not parts[2].isdigit():
                raise CorpusError(
                    f"{path}, line {number:,}: {line[:80]!r}"
                    "; expected question Q0 passage rank score tag, best first",
                    fix="write the run as TREC does",
                )
            held = found.setdefault(parts[0], [])
            if len(held) < depth:
                held.append(int(parts[2]))
    return found


def _read_passages(path: Path) -> Iterator[pa.Table]:
    """Title and text of each passage, a tab between them: neither has one."""
    for table in raw_files.read_tsv(path, ["id", "text", "title"], has_header=True):
        ids = parse_passage_ids(table["id"], str(path))
        columns = [_unquote(table[name]) for name in ("title", "text")]
        both = pc.binary_join_element_wise(*columns, "\t").cast(pa.large_string())
        yield pa.table({"id": ids, "text": both}, schema=COLLECTION_SCHEMA)


def _unquote(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """What Python's csv module, which wrote the release, reads out of its fields."""
    quoted = pc.match_substring_regex(column, '^".*"$')
    inside = pc.utf8_slice_codeunits(column, 1, -1)
    return pc.if_else(quoted, pc.replace_substring(inside, '""', '"'), column)


CORPUS: Final = Corpus(
    name="dpr",
    description="Questions of NQ and SQuAD; passages of Wikipedia that contain the answer, and others",
    license="CC BY-NC 4.0 (passages and questions: CC BY-SA)",
    files=FILES,
    reader=read_tables,
)
"""The corpus as the registry holds it."""
