"""How the parts of a candidate's score are combined, and when the first answer is given.

Three parts order the candidates of a question: the ranker's logit, the similarity of embeddings and
BM25. Each is standardized within the question, and their weighted sum is a logit of the answer;
`answer_fitting` fits the weights to labels.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from scipy.special import expit, log_softmax, logit, softmax

from as2ray.errors import CheckpointError, from_validation_error

FILE = "answer_scoring.json"
"""File in the folder of a ranker's checkpoint."""

PARTS = ("similarity", "bm25", "ranker")
"""Parts of the score, the cheapest first."""

DEFAULT_WEIGHTS = {"similarity": 1.0, "bm25": 0.5, "ranker": 1.0}
"""Weights where there are no labels. On the 196 written questions about the Python reference half
of BM25 adds 0.023 and 0.033 MAP to the similarity, all of it 0.005 and -0.007 (docs/log.md)."""

MIN_GAIN = 0.02
"""MAP by which the ranker must improve the score; otherwise it is not asked."""

SCORE_EPS = 1e-6
"""Distance from 0 and 1 to which a ranker's scores are clipped."""

FEATURES = ("share", "margin", "bm25")
"""What tells that an answer is right: the logarithm of the first candidate's share of the
exponentiated scores, the best similarity minus the mean of the next `NUM_NEXT` ones, and the first
candidate's share of the best BM25 score. Chosen on train and dev questions about the Python
reference (docs/log.md)."""

NUM_NEXT = 3
"""Candidates to which the best similarity is compared: some answers are said two or three times."""

Parts = Mapping[str, np.ndarray]
"""Scores of a question's candidates by part, each of shape [candidates]."""


class Ranked(Protocol):
    """A candidate in a ranker's ranking; see `RankedCandidate`."""

    @property
    def index(self) -> int:
        """Position in the list of candidates that was ranked."""

    @property
    def score(self) -> float:
        """Probability that the candidate answers the question, or its logit."""

    @property
    def is_logit(self) -> bool:
        """Whether the score is a logit."""

    @property
    def exit_layer(self) -> int | None:
        """Layer after which the score was taken."""


