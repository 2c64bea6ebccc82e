"""A corpus in the shape of ASNQ, as large as wanted, made in seconds.

Knows Parquet and the candidates table. Must not know what is measured with it.

Real ASNQ is no file of this repository. Its shape is what streaming depends on: 356 candidates a
question, one in 333 positive, nearly all candidates different. The questions are ASNQ's own; a
candidate is the first half of one sentence of SQuAD's articles and the second half of another, so
that two million of them differ, as ASNQ's do.
"""

import gzip
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from as2ray.corpora.store import PART, ROW_GROUP
from as2ray.text.sentences import split

EACH = 356
"""Candidates a question: 20,377,568 pairs / 57,242 questions."""

PAPERS = 23_662_238
"""Pairs that the Cascade Transformer and CERBERUS trained on."""

PAPERS_EACH = PAPERS / 57_242
"""Their candidates a question, some 413."""

POSITIVE = 61_186 / 20_377_568
"""Part of the pairs that is positive."""

QUESTIONS = "asnq/unique.train"
ARTICLES = ("squad/dev-v1.1.json.gz", "squad/train-part-v1.1.json.gz")


def present(data: Path) -> bool:
    """Whether the data root has the questions and the articles."""
    return all((data / name).is_file() for name in (QUESTIONS, *ARTICLES))


def write(folder: Path, rows: int, data: Path | None, each: float = EACH) -> Path:
    """The corpus as Parquet files, cut as `corpora.prepare` cuts them.

    Args:
        folder: A folder that does not exist yet.
        rows: Pairs.
        data: The data root, or None for made-up words.
        each: Candidates a question.
    """
    folder.mkdir(parents=True)
    questions, left, right = _texts(data)
    for part, start in enumerate(range(0, rows, PART)):
        numbers = np.arange(start, min(start + PART, rows))
        table = _candidates(numbers, each, questions, left, right)
        path = folder / f"part-{part:05d}.parquet"
        pq.write_table(table, path, row_group_size=ROW_GROUP, compression="zstd")
    return folder


def _candidates(
    numbers: np.ndarray, each: float, questions: pa.Array, left: pa.Array, right: pa.Array
) -> pa.Table:
    random = np.random.default_rng([0, int(numbers[0])])
    halves = [
        half.take(pa.array(random.integers(len(half), size=len(numbers)))) for half in (left, right)
    ]
    question = (numbers / each).astype(np.int64)
    inside = numbers - np.ceil(question * each).astype(np.int64)
    ids = pa.array(question).cast(pa.string())
    return pa.table(
        {
            "question_id": ids,
            "question": questions.take(pa.array(question % len(questions))),
            "candidate_id": pc.binary_join_element_wise(
                ids, pa.array(inside).cast(pa.string()), "-"
            ),
            "candidate": pc.binary_join_element_wise(*halves, " "),
            "label": pa.array((random.random(len(numbers)) < POSITIVE).astype(np.int8)),
        }
    )


@lru_cache(maxsize=1)
def _texts(data: Path | None) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Questions, and the first and second halves of sentences."""
    questions, sentences = _made_up() if data is None else _real(data)
    words = [s.split() for s in sentences]
    left = [" ".join(w[: len(w) // 2]) for w in words]
    right = [" ".join(w[len(w) // 2 :]) for w in words]
    return pa.array(questions), pa.array(left), pa.array(right)


def _real(data: Path) -> tuple[list[str], list[str]]:
    sentences: list[str] = []
    for name in ARTICLES:
        with gzip.open(data / name) as file:
            articles = json.load(file)["data"]
        texts = (p["context"] for a in articles for p in a["paragraphs"])
        sentences += (t[s.start : s.end] for t in texts for s in split(t))
    return (data / QUESTIONS).read_text().splitlines(), sentences


def _made_up() -> tuple[list[str], list[str]]:
    random = np.random.default_rng(0)
    syllables = np.array([c + v for c in "bdfglmnprst" for v in "aeiou"])
    sizes = random.integers(1, 3, 5_000)
    words = np.array(["".join(random.choice(syllables, size)) for size in sizes])

    def texts(count: int, least: int, most: int) -> list[str]:
        return [
            " ".join(random.choice(words, size)) for size in random.integers(least, most, count)
        ]

    return texts(1_000, 6, 12), texts(5_000, 8, 45)
