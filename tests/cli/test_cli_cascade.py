"""`as2ray cascade`, as a user calls it."""

import json
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa
import pytest
import tiny
import torch
import transformers
from pyarrow import csv

from as2ray.checkpoints.activation_ranges import FILE_NAME
from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.cli.cascade import _search_index, describe_dropping
from as2ray.cli.main import main
from as2ray.distributed.score import ChunkScorer
from as2ray.retrieval.answer_scoring import AnswerScoring
from as2ray.retrieval.index_writer import IndexConfig, write_index
from as2ray.tables.schema import MAX_TEXT_CHARS, question_offsets

TABLE = tiny.with_distinct_questions(tiny.candidates(60, each=6))
BOUND = ["--max_loss", "0.2"]


@pytest.fixture
def call(checkpoint, tmp_path, capsys):
    """Returns what the command prints."""

    def run(*flags, model=None):
        model = str(model or checkpoint())
        flags = flags if "--report" in flags else [*flags, "--report", "false"]
        main(["cascade", "--model", model, "--output", str(tmp_path / "made"), *map(str, flags)])
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(call, capsys, tmp_path):
    """Returns the error text of a call that writes nothing."""

    def run(*flags, **options):
        with pytest.raises(SystemExit) as stopped:
            call(*flags, **options)
        assert stopped.value.code == 2
        assert not (tmp_path / "made").exists()
        return capsys.readouterr().err

    return run


@pytest.fixture
def table(tmp_path):
    return tiny.write_corpus(tmp_path / "table", TABLE)


def lists():
    starts = [*question_offsets(TABLE["question_id"]), TABLE.num_rows]
    texts = TABLE["candidate"].to_pylist()
    for start, end in pairwise(starts):
        yield TABLE["question"][int(start)].as_py(), texts[start:end]


def test_fitted_scoring_of_answers_is_left_out_and_that_is_said(call, checkpoint, table, tmp_path):
    model = shutil.copytree(checkpoint(), tmp_path / "model")
    AnswerScoring({"bm25": 1.0}).write(model)
    shown = " ".join(call("--table", table, *BOUND, model=model).split())
    assert "made has no answer_scoring.json: that of" in shown
    assert AnswerScoring.read(tmp_path / "made") is None


