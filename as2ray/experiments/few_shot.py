"""Stages of few-shot training: samples, rankers whose epochs follow from them, and two remedies.

Mokrii et al. train 32 epochs on 32 questions and fewer epochs on more questions, but print neither
the numbers nor the formula; FlexNeuART draws its samples independently. Their few-shot training
made some rankers worse ("a little bit is worse than none"). There are two remedies, each with a
weight a that is chosen on dev; `interpolation_weights` may fix the second one:

    bm25_mixing           s = (1 - a) z(ranker) + a z(BM25), z within each question
    weight_interpolation  w = (1 - a) tuned + a start (Wortsman et al. 2022), encoder and head alike
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import NonNegativeFloat, PositiveInt
from pydantic.dataclasses import dataclass as config_dataclass

from as2ray.corpora.registry import get_corpus
from as2ray.distributed.score import read_scores, score_table
from as2ray.errors import ConfigError
from as2ray.evaluation.measures import evaluate
from as2ray.evaluation.score_mixing import best_bm25_weight, mix_scores
from as2ray.experiments.rankers import (
    RANKER,
    StoredScores,
    TableScores,
    TrainedRanker,
    copy_ranker,
)
from as2ray.experiments.recipe import NON_EMPTY, STRICT, Share
from as2ray.experiments.retrieved import BM25Scores, RetrievedTable
from as2ray.experiments.stage import Outputs, Result, Stage, StageContext
from as2ray.experiments.tables import (
    TABLE,
    PreparedTable,
    filtered_table,
    sample_rows,
    write_table,
)
from as2ray.tables.filters import QuestionFilter
from as2ray.training.job import TrainingJob

log = logging.getLogger(__name__)

Remedy = Literal["bm25_mixing", "weight_interpolation"]
"""A remedy against few-shot training that makes a ranker worse."""

START_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Weights of the start that dev chooses among; each costs a pass over dev."""


@config_dataclass(frozen=True, config=STRICT)
class FewShotEpochs:
    """How the epochs of a run follow from its number of questions."""

    epochs: PositiveInt = 32
    """Epochs on `reference_questions` questions, and the maximum."""
    reference_questions: PositiveInt = 32
    """Number of questions that are trained on for `epochs` epochs."""
    epoch_decay: NonNegativeFloat = 0.5
    """How fast epochs fall: epochs * (reference_questions / questions) ** epoch_decay."""
    min_epochs: PositiveInt = 1
    """Minimum number of epochs."""

    def num_epochs(self, num_questions: float) -> int:
        """Returns the number of epochs on this number of questions."""
        scale = (self.reference_questions / num_questions) ** self.epoch_decay
        return max(self.min_epochs, min(self.epochs, round(float(self.epochs * scale))))


@config_dataclass(frozen=True, config=STRICT)
class FewShotConfig(FewShotEpochs):
    """Numbers of questions, samples and epochs of few-shot training, and its remedies."""

    num_questions: Annotated[tuple[PositiveInt | None, ...], NON_EMPTY] = (32, 128, 512, None)
    """Numbers of labeled questions; `null` stands for all of them."""
    num_samples: PositiveInt = 3
    """Samples of each number of questions, except of all."""
    nested_samples: bool = False
    """Whether a larger sample contains the smaller sample with the same index."""
    remedies: tuple[Remedy, ...] = ("bm25_mixing", "weight_interpolation")
    """Remedies that are applied to every few-shot ranker."""
    interpolation_weights: Annotated[tuple[Share, ...], NON_EMPTY] = START_WEIGHTS
    """Weights of the start that dev chooses among. A single weight is applied whatever dev says, to
    keep abilities that dev does not measure."""
    published_results: dict[str, float] = dataclass_field(default_factory=dict)
    """Results that the paper prints, by system."""

    @property
    def epochs_rule(self) -> FewShotEpochs:
        """The part that changes a run."""
        return FewShotEpochs(
            self.epochs, self.reference_questions, self.epoch_decay, self.min_epochs
        )


@dataclass(frozen=True, eq=False)
class SampledTable(Stage):
    """A sample of a table's questions; see `corpora.sampling`."""

    table: Stage
    num_questions: int
    seed: int
    nested: bool

    def check(self, results: Mapping[Stage, Result]) -> None:
        """Refuses a sample that is larger than the table, as far as its size is known."""
        limit = max_questions(self.table, results)
        if limit is not None and self.num_questions > limit:
            raise ConfigError(
                f"few_shot.num_questions has {self.num_questions:,}, but the target has at most "
                f"{limit:,} labeled questions; null stands for all of them"
            )

    def run(self, context: StageContext) -> Outputs:
        """Draws the sample; refuses one that is larger than the table turned out to be."""
        self.check(context.inputs)
        table = context.path(self.table)
        sample = sample_rows(table, self.num_questions, None, self.seed, self.nested)
        return write_table(sample, context.output)