class CombinedRanking(NamedTuple):
    """The candidates of a question, ranked by the combined score."""

    rows: list[int]
    """The candidates, best first."""
    scores: np.ndarray
    """Score of each candidate, shape [candidates]: the ranker's if no other part counts. Otherwise
    their shares of the exponentiated sums; 0 for those that were dropped before the ranker (of
    logits the lowest one)."""
    exit_layers: list[int | None]
    """Layer after which each candidate was scored; 0 for those that never reached the ranker."""
    ranker_scores: np.ndarray
    """The ranker's score of each candidate, shape [candidates]; NaN for those without one."""
    probability: float | None
    """Probability that the first answer is right; None without a fitted model."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AnswerModel:
    """The probability that the first answer to a question is right: a logistic regression."""

    coefficients: tuple[float, ...]
    """Of `FEATURES`."""
    intercept: float
    threshold: float | None
    """Probability from which on an answer is given; None if no threshold is precise enough."""
    measures: dict[str, float] = field(default_factory=dict)
    """On held-out questions, also those on other subjects that are similar enough: the precision at
    half and full coverage, the area under the curve of risk and coverage (`AURC`), the expected
    calibration error (`ECE`); the share that gets an answer by the threshold and the precision of
    these, or without a threshold the highest precision that one reaches."""

    def probability(self, features: np.ndarray) -> np.ndarray:
        """Returns probabilities, shape [questions], of features of shape [questions, features]."""
        return np.asarray(expit(features @ np.array(self.coefficients) + self.intercept))


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AnswerScoring:
    """The combined score of candidates that an index retrieves."""

    weights: dict[str, Annotated[float, Field(ge=0)]]
    """Weight of each part, standardized within the question; a part without one is not computed."""
    max_similarity_gap: float | None = None
    """Candidates whose similarity is lower than the best one by more never reach the ranker."""
    max_ranked: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of candidates that reach the ranker: those with the highest scores without it;
    None for all."""
    min_similarity: float | None = None
    """Similarity that the best candidate needs; lower ones are of questions on other subjects."""
    dev_quality: dict[str, float] = field(default_factory=dict)
    """MAP on dev of each part and of sums of them, with weights of other questions; and the shares
    of the questions, and of those on other subjects, that have `min_similarity`."""
    answer_model: AnswerModel | None = None
    encoder: str | None = None
    """Fingerprint of the sentence encoder of the similarities."""

    @property
    def needs_similarity(self) -> bool:
        """Whether the similarity is a part of the score, or bounds which candidates count."""
        bounds = (self.max_similarity_gap, self.min_similarity)
        return "similarity" in self.weights or bounds != (None, None)

    @classmethod
    def read(cls, checkpoint: str | Path) -> "AnswerScoring | None":
        """Reads what `write` stored beside a ranker; None if there is nothing.

        Args:
            checkpoint: A folder. Of a hub model nothing is read.

        Raises:
            CheckpointError: The file is damaged.
        """
        path = Path(checkpoint) / FILE
        if not path.is_file():
            return None
        try:
            scoring = TypeAdapter(cls).validate_json(path.read_bytes())
        except ValidationError as error:
            problem = from_validation_error(error).problem
            raise CheckpointError(f"{path} is damaged: {problem}") from error
        model = scoring.answer_model
        if model is not None and len(model.coefficients) != len(FEATURES):
            raise CheckpointError(
                f"{path} has {len(model.coefficients)} coefficients for the features "
                f"{', '.join(FEATURES)}: another version of as2ray fitted it",
                fix="run pipelines.own_documents again",
            )
        return scoring

    def write(self, checkpoint: Path) -> None:
        """Stores it beside a ranker."""
        (checkpoint / FILE).write_text(json.dumps(asdict(self), indent=2), encoding="utf-8")

    def describe(self) -> str:
        """Returns lines for people: the sum, its quality on dev, and why a ranker is not asked."""
        weights = " + ".join(f"{weight:.3g} {name}" for name, weight in self.weights.items())
        lines = [f"score: {weights}"]
        if self.max_ranked is not None:
            lines += [f"at most {self.max_ranked} candidates reach the ranker"]
        if self.dev_quality:
            quality = ", ".join(f"{name} {value:.4f}" for name, value in self.dev_quality.items())
            lines += [f"on dev: {quality}"]
        if (reason := self.explain_ranker()) is not None:
            lines += [reason]
        if self.answer_model is None:
            lines += [
                "no threshold was fitted, which needs right and wrong first answers to labeled dev "
                "questions"
            ]
        else:
            measures = self.answer_model.measures
            lines += [", ".join(f"{name} {value:.4f}" for name, value in measures.items())]
            if self.answer_model.threshold is None:
                lines += ["no threshold reaches min_precision, so none was stored"]
        return "\n".join(lines)

    def explain_ranker(self) -> str | None:
        """Returns why the ranker is not asked; None if it is."""
        if self.uses_ranker:
            return None
        sums = {n: v for n, v in self.dev_quality.items() if n.split(" + ")[0] in PARTS}
        with_ranker = [value for name, value in sums.items() if "ranker" in name]
        if with_ranker:
            gain = max(with_ranker) - max(v for n, v in sums.items() if "ranker" not in n)
            return f"the ranker is not asked: it adds {gain:+.4f} MAP, and {MIN_GAIN} is needed"
        if not sums:
            return "a ranker is asked only where labeled questions show that it helps"
        return "there is no ranker"

    @property
    def uses_ranker(self) -> bool:
        """Whether the ranker is asked."""
        return "ranker" in self.weights

    def kept_rows(self, parts: Parts) -> np.ndarray:
        """Returns the rows of the candidates that reach the ranker."""
        similarity, rows = parts.get("similarity"), np.arange(len(parts["bm25"]))
        if similarity is not None and self.max_similarity_gap is not None:
            bound = similarity.max(initial=0.0) - self.max_similarity_gap
            rows = np.flatnonzero(similarity >= bound)
        if self.max_ranked is None or len(rows) <= self.max_ranked:
            return rows
        scores = self._score_without_ranker(take_rows(parts, rows))
        return np.sort(rows[np.argsort(-scores, kind="stable")[: self.max_ranked]])

    def _score_without_ranker(self, parts: Parts) -> np.ndarray:
        weights = {name: weight for name, weight in self.weights.items() if name != "ranker"}
        cheap = {name: parts[name] for name in PARTS if name in parts and name != "ranker"}
        return AnswerScoring(weights or DEFAULT_WEIGHTS).score(cheap)

    def score(self, parts: Parts) -> np.ndarray:
        """Returns the weighted sum of the parts, shape [candidates]; a missing part is left out."""
        weights = {name: weight for name, weight in self.weights.items() if name in parts}
        terms = [weight * standardize(parts[name]) for name, weight in weights.items()]
        return np.asarray(np.sum(terms, axis=0))

    def rank(self, parts: Parts, ranking: Sequence[Ranked] = ()) -> CombinedRanking:
        """Ranks the candidates of a question.

        Args:
            parts: Similarity and BM25 of each candidate.
            ranking: The ranker's ranking of the kept candidates, if it is asked.
        """
        rows, num_candidates = self.kept_rows(parts), len(parts["bm25"])
        ranker_scores, layers = np.full(num_candidates, np.nan), [0] * num_candidates
        exit_layers: list[int | None] = [*layers]
        for ranked in ranking:
            ranker_scores[rows[ranked.index]] = ranked.score
            exit_layers[rows[ranked.index]] = ranked.exit_layer
        kept = take_rows(parts, rows)
        if ranking:
            kept["ranker"] = logits_of(ranking)
        sums, scores = self.score(kept), np.zeros(num_candidates)
        scores[rows] = softmax(sums) if len(rows) else sums
        if [*self.weights] == ["ranker"] and ranking:
            lowest = np.nanmin(ranker_scores) if ranking[0].is_logit else 0.0
            scores = np.where(np.isnan(ranker_scores), lowest, ranker_scores)
        probability = self._probability(kept)
        return CombinedRanking(
            self._order(rows, sums, parts), scores, exit_layers, ranker_scores, probability
        )

    def order(self, parts: Parts) -> list[int]:
        """Returns the candidates, best first, where all parts of all candidates are known."""
        rows = self.kept_rows(parts)
        return self._order(rows, self.score(take_rows(parts, rows)), parts)

    def _order(self, rows: np.ndarray, sums: np.ndarray, parts: Parts) -> list[int]:
        rest = np.delete(np.arange(len(parts["bm25"])), rows)
        if len(rest):  # In a table's order answers may come first.
            rest = rest[np.argsort(-self._score_without_ranker(parts)[rest], kind="stable")]
        return [*rows[np.argsort(-sums, kind="stable")].tolist(), *rest.tolist()]

    def _probability(self, parts: Parts) -> float | None:
        if self.answer_model is None or not len(parts["bm25"]):
            return None
        return float(self.answer_model.probability(answer_features(parts, self.score(parts))))


