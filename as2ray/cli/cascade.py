"""`as2ray cascade`: makes a cascade of a finished ranker."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
from pydantic import Field, NonNegativeInt, PositiveInt
from rich.console import Console

from as2ray.cli.console import (
    create_console,
    create_console_table,
    explain_missing_scoring,
    load_table,
    parse_drop_ratios,
    parse_numbers,
    read_lines,
    read_text,
)
from as2ray.console.configuration import console_log
from as2ray.errors import ConfigError, CorpusError, EvaluationError
from as2ray.progress import task
from as2ray.tables.schema import CANDIDATE_SCHEMA, MAX_TEXT_CHARS, from_rows, validate_table

if TYPE_CHECKING:
    from as2ray.checkpoints.model_facts import ModelFacts
    from as2ray.models.cascade import CascadeRanker
    from as2ray.models.pointwise import PointwiseRanker
    from as2ray.models.ranker import Ranker

FULL_FOLDER = "full"
"""Folder inside the cascade's with the whole ranker, which transformers loads."""

MAX_GENERATED_QUESTIONS = 1_000
"""Questions that are made of an index for which none are given."""


def cascade(  # noqa: PLR0913 - every argument is a flag
    *,
    model: str,
    output: str,
    table: str | None = None,
    calibration_table: str | None = None,
    columns: dict[str, str] = {},  # noqa: B006
    corpus: str | None = None,
    split: str = "train",
    calibration_split: str | None = "dev",
    data_dir: str | None = None,
    corpus_options: dict[str, Any] = {},  # noqa: B006
    pairs: str | None = None,
    index: str | None = None,
    questions: str | None = None,
    num_candidates: PositiveInt = 100,
    exit_layers: str | None = None,
    drop_ratio: str | None = None,
    max_loss: Annotated[float, Field(gt=0, lt=1)] = 0.02,
    use_labels: bool = False,
    keep_top: PositiveInt | None = None,
    at_least: Annotated[float, Field(gt=0, lt=1)] = 0.99,
    high_confidence: bool = False,
    joint: bool = False,
    joint_epochs: PositiveInt = 3,
    label_weight: Annotated[float, Field(ge=0, le=1)] | None = None,
    use_bm25: bool = True,
    int8: bool = False,
    report: bool = True,
    compare: str | None = None,
    seed: NonNegativeInt = 0,
    quiet: bool = False,
    verbose: bool = False,
    json_log: bool = False,
) -> None:
    """Makes a cascade of a finished ranker, which drops candidates early and bounds what it loses.

    The ranker stays the last exit. Exits on its frozen encoder learn its scores, so the questions
    need no labels. Candidates that score far below the best of their question are dropped. With
    `--joint true` the encoder is trained together with its exits, which become better.

    Args:
        model: Checkpoint folder or hub id of a pointwise ranker.
        output: New folder for the cascade.
        table: Folder of a prepared table, or a file such as those of `as2ray train`.
        calibration_table: Table of other questions, which choose the margins; by default a quarter
            of the questions.
        columns: Names of the tables' columns, such as {"question": "q", "label": "y"}.
        corpus: Name of a corpus instead of a table.
        split: Split of the corpus that trains the exits.
        calibration_split: Split of the corpus that chooses the margins.
        data_dir: Folder of the raw release, or `hub`.
        corpus_options: Options of the corpus.
        pairs: Instead of a table: a file of JSON lines such as {"question": "...", "candidates":
            ["...", "..."]}.
        index: Instead of a table: folder of an index, which finds the candidates of `questions`.
        questions: With an index: a file with one question per line, or `-` for standard input; by
            default questions are made of the headings and words of its documents.
        num_candidates: With an index: maximum number of candidates of a question.
        exit_layers: Layers after which candidates may be dropped, such as 1,2,4; by default all.
        drop_ratio: Drop these shares instead, without a bound: 0.3 for all exits, or 0.3,0.5 for
            each but the last.
        max_loss: Bound on the mean of 1 - 1 / (place that the cascade gives to the ranker's first).
            With `keep_top` it does not count.
        use_labels: Bound the loss of reciprocal rank against the labels instead, and let BM25 have
            a part in the scores of the last exit. Give questions that did not train the ranker.
        keep_top: Bound the probability that one of the ranker's first K candidates is dropped.
        at_least: With `keep_top`: probability that none of them is dropped.
        high_confidence: Let the bound hold with a probability of 90 % over the choice of the
            questions, instead of in expectation.
        joint: Train the encoder and all exits together to give the ranker's scores; the last exit
            is then no longer the ranker itself.
        joint_epochs: Epochs of the joint training.
        label_weight: Weight of the labels in the joint training, from 0 to 1; by default 0.5 where
            there are labels.
        use_bm25: Let candidates whose BM25 is far below the best of their question leave before the
            first layer, as far as the bound allows.
        int8: Fit the ranges of activations, too, with which `--dtype auto` is int8 on CPUs with
            AVX2, AVX512 or AMX.
        report: Measure the cascade on this machine beside the ranker, and write `report.md` and
            `report.png` into the output; it takes about a minute.
        compare: Checkpoint folder or hub id of another ranker, such as a smaller one, that the
            report shows, too.
        seed: Seed of the exits' weights and of the division of the questions.
        quiet: Show warnings, errors and results alone.
        verbose: Show the log of other libraries and of each step, too.
        json_log: Write the log as one JSON object per line.
    """
    from as2ray.checkpoints.cross_encoder import export_cross_encoder
    from as2ray.checkpoints.loading import load
    from as2ray.checkpoints.model_facts import read_model_facts
    from as2ray.checkpoints.saving import check_new_path
    from as2ray.models.pointwise import PointwiseRanker
    from as2ray.training.cascade_config import CascadeConfig
    from as2ray.training.frozen_cascade import check_pointwise, held_out_questions, make_cascade

    check_new_path(output)

    sources = {"table": table, "corpus": corpus, "pairs": pairs, "index": index}
    if sum(source is not None for source in sources.values()) != 1:
        given = ", ".join(f"{name}={source}" for name, source in sources.items())
        raise ConfigError(f"give one of --table, --corpus, --pairs and --index ({given})")
    if questions is not None and index is None:
        raise ConfigError(f"--questions {questions} needs --index, which finds their candidates")
    ratios = parse_drop_ratios(drop_ratio)
    config = CascadeConfig(
        exit_layers=None if exit_layers is None else tuple(parse_numbers(exit_layers, int)),
        drop_ratios=None
        if ratios is None
        else tuple(ratios if isinstance(ratios, list) else [ratios]),
        max_loss=max_loss,
        use_labels=use_labels,
        keep_top=keep_top,
        at_least=at_least,
        high_confidence=high_confidence,
        joint=joint,
        joint_epochs=joint_epochs,
        label_weight=label_weight,
        use_bm25=use_bm25,
        int8=int8,
        seed=seed,
    )
    calibration: pa.Table | None = None
    if pairs is not None:
        rows = read_pairs(Path(pairs))
    elif index is not None:
        rows = _search_index(index, questions, num_candidates, seed)
    else:
        rows = load_table(table, corpus, split, data_dir, corpus_options, columns)
    if calibration_table is not None:
        calibration = load_table(calibration_table, None, "", None, {}, columns)
    elif corpus is not None and calibration_split is not None:
        calibration = load_table(None, corpus, calibration_split, data_dir, corpus_options)
    console = create_console()
    monolith = check_pointwise(load(model))
    facts = read_model_facts(model, monolith)
    for name, value in asdict(facts).items():
        console.print(f"{name}: {value or 'not stated'!r}")
    if facts.warning:
        console.print(f"warning: {facts.warning}")
    smaller = None if compare is None else load(compare)
    with console_log(quiet=quiet, verbose=verbose, json_log=json_log):
        ranker = make_cascade(monolith, rows, output, calibration_table=calibration, config=config)
    console.print(f"exits after layers {', '.join(map(str, ranker.exit_layers))}")
    lines = describe_dropping(ranker)
    console.print("\n".join(lines))
    if (missing_scoring := explain_missing_scoring(model, output)) is not None:
        console.print(missing_scoring)
    if type(monolith) is PointwiseRanker:
        export_cross_encoder(monolith, Path(output) / FULL_FOLDER)
        console.print(f"{output}/{FULL_FOLDER} is the whole ranker for transformers")
    if report:
        held_out = held_out_questions(rows, calibration, config)
        others = {} if smaller is None else {str(compare): smaller}
        with console_log(quiet=quiet, verbose=verbose, json_log=json_log), task("report"):
            write_report(Path(output), monolith, ranker, held_out, facts, lines, others, console)


