"""SQuAD v1.1 (Rajpurkar et al. 2016), converted as ASNQ was made from Natural Questions.

The article stands for the page, the paragraph for the long answer and the answer span for the short
answer. So every sentence of the article gets one of ASNQ's four grades.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, Literal
from zlib import crc32

import numpy as np
import pyarrow as pa
from pydantic import ConfigDict, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from as2ray.corpora.corpus import HUB, Corpus, Record, RecordConversion, ReleaseCount, Source
from as2ray.corpora.page_grades import (
    POSITIVE_GRADE,
    Candidates,
    PageOptions,
    build_table,
    grade_paragraph_answer,
    split_page,
)
from as2ray.corpora.record_conversion import convert_strictly
from as2ray.errors import CorpusError
from as2ray.tables import raw_files

HUB_DATASET: Final = "rajpurkar/squad"

FILES: Final = {
    "train": ("train-v1.1.json", "train-part-v1.1.json"),
    "dev": ("dev-v1.1.json",),
}

RELEASE_COUNTS: Final = {
    "train-v1.1.json": (442, 18_896, 87_599),
    "train-part-v1.1.json": (44, 2_430, 11_877),
    "dev-v1.1.json": (48, 2_067, 10_570),
}
"""Articles, paragraphs and questions of each file."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SQuADOptions(PageOptions):
    """Options of SQuAD."""

    candidate_scope: Literal["article", "paragraph"] = "article"
    """Candidates are the sentences of the whole article, or of the question's paragraph."""
    max_candidates: PositiveInt | None = None
    """Maximum number of candidates of a question. Negatives are sampled, all positives stay."""
    seed: NonNegativeInt = 0
    """Seed of the sampling. The sample of a question depends only on this and the question's id."""


def read_tables(split: str, source: Source, options: SQuADOptions) -> Iterator[pa.Table]:
    """Reads one table per article; ids depend only on the sentence splitter.

    Grades: 4 a sentence of the paragraph that overlaps an answer span (all such sentences, if the
    span crosses sentences); 3 another sentence of the paragraph; 2 a sentence outside with the
    words of an answer, in upper or lower case; 1 any other.

    Args:
        split: One of `FILES`.
        source: The folder, one file, or the hub.
        options: Options of the corpus.
    """
    with raw_files.value_errors(str(source)):
        if source != HUB:
            yield from convert_strictly(CONVERSION, split, source, options)
            return
        for article in _read_hub_articles(split, options.hub_revision):
            if (table := _convert_article(json.dumps(article), HUB_DATASET, options)) is not None:
                yield table


def _find_files(split: str, source: Source) -> list[Path]:
    return [raw_files.require_file(Path(source), FILES[split])]


def _read_records(path: Path) -> Iterator[Record]:
    for number, article in enumerate(_read_articles(path)):
        yield Record(f"{path}, article {number}", json.dumps(article))


def _read_hub_articles(split: str, revision: str | None) -> Iterator[dict[str, Any]]:
    """Reads the hub's copy, whose rows are questions, in the structure of the release."""
    hub_split = "validation" if split == "dev" else split
    tables = raw_files.read_hub(HUB_DATASET, hub_split, revision=revision)
    rows = (row for table in tables for row in table.to_pylist())
    for title, of_article in groupby(rows, key=itemgetter("title")):
        paragraphs = []
        for context, questions in groupby(of_article, key=itemgetter("context")):
            records = []
            for row in questions:
                pairs = zip(row["answers"]["answer_start"], row["answers"]["text"])
                answers = [{"answer_start": start, "text": text} for start, text in pairs]
                records.append({"id": row["id"], "question": row["question"], "answers": answers})
            paragraphs.append({"context": context, "qas": records})
        yield {"title": title, "paragraphs": paragraphs}


