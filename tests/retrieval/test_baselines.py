"""What scores candidates without training."""

import itertools

import numpy as np
import pytest
import tiny

from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.retrieval.baselines import hybrid_scores, similarities
from as2ray.tables.schema import question_offsets
from as2ray.text.bm25 import BM25

TABLE = tiny.candidates(6)


@pytest.fixture(scope="module")
def encoder(sentence_encoder):
    return load_sentence_encoder(sentence_encoder, dtype="fp32", device="cpu")


def test_similarity_is_that_of_the_question_and_the_candidate_of_the_row(encoder):
    row = len(TABLE) - 1
    texts = [TABLE[name][row].as_py() for name in ("question", "candidate")]
    query, document = encoder.encode_queries(texts[:1])[0], encoder.encode_documents(texts[1:])[0]
    scores = similarities(encoder, TABLE)
    assert scores[row] == pytest.approx(query @ document, abs=1e-5)
    assert scores.dtype == np.float64


def test_hybrid_adds_half_of_bm25_standardized_within_each_question(encoder):
    parts = [similarities(encoder, TABLE), BM25().score_candidates(TABLE)]
    scores, weights = hybrid_scores(encoder, TABLE), (1.0, 0.5)
    starts = [*question_offsets(TABLE["question_id"]), len(TABLE)]
    for start, end in itertools.pairwise(starts):
        question_parts = [values[start:end] for values in parts]
        terms = [
            weight * (values - values.mean()) / max(values.std(), 1e-12)
            for weight, values in zip(weights, question_parts, strict=True)
        ]
        np.testing.assert_allclose(scores[start:end], sum(terms), atol=1e-5)
