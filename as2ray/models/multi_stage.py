"""Rankers of several stages; each scores the candidates that the stage before has kept."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from as2ray.cascade.pruning import DropRatios, StagedScores, expand_drop_ratios, prune
from as2ray.models.packed_ranker import PackedRanker
from as2ray.models.ranker import CONFIG_KEY, positive_probability
from as2ray.text.packing import PackedBatch, TokenSequences


@dataclass
class StagePass(ABC):
    """A pass of whole questions through the stages of a ranker, which `prune` runs."""

    ranker: Any
    sequences: TokenSequences
    """Tokenized pairs."""
    rows: np.ndarray
    """Indices of the sequences in this pass, longest first, shape [n]."""
    question_index: np.ndarray
    """Index of the question of each, shape [n]."""

    @abstractmethod
    def score(self, stage_index: int, rows: np.ndarray) -> np.ndarray:
        """Scores the remaining candidates with one stage; see `StageScorer.score`."""


class MultiStageRanker(PackedRanker):
    """A ranker whose `config.json` has `exit_layers` and `drop_ratios` in its entry `as2ray`."""

    stage_pass: type[StagePass]
    """Class of the passes through the stages."""
    max_pass_tokens = 65_536
    """Token budget of the questions that go through the stages together; a larger question goes
    alone."""

    @abstractmethod
    def forward(self, batch: PackedBatch, exit_indices: Sequence[int] | None = None) -> Tensor:
        """Returns logits of stages without dropping, shape [sequences, requested stages, labels].

        Args:
            batch: Packed pairs.
            exit_indices: Indices of the requested stages, ascending; by default all.
        """

    @property
    def drop_ratios(self) -> list[float]:
        """Drop ratio after each stage but the last."""
        return list(getattr(self.network.config, CONFIG_KEY)["drop_ratios"])

    @drop_ratios.setter
    def drop_ratios(self, drop_ratios: DropRatios) -> None:
        expanded = expand_drop_ratios(drop_ratios, len(self.exit_layers))
        getattr(self.network.config, CONFIG_KEY)["drop_ratios"] = expanded.tolist()

    def checkpoint_settings(self) -> dict[str, Any]:
        """Returns the entry `as2ray` of its `config.json`, without lengths and calibration."""
        return dict(getattr(self.network.config, CONFIG_KEY))

    def predict_stages(
        self, batch: PackedBatch, exit_indices: Sequence[int] | None = None
    ) -> Tensor:
        """Returns scores of stages without dropping, shape [sequences, requested stages]."""
        return positive_probability(self(batch, exit_indices))

    def predict_batch(self, batch: PackedBatch) -> Tensor:
        """Returns the score of the last stage without dropping, shape [sequences]."""
        return self.predict_stages(batch, [len(self.exit_layers) - 1])[:, 0]

    def binary_logits(self, batch: PackedBatch) -> Tensor:
        """Returns logits of the last stage's score, shape [sequences, 2].

        The last stage may have several heads, whose scores are averaged.
        """
        # A probability that rounds to 0 or 1 has no finite logit.
        eps = torch.finfo(torch.float32).eps
        probabilities = self.predict_batch(batch).clamp(eps, 1.0 - eps)
        return torch.stack([(-probabilities).log1p(), probabilities.log()], 1)

    @torch.inference_mode()
    def predict_sequences(
        self,
        sequences: TokenSequences,
        question_index: np.ndarray,
        drop_ratios: DropRatios | None = None,
    ) -> StagedScores:
        """Scores tokenized pairs, dropping candidates in between; see `Ranker.predict_pairs`."""
        ratios = expand_drop_ratios(
            self.drop_ratios if drop_ratios is None else drop_ratios,
            len(self.exit_layers),
            int(question_index.max(initial=-1)) + 1,
        )
        scores = np.full(len(sequences), np.nan, np.float32)
        stage_index = np.zeros(len(sequences), np.int64)
        with self.scoring():
            for rows in _split_into_passes(sequences.lengths, question_index, self.max_pass_tokens):
                rows = rows[np.argsort(-sequences.lengths[rows], kind="stable")]
                questions, pass_question_index = np.unique(
                    question_index[rows], return_inverse=True
                )
                scorer = self.stage_pass(self, sequences, rows, pass_question_index)
                scores[rows], stage_index[rows] = prune(scorer, ratios[questions])
        return StagedScores(scores, stage_index)


def _split_into_passes(
    lengths: np.ndarray, question_index: np.ndarray, max_pass_tokens: int
) -> Iterator[np.ndarray]:
    """Yields the rows of whole questions with at most `max_pass_tokens` tokens.

    A question with more tokens is yielded alone.
    """
    if not len(question_index):
        return
    order = np.argsort(question_index, kind="stable")
    num_tokens = np.cumsum(lengths[order])
    ends = np.append(np.flatnonzero(np.diff(question_index[order])) + 1, len(order))
    start = 0
    for end, next_end in zip(ends, [*ends[1:], None]):
        tokens_before = num_tokens[start - 1] if start else 0
        if next_end is None or num_tokens[next_end - 1] - tokens_before > max_pass_tokens:
            yield order[start:end]
            start = end
