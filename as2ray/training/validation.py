"""Validation: dev measures over *all* questions, scored by all workers together.

Knows candidates tables, measures and rankers. Must not know corpora, files or Ray.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.evaluation.measures import mean_average_precision
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.models.ranker import Ranker
from as2ray.models.two_in_one import TwoInOneRanker, merge_windows
from as2ray.text.packing import PackedBatch, pack_sequences
from as2ray.text.passage_windows import PassageWindows, encode_passages
from as2ray.training.parallel import all_gather, get_rank, get_world_size


@dataclass(frozen=True)
class EvalSet:
    """A table whose MAP is followed during training, packed once."""

    table: pa.Table
    batches: list[PackedBatch]

    @classmethod
    def from_table(cls, table: pa.Table, ranker: Ranker, max_batch_tokens: int) -> "EvalSet":
        """Tokenises and packs a candidates table."""
        texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
        sequences = ranker.tokenizer.encode(*texts)
        max_batch_tokens = max(max_batch_tokens, ranker.tokenizer.max_length)
        return cls(table, list(pack_sequences(sequences, max_batch_tokens)))

    def compute_scores(self, ranker: Ranker) -> np.ndarray:
        """Scores of all rows, shape [rows], on every worker; each scores a share."""
        shares = all_gather(
            ranker.predict_scores(_select_local_batches(self.batches), num_rows=self.table.num_rows)
        )
        scores: np.ndarray = np.nanmean(np.stack(shares), axis=0)
        return scores

    def evaluate(self, ranker: Ranker) -> dict[str, float]:
        """`AP` of the table, the same on every worker."""
        return {"AP": _average_precision(self.table, self.compute_scores(ranker))}


@dataclass(frozen=True)
class PassageEvalSet:
    """A table by passages whose MAP is followed, of the passages and of the sentences in them."""

    passages: pa.Table
    sentences: pa.Table
    windows: PassageWindows
    batches: list[PackedBatch]
    trained_heads: tuple[str, ...] = ("passage", "sentence")
    """The kinds whose mean selects: a head that no loss reaches has nothing to say."""

    @classmethod
    def from_table(
        cls, passages: pa.Table, ranker: Ranker, max_batch_tokens: int, loss: TwoInOneLoss
    ) -> "PassageEvalSet":
        """Tokenises and packs a table by passages."""
        texts = passages["candidate"].to_pylist()
        windows = encode_passages(ranker.tokenizer, passages["question"].to_pylist(), texts)
        sizes = pc.list_value_length(passages["candidate"])
        rows = pa.array(np.repeat(np.arange(passages.num_rows), sizes))
        label = passages["label"].combine_chunks().flatten()
        sentences = pa.table({"question_id": passages["question_id"].take(rows), "label": label})
        relevant = passages.select(["question_id", "passage_label"])
        relevant = relevant.rename_columns(["question_id", "label"])
        trained = ("passage",) * loss.passage_loss + ("sentence",) * loss.sentence_loss
        batches = list(windows.iter_batches(max_batch_tokens))
        return cls(relevant, sentences, windows, batches, trained or cls.trained_heads)

    def evaluate(self, ranker: Ranker) -> dict[str, float]:
        """`passage AP`, `sentence AP` and `AP`, the mean of those that are trained, the same on
        every worker."""
        assert isinstance(ranker, TwoInOneRanker)  # a job pairs joint rankers with these tables
        shares = zip(
            *all_gather(ranker.predict_windows(self.windows, _select_local_batches(self.batches)))
        )
        both = (np.nanmean(np.stack(share), axis=0) for share in shares)
        passage, sentence = merge_windows(self.windows, *both)
        found = {
            "passage": _average_precision(self.passages, passage),
            "sentence": _average_precision(self.sentences, sentence),
        }
        selects = float(np.mean([found[kind] for kind in self.trained_heads]))
        return {**{f"{kind} AP": value for kind, value in found.items()}, "AP": selects}


def validate(ranker: Ranker, eval_sets: Mapping[str, EvalSet | PassageEvalSet]) -> dict[str, float]:
    """`NAME/AP` of each table that is watched, and what else it measures."""
    return {
        f"{name}/{measure}": value
        for name, table in eval_sets.items()
        for measure, value in table.evaluate(ranker).items()
    }


def _select_local_batches(batches: list[PackedBatch]) -> list[PackedBatch]:
    """The batches that this worker scores.

    Workers that hold shares of the weights must all run equally often, so the last round is filled
    up from the front; a row scored twice has the same score.
    """
    rounds = -(-len(batches) // get_world_size())
    numbers = islice(range(get_rank(), rounds * get_world_size(), get_world_size()), rounds)
    return [batches[i % len(batches)] for i in numbers]


def _average_precision(table: pa.Table, scores: np.ndarray) -> float:
    return mean_average_precision(
        table["question_id"].to_numpy(), table["label"].to_numpy(), scores
    )
