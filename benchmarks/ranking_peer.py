"""A baseline of `benchmarks.ranking` in its own process: CrossEncoder, or a network in int8.

It runs in an environment without as2ray, which it imports only to measure as2ray's own memory. It
loads a model and texts, ranks the texts once for every line on its standard input, and prints the
seconds. Networks in int8 are made here, by NNCF's post-training quantization for OpenVINO and by
dynamic quantization for ONNX Runtime, and run over pairs that are sorted by length, as CrossEncoder
sorts them.
"""

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

CALIBRATION_PAIRS = 300
"""Pairs of the questions that NNCF fits the ranges of activations on."""

PACKAGES = {
    "torch": (),
    "as2ray": (),
    "onnx": ("optimum", "onnxruntime"),
    "openvino": ("optimum", "openvino"),
    "onnx_int8": ("onnx", "onnxscript", "onnxruntime"),
    "openvino_int8": ("openvino", "nncf"),
}
"""Packages that each backend needs, besides sentence-transformers."""

Network = Callable[[dict[str, Any]], np.ndarray]


def main() -> None:
    """Reads the configuration as one JSON object, then one line for each pass."""
    config = json.loads(sys.stdin.readline())
    backend = config["backend"]
    missing = [name for name in PACKAGES[backend] if not _is_installed(name)]
    if missing:
        write_message({"missing": missing})
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, config["cores"])
    import torch

    torch.set_num_threads(len(config["cores"]))
    load = _load_int8 if backend.endswith("int8") else _load_cross_encoder
    if backend == "as2ray":
        load = _load_as2ray
    predict, tokenize, run = load(config)
    questions = config["questions"]
    question, candidates = questions[0]
    first_pairs = question, candidates[: config["num_pairs"]]
    batch_size, seconds = _choose_batch_size(
        predict, first_pairs, config["batch_sizes"], config["num_passes"]
    )
    batches = [
        tokenize([(question, text) for text in texts[i : i + batch_size]])
        for question, candidates in questions
        for texts in [sorted(candidates, key=len, reverse=True)]
        for i in range(0, len(texts), batch_size)
    ]
    write_message({"ready": True, "batch_size": batch_size, "seconds": seconds})
    for line in sys.stdin:
        started_at = time.perf_counter()
        scores: list[Any] = []
        if line.strip() == "tokens":
            with torch.inference_mode():
                for batch in batches:
                    run(batch)
        else:
            scores = [predict(*question, batch_size) for question in questions]
        message = {"seconds": time.perf_counter() - started_at, "peak_mb": peak_memory_mb()}
        if line.strip() == "scores":
            message["scores"] = np.concatenate(scores).tolist()
        write_message(message)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def peak_memory_mb() -> float:
    """Returns the largest resident memory of this process so far; 0 where Linux does not tell.

    What `getrusage` returns includes the process that started this one.
    """
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def _choose_batch_size(
    predict: Any, question: tuple[str, list[str]], sizes: list[int], num_passes: int
) -> tuple[int, float]:
    """Returns the batch size with which a question takes the least time, and its seconds."""
    text, candidates = question
    predict(text, candidates[:8], 8)  # a library prepares itself in its first call
    seconds = {size: float("inf") for size in sizes}
    for _ in range(num_passes if len(sizes) > 1 else 1):
        for size in sizes:
            started_at = time.perf_counter()
            predict(text, candidates, size)
            seconds[size] = min(seconds[size], time.perf_counter() - started_at)
    return min(seconds.items(), key=lambda entry: entry[1])


