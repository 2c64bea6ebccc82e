"""ASNQ (Garg, Vu and Moschitti 2020): Natural Questions turned into sentence candidates.

Knows the release's three tab columns, its copy on the hub, and the question lists that cut its
dev split in two. Must not know any other corpus. 23 million rows: everything here is a stream.

The numbers of the Cascade Transformer and of CERBERUS rest on other candidates (23,662,238
train pairs) for the same questions; no public file holds those.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from as2ray.corpora.corpus import HUB, Corpus, PublishedCounts, ReleaseCount, Source
from as2ray.corpora.page_grades import POSITIVE_GRADE
from as2ray.corpora.reader_utils import assign_question_ids, group_on_disk, parse_labels, set_column
from as2ray.errors import CorpusError, CountMismatchError
from as2ray.tables import raw_files
from as2ray.tables.schema import TableCounts

HUB_DATASET: Final = "AmazonScience/asnq"
COLUMNS: Final = ["question", "sentence", "label"]

FILES: Final = {
    "train": ("train.tsv",),
    "dev-all": ("dev.tsv",),
    "dev": ("dev.tsv",),
    "test": ("dev.tsv",),
}
"""dev-all is the public dev split (TANDA); dev and test are its halves (Cascade, CERBERUS)."""

QUESTION_LISTS: Final = {"train": "unique.train", "dev": "unique.dev", "test": "unique.test"}
"""The question lists of the Cascade Transformer's repository, one question a line."""

QUESTION_LIST_SIZES: Final = {"train": 57_242, "dev": 1_336, "test": 1_336}

GRADE_COUNTS: Final = {
    "train": (19_446_120, 428_122, 442_140, 61_186),
    "dev-all": (870_404, 25_814, 29_558, 4_286),
}
"""Rows of grade 1 to 4 (TANDA, Table 1)."""

NEGATIVE_GRADES: Final = (1, 2, 3)

PUBLISHED_COUNTS: Final = (
    PublishedCounts(
        "train", "raw", TableCounts(57_242, 20_377_568, 61_186), {"negatives": NEGATIVE_GRADES}
    ),
    PublishedCounts(
        "dev-all", "raw", TableCounts(2_672, 930_062, 4_286), {"negatives": NEGATIVE_GRADES}
    ),
)


def read_tables(
    split: str,
    source: Source,
    *,
    negatives: Sequence[int] = NEGATIVE_GRADES,
    ungrouped: bool = False,
) -> Iterator[pa.Table]:
    """Candidates with their grade; ids do not depend on `negatives`.

    Grades: 1 neither in the long answer nor with the short answer's words, 2 outside with them,
    3 inside without, 4 inside with the short answer. Only 4 is positive.

    Args:
        split: One of `FILES`.
        source: The folder (the question lists in it, for dev and test), one file, or the hub.
        negatives: The grades kept as negatives (TANDA, Table 6).
        scattered: Whether rows of a question stand apart and are first gathered on disk.
    """
    kept = check_negatives(negatives)
    rows = _read_release(split, source)
    # Numbered before anything is left out: a question keeps its id in dev-all, dev and test.
    tables = assign_question_ids(group_on_disk(rows) if ungrouped else rows)
    if split in ("dev", "test"):
        tables = select_questions(tables, _read_question_list(source, split), split)
    for table in tables:
        yield table.filter(pc.is_in(table["grade"], value_set=kept))


def check_negatives(negatives: Sequence[int]) -> pa.Array:
    """The grades to keep: those given and the positive one.

    Raises:
        CorpusError: Something else than a choice of 1, 2, 3.
    """
    if not negatives or not set(negatives) <= set(NEGATIVE_GRADES):
        raise CorpusError(
            f"negatives {list(negatives)}; expected one or more of the grades 1, 2, 3",
            fix="(3,) is the sentences of the long answer alone, (1, 2, 3) is all",
        )
    return pa.array([*sorted(set(negatives)), POSITIVE_GRADE], pa.int8())


