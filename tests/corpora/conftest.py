import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from as2ray.corpora.verification import data_root
from as2ray.tables.raw_files import HUB_COPIES
from as2ray.tables.schema import CANDIDATE_SCHEMA, from_rows

WIKIQA_HEADER = "QuestionID\tQuestion\tDocumentID\tDocumentTitle\tSentenceID\tSentence\tLabel"


@pytest.fixture
def real():
    """The data root, for tests on real releases."""
    root = data_root()
    if not (root / "wikiqa").is_dir():
        pytest.skip(f"no real corpora in {root}; set AS2RAY_DATA to test on them")
    return root


@pytest.fixture
def write(tmp_path):
    """Writes lines or a JSON value to a file of that name below the test's folder."""

    def write(name: str, content: object) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        opener = gzip.open if name.endswith(".gz") else open
        with opener(path, "wt", encoding="utf-8", newline="") as file:
            file.write(text)
        return path

    return write


@pytest.fixture
def write_hub(tmp_path, monkeypatch):
    """Writes rows as a split of a copy of a data set on the hub."""
    monkeypatch.setenv(HUB_COPIES, str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))

    def write_hub(dataset: str, config: str, split: str, rows: list[dict[str, object]]) -> None:
        folder = tmp_path / "hub" / dataset
        (folder / config).mkdir(parents=True)
        name = f"{config}/{split}-00000-of-00001.parquet"
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
        (folder / "README.md").write_text(
            f"---\nconfigs:\n- config_name: {config}\n  data_files:\n"
            f"  - split: {split}\n    path: {name}\n---\n"
        )

    return write_hub


@pytest.fixture
def wikiqa(write, tmp_path):
    """A WikiQA folder with a mixed, an all-negative and an all-positive question in each split."""
    rows = [
        ("Q1", "who said hello?", "D1", "Hello", "D1-0", 'He said "hello.', "0"),
        ("Q1", "who said hello?", "D1", "Hello", "D1-1", '"Adele did" in 2015.', "1"),
        ("Q2", "what is a void?", "D2", "", "D2-0", "Nothing at all.", "0"),
        ("Q3", "where is Rome?", "D3", "Rome", "D3-0", "In Italy.", "1"),
    ]
    body = "\n".join([WIKIQA_HEADER, *("\t".join(r) for r in rows)]) + "\n"
    for split in ("train", "dev", "test"):
        write(f"wikiqa/WikiQA-{split}.tsv", body)
    return tmp_path / "wikiqa"


@pytest.fixture
def squad(write, tmp_path):
    """A SQuAD folder: one article of three paragraphs, three questions."""
    first = "Ann founded Oxbridge. It opened in 1209. Bo left Oxbridge."
    second = "Students wore gowns. They met Ann. Annual dues rose."
    third = "Nobody came."

    def asked(id: str, question: str, context: str, text: str) -> dict[str, object]:
        return {
            "id": id,
            "question": question,
            "answers": [{"answer_start": context.index(text), "text": text}],
        }

    paragraphs = [
        {
            "context": first,
            "qas": [
                asked("a", "Who founded Oxbridge?", first, "Ann"),
                asked("b", "What happened at the start?", first, "Oxbridge. It opened"),
            ],
        },
        {"context": second, "qas": [asked("c", "What did students wear?", second, "gowns")]},
        {"context": third, "qas": []},
    ]
    value = {"version": "1.1", "data": [{"title": "Oxbridge", "paragraphs": paragraphs}]}
    write("squad/dev-v1.1.json", value)
    return tmp_path / "squad"


@pytest.fixture
def table():
    """Makes a candidates table from the labels of each question."""

    def table(*labels: list[int]) -> pa.Table:
        rows = (
            (f"q{i}", f"question {i}?", f"q{i}-{k}", f"sentence {k} of {i}.", label)
            for i, question_labels in enumerate(labels)
            for k, label in enumerate(question_labels)
        )
        return from_rows(rows, CANDIDATE_SCHEMA)

    return table
