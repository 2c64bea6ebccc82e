"""`as2ray ask`: a question to an index of documents."""

import json
import sys
from dataclasses import asdict

from as2ray.models.ranker import Dtype
from as2ray.retrieval.passage_search import PassageSearcher
from as2ray.retrieval.question_answering import Answer, QuestionAnswer, QuestionAnswerer
from as2ray.retrieval.sentence_index import SentenceIndex

NO_MATCH_MESSAGE = "No sentence shares a word with the question.\n"


def ask(
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
    """Answers a question from documents, with the source; abstains where nothing is good enough.

    A joint model (Two-in-One) answers with passages and the sentences selected in them; to it
    `candidates`, `around` and `threshold` say nothing.

    Args:
        question: The question.
        index: What `as2ray index` wrote.
        model: Checkpoint folder or hub id.
        top_k: Most answers.
        candidates: Most sentences that are ranked.
        around: Neighbours on either side that come with a sentence as candidates.
        threshold: Score that an answer must have; by default the model's own, which `as2ray
            calibrate` finds, and none in a model that was not calibrated.
        precision: Number format of the matrix products.
        json_lines: Print one JSON object an answer.
    """
    from as2ray.checkpoints.loading import load
    from as2ray.models.two_in_one import TwoInOneRanker

    ranker = load(model, dtype=dtype)
    if isinstance(ranker, TwoInOneRanker):
        _print_passages(PassageSearcher(SentenceIndex.open(index), ranker), question, top_k, jsonl)
        return
    answerer = QuestionAnswerer(
        SentenceIndex.open(index), ranker, num_candidates, num_neighbors, score_threshold
    )
    reply = answerer.ask(question, top_k)
    for answer in reply.answers:
        sys.stdout.write(
            json.dumps(asdict(answer), ensure_ascii=False) + "\n"
            if jsonl
            else _format_answer(answer)
        )
    if not reply.answers:
        sys.stderr.write(_explain_abstention(reply, answerer.min_score))


def _print_passages(searcher: PassageSearcher, question: str, top_k: int, jsonl: bool) -> None:
    found = searcher.ask(question, top_k)
    for passage in found:
        if jsonl:
            sys.stdout.write(json.dumps(asdict(passage), ensure_ascii=False) + "\n")
            continue
        chosen = "".join(f"        {s.score:+.4f}  {s.text}\n" for s in passage.sentences)
        shown = chosen or f"        … {passage.text} …\n"
        sys.stdout.write(f"{passage.score:+.4f}  {passage.document_id}\n{shown}")
    if not found:
        sys.stderr.write(NO_MATCH_MESSAGE)


def _format_answer(answer: Answer) -> str:
    place = answer.document_id if answer.heading in ("", answer.title) else answer.heading
    source = answer.document_id if place == answer.document_id else f"{answer.document_id}, {place}"
    shown = f"{answer.score:.4f}  {answer.text}\n        {source}\n"
    return shown if answer.context == answer.text else shown + f"        … {answer.context} …\n"


def _explain_abstention(result: QuestionAnswer, min_score: float) -> str:
    if result.best_score is None:
        return NO_MATCH_MESSAGE
    return (
        f"No answer: the best of {result.num_candidates} sentences has {result.best_score:.4f}, "
        f"an answer {min_score:.4f}.\n"
    )
