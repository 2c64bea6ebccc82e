"""Compares the parts of an answer's score, and their sum, on WikiQA, TREC-QA and SQuAD.

    python -m pipelines.answer_scores --output DIR

Zero-shot, encoder and ranker are trained on another corpus, and the weights are the default ones.
Adapted, both are also trained on the corpus itself, and its dev part fits the weights.
"""

import logging
from collections.abc import Mapping
from dataclasses import field, replace
from itertools import chain
from typing import Any, Literal, get_args

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from as2ray.checkpoints import packaged
from as2ray.errors import ConfigError, lookup
from as2ray.evaluation.report import build_report, save_report, to_markdown, to_summary
from as2ray.experiments.bm25 import BM25Grid
from as2ray.experiments.command import Pipeline
from as2ray.experiments.encoders import (
    AdaptedEncoder,
    CombinedScores,
    SimilarityScores,
    TableScoring,
)
from as2ray.experiments.experiment import Experiment, Finished
from as2ray.experiments.rankers import (
    StoredScores,
    TableEvaluation,
    TableScores,
    TrainedRanker,
    absolute_model_path,
)
from as2ray.experiments.recipe import TableSpec, check_names
from as2ray.experiments.retrieved import BM25Scores
from as2ray.experiments.stage import Stage
from as2ray.experiments.tables import prepared_table
from as2ray.progress import result
from as2ray.retrieval.answer_scoring import AnswerScoring
from as2ray.text.bm25 import BM25
from as2ray.training.config import TrainingConfig
from as2ray.training.job import ModelSpec

log = logging.getLogger(__name__)

MEASURES = ("AP", "RR", "P@1")
BASELINE = "cosine (untrained)"
_SIZE: dict[str, Any] = {"num_questions": 800, "max_negatives": 9}
_SQUAD: dict[str, Any] = {"corpus": "squad", "corpus_options": {"max_candidates": 20}}
Part = Literal["train", "dev", "test"]
CorpusTables = dict[Part, TableSpec]

TABLES: dict[str, CorpusTables] = {
    "wikiqa": {
        "train": TableSpec("wikiqa", "train", "no_all_negative", **_SIZE),
        "dev": TableSpec("wikiqa", "dev", "clean"),
        "test": TableSpec("wikiqa", "test", "clean"),
    },
    "trecqa": {
        "train": TableSpec("trecqa", "train-all", "clean", **_SIZE),
        "dev": TableSpec("trecqa", "dev", "clean"),
        "test": TableSpec("trecqa", "test", "clean"),
    },
    "squad": {
        "train": TableSpec(split="train", **_SQUAD, **_SIZE),
        "dev": TableSpec(split="train", **_SQUAD, num_questions=150, seed=1),
        "test": TableSpec(split="dev", **_SQUAD, num_questions=300),
    },
}
"""Tables of each corpus, of a size that two cores manage in a quarter of an hour."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class AnswerScores:
    """Compares BM25, similarities, rankers and their sums."""

    model: ModelSpec = field(
        default_factory=lambda: ModelSpec(packaged.MINILM_NAME, max_length=128)
    )
    """Pretrained model of the rankers."""
    encoder: str = packaged.MINILM_NAME
    """Sentence encoder."""
    tables: dict[str, CorpusTables] = field(default_factory=lambda: TABLES)
    """Tables of each corpus, beside those of WikiQA, TREC-QA and SQuAD."""
    sources: dict[str, str] = field(
        default_factory=lambda: {"wikiqa": "squad", "trecqa": "squad", "squad": "wikiqa"}
    )
    """Corpus whose labels zero-shot systems learn from, by the corpus that they are tested on. Only
    the corpora that are named here are compared."""
    encoder_training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(epochs=1, global_batch_size=32, learning_rate=5e-5)
    )
    """Hyperparameters of the encoders."""
    training: TrainingConfig = field(
        default_factory=lambda: TrainingConfig(epochs=2, global_batch_size=16, learning_rate=5e-5)
    )
    """Hyperparameters of the rankers."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("sources has no corpus", fix="name at least one: {wikiqa: squad}")
        check_names("corpus", self.sources)
        for corpus in chain.from_iterable(self.sources.items()):
            parts = lookup(TABLES | self.tables, corpus, "corpus of sources")
            if missing := [part for part in get_args(Part) if part not in parts]:
                raise ConfigError(f"the tables of {corpus!r} lack {missing}")


