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

from as2ray.corpora import files
from as2ray.corpora.base import Corpus, Source
from as2ray.corpora.collection import SCHEMA, Collection, collected, numbers
from as2ray.errors import CorpusError
from as2ray.records import CANDIDATES

FILES: Final = {
    "nq-train": ("biencoder-nq-train.json",),
    "nq-dev": ("biencoder-nq-dev.json",),
    "squad-train": ("biencoder-squad1-train.json",),
    "squad-dev": ("biencoder-squad1-dev.json",),
    "sample": ("biencoder_sample.json",),
}
PASSAGES: Final = ("psgs_w100.tsv",)

CONTEXTS: Final = ("positive_ctxs", "hard_negative_ctxs", "negative_ctxs")
SHOWN: Final = 256
"""Questions of a table that is handed on."""


def reader(
    split: str,
    source: Source,
    *,
    contexts: Sequence[str] = CONTEXTS[:2],
    run: str | None = None,
    depth: int = 100,
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
    unknown = sorted(set(contexts) - set(CONTEXTS))
    if unknown or CONTEXTS[0] not in contexts or depth < 1:
        raise CorpusError(
            f"contexts {list(contexts)}, depth {depth}",
            expected=f"{CONTEXTS[0]!r} and others of {list(CONTEXTS)}; a depth of at least 1",
            mend="correct the option",
        )
    path = files.locate(Path(source), FILES[split])
    if run is None:
        # A passage of two lists is what the first of them in the release's order says.
        ordered = [name for name in CONTEXTS if name in contexts]
        with files.sound(str(path)):
            yield from _tables(_given(path, split, ordered))
        return
    folder = path.parent
    found = _run(files.locate(folder, (run,)), depth)
    passages = files.locate(folder, PASSAGES)
    with collected(_passages(passages), str(passages)) as collection, files.sound(str(path)):
        yield from _tables(_retrieved(path, split, found, collection))


Row = tuple[str, str, str, str, int, str]
"""The columns of `CANDIDATES`, and the passage's title as its document."""


def _tables(questions: Iterator[list[Row]]) -> Iterator[pa.Table]:
    schema = CANDIDATES.append(pa.field("document_id", pa.string()))
    rows: list[Row] = []
    for number, of_question in enumerate(questions, 1):
        rows += of_question
        if number % SHOWN == 0 and rows:
            yield _table(rows, schema)
            rows = []
    if rows:
        yield _table(rows, schema)


def _table(rows: Sequence[Row], schema: pa.Schema) -> pa.Table:
    return pa.table([pa.array(c, f.type) for c, f in zip(zip(*rows), schema)], schema=schema)


def _given(path: Path, split: str, contexts: Sequence[str]) -> Iterator[list[Row]]:
    for number, record in enumerate(files.json_records(path)):
        question, *lists = files.need(record, ["question", *contexts], f"{path}, {number}")
        rows: dict[str, Row] = {}
        for name, held in zip(contexts, lists):
            for context in held:
                id, title, text = _context(context, f"{path}, question {number}")
                named = f"{split}-{number}"
                label = int(name == CONTEXTS[0])
                # The release lists some passages twice; the first list that has one decides.
                rows.setdefault(id, (named, question, f"{named}-{id}", text, label, title))
        yield sorted(rows.values(), key=lambda row: -row[4])


def _context(context: Any, where: str) -> tuple[str, str, str]:
    title, text = files.need(context, ["title", "text"], where)
    # Natural Questions' files say passage_id, SQuAD's psg_id.
    key = "passage_id" if "passage_id" in context else "psg_id"
    (id,) = files.need(context, [key], where)
    return str(id), title, text


def _retrieved(
    path: Path, split: str, run: Mapping[str, list[int]], passages: Collection
) -> Iterator[list[Row]]:
    for number, record in enumerate(files.json_records(path)):
        named = f"{split}-{number}"
        question, positive = files.need(record, ["question", CONTEXTS[0]], f"{path}, {number}")
        relevant = {_context(context, f"{path}, {number}")[0] for context in positive}
        ids = run.get(named, [])
        held = [both.split("\t", 1) for both in passages.texts(np.array(ids, np.int64))]
        yield [
            (named, question, f"{named}-{id}", text, int(str(id) in relevant), title)
            for id, (title, text) in zip(ids, held)
        ]


def _run(path: Path, depth: int) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    with files.opened(path) as lines:
        for number, line in enumerate(lines, 1):
            parts = line.split()
            if len(parts) != 6 or not parts[2].isdigit():
                raise CorpusError(
                    f"{path}, line {number:,}: {line[:80]!r}",
                    expected="question Q0 passage rank score tag, best first",
                    mend="write the run as TREC does",
                )
            held = found.setdefault(parts[0], [])
            if len(held) < depth:
                held.append(int(parts[2]))
    return found


def _passages(path: Path) -> Iterator[pa.Table]:
    """Title and text of each passage, a tab between them: neither has one."""
    for table in files.tsv(path, ["id", "text", "title"], header=True):
        ids = numbers(table["id"], str(path))
        columns = [_unquoted(table[name]) for name in ("title", "text")]
        both = pc.binary_join_element_wise(*columns, "\t").cast(pa.large_string())
        yield pa.table({"id": ids, "text": both}, schema=SCHEMA)


def _unquoted(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """What Python's csv module, which wrote the release, reads out of its fields."""
    quoted = pc.match_substring_regex(column, '^".*"$')
    inside = pc.utf8_slice_codeunits(column, 1, -1)
    return pc.if_else(quoted, pc.replace_substring(inside, '""', '"'), column)


CORPUS: Final = Corpus(
    name="dpr",
    about="Questions of NQ and SQuAD; passages of Wikipedia that contain the answer, and others",
    licence="CC BY-NC 4.0 (passages and questions: CC BY-SA)",
    files=FILES,
    reader=reader,
)
"""The corpus as the registry holds it."""
