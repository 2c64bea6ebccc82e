"""Rankers that score packed batches of token sequences."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from as2ray.cascade.pruning import DropRatios, Pruning, StagedScores, concatenate_scores
from as2ray.errors import CheckpointError
from as2ray.models.encoder.cpu_parallel import parallel_map
from as2ray.models.ranker import Ranker, positive_probability
from as2ray.progress import count_rows
from as2ray.text.packing import PackedBatch, Prefixes, TokenSequences, pack_sequences

MAX_PREFIX_TOKENS = 8_192
"""Tokens of prefixes whose keys and values are kept at the same time."""

MAX_CONTINUED_TOKENS = 1_024
"""Longest text behind a shared prefix: its attention holds all products of its tokens in memory."""

SLICE_PAIRS = 8_192
"""Pairs that are tokenized while a GPU scores as many before them."""


class PackedRanker(Ranker):
    """A ranker whose network reads packed pairs, tokenized by one tokenizer."""

    @abstractmethod
    def forward(self, batch: PackedBatch) -> Tensor:
        """Returns logits, shape [sequences, labels]."""

    @property
    def shares_prefixes(self) -> bool:
        """Whether prefixes of prompts can be computed once per question."""
        return False

    def pack(self, sequences: TokenSequences) -> Iterator[PackedBatch]:
        """Packs sequences into batches for scoring, divided evenly among the threads.

        Prefixes that several sequences share are computed when a batch is taken, if the ranker
        `shares_prefixes`.
        """
        for rows in self._split_by_prefixes(sequences):
            part = self.share_prefixes(sequences if rows is None else sequences.take(rows))
            for batch in pack_sequences(part, self.balanced_budget(part.lengths)):
                if rows is not None:
                    data = {"row": rows[batch.sequence_data["row"]]}
                    batch = replace(batch, sequence_data=data)
                yield batch

    def _split_by_prefixes(self, sequences: TokenSequences) -> Iterator[np.ndarray | None]:
        """Yields the rows whose prefixes are kept at the same time; None for all rows."""
        if sequences.prefixes is None or not self.shares_prefixes:
            yield None
            return
        part = np.cumsum(sequences.prefixes.lengths) // MAX_PREFIX_TOKENS
        part_of_row = part[sequences.prefixes.index]
        for number in np.unique(part_of_row):
            yield np.flatnonzero(part_of_row == number)

    def share_prefixes(self, sequences: TokenSequences) -> TokenSequences:
        """Computes the prefixes that sequences share, and returns what follows them.

        Args:
            sequences: Whole sequences. They are returned as they are if the ranker does not share
                prefixes, if there are fewer than two sequences for each, or if one is too long.
        """
        prefixes = sequences.prefixes
        if prefixes is None or not self.shares_prefixes:
            return sequences
        used, index = np.unique(prefixes.index, return_inverse=True)
        longest = int((sequences.lengths - prefixes.lengths[prefixes.index]).max(initial=0))
        if len(sequences) < 2 * len(used) or longest > MAX_CONTINUED_TOKENS:
            return sequences
        prefixes = Prefixes(index, prefixes.lengths[used])
        heads, rest = replace(sequences, prefixes=prefixes).split_prefixes()
        states: list[Any] = [None] * len(used)
        batches = pack_sequences(heads, self.balanced_budget(heads.lengths))

        def compute(batch: PackedBatch) -> tuple[PackedBatch, list[Any]]:
            return batch, self.encoder.compute_prefixes(batch)

        for batch, parts in self.map_batches(compute, batches):
            for row, part in zip(batch.sequence_data["row"], parts):
                states[row] = part
        return replace(rest, prefixes=replace(prefixes, states=states))

    def predict_batch(self, batch: PackedBatch) -> Tensor:
        """Returns the probability of being an answer without dropping, shape [sequences]."""
        return positive_probability(self(batch))

    @property
    def num_outputs(self) -> int:
        """Exits and heads of a ranker that has several; 0 for others."""
        return 0

    def predict_outputs(self, batch: PackedBatch) -> Tensor:
        """Returns the probabilities of all exits and heads, if there are several, then the score.

        Nothing is dropped. Shape [sequences, outputs + 1].
        """
        return self.predict_batch(batch)[:, None]

    def predict_stages(self, batch: PackedBatch) -> Tensor:
        """Returns scores of stages without dropping, shape [sequences, stages]."""
        return self.predict_batch(batch)[:, None]

    def binary_logits(self, batch: PackedBatch) -> Tensor:
        """Returns logits of (not an answer, answer) without dropping, shape [sequences, 2]."""
        logits: Tensor = self(batch)
        return logits if logits.shape[-1] == 2 else functional.pad(logits, (1, 0))

    def predict_logits(self, batches: Iterable[PackedBatch], num_rows: int) -> np.ndarray:
        """Returns logits of (not an answer, answer) by row; float32, shape [rows, 2].

        Args:
            batches: Packed batches; `sequence_data["row"]` is the row of each sequence.
            num_rows: Number of rows; a row that is in no batch is NaN.
        """
        return self._predict_by_row(batches, (num_rows, 2), self.binary_logits)

    def predict_scores(self, batches: Iterable[PackedBatch], num_rows: int) -> np.ndarray:
        """Returns the probability of being an answer by row, without dropping.

        Args:
            batches: Packed batches; `sequence_data["row"]` is the row of each sequence.
            num_rows: Number of rows; a row that is in no batch is NaN.

        Returns:
            float32, shape [rows].
        """
        return self._predict_by_row(batches, (num_rows,), self.predict_batch)

    def predict_all_outputs(self, batches: Iterable[PackedBatch], num_rows: int) -> np.ndarray:
        """Returns `predict_outputs` by row; float32, shape [rows, outputs + 1].

        Args:
            batches: Packed batches, as in `predict_scores`.
            num_rows: Number of rows; a row that is in no batch is NaN.
        """
        shape = (num_rows, self.num_outputs + 1)
        return self._predict_by_row(batches, shape, self.predict_outputs)

    def predict_exits(self, questions: Sequence[str], candidates: Sequence[str]) -> np.ndarray:
        """Returns the scores of every stage without dropping; float32, shape [pairs, stages]."""
        return self.predict_sequence_exits(self.tokenizer.encode(questions, candidates))

    def predict_sequence_exits(self, sequences: TokenSequences) -> np.ndarray:
        """Returns the scores of every stage without dropping; float32, shape [pairs, stages]."""
        shape = (len(sequences), max(1, len(self.exit_layers)))
        return self._predict_by_row(self.pack(sequences), shape, self.predict_stages)

    def predict_pairs(
        self,
        questions: Sequence[str],
        candidates: Sequence[str],
        question_index: np.ndarray,
        drop_ratios: DropRatios | None = None,
        bm25_gaps: np.ndarray | None = None,
    ) -> StagedScores:
        """Scores pairs; see `Ranker.predict_pairs`, and for `bm25_gaps` `BM25Selection`.

        For a GPU, questions are tokenized in slices, each while the slice before is scored. On a
        CPU the encoder has all cores, so there is nothing to gain.
        """
        slices = _slice_questions(question_index) if self.tokenizes_ahead else []
        if len(slices) < 2:
            sequences = self.tokenizer.encode(questions, candidates)
            return self.predict_sequences(sequences, question_index, drop_ratios, bm25_gaps)
        pruning = self.resolve_pruning(drop_ratios, int(question_index.max()) + 1)

        def encode(rows: np.ndarray) -> TokenSequences:
            return self.tokenizer.encode(*([texts[i] for i in rows] for texts in pairs))

        pairs, parts = (questions, candidates), []
        for rows, sequences in zip(slices, parallel_map(encode, slices, 1, one_core_each=True)):
            numbers, index = np.unique(question_index[rows], return_inverse=True)
            part_pruning = None if pruning is None else pruning.select(numbers)
            gaps = None if bm25_gaps is None else bm25_gaps[rows]
            parts.append(self.predict_sequences(sequences, index, part_pruning, gaps))
        return concatenate_scores(parts, np.concatenate(slices))

    @property
    def tokenizes_ahead(self) -> bool:
        """Whether the next pairs are tokenized while others are scored."""
        return self.device.type == "cuda"

    def predict_sequences(
        self,
        sequences: TokenSequences,
        question_index: np.ndarray,
        drop_ratios: DropRatios | Pruning | None = None,
        bm25_gaps: np.ndarray | None = None,
    ) -> StagedScores:
        """Scores tokenized pairs; see `Ranker.predict_pairs`."""
        self.check_no_drop_ratios(drop_ratios)
        return StagedScores(self.predict_scores(self.pack(sequences), len(sequences)))

    @torch.inference_mode()
    def _predict_by_row(
        self,
        batches: Iterable[PackedBatch],
        shape: tuple[int, ...],
        predict: Callable[[PackedBatch], Tensor],
    ) -> np.ndarray:
        def predict_numpy(batch: PackedBatch) -> tuple[PackedBatch, np.ndarray]:
            return batch, predict(batch).float().cpu().numpy()

        predictions = np.full(shape, np.nan, np.float32)
        with self.scoring():
            for batch, values in self.map_batches(predict_numpy, batches):
                predictions[batch.sequence_data["row"]] = values
                count_rows(len(values))
        return predictions


def _slice_questions(question_index: np.ndarray) -> list[np.ndarray]:
    """Returns the rows of whole questions, in slices that begin at most `SLICE_PAIRS` apart."""
    order = np.argsort(question_index, kind="stable")
    questions = question_index[order]
    slice_index = np.searchsorted(questions, questions) // SLICE_PAIRS
    return np.split(order, np.flatnonzero(np.diff(slice_index)) + 1)


def as_packed_ranker(ranker: Ranker) -> PackedRanker:
    """Returns the ranker if it scores token sequences of pairs.

    Raises:
        CheckpointError: It scores text only, as ensembles and joint models do.
    """
    if not isinstance(ranker, PackedRanker):
        raise CheckpointError(
            f"{type(ranker).__name__} scores text only, but a ranker of token sequences is needed",
            fix="use a pointwise, cascade or sequential ranker",
        )
    return ranker
