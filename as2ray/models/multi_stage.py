"""Rankers of several stages: each scores what the stage before left of a question's candidates.

Knows pruning and packed text. Must not know what a stage is.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from as2ray.cascade.pruning import DropRatios, StagedScores, StageScorer, expand_drop_ratios, prune
from as2ray.errors import ConfigError
from as2ray.models.ranker import CONFIG_KEY, Ranker, positive_probability
from as2ray.text.packing import PackedBatch, TokenSequences


def check_exit_layers(exit_layers: Sequence[int], num_layers: int) -> None:
    """Refuses exits that are not ascending layers of the encoder."""
    fine = len(exit_layers) > 0 and all(a < b for a, b in pairwise(exit_layers))
    if not (fine and exit_layers[0] >= 1 and exit_layers[-1] <= num_layers):
        raise ConfigError(
            f"exits {list(exit_layers)} of an encoder of {num_layers} layers"
            f"; expected ascending numbers of layers from 1 to {num_layers}, such as [2, 4, 6]",
        )


class MultiStageRanker(Ranker):
    """A ranker whose network's configuration has `exits` and `drop` in its entry `as2ray`."""

    max_pass_tokens = 65_536
    """Tokens of whole questions that go through the stages together; a larger question alone."""

    @abstractmethod
    def forward(self, batch: PackedBatch, exit_indices: Sequence[int] | None = None) -> Tensor:
        """Logits of stages, nothing dropped, shape [sequences, stages asked for, labels].

        Args:
            batch: Packed pairs.
            exits: Numbers of the stages, from 0, ascending; all by default.
        """

    @abstractmethod
    def start_pass(
        self, encoded: TokenSequences, rows: np.ndarray, question_index: np.ndarray
    ) -> StageScorer:
        """One pass of whole questions through the stages.

        Args:
            encoded: Token sequences.
            rows: Numbers of those that take part, longest first, shape [n].
            question: Number of each one's question, shape [n].
        """

    @property
    def drop_ratios(self) -> list[float]:
        """Drop ratio after each stage but the last."""
        return list(getattr(self.network.config, CONFIG_KEY)["drop"])

    @drop_ratios.setter
    def drop_ratios(self, drop: DropRatios) -> None:
        getattr(self.network.config, CONFIG_KEY)["drop"] = expand_drop_ratios(
            drop, len(self.exit_layers)
        ).tolist()

    def checkpoint_settings(self) -> dict[str, Any]:
        """What its checkpoint says beside the network's configuration."""
        return dict(getattr(self.network.config, CONFIG_KEY))

    def predict_stages(
        self, batch: PackedBatch, exit_indices: Sequence[int] | None = None
    ) -> Tensor:
        """Probabilities of stages, nothing dropped, shape [sequences, stages asked for]."""
        return positive_probability(self(batch, exit_indices))

    def predict_batch(self, batch: PackedBatch) -> Tensor:
        """Of the last stage, nothing dropped, shape [sequences]."""
        return self.predict_stages(batch, [len(self.exit_layers) - 1])[:, 0]

    def binary_logits(self, batch: PackedBatch) -> Tensor:
        """Of the last stage; where that is several heads, of their common probability."""
        # A probability that rounds to 0 or 1 has no finite logit.
        edge = torch.finfo(torch.float32).eps
        answer = self.predict_batch(batch).clamp(edge, 1.0 - edge)
        return torch.stack([(-answer).log1p(), answer.log()], 1)

    @torch.inference_mode()
    def predict_exits(self, questions: Sequence[str], candidates: Sequence[str]) -> np.ndarray:
        """What every stage says of every pair; float32, shape [pairs, stages]."""
        batches = self.pack(self.tokenizer.encode(questions, candidates))
        return self._predict_by_row(
            batches, (len(questions), len(self.exit_layers)), self.predict_stages
        )

    @torch.inference_mode()
    def predict_sequences(
        self,
        encoded: TokenSequences,
        question_index: np.ndarray,
        drop_ratios: DropRatios | None = None,
    ) -> StagedScores:
        """Scores, candidates dropped between the stages; see `Ranker.score_pairs`."""
        drop_ratios = self.drop_ratios if drop_ratios is None else drop_ratios
        ratios = expand_drop_ratios(
            drop_ratios, len(self.exit_layers), int(question_index.max(initial=-1)) + 1
        )
        score = np.full(len(encoded), np.nan, np.float32)
        stage = np.zeros(len(encoded), np.int64)
        with self.scoring():
            for rows in _split_into_passes(encoded.lengths, question_index, self.max_pass_tokens):
                rows = rows[np.argsort(-encoded.lengths[rows], kind="stable")]
                numbers, own = np.unique(question_index[rows], return_inverse=True)
                score[rows], stage[rows] = prune(
                    self.start_pass(encoded, rows, own), ratios[numbers]
                )
        return StagedScores(score, stage)


def _split_into_passes(
    lengths: np.ndarray, question_index: np.ndarray, max_pass_tokens: int
) -> Iterator[np.ndarray]:
    """Row numbers of whole questions of at most `budget` tokens together, or of one larger."""
    if not len(question_index):
        return
    order = np.argsort(question_index, kind="stable")
    used = np.cumsum(lengths[order])
    ends = np.append(np.flatnonzero(np.diff(question_index[order])) + 1, len(order))
    start = 0
    for end, following in zip(ends, [*ends[1:], None]):
        before = used[start - 1] if start else 0
        if following is None or used[following - 1] - before > max_pass_tokens:
            yield order[start:end]
            start = end
