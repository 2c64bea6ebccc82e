"""HotpotQA: questions whose answers need sentences of two passages; these sentences are marked.

Reads the official JSON, the same as JSON lines, and the schema of the hub's copy.

A passage is a title and sentences. Every sentence is a candidate, positive if it is a supporting
fact. Passages keep their titles and sentences their numbers, so that a prediction can be written in
the terms of the data set. Some facts name a sentence or a passage that is not there, and some
questions have no sentence at all. The table cannot show these; `count_release` counts them, and
`read_gold_questions` keeps them, so that a prediction misses them.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import pyarrow as pa
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from as2ray.corpora.corpus import HUB, Corpus, CorpusOptions, ReleaseCount, Source
from as2ray.corpora.reader_utils import candidate_schema, require_list
from as2ray.tables import raw_files
from as2ray.tables.schema import batched, from_rows

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
"""Counts of samples of the release, by file."""

FULL_COUNTS: Final = {
    "hotpot_train_v1.1.json": {
        "questions": 90_447,
        "questions with two facts, of 1,000": 704,
        "first sentences among the facts, of 1,000": 600,
    },
    "hotpot_dev_distractor_v1.json": {"questions": 7_405},
    "hotpot_dev_fullwiki_v1.json": {"questions": 7_405},
}
"""Counts of the release; the shares are Two-in-One's (section 3)."""

QUESTIONS_PER_TABLE: Final = 1_024

SCHEMA: Final = candidate_schema("passage_id", "title", "sentence_index", "passage_label", "answer")

YES_NO_ANSWERS: Final = ("yes", "no")
"""Answers that no sentence contains."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class HotpotQAOptions(CorpusOptions):
    """Options of HotpotQA."""

    complete_facts_only: bool = False
    """Whether to leave out questions with supporting facts that are not in their passages."""
    passages: Literal["whole", "joined", "single"] = "whole"
    """What a passage is: its sentences (`whole`), one candidate of all its text (`joined`), or each
    sentence a passage of its own (`single`). The last two are what Two-in-One's baselines read."""


class Passage(NamedTuple):
    """A title and its sentences; some sentences may be blank."""

    title: str
    sentences: tuple[str, ...]


class RawQuestion(NamedTuple):
    """A question as it was published."""

    id: str
    text: str
    answer: str
    facts: tuple[tuple[str, int], ...]
    """Title and sentence number of each distinct supporting fact, in order."""
    passages: tuple[Passage, ...]

    def count_missing_facts(self) -> tuple[int, int]:
        """Counts facts on a sentence that its passage lacks, and facts on a missing passage."""
        sentences = {(p.title, k) for p in self.passages for k in range(len(p.sentences))}
        titles = {passage.title for passage in self.passages}
        has_passage = [fact[0] in titles for fact in self.facts if fact not in sentences]
        return has_passage.count(True), has_passage.count(False)


def read_tables(split: str, source: Source, options: HotpotQAOptions) -> Iterator[pa.Table]:
    """Reads the sentences of a split; blank sentences are left out.

    Args:
        split: One of `FILES`.
        source: The folder, one file, or the hub.
        options: Options of the corpus.
    """
    every_question = read_questions(
        split, source, options.complete_facts_only, options.hub_revision
    )
    for questions in batched(every_question, QUESTIONS_PER_TABLE):
        with raw_files.value_errors(f"questions {questions[0].id} to {questions[-1].id}"):
            rows = (_build_rows(question, options.passages) for question in questions)
            table = from_rows(chain.from_iterable(rows), SCHEMA)
        yield table


def read_questions(
    split: str,
    source: Source,
    complete_facts_only: bool = False,
    hub_revision: str | None = None,
) -> Iterator[RawQuestion]:
    """Reads the questions of a split as they were published, without blanks around texts.

    Args:
        split: One of `FILES`.
        source: The folder, one file, or the hub.
        complete_facts_only: See `HotpotQAOptions`.
        hub_revision: See `CorpusOptions`.

    Raises:
        CorpusError: A record lacks a key or has values of other types.
    """
    records: Iterable[Any]
    if source == HUB:
        config, hub_split = HUB_SPLITS[split]
        tables = raw_files.read_hub(HUB_DATASET, hub_split, config, hub_revision)
        records = chain.from_iterable(table.to_pylist() for table in tables)
        source = f"{HUB_DATASET}/{config}/{hub_split}"
    else:
        source = raw_files.require_file(Path(source), FILES[split])
        records = raw_files.read_json_records(source)
    for number, record in enumerate(records):
        record_name = f"{source}, record {number:,}"
        with raw_files.value_errors(record_name):
            question = _parse_question(record, number, record_name)
        if not (complete_facts_only and any(question.count_missing_facts())):
            yield question


