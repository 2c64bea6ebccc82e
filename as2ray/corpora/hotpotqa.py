"""HotpotQA: questions whose answers need sentences of two passages, with these sentences named.

Knows the official JSON, the same as JSON lines, and the schema of the hub's copy. Must not know any
other corpus, nor how a prediction is measured.

A passage is a title and sentences; every sentence is a candidate, labelled where it is a supporting
fact. Passages keep their titles and sentences their numbers, so that a prediction can be told in
the dataset's own terms. What the table cannot show (facts that point past a passage or at none,
questions without any sentence) is counted by `inventory`, and stays in `gold`: there it is missed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from as2ray.corpora.corpus import HUB, Corpus, ReleaseCount, Source
from as2ray.tables import raw_files
from as2ray.tables.schema import CANDIDATE_SCHEMA, OPTIONAL_COLUMNS

HUB_DATASET: Final = "hotpotqa/hotpot_qa"
FILES: Final = {
    "train": ("hotpot_train_v1.1.json", "distractor_train_100.json"),
    "dev": ("hotpot_dev_distractor_v1.json", "distractor_dev_100_hf_schema.json"),
    "fullwiki": ("hotpot_dev_fullwiki_v1.json", "fullwiki_500.jsonl"),
}
HUB_SPLITS: Final = {
    "train": ("distractor", "train"),
    "dev": ("distractor", "validation"),
    "fullwiki": ("fullwiki", "validation"),
}

SAMPLE_COUNTS: Final = {
    "distractor_train_100.json": {"questions": 100, "sentences": 4_139, "facts": 229},
    "distractor_dev_100_hf_schema.json": {"questions": 100, "sentences": 4_118, "facts": 243},
    "fullwiki_500.jsonl.gz": {"questions": 500, "facts": 715 + 485, "facts elsewhere": 485},
}
"""Counts of the samples that are handed round, by file."""

QUESTIONS_PER_TABLE: Final = 1_024
"""Of a table that the reader yields."""

EXTRA_COLUMNS: Final = ("passage_id", "title", "sentence_index", "passage_label", "answer")
"""Beside those of every candidates table."""


YES_NO_ANSWERS: Final = ("yes", "no")
"""Answers that stand in no sentence."""


@dataclass(frozen=True)
class Passage:
    """A title and its sentences; some may be blank."""

    title: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class RawQuestion:
    """One question as it was published."""

    id: str
    text: str
    answer: str
    facts: tuple[tuple[str, int], ...]
    """(title, number of the sentence), without repetitions, in order."""
    passages: tuple[Passage, ...]

    def count_missing_facts(self) -> tuple[int, int]:
        """Facts on sentences that the passage does not have, and on titles that are not there."""
        longest: dict[str, int] = {}
        for passage in self.passages:
            longest[passage.title] = max(longest.get(passage.title, 0), len(passage.sentences))
        past = sum(title in longest and number >= longest[title] for title, number in self.facts)
        return past, sum(title not in longest for title, _ in self.facts)


def read_tables(
    split: str, source: Source, *, complete_facts_only: bool = False
) -> Iterator[pa.Table]:
    """The sentences of a split; blank ones are left out, and what holds no other.

    Args:
        split: Its name.
        source: The release.
        complete: Keep only questions whose supporting facts are all there.
    """
    rows: list[dict[str, Any]] = []
    for number, question in enumerate(read_questions(split, source, complete_facts_only), 1):
        with raw_files.value_errors(f"{source}, question {question.id}"):
            rows += _build_rows(question)
        if number % QUESTIONS_PER_TABLE == 0 and rows:
            yield _build_table(rows)
            rows = []
    if rows:
        yield _build_table(rows)


def read_questions(
    split: str, source: Source, complete_facts_only: bool = False
) -> Iterator[RawQuestion]:
    """The questions of a split as they were published, one after the other.

    Args:
        split: Its name.
        source: The release.
        complete: Only those whose supporting facts are all there.

    Raises:
        CorpusError: A record without what it needs.
    """
    if source == HUB:
        config, name = HUB_SPLITS[split]
        records: Iterable[Any] = (
            row
            for table in raw_files.read_hub(HUB_DATASET, name, config)
            for row in table.to_pylist()
        )
        where = f"{HUB_DATASET}/{config}/{name}"
    else:
        path = raw_files.require_file(Path(source), FILES[split])
        records, where = raw_files.read_json_records(path), str(path)
    for number, record in enumerate(records):
        with raw_files.value_errors(named := f"{where}, record {number:,}"):
            question = _parse_question(record, number, named)
        if not (complete_facts_only and any(question.count_missing_facts())):
            yield question


def read_gold_questions(
    split: str, source: Source, complete_facts_only: bool = False
) -> dict[str, RawQuestion]:
    """The questions of a split by their ids: what a prediction is measured against."""
    return {
        question.id: question for question in read_questions(split, source, complete_facts_only)
    }


def count_release(source: Path) -> Iterator[ReleaseCount]:
    """Questions, sentences and facts of the samples, and how many facts lie elsewhere."""
    for split, names in FILES.items():
        path = raw_files.find_file(source, names)
        if path is None or path.name not in SAMPLE_COUNTS:
            continue
        found = dict.fromkeys(("questions", "sentences", "facts", "facts elsewhere"), 0)
        for question in read_questions(split, path):
            found["questions"] += 1
            found["sentences"] += sum(len(p.sentences) for p in question.passages)
            found["facts"] += len(question.facts)
            found["facts elsewhere"] += sum(question.count_missing_facts())
        for what, published in SAMPLE_COUNTS[path.name].items():
            yield ReleaseCount(split, what, published, found[what])


def _parse_question(record: Any, number: int, source: str) -> RawQuestion:
    text, answer, facts, context = raw_files.require_keys(
        record, ("question", "answer", "supporting_facts", "context"), source
    )
    if isinstance(facts, Mapping):  # the hub's columns
        facts = zip(facts["title"], facts["sent_id"])
        context = zip(context["title"], context["sentences"])
    passages = tuple(Passage(title, tuple(sentences)) for title, sentences in context)
    named = dict.fromkeys((str(title), int(index)) for title, index in facts)
    own = str(record.get("_id", record.get("id", f"q{number:06d}")))
    return RawQuestion(own, text, answer, tuple(named), passages)


def _build_rows(question: RawQuestion) -> Iterator[dict[str, Any]]:
    facts, titles = set(question.facts), {title for title, _ in question.facts}
    for place, passage in enumerate(question.passages):
        for index, text in enumerate(passage.sentences):
            if text.strip():
                yield {
                    "question_id": question.id,
                    "question": question.text.strip(),
                    "candidate_id": f"{question.id}-{place}-{index}",
                    "candidate": text.strip(),
                    "label": int((passage.title, index) in facts),
                    "passage_id": f"{question.id}-{place}",
                    "title": passage.title,
                    "sentence_index": index,
                    "passage_label": int(passage.title in titles),
                    "answer": "" if question.answer in YES_NO_ANSWERS else question.answer,
                }


def _build_table(rows: list[dict[str, Any]]) -> pa.Table:
    schema = pa.schema(
        [*CANDIDATE_SCHEMA, *(OPTIONAL_COLUMNS.field(name) for name in EXTRA_COLUMNS)]
    )
    first, last = rows[0]["question_id"], rows[-1]["question_id"]
    with raw_files.value_errors(f"questions {first} to {last}"):
        return pa.Table.from_pylist(rows, schema=schema)


CORPUS: Final = Corpus(
    name="hotpotqa",
    description="questions over two Wikipedia passages, with the sentences that support the answer",
    license="CC BY-SA 4.0",
    files=FILES,
    reader=read_tables,
    count_release=count_release,
    hub=HUB_DATASET,
)
"""The corpus as the registry holds it."""
