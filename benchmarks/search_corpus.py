"""A corpus of any size for search: real sentences first, then sentences made of halves of others.

The articles of SQuAD come first, those of its dev part before those of its train part, as documents
with their paragraphs; questions of its dev part have their answers there. Then come the distinct
candidates of WikiQA, TREC-QA, HotpotQA and MS MARCO, up to 98,304 sentences together. All further
ones join the first half of one of these candidates with the second half of another, so that SQuAD's
sentences stay unique.
"""

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from as2ray.corpora.registry import get_corpus
from as2ray.text.sentences import split
from benchmarks.asnq_shaped import ARTICLE_FILES, generate_texts

CANDIDATE_SOURCES = {
    "wikiqa": ("train", "dev", "test"),
    "trecqa": ("train-all", "dev", "test"),
    "hotpotqa": ("train", "dev"),
    "msmarco": ("dl19",),
}
"""Corpora and splits whose candidates follow SQuAD's sentences."""

MAX_REAL = 98_304
"""Maximum number of real sentences: 12 blocks, which an encoder reads within minutes."""

DOCUMENT_SIZE = 5
"""Sentences of a document that is none of SQuAD's."""

MIN_WORDS = 4
"""Words of a candidate; shorter ones are headings and fragments."""


class LabeledQuestion(NamedTuple):
    """A question and the sentences with its answer."""

    question: str
    answers: frozenset[str]
    article: int
    """Number of its article."""


@dataclass(frozen=True)
class SearchCorpus:
    """Sentences in documents."""

    documents: list[str]
    """Documents with a sentence in each line; blank lines separate paragraphs."""
    sentences: list[str]
    num_real: int
    """The number of real sentences; the others follow."""
    halves: np.ndarray
    """The real sentences of which each other one has its halves, shape [others, 2]."""

    def write(self, path: Path) -> None:
        """Writes the documents as a table."""
        pq.write_table(pa.table({"text": self.documents}), path)


def has_source_files(data_root: Path) -> bool:
    """Returns whether the data root has the articles."""
    return all((data_root / name).is_file() for name in ARTICLE_FILES)


def build_corpus(num_sentences: int, data_root: Path | None) -> SearchCorpus:
    """Returns the first sentences of the corpus.

    Args:
        num_sentences: Number of sentences.
        data_root: Folder of the raw releases, or None for made-up words.
    """
    documents: list[str] = []
    sentences: list[str] = []

    def add(paragraphs: Iterator[list[str]] | list[list[str]]) -> None:
        kept = []
        for paragraph in paragraphs:
            kept.append(paragraph[: num_sentences - len(sentences)])
            sentences.extend(kept[-1])
        documents.append("\n\n".join("\n".join(paragraph) for paragraph in kept))

    for article in _read_articles(data_root) if data_root else ():
        add([_split(paragraph["context"]) for paragraph in article["paragraphs"]])
    offset = len(sentences)
    candidates = _read_candidates(data_root)[: MAX_REAL - offset]
    for start in range(0, min(len(candidates), num_sentences - offset), DOCUMENT_SIZE):
        add([candidates[start : start + DOCUMENT_SIZE]])
    num_real = len(sentences)
    words = [text.split() for text in candidates]
    first, second = (
        np.array([" ".join(w[part(len(w) // 2)]) for w in words], object)
        for part in (lambda middle: slice(middle), lambda middle: slice(middle, None))
    )
    num_made = max(0, num_sentences - num_real)
    rows = np.random.default_rng(0).integers(len(words), size=(num_made, 2))
    for start in range(0, num_made, DOCUMENT_SIZE):
        a, b = rows[start : start + DOCUMENT_SIZE].T
        add([(first[a] + " " + second[b]).tolist()])
    return SearchCorpus(documents, sentences, num_real, offset + rows)


def read_questions(data_root: Path | None, num_questions: int) -> list[LabeledQuestion]:
    """Returns questions of SQuAD dev, spread over its articles; or made-up ones."""
    if data_root is None:
        questions, sentences = generate_texts()
        pairs = list(zip(questions, sentences))[:num_questions]
        return [LabeledQuestion(q, frozenset([s]), n) for n, (q, s) in enumerate(pairs)]
    labeled: dict[str, LabeledQuestion] = {}
    for number, article in enumerate(_read_articles(data_root, ARTICLE_FILES[:1])):
        for paragraph in article["paragraphs"]:
            text = paragraph["context"]
            spans = split(text, "simple")
            for entry in paragraph["qas"]:
                starts = {answer["answer_start"] for answer in entry["answers"]}
                answers = frozenset(
                    _to_one_line(text[span.start : span.end])
                    for span in spans
                    if any(span.start <= start < span.end for start in starts)
                )
                question = _to_one_line(entry["question"])
                labeled[question] = LabeledQuestion(question, answers, number)
    rows = np.linspace(0, len(labeled) - 1, min(num_questions, len(labeled))).astype(int)
    return [list(labeled.values())[row] for row in rows]


def _read_articles(
    data_root: Path, names: tuple[str, ...] = ARTICLE_FILES
) -> Iterator[dict[str, Any]]:
    for name in names:
        with gzip.open(data_root / name) as file:
            yield from json.load(file)["data"]


def _read_candidates(data_root: Path | None) -> list[str]:
    if data_root is None:
        return generate_texts()[1][:60]
    texts: dict[str, None] = {}
    for name, splits in CANDIDATE_SOURCES.items():
        for part in splits:
            for table in get_corpus(name).read_tables(part, data_root / name):
                for text in table["candidate"].unique().to_pylist():
                    # The candidates of MS MARCO are passages.
                    sentences = _split(text) if name == "msmarco" else [_to_one_line(text)]
                    texts |= dict.fromkeys(sentences)
    return [text for text in texts if len(text.split()) >= MIN_WORDS]


def _split(text: str) -> list[str]:
    return [_to_one_line(text[span.start : span.end]) for span in split(text, "simple")]


def _to_one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