def max_questions(table: Stage, results: Mapping[Stage, Result]) -> int | None:
    """Returns the most questions that a table can have; None if nothing is known before it runs.

    Args:
        table: Stage of the table.
        results: Stages that are complete.
    """
    if table in results:
        return int(results[table].outputs["counts"]["num_questions"])
    if isinstance(table, RetrievedTable):
        return max_questions(table.bm25_run.table, results)
    if not isinstance(table, PreparedTable) or table.spec.path is not None:
        return None
    spec, corpus = table.spec, get_corpus(table.spec.corpus)
    options = corpus.parse_options(spec.corpus_options)
    published = corpus.published_count(spec.split, spec.question_filter, options)
    limits = [published.num_questions if published else None, spec.num_questions]
    return min((limit for limit in limits if limit is not None), default=None)


@dataclass(frozen=True, eq=False)
class EpochRuleRanker(TrainedRanker):
    """A trained ranker whose epochs follow from the number of questions of its first table."""

    epochs: FewShotEpochs = dataclass_field(default_factory=FewShotEpochs)

    def num_epochs(self, num_questions: float) -> int:
        """Returns the number of epochs on this number of questions."""
        return self.epochs.num_epochs(num_questions)

    def job(self, context: StageContext) -> TrainingJob:
        """Returns the training job with its number of epochs."""
        job, counts = super().job(context), context.outputs(self.train[0])["counts"]
        epochs = self.num_epochs(counts["num_questions"])
        return replace(job, training=replace(job.training, epochs=epochs))

    def run(self, context: StageContext) -> Outputs:
        """Trains, and reports the number of epochs."""
        return {**super().run(context), "epochs": self.job(context).training.epochs}


@dataclass(frozen=True, eq=False)
class FewShotRanker(EpochRuleRanker):
    """Such a ranker of a small sample, which trains in the task of its stage.

    Starting workers takes longer than most of these runs.
    """

    RESOURCES = "device"

    def run(self, context: StageContext) -> Outputs:
        """Trains without workers."""
        return super().run(replace(context, workers=replace(context.workers, num_workers=0)))


@dataclass(frozen=True, eq=False)
class BM25Weight(Stage):
    """The weight of BM25 in a mixture that ranks the dev table best."""

    scores: TableScores
    """Of the ranker, on dev."""
    bm25_scores: BM25Scores
    """On the same rows."""
    measure: str

    def run(self, context: StageContext) -> Outputs:
        """Chooses the weight; the smallest of equals."""
        scores = _load_scores(context, self.scores, self.bm25_scores)
        weight = best_bm25_weight(*scores, self.measure)
        return {"bm25_weight": weight, "content": f"{weight:g}"}


@dataclass(frozen=True, eq=False)
class MixedScores(StoredScores):
    """A ranker's scores mixed with BM25's, standardized within each question."""

    table: Stage
    question_filter: QuestionFilter
    scores: TableScores
    bm25_scores: BM25Scores
    weight: BM25Weight

    def run(self, context: StageContext) -> None:
        """Mixes with the weight that was chosen on dev."""
        weight = context.outputs(self.weight)["bm25_weight"]
        mixed = mix_scores(*_load_scores(context, self.scores, self.bm25_scores), weight)
        pq.write_table(pa.table({"score": mixed}), context.output / TABLE)


def _load_scores(
    context: StageContext, ranker: TableScores, bm25: BM25Scores
) -> tuple[pa.Table, np.ndarray, np.ndarray]:
    """Returns the rows of a table that count, and their scores, each of shape [rows]."""
    rows = filtered_table(context.path(ranker.table), ranker.question_filter)
    first, second = (read_scores(context.path(each))["score"].to_numpy() for each in (ranker, bm25))
    return rows, first, second


@dataclass(frozen=True, eq=False)
class InterpolatedRanker(Stage):
    """A ranker between a trained one and its start, where dev likes it best."""

    RESOURCES = "pool"

    ranker: Stage
    start: Stage
    dev: Stage
    measure: str
    question_filter: QuestionFilter
    start_weights: tuple[float, ...]
    """Weights of the start to try; the smallest of equals is taken."""

    def run(self, context: StageContext) -> Outputs:
        """Scores dev with each weight, and keeps the best ranker."""
        from as2ray.checkpoints.loading import load
        from as2ray.checkpoints.saving import save
        from as2ray.models.weight_interpolation import interpolate_weights

        start = load(context.path(self.start) / RANKER, device="cpu").state_dict()
        dev, workers = context.path(self.dev), context.workers
        rows = filtered_table(dev, self.question_filter)
        quality = {}
        for weight in self.start_weights:
            folder = context.scratch / str(weight)
            ranker, output = folder / RANKER, folder / "scores"
            model = load(context.path(self.ranker) / RANKER, device="cpu")
            interpolate_weights(model, start, weight)
            save(model, ranker)
            context.store.publish(ranker)
            scored = self.question_filter
            score_table(
                dev, ranker, output, workers, "score", context.store, question_filter=scored
            )
            scores = read_scores(output)["score"].to_numpy()
            quality[weight] = evaluate(rows, scores, [self.measure]).measures[self.measure]
        best = max(self.start_weights, key=lambda weight: (quality[weight], -weight))
        log.info("the ranker keeps %.2f of the weights of its start", best)
        copy_ranker(context.scratch / str(best) / RANKER, context.output)
        tuned = context.outputs(self.ranker)
        copied = {name: tuned.get(name) for name in ("shape", "parameters")}
        return {"start_weight": best, "dev": quality, **copied}
