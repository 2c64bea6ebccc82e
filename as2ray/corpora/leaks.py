"""Finds questions that are in two tables: two splits, or a transfer and a target corpus."""

import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any
from unicodedata import normalize

import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import LeakError
from as2ray.text import word_overlap

_TRAILING_PUNCTUATION = re.compile(r"[\s?.!,;:'\"’”…]+$")


def normalize_question(question: str) -> str:
    """Returns the question in NFC, case-folded, with single blanks, without final punctuation."""
    return _TRAILING_PUNCTUATION.sub("", " ".join(normalize("NFC", question).casefold().split()))


def shared_questions(a: pa.Table, b: pa.Table) -> list[str]:
    """Returns the normalized questions that are in both tables, sorted.

    Only the column `question` is read; of a large prepared corpus, load only this column.
    """
    return sorted(_group_questions(a).keys() & _group_questions(b).keys())


def near_duplicate_questions(
    a: pa.Table, b: pa.Table, min_similarity: float = 0.75
) -> list[tuple[str, str, float]]:
    """Finds questions of two tables that have most of their words in common.

    FlexNeuART compares questions in the same way (`check_split_leak.py`).

    Args:
        a: A table.
        b: Another table.
        min_similarity: Lowest Jaccard similarity of the word sets of two questions, above 0.

    Returns:
        A question of `a`, a question of `b` and their similarity, most similar first.
    """
    questions_a, questions_b = (pc.unique(table["question"]).to_pylist() for table in (a, b))
    pairs = word_overlap.find_near_duplicates(questions_a, questions_b, min_similarity)
    duplicates = [(questions_a[i], questions_b[j], similarity) for i, j, similarity in pairs]
    return sorted(duplicates, key=lambda duplicate: -duplicate[2])


def check_leaks(tables: Mapping[str, pa.Table], min_similarity: float | None = None) -> None:
    """Checks that no two of the named tables have a question in common.

    Args:
        tables: Tables by name.
        min_similarity: Similarity from which two questions count as one; by default equal texts.

    Raises:
        LeakError: Two tables share questions; the message has their number and examples.
    """
    leaks = []
    for a, b in combinations(tables, 2):
        shared: list[Any] = shared_questions(tables[a], tables[b])
        if min_similarity is not None:
            shared += near_duplicate_questions(tables[a], tables[b], min_similarity)
        if shared:
            leaks.append(f"{len(shared):,} questions in both {a!r} and {b!r}, such as {shared[:3]}")
    if leaks:
        fix = "remove them from the training table with as2ray.corpora.leaks.remove_leaks"
        raise LeakError("; ".join(leaks), fix)


def remove_leaks(
    table: pa.Table, *others: pa.Table, min_similarity: float | None = None
) -> pa.Table:
    """Returns the table without the questions that are in any of the other tables.

    Args:
        table: The table to train on.
        others: Tables that are held out.
        min_similarity: Similarity from which two questions count as one; by default equal texts.
    """
    other_questions = {question for other in others for question in _group_questions(other)}
    leaked_texts: list[str] = []
    for question, texts in _group_questions(table).items():
        if question in other_questions:
            leaked_texts += texts
    if min_similarity is not None:
        for other in others:
            near = near_duplicate_questions(table, other, min_similarity)
            leaked_texts += [text for text, *_ in near]
    is_leaked = pc.is_in(table["question"], value_set=pa.array(leaked_texts, pa.string()))
    return table.filter(pc.invert(is_leaked))


def _group_questions(table: pa.Table) -> dict[str, list[str]]:
    """Returns the question texts of a table by the question that they are normalized to."""
    texts: dict[str, list[str]] = {}
    for text in pc.unique(table["question"]).to_pylist():
        texts.setdefault(normalize_question(text), []).append(text)
    return texts
