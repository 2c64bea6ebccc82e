"""What `benchmarks.ranking` compares a cascade with: fewer layers for all, stored similarities."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from time import perf_counter
from typing import Protocol

import numpy as np
import pyarrow as pa
import torch

from as2ray.cascade.margins import select_step
from as2ray.cascade.pruning import StagedScores
from as2ray.models.bm25_stage import BM25Selection, enter_all, join_selections
from as2ray.models.cascade import CascadeRanker
from as2ray.models.packed_ranker import PackedRanker
from as2ray.models.sentence_encoder import SentenceEncoder
from as2ray.retrieval.answer_scoring import AnswerScoring
from as2ray.tables.schema import question_indices
from as2ray.text.packing import PackedBatch


class PairScorer(Protocol):
    """The part of a ranker that is measured."""

    def predict_pairs(
        self, questions: Sequence[str], candidates: Sequence[str], question_index: np.ndarray
    ) -> StagedScores:
        """Scores pairs of whole questions."""


@dataclass(frozen=True)
class CutRanker:
    """A cascade that ends after one exit for all candidates, as layerwise rerankers are cut."""

    cascade: CascadeRanker
    exit_index: int

    @torch.inference_mode()
    def predict_pairs(
        self, questions: Sequence[str], candidates: Sequence[str], question_index: np.ndarray
    ) -> StagedScores:
        """See `PairScorer`."""
        cascade, scores = self.cascade, np.empty(len(candidates), np.float32)

        def score(batch: PackedBatch) -> tuple[np.ndarray, np.ndarray]:
            values = cascade.predict_stages(batch, [self.exit_index])[:, 0]
            return batch.sequence_data["row"], values.float().cpu().numpy()

        with cascade.scoring():
            batches = cascade.pack(cascade.tokenizer.encode(questions, candidates))
            for rows, values in cascade.map_batches(score, batches):
                scores[rows] = values
        return StagedScores(scores)


@dataclass(frozen=True)
class SimilarityStage:
    """A ranker behind stored similarities, which drop candidates before they are tokenized."""

    ranker: PackedRanker
    encoder: SentenceEncoder
    embeddings: Mapping[str, np.ndarray]
    """Stored embedding of each candidate's text."""
    max_gap: float = np.inf
    """Candidates whose similarity is lower than the best one by more do not reach the ranker."""

    @classmethod
    def from_texts(
        cls, ranker: PackedRanker, encoder: SentenceEncoder, texts: Sequence[str]
    ) -> "SimilarityStage":
        """Embeds texts, as an index does before a question comes."""
        unique = list(dict.fromkeys(texts))
        return cls(ranker, encoder, dict(zip(unique, encoder.encode_documents(unique))))

    def predict_pairs(
        self, questions: Sequence[str], candidates: Sequence[str], question_index: np.ndarray
    ) -> StagedScores:
        """See `PairScorer`; dropped candidates stay in the order of their similarity."""
        similarities = self.measure_similarities(questions, candidates, question_index)
        enters = self._select(similarities, question_index)
        entered = self.ranker.predict_pairs(
            list(compress(questions, enters)),
            list(compress(candidates, enters)),
            question_index[enters],
        )
        # Below the scores of candidates that BM25 drops, which are 0 or more.
        scores, none = np.float32(similarities - 2.0), np.zeros(len(enters), bool)
        return BM25Selection(enters, scores, similarities, none).complete(entered)

    def _select(self, similarities: np.ndarray, question_index: np.ndarray) -> np.ndarray:
        """Returns which candidates reach the ranker, shape [pairs]."""
        scoring = AnswerScoring({"ranker": 1.0}, max_similarity_gap=self.max_gap)
        enters = np.zeros(len(similarities), bool)
        for rows in split_by_question(question_index):
            parts = dict.fromkeys(("similarity", "bm25"), similarities[rows])
            enters[rows[scoring.kept_rows(parts)]] = True
        return enters

    def profile(
        self, questions: Sequence[str], candidates: Sequence[str], question_index: np.ndarray
    ) -> dict[str, float]:
        """Returns how long each step takes, in milliseconds of a question, and what it leaves."""
        times = [perf_counter()]
        similarities = self.measure_similarities(questions, candidates, question_index)
        rows = np.flatnonzero(self._select(similarities, question_index))
        num_similar = len(rows)
        times.append(perf_counter())
        selections = [
            self.ranker.select_by_bm25(questions[part[0]], [candidates[row] for row in part])
            or enter_all(len(part))
            for part in np.split(rows, np.flatnonzero(np.diff(question_index[rows])) + 1)
        ]
        selection = join_selections(selections)
        rows, gaps = rows[selection.enters], selection.gaps[selection.enters]
        times.append(perf_counter())
        texts = [questions[row] for row in rows], [candidates[row] for row in rows]
        sequences = self.ranker.tokenizer.encode(*texts)
        times.append(perf_counter())
        self.ranker.predict_sequences(sequences, question_index[rows], bm25_gaps=gaps)
        times.append(perf_counter())
        num_questions = len(np.unique(question_index))
        steps = ("similarity", "BM25", "tokens", "layers")
        took_ms = 1e3 * np.diff(times) / num_questions
        left = {"left by similarity": num_similar, "left by BM25": len(rows)}
        return dict(zip(steps, took_ms.tolist())) | {
            name: number / num_questions for name, number in left.items()
        }

    def measure_similarities(
        self, questions: Sequence[str], candidates: Sequence[str], question_index: np.ndarray
    ) -> np.ndarray:
        """Returns the similarity of each pair, shape [pairs]; a question is embedded once."""
        groups = split_by_question(question_index)
        queries = self.encoder.encode_queries([questions[rows[0]] for rows in groups])
        similarities = np.empty(len(candidates))
        for rows, query in zip(groups, queries):
            similarities[rows] = np.stack([self.embeddings[candidates[i]] for i in rows]) @ query
        return similarities

    def with_bounded_loss(self, table: pa.Table, max_loss: float) -> "SimilarityStage":
        """Returns this stage with the least gap whose loss is bounded.

        The loss is 1 - 1 / (place that the ranker's first candidate gets) in expectation, by
        conformal risk control; see `RiskBound`.

        Args:
            table: Questions that are not measured; no labels are read.
            max_loss: Bound on the loss.
        """
        question_index = question_indices(table)
        texts = table["question"].to_pylist(), table["candidate"].to_pylist()
        similarities = self.measure_similarities(*texts, question_index)
        keys = self.ranker.predict_pairs(*texts, question_index).sort_keys
        groups = split_by_question(question_index)
        firsts = [similarities[rows[np.argmax(keys[rows])]] for rows in groups]
        gaps = np.array([similarities[rows].max() - s for rows, s in zip(groups, firsts)])
        places = np.array([1 + np.sum(similarities[rows] > s) for rows, s in zip(groups, firsts)])
        steps = np.array([np.inf, *sorted(set(gaps), reverse=True)])
        losses = np.where(gaps > steps[:, None], 1.0 - 1.0 / places, 0.0)
        return replace(self, max_gap=float(steps[select_step(losses, max_loss)]))


def split_by_question(question_index: np.ndarray) -> list[np.ndarray]:
    """Returns the rows of each question, which are adjacent."""
    return np.split(np.arange(len(question_index)), np.flatnonzero(np.diff(question_index)) + 1)