def describe_dropping(ranker: "CascadeRanker") -> list[str]:
    """Returns what a cascade drops, and the bound on what that loses, in lines."""
    from as2ray.text.bm25 import POINTS_PER_LOGIT

    margins = ranker.margins
    if margins is None or margins.bound is None:
        ratios = ", ".join(f"{ratio:g}" for ratio in ranker.drop_ratios)
        return [f"drop ratios {ratios}" if ratios else "nothing"]
    lines = []
    if ranker.bm25_margin is not None:
        points = ranker.bm25_margin * float(POINTS_PER_LOGIT)
        best = "the best" if margins.top_k == 1 else f"place {margins.top_k}"
        lines = [f"BM25 more than {points:.1f} below {best}: dropped before the first layer"]
    if margins.values:
        values = ", ".join(f"{margin:.2f}" for margin in margins.values)
        lines.append(f"margins {values} (log-odds)")
    if any(ranker.bm25_weights):
        weights = ", ".join(f"{weight:.1f}" for weight in ranker.bm25_weights)
        lines.append(f"weights of BM25 in the exits' log-odds {weights}")
    if lines:
        return [*lines, str(margins.bound)]
    nothing = "no exit can drop candidates within the bound, so nothing is dropped"
    return [nothing, str(margins.bound)]


