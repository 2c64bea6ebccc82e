"""ASNQ (Garg, Vu and Moschitti 2020): sentence candidates made from Natural Questions.

The release has 23 million rows, so everything here is a stream.

The Cascade Transformer's and CERBERUS' numbers rest on other candidates of the same questions
(`variant: cascade`); no public file is known to contain those.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from as2ray.corpora.corpus import (
    HUB,
    Corpus,
    CorpusOptions,
    PublishedCounts,
    ReleaseCount,
    Source,
)
from as2ray.corpora.page_grades import NEGATIVE_GRADES, POSITIVE_GRADE, NegativeGrades
from as2ray.corpora.reader_utils import assign_question_ids, group_on_disk, parse_labels, set_column
from as2ray.errors import CorpusError, CountMismatchError
from as2ray.tables import raw_files
from as2ray.tables.schema import TableCounts

HUB_DATASET: Final = "AmazonScience/asnq"
COLUMNS: Final = ["question", "sentence", "label"]

FILES: Final = {
    "train": ("train.tsv",),
    "dev-all": ("dev.tsv", "dev++.tsv"),
    "dev": ("dev.tsv", "dev++.tsv"),
    "test": ("dev.tsv", "dev++.tsv"),
}
"""dev-all is the public dev split (TANDA); dev and test are its halves (Cascade, CERBERUS). dev++
is a second release of dev, whose counts nobody published; it belongs in a folder of its own."""

QUESTION_LISTS: Final = {"train": "unique.train", "dev": "unique.dev", "test": "unique.test"}
"""Question lists of the Cascade Transformer's repository, one question per line."""

QUESTION_LIST_SIZES: Final = {"train": 57_242, "dev": 1_336, "test": 1_336}

GRADE_COUNTS: Final = {
    "train": (19_446_120, 428_122, 442_140, 61_186),
    "dev-all": (870_404, 25_814, 29_558, 4_286),
}
"""Rows of grade 1 to 4 (TANDA, Table 1)."""

PUBLIC: Final = {"negative_grades": NEGATIVE_GRADES, "variant": "public"}
CASCADE: Final = {**PUBLIC, "variant": "cascade"}
PUBLISHED_COUNTS: Final = (
    PublishedCounts("train", "raw", TableCounts(57_242, 20_377_568, 61_186), PUBLIC),
    PublishedCounts("dev-all", "raw", TableCounts(2_672, 930_062, 4_286), PUBLIC),
    *(
        PublishedCounts(split, "raw", TableCounts(*counts), CASCADE, is_private=True)
        for split, counts in {
            "train": (57_242, 23_662_238, 69_002),
            "dev": (1_336, 539_210, 4_166),
            "test": (1_336, 535_116, 4_250),
        }.items()
    ),
)
"""TANDA, Table 1; for `cascade` CERBERUS, Table 1."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ASNQOptions(CorpusOptions):
    """Options of ASNQ."""

    negative_grades: NegativeGrades = NEGATIVE_GRADES
    """Grades whose rows are negatives (TANDA, Table 6); the others are left out."""
    variant: Literal["public", "cascade"] = "public"
    """Whose counts are required: those of the public file, or those that the Cascade Transformer
    and CERBERUS print of the same questions. Other files are read with `verify: false`."""
    ungrouped: bool = False
    """Whether rows of a question may be apart in the file; they are then grouped on disk."""


def read_tables(split: str, source: Source, options: ASNQOptions) -> Iterator[pa.Table]:
    """Reads the candidates with their grades; ids do not depend on `negative_grades`.

    Grades: 1 neither in the long answer nor with the words of the short answer, 2 outside the long
    answer with them, 3 inside without, 4 inside with the short answer. Only 4 is positive.

    Args:
        split: One of `FILES`.
        source: The folder (with the question lists, for dev and test), one file, or the hub.
        options: Options of the corpus.
    """
    grades = pa.array([*options.negative_grades, POSITIVE_GRADE], pa.int8())
    rows = _read_release(split, source, options.hub_revision)
    # Ids come before any selection: a question has the same id in dev-all, dev and test.
    tables = assign_question_ids(group_on_disk(rows) if options.ungrouped else rows, str(source))
    if split in ("dev", "test"):
        tables = select_questions(tables, _read_question_list(source, split), split)
    for table in tables:
        yield table.filter(pc.is_in(table["grade"], value_set=grades))


def from_release_rows(tables: Iterable[pa.Table], source: str) -> Iterator[pa.Table]:
    """Converts tables with the columns question, sentence, label (1 to 4); ids are not set."""
    label_values = {str(grade): grade for grade in (*NEGATIVE_GRADES, POSITIVE_GRADE)}
    for table in tables:
        grades = parse_labels(table, "label", label_values, source)
        yield _build_table(table["question"], table["sentence"], grades)


def from_hub_rows(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Converts tables of the hub's copy, whose two flags give the grade; ids are not set."""
    for table in tables:
        is_inside = table["sentence_in_long_answer"].cast(pa.int8())
        has_answer = table["short_answer_in_sentence"].cast(pa.int8())
        grades = pc.add(pc.add(pc.multiply(is_inside, pa.scalar(2, pa.int8())), has_answer), 1)
        yield _build_table(table["question"], table["sentence"], grades.cast(pa.int8()))


