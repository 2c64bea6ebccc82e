"""Generates a corpus in the shape of ASNQ, of any size, in seconds.

ASNQ itself is not part of this repository. Streaming depends on its shape only: 356 candidates per
question, one in 333 positive, nearly all candidates different. The questions are ASNQ's own. A
candidate joins the first half of one sentence of SQuAD's articles with the second half of another,
so that millions of candidates differ, as in ASNQ.
"""

import gzip
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.corpora.preparation import ROWS_PER_PART
from as2ray.tables.parquet import write_part
from as2ray.text.sentences import split

CANDIDATES_PER_QUESTION = 356
"""Mean of ASNQ: 20,377,568 pairs / 57,242 questions."""

PAPER_NUM_PAIRS = 23_662_238
"""Training pairs of the Cascade Transformer and of CERBERUS."""

PAPER_CANDIDATES_PER_QUESTION = PAPER_NUM_PAIRS / 57_242
"""Mean candidates per question of these pairs, about 413."""

POSITIVE_RATE = 61_186 / 20_377_568
"""Share of positive pairs in ASNQ."""

QUESTION_FILE = "asnq/unique.train"
ARTICLE_FILES = ("squad/dev-v1.1.json.gz", "squad/train-part-v1.1.json.gz")


def has_source_files(data_root: Path) -> bool:
    """Returns whether the data root has the questions and the articles."""
    return all((data_root / name).is_file() for name in (QUESTION_FILE, *ARTICLE_FILES))


def write_corpus(
    folder: Path,
    num_rows: int,
    data_root: Path | None,
    candidates_per_question: float = CANDIDATES_PER_QUESTION,
) -> Path:
    """Writes the corpus as Parquet files of the sizes that `as2ray corpora prepare` writes.

    Args:
        folder: A folder that does not exist yet.
        num_rows: Number of pairs.
        data_root: Folder of the raw releases, or None for made-up words.
        candidates_per_question: Mean number of candidates per question.
    """
    folder.mkdir(parents=True)
    questions, first_halves, second_halves = _load_texts(data_root)
    for part, start in enumerate(range(0, num_rows, ROWS_PER_PART)):
        row_numbers = np.arange(start, min(start + ROWS_PER_PART, num_rows))
        table = _make_candidates(
            row_numbers, candidates_per_question, questions, first_halves, second_halves
        )
        path = folder / f"part-{part:05d}.parquet"
        write_part(table, path, start)
    return folder


def _make_candidates(
    row_numbers: np.ndarray,
    candidates_per_question: float,
    questions: pa.Array,
    first_halves: pa.Array,
    second_halves: pa.Array,
) -> pa.Table:
    random = np.random.default_rng([0, int(row_numbers[0])])
    halves = [
        half.take(pa.array(random.integers(len(half), size=len(row_numbers))))
        for half in (first_halves, second_halves)
    ]
    question_index = (row_numbers / candidates_per_question).astype(np.int64)
    position = row_numbers - np.ceil(question_index * candidates_per_question).astype(np.int64)
    ids = pa.array(question_index).cast(pa.string())
    return pa.table(
        {
            "question_id": ids,
            "question": questions.take(pa.array(question_index % len(questions))),
            "candidate_id": pc.binary_join_element_wise(
                ids, pa.array(position).cast(pa.string()), "-"
            ),
            "candidate": pc.binary_join_element_wise(*halves, " "),
            "label": pa.array((random.random(len(row_numbers)) < POSITIVE_RATE).astype(np.int8)),
        }
    )


@lru_cache(maxsize=1)
def _load_texts(data_root: Path | None) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Returns questions, and the first and second halves of sentences."""
    questions, sentences = generate_texts() if data_root is None else _read_real_texts(data_root)
    words = [s.split() for s in sentences]
    first_halves = [" ".join(w[: len(w) // 2]) for w in words]
    second_halves = [" ".join(w[len(w) // 2 :]) for w in words]
    return pa.array(questions), pa.array(first_halves), pa.array(second_halves)


def _read_real_texts(data_root: Path) -> tuple[list[str], list[str]]:
    sentences: list[str] = []
    for name in ARTICLE_FILES:
        with gzip.open(data_root / name) as file:
            articles = json.load(file)["data"]
        texts = (p["context"] for a in articles for p in a["paragraphs"])
        sentences += (t[s.start : s.end] for t in texts for s in split(t))
    return (data_root / QUESTION_FILE).read_text().splitlines(), sentences


def generate_texts() -> tuple[list[str], list[str]]:
    """Returns questions and sentences of made-up words."""
    random = np.random.default_rng(0)
    syllables = np.array([c + v for c in "bdfglmnprst" for v in "aeiou"])
    sizes = random.integers(1, 3, 5_000)
    words = np.array(["".join(random.choice(syllables, size)) for size in sizes])

    def texts(count: int, min_words: int, max_words: int) -> list[str]:
        return [
            " ".join(random.choice(words, size))
            for size in random.integers(min_words, max_words, count)
        ]

    return texts(1_000, 6, 12), texts(5_000, 8, 45)
