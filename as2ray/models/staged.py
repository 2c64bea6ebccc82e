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

from as2ray.errors import RecipeError
from as2ray.models.ranker import SETTINGS, Ranker, probability
from as2ray.pruning import Drop, Scored, Stages, drop_ratios, prune
from as2ray.text.packing import PackedBatch, Sequences


def check_exits(exits: Sequence[int], layers: int) -> None:
    """Refuses exits that are not ascending layers of the encoder."""
    fine = len(exits) > 0 and all(a < b for a, b in pairwise(exits))
    if not (fine and exits[0] >= 1 and exits[-1] <= layers):
        raise RecipeError(
            f"exits {list(exits)} of an encoder of {layers} layers",
            expected=f"ascending numbers of layers from 1 to {layers}, such as [2, 4, 6]",
            mend="correct the exits",
        )


class StagedRanker(Ranker):
    """A ranker whose network's configuration has `exits` and `drop` in its entry `as2ray`."""

    window_tokens = 65_536
    """Tokens of whole questions that go through the stages together; a larger question alone."""

    @abstractmethod
    def forward(self, batch: PackedBatch, exits: Sequence[int] | None = None) -> Tensor:
        """Logits of stages, nothing dropped, shape [sequences, stages asked for, labels].

        Args:
            batch: Packed pairs.
            exits: Numbers of the stages, from 0, ascending; all by default.
        """

    @abstractmethod
    def stages(self, encoded: Sequences, rows: np.ndarray, question: np.ndarray) -> Stages:
        """One pass of whole questions through the stages.

        Args:
            encoded: Token sequences.
            rows: Numbers of those that take part, longest first, shape [n].
            question: Number of each one's question, shape [n].
        """

    @property
    def drop(self) -> list[float]:
        """Drop ratio after each stage but the last."""
        return list(getattr(self.network.config, SETTINGS)["drop"])

    @drop.setter
    def drop(self, drop: Drop) -> None:
        getattr(self.network.config, SETTINGS)["drop"] = drop_ratios(drop, len(self.exits)).tolist()

    def settings(self) -> dict[str, Any]:
        """What its checkpoint says beside the network's configuration."""
        return dict(getattr(self.network.config, SETTINGS))

    def stage_scores(self, batch: PackedBatch, exits: Sequence[int] | None = None) -> Tensor:
        """Probabilities of stages, nothing dropped, shape [sequences, stages asked for]."""
        return probability(self(batch, exits))

    def probabilities(self, batch: PackedBatch) -> Tensor:
        """Of the last stage, nothing dropped, shape [sequences]."""
        return self.stage_scores(batch, [len(self.exits) - 1])[:, 0]

    def two_logits(self, batch: PackedBatch) -> Tensor:
        """Of the last stage; where that is several heads, of their common probability."""
        # A probability that rounds to 0 or 1 has no finite logit.
        edge = torch.finfo(torch.float32).eps
        answer = self.probabilities(batch).clamp(edge, 1.0 - edge)
        return torch.stack([(-answer).log1p(), answer.log()], 1)

    @torch.inference_mode()
    def score_exits(self, questions: Sequence[str], candidates: Sequence[str]) -> np.ndarray:
        """What every stage says of every pair; float32, shape [pairs, stages]."""
        batches = self.pack(self.tokenizer.encode(questions, candidates))
        return self._by_row(batches, (len(questions), len(self.exits)), self.stage_scores)

    @torch.inference_mode()
    def score_sequences(
        self, encoded: Sequences, question: np.ndarray, drop: Drop | None = None
    ) -> Scored:
        """Scores, candidates dropped between the stages; see `Ranker.score_pairs`."""
        drop = self.drop if drop is None else drop
        ratios = drop_ratios(drop, len(self.exits), int(question.max(initial=-1)) + 1)
        score = np.full(len(encoded), np.nan, np.float32)
        stage = np.zeros(len(encoded), np.int64)
        with self.at_rest():
            for rows in _windows(encoded.lengths, question, self.window_tokens):
                rows = rows[np.argsort(-encoded.lengths[rows], kind="stable")]
                numbers, own = np.unique(question[rows], return_inverse=True)
                score[rows], stage[rows] = prune(self.stages(encoded, rows, own), ratios[numbers])
        return Scored(score, stage)


def _windows(lengths: np.ndarray, question: np.ndarray, budget: int) -> Iterator[np.ndarray]:
    """Row numbers of whole questions of at most `budget` tokens together, or of one larger."""
    if not len(question):
        return
    order = np.argsort(question, kind="stable")
    used = np.cumsum(lengths[order])
    ends = np.append(np.flatnonzero(np.diff(question[order])) + 1, len(order))
    start = 0
    for end, following in zip(ends, [*ends[1:], None]):
        before = used[start - 1] if start else 0
        if following is None or used[following - 1] - before > budget:
            yield order[start:end]
            start = end
