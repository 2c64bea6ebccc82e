"""The order of an epoch: which pairs make up which step, on which rank, in which packed batch.

Knows Parquet files, the tokenizer and packing. Must not know models, losses or Ray: the same
stream runs in a thread of a notebook and in the tasks of a cluster.

The rows of a corpus are numbered through all its files. An epoch shuffles spans of rows, lays
them end to end, cuts the result in *windows*, and shuffles inside each window. A step is the next
`batch` pairs. All of it follows from the seed and the epoch, so every rank can find its share
without asking, any number of ranks trains on the same steps, and a run resumes at any step.

What a row is, and whether an epoch goes through rows at all, other streams may say otherwise: of
passages (`passage_stream`), of questions (`list_stream`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.errors import CorpusError, RecipeError
from as2ray.text.files import PairFiles
from as2ray.text.packing import PackedBatch, Sequences, cut, pack, ragged_arange
from as2ray.text.tokens import PairTokenizer

SPAN = 2_048
"""Rows that stay together when an epoch is shuffled over the whole corpus."""

WINDOW = 32_768
"""About how many rows are shuffled together, tokenised by one task, and repeated at most after a
crash in mid-window."""


LOGITS = ("not_answer", "answer")
"""Columns of a teacher's stored logits, beside `candidate_id`."""

TEACHERS = "teacher_logits"
"""What belongs to each sequence: its teachers' logits, one pair after the other."""


@dataclass(frozen=True)
class MicroBatch:
    """What one forward and backward pass reads: a packed share of a step."""

    step: int
    """Number of the step in its epoch, from 0."""
    pairs: int
    """Pairs of the whole step over all ranks, or questions of a stream of lists: what the loss is
    divided by."""
    last: bool
    """Whether this rank's share of the step ends here."""
    batch: PackedBatch
    """The pairs; where a rank's share of a step is empty, one token that must weigh nothing."""

    @property
    def empty(self) -> bool:
        """Whether the batch only keeps the ranks in step."""
        return bool(self.batch.of_sequence["row"][0] < 0)

    def emptied(self) -> "MicroBatch":
        """An empty batch for the same step."""
        return replace(self, batch=placeholder(self.batch.of_sequence, self.batch.of_mark))


class Encoded(Protocol):
    """Some rows of a corpus as tokens."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, shape [rows]."""

    def pack(self, which: np.ndarray) -> PackedBatch:
        """The rows `which` as one batch."""

    def placeholder(self) -> PackedBatch:
        """One token that must weigh nothing, with all that belongs to a row."""


@dataclass(frozen=True)
class Pairs:
    """Rows that are pairs, one sequence each."""

    sequences: Sequences
    columns: Mapping[str, np.ndarray]
    """What belongs to each pair, first axis [pairs]."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each pair, shape [pairs]."""
        return self.sequences.lengths

    def pack(self, which: np.ndarray) -> PackedBatch:
        """The pairs `which` as one batch."""
        return self.sequences.pack(which, self.columns)

    def placeholder(self) -> PackedBatch:
        """One token that must weigh nothing."""
        return placeholder(self.columns)