def test_table_gives_a_cascade_with_a_bound_that_other_commands_take(call, table, tmp_path, capsys):
    shown = call("--table", table, *BOUND)
    assert "exits after layers" in shown
    assert "is at most 0.2 in expectation; over 15 questions" in shown
    made = load(tmp_path / "made", device="cpu")
    assert made.margins.bound.num_questions == 15
    main(["evaluate", "--model", str(tmp_path / "made"), "--table", str(table)])
    main(["cost", "--model", str(tmp_path / "made"), "--table", str(table), "--num_repeats", "1"])
    costs = capsys.readouterr().out
    assert "operations over 360 pairs" in costs
    assert str(made.margins.bound) in " ".join(costs.split())
    made.bm25_margin = 0.25
    save(made, tmp_path / "bm25")
    main(["info", "--model", str(tmp_path / "bm25")])
    told = " ".join(capsys.readouterr().out.split())
    assert "drops BM25 more than 2.5 below the best: dropped before the first layer" in told
    made.margins = replace(made.margins, top_k=2)
    made.bm25_margin = 0.25  # margins that are set remove it
    assert describe_dropping(made)[0].startswith("BM25 more than 2.5 below place 2: dropped")
    main(
        [
            "cost",
            "--model",
            str(tmp_path / "bm25"),
            "--table",
            str(table),
            "--scores",
            str(tmp_path / "s"),
        ]
    )
    assert "left at 0" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_report_names_the_model_and_measures_it_beside_what_one_would_do_otherwise(
    call, checkpoint, table, tmp_path, family, monkeypatch
):
    monkeypatch.setattr("as2ray.profiling.cascade_report.TOP", 2)  # of six candidates
    sizes = {"max_position_embeddings": 600, "initializer_range": 0.2}
    model = shutil.copytree(checkpoint(family, 1, **sizes), tmp_path / "model")
    (model / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n")
    other = ["--compare", checkpoint("bert")]
    shown = call("--table", table, *BOUND, "--report", "true", *other, model=model)
    assert f"family: '{family}'" in shown
    assert "warning: license cc-by-nc-4.0: not for commercial use" in shown
    pooling = {"bert": "first token", "modernbert": "mean of all tokens", "qwen3": "last token"}
    made, report = tmp_path / "made", (tmp_path / "made" / "report.md").read_text()
    for part in (f"pooling: '{pooling[family]}'", "activation: 'sigmoid'", "**Warning:**"):
        assert part in report
    names = ["transformers, padded", "packed", "cascade", str(other[1]), "packed, fewer candidates"]
    rows = [line.split(" | ") for line in report.splitlines() if line.startswith("| ")]
    systems = [row[0].removeprefix("| ") for row in rows[2:]]
    assert [name for name in systems if name != "cascade int8"] == names
    overlaps = {name: float(row[-1].rstrip(" |")) for name, row in zip(systems, rows[2:])}
    assert overlaps["transformers, padded"] == 1.0
    assert overlaps["packed"] > 0.8
    assert overlaps[str(other[1])] < 0.8
    assert (made / "report.png").stat().st_size > 10_000
    ranker = load(model, device="cpu", dtype="fp32")
    whole = load(made / "full", device="cpu", dtype="fp32")
    pair = ["What is kovarin?"], ["Kovarin ne kovarin."]
    assert whole.predict_exits(*pair) == pytest.approx(ranker.predict_exits(*pair), abs=1e-6)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(made / "full")
    assert type(theirs) is type(ranker.network)


def test_license_that_allows_commercial_use_gives_no_warning(call, table, checkpoint, tmp_path):
    model = shutil.copytree(checkpoint(), tmp_path / "model")
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    shown = call("--table", table, *BOUND, model=model)
    assert "license: 'apache-2.0'" in shown
    assert "warning" not in shown


def test_cost_replays_stored_scores_and_explains_a_question(call, table, tmp_path, capsys):
    call("--table", table, "--exit_layers", "1,2,3", *BOUND)
    model, scores = tmp_path / "made", tmp_path / "scores"
    ranker = load(model, device="cpu")
    num_margins = len(ranker.margins.values)
    flags = ["--table", table, "--scores", scores]
    given = ["--margins", ",".join(["0.1"] * num_margins), "--drop_ratio", "0.5"]
    given += ["--budget_ms", "1", "--layer_us", "8"]

    def cost(*more) -> str:
        main(["cost", *map(str, [*flags, *more])])
        return capsys.readouterr().out

    shown = cost("--model", model, *given, "--question_id", TABLE["question_id"][0].as_py())
    summary = {line.split("  ")[0]: line for line in shown.splitlines()[1:5]}
    named = ["nothing dropped", "margins 0.10", "ratio 0.5", "1 ms, 8 us a layer"]
    assert [name.split(", 0.1")[0] for name in summary] == named
    last = ranker.exit_layers[-1]
    assert f"left at {last}" in shown.splitlines()[0]
    assert "100.0%" in summary["nothing dropped"]
    assert str(ranker.margins.bound) in " ".join(shown.split())
    # The candidates of the question stand once for each way, with where they left.
    assert shown.count("left after layer") == 3
    positive = TABLE["candidate"].to_pylist()[TABLE["label"].to_pylist().index(1)]
    assert shown.count(f"* {positive}") == 3
    # What is stored needs no model.
    again = cost("--drop_ratio", "0.5").splitlines()
    assert summary["ratio 0.5"].split() == again[2].split()
    # BM25 belongs to the model's margins: drop ratios leave it out, as in ranking.
    settings = json.loads((model / "config.json").read_text())
    each, plain = ",".join(["0.5"] * num_margins), len(ranker.exit_layers)
    ratio_row = cost("--drop_ratio", each).splitlines()[2].split()
    for bm25_margin in (0.04, None):
        more = {"bm25_margin": bm25_margin, "bm25_weights": [40.0] * num_margins}
        written = {**settings, "as2ray": {**settings["as2ray"], **more}}
        (model / "config.json").write_text(json.dumps(written))
        rows = cost("--model", model, "--drop_ratio", each, *given[-4:]).splitlines()
        with_bm25 = bm25_margin is not None
        assert ("left at 0" in rows[0]) == with_bm25
        assert rows[2].startswith("BM25 0.4, margins" if with_bm25 else "margins")
        assert rows[3].split() == ratio_row
        assert rows[4].count("%") == plain + with_bm25 + 1  # where they left, and the operations
        # With time enough, a budget drops what the margins drop.
        *_, by_margins, within = cost("--model", model, "--budget_ms", "1e6").splitlines()[:4]
        assert within.split("layer")[1].split() == by_margins.split()[-plain - with_bm25 - 3 :]
    with pytest.raises(SystemExit):
        cost("--drop_ratio", "0.5", "--question_id", "nobody")
    assert "'nobody' is not in the table" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cost("--exit_layers", "9")
    assert "must be some of the stored exits" in capsys.readouterr().err
    flags[-1] = tmp_path / "nowhere"
    with pytest.raises(SystemExit):
        cost()
    assert "does not exist" in capsys.readouterr().err
    flags[:] = ["--table", tiny.write_corpus(tmp_path / "half", TABLE[:60]), "--scores", scores]
    with pytest.raises(SystemExit):
        cost()
    assert "has the scores of another table" in capsys.readouterr().err


def test_cost_replays_the_drop_ratios_and_the_rounding_of_the_model(call, table, tmp_path, capsys):
    call("--table", table, "--exit_layers", "1,2,3", "--drop_ratio", "0.6")
    path = tmp_path / "made" / "config.json"
    settings = json.loads(path.read_text())
    settings["as2ray"]["rounding"] = "nearest"
    path.write_text(json.dumps(settings))

    def cost(*more) -> list[str]:
        scored = ["--table", table, "--scores", tmp_path / "scores"]
        main(["cost", *map(str, [*scored, *more])])
        return capsys.readouterr().out.splitlines()

    def split(row) -> list[str]:
        return re.split("  +", row.strip())

    _, _, by_ratio, within = cost("--model", tmp_path / "made", "--budget_ms", "1e6")
    named, *numbers = split(by_ratio)
    assert named == "ratio 0.6, 0.6"
    assert numbers == split(cost("--drop_ratio", "0.6", "--rounding", "nearest")[2])[1:]
    assert numbers != split(cost("--drop_ratio", "0.6")[2])[1:]
    assert split(within)[1:] == numbers


@pytest.fixture
def cascade(checkpoint, tmp_path):
    made = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=[1, 2, 3])
    return save(made, tmp_path / "cascade")