def build(recipe: AnswerScores, data_dirs: Mapping[str, str]) -> Experiment:
    """Returns the graph: tables, encoders and rankers, and the evaluations of all systems."""
    experiment = Experiment()
    tables = {
        corpus: {
            "dev": (dev := prepared_table(specs["dev"], data_dirs)),
            "test": (test := prepared_table(specs["test"], data_dirs)),
            "train": prepared_table(specs["train"], data_dirs, without=(dev, test)),
        }
        for corpus, specs in (TABLES | recipe.tables).items()
        if corpus in {*recipe.sources, *recipe.sources.values()}
    }
    path = absolute_model_path(recipe.encoder)
    model = replace(recipe.model, path=absolute_model_path(recipe.model.path))
    for corpus, source_corpus in recipe.sources.items():
        target, source = tables[corpus], tables[source_corpus]
        encoder = AdaptedEncoder(path, (source["train"],), source["dev"], recipe.encoder_training)
        ranker = TrainedRanker(
            model, (source["train"],), source["dev"], recipe.training, "margin_ranking"
        )
        adapted = replace(encoder, train=(source["train"], target["train"]), dev=target["dev"])
        adapted_ranker = replace(
            ranker, train=(target["train"],), dev=target["dev"], init_from=ranker
        )
        bm25 = BM25Grid(target["dev"], ((BM25.k1, BM25.b),))
        scores: dict[str, StoredScores] = {
            "BM25": BM25Scores(target["test"], bm25),
            BASELINE: SimilarityScores(target["test"], path),
        }
        for kind, models in (
            ("zero-shot", (encoder, ranker)),
            ("adapted", (adapted, adapted_ranker)),
        ):
            scores |= _add_systems(experiment, corpus, target, kind, *models)
        for system, stored in scores.items():
            evaluation = TableEvaluation(stored, MEASURES)
            experiment.compare(corpus, system, recipe.training.seed, evaluation)
    return experiment


def _add_systems(
    experiment: Experiment,
    corpus: str,
    tables: Mapping[str, Stage],
    kind: str,
    encoder: Stage,
    ranker: Stage,
) -> dict[str, StoredScores]:
    """Adds what combines the parts; returns the scores of all systems by name."""
    dev, test = tables["dev"], tables["test"]
    similarity, dev_similarity = SimilarityScores(test, encoder), SimilarityScores(dev, encoder)
    logits, dev_logits = TableScores(ranker, test), TableScores(ranker, dev)
    hybrid = TableScoring(dev, dev_similarity, is_labeled=kind == "adapted")
    fused = experiment.add(f"scoring/{corpus}/{kind}", replace(hybrid, ranker=dev_logits))
    return {
        f"cosine, {kind}": similarity,
        f"hybrid, {kind}": CombinedScores(test, hybrid, similarity),
        f"ranker, {kind}": logits,
        f"fused, {kind}": CombinedScores(test, fused, similarity, logits),
    }


def report(recipe: AnswerScores, finished: Finished) -> None:
    """Prints the results of each corpus, with paired tests, and the fitted sums."""
    for corpus, systems in finished.evaluations().items():
        if BASELINE not in systems:
            continue
        comparison = build_report(f"{corpus}, test questions", systems, baseline=BASELINE)
        path, lines = finished.output / f"{corpus}.md", list[str]()
        save_report(comparison, path)
        for kind in ("zero-shot", "adapted"):
            for stage in finished.named(f"scoring/{corpus}/{kind}").values():
                scoring = AnswerScoring.read(finished.path(stage))
                lines += [f"fused, {kind}: {scoring.describe()}\n"] if scoring else []
        full, summary = (
            "\n".join([text, *lines])
            for text in (to_markdown(comparison), to_summary(comparison, path))
        )
        log.info("%s", summary, extra=result(full))


PIPELINE = Pipeline(AnswerScores, build, report)

if __name__ == "__main__":
    PIPELINE.command()
