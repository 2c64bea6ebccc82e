"""What an experiment takes, known without data or models: sizes, hours and downloads."""

import json
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import yaml

from as2ray.cascade.cost import EncoderShape
from as2ray.cascade.ranker_shape import RankerShape
from as2ray.corpora.asnq import GRADE_COUNTS
from as2ray.corpora.corpus import HUB
from as2ray.corpora.preparation import release_path
from as2ray.corpora.registry import get_corpus
from as2ray.experiments.rankers import TableScores, TrainedRanker
from as2ray.experiments.recipe import TableSpec
from as2ray.experiments.stage import Stage
from as2ray.experiments.tables import PreparedTable
from as2ray.losses import get_loss
from as2ray.losses.exits import ExitLoss, all_exits
from as2ray.losses.two_in_one import TwoInOneLoss
from as2ray.tables.raw_files import find_file

_KNOWN_SIZES = yaml.safe_load(Path(__file__).with_name("known_sizes.yaml").read_text())

ENCODER_SHAPES = {path: EncoderShape(*sizes) for path, sizes in _KNOWN_SIZES["encoders"].items()}
"""Sizes of known encoders by path, so that neither weights nor a model hub are needed."""

MEAN_PAIR_TOKENS = {name: known["pair_tokens"] for name, known in _KNOWN_SIZES["corpora"].items()}
"""Mean tokens of a question with a candidate, by corpus."""
OTHER_PAIR_TOKENS = 50
"""Those of any other corpus."""
PASSAGE_TOKENS = 150
"""Mean tokens of a question with a passage of HotpotQA."""

START_HOURS = 20 / 3_600
"""Duration of the start of training workers, which was measured as 17 to 21 s."""
MIN_PAIRS_PER_DEVICE = 8
"""Minimum number of pairs of a step per device; with fewer, more devices do not help."""
MIN_PAIRS_PER_ACTOR = 1_024
"""Minimum number of pairs that a device scores."""
SCALING_EFFICIENCY = 0.9
"""Share of the sum of their rates that several devices reach."""
RESUME_EVERY_HOURS = 600 / 3_600
"""Time between two checkpoints from which a run can resume."""
IMPROVING_SHARE = 0.1
"""Share of the validations that find a better ranker, whose weights are then written."""
VOCABULARY_SIZE = 50_000
"""Tokens of an encoder; only the size of a checkpoint depends on it."""


@dataclass(frozen=True)
class DeviceRates:
    """Speed of one device. The defaults are those of an NVIDIA H200 with encoders of size 768."""

    train_flops: float = 2.2e14
    """Operations per second in training."""
    score_flops: float = 5.09e14
    """Operations per second in scoring."""
    write_bytes: float = 1e9
    """Bytes of a checkpoint that are copied per second while training waits."""
    layer_launch_s: float = 0.0032
    """Minimum duration of an update for each layer: the CPU starts the operations of a GPU. Updates
    of 64 pairs took 19, 37 and 81 ms with 6, 12 and 24 layers."""


device_rates: dict[int | None, DeviceRates] = {
    None: DeviceRates(),
    **{
        size: DeviceRates(1e12 * train_rate, 1e12 * score_rate)
        for size, (train_rate, score_rate) in _KNOWN_SIZES["teraflops"].items()
    },
}
"""Measured rates by hidden size of the encoder; at None those that are assumed of all others."""


@dataclass(frozen=True)
class Cost:
    """Estimated cost of a stage; None where a size is not known."""

    num_updates: int | None = None
    """Optimizer steps."""
    work_hours: float | None = None
    """Hours of one device that several devices divide among them."""
    max_devices: float = 1.0
    """Number of devices above which more of them do not help."""
    fixed_hours: float = START_HOURS
    """Hours that more devices do not shorten: the start, and writing the best weights."""
    update_hours: float = 0.0
    """Those of `work_hours` that are updates."""
    min_update_hours: float = 0.0
    """Minimum duration of all updates on any number of devices."""

    @property
    def hours(self) -> float | None:
        """Duration on one device."""
        return self.hours_on(1)

    def hours_on(self, num_devices: float) -> float | None:
        """Returns the duration on several devices."""
        if self.work_hours is None:
            return None
        num_used = max(1.0, min(num_devices, self.max_devices))
        efficiency = SCALING_EFFICIENCY if num_used > 1 else 1.0
        speedup = num_used * efficiency
        other_hours = (self.work_hours - self.update_hours) / speedup
        return (
            self.fixed_hours + other_hours + max(self.update_hours / speedup, self.min_update_hours)
        )


