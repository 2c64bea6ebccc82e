"""Validation: dev measures over *all* questions, scored by all workers together.

Knows candidates tables, measures and rankers. Must not know corpora, files or Ray.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa

from as2ray.evaluation.measures import mean_average_precision
from as2ray.models.ranker import Ranker
from as2ray.text.packing import PackedBatch
from as2ray.text.stream import pack_pairs
from as2ray.training.parallel import gather, rank, ranks


@dataclass(frozen=True)
class Watched:
    """A table whose MAP is followed during training, packed once."""

    table: pa.Table
    batches: list[PackedBatch]

    @classmethod
    def pack(cls, table: pa.Table, ranker: Ranker, max_tokens: int) -> "Watched":
        """Tokenises and packs a candidates table."""
        texts = (table["question"].to_pylist(), table["candidate"].to_pylist())
        return cls(table, list(pack_pairs(ranker.tokenizer, *texts, max_tokens)))

    def scores(self, ranker: Ranker) -> np.ndarray:
        """Scores of all rows, shape [rows], on every worker; each scores a share."""
        # Workers that hold shares of the weights must all run equally often, so the last round
        # is filled up from the front; a row scored twice has the same score.
        rounds = -(-len(self.batches) // ranks())
        numbers = islice(range(rank(), rounds * ranks(), ranks()), rounds)
        mine = [self.batches[i % len(self.batches)] for i in numbers]
        shares = gather(ranker.score(mine, rows=self.table.num_rows))
        scores: np.ndarray = np.nanmean(np.stack(shares), axis=0)
        return scores


def validate(ranker: Ranker, watched: Mapping[str, Watched]) -> dict[str, float]:
    """`NAME/AP` of each table that is watched, the same on every worker."""
    found = {}
    for name, tables in watched.items():
        table = tables.table
        found[f"{name}/AP"] = mean_average_precision(
            table["question_id"].to_numpy(), table["label"].to_numpy(), tables.scores(ranker)
        )
    return found