@pytest.fixture
def cost(cascade, table, tmp_path, capsys):
    """Returns what the replay of a cascade's scores prints, or its error."""

    def run(model=cascade, table=table):
        named = [] if model is None else ["--model", model]
        flags = ["--table", table, "--scores", tmp_path / "scores", "--drop_ratio", "0.5"]
        with suppress(SystemExit):
            main(["cost", *map(str, [*named, *flags])])
        shown = capsys.readouterr()
        return shown.err or shown.out

    return run


def test_ranker_without_several_exits_is_refused_before_it_scores(cost, checkpoint, tmp_path):
    one_exit = init_ranker(checkpoint(), max_length=60, exit_layers=[3])
    for model in (checkpoint(), save(one_exit, tmp_path / "one")):
        assert "drops no candidates" in cost(model)
    assert not (tmp_path / "scores").exists()
    (tmp_path / "one/model.safetensors").unlink()  # Its exits are counted without the weights.
    assert "has 1 exits, and drops no candidates" in cost(tmp_path / "one")


def test_scores_of_another_table_or_model_are_refused(cost, cascade, tmp_path):
    shown = cost()
    assert "nothing dropped" in shown
    ranker = load(cascade, device="cpu")
    ranker.drop_ratios = 0.25  # changes no score
    assert cost(save(ranker, tmp_path / "ratios")) == shown
    with torch.no_grad():
        next(ranker.network.parameters()).add_(1.0)
    assert "scores of another model" in cost(save(ranker, tmp_path / "other"))
    turned = tiny.write_corpus(tmp_path / "turned", pa.concat_tables([TABLE[6:], TABLE[:6]]))
    for model in (cascade, None):
        assert "scores of another table" in cost(model, turned)
    labels = pa.array([1 - label for label in TABLE["label"].to_pylist()], pa.int8())
    corrected = TABLE.set_column(TABLE.column_names.index("label"), "label", labels)
    assert "nothing dropped" in cost(table=tiny.write_corpus(tmp_path / "labels", corrected))
    (tmp_path / "scores" / "inputs.json").unlink()
    assert "has no inputs.json" in cost()


