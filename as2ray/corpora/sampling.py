"""Samples questions, negatives and passages of a table, splits it, and adds label noise."""

from collections.abc import Mapping
from hashlib import sha256
from itertools import pairwise
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, NonNegativeInt, PositiveInt

from as2ray.corpora.leaks import normalize_question
from as2ray.corpora.reader_utils import set_column
from as2ray.errors import CorpusError, validate_arguments
from as2ray.tables.schema import question_indices


@validate_arguments
def sample_questions(
    table: pa.Table,
    num_questions: PositiveInt | None = None,
    max_negatives: NonNegativeInt | None = None,
    seed: NonNegativeInt = 0,
    nested: bool = False,
    hard_negatives: NonNegativeInt = 0,
) -> pa.Table:
    """Samples questions and their negatives; all positives of a question and the order stay.

    Args:
        table: A candidates table, rows of a question adjacent. Texts are read for
            `hard_negatives` only.
        num_questions: Number of questions to sample; all by default.
        max_negatives: Maximum number of negatives of a question; all by default.
        seed: Seed of both samples.
        nested: Whether a larger sample with the same seed contains the smaller ones' questions.
        hard_negatives: How many of these negatives are those with the highest BM25, counted over
            the candidates of the question; the others are sampled at random.

    Raises:
        CorpusError: The table has fewer questions than `num_questions`.
    """
    question_index = question_indices(table)
    num_available = len(np.unique(question_index))
    if num_questions is not None and num_questions > num_available:
        raise CorpusError(f"cannot sample {num_questions:,} of {num_available:,} questions")
    rng = np.random.default_rng(seed)
    is_sampled = np.ones(table.num_rows, bool)
    if num_questions is not None:
        # A smaller sample is a prefix of a larger one only if both permute all questions.
        sample_size = num_available if nested else num_questions
        sample = rng.choice(num_available, sample_size, replace=False)[:num_questions]
        is_sampled &= np.isin(question_index, sample)
    if max_negatives is not None:
        is_negative = table["label"].to_numpy() == 0
        priorities = rng.random(len(question_index))
        if hard_negatives:
            rows = is_negative & is_sampled
            priorities[_find_hard_negatives(table, question_index, rows, hard_negatives)] -= 1.0
        is_sampled &= _limit_negatives(is_negative, question_index, max_negatives, priorities)
    return table.filter(pa.array(is_sampled))


def select_split(
    table: pa.Table, shares: Mapping[str, float], split: str, seed: int = 0
) -> pa.Table:
    """Returns one split of a table. Equal questions (see `leaks`) are in the same split.

    Questions are ordered by a hash of their text and of the seed, so most of them stay in their
    split when rows are added.

    Args:
        table: A candidates table.
        shares: Share of the questions of each split but `train`, which gets the rest; each split
            gets at least one question.
        split: The split: one of `shares`, or `train`.
        seed: Another seed gives other splits.

    Raises:
        CorpusError: There are not enough questions.
    """
    texts = pc.unique(table["question"]).to_pylist()
    normalized = {text: normalize_question(text) for text in texts}
    questions = sorted(
        set(normalized.values()), key=lambda text: sha256(f"{seed} {text}".encode()).digest()
    )
    splits, start = {}, 0
    for name, share in shares.items():
        end = start + max(1, round(share * len(questions)))
        splits[name] = {*questions[start:end]}
        start = end
    splits["train"] = {*questions[start:]}
    if not all(splits.values()):
        sizes = {name: len(split) for name, split in splits.items()}
        problem = f"{len(questions)} questions are too few for the splits {sizes}"
        raise CorpusError(problem, fix="give more questions, or smaller shares")
    kept = [text for text in texts if normalized[text] in splits[split]]
    return table.filter(pc.is_in(table["question"], value_set=pa.array(kept, pa.string())))


def _limit_negatives(
    is_negative: np.ndarray,
    question_index: np.ndarray,
    max_negatives: int,
    priorities: np.ndarray,
) -> np.ndarray:
    """Returns rows that are positive or among a question's `max_negatives` first negatives."""
    order = np.lexsort((priorities, ~is_negative, question_index))
    first = np.searchsorted(question_index[order], question_index[order])
    position = np.empty(len(question_index), np.int64)
    position[order] = np.arange(len(question_index)) - first
    return np.asarray(~is_negative | (position < max_negatives))


def _find_hard_negatives(
    table: pa.Table, question_index: np.ndarray, is_negative: np.ndarray, number: int
) -> np.ndarray:
    """Returns the rows of the `number` negatives of each question with the highest BM25."""
    from as2ray.text.bm25 import list_probabilities  # bm25s and scipy are loaded when needed

    questions, candidates = table["question"], table["candidate"]
    starts = np.flatnonzero(np.diff(question_index, prepend=-1))
    hard = []
    for start, end in pairwise([*starts.tolist(), len(question_index)]):
        rows = start + np.flatnonzero(is_negative[start:end])
        if len(rows):
            texts = candidates[start:end].to_pylist()
            scores = list_probabilities(questions[start].as_py(), texts)
            hard.append(rows[np.argsort(-scores[rows - start], kind="stable")[:number]])
    return np.concatenate(hard) if hard else np.zeros(0, np.int64)


def balance_passages(passages: pa.Table, seed: int = 0) -> pa.Table:
    """Samples as many irrelevant passages as there are relevant ones, over the whole table.

    The released code of Two-in-One trains on such a table. The order of the passages stays.

    Args:
        passages: A table by passages; see `as2ray.tables.schema.group_by_passage`.
        seed: Seed of the sample.

    Raises:
        CorpusError: No passage is relevant.
    """
    is_relevant = passages["passage_label"].to_numpy() > 0
    if not is_relevant.any():
        problem = f"none of {len(is_relevant):,} passages is relevant"
        raise CorpusError(problem, fix="train on a split that has labels")
    irrelevant = np.random.default_rng(seed).permutation(np.flatnonzero(~is_relevant))
    rows = np.append(np.flatnonzero(is_relevant), irrelevant[: is_relevant.sum()])
    return passages.take(pa.array(np.sort(rows)))


@validate_arguments
def flip_labels(
    table: pa.Table, fraction: Annotated[float, Field(ge=0, le=1)], seed: NonNegativeInt
) -> pa.Table:
    """Flips exactly `int(fraction * rows)` random labels; grades, if any, stay.

    Of WikiQA's 8,672 training pairs, 0.1 and 0.2 flip 867 and 1,734 (TANDA, Table 5).
    """
    labels = table["label"].to_numpy().copy()
    rng = np.random.default_rng(seed)
    flipped = rng.choice(len(labels), int(fraction * len(labels)), replace=False)
    labels[flipped] = 1 - labels[flipped]
    return set_column(table, "label", pa.array(labels, pa.int8()))