@dataclass(frozen=True)
class Stream:
    """The epochs of a corpus as packed batches of one rank."""

    texts: ClassVar[tuple[str, ...]] = ("question", "candidate")
    """Columns that become tokens."""

    files: PairFiles
    tokenizer: PairTokenizer
    batch: int
    """Pairs of a step over all ranks (the global batch); of a stream of lists, questions."""
    max_tokens: int = 8_192
    """Most tokens of a packed batch; a share that needs more is accumulated."""
    seed: int = 0
    rank: int = 0
    ranks: int = 1
    columns: tuple[str, ...] = ("label",)
    """Numeric columns that travel with each pair."""
    window: int = WINDOW
    teachers: tuple[PairFiles, ...] = ()
    """Stored logits of each teacher, row for row beside `files`."""

    def __post_init__(self) -> None:
        least = self.tokenizer.max_length * self.width
        if self.batch < 1 or self.max_tokens < least:
            raise RecipeError(
                f"batch={self.batch}, max_tokens={self.max_tokens:,}",
                expected=f"batch >= 1 and max_tokens >= {least} ({self.width} x max_length)",
                mend="correct the recipe",
            )
        sizes = [len(teacher) for teacher in self.teachers]
        if any(size != len(self.files) for size in sizes):
            raise CorpusError(
                f"stored logits of {sizes} pairs for {len(self.files):,} pairs",
                expected="logits of every teacher for every pair",
                mend="score these tables with the teachers, to the end",
            )

    @property
    def width(self) -> int:
        """Most sequences of a unit."""
        return 1

    @property
    def units(self) -> int:
        """What an epoch goes through: rows, here."""
        return len(self.files)

    @property
    def steps(self) -> int:
        """Steps of an epoch; the last may be smaller, and no pair is left out."""
        return -(-self.units // self.batch)

    @cached_property
    def steps_a_window(self) -> int:
        """Steps that are shuffled and tokenised together."""
        return max(1, self.window // (self.batch * self.width))

    @property
    def windows(self) -> int:
        """Windows of an epoch."""
        return -(-self.steps // self.steps_a_window)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[MicroBatch]:
        """The packed batches of this rank from step `start` on."""
        for window in range(start // self.steps_a_window, self.windows):
            yield from self.read_window(epoch, window, start)

    def read_window(self, epoch: int, window: int, start: int = 0) -> Iterator[MicroBatch]:
        """The packed batches of this rank in one window, from step `start` of the epoch on."""
        units = self._shuffled(epoch, window)
        first = window * self.steps_a_window
        step = first + np.arange(len(units)) // self.batch
        mine = (np.arange(len(units)) % self.batch % self.ranks == self.rank) & (step >= start)
        rows = self.drawn(units, epoch, window)
        # Where this rank has no pair in the window, one row still tells the columns' shapes.
        encoded = self.encode(rows[mine] if mine.any() else rows[:1])
        at = 0
        for number, pairs in zip(*np.unique(step, return_counts=True)):
            if number < start:
                continue
            size = int(np.sum(mine & (step == number)))
            yield from self._share(int(number), int(pairs), encoded, at, size)
            at += size

    def drawn(self, units: np.ndarray, epoch: int, window: int) -> np.ndarray:
        """The rows that the units of a window stand for; the same on every rank."""
        return units

    def _shuffled(self, epoch: int, window: int) -> np.ndarray:
        """Numbers of a window's rows or questions in the epoch's order, shape [units]."""
        total, size = self.units, self.steps_a_window * self.batch
        spans = np.random.default_rng([self.seed, epoch]).permutation(-(-total // SPAN))
        lengths = np.minimum(SPAN, total - spans * SPAN)
        ends = np.cumsum(lengths)
        begin, end = window * size, min((window + 1) * size, total)
        touched = slice(np.searchsorted(ends, begin, side="right"), np.searchsorted(ends, end) + 1)
        rows = np.repeat(spans[touched] * SPAN, lengths[touched])
        rows = rows + ragged_arange(lengths[touched])
        offset = begin - (ends[touched.start] - lengths[touched.start])
        rows = rows[offset : offset + end - begin]
        return np.random.default_rng([self.seed, epoch, window]).permutation(rows)

    def encode(self, rows: np.ndarray) -> Encoded:
        """The rows `rows` of the corpus as tokens, in that order."""
        ids = ["candidate_id"] if self.teachers else []
        table = self.files.read(rows, [*self.texts, *ids, *self.columns])
        sequences = self.tokenise(table)
        columns = {name: _numbers(table[name]) for name in self.columns}
        if self.teachers:
            of_each = [_taught(teacher, rows, table) for teacher in self.teachers]
            columns[TEACHERS] = np.concatenate(of_each, 1)
        return Pairs(sequences, {"row": rows, **columns})

    def tokenise(self, table: pa.Table) -> Sequences:
        """The token sequences of rows of the files."""
        return self.tokenizer.encode(*(table[name].to_pylist() for name in self.texts))

    def mean_length(self, sample: int = 4_096) -> float:
        """Mean tokens of a unit, over some spread evenly through the corpus."""
        units = np.linspace(0, self.units - 1, min(sample, self.units)).astype(np.int64)
        return float(self.encode(self.drawn(units, 0, 0)).lengths.mean())

    def _share(
        self, step: int, pairs: int, encoded: Encoded, start: int, size: int
    ) -> Iterator[MicroBatch]:
        if size == 0:
            yield MicroBatch(step, pairs, True, encoded.placeholder())
            return
        lengths = encoded.lengths[start : start + size]
        # The windows of a passage stay together: one that is longer makes room for itself.
        groups = list(cut(lengths, max(self.max_tokens, int(lengths.max()))))
        for i, group in enumerate(groups):
            yield MicroBatch(step, pairs, i == len(groups) - 1, encoded.pack(start + group))


def _taught(teacher: PairFiles, rows: np.ndarray, table: pa.Table) -> np.ndarray:
    """A teacher's logits of rows of a table, shape [rows, 2]."""
    stored = teacher.read(rows, ["candidate_id", *LOGITS])
    other = pc.not_equal(stored["candidate_id"], table["candidate_id"])
    if pc.any(other).as_py():
        at = pc.index(other, True).as_py()
        raise CorpusError(
            f"stored logits of candidate {stored['candidate_id'][at]} in row {rows[at]:,}",
            expected=f"of candidate {table['candidate_id'][at]}, the table's",
            mend="score this table again: its logits were made from another",
        )
    return np.stack([_numbers(stored[name]) for name in LOGITS], 1)


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """A numeric or list-of-numbers column as an array, shape [rows] or [rows, width]."""
    if pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
        flat = column.combine_chunks().flatten().to_numpy(zero_copy_only=False)
        return np.asarray(flat, np.float32).reshape(len(column), -1)
    return np.asarray(column.to_numpy(), np.float32)


def placeholder(
    of_sequence: Mapping[str, np.ndarray], of_mark: Mapping[str, np.ndarray] | None = None
) -> PackedBatch:
    """One token that must weigh nothing: its `row` is -1.

    Args:
        of_sequence: Arrays as belong to sequences; a row of zeros stands for each.
        of_mark: Arrays as belong to marks; where there are any, the token is a mark.
    """
    zero, one = np.zeros(1, np.int32), np.ones(1, np.int32)
    kinds = (of_sequence, of_mark or {})
    empty, mark = ({n: np.zeros((1, *v.shape[1:]), v.dtype) for n, v in k.items()} for k in kinds)
    marks = np.zeros(len(mark) and 1, np.int64)
    return PackedBatch(zero, zero, zero, one, {**empty, "row": np.full(1, -1)}, marks, mark)


def pack_pairs(
    tokenizer: PairTokenizer,
    questions: Sequence[str],
    candidates: Sequence[str],
    max_tokens: int = 8_192,
) -> Iterator[PackedBatch]:
    """Pairs as packed batches for scoring; `of_sequence["row"]` is each pair's number."""
    encoded = tokenizer.encode(questions, candidates)
    yield from pack(encoded, max(max_tokens, tokenizer.max_length))
