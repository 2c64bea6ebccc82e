"""`as2ray ask`: answers a question from an index of documents."""

import json
import sys
from dataclasses import asdict
from functools import partial

from as2ray.models.precision import Dtype
from as2ray.retrieval.passage_search import PassageSearcher
from as2ray.retrieval.question_answering import Answer, QuestionAnswer, QuestionAnswerer
from as2ray.retrieval.sentence_index import SentenceIndex

NO_MATCH_MESSAGE = "No sentence has a word in common with the question.\n"


def ask(
    *,
    question: str,
    index: str,
    model: str,
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
        model: Checkpoint folder or hub id.
        top_k: Maximum number of answers.
        num_candidates: Maximum number of sentences that are ranked.
        num_neighbors: Neighbors on either side that become candidates with a sentence.
        score_threshold: Minimum score of an answer. By default the model's own, which
            `as2ray calibrate` sets, or none if the model is not calibrated.
        dtype: Number format of matrix products.
        jsonl: Print one JSON object per answer.
    """
    from as2ray.checkpoints.loading import load
    from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
    from as2ray.models.two_in_one import TwoInOneRanker

    ranker = load(model, dtype=dtype)
    if isinstance(ranker, TwoInOneRanker):
        _print_passages(PassageSearcher(SentenceIndex.open(index), ranker), question, top_k, jsonl)
        return
    answerer = QuestionAnswerer(
        SentenceIndex.open(index, partial(load_sentence_encoder, dtype=dtype)),
        ranker,
        num_candidates=num_candidates,
        num_neighbors=num_neighbors,
        score_threshold=score_threshold,
    )
    result = answerer.ask(question, top_k)
    for answer in result.answers:
        sys.stdout.write(
            json.dumps(asdict(answer), ensure_ascii=False) + "\n"
            if jsonl
            else _format_answer(answer)
        )
    if not result.answers:
        sys.stderr.write(_explain_abstention(result, answerer.min_score))


def _print_passages(searcher: PassageSearcher, question: str, top_k: int, jsonl: bool) -> None:
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


def _format_answer(answer: Answer) -> str:
    has_section = answer.heading not in ("", answer.title, answer.document_id)
    source = f"{answer.document_id}, {answer.heading}" if has_section else answer.document_id
    lines = f"{answer.score:.4f}  {answer.text}\n        {source}\n"
    has_context = answer.context != answer.text
    return lines + f"        … {answer.context} …\n" if has_context else lines


def _explain_abstention(result: QuestionAnswer, min_score: float) -> str:
    if result.best_score is None:
        return NO_MATCH_MESSAGE
    return (
        f"No answer: the best of {result.num_candidates} sentences has the score "
        f"{result.best_score:.4f}, and an answer needs {min_score:.4f}.\n"
    )
