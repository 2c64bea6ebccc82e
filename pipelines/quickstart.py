"""Quickstart: the packaged MiniLM learns to answer from the Python reference, as from any folder.

    python -m pipelines.quickstart

The documents are the language reference that every CPython carries, so nothing is downloaded. The
road is that of `pipelines.own_documents`: questions made of the documents, BM25's labels, then the
few questions that people wrote and labelled. Others of those measure what it is worth.
"""

import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from as2ray import packaged
from as2ray.corpora import python_reference
from as2ray.distributed.cluster import connected
from as2ray.distributed.plan import Workers
from as2ray.evaluation import plots
from as2ray.evaluation.measures import evaluate
from as2ray.evaluation.report import markdown, report, save
from as2ray.retrieval.bm25 import BM25
from as2ray.stages import stage
from as2ray.training.config import Training
from as2ray.training.job import Model
from as2ray.training.tracking import read
from pipelines import own_documents
from pipelines.own_documents import OwnDocuments
from pipelines.recipe import Data, described
from pipelines.steps import evaluated, prepared, table

log = logging.getLogger(__name__)

CORPUS = "python_reference"
MEASURES = ("AP", "RR", "P@1")
SAMPLES = (
    "How do I make a class usable in a with statement?",
    "What happens when I modify a list while looping over it?",
    "Can I catch several exception types at once?",
)


@dataclass(frozen=True)
class Quickstart:
    """Adapts a small encoder to the Python language reference and answers questions from it."""

    output: str = "output/quickstart"
    """Folder of the stages."""
    model: Model = field(default_factory=lambda: Model(packaged.NAME, max_length=128))
    """What to start from."""
    most: int = 1_500
    """Questions made of the documents."""
    training: Training = field(
        default_factory=lambda: Training(epochs=2, batch=16, learning_rate=1e-4)
    )
    """Settings of the first step, on BM25's labels."""
    adapt: Training = field(
        default_factory=lambda: Training(epochs=4, batch=16, learning_rate=5e-5)
    )
    """Settings of the second, on the written questions."""
    workers: Workers = field(default_factory=Workers)
    """What to take of the machine."""


def run(quickstart: Quickstart) -> None:
    """Writes the documents, adapts, evaluates against keywords, reports, answers samples."""
    folder = Path(quickstart.output).resolve()
    data = {
        "train": Data(CORPUS, "train", negatives=6),  # of some 40, one of which is drawn an epoch
        "dev": Data(CORPUS, "dev"),
        "test": Data(CORPUS, "test"),
    }
    tables = {split: prepared(folder / "written" / split, data[split]) for split in data}
    own = OwnDocuments(
        documents=str(_documents(folder / "documents")),
        output=str(folder),
        most=quickstart.most,
        annotated={split: str(tables[split]) for split in ("train", "dev")},
        model=quickstart.model,
        training=quickstart.training,
        adapt=quickstart.adapt,
        precision=0.3,  # it is right about the first answer in one question of three
        ask=list(SAMPLES),
        workers=quickstart.workers,
    )
    own_documents.run(own)
    _report(folder, tables["test"])
    sys.stdout.write(f"Report: {folder / 'report.md'}\n")


def _documents(folder: Path) -> Path:
    """A stage with the reference as a folder of Markdown files."""
    documents = python_reference.documents()

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
    """Both steps' rankers against BM25, with tests and plots."""
    rows = table(test)
    systems = {"BM25": {0: evaluate(rows, BM25().scores_within(rows), MEASURES)}}
    steps = {"pseudo": "MiniLM, BM25's labels", "adapted": "MiniLM, then written questions"}
    for step, name in steps.items():
        run = folder / "runs" / step
        found = evaluated(run, folder / step, {"test": test}, MEASURES, "raw")
        systems[name] = {0: found["test"]}
    made = report("Python reference, test questions", systems, baseline="BM25")
    save(made, folder / "report.md")
    spreads = {row.system: row.measures for row in made.rows}
    plots.bars(spreads, made.title, "mean over questions", folder / "measures.png")
    lines = {step: read(folder / step / "metrics.jsonl") for step in steps}
    losses = {
        step: [(x["step"], x["loss"]) for x in told if "loss" in x] for step, told in lines.items()
    }
    plots.loss_curve(losses, "Training", folder / "loss.png")
    sys.stdout.write("\n" + markdown(made) + "\n")


def main() -> None:
    """The command line."""
    quickstart = described(Quickstart)
    if quickstart.workers.count == 0:
        run(quickstart)
    else:
        with connected():
            run(quickstart)


if __name__ == "__main__":
    main()
