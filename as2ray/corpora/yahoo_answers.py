"""Yahoo! Answers: how-to questions and their answers, of nfL6 or of the release L6.

nfL6 is another selection of the release that Surdeanu et al. (2011) used, on which Mokrii et al.
work; it lacks the asker's longer description, which they append to the question. The release has
it. Of the rules of Surdeanu et al. the manner of the question and four words are kept; that a text
has a noun and a verb is not checked.

The answers of a question are its relevant documents; its other candidates are what BM25 finds among
the answers to all questions. The release has no splits: a hash of the words of a question assigns
them, so that the same words in another order are in the same split
(`leaks.near_duplicate_questions` finds questions that are almost the same).
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple
from xml.etree import ElementTree

import pyarrow as pa
from pydantic import ConfigDict, NonNegativeInt
from pydantic.dataclasses import dataclass

from as2ray.corpora.corpus import Corpus, CorpusOptions, ReleaseCount, Source
from as2ray.corpora.reader_utils import assign_split_by_hash, require_list
from as2ray.errors import CorpusError
from as2ray.tables import raw_files
from as2ray.tables.schema import CANDIDATE_SCHEMA, MAX_TEXT_CHARS, batched, chunked_tables
from as2ray.text.word_overlap import word_set

if TYPE_CHECKING:
    from as2ray.text.bm25 import BM25Index

FILE_NAMES: Final = ("nfL6.json", "nfL6_sample.json")
L6_FILE_NAMES: Final = ("FullOct2007.xml",)
"""The parts of the release, unpacked and joined."""
MANNER: Final = re.compile(r"how (to|do|did|does|can|would|could|should)\b", re.IGNORECASE)
"""Questions that Surdeanu et al. (2011) keep, if they and the best answer have `MIN_WORDS`."""
MIN_WORDS: Final = 4
SPLITS: Final = {"train": 0.9, "dev": 0.95, "test": 1.0}
"""Upper end of each split's share of the hash values."""
L6_PREFIX: Final = "l6-"
FILES: Final = dict.fromkeys(SPLITS, FILE_NAMES) | {
    f"{L6_PREFIX}{split}": L6_FILE_NAMES for split in SPLITS
}
COLLECTIONS: Final = {"answers": FILE_NAMES, "l6-answers": L6_FILE_NAMES}
QUESTIONS_PER_TABLE: Final = 64


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class YahooAnswersOptions(CorpusOptions):
    """Options of Yahoo! Answers."""

    run_depth: NonNegativeInt = 100
    """Number of answers that BM25 finds for a question and that become its candidates; with 0 it
    has its own answers alone."""


class RawQuestion(NamedTuple):
    """A question of the release."""

    id: str
    question: str
    answers: tuple[str, ...]


def read_tables(split: str, source: Source, options: YahooAnswersOptions) -> Iterator[pa.Table]:
    """Reads a split; a question has its own answers first, then those that BM25 finds.

    Args:
        split: One of `FILES`: of `SPLITS` for nfL6, or the same with `l6-` before it.
        source: The folder or one file.
        options: Options of the corpus.
    """
    from as2ray.text.bm25 import BM25  # loads SciPy, which recipes do not need

    path = raw_files.require_file(Path(source), FILES[split])
    read, part = _read_questions, split
    if split.startswith(L6_PREFIX):
        read, part = _read_l6, split.removeprefix(L6_PREFIX)
    with raw_files.value_errors(str(path)):
        questions = list(read(path))
        texts = list(dict.fromkeys(text for question in questions for text in question.answers))
        if not texts:
            raise CorpusError(f"{path}: no question has an answer", fix="use the published file")
        index = BM25().build_index(texts) if options.run_depth else None
        groups = (
            _build_rows(question, texts, index, options.run_depth)
            for question in questions
            if assign_split(question.question) == part
        )
        yield from chunked_tables(groups, CANDIDATE_SCHEMA, QUESTIONS_PER_TABLE)


def assign_split(question: str) -> str:
    """Returns the split of a question by a hash of its distinct words; their order is ignored."""
    return assign_split_by_hash(f"nfL6/{' '.join(sorted(word_set(question)))}", SPLITS)


