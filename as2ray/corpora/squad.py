"""SQuAD v1.1 (Rajpurkar et al. 2016) read as ASNQ was made from Natural Questions.

The article stands for the page, the paragraph for the long answer, the answer span for the
short answer; so every sentence of the article gets one of ASNQ's four grades. Knows SQuAD's
JSON. Must not know any other corpus.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import numpy as np
import pyarrow as pa

from as2ray.corpora.asnq import NEGATIVE_GRADES, check_negatives
from as2ray.corpora.corpus import Corpus, Record, RecordConversion, ReleaseCount, Source
from as2ray.corpora.page_grades import POSITIVE_GRADE, Page, grade_paragraph_answer, split_page
from as2ray.corpora.record_conversion import convert_strictly
from as2ray.errors import CorpusError
from as2ray.tables import raw_files
from as2ray.text.sentences import get_splitter

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

CANDIDATE_SCOPES: Final = ("article", "paragraph")


def read_tables(
    split: str,
    source: Source,
    *,
    candidate_scope: str = "article",
    negatives: Sequence[int] = NEGATIVE_GRADES,
    max_candidates: int | None = None,
    seed: int = 0,
    splitter: str = "syntok",
) -> Iterator[pa.Table]:
    """One table an article; ids depend on the splitter alone, not on what is left out.

    Grades: 4 a sentence of the paragraph that overlaps the span of an answer (all of them,
    where a span crosses sentences); 3 another sentence of the paragraph; 2 a sentence outside
    with the words of an answer, whatever their case; 1 any other.

    Args:
        split: One of `FILES`.
        source: The folder or one file.
        candidates: Sentences of the whole `article`, or of the question's `paragraph` alone.
        negatives: The grades kept as negatives, as in ASNQ.
        per_question: Most candidates of a question; negatives are drawn, positives all stay.
        seed: Of the drawing, which depends on the question's id and on nothing else.
        splitter: A name of `as2ray.text.sentences.SPLITTERS`.
    """
    options = {
        "candidates": candidate_scope,
        "negatives": negatives,
        "per_question": max_candidates,
        "seed": seed,
        "splitter": splitter,
    }
    with raw_files.value_errors(str(source)):
        yield from convert_strictly(CONVERSION, split, source, options)


def _find_files(split: str, source: Source) -> list[Path]:
    return [raw_files.require_file(Path(source), FILES[split])]


def _read_records(path: Path) -> Iterator[Record]:
    for number, record in enumerate(_read_articles(path)):
        yield Record(f"{path}, article {number}", json.dumps(record))


def _check_options(
    candidate_scope: str,
    negatives: Sequence[int],
    max_candidates: int | None,
    seed: int,
    splitter: str,
) -> None:
    get_splitter(splitter)
    check_negatives(negatives)
    if (
        candidate_scope not in CANDIDATE_SCOPES
        or (max_candidates is not None and max_candidates < 1)
        or seed < 0
    ):
        raise CorpusError(
            f"candidates {candidate_scope!r}, per_question {max_candidates}, seed {seed}"
            f"; expected candidates one of {list(CANDIDATE_SCOPES)}; per_question None or >= 1; seed >= 0",
        )


def _convert_article(
    text: str,
    source: str,
    candidate_scope: str,
    negatives: Sequence[int],
    max_candidates: int | None,
    seed: int,
    splitter: str,
) -> pa.Table | None:
    """The candidates of the questions of one article."""
    record, kept = json.loads(text), check_negatives(negatives).to_numpy()
    page = split_page(record["title"], [p["context"] for p in record["paragraphs"]], splitter)
    asked, chosen, grades = [], [], []
    for paragraph, question, answers in _parse_questions(record, source):
        grade = grade_paragraph_answer(page, paragraph, answers, source)
        use = np.isin(grade, kept)
        if candidate_scope == "paragraph":
            use &= page.paragraph_index == paragraph
        rows = _draw_candidates(use, grade, max_candidates, [seed, crc32(question[0].encode())])
        asked.append(question)
        chosen.append(rows)
        grades.append(grade[rows])
    return _build_table(page, asked, chosen, np.concatenate(grades)) if asked else None


def count_release(source: Path) -> Iterator[ReleaseCount]:
    """Articles, paragraphs and questions of each file of known size."""
    for split, names in FILES.items():
        path = raw_files.find_file(source, names)
        published = RELEASE_COUNTS.get(path.name.removesuffix(".gz")) if path else None
        if path and published:
            records = _read_articles(path)
            paragraphs = [p for r in records for p in r["paragraphs"]]
            found = (len(records), len(paragraphs), sum(len(p["qas"]) for p in paragraphs))
            for what, *pair in zip(("articles", "paragraphs", "questions"), published, found):
                yield ReleaseCount(split, what, *pair)


def _read_articles(path: Path) -> list[Any]:
    (records,) = raw_files.require_keys(raw_files.read_json_file(path), ["data"], str(path))
    for record in records:
        title, paragraphs = raw_files.require_keys(record, ["title", "paragraphs"], str(path))
        for paragraph in paragraphs:
            raw_files.require_keys(paragraph, ["context", "qas"], f"{path}, article {title!r}")
    return list(records)


def _parse_questions(
    record: Any, source: str
) -> Iterator[tuple[int, tuple[str, str], list[tuple[int, str]]]]:
    for p, paragraph in enumerate(record["paragraphs"]):
        for item in paragraph["qas"]:
            id, question, answers = raw_files.require_keys(
                item, ["id", "question", "answers"], source
            )
            places = [
                raw_files.require_keys(a, ["answer_start", "text"], f"{source}, {id}")
                for a in answers
            ]
            for start, text in places:
                if paragraph["context"][start : start + len(text)] != text:
                    raise CorpusError(
                        f"{source}, question {id}: {text!r} does not stand at character {start:,}"
                        "; expected answers that stand where their offsets say",
                        fix="give the publisher's own file",
                    )
            yield p, (id, question), places


def _draw_candidates(
    is_candidate: np.ndarray, grade: np.ndarray, max_candidates: int | None, seed: list[int]
) -> np.ndarray:
    positive = np.flatnonzero(is_candidate & (grade == POSITIVE_GRADE))
    negative = np.flatnonzero(is_candidate & (grade != POSITIVE_GRADE))
    if max_candidates is not None and len(positive) + len(negative) > max_candidates:
        room = max(max_candidates - len(positive), 0)
        negative = np.random.default_rng(seed).choice(negative, room, replace=False)
    return np.sort(np.concatenate([positive, negative]))


def _build_table(
    page: Page, questions: list[tuple[str, str]], chosen_rows: list[np.ndarray], grade: np.ndarray
) -> pa.Table:
    sizes = [len(rows) for rows in chosen_rows]
    ids, texts = (pa.array(column, pa.string()) for column in zip(*questions))
    question = pa.array(np.repeat(np.arange(len(questions)), sizes))
    rows = np.concatenate(chosen_rows)
    names = [f"{id}-{k}" for (id, _), each in zip(questions, chosen_rows) for k in each.tolist()]
    return pa.table(
        {
            "question_id": ids.take(question),
            "question": texts.take(question),
            "candidate_id": pa.array(names, pa.string()),
            "candidate": pa.array(page.sentences, pa.string()).take(pa.array(rows)),
            "label": pa.array((grade == POSITIVE_GRADE).astype(np.int8)),
            "grade": pa.array(grade),
            "document_id": pa.array([page.title] * len(rows), pa.string()),
        }
    )


CONVERSION: Final = RecordConversion(_find_files, _read_records, _convert_article, _check_options)
"""An article is a record."""

CORPUS: Final = Corpus(
    name="squad",
    description="Crowd questions on Wikipedia paragraphs; sentences of the article, graded as ASNQ",
    license="CC BY-SA 4.0",
    files=FILES,
    reader=read_tables,
    count_release=count_release,
    conversion=CONVERSION,
)
"""The corpus as the registry holds it."""
