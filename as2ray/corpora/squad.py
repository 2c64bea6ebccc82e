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

from as2ray.corpora import files
from as2ray.corpora.asnq import EVERY, check_negatives
from as2ray.corpora.base import Building, Corpus, Item, Record, Source
from as2ray.corpora.building import strict
from as2ray.corpora.pages import POSITIVE, Page, cut, grades_of
from as2ray.errors import CorpusError
from as2ray.text.sentences import find

FILES: Final = {
    "train": ("train-v1.1.json", "train-part-v1.1.json"),
    "dev": ("dev-v1.1.json",),
}

SIZES: Final = {
    "train-v1.1.json": (442, 18_896, 87_599),
    "train-part-v1.1.json": (44, 2_430, 11_877),
    "dev-v1.1.json": (48, 2_067, 10_570),
}
"""Articles, paragraphs and questions of each file."""

RANGES: Final = ("article", "paragraph")


def reader(
    split: str,
    source: Source,
    *,
    candidates: str = "article",
    negatives: Sequence[int] = EVERY,
    per_question: int | None = None,
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
        "candidates": candidates,
        "negatives": negatives,
        "per_question": per_question,
        "seed": seed,
        "splitter": splitter,
    }
    with files.sound(str(source)):
        yield from strict(BUILDING, split, source, options)


def _paths(split: str, source: Source) -> list[Path]:
    return [files.locate(Path(source), FILES[split])]


def _records(path: Path) -> Iterator[Record]:
    for number, record in enumerate(_articles(path)):
        yield Record(f"{path}, article {number}", json.dumps(record))


def _check(
    candidates: str, negatives: Sequence[int], per_question: int | None, seed: int, splitter: str
) -> None:
    find(splitter)
    check_negatives(negatives)
    if candidates not in RANGES or (per_question is not None and per_question < 1) or seed < 0:
        raise CorpusError(
            f"candidates {candidates!r}, per_question {per_question}, seed {seed}",
            expected=f"candidates one of {list(RANGES)}; per_question None or >= 1; seed >= 0",
            mend="correct the option",
        )


def _make(
    text: str,
    where: str,
    candidates: str,
    negatives: Sequence[int],
    per_question: int | None,
    seed: int,
    splitter: str,
) -> pa.Table | None:
    """The candidates of the questions of one article."""
    record, kept = json.loads(text), check_negatives(negatives).to_numpy()
    page = cut(record["title"], [p["context"] for p in record["paragraphs"]], splitter)
    asked, chosen, grades = [], [], []
    for paragraph, question, answers in _asked(record, where):
        grade = grades_of(page, paragraph, answers, where)
        use = np.isin(grade, kept)
        if candidates == "paragraph":
            use &= page.paragraph == paragraph
        rows = _draw(use, grade, per_question, [seed, crc32(question[0].encode())])
        asked.append(question)
        chosen.append(rows)
        grades.append(grade[rows])
    return _table(page, asked, chosen, np.concatenate(grades)) if asked else None


def inventory(source: Path) -> Iterator[Item]:
    """Articles, paragraphs and questions of each file of known size."""
    for split, names in FILES.items():
        path = files.present(source, names)
        published = SIZES.get(path.name.removesuffix(".gz")) if path else None
        if path and published:
            records = _articles(path)
            paragraphs = [p for r in records for p in r["paragraphs"]]
            found = (len(records), len(paragraphs), sum(len(p["qas"]) for p in paragraphs))
            for what, *pair in zip(("articles", "paragraphs", "questions"), published, found):
                yield Item(split, what, *pair)


def _articles(path: Path) -> list[Any]:
    (records,) = files.need(files.json_file(path), ["data"], str(path))
    for record in records:
        title, paragraphs = files.need(record, ["title", "paragraphs"], str(path))
        for paragraph in paragraphs:
            files.need(paragraph, ["context", "qas"], f"{path}, article {title!r}")
    return list(records)


def _asked(record: Any, where: str) -> Iterator[tuple[int, tuple[str, str], list[tuple[int, str]]]]:
    for p, paragraph in enumerate(record["paragraphs"]):
        for item in paragraph["qas"]:
            id, question, answers = files.need(item, ["id", "question", "answers"], where)
            places = [files.need(a, ["answer_start", "text"], f"{where}, {id}") for a in answers]
            for start, text in places:
                if paragraph["context"][start : start + len(text)] != text:
                    raise CorpusError(
                        f"{where}, question {id}: {text!r} does not stand at character {start:,}",
                        expected="answers that stand where their offsets say",
                        mend="give the publisher's own file",
                    )
            yield p, (id, question), places


def _draw(use: np.ndarray, grade: np.ndarray, most: int | None, seed: list[int]) -> np.ndarray:
    positive = np.flatnonzero(use & (grade == POSITIVE))
    negative = np.flatnonzero(use & (grade != POSITIVE))
    if most is not None and len(positive) + len(negative) > most:
        room = max(most - len(positive), 0)
        negative = np.random.default_rng(seed).choice(negative, room, replace=False)
    return np.sort(np.concatenate([positive, negative]))


def _table(
    page: Page, questions: list[tuple[str, str]], chosen: list[np.ndarray], grade: np.ndarray
) -> pa.Table:
    sizes = [len(rows) for rows in chosen]
    ids, texts = (pa.array(column, pa.string()) for column in zip(*questions))
    question = pa.array(np.repeat(np.arange(len(questions)), sizes))
    rows = np.concatenate(chosen)
    names = [f"{id}-{k}" for (id, _), each in zip(questions, chosen) for k in each.tolist()]
    return pa.table(
        {
            "question_id": ids.take(question),
            "question": texts.take(question),
            "candidate_id": pa.array(names, pa.string()),
            "candidate": pa.array(page.sentences, pa.string()).take(pa.array(rows)),
            "label": pa.array((grade == POSITIVE).astype(np.int8)),
            "grade": pa.array(grade),
            "document_id": pa.array([page.title] * len(rows), pa.string()),
        }
    )


BUILDING: Final = Building(_paths, _records, _make, _check)
"""An article is a record."""

CORPUS: Final = Corpus(
    name="squad",
    about="Crowd questions on Wikipedia paragraphs; sentences of the article, graded as ASNQ",
    licence="CC BY-SA 4.0",
    files=FILES,
    reader=reader,
    inventory=inventory,
    building=BUILDING,
)
"""The corpus as the registry holds it."""
