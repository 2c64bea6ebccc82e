"""Checkpoints: a folder with `config.json`, `model.safetensors` and a tokenizer, or a hub id.

Knows files and which class reads which checkpoint. Must not know training or Ray.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

from as2ray.loading import uncollected

with uncollected():
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    from as2ray.calibration import Calibration
    from as2ray.errors import As2rayError, CheckpointError, RecipeError
    from as2ray.models.average import Average
    from as2ray.models.cascade import CascadeNetwork, CascadeRanker
    from as2ray.models.encoder import FAMILIES, longest, truncate
    from as2ray.models.ensemble import EnsembleRanker
    from as2ray.models.pointwise import PointwiseRanker
    from as2ray.models.published import quiet, refuse_gaps
    from as2ray.models.ranker import SETTINGS, Precision, Ranker
    from as2ray.models.sequential import SequentialNetwork, SequentialRanker
    from as2ray.models.staged import StagedRanker
    from as2ray.models.two_in_one import TwoInOneNetwork, TwoInOneRanker
    from as2ray.text.tokens import PairTokenizer

RANKERS: dict[str, tuple[Any, type[Ranker]]] = {
    "pointwise": (AutoModelForSequenceClassification, PointwiseRanker),
    "cascade": (CascadeNetwork, CascadeRanker),
    "sequential": (SequentialNetwork, SequentialRanker),
    "two_in_one": (TwoInOneNetwork, TwoInOneRanker),
}
"""What reads the network, and the ranker around it, by the kind that `config.json` names."""

MEMBER = "member-"
"""What the folders of an ensemble's members are called, before their numbers."""


def load(
    path: str | Path,
    *,
    precision: Precision = "auto",
    device: str | torch.device | None = None,
    max_length: int | None = None,
) -> Ranker:
    """A ranker from a checkpoint folder or a hub id, ready to rank.

    Args:
        path: A folder that `save` or transformers wrote, or the id of a hub model.
        precision: Number format of the matrix products; `auto` asks the hardware.
        device: By default the first GPU, or the CPU.
        max_length: Most tokens of a pair; by default what the ranker was trained with, or 128.

    Raises:
        CheckpointError: Not a ranker; weights unknown, missing or of another shape.
    """
    if (found := _of_ensemble(path)) is not None:
        # By number: the tenth's name sorts before the second's.
        folders = [Path(path) / f"{MEMBER}{number}" for number in range(len(found["weights"]))]
        how: dict[str, Any] = {"precision": precision, "device": device, "max_length": max_length}
        ensemble = EnsembleRanker([load(folder, **how) for folder in folders], found["weights"])
        ensemble.calibration = tuple(map(Calibration.of, found["calibration"]))
        ensemble.threshold = found.get("threshold")
        return ensemble.eval()
    ranker, _ = _read(path, max_length=max_length, new_head=False)
    ranker.precision, ranker.fused = precision, True
    ranker.eval()
    return ranker.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def _of_ensemble(path: str | Path) -> dict[str, Any] | None:
    """The settings of an ensemble, whose `config.json` has no network beside them."""
    config = Path(path) / "config.json"
    if not config.is_file():
        return None
    with _typed(path):
        found: dict[str, Any] = json.loads(config.read_text(encoding="utf-8")).get(SETTINGS, {})
        return found if found.get("ranker") == "ensemble" else None


def depth(path: str | Path) -> int:
    """Layers of a checkpoint's encoder; its weights are not read.

    Args:
        path: A folder or a hub id.

    Raises:
        CheckpointError: No encoder or ranker.
    """
    with _typed(path), quiet():
        return int(_config(path).num_hidden_layers)


