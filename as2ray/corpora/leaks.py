"""Finds questions that are in two tables: two splits, or a transfer and a target corpus."""

import re
from collections.abc import Mapping
from itertools import combinations

import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import LeakError
from as2ray.text import word_overlap

_TRAILING_PUNCTUATION = re.compile(r"[\s?.!,;:'\"’”…]+$")


def normalize_question(question: str) -> str:
    """Returns the question case-folded, with single blanks and no punctuation at its end."""
    return _TRAILING_PUNCTUATION.sub("", " ".join(question.casefold().split()))


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


def check_leaks(tables: Mapping[str, pa.Table]) -> None:
    """Checks that no two of the named tables have a question in common.

    Raises:
        LeakError: Two tables share questions; the message has their number and examples.
    """
    leaks = [
        f"{len(shared):,} questions in both {a!r} and {b!r}, such as {shared[:3]}"
        for a, b in combinations(tables, 2)
        if (shared := shared_questions(tables[a], tables[b]))
    ]
    if leaks:
        fix = "remove them from the training table with as2ray.corpora.leaks.remove_leaks"
        raise LeakError("; ".join(leaks), fix)


def remove_leaks(table: pa.Table, *others: pa.Table) -> pa.Table:
    """Returns the table without the questions that are in any of the other tables."""
    other_questions = {question for other in others for question in _group_questions(other)}
    leaked_texts: list[str] = []
    for question, texts in _group_questions(table).items():
        if question in other_questions:
            leaked_texts += texts
    is_leaked = pc.is_in(table["question"], value_set=pa.array(leaked_texts, pa.string()))
    return table.filter(pc.invert(is_leaked))


def _group_questions(table: pa.Table) -> dict[str, list[str]]:
    """Returns the question texts of a table by the question that they are normalized to."""
    texts: dict[str, list[str]] = {}
    for text in pc.unique(table["question"]).to_pylist():
        texts.setdefault(normalize_question(text), []).append(text)
    return texts
