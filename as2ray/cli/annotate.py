"""`as2ray annotate`: writes lists of candidates for people to label."""

import csv
from pathlib import Path

from as2ray.cli.console import create_console, read_lines
from as2ray.errors import ConfigError, CorpusError
from as2ray.models.precision import Dtype
from as2ray.tables.atomic import atomic_file


def annotate(
    *,
    index: str,
    questions: str,
    output: str,
    model: str | None = None,
    num_documents: int = 100,
    top_k: int = 100,
    dtype: Dtype = "auto",
) -> None:
    """Writes the candidates of questions as a CSV file with an empty column `label`.

    With labels, as AS2RAY_DATA/annotated/train.csv, dev.csv or test.csv, it is a split of the
    corpus `annotated`. Rows whose label is still empty are left out.

    Args:
        index: Output folder of `as2ray index`.
        questions: A file with one question per line; `-` reads standard input. A question that is
            there several times has one list.
        output: The file to write.
        model: Checkpoint folder or hub id of the ranker; without one BM25 orders the candidates.
        num_documents: Documents whose sentences are candidates of a question.
        top_k: Maximum number of candidates of a question.
        dtype: Number format of matrix products.
    """
    if Path(output).exists():
        raise ConfigError(f"{output} exists; somebody may have labeled it", fix="name another file")
    from as2ray.checkpoints.loading import load
    from as2ray.retrieval.annotation import CandidateLister, ListedCandidate
    from as2ray.retrieval.sentence_index import SentenceIndex

    texts, num_rows, listed = list(dict.fromkeys(read_lines(questions))), 0, set[str]()
    if not texts:
        raise CorpusError(f"{questions} has no line with a question")
    ranker = None if model is None else load(model, dtype=dtype)
    lister = CandidateLister(SentenceIndex.open(index), ranker, num_documents, top_k)
    with atomic_file(output) as path, open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(ListedCandidate._fields)
        for candidate in lister.list_candidates(texts):
            writer.writerow(candidate)
            num_rows += 1
            listed.add(candidate.question_id)
    console = create_console()
    console.print(f"{num_rows:,} candidates of {len(listed):,} questions in {output}")
    if num_missing := len(texts) - len(listed):
        console.print(
            f"left out: {num_missing:,} of {len(texts):,} questions, which have no word of the "
            "documents"
        )