def test_scoring_that_was_interrupted_goes_on(cost, tmp_path, monkeypatch):
    chunks = []

    def score(self, number, *rows):
        if chunks:
            raise KeyboardInterrupt
        chunks.append(number)
        return scored(self, number, *rows)

    scored = ChunkScorer.score
    monkeypatch.setattr(ChunkScorer, "score", score)
    assert cost() == "interrupted\n"
    monkeypatch.undo()
    assert len(list((tmp_path / "scores").glob("*.parquet"))) == 1
    assert "of 360 rows: scoring was interrupted" in cost(None)
    assert "nothing dropped" in cost()
    assert "nothing dropped" in cost(None)


def test_scores_of_a_stage_are_counted_alone(cost, tmp_path):
    shown = cost()
    (tmp_path / "scores" / "inputs.json").rename(tmp_path / "scores" / "manifest.json")
    assert cost(None) == shown
    half = tiny.write_corpus(tmp_path / "half", TABLE[:60])
    assert "has 360 rows and the table 60" in cost(None, half)


def test_table_of_a_user_serves_as_in_train(call, refused, tmp_path):
    columns = {"q": "question", "text": "candidate", "y": "label"}
    path = tmp_path / "mine.csv"
    csv.write_csv(pa.table({new: TABLE[old] for new, old in columns.items()}), path)
    names = ["--columns", json.dumps({old: new for new, old in columns.items()})]
    assert "'q', 'text', 'y'" in refused("--table", path, *BOUND)
    assert "over 15 questions" in call("--table", path, *names, *BOUND)


def test_pairs_without_labels_serve_too(call, tmp_path):
    path = tmp_path / "pairs.jsonl"
    records = [json.dumps({"question": q, "candidates": c}) for q, c in lists()]
    path.write_text("\n".join([*records[:30], "", *records[30:]]) + "\n", encoding="utf-8-sig")
    assert "over 15 questions" in call("--pairs", path, *BOUND)


def test_questions_of_a_calibration_table_choose_the_margins_of_pairs_too(call, refused, tmp_path):
    path = tmp_path / "pairs.jsonl"
    records = [json.dumps({"question": q, "candidates": c}) for q, c in lists()]
    path.write_text("\n".join(records))
    others = tiny.with_distinct_questions(tiny.candidates(9, seed=5))
    others = tiny.write_corpus(tmp_path / "others", others)
    assert "over 9 questions" in call("--pairs", path, "--calibration_table", others, *BOUND)
    shutil.rmtree(tmp_path / "made")
    error = refused("--pairs", path, "--questions", path, *BOUND)
    assert f"--questions {path} needs --index" in error


def test_index_finds_the_candidates_of_questions(call, refused, tmp_path):
    (tmp_path / "documents").mkdir()
    text = " ".join(TABLE["candidate"].to_pylist())
    long = f"{TABLE['question'][0]} data:{'A' * MAX_TEXT_CHARS}"  # such as an image's address
    (tmp_path / "documents/a.txt").write_text(f"{text}\n\n{long}", encoding="utf-8")
    write_index(str(tmp_path / "documents"), str(tmp_path / "index"), IndexConfig(encoder=None))
    asked = ["--index", tmp_path / "index", "--num_candidates", 5, *BOUND]
    path = tmp_path / "questions.txt"
    path.write_text("\n".join(question for question, _ in lists()), encoding="utf-8-sig")
    assert "over 15 questions" in call(*asked, "--questions", path)
    rows = _search_index(str(tmp_path / "index"), str(path), 5, seed=0)
    assert rows["question"][0].as_py() == next(lists())[0]  # without the byte order mark
    assert long[:MAX_TEXT_CHARS] in rows["candidate"].to_pylist()


