"""The desk: one ranker that answers several users' questions in one pass.

Knows rankers and the service's questions. Must not know HTTP, Ray or who waits.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from as2ray.errors import As2rayError, EvaluationError
from as2ray.models.ranker import Ranker, check_readable
from as2ray.models.staged import StagedRanker
from as2ray.pruning import Scored, drop_ratios, kept
from as2ray.serving.asked import Answer, Asked, Refused
from as2ray.serving.service import Facts
from as2ray.serving.settings import Limits
from as2ray.text.packing import Sequences, concatenate


@dataclass(eq=False)
class Read:
    """A question that was read: its pairs as tokens."""

    desk: "Desk"
    asked: Asked
    encoded: Sequences
    drop: np.ndarray | None
    """Drop ratio after each stage but the last, shape [stages - 1]; None of one stage."""
    arrived: float
    """By the monotonic clock of the machine that read it."""
    read: float
    """When it was read."""

    @property
    def tokens(self) -> int:
        """Of all pairs."""
        return len(self.encoded.token_ids)


class Desk:
    """A ranker, and what may be asked of it.

    Args:
        ranker: Any.
        limits: What a request may ask.
    """

    def __init__(self, ranker: Ranker, limits: Limits) -> None:
        self.ranker, self.limits = ranker, limits

    @property
    def facts(self) -> Facts:
        """What a client may want to know."""
        drop = self.ranker.drop if isinstance(self.ranker, StagedRanker) else ()
        ranker = self.ranker
        return Facts(ranker.tokenizer.max_length, ranker.exits, tuple(drop), ranker.threshold)

    def read(self, asked: Asked) -> Read:
        """Tokenises a question's pairs; safe in any thread.

        Raises:
            Refused: A text that no tokenizer reads, drop ratios that this ranker cannot follow, or
                more tokens than a request may have.
        """
        arrived = time.monotonic()
        texts = {"the question": asked.question}
        texts |= {f"candidate {i}": text for i, text in enumerate(asked.candidates)}
        for name, text in texts.items():
            _readable(name, text)
        drop = self._drop(asked)
        questions = [asked.question] * len(asked.candidates)
        encoded = self.ranker.tokenizer.encode(questions, asked.candidates)
        if len(encoded.token_ids) > self.limits.tokens:
            raise Refused(
                "too_large",
                f"{len(encoded.token_ids):,} tokens",
                expected=f"at most {self.limits.tokens:,} over all pairs",
                mend="send fewer candidates at a time",
            )
        return Read(self, asked, encoded, drop, arrived, time.monotonic())

    def _drop(self, asked: Asked) -> np.ndarray | None:
        if not isinstance(self.ranker, StagedRanker):
            if asked.drop is None:
                return None
            raise Refused(
                "invalid",
                "drop ratios for a ranker of one stage",
                expected="no drop ratios",
                mend="leave them out, or name a cascade",
            )
        stages = len(self.ranker.exits)
        if asked.drop is None:
            return drop_ratios(self.ranker.drop, stages)
        try:
            ratios = drop_ratios(asked.drop, stages)
        except As2rayError as error:
            raise Refused("invalid", error.came, expected=error.expected, mend=error.mend) from None
        if np.max(ratios, initial=0.0) > self.limits.drop:
            raise Refused(
                "invalid",
                f"drop ratios {ratios.tolist()}",
                expected=f"at most {self.limits.drop:g} each",
                mend="lower them",
            )
        return ratios

    def rank(self, batch: Sequence[Read], relief: float = 0.0) -> list[Answer]:
        """Ranks questions together.

        Args:
            batch: Questions that this desk read.
            relief: Drop ratio that those are raised to which did not ask for their own.
        """
        began = time.monotonic()
        drops = [self._relieved(read, relief) for read in batch]
        scored = self._scored(batch, drops)
        rankings = self.ranker.rankings([read.asked.candidates for read in batch], scored)
        ended = time.monotonic()
        answers = []
        for read, drop, ranking in zip(batch, drops, rankings):
            answers.append(
                Answer(
                    model=read.asked.model or "",
                    ranking=ranking,
                    tokens=read.tokens,
                    exits=self.ranker.exits,
                    survivors=self._survivors(len(ranking), drop),
                    drop=() if drop is None else tuple(drop.tolist()),
                    relieved=drop is not None and bool(np.any(drop != read.drop)),
                    seconds={
                        "read": read.read - read.arrived,
                        "queue": began - read.read,
                        "rank": ended - began,
                    },
                )
            )
        return answers

    def _relieved(self, read: Read, relief: float) -> np.ndarray | None:
        if read.drop is None or read.asked.drop is not None:
            return read.drop
        raised: np.ndarray = np.maximum(read.drop, relief)
        return raised

    def _scored(self, batch: Sequence[Read], drops: list[np.ndarray | None]) -> Scored:
        sizes = [len(read.asked.candidates) for read in batch]
        question = np.repeat(np.arange(len(batch)), sizes)
        ratios = [drop for drop in drops if drop is not None]
        drop = np.stack(ratios) if ratios else None
        if not self.ranker.text_only:
            encoded = concatenate([read.encoded for read in batch])
            return self.ranker.score_sequences(encoded, question, drop)
        questions = [read.asked.question for read in batch for _ in read.asked.candidates]
        candidates = [text for read in batch for text in read.asked.candidates]
        return self.ranker.score_pairs(questions, candidates, question)

    def _survivors(self, candidates: int, drop: np.ndarray | None) -> tuple[int, ...]:
        if drop is None:
            return ()
        left = [candidates]
        for ratio in drop:
            left.append(int(kept(left[-1], ratio)))
        return tuple(left)


def _readable(name: str, text: str) -> None:
    try:
        check_readable(text)
    except EvaluationError as error:
        raise Refused(
            "invalid",
            f"{name} is empty or holds half a character",
            expected=error.expected,
            mend=error.mend,
        ) from None


def rank_together(batch: Sequence[Read], relief: float = 0.0) -> list[Answer]:
    """Answers to questions of several desks, in order; each desk ranks its own in one pass."""
    answers: dict[int, Answer] = {}
    for desk in dict.fromkeys(read.desk for read in batch):
        numbers = [number for number, read in enumerate(batch) if read.desk is desk]
        own = desk.rank([batch[number] for number in numbers], relief)
        answers |= dict(zip(numbers, own))
    return [answers[number] for number in range(len(batch))]
