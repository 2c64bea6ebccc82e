"""`as2ray ask`: answers a question from an index of documents."""

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from as2ray.models.precision import Dtype

if TYPE_CHECKING:
    from as2ray.models.sentence_encoder import SentenceEncoder
    from as2ray.retrieval.passage_search import PassageSearcher
    from as2ray.retrieval.question_answering import Answer

NO_MATCH_MESSAGE = "No sentence has a word in common with the question.\n"


def ask(
    *,
    question: str,
    index: str,
    model: str | None = None,
    top_k: int = 3,
    num_candidates: int = 100,
    num_neighbors: int = 1,
    score_threshold: float | None = None,
    dtype: Dtype = "auto",
    jsonl: bool = False,
) -> None:
    """Answers a question from documents, with the source, or says that no answer is good enough.

    A joint model (Two-in-One) answers with passages and their selected sentences. It ignores
    `num_candidates`, `num_neighbors` and `score_threshold`.

    Args:
        question: The question.
        index: Output folder of `as2ray index`.
        model: Checkpoint folder or hub id of a ranker. Without one, BM25 and the similarity of the
            index's embeddings order the answers.
        top_k: Maximum number of answers.
        num_candidates: Maximum number of sentences that are found.
        num_neighbors: Neighbors on either side that become candidates with a sentence.
        score_threshold: Minimum probability of an answer: the fitted one, or without it the
            ranker's. By default what was fitted decides: `own_documents` and `as2ray calibrate` do
            that. 0 always answers.
        dtype: Number format of matrix products.
        jsonl: Print one JSON object per answer.
    """
    from as2ray.checkpoints.sentence_encoder import load_query_encoder
    from as2ray.retrieval.answer_scoring import AnswerScoring
    from as2ray.retrieval.question_answering import QuestionAnswerer
    from as2ray.retrieval.sentence_index import SentenceIndex

    scoring, ranker = AnswerScoring.read(model) if model else None, None
    if model is not None and (scoring is None or scoring.uses_ranker):
        from as2ray.checkpoints.loading import load
        from as2ray.models.two_in_one import TwoInOneRanker
        from as2ray.retrieval.passage_search import PassageSearcher

        ranker = load(model, dtype=dtype)
        if isinstance(ranker, TwoInOneRanker):
            searcher = PassageSearcher(SentenceIndex.open(index), ranker)
            _print_passages(searcher, question, top_k, jsonl)
            return

    def load_encoder(name: str) -> "SentenceEncoder":
        fingerprint = sentence_index.embeddings.info.fingerprint
        return load_query_encoder(name, fingerprint, dtype=dtype)

    sentence_index = SentenceIndex.open(index, load_encoder)
    answerer = QuestionAnswerer(
        sentence_index,
        ranker,
        num_candidates=num_candidates,
        num_neighbors=num_neighbors,
        score_threshold=score_threshold,
        scoring=scoring,
    )
    if scoring is not None and (reason := scoring.explain_ranker()) is not None:
        sys.stderr.write(f"Answers by {' and '.join(scoring.weights)}: {reason}.\n")
    result = answerer.ask(question, top_k)
    for answer in result.answers:
        sys.stdout.write(
            json.dumps(asdict(answer), ensure_ascii=False) + "\n"
            if jsonl
            else _format_answer(answer)
        )
    if not result.answers:
        nearest = ["Nearest:\n", *map(_format_answer, result.nearest)] if result.nearest else []
        sys.stderr.write("".join([f"No answer: {result.reason}.\n", *nearest]))


def _print_passages(searcher: "PassageSearcher", question: str, top_k: int, jsonl: bool) -> None:
    passages = searcher.ask(question, top_k)
    for passage in passages:
        if jsonl:
            sys.stdout.write(json.dumps(asdict(passage), ensure_ascii=False) + "\n")
            continue
        sentences = "".join(f"        {s.score:+.4f}  {s.text}\n" for s in passage.sentences)
        text = sentences or f"        … {passage.text} …\n"
        sys.stdout.write(f"{passage.score:+.4f}  {passage.document_id}\n{text}")
    if not passages:
        sys.stderr.write(NO_MATCH_MESSAGE)


def _format_answer(answer: "Answer") -> str:
    lines = f"{answer.score:.4f}  {answer.text}\n        {answer.source}\n"
    has_context = answer.context != answer.text
    return lines + f"        … {answer.context} …\n" if has_context else lines
