"""Samples of a table: fewer questions, fewer negatives of each, or as many passages of both kinds.

Knows the candidates table, whole and by passages. Must not know any corpus or file.
"""

import numpy as np
import pyarrow as pa

from as2ray.errors import CorpusError
from as2ray.records import question_starts


def sample(
    table: pa.Table,
    questions: int | None = None,
    negatives: int | None = None,
    seed: int = 0,
    nested: bool = False,
) -> pa.Table:
    """Some of the questions, each with all positives and some of its negatives, in order.

    Args:
        table: Rows of one question adjacent.
        questions: How many to draw; all by default.
        negatives: Most negatives of a question; all by default.
        seed: Of both draws.
        nested: Whether a larger sample of the same seed holds the questions of a smaller one.

    Raises:
        CorpusError: More questions than there are, or a negative number.
    """
    if seed < 0 or (negatives is not None and negatives < 0):
        raise CorpusError(
            f"negatives {negatives}, seed {seed}",
            expected="0 or more",
            mend="correct the number",
        )
    starts = question_starts(table["question_id"])
    if questions is not None and not 0 < questions <= len(starts):
        raise CorpusError(
            f"a sample of {questions} of {len(starts)} questions",
            expected=f"1 to {len(starts)}",
            mend="lower the number",
        )
    rng = np.random.default_rng(seed)
    kept = np.ones(table.num_rows, bool)
    question = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, table.num_rows)))
    if questions is not None:
        drawn = rng.choice(len(starts), len(starts) if nested else questions, replace=False)
        drawn = drawn[:questions]
        kept &= np.isin(question, drawn)
    if negatives is not None:
        kept &= _few(table["label"].to_numpy() == 0, question, negatives, rng)
    return table.filter(pa.array(kept))


def _few(
    negative: np.ndarray, question: np.ndarray, most: int, rng: np.random.Generator
) -> np.ndarray:
    """Rows that are positive, or among `most` negatives drawn of their question."""
    order = np.lexsort((rng.random(len(question)), ~negative, question))
    first = np.searchsorted(question[order], question[order])
    place = np.empty(len(question), np.int64)
    place[order] = np.arange(len(question)) - first
    return np.asarray(~negative | (place < most))


def balanced(passages: pa.Table, seed: int = 0) -> pa.Table:
    """All relevant passages and as many others, drawn from the whole table, in order.

    What the released code of Two-in-One trains on.

    Args:
        passages: A table by passages (`records.by_passage`).
        seed: Of the draw.

    Raises:
        CorpusError: No relevant passage.
    """
    relevant = passages["passage_label"].to_numpy() > 0
    if not relevant.any():
        raise CorpusError(
            f"{len(relevant):,} passages, none relevant",
            expected="at least one passage with a supporting fact",
            mend="train on a split that has labels",
        )
    others = np.flatnonzero(~relevant)
    drawn = np.random.default_rng(seed).permutation(others)[: relevant.sum()]
    return passages.take(pa.array(np.sort(np.append(np.flatnonzero(relevant), drawn))))
