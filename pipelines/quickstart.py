"""Quickstart: transfer and adapt the packaged MiniLM to the Python reference, and ask it.

    python -m pipelines.quickstart                      # prepare, train, evaluate, report
    python -m pipelines.quickstart --question "..."     # ask

The corpus is the language reference that every CPython carries; nothing is downloaded.
"""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from as2ray import checkpoint, packaged
from as2ray.corpora import python_reference
from as2ray.distributed.cluster import connected
from as2ray.distributed.plan import Workers
from as2ray.errors import RecipeError
from as2ray.evaluation import plots
from as2ray.evaluation.measures import evaluate
from as2ray.evaluation.report import markdown, report, save
from as2ray.models.ranker import Ranker
from as2ray.records import Ranked
from as2ray.retrieval.bm25 import BM25, Index
from as2ray.training.config import Training
from as2ray.training.job import Job, Model
from as2ray.training.tracking import read
from pipelines.recipe import Data, described
from pipelines.steps import Plan, evaluated, prepared, table, trained

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
    """Transfers and adapts a small encoder to the Python language reference; answers questions."""

    output: str = "output/quickstart"
    """Folder of the stages."""
    question: str | None = None
    """Ask this instead of training."""
    model: str = packaged.NAME
    """What to start from."""
    max_length: int = 128
    """Most tokens of a pair."""
    transfer: Training = field(
        default_factory=lambda: Training(epochs=1, batch=16, learning_rate=1e-4)
    )
    """Settings of the first step, on questions made out of the reference's own sentences."""
    adapt: Training = field(
        default_factory=lambda: Training(epochs=4, batch=16, learning_rate=5e-5, validate_every=122)
    )
    """Settings of the second, on the written questions."""
    workers: Workers = field(default_factory=Workers)
    """What to take of the machine."""


def run(quickstart: Quickstart) -> None:
    """Prepares, trains, evaluates against keywords, reports, and answers the sample questions."""
    folder = Path(quickstart.output).resolve()
    data = {
        "made": Data(CORPUS, "made"),
        "train": Data(CORPUS, "train", negatives=6),  # of some 40: more epochs in the same time
        "dev": Data(CORPUS, "dev"),
        "test": Data(CORPUS, "test"),
    }
    tables = {split: prepared(folder / "tables" / split, data[split]) for split in data}
    job = Job(
        model=Model(quickstart.model, quickstart.max_length),
        train=(str(tables["made"]),),
        watched={"dev": str(tables["dev"])},
        training=quickstart.transfer,
    )
    transferred = trained(folder / "transferred", Plan(job, tables), quickstart.workers)
    job = replace(job, train=(str(tables["train"]),), training=quickstart.adapt)
    ranker = trained(folder / "ranker", Plan(job, tables, transferred), quickstart.workers)
    _report(folder, tables["test"], ranker)
    loaded, index = checkpoint.load(ranker / "ranker"), _index()
    for question in SAMPLES:
        _show(question, ask(question, loaded, index))
    sys.stdout.write(
        f"\nReport: {folder / 'report.md'}\n"
        "Ask your own:  .venv/bin/python -m pipelines.quickstart "
        f'--output {quickstart.output} --question "How do I ...?"\n'
    )


def _report(folder: Path, test: Path, ranker: Path) -> None:
    """The adapted ranker against BM25, with tests and plots."""
    rows = table(test)
    keywords = evaluate(rows, BM25().scores_within(rows), MEASURES)
    found = evaluated(folder / "run", ranker, {"test": test}, MEASURES, "raw")["test"]
    systems = {"BM25": {0: keywords}, "MiniLM": {0: found}}
    made = report("Python reference, test questions", systems, baseline="BM25")
    save(made, folder / "report.md")
    spreads = {row.system: row.measures for row in made.rows}
    plots.bars(spreads, made.title, "mean over questions", folder / "measures.png")
    lines = read(ranker / "metrics.jsonl")
    loss = {"training": [(x["step"], x["loss"]) for x in lines if "loss" in x]}
    plots.loss_curve(loss, "Adaptation", folder / "loss.png")
    sys.stdout.write(markdown(made) + "\n")


def _index() -> tuple[list[str], Index]:
    texts = [sentence for _, sentence in python_reference.sentences()]
    return texts, BM25().index(texts)


def ask(
    question: str, ranker: Ranker, index: tuple[list[str], Index], candidates: int = 100
) -> list[Ranked]:
    """The best three sentences of the whole reference: found by keywords, ranked by the ranker."""
    texts, keywords = index
    found = [texts[hit.index] for hit in keywords.top(question, candidates)]
    return ranker.rank(question, found, top_k=3)


def _show(question: str, answers: Sequence[Ranked]) -> None:
    sys.stdout.write(f"\n{question}\n")
    for answer in answers:
        sys.stdout.write(f"  {answer.score:.3f}  {answer.text}\n")


def answer(quickstart: Quickstart, question: str) -> None:
    """Prints the best three answers of the adapted ranker to a question."""
    folder = Path(quickstart.output) / "ranker" / "ranker"
    if not folder.is_dir():
        raise RecipeError(
            f"no ranker in {folder}", expected="a finished quickstart", mend="make quickstart"
        )
    _show(question, ask(question, checkpoint.load(folder), _index()))


def main() -> None:
    """The command line."""
    quickstart = described(Quickstart)
    if quickstart.question is not None:
        answer(quickstart, quickstart.question)
    elif quickstart.workers.count == 0:
        run(quickstart)
    else:
        with connected():
            run(quickstart)


if __name__ == "__main__":
    main()