def from_rows(tables: Iterable[pa.Table], source: str) -> Iterator[pa.Table]:
    """Tables without ids from tables with the columns question, sentence, label 1-4."""
    meaning = {str(grade): grade for grade in (*NEGATIVE_GRADES, POSITIVE_GRADE)}
    for table in tables:
        yield _build_table(
            table["question"], table["sentence"], parse_labels(table, "label", meaning, source)
        )


def from_hub_rows(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same from the columns of the hub's copy, whose two flags give the grade."""
    for table in tables:
        inside = table["sentence_in_long_answer"].cast(pa.int8())
        short = table["short_answer_in_sentence"].cast(pa.int8())
        grade = pc.add(pc.add(pc.multiply(inside, pa.scalar(2, pa.int8())), short), 1)
        yield _build_table(table["question"], table["sentence"], grade.cast(pa.int8()))


def select_questions(
    tables: Iterable[pa.Table], questions: Sequence[str], split: str
) -> Iterator[pa.Table]:
    """The rows of the listed questions.

    Raises:
        CountMismatchError: At the end, if not all of them came.
    """
    wanted = pa.array(questions, pa.string())
    found = np.zeros(len(questions), bool)
    for table in tables:
        place = pc.index_in(table["question"], value_set=wanted)
        found[pc.unique(place.drop_null()).to_numpy()] = True
        yield table.filter(pc.is_valid(place))
    if not found.all():
        missing = questions[int(np.argmin(found))]
        raise CountMismatchError(
            f"{found.sum():,} of the {len(questions):,} questions of {split}, without {missing!r}"
            "; expected all of them",
            fix="give the dev.tsv of the public ASNQ release and the lists of one repository",
        )


def count_release(source: Path) -> Iterator[ReleaseCount]:
    """The sizes of the question lists, and the rows of each grade."""
    for split, name in QUESTION_LISTS.items():
        if path := raw_files.find_file(source, [name]):
            yield ReleaseCount(
                split,
                f"questions in {name}",
                QUESTION_LIST_SIZES[split],
                len(set(_read_lines(path))),
            )
    for split, published in GRADE_COUNTS.items():
        if path := raw_files.find_file(source, FILES[split]):
            found = np.zeros(5, np.int64)
            for table in from_rows(raw_files.read_tsv(path, COLUMNS, has_header=False), str(path)):
                found += np.bincount(table["grade"].to_numpy(), minlength=5)
            for grade, rows in enumerate(published, 1):
                yield ReleaseCount(split, f"rows of grade {grade}", rows, int(found[grade]))


def _build_table(question: pa.Array, sentence: pa.Array, grade: pa.Array) -> pa.Table:
    table = pa.table({"question": question, "candidate": sentence, "grade": grade})
    return set_column(table, "label", pc.equal(grade, POSITIVE_GRADE).cast(pa.int8()))


def _read_release(split: str, source: Source) -> Iterator[pa.Table]:
    if source == HUB:
        name = "train" if split == "train" else "validation"
        return from_hub_rows(raw_files.read_hub(HUB_DATASET, name))
    path = raw_files.require_file(Path(source), FILES[split])
    return from_rows(raw_files.read_tsv(path, COLUMNS, has_header=False), str(path))


def _read_question_list(source: Source, split: str) -> list[str]:
    if source == HUB:
        raise CorpusError(
            f"split {split!r} from the hub, which has train and dev-all"
            f"; expected a folder with dev.tsv and {QUESTION_LISTS[split]}",
            fix="read dev-all, or give the folder",
        )
    folder = Path(source)
    return _read_lines(
        raw_files.require_file(
            folder.parent if folder.is_file() else folder, [QUESTION_LISTS[split]]
        )
    )


def _read_lines(path: Path) -> list[str]:
    with raw_files.open_text(path) as lines:
        return [line.rstrip("\r\n") for line in lines if line.strip()]


CORPUS: Final = Corpus(
    name="asnq",
    description="Questions of Google's log; every sentence of a Wikipedia page, graded 1 to 4",
    license="CC BY-NC-SA 3.0 (its README says CC BY-SA 3.0)",
    files=FILES,
    reader=read_tables,
    published_counts=PUBLISHED_COUNTS,
    count_release=count_release,
    hub=HUB_DATASET,
)
"""The corpus as the registry holds it."""
