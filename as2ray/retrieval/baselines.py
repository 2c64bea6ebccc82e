"""Scores that need no training: the similarity of a sentence encoder, and its sum with BM25."""

from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from as2ray.retrieval.answer_scoring import default_scoring
from as2ray.tables.schema import question_offsets
from as2ray.text.bm25 import BM25


def similarities(encoder: Any, rows: pa.Table) -> np.ndarray:
    """Returns the similarity of the question and the candidate of each row, shape [rows]."""
    columns = [
        rows[name].combine_chunks().dictionary_encode() for name in ("question", "candidate")
    ]
    questions, candidates = (column.dictionary.to_pylist() for column in columns)
    queries, documents = encoder.encode_queries(questions), encoder.encode_documents(candidates)
    first, second = (column.indices.to_numpy() for column in columns)
    return np.asarray((queries[first] * documents[second]).sum(1), np.float64)


def hybrid_scores(encoder: Any, rows: pa.Table) -> np.ndarray:
    """Returns the sum of similarity and BM25 of each row, shape [rows].

    Both are standardized within the question, and have the weights of `DEFAULT_WEIGHTS`.
    """
    parts = {"similarity": similarities(encoder, rows), "bm25": BM25().score_candidates(rows)}
    scoring = default_scoring(None, has_ranker=False)
    bounds = [*question_offsets(rows["question_id"]), len(rows)]
    sums = [
        scoring.score({name: values[start:end] for name, values in parts.items()})
        for start, end in pairwise(bounds)
    ]
    return np.concatenate(sums)
