"""Samples of a table: fewer questions, fewer negatives of each, or as many passages of both kinds.

Knows the candidates table, whole and by passages. Must not know any corpus or file.
"""

import numpy as np
import pyarrow as pa

from as2ray.corpora.reader_utils import set_column
from as2ray.errors import CorpusError
from as2ray.tables.schema import question_offsets


def sample_questions(
    table: pa.Table,
    num_questions: int | None = None,
    max_negatives: int | None = None,
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
    if seed < 0 or (max_negatives is not None and max_negatives < 0):
        raise CorpusError(
            f"negatives {max_negatives}, seed {seed}; expected 0 or more",
        )
    starts = question_offsets(table["question_id"])
    if num_questions is not None and not 0 < num_questions <= len(starts):
        raise CorpusError(
            f"a sample of {num_questions} of {len(starts)} questions; expected 1 to {len(starts)}",
        )
    rng = np.random.default_rng(seed)
    kept = np.ones(table.num_rows, bool)
    question = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, table.num_rows)))
    if num_questions is not None:
        drawn = rng.choice(len(starts), len(starts) if nested else num_questions, replace=False)
        drawn = drawn[:num_questions]
        kept &= np.isin(question, drawn)
    if max_negatives is not None:
        kept &= _limit_negatives(table["label"].to_numpy() == 0, question, max_negatives, rng)
    return table.filter(pa.array(kept))


def _limit_negatives(
    is_negative: np.ndarray,
    question_index: np.ndarray,
    max_negatives: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Rows that are positive, or among `most` negatives drawn of their question."""
    order = np.lexsort((rng.random(len(question_index)), ~is_negative, question_index))
    first = np.searchsorted(question_index[order], question_index[order])
    place = np.empty(len(question_index), np.int64)
    place[order] = np.arange(len(question_index)) - first
    return np.asarray(~is_negative | (place < max_negatives))


def balance_passages(passages: pa.Table, seed: int = 0) -> pa.Table:
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
            f"{len(relevant):,} passages, none relevant"
            "; expected at least one passage with a supporting fact",
            fix="train on a split that has labels",
        )
    others = np.flatnonzero(~relevant)
    drawn = np.random.default_rng(seed).permutation(others)[: relevant.sum()]
    return passages.take(pa.array(np.sort(np.append(np.flatnonzero(relevant), drawn))))


def flip_labels(table: pa.Table, fraction: float, seed: int) -> pa.Table:
    """The table with exactly `int(fraction * rows)` labels turned over, drawn without return.

    A tenth and a fifth of WikiQA's 8,672 training pairs are the paper's 867 and 1,734. Grades,
    where the table has them, stay as they were.

    Raises:
        CorpusError: A fraction outside 0 to 1.
    """
    if not 0 <= fraction <= 1:
        raise CorpusError(
            f"fraction {fraction}; expected a number from 0 to 1",
            fix="0.1 flips a tenth",
        )
    labels = table["label"].to_numpy().copy()
    rng = np.random.default_rng(seed)
    flipped = rng.choice(len(labels), int(fraction * len(labels)), replace=False)
    labels[flipped] = 1 - labels[flipped]
    return set_column(table, "label", pa.array(labels, pa.int8()))