def select_questions(
    tables: Iterable[pa.Table], questions: Sequence[str], split: str
) -> Iterator[pa.Table]:
    """Yields the rows of the listed questions.

    Raises:
        CountMismatchError: The tables have ended and not all questions were in them.
    """
    wanted = pa.array(questions, pa.string())
    was_read = np.zeros(len(questions), bool)
    for table in tables:
        index = pc.index_in(table["question"], value_set=wanted)
        was_read[pc.unique(index.drop_null()).to_numpy()] = True
        yield table.filter(pc.is_valid(index))
    if not was_read.all():
        missing = questions[int(np.argmin(was_read))]
        listed = f"{was_read.sum():,} of the {len(questions):,} questions of {split}"
        problem = f"the release has {listed}; {missing!r} is missing"
        raise CountMismatchError(problem, fix="use the public dev.tsv, and lists of one repository")


def count_release(source: Path) -> Iterator[ReleaseCount]:
    """Counts the questions of each list and the rows of each grade."""
    for split, name in QUESTION_LISTS.items():
        if path := raw_files.find_file(source, [name]):
            num_questions = len(set(_read_lines(path)))
            published = QUESTION_LIST_SIZES[split]
            yield ReleaseCount(split, f"questions in {name}", published, num_questions)
    for split, published_counts in GRADE_COUNTS.items():
        if path := raw_files.find_file(source, FILES[split]):
            counts = np.zeros(5, np.int64)
            rows = raw_files.read_tsv(path, COLUMNS, has_header=False)
            for table in from_release_rows(rows, str(path)):
                counts += np.bincount(table["grade"].to_numpy(), minlength=5)
            for grade, published in enumerate(published_counts, 1):
                yield ReleaseCount(split, f"rows of grade {grade}", published, int(counts[grade]))


def _build_table(question: pa.Array, sentence: pa.Array, grade: pa.Array) -> pa.Table:
    table = pa.table({"question": question, "candidate": sentence, "grade": grade})
    return set_column(table, "label", pc.equal(grade, POSITIVE_GRADE).cast(pa.int8()))


def _read_release(split: str, source: Source, revision: str | None) -> Iterator[pa.Table]:
    if source == HUB:
        hub_split = "train" if split == "train" else "validation"
        return from_hub_rows(raw_files.read_hub(HUB_DATASET, hub_split, revision=revision))
    path = raw_files.require_file(Path(source), FILES[split])
    return from_release_rows(raw_files.read_tsv(path, COLUMNS, has_header=False), str(path))


def _read_question_list(source: Source, split: str) -> list[str]:
    if source == HUB:
        problem = f"the hub has no split {split!r} of ASNQ, only train and dev-all"
        raise CorpusError(problem, fix=f"give a folder with dev.tsv and {QUESTION_LISTS[split]}")
    path = Path(source)
    folder = path.parent if path.is_file() else path
    return _read_lines(raw_files.require_file(folder, [QUESTION_LISTS[split]]))


def _read_lines(path: Path) -> list[str]:
    with raw_files.open_text(path) as lines:
        return [line.rstrip("\r\n") for line in lines if line.strip()]


CORPUS: Final = Corpus(
    name="asnq",
    description="Questions of Google's log; every sentence of a Wikipedia page, graded 1 to 4",
    license="CC BY-NC-SA 3.0 (its README says CC BY-SA 3.0)",
    urls=("https://wqa-public.s3.amazonaws.com/tanda-aaai-2020/data/asnq.tar",),
    files=FILES,
    reader=read_tables,
    options_type=ASNQOptions,
    published_counts=PUBLISHED_COUNTS,
    count_release=count_release,
    hub=HUB_DATASET,
)
