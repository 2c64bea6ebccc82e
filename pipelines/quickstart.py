"""Quickstart: adapts the packaged MiniLM to the Python language reference.

    python -m pipelines.quickstart

The documents are part of every CPython, so nothing is downloaded. The steps are those of
`pipelines.own_documents`: questions made from the documents, BM25's labels, then a few questions
that people wrote and labeled. Other questions of this kind are the test.
"""

import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, PositiveInt
from pydantic.dataclasses import dataclass

from as2ray.checkpoints import packaged
from as2ray.corpora import python_reference
from as2ray.distributed.cluster import ray_session
from as2ray.distributed.workers_config import WorkersConfig
from as2ray.evaluation import plots
from as2ray.evaluation.measures import evaluate
from as2ray.evaluation.report import build_report, save_report, to_markdown
from as2ray.experiments.stage import stage
from as2ray.text.bm25 import BM25
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec
from as2ray.training.tracking import read_metrics
from pipelines import own_documents
from pipelines.own_documents import OwnDocuments
from pipelines.recipe import TableSpec, described
from pipelines.steps import evaluate_ranker, prepare_table, table

log = logging.getLogger(__name__)

CORPUS = "python_reference"
MEASURES = ("AP", "RR", "P@1")
SAMPLES = (
    "How do I make a class usable in a with statement?",
    "What happens when I modify a list while looping over it?",
    "Can I catch several exception types at once?",
)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Quickstart:
    """Adapts a small encoder to the Python language reference and answers questions from it."""

    output: str = "output/quickstart"
    """Folder of the stages."""
    model: ModelSpec = field(
        default_factory=lambda: ModelSpec(packaged.MINILM_NAME, max_length=128)
    )
    """Pretrained model to start from."""
    max_questions: PositiveInt = 1_500
    """Maximum number of questions made from the documents."""
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(epochs=2, global_batch_size=16, learning_rate=1e-4)
    )
    """Hyperparameters of the first run, on BM25's labels."""
    fine_tuning: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(epochs=4, global_batch_size=16, learning_rate=5e-5)
    )
    """Hyperparameters of the second run, on the labeled questions."""
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    """Part of the machine to use."""


def run(quickstart: Quickstart) -> None:
    """Writes the documents, adapts the model, compares it with BM25 and answers questions."""
    folder = Path(quickstart.output).resolve()
    data = {
        # Of some 40 negatives of a question; an epoch samples one.
        "train": TableSpec(CORPUS, "train", max_negatives=6),
        "dev": TableSpec(CORPUS, "dev"),
        "test": TableSpec(CORPUS, "test"),
    }
    tables = {split: prepare_table(folder / "written" / split, data[split]) for split in data}
    own = OwnDocuments(
        documents=str(_documents(folder / "documents")),
        output=str(folder),
        max_questions=quickstart.max_questions,
        labeled_tables={split: str(tables[split]) for split in ("train", "dev")},
        model=quickstart.model,
        training=quickstart.training,
        fine_tuning=quickstart.fine_tuning,
        min_precision=0.3,  # One first answer of three is correct.
        ask=list(SAMPLES),
        workers=quickstart.workers,
    )
    own_documents.run(own)
    _report(folder, tables["test"])
    sys.stdout.write(f"Report: {folder / 'report.md'}\n")


def _documents(folder: Path) -> Path:
    """Makes a stage with the reference as a folder of Markdown files."""
    documents = python_reference.load_documents()

    def make(part: Path) -> Mapping[str, Any]:
        for document in documents:
            path = part / "reference" / f"{re.sub(r'[^a-zA-Z0-9/ .-]', '_', document.id)}.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            title = document.id.partition("/")[2]
            path.write_text("\n\n".join([f"# {title}", *document.sentences]), encoding="utf-8")
        return {"documents": len(documents)}

    stage(folder, {"python": sys.version.split()[0]}, make)
    return folder / "reference"


def _report(folder: Path, test: Path) -> None:
    """Compares the rankers of both runs with BM25."""
    rows = table(test)
    systems = {"BM25": {0: evaluate(rows, BM25().score_candidates(rows), MEASURES)}}
    steps = {"pseudo": "MiniLM, BM25's labels", "adapted": "MiniLM, then written questions"}
    for step, name in steps.items():
        run = folder / "runs" / step
        found = evaluate_ranker(run, folder / step, {"test": test}, MEASURES, "raw")
        systems[name] = {0: found["test"]}
    made = build_report("Python reference, test questions", systems, baseline="BM25")
    save_report(made, folder / "report.md")
    spreads = {row.system: row.measures for row in made.rows}
    plots.bar_chart(spreads, made.title, "mean over questions", folder / "measures.png")
    lines = {step: read_metrics(folder / step / "metrics.jsonl") for step in steps}
    losses = {
        step: [(x["step"], x["loss"]) for x in told if "loss" in x] for step, told in lines.items()
    }
    plots.loss_curve(losses, "Training", folder / "loss.png")
    sys.stdout.write("\n" + to_markdown(made) + "\n")


def main() -> None:
    """Runs the command line."""
    quickstart = described(Quickstart)
    if quickstart.workers.num_workers == 0:
        run(quickstart)
    else:
        with ray_session():
            run(quickstart)


if __name__ == "__main__":
    main()
