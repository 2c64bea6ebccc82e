"""Questions that stand in two tables: two splits, or a transfer and a target corpus.

Knows the question column of a table. Must not know any corpus or file.
"""

import re
from collections.abc import Mapping
from itertools import combinations

import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import LeakError
from as2ray.text import word_overlap

_TRAILING_PUNCTUATION = re.compile(r"[\s?.!,;:'\"’”…]+$")


def normalize_question(question: str) -> str:
    """The question in folded case, its blanks collapsed, without punctuation at its end."""
    return _TRAILING_PUNCTUATION.sub("", " ".join(question.casefold().split()))


def shared_questions(a: pa.Table, b: pa.Table) -> list[str]:
    """The normalised questions that both tables have, sorted.

    Only the column `question` is read, so a large prepared corpus can be given as that alone.
    """
    return sorted(_group_questions(a).keys() & _group_questions(b).keys())


def near_duplicate_questions(
    a: pa.Table, b: pa.Table, min_similarity: float = 0.75
) -> list[tuple[str, str, float]]:
    """Questions of two tables that have most of their words in common, the most alike first.

    FlexNeuART's check of splits compares questions in this way (`check_split_leak.py`).

    Args:
        a: A table.
        b: Another.
        least: Words of both questions over the words of either.
    """
    ours, theirs = (pc.unique(t["question"]).to_pylist() for t in (a, b))
    found = word_overlap.find_near_duplicates(ours, theirs, min_similarity)
    return sorted(((ours[i], theirs[j], like) for i, j, like in found), key=lambda x: -x[2])


def check_leaks(tables: Mapping[str, pa.Table]) -> None:
    """Compares every two of the named tables.

    Raises:
        LeakError: Two share questions; the message has the number for each pair, and examples.
    """
    leaks = {
        (a, b): shared
        for a, b in combinations(tables, 2)
        if (shared := shared_questions(tables[a], tables[b]))
    }
    if leaks:
        told = (
            f"{len(shared):,} questions in both {a!r} and {b!r}, such as {shared[:3]}"
            for (a, b), shared in leaks.items()
        )
        raise LeakError(
            ("; ".join(told)) + "; expected no question in two tables",
            fix="remove them from the one you train on with as2ray.corpora.leaks.drop",
        )


def remove_leaks(table: pa.Table, *others: pa.Table) -> pa.Table:
    """The table without the questions that any of the other tables has."""
    taken = {question for other in others for question in _group_questions(other)}
    texts = [t for q, those in _group_questions(table).items() if q in taken for t in those]
    shared = pc.is_in(table["question"], value_set=pa.array(texts, pa.string()))
    return table.filter(pc.invert(shared))


def _group_questions(table: pa.Table) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    for text in pc.unique(table["question"]).to_pylist():
        texts.setdefault(normalize_question(text), []).append(text)
    return texts