def write_report(
    folder: Path,
    ranker: "PointwiseRanker",
    cascade: "CascadeRanker",
    table: pa.Table,
    facts: "ModelFacts",
    notes: Sequence[str],
    others: "Mapping[str, Ranker]",
    console: Console,
) -> None:
    """Measures a cascade beside its ranker; writes `report.md` and `report.png`, and prints them.

    Args:
        folder: Folder of the cascade.
        ranker: The ranker that it was made of.
        cascade: The cascade.
        table: Questions that did not train the exits.
        facts: What the ranker is.
        notes: Sentences about what is dropped.
        others: Further rankers to measure.
        console: Where the table is printed.
    """
    from as2ray.evaluation.plots import speed_plot
    from as2ray.profiling.cascade_report import CASCADE, TOP, measure_systems

    int8 = _load_int8(folder, table)
    systems = {**({} if int8 is None else {f"{CASCADE} int8": int8}), **others}
    reports = measure_systems(ranker, cascade, table, systems)
    columns = ("", "pairs/s", "p50 ms", "p95 ms", f"overlap of the first {TOP}")
    lines = [
        (
            each.name,
            f"{each.pairs_per_second:,.0f}",
            f"{each.percentile_ms(50):.1f}",
            f"{each.percentile_ms(95):.1f}",
            f"{each.overlap:.3f}",
        )
        for each in reports
    ]
    shown = create_console_table(*columns)
    for line in lines:
        shown.add_row(*line)
    console.print(shown)
    num_questions = len(reports[0].times_ms)
    title = f"{num_questions} questions, {reports[0].num_pairs:,} pairs, {ranker.dtype_name}"
    threads = f"{ranker.num_threads} threads of {ranker.device.type}"
    points = {
        each.name: (
            each.pairs_per_second,
            each.overlap,
            each.percentile_ms(50),
            each.percentile_ms(95),
        )
        for each in reports
    }
    speed_plot(points, f"{facts.head}: {title}", folder / "report.png")
    rows = [columns, ["---"] * len(columns), *lines]
    parts = [
        f"# Cascade of {facts.head}",
        "\n".join(f"- {name}: {value or 'not stated'!r}" for name, value in asdict(facts).items()),
        *([f"**Warning:** {facts.warning}."] if facts.warning else []),
        f"Exits after layers {', '.join(map(str, cascade.exit_layers))}. "
        f"{' '.join(f'{note[0].upper()}{note[1:]}.' for note in notes)}",
        f"Measured on {title}, {threads}, in turns. Overlap is with transformers' first {TOP}. "
        "Fewer candidates: as many of a question's first ones as take the cascade's time.",
        "\n".join(f"| {' | '.join(row)} |" for row in rows),
        "![Speed, time of a question and overlap](report.png)",
    ]
    (folder / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _load_int8(folder: Path, table: pa.Table) -> "Ranker | None":
    """Returns the cascade in int8, or None where it is not available."""
    from as2ray.checkpoints.loading import load
    from as2ray.models.precision import has_int8
    from as2ray.models.quantization import MIN_PAIRS, fit_activation_ranges

    ranker = load(folder, dtype="fp32")
    is_ready = bool(ranker.activation_ranges)
    if not has_int8() or ranker.device.type != "cpu" or table.num_rows < MIN_PAIRS:
        return None
    if not is_ready:
        fit_activation_ranges(ranker, table)
    ranker.dtype = "int8"
    return ranker


def read_pairs(path: Path) -> pa.Table:
    """Reads questions with their candidates from JSON lines.

    Raises:
        CorpusError: The file cannot be read, or a line is no such record.
    """
    lines = read_text(path).split("\n")
    lists = [_parse_record(path, n, line) for n, line in enumerate(lines, 1) if line.strip()]
    return _create_table(lists, str(path))


def _parse_record(path: Path, line_number: int, line: str) -> tuple[str, list[str]]:
    try:
        record = json.loads(line)
        question, candidates = record["question"], record["candidates"]
        "".join([question, *candidates]).encode()  # refuses what is no text, and half characters
    except (ValueError, KeyError, TypeError, RecursionError):
        candidates = None
    if not isinstance(candidates, list):
        raise CorpusError(
            f"{path}: line {line_number} is {line[:80]!r}, not a record such as "
            '{"question": "...", "candidates": ["...", "..."]}'
        )
    return question, candidates


def _search_index(folder: str, questions: str | None, num_candidates: int, seed: int) -> pa.Table:
    """Returns the candidates that an index finds for questions, or for questions made of it.

    Raises:
        CorpusError: The file of questions cannot be read.
        EvaluationError: No question can be made of the index.
        SentenceIndexError: There is no index, or a damaged one.
    """
    from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
    from as2ray.retrieval.query_generation import generate_queries
    from as2ray.retrieval.sentence_index import SentenceIndex

    index = SentenceIndex.open(folder, load_sentence_encoder)
    if questions is not None:
        source, texts = questions, read_lines(questions)
    else:
        source = f"the questions made of {folder}"
        queries = generate_queries(index, max_questions=MAX_GENERATED_QUESTIONS, seed=seed)
        texts = [query.text for query in queries]
        if not texts:
            raise EvaluationError(
                f"index={folder}: its {len(index):,} sentences have no headings and too few words "
                "to make questions of",
                fix="name a file with one question per line: --questions FILE",
            )
    lists = []
    for text in texts:
        found = index.search_candidates(text, num_candidates)
        candidates = index.texts([candidate.index for candidate in found])
        lists.append((text, [candidate[:MAX_TEXT_CHARS] for candidate in candidates]))
    return _create_table(lists, source)


def _create_table(lists: list[tuple[str, list[str]]], source: str) -> pa.Table:
    rows = [
        (f"q{q}", question, f"q{q}-{c}", candidate, 0)
        for q, (question, candidates) in enumerate(lists)
        for c, candidate in enumerate(candidates)
    ]
    return validate_table(from_rows(rows, CANDIDATE_SCHEMA), source)