class TableSize(NamedTuple):
    """Size of a table before anything is read; NaN where it is not known."""

    num_questions: float
    num_pairs: float
    num_positives: float = 0.0
    mean_tokens: float = 0.0
    """Mean tokens of a pair, or of a question with a passage."""


def table_size(spec: TableSpec, by_passages: bool) -> TableSize:
    """Returns the published size of a table, or what is known of its corpus, after sampling.

    Without counts for its question filter, they are those of all questions. A sample of a split
    whose size is not known has as many questions as it asks for.

    Args:
        spec: The table.
        by_passages: Whether its pairs are a question and a whole passage.

    Raises:
        ConfigError: There is no such corpus, or it has no such option.
    """
    if spec.path is not None:
        return TableSize(math.nan, math.nan)
    corpus, known = get_corpus(spec.corpus), _KNOWN_SIZES["corpora"].get(spec.corpus, {})
    options: Any = corpus.parse_options(spec.corpus_options)
    filters = (spec.question_filter, "raw")
    counts = [corpus.published_count(spec.split, each, options) for each in filters]
    num_questions = known.get("questions", {}).get(spec.split, spec.num_questions or math.nan)
    num_pairs = num_questions * known.get("candidates", math.nan)
    positives = known.get("positives", 1.0)
    if isinstance(positives, Mapping):
        positives = positives.get(spec.split, 1.0)
    num_positives = num_questions * positives
    if published := counts[0] or counts[1]:
        num_questions, num_pairs, num_positives = map(float, astuple(published)[:3])
    elif spec.corpus == "asnq":
        grades = GRADE_COUNTS["train" if spec.split == "train" else "dev-all"]
        num_pairs = sum(grades[grade - 1] for grade in {*options.negative_grades, 4})
        num_pairs /= 2 if spec.split in ("dev", "test") else 1
    elif spec.corpus == "squad":
        per_question = known["candidates_of_scope"][options.candidate_scope]
        num_pairs = num_questions * min(per_question, options.max_candidates or math.inf)
    if getattr(options, "run_depth", None) == 0:
        num_pairs = num_positives  # the relevant candidates alone
    if spec.max_negatives is not None:
        num_pairs = min(num_pairs, num_positives + num_questions * spec.max_negatives)
    if by_passages:
        num_pairs = num_questions * known.get("passages", {}).get(spec.split, math.nan)
    share = min(1.0, (spec.num_questions or math.inf) / num_questions)
    tokens = PASSAGE_TOKENS if by_passages else MEAN_PAIR_TOKENS.get(corpus.name, OTHER_PAIR_TOKENS)
    return TableSize(num_questions * share, num_pairs * share, num_positives * share, tokens)


def table_pairs(spec: TableSpec) -> float | None:
    """Returns the number of pairs of a table; None if it is not known."""
    num_pairs = table_size(spec, by_passages=False).num_pairs
    return None if math.isnan(num_pairs) else num_pairs


def encoder_shape(path: str) -> EncoderShape | None:
    """Returns the sizes of a known encoder, or of one in a local folder; None of any other."""
    if (name := path.partition("@")[0]) in ENCODER_SHAPES:
        return ENCODER_SHAPES[name]
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
        return EncoderShape.from_config(SimpleNamespace(**config))
    except (OSError, ValueError, AttributeError):
        return None