def test_index_without_questions_makes_them_of_its_documents(call, refused, tmp_path):
    (tmp_path / "documents").mkdir()
    path = tmp_path / "documents/a.txt"
    path.write_text(" ".join(TABLE["candidate"].to_pylist()), encoding="utf-8")
    index, config = tmp_path / "index", IndexConfig(encoder=None)
    write_index(str(tmp_path / "documents"), str(index), config)
    flags = ["--index", index, "--num_candidates", 5, "--drop_ratio", "0.5"]
    assert "drop ratios 0.5" in call(*flags)
    shutil.rmtree(tmp_path / "made")
    path.write_text("Muri ba.", encoding="utf-8")
    write_index(str(tmp_path / "documents"), str(tmp_path / "small"), config)
    assert "no headings and too few words" in refused("--index", tmp_path / "small", *flags[2:])


def test_joint_training_is_said_beside_the_bound(call, table, tmp_path):
    flags = ["--table", table, "--joint", "true", "--joint_epochs", "1", *BOUND]
    shown = " ".join(call(*flags).split())
    assert "place of the last exit's first" in shown
    assert "with nothing dropped, 1 - 1 / (place of the ranker's first) was" in shown
    made = load(tmp_path / "made", device="cpu")
    assert 0 <= made.margins.bound.last_exit_loss < 1


def test_drop_ratios_need_no_bound(call, table, tmp_path):
    shown = call("--table", table, "--exit_layers", "1,3", "--drop_ratio", "0.5")
    assert "exits after layers 1, 3 drop ratios 0.5" in " ".join(shown.split())
    assert load(tmp_path / "made", device="cpu").margins is None


def test_bad_input_is_refused_with_the_number_that_would_do(refused, table, tmp_path, checkpoint):
    assert "give one of --table" in refused()
    assert "give one of --table" in refused("--table", table, "--pairs", "x")
    error = refused("--table", table)
    assert "needs 49 questions" in error
    assert "a bound (`max_loss`, or 1 - `at_least`) of at least 0.0625" in error
    assert "needs 114 questions" in refused("--table", table, "--high_confidence", "true")
    assert "needs 99 questions" in refused("--table", table, "--keep_top", "1")
    assert "max_loss" in refused("--table", table, "--max_loss", "0")
    assert "'some' is not a list" in refused("--table", table, "--exit_layers", "some")
    assert "[4, 9] are not" in refused("--table", table, "--exit_layers", "4,9", *BOUND)
    path = tmp_path / "pairs.jsonl"
    for line in (
        '{"question": "Why?"}',
        '["Why?"]',
        '{"question": "Why?", "candidates": "So."}',
        '{"question": "Why?", "candidates": ["So.", 1]}',
        '{"question": "Why?", "candidates": ["\\ud83d"]}',
        "x",
        "9" * 5_000,
        "[" * 100_000,
    ):
        path.write_text('{"question": "Why?", "candidates": ["So.", "No."]}\n' + line)
        assert "line 2 is" in refused("--pairs", path)
    path.write_text('{"question": "Why?", "candidates": ["So."]}')
    assert "none of the 1 questions has two or more candidates" in refused("--pairs", path)
    assert "UTF-8 text" in refused("--pairs", tmp_path / "nowhere")
    no_ranker = checkpoint("bert", None)
    error = refused("--table", table, *BOUND, model=no_ranker)
    assert "a pretrained encoder must be trained first" in error
    assert "Traceback" not in error


def test_int8_stores_the_ranges_of_activations(call, table, tmp_path):
    call("--table", table, *BOUND, "--int8", "true")
    assert (tmp_path / "made" / FILE_NAME).is_file()
    assert len(load(tmp_path / "made", device="cpu").activation_ranges) == 1
