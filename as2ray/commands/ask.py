"""`as2ray ask`: a question to an index of documents."""

import json
import sys
from dataclasses import asdict

from as2ray.models.ranker import Precision
from as2ray.retrieval.answers import Answer, Answerer, Reply
from as2ray.retrieval.index import SentenceIndex
from as2ray.retrieval.passages import PassageFinder

NOTHING = "No sentence shares a word with the question.\n"


def ask(
    question: str,
    index: str,
    model: str,
    top_k: int = 3,
    candidates: int = 100,
    around: int = 1,
    threshold: float | None = None,
    precision: Precision = "auto",
    json_lines: bool = False,
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
    from as2ray.checkpoint import load
    from as2ray.models.two_in_one import TwoInOneRanker

    ranker = load(model, precision=precision)
    if isinstance(ranker, TwoInOneRanker):
        _tell_passages(
            PassageFinder(SentenceIndex.open(index), ranker), question, top_k, json_lines
        )
        return
    answerer = Answerer(SentenceIndex.open(index), ranker, candidates, around, threshold)
    reply = answerer.ask(question, top_k)
    for answer in reply.answers:
        sys.stdout.write(
            json.dumps(asdict(answer), ensure_ascii=False) + "\n" if json_lines else _told(answer)
        )
    if not reply.answers:
        sys.stderr.write(_why(reply, answerer.least))


def _tell_passages(finder: PassageFinder, question: str, top_k: int, json_lines: bool) -> None:
    found = finder.ask(question, top_k)
    for passage in found:
        if json_lines:
            sys.stdout.write(json.dumps(asdict(passage), ensure_ascii=False) + "\n")
            continue
        chosen = "".join(f"        {s.score:+.4f}  {s.text}\n" for s in passage.sentences)
        shown = chosen or f"        … {passage.text} …\n"
        sys.stdout.write(f"{passage.score:+.4f}  {passage.document}\n{shown}")
    if not found:
        sys.stderr.write(NOTHING)


def _told(answer: Answer) -> str:
    place = answer.document if answer.heading in ("", answer.title) else answer.heading
    source = answer.document if place == answer.document else f"{answer.document}, {place}"
    shown = f"{answer.score:.4f}  {answer.text}\n        {source}\n"
    return shown if answer.context == answer.text else shown + f"        … {answer.context} …\n"


def _why(reply: Reply, least: float) -> str:
    if reply.best is None:
        return NOTHING
    return (
        f"No answer: the best of {reply.candidates} sentences has {reply.best:.4f}, "
        f"an answer {least:.4f}.\n"
    )