class RankerLayers(NamedTuple):
    """Encoder and layers of a ranker, known before it is trained."""

    encoder: EncoderShape
    """Sizes of the encoder that it was made from."""
    ranker: RankerShape
    max_length: int

    @property
    def passed(self) -> int:
        """Layers that a pair passes, those of all ranking heads included."""
        last = self.ranker.num_layers
        return last + self.ranker.num_ranking_heads * (self.encoder.num_layers - last)

    @property
    def rates(self) -> DeviceRates:
        """Speed of a device with this encoder."""
        return device_rates.get(self.encoder.hidden_size, device_rates[None])

    def flops(self, size: TableSize, num_layers: float) -> float:
        """Returns the operations of a number of layers over all pairs of a table."""
        tokens = np.array([min(size.mean_tokens, self.max_length)])
        return size.num_pairs * num_layers * float(self.encoder.layer_flops(tokens)[0])

    def write_hours(self, bytes_per_weight: float) -> float:
        """Returns the time to write its weights once."""
        encoder = self.encoder
        per_layer = encoder.hidden_size * (4 * encoder.hidden_size + 2 * encoder.intermediate_size)
        # Of the known encoders only ALBERT has small embeddings; its layers share their weights.
        num_stored = self.passed if encoder.embedding_size == encoder.hidden_size else 1
        num_weights = num_stored * per_layer + VOCABULARY_SIZE * encoder.embedding_size
        return bytes_per_weight * num_weights / self.rates.write_bytes / 3_600


def ranker_layers(ranker: Stage) -> list[RankerLayers]:
    """Returns the layers of a ranker, or of each of its members; [] if they are not known."""
    if not isinstance(ranker, TrainedRanker):
        parts = [layers for each in ranker.inputs if (layers := ranker_layers(each))]
        has_members = hasattr(ranker, "members") or hasattr(ranker, "member_scores")
        return list(chain.from_iterable(parts if has_members else parts[:1]))
    root = ranker
    while isinstance(root.init_from, TrainedRanker):
        root = root.init_from
    encoder = None if root.init_from else encoder_shape(root.model.path)
    shape = ranker.shape({}) if encoder else None
    return [RankerLayers(encoder, shape, ranker.model.max_length)] if encoder and shape else []


def _stage_size(table: Stage, by_passages: bool) -> TableSize:
    """Returns the size of a table; one made of another is as large, unless it is a sample.

    A table that BM25 retrieves has `depth` candidates of each question.
    """
    limits, depth = [math.inf], None
    while not isinstance(table, PreparedTable):
        limits.append(getattr(table, "num_questions", math.inf))
        depth = depth or getattr(table, "depth", None)
        if not table.inputs:
            return TableSize(math.nan, math.nan)
        # Of a table that BM25 labels the first input is the index.
        table = getattr(table, "queries", table.inputs[0])
    size = table_size(table.spec, by_passages)
    if depth is not None:
        size = size._replace(num_pairs=size.num_questions * depth)
    share = min(1.0, min(limits) / size.num_questions)
    return size._replace(num_questions=size.num_questions * share, num_pairs=size.num_pairs * share)