def _load_cross_encoder(config: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Returns how a CrossEncoder predicts from texts, tokenizes, and predicts from tokens."""
    import torch
    from sentence_transformers import CrossEncoder

    keywords = dict(config["model_kwargs"])
    if "dtype" in keywords:
        keywords["dtype"] = getattr(torch, keywords["dtype"])
    model = CrossEncoder(
        config["model"],
        max_length=config["max_length"],
        backend=config["backend"],
        model_kwargs=keywords,
        device="cpu",
    )

    def predict(question: str, candidates: list[str], batch_size: int) -> np.ndarray:
        pairs = [(question, text) for text in candidates]
        return np.asarray(model.predict(pairs, batch_size=batch_size, show_progress_bar=False))

    return predict, model.preprocess, lambda batch: model(dict(batch))


def _load_as2ray(config: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Returns the same of as2ray, which chooses its batches itself."""
    from as2ray.checkpoints.loading import load

    ranker = load(config["model"], dtype=config["model_kwargs"]["dtype"], device="cpu")

    def predict(question: str, candidates: list[str], batch_size: int) -> np.ndarray:
        return np.array([ranked.score for ranked in ranker.rank(question, candidates)])

    return predict, list, lambda batch: predict(batch[0][0], [text for _, text in batch], 0)


def _load_int8(config: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Returns the same of a network that is quantized here."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config["model"])
    model = AutoModelForSequenceClassification.from_pretrained(config["model"]).eval()

    def tokenize(pairs: list[tuple[str, str]]) -> dict[str, Any]:
        encoded = tokenizer(
            pairs,
            padding=True,
            truncation=True,
            max_length=config["max_length"],
            return_tensors="np",
        )
        return dict(encoded)

    pairs = [(question, text) for question, texts in config["questions"] for text in texts]
    rows = np.random.default_rng(0).permutation(len(pairs))[:CALIBRATION_PAIRS]
    samples = [tokenize([pairs[row]]) for row in rows]
    make = _make_openvino if config["backend"] == "openvino_int8" else _make_onnx
    example = {name: torch.from_numpy(x) for name, x in tokenize(pairs[:2]).items()}
    run = make(model, example, samples, len(config["cores"]))

    def predict(question: str, candidates: list[str], batch_size: int) -> np.ndarray:
        order = sorted(range(len(candidates)), key=lambda i: -len(candidates[i]))
        scores = np.empty(len(order), np.float32)
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size]
            scores[part] = run(tokenize([(question, candidates[i]) for i in part]))[:, 0]
        return scores

    return predict, tokenize, run


def _adds_in_16_bits() -> bool:
    """Returns whether products of bytes are added in 16 bits on this CPU, where 8 overflow."""
    import torch

    return not (torch.cpu._is_vnni_supported() or torch.cpu._is_amx_tile_supported())


def _make_openvino(
    model: Any, example: dict[str, Any], samples: list[dict[str, Any]], num_threads: int
) -> Network:
    """Returns an OpenVINO network with int8 products, by NNCF's post-training quantization."""
    import nncf
    import openvino

    exported = openvino.convert_model(model, example_input=example)
    quantized = nncf.quantize(
        exported,
        nncf.Dataset(samples),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(samples),
        advanced_parameters=nncf.AdvancedQuantizationParameters(
            overflow_fix="enable" if _adds_in_16_bits() else None
        ),
    )
    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": num_threads}
    compiled = openvino.Core().compile_model(quantized, "CPU", options)
    return lambda batch: np.asarray(compiled(batch)[0])


def _make_onnx(
    model: Any, example: dict[str, Any], samples: list[dict[str, Any]], num_threads: int
) -> Network:
    """Returns an ONNX network with int8 weights and dynamic ranges of activations.

    It is what Optimum's `avx512_vnni` makes: signed weights, unsigned activations.
    """
    import onnxruntime
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic

    axes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with TemporaryDirectory(prefix="as2ray-onnx-") as folder:
        exact, quantized = Path(folder) / "exact.onnx", Path(folder) / "int8.onnx"
        torch.onnx.export(
            model,
            kwargs=example,
            f=exact,
            dynamic_shapes=dict.fromkeys(example, axes),
            external_data=False,
        )
        quantize_dynamic(
            exact, quantized, weight_type=QuantType.QInt8, reduce_range=_adds_in_16_bits()
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads
        session = onnxruntime.InferenceSession(
            quantized, options, providers=["CPUExecutionProvider"]
        )
    return partial(_run_session, session)


def _run_session(session: Any, batch: dict[str, Any]) -> np.ndarray:
    inputs = {entry.name for entry in session.get_inputs()}
    return np.asarray(session.run(None, {k: v for k, v in batch.items() if k in inputs})[0])


def write_message(message: dict[str, Any]) -> None:
    """Prints one line of JSON with a prefix, since libraries print to standard output, too."""
    print("as2ray-peer " + json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