def start(
    path: str | Path,
    *,
    max_length: int = 128,
    layers: int | None = None,
    exits: Sequence[int] | None = None,
    pooling: str = "mean",
    heads: int = 0,
    average: Average = "probabilities",
    joint: bool = False,
    answers: bool = False,
    seed: int = 0,
) -> Ranker:
    """A ranker to be trained, from a pretrained encoder or from a ranker.

    A pretrained encoder has no classification head, and a classifier of another task one of other
    labels: a head is made from `seed`. Nothing else may be missing from the checkpoint. A cascade
    or a joint model goes on as it is.

    Args:
        path: A folder or a hub id.
        max_length: Most tokens of a pair.
        layers: Keep the first layers only.
        exits: Make a cascade: layers run before each partial classifier, ascending.
        pooling: What a cascade's partial classifiers look at: the `mean` of all token states, or
            the `first`.
        heads: CERBERUS's heads after the last exit: a copy each of the layers above it, and of
            a ranker's classifier; on a pretrained encoder each has a new one.
        average: How the heads become one score: of their `probabilities` or their `logits`.
        joint: Make a joint model of passages and sentences (Two-in-One).
        answers: Let it find short answers in the sentences, too.
        seed: Of the new heads' weights.

    Raises:
        CheckpointError: No encoder or ranker; weights unknown, missing or of another shape.
        RecipeError: What is asked does not go together, or is not what the ranker is.
    """
    torch.manual_seed(seed)
    ranker, new_head = _read(path, max_length=max_length, new_head=True)
    ranker.calibration, ranker.threshold = (), None  # of weights that will change
    _refuse_unfit(ranker, layers, exits, heads, joint, answers)
    if isinstance(ranker, StagedRanker | TwoInOneRanker):
        return ranker
    dress = ranker.tokenizer, ranker.published_tokenizer
    network = ranker.network if layers is None else truncate(ranker.network, layers)
    if joint:
        return _dressed(TwoInOneRanker, TwoInOneNetwork.around(network, answers), *dress)
    if exits is None:
        return _dressed(PointwiseRanker, network, *dress)
    made = CascadeNetwork.around(network, exits, pooling, heads, average, not new_head)
    return _dressed(CascadeRanker, made, *dress)


def _refuse_unfit(
    ranker: Ranker,
    layers: int | None,
    exits: Sequence[int] | None,
    heads: int,
    joint: bool,
    answers: bool,
) -> None:
    """Nothing that is asked of a ranker may be left undone in silence; see `start`."""
    if isinstance(ranker, StagedRanker | TwoInOneRanker):
        held = ranker.settings()
        fine = layers is None and (exits is None or tuple(exits) == ranker.exits)
        fine = fine and heads in (0, held.get("heads", 0)) and answers <= held.get("answers", False)
        fine = fine and joint == isinstance(ranker, TwoInOneRanker)
        expected = "no layers and no other exits, heads or answers: it goes on as it is"
        mend = "start a new one from an encoder or a pointwise ranker"
    else:
        fine = not heads if exits is None else not joint
        fine = fine and joint >= answers
        expected = "heads after exits, answers of a joint model, and that with neither of the two"
        mend = "correct the recipe"
    if not fine:
        raise RecipeError(
            f"layers={layers}, exits={exits}, heads={heads}, joint={joint}, answers={answers} of a "
            f"{type(ranker).__name__} with exits {ranker.exits}",
            expected=expected,
            mend=mend,
        )


def sequential(rankers: Sequence[Ranker]) -> Ranker:
    """Pointwise rankers of one encoder and growing depth as one ranker that drops in between.

    Args:
        rankers: Shallowest first; the tokenizer is the last one's.

    Raises:
        CheckpointError: None at all, one that is not pointwise, or of several encoders.
        RecipeError: Not of growing depth.
    """
    if not rankers or not all(isinstance(ranker, PointwiseRanker) for ranker in rankers):
        raise CheckpointError(
            f"a sequence of {[type(ranker).__name__ for ranker in rankers]}",
            expected="at least one pointwise ranker, and no other kind",
            mend="train pointwise rankers of growing depth",
        )
    network = SequentialNetwork.of([ranker.network for ranker in rankers])
    last = rankers[-1]
    return _dressed(SequentialRanker, network, last.tokenizer, last.published_tokenizer)