def training_cost(stage: TrainedRanker) -> Cost:
    """Estimates a training run with its validations and checkpoints; it does not stop early."""
    training, loss, layers = stage.training, get_loss(stage.loss), ranker_layers(stage)
    by_passages = isinstance(loss, TwoInOneLoss)
    sizes = [_stage_size(table, by_passages) for table in stage.train]
    num_questions = sum(size.num_questions for size in sizes)
    if list_size := getattr(loss, "list_size", None):
        # An example is a list; an epoch has one of each question.
        sizes = [s._replace(num_pairs=min(s.num_pairs, s.num_questions * list_size)) for s in sizes]
    num_pairs = sum(size.num_pairs for size in sizes)
    if math.isnan(num_pairs):
        return Cost()
    num_examples = num_questions if list_size else num_pairs
    batch_size: float = training.global_batch_size
    if training.global_batch_tokens:
        num_tokens = sum(size.num_pairs * size.mean_tokens for size in sizes)
        batch_size = training.global_batch_tokens / (num_tokens / num_examples)
    steps_per_epoch = math.ceil(num_examples / batch_size)
    num_updates = training.max_steps or stage.num_epochs(num_questions) * steps_per_epoch
    num_epochs = num_updates / steps_per_epoch
    if not layers:
        return Cost(num_updates)
    own, rates = layers[0], layers[0].rates
    is_sampled = isinstance(loss, ExitLoss) and loss.sampler is not all_exits
    num_trained = float(np.mean(own.ranker.exit_layers)) if is_sampled else own.passed
    # The backward pass takes twice as long as the forward pass, which checkpointing repeats.
    num_passes = num_epochs * (4 if training.gradient_checkpointing else 3)
    train_s = num_passes * sum(own.flops(size, num_trained) for size in sizes) / rates.train_flops
    num_evals = (
        math.ceil(num_updates / training.eval_steps)
        if training.eval_steps
        else math.ceil(num_epochs)
    )
    dev_sizes = [_stage_size(each, by_passages) for each in stage.evaluated.values()]
    eval_s = num_evals * sum(own.flops(size, own.passed) for size in dev_sizes) / rates.score_flops
    # A state to resume from has the weights and AdamW's two moments, 4 bytes each.
    state_share = own.write_hours(12) / RESUME_EVERY_HOURS
    update_hours = train_s / 3_600
    hours = (train_s + (0.0 if math.isnan(eval_s) else eval_s)) / 3_600 * (1 + state_share)
    min_update_s = num_updates * num_trained * rates.layer_launch_s * num_passes / num_epochs / 3
    fixed_hours = START_HOURS + own.write_hours(4) * max(1, IMPROVING_SHARE * num_evals)
    pairs_per_update = batch_size * num_pairs / num_examples
    max_devices = pairs_per_update / MIN_PAIRS_PER_DEVICE
    min_update_hours = min_update_s / 3_600
    return Cost(num_updates, hours, max_devices, fixed_hours, update_hours, min_update_hours)


def scoring_cost(stage: TableScores) -> Cost:
    """Estimates the scoring of a table by all layers of a ranker; nothing is dropped."""
    size = _stage_size(stage.table, stage.score_kind == "passages")
    layers = ranker_layers(stage.ranker)
    if not layers or math.isnan(size.num_pairs):
        return Cost()
    hours = sum(each.flops(size, each.passed) / each.rates.score_flops for each in layers) / 3_600
    return Cost(None, hours, size.num_pairs / MIN_PAIRS_PER_ACTOR)


def describe_source(spec: TableSpec, data_dir: str | None) -> Mapping[str, Any]:
    """Returns what a table is read from; reads nothing.

    Args:
        spec: The table.
        data_dir: Folder of the raw release, or `hub`; by default its folder in AS2RAY_DATA.

    Returns:
        `corpus`, `license`, `files` (possible names of its file), `source` (a folder, or the id on
        the hub), `is_present` (None for what is on the hub), and `fix`, which says how to get what
        is missing.

    Raises:
        ConfigError: There is no such corpus.
    """
    corpus = get_corpus(spec.corpus)
    source, names = release_path(corpus, data_dir), corpus.files.get(spec.split, ())
    entry: dict[str, Any] = {"corpus": corpus.name, "license": corpus.license, "files": names}
    if source == HUB:
        is_on_hub = corpus.is_on_hub(spec.split)
        command = corpus.fetch_command(spec.split, release_path(corpus, None))
        fix = "" if is_on_hub else f"the hub does not have it; {command}"
        is_present = None if is_on_hub else False
        return {**entry, "source": f"{corpus.hub} on the hub", "is_present": is_present, "fix": fix}
    entry |= {"source": str(Path(source).absolute()), "is_present": True, "fix": ""}
    if names and find_file(Path(source), names) is None:
        fix = f"put {' or '.join(names)} (or with .gz) there, or set --data_dirs.{corpus.name}"
        fix += f"; {corpus.fetch_command(spec.split, source)}"
        entry |= {"is_present": False, "fix": fix}
    return entry