def take_rows(parts: Parts, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the parts of some of a question's candidates."""
    return {name: values[rows] for name, values in parts.items()}


def logits_of(ranking: Sequence[Ranked]) -> np.ndarray:
    """Returns a logit for each candidate of a ranking, in the order of the candidates.

    A candidate that was dropped early may have a higher score than one that was kept: it gets the
    logit of that one.
    """
    logits = np.empty(len(ranking))
    scores = np.array([ranked.score for ranked in ranking])
    is_logit = any(ranked.is_logit for ranked in ranking)
    values = scores if is_logit else logit_of(scores)
    logits[[ranked.index for ranked in ranking]] = np.minimum.accumulate(values)
    return logits


def logit_of(scores: np.ndarray) -> np.ndarray:
    """Returns the logits of scores from 0 to 1."""
    return np.asarray(logit(np.clip(scores, SCORE_EPS, 1 - SCORE_EPS)))


def standardize(scores: np.ndarray) -> np.ndarray:
    """Returns z-scores of a question's candidates; 0 where all are equal."""
    scores = np.asarray(scores, np.float64)
    distances = scores - scores.mean()
    deviation = np.sqrt(np.square(distances).mean())
    return np.asarray(distances / (deviation if deviation > 0 else 1.0))


def default_scoring(encoder: str | None, has_ranker: bool) -> AnswerScoring:
    """Returns the scoring where there are no labels.

    Args:
        encoder: Fingerprint of the sentence encoder.
        has_ranker: Whether there is a ranker that was trained on other labels.
    """
    names = PARTS if has_ranker else PARTS[:2]
    return AnswerScoring({name: DEFAULT_WEIGHTS[name] for name in names}, encoder=encoder)


def answer_features(parts: Parts, scores: np.ndarray) -> np.ndarray:
    """Returns the features of a question for its `AnswerModel`, shape [features].

    Args:
        parts: Scores of its candidates by part; at least one candidate.
        scores: Their combined scores, shape [candidates].
    """
    best = np.sort(parts.get("similarity", scores))[::-1]
    margin = best[0] - best[1 : NUM_NEXT + 1].mean() if len(best) > 1 else 0.0
    bm25 = parts["bm25"][np.argmax(scores)] / max(parts["bm25"].max(), SCORE_EPS)
    return np.array([log_softmax(scores).max(), margin, bm25])
