"""`as2ray quantize`: lets a finished ranker rank in int8."""

from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt

from as2ray.cli.cascade import read_pairs
from as2ray.cli.console import create_console, load_table
from as2ray.errors import ConfigError
from as2ray.models.precision import has_int8


def quantize(
    *,
    model: str,
    output: str | None = None,
    table: str | None = None,
    columns: dict[str, str] = {},  # noqa: B006
    corpus: str | None = None,
    split: str = "train",
    data_dir: str | None = None,
    corpus_options: dict[str, Any] = {},  # noqa: B006
    pairs: str | None = None,
    seed: NonNegativeInt = 0,
) -> None:
    """Lets a ranker rank in int8: fits the ranges of its activations on pairs without labels.

    The ranges are a file beside the weights, which stay in fp32. With them `--dtype auto` is int8
    on CPUs with AVX2, AVX512 or AMX, and as before elsewhere.

    Args:
        model: Checkpoint folder or hub id.
        output: New folder for the ranker and its `answer_scoring.json`; by default the file is
            added to the folder `model`.
        table: Folder of a prepared table, or a file such as those of `as2ray train`.
        columns: Names of the table's columns, such as {"question": "q", "label": "y"}.
        corpus: Name of a corpus instead of a table.
        split: Split of the corpus.
        data_dir: Folder of the raw release, or `hub`.
        corpus_options: Options of the corpus.
        pairs: Instead of a table: a file of JSON lines such as {"question": "...", "candidates":
            ["...", "..."]}.
        seed: Seed of the draw of the pairs.
    """
    from as2ray.checkpoints.activation_ranges import FILE_NAME
    from as2ray.checkpoints.loading import load
    from as2ray.checkpoints.saving import add_activation_ranges, check_new_path, save
    from as2ray.models.encoder.int8 import LAYER_PARTS
    from as2ray.models.quantization import fit_activation_ranges
    from as2ray.retrieval.answer_scoring import AnswerScoring
    from as2ray.tables.atomic import atomic_folder

    if sum(source is not None for source in (table, corpus, pairs)) != 1:
        raise ConfigError(
            f"give one of --table, --corpus and --pairs (table={table}, corpus={corpus}, "
            f"pairs={pairs})"
        )
    if output is not None:
        check_new_path(output)
    elif not Path(model).is_dir():
        fix = "correct the path, or name a new folder for a model of a hub: --output DIR"
        raise ConfigError(f"model={model} is no folder", fix)
    scoring = AnswerScoring.read(model)
    if pairs is not None:
        rows = read_pairs(Path(pairs))
    else:
        rows = load_table(table, corpus, split, data_dir, corpus_options, columns)
    ranker = load(model, dtype="fp32", device="cpu")
    num_pairs = fit_activation_ranges(ranker, rows, seed)
    if output is not None:
        with atomic_folder(output) as folder:
            save(ranker, folder)
            if scoring is not None:
                scoring.write(folder)
    else:
        add_activation_ranges(ranker, model)
    console = create_console()
    console.print(f"{num_pairs} pairs, {Path(output or model) / FILE_NAME}")
    ranges = [x for part in getattr(ranker, "members", [ranker]) for x in part.activation_ranges]
    if num_unquantized := sum(len(x.unquantized_parts) for x in ranges):
        num_parts = sum(len(LAYER_PARTS) * len(x.layers) for x in ranges)
        problem = f"{num_unquantized} of {num_parts} parts of layers are not quantized"
        console.print(f"{problem}: they lose too much")
    ranker.dtype = "auto"
    reason = "" if has_int8() else " (this CPU has none of AVX2, AVX512 and AMX)"
    console.print(f"--dtype auto is {ranker.dtype_name} here{reason}")