def _read_questions(path: Path) -> Iterator[RawQuestion]:
    seen: set[str] = set()
    keys = ["id", "question", "nbestanswers"]
    for number, record in enumerate(raw_files.read_json_records(path), 1):
        id, question, texts = raw_files.require_keys(record, keys, f"{path}, question {number:,}")
        texts = [text for text in require_list(texts, "nbestanswers") if text.strip()]
        answers = tuple(dict.fromkeys(text[:MAX_TEXT_CHARS] for text in texts))
        if id in seen or not question.strip() or not answers:
            continue  # the release repeats some questions, and some have no text
        seen.add(id)
        yield RawQuestion(str(id), question[:MAX_TEXT_CHARS], answers)


def _read_l6(path: Path) -> Iterator[RawQuestion]:
    """Reads the manner questions of L6, each with its description, and all of their answers.

    Of questions with the same id it reads the first, as of those of nfL6.
    """
    seen: set[str] = set()
    with raw_files.open_text(path) as file:
        try:
            for _, element in ElementTree.iterparse(file):
                if element.tag != "document":
                    continue
                id, subject, content, best = (
                    _clean(element.findtext(name))
                    for name in ("uri", "subject", "content", "bestanswer")
                )
                others = (_clean(item.text) for item in element.iter("answer_item"))
                answers = tuple(filter(None, dict.fromkeys([best, *others])))
                is_long = min(len(subject.split()), len(best.split())) >= MIN_WORDS
                if MANNER.match(subject) and is_long and id not in seen:
                    seen.add(id)
                    question = f"{subject} {content}".strip()[:MAX_TEXT_CHARS]
                    yield RawQuestion(id, question, answers)
                element.clear()
        except ElementTree.ParseError as error:
            fix = "unpack and join the parts of the release"
            raise CorpusError(f"{path} is not XML: {error}", fix=fix) from error


def _clean(text: str | None) -> str:
    """Returns a text without markup, such as line breaks."""
    return " ".join(re.sub(r"</?[A-Za-z][^<>]*>", " ", text or "").split())[:MAX_TEXT_CHARS]


def _build_rows(
    question: RawQuestion, texts: Sequence[str], index: "BM25Index | None", depth: int
) -> list[tuple[str, str, str, str, int]]:
    hits = [] if index is None else index.search(question.question, depth)
    candidates = dict.fromkeys([*question.answers, *(texts[hit.index] for hit in hits)])
    return [
        (question.id, question.question, f"{question.id}-{k}", text, int(text in question.answers))
        for k, text in enumerate(candidates)
    ]


def read_collection(name: str, source: Path) -> Iterator[pa.Array]:
    """Reads the answers to all questions of nfL6 or L6."""
    path = raw_files.require_file(source, COLLECTIONS[name])
    questions = _read_l6(path) if name == "l6-answers" else _read_questions(path)
    for group in batched(questions, 4_096):
        yield pa.array([text for question in group for text in question.answers], pa.large_string())


def count_release(source: Path) -> Iterator[ReleaseCount]:
    """Counts the questions and answers of the sample."""
    path = raw_files.find_file(source, FILE_NAMES[1:])
    if path and path.name.startswith(FILE_NAMES[1]):
        records = list(raw_files.read_json_records(path))
        yield ReleaseCount("", "questions", 109, len(records))
        yield ReleaseCount("", "answers", 280, sum(len(r["nbestanswers"]) for r in records))


CORPUS: Final = Corpus(
    name="yahoo_answers",
    description="How-to questions of a community; their answers and others that BM25 finds",
    license="Yahoo! Webscope, research only",
    urls=("https://ciir.cs.umass.edu/downloads/nfL6/nfL6.json.gz",),
    homepage="https://webscope.sandbox.yahoo.com/",
    files=FILES,
    reader=read_tables,
    options_type=YahooAnswersOptions,
    count_release=count_release,
    collections=COLLECTIONS,
    collection_reader=read_collection,
)
