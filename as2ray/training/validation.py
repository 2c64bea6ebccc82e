"""Evaluation during training: measures over all questions of a table, scored by all workers."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.evaluation.measures import validation_measures
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.models.packed_ranker import as_packed_ranker
from as2ray.models.ranker import Ranker
from as2ray.models.two_in_one import TwoInOneRanker, merge_windows
from as2ray.outputs import output_names
from as2ray.text.packing import PackedBatch, pack_sequences
from as2ray.text.passage_windows import PassageWindows, encode_passages
from as2ray.training.parallel import all_gather, get_rank, get_world_size


@dataclass(frozen=True)
class EvalSet:
    """A candidates table that is evaluated during training, packed once."""

    table: pa.Table
    batches: list[PackedBatch]

    @classmethod
    def from_table(cls, table: pa.Table, ranker: Ranker, max_batch_tokens: int) -> "EvalSet":
        """Tokenizes and packs a candidates table."""
        texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
        sequences = ranker.tokenizer.encode(*texts)
        max_batch_tokens = max(max_batch_tokens, ranker.tokenizer.max_length)
        return cls(table, list(pack_sequences(sequences, max_batch_tokens)))

    def compute_scores(self, ranker: Ranker) -> np.ndarray:
        """Returns the scores of all rows on every worker, each of which scores a share.

        Shape [rows, outputs + 1]: the scores of exits and heads, if there are several, come before
        the ranker's own.
        """
        local_batches = _select_local_batches(self.batches)
        local_scores = as_packed_ranker(ranker).predict_all_outputs(
            local_batches, num_rows=self.table.num_rows
        )
        shares = all_gather(local_scores)
        scores: np.ndarray = np.nanmean(np.stack(shares), axis=0)
        return scores

    def evaluate(self, ranker: Ranker) -> dict[str, float]:
        """Returns the measures of the table, the same on every worker.

        `AP` is the mean average precision, `AP/exit_4` or `AP/head_1` that of one of several
        outputs, and `share_predicted_positive` the share of rows with a score above 0.5: 0 or 1 if
        the ranker predicts a single label (TANDA's on-off effect).
        """
        *outputs, scores = self.compute_scores(ranker).T
        measures = _measure(self.table, scores)
        if len(outputs) > 1:
            names = output_names(ranker.exit_layers, len(outputs))
            aps = [_measure(self.table, output)["AP"] for output in outputs]
            measures |= {f"AP/{name}": value for name, value in zip(names, aps)}
        return {**measures, "share_predicted_positive": float((scores > 0.5).mean())}


@dataclass(frozen=True)
class PassageEvalSet:
    """A table by passages that is evaluated during training: its passages and their sentences."""

    passages: pa.Table
    sentences: pa.Table
    windows: PassageWindows
    batches: list[PackedBatch]
    trained_heads: tuple[str, ...] = ("passage", "sentence")
    """Heads whose MAP is averaged to `AP`; a head without a loss gives random scores."""

    @classmethod
    def from_table(
        cls, passages: pa.Table, ranker: Ranker, max_batch_tokens: int, loss: TwoInOneLoss
    ) -> "PassageEvalSet":
        """Tokenizes and packs a table by passages.

        Args:
            passages: The table, with the columns of `PASSAGE_SCHEMA`.
            ranker: Whose tokenizer is used.
            max_batch_tokens: Maximum number of tokens of a packed batch.
            loss: The loss of the run, which says which heads are trained.
        """
        texts = passages["candidate"].to_pylist()
        windows = encode_passages(ranker.tokenizer, passages["question"].to_pylist(), texts)
        num_sentences = pc.list_value_length(passages["candidate"])
        rows = pa.array(np.repeat(np.arange(passages.num_rows), num_sentences))
        label = passages["label"].combine_chunks().flatten()
        sentences = pa.table({"question_id": passages["question_id"].take(rows), "label": label})
        passages = passages.select(["question_id", "passage_label"])
        passages = passages.rename_columns(["question_id", "label"])
        trained_heads = ("passage",) * loss.passage_loss + ("sentence",) * loss.sentence_loss
        batches = list(windows.iter_batches(max_batch_tokens))
        return cls(passages, sentences, windows, batches, trained_heads or cls.trained_heads)

    def evaluate(self, ranker: Ranker) -> dict[str, float]:
        """Returns the measures of the table, the same on every worker.

        `AP` is the mean of `AP/passage` and `AP/sentence` over the trained heads, as are `RR`,
        `P@1` and `nDCG@10`, and
        `share_predicted_positive/passage` the share of passages with a score above 0.
        """
        assert isinstance(ranker, TwoInOneRanker)  # a job pairs joint rankers with these tables
        local_batches = _select_local_batches(self.batches)
        shares = zip(*all_gather(ranker.predict_windows(self.windows, local_batches)))
        window_scores, marker_scores = (np.nanmean(np.stack(share), axis=0) for share in shares)
        passage_scores, sentence_scores = merge_windows(self.windows, window_scores, marker_scores)
        scores = {"passage": passage_scores, "sentence": sentence_scores}
        by_head = {
            "passage": _measure(self.passages, passage_scores),
            "sentence": _measure(self.sentences, sentence_scores),
        }
        measures = {f"AP/{head}": by_head[head]["AP"] for head in by_head}
        for name in by_head["passage"]:
            values = [by_head[head][name] for head in self.trained_heads]
            measures[name] = float(np.mean(values))
        return measures | {
            f"share_predicted_positive/{head}": float((scores[head] > 0).mean())
            for head in self.trained_heads
        }


def validate(ranker: Ranker, eval_sets: Mapping[str, EvalSet | PassageEvalSet]) -> dict[str, float]:
    """Returns the measures of each table as `NAME/MEASURE`, such as `dev/AP`."""
    return {
        f"{name}/{measure}": value
        for name, eval_set in eval_sets.items()
        for measure, value in eval_set.evaluate(ranker).items()
    }


def _select_local_batches(batches: list[PackedBatch]) -> list[PackedBatch]:
    """Returns the batches that this worker scores, equally many on every worker.

    Workers with sharded weights must run the model equally often, so the last round is filled with
    the first batches. A row that is scored twice gets the same score twice.
    """
    num_rounds = -(-len(batches) // get_world_size())
    indices = range(get_rank(), num_rounds * get_world_size(), get_world_size())
    return [batches[index % len(batches)] for index in indices]


def _measure(table: pa.Table, scores: np.ndarray) -> dict[str, float]:
    return validation_measures(table["question_id"].to_numpy(), table["label"].to_numpy(), scores)