def _dressed(kind: Any, network: Any, pairs: PairTokenizer, tokenizer: Any) -> Ranker:
    ranker: Ranker = kind(network, pairs)
    ranker.published_tokenizer = tokenizer
    return ranker


def _read(path: str | Path, *, max_length: int | None, new_head: bool) -> tuple[Ranker, bool]:
    """The ranker, and whether its head is new: if `new_head`, one is made where there is none."""
    with _typed(path), quiet():
        config = _config(path)
        settings = getattr(config, SETTINGS, {})
        kind = settings.get("ranker", "pointwise")
        if kind not in RANKERS:
            raise CheckpointError(
                f"{path}: a ranker of kind {kind!r}",
                expected=f"one of {sorted(RANKERS)}",
                mend="load it with the release of as2ray that wrote it",
            )
        reader, ranks = RANKERS[kind]
        is_classifier = kind != "pointwise" or any(
            "SequenceClassification" in a for a in config.architectures or []
        )
        # A classifier of another task (TANDA's RoBERTa-large comes from MNLI) lends its body.
        new_head = new_head and not (is_classifier and config.num_labels <= 2)
        if new_head or not is_classifier:
            config.num_labels = 2
        network, report = reader.from_pretrained(
            path,
            config=config,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `refuse_gaps` names them
            dtype=torch.float32,
        )
        refuse_gaps(path, report, network, new_head)
        tokenizer = AutoTokenizer.from_pretrained(path)
        _refuse_foreign(path, tokenizer, config.vocab_size)
        definition = tokenizer.backend_tokenizer.to_str()
    pairs = PairTokenizer(definition, **_lengths_to_use(config, settings, max_length))
    ranker = _dressed(ranks, network, pairs, tokenizer)
    ranker.calibration = tuple(map(Calibration.of, settings.get("calibration", [])))
    ranker.threshold = settings.get("threshold")
    return ranker, new_head


def _config(path: str | Path) -> Any:
    config = AutoConfig.from_pretrained(path)
    if config.model_type not in FAMILIES:
        raise CheckpointError(
            f"{path}: a checkpoint of type {config.model_type!r}",
            expected=f"one of {FAMILIES}",
            mend="choose another checkpoint",
        )
    return config


def _refuse_foreign(path: str | Path, tokenizer: Any, embeddings: int) -> None:
    """Refuses a tokenizer that transformers made of nothing, or of more ids than the network's."""
    words = len(tokenizer) - len(set(tokenizer.all_special_ids))
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if words <= 0 or highest >= embeddings:
        raise CheckpointError(
            f"{path}: a tokenizer of {words} words and ids up to {highest}, for {embeddings} "
            "embeddings",
            expected="the files of the tokenizer that the network was trained with",
            mend="copy tokenizer.json and tokenizer_config.json from where the network came from",
        )


