"""The similarity below which a question is on another subject than an index's documents."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from as2ray.retrieval.answer_fitting import fit_min_similarity
from as2ray.retrieval.answer_scoring import AnswerScoring
from as2ray.retrieval.embeddings import LoadEncoder
from as2ray.retrieval.index_writer import MANIFEST
from as2ray.retrieval.query_generation import generate_queries
from as2ray.retrieval.sentence_index import MIN_SIMILARITY, SentenceIndex
from as2ray.tables.atomic import atomic_file

OFF_TOPIC_QUESTIONS: Final = Path(__file__).with_name("off_topic_questions.txt")
"""100 questions of general knowledge, one per line."""

OFF_TOPIC_TEST_QUESTIONS: Final = Path(__file__).with_name("off_topic_test_questions.txt")
"""100 others, which choose nothing: they show what a bound is worth."""

NUM_QUESTIONS: Final = 200
"""Maximum number of questions that are generated from the documents."""


def share_on_subject(
    index: SentenceIndex, questions: Sequence[str], min_similarity: float
) -> float:
    """Returns the share of questions to which a sentence of an index is similar enough."""
    nearest = np.array(index.embeddings.nearest_similarities(questions))
    return float(np.mean(nearest >= min_similarity))


def store_min_similarity(folder: str | Path, load_encoder: LoadEncoder) -> dict[str, Any]:
    """Fits the bound of `AnswerScoring.min_similarity` without labels; stores it in the index.

    Questions that are generated from the documents are compared with questions of general
    knowledge (see `fit_min_similarity`).

    Args:
        folder: An index with embeddings.
        load_encoder: Loads its encoder.

    Returns:
        The manifest with the bound, which is None if no question can be generated.
    """
    index = SentenceIndex.open(folder, load_encoder)
    own_questions = [query.text for query in generate_queries(index, max_questions=NUM_QUESTIONS)]
    other_questions = OFF_TOPIC_QUESTIONS.read_text(encoding="utf-8").splitlines()
    own_parts, other_parts = (
        [{"similarity": np.array([s])} for s in index.embeddings.nearest_similarities(questions)]
        for questions in (own_questions, other_questions)
    )
    bound = fit_min_similarity(AnswerScoring({}), own_parts, other_parts).min_similarity
    manifest = {**index.manifest, MIN_SIMILARITY: bound}
    with atomic_file(Path(folder) / MANIFEST) as temporary:
        temporary.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    return manifest