def read_gold_questions(
    split: str,
    source: Source,
    complete_facts_only: bool = False,
    hub_revision: str | None = None,
    **options: Any,
) -> dict[str, RawQuestion]:
    """Reads the questions of a split by their ids, for the evaluation of predictions."""
    questions = read_questions(split, source, complete_facts_only, hub_revision)
    return {question.id: question for question in questions}


def count_release(source: Path) -> Iterator[ReleaseCount]:
    """Counts questions, sentences and facts of the samples, and facts outside their passages."""
    for split, names in FILES.items():
        path = raw_files.find_file(source, names)
        if path and (published := {**SAMPLE_COUNTS, **FULL_COUNTS}.get(path.name)):
            questions = list(read_questions(split, path))
            facts = [fact for question in questions for fact in question.facts]
            counts = {
                "questions": len(questions),
                "sentences": sum(len(p.sentences) for q in questions for p in q.passages),
                "facts": len(facts),
                "first sentences among the facts, of 1,000": round(
                    1_000 * sum(index == 0 for _, index in facts) / len(facts)
                ),
                "facts elsewhere": sum(sum(q.count_missing_facts()) for q in questions),
                "questions with two facts, of 1,000": round(
                    1_000 * sum(len(q.facts) == 2 for q in questions) / len(questions)
                ),
            }
            for name, published_count in published.items():
                yield ReleaseCount(split, name, published_count, counts[name])


def _parse_question(record: Any, number: int, source: str) -> RawQuestion:
    keys = ("question", "answer", "supporting_facts", "context")
    text, answer, facts, context = raw_files.require_keys(record, keys, source)
    if not isinstance(answer, str):
        raise TypeError(f"the answer {answer!r} is not text")
    if isinstance(facts, Mapping):  # the hub's columns
        facts = zip(facts["title"], facts["sent_id"], strict=True)
        context = zip(context["title"], context["sentences"], strict=True)
    passages = tuple(
        Passage(title, tuple(sentence.strip() for sentence in require_list(sentences, "sentences")))
        for title, sentences in context
    )
    distinct_facts = dict.fromkeys((str(title), int(index)) for title, index in facts)
    id = str(record.get("_id", record.get("id", f"q{number:06d}")))
    return RawQuestion(id, text.strip(), answer, tuple(distinct_facts), passages)


def _build_rows(question: RawQuestion, passages: str) -> Iterator[tuple[Any, ...]]:
    """Yields the rows of a question in the order of `SCHEMA`."""
    id, answer = question.id, "" if question.answer in YES_NO_ANSWERS else question.answer
    titles = {title for title, _ in question.facts}
    for number, (title, sentences) in enumerate(question.passages):
        is_relevant = int(title in titles)
        texts = {index: text for index, text in enumerate(sentences) if text}
        if passages == "joined":
            texts = {next(iter(texts)): " ".join(texts.values())} if texts else {}
        for index, text in texts.items():
            candidate_id, label = f"{id}-{number}-{index}", int((title, index) in question.facts)
            passage_id, passage_label = f"{id}-{number}", is_relevant
            if passages == "joined":
                label = is_relevant
            elif passages == "single":
                passage_id, passage_label = candidate_id, label
            candidate = (id, question.text, candidate_id, text, label)
            yield (*candidate, passage_id, title, index, passage_label, answer)


CORPUS: Final = Corpus(
    name="hotpotqa",
    description="questions over two Wikipedia passages, with the sentences that support the answer",
    license="CC BY-SA 4.0",
    urls=(
        "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_train_v1.1.json",
        "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json",
        "http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_fullwiki_v1.json",
    ),
    files=FILES,
    reader=read_tables,
    options_type=HotpotQAOptions,
    count_release=count_release,
    hub=HUB_DATASET,
)