def _lengths_to_use(
    config: Any, settings: dict[str, int], max_length: int | None
) -> dict[str, int]:
    """What was asked, else what the ranker was trained with, else 128 or all there is."""
    most = longest(config)
    length = settings.get("max_length", min(128, most)) if max_length is None else max_length
    if length > most:
        raise RecipeError(
            f"max_length={length} for an encoder of {most} positions",
            expected=f"max_length <= {most}",
            mend="lower max_length, or choose an encoder with more positions",
        )
    question = settings.get("max_question", 64)
    if length != settings.get("max_length"):
        question = min(question, length // 2)
    return {"max_length": length, "max_question": question}


@contextmanager
def _typed(path: str | Path) -> Iterator[None]:
    try:
        yield
    except As2rayError:
        raise
    except Exception as error:  # transformers raises many kinds for one cause: not a checkpoint
        raise CheckpointError(
            f"{path}: {type(error).__name__}: {str(error)[:300]}",
            expected="a folder with config.json, model.safetensors and a tokenizer, or a hub id",
            mend="check the path; offline, only local folders and cached hub ids load",
        ) from error


def new_folder(path: str | Path) -> Path:
    """A place where nothing lies yet: asked before the work whose result is to go there.

    Raises:
        CheckpointError: Something lies there, or no folder can.
    """
    folder = Path(path)
    above = next(place for place in folder.absolute().parents if os.path.lexists(place))
    if os.path.lexists(folder) or not above.is_dir():
        raise CheckpointError(
            f"output {path}, where {folder if above.is_dir() else above} lies",
            expected="a new folder: nothing that lies there is overwritten",
            mend="choose another name, or move what lies there away",
        )
    return folder


def save(
    ranker: Ranker, folder: str | Path, weights: dict[str, torch.Tensor] | None = None
) -> Path:
    """Writes a checkpoint, whole or not at all; an older one of the same name is replaced.

    Args:
        ranker: What to write.
        folder: Where to.
        weights: The ranker's weights where they do not lie in it whole (sharded training).

    Raises:
        CheckpointError: A file lies there, or a folder of something else.
    """
    folder, number = Path(folder), uuid4().hex[:8]
    _refuse_other(folder)
    new, old = (folder.with_name(f".{folder.name}-{which}-{number}") for which in ("new", "old"))
    try:
        new.mkdir(parents=True)
        _write(ranker, new, weights)
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
    except BaseException:
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        shutil.rmtree(new, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    return folder


def _refuse_other(folder: Path) -> None:
    """Refuses to replace what is no checkpoint: it would be lost."""
    if folder.is_dir():
        fine = (folder / "config.json").is_file() or not any(folder.iterdir())
    else:
        fine = not os.path.lexists(folder)
    if not fine:
        raise CheckpointError(
            f"a checkpoint for {folder}, where something else lies",
            expected="nothing, an empty folder, or a checkpoint, which is replaced",
            mend="choose another name, or move what lies there away",
        )


def _write(ranker: Ranker, folder: Path, weights: dict[str, torch.Tensor] | None) -> None:
    if isinstance(ranker, EnsembleRanker):
        calibration = [asdict(calibration) for calibration in ranker.calibration]
        told = {
            "ranker": "ensemble",
            "weights": ranker.weights,
            "calibration": calibration,
            "threshold": ranker.threshold,
        }
        (folder / "config.json").write_text(json.dumps({SETTINGS: told}, indent=2))
        for number, member in enumerate(ranker.members):
            (folder / f"{MEMBER}{number}").mkdir()
            _write(member, folder / f"{MEMBER}{number}", None)
        return
    settings = {**ranker.settings(), **_lengths(ranker.tokenizer)}
    settings["calibration"] = [asdict(calibration) for calibration in ranker.calibration]
    settings["threshold"] = ranker.threshold
    setattr(ranker.network.config, SETTINGS, settings)
    if weights is not None:
        weights = {name.removeprefix("network."): tensor for name, tensor in weights.items()}
    with quiet():
        ranker.network.save_pretrained(folder, state_dict=weights)
    if ranker.published_tokenizer is None:
        (folder / "tokenizer.json").write_text(ranker.tokenizer.definition, encoding="utf-8")
    else:
        _with_types(ranker.published_tokenizer, ranker.tokenizer).save_pretrained(folder)


def _with_types(tokenizer: Any, pairs: PairTokenizer) -> Any:
    """The published tokenizer, told to give token types where the ranker reads them.

    Transformers 5 leaves ALBERT's out by default; its scores would then differ from ours.
    """
    names = tokenizer.model_input_names
    read = bool(pairs.encode(["question"], ["candidate"]).token_types.any())
    if read and "token_type_ids" not in names:
        names = [*names, "token_type_ids"]
        tokenizer.model_input_names = tokenizer.init_kwargs["model_input_names"] = names
    return tokenizer


def _lengths(tokenizer: PairTokenizer) -> dict[str, int]:
    return {"max_length": tokenizer.max_length, "max_question": tokenizer.max_question}


def weights_of(ranker: Ranker, folder: str | Path) -> dict[str, torch.Tensor]:
    """The weights of a saved ranker, by the names they have in `ranker`."""
    found = load_file(Path(folder) / "model.safetensors")
    return {f"network.{name}": tensor for name, tensor in found.items()}
