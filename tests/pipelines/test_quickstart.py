"""The quickstart, end to end with a tiny encoder."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from as2ray.cli.main import main
from as2ray.console.configuration import console_log
from as2ray.corpora import python_reference
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.experiments.executor import SequentialBackend, run_graph
from as2ray.experiments.indexes import INDEX
from as2ray.experiments.store import Store
from as2ray.retrieval.sentence_index import SentenceIndex
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec
from pipelines import quickstart
from pipelines.quickstart import PIPELINE, Quickstart

TINY = TrainingConfig(epochs=1, global_batch_size=256, learning_rate=1e-3, precision="fp32")


def test_index_holds_the_sentences_of_the_corpus_with_the_names_in_them(tmp_path):
    stage = quickstart.ReferenceIndex(sys.version.split()[0])
    store = Store(str(tmp_path))
    graph = run_graph([stage], store, SequentialBackend(store, WorkersConfig(num_workers=0)))
    index = SentenceIndex.open(store.fetch(graph.results[stage]) / INDEX)
    indexed = [index.sentence(number) for number in range(len(index))]
    documents = sorted(
        python_reference.load_documents(), key=lambda document: Path(f"{document.id}.html")
    )
    assert [(s.document_id, s.heading, s.text) for s in indexed] == [
        (f"{document.id}.html", heading, " ".join(text.split()))
        for document in documents
        for heading, text in zip(document.headings, document.sentences)
    ]
    assert "Basic customization: object.__del__(self)" in {s.heading for s in indexed}
    assert sum(bool(re.search(r"\b__\w+__\b", s.text)) for s in indexed) >= 50
    assert "Calls" in {s.title for s in indexed}


@pytest.mark.slow
def test_quickstart_trains_reports_answers_and_can_be_asked(
    checkpoint, sentence_encoder, tmp_path, capsys
):
    asked = Quickstart(
        model=ModelSpec(str(checkpoint("bert", None)), max_length=48),
        encoder=sentence_encoder,
        max_questions=100,
        max_negatives=9,
        score_each_run=True,
        encoder_training=TINY,
        training=TINY,
        fine_tuning=TINY,
    )
    with console_log(log_file=tmp_path / "console.log"):
        PIPELINE.run(asked, tmp_path / "out", WorkersConfig(num_workers=0))
    out, err = capsys.readouterr()
    assert len(f"{out}{err}".splitlines()) <= 60
    assert " short stages: complete (" in err
    listed = [line.split(" | ")[0] for line in out.splitlines() if line.startswith("| ")]
    assert listed[2:] == ["| BM25", "| cosine (untrained) (baseline)", "| combined, stage zero"]
    report = (tmp_path / "out" / "report.md").read_text()
    assert all(f"| {system}" in report for system in quickstart.SYSTEMS.values())
    assert "### Whole index" in report
    log = (tmp_path / "console.log").read_text()
    assert "adapted: started" in log
    assert report in log
    assert re.search(r"Subject: .* of the test questions and .* of 100 on other subjects", report)
    assert all(question in out for question in quickstart.SAMPLES)
    for name in ("report.md", "report.json", "measures.png", "loss.png"):
        assert (tmp_path / "out" / name).stat().st_size > 0
    [line] = [line for line in out.splitlines() if "as2ray ask" in line]
    ask = shlex.split(line.replace("...", "What is a generator?"))[1:]
    # So small a ranker knows no answer: all that was retrieved is looked at.
    main([*ask, "--score_threshold", "0", "--top_k", "100"])
    assert "generator" in capsys.readouterr().out