def _convert_article(text: str, source: str, options: SQuADOptions) -> pa.Table | None:
    article = json.loads(text)
    paragraphs = [paragraph["context"] for paragraph in article["paragraphs"]]
    page = split_page(article["title"], paragraphs, options.sentence_splitter)
    candidates = []
    for paragraph, id, question, answers in _parse_questions(article, source):
        grades = grade_paragraph_answer(page, paragraph, answers, source)
        is_candidate = options.is_candidate(grades)
        if options.candidate_scope == "paragraph":
            is_candidate &= page.paragraph_index == paragraph
        sentences = np.flatnonzero(is_candidate)
        if options.max_candidates is not None and len(sentences) > options.max_candidates:
            rng = np.random.default_rng([options.seed, crc32(id.encode())])
            sentences = _sample_candidates(sentences, grades, options.max_candidates, rng)
        candidates.append(Candidates(id, question, sentences, grades[sentences]))
    return build_table(page, candidates) if candidates else None


def count_release(source: Path) -> Iterator[ReleaseCount]:
    """Counts articles, paragraphs and questions of each file with published counts."""
    for split, names in FILES.items():
        path = raw_files.find_file(source, names)
        if path and (published := RELEASE_COUNTS.get(path.name.removesuffix(".gz"))):
            articles = _read_articles(path)
            paragraphs = [p for article in articles for p in article["paragraphs"]]
            num_questions = sum(len(p["qas"]) for p in paragraphs)
            yield ReleaseCount(split, "articles", published[0], len(articles))
            yield ReleaseCount(split, "paragraphs", published[1], len(paragraphs))
            yield ReleaseCount(split, "questions", published[2], num_questions)


def _read_articles(path: Path) -> list[Any]:
    (articles,) = raw_files.require_keys(raw_files.read_json_file(path), ["data"], str(path))
    for article in articles:
        title, paragraphs = raw_files.require_keys(article, ["title", "paragraphs"], str(path))
        for paragraph in paragraphs:
            raw_files.require_keys(paragraph, ["context", "qas"], f"{path}, article {title!r}")
    return list(articles)


def _parse_questions(
    article: Any, source: str
) -> Iterator[tuple[int, str, str, list[tuple[int, str]]]]:
    """Yields paragraph index, id, question, and (start, text) of each answer."""
    for index, paragraph in enumerate(article["paragraphs"]):
        for record in paragraph["qas"]:
            keys = ["id", "question", "answers"]
            id, question, records = raw_files.require_keys(record, keys, source)
            name = f"{source}, question {id}"
            answers = [raw_files.require_keys(r, ["answer_start", "text"], name) for r in records]
            for start, text in answers:
                if paragraph["context"][start : start + len(text)] != text:
                    problem = f"the answer {text!r} is not at its offset, character {start:,}"
                    raise CorpusError(f"{name}: {problem}", fix="use the published file")
            yield index, id, question, answers


def _sample_candidates(
    sentences: np.ndarray, grades: np.ndarray, max_candidates: int, rng: np.random.Generator
) -> np.ndarray:
    is_positive = grades[sentences] == POSITIVE_GRADE
    positives, negatives = sentences[is_positive], sentences[~is_positive]
    num_negatives = max(max_candidates - len(positives), 0)
    negatives = rng.choice(negatives, num_negatives, replace=False)
    return np.sort(np.concatenate([positives, negatives]))


CONVERSION: Final = RecordConversion(_find_files, _read_records, _convert_article)
"""A record is an article."""

CORPUS: Final = Corpus(
    name="squad",
    description="Crowd questions on Wikipedia paragraphs; sentences of the article, graded as ASNQ",
    license="CC BY-SA 4.0",
    urls=(
        "https://rajpurkar.github.io/SQuAD-explorer/dataset/train-v1.1.json",
        "https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v1.1.json",
    ),
    files=FILES,
    reader=read_tables,
    options_type=SQuADOptions,
    count_release=count_release,
    conversion=CONVERSION,
    hub=HUB_DATASET,
)
