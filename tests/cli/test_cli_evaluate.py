"""`as2ray evaluate` and `as2ray calibrate`, as a user calls them."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from refusals import refused

from as2ray.cascade.margins import Margins
from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.cli.main import main
from as2ray.experiments.tables import read_table
from as2ray.models.ranker import Ranker
from as2ray.retrieval.answer_scoring import AnswerScoring
from as2ray.retrieval.index_writer import IndexConfig, write_index
from as2ray.retrieval.sentence_index import MIN_SIMILARITY
from as2ray.tables.trec import write_run


def test_evaluate_of_a_constant_scorer_is_far_below_one(prepared, capsys):
    main(["evaluate", "--model", "constant", "--table", str(prepared), "--baseline", "bm25"])
    out = capsys.readouterr().out
    value = float(next(line for line in out.splitlines() if line.startswith("AP")).split()[1])
    assert value == pytest.approx(0.2)  # one positive of five, ranked last


def test_evaluate_compares_what_needs_no_training(prepared, capsys):
    main(["evaluate", "--model", "hybrid", "--table", str(prepared), "--baseline", "similarity"])
    out = capsys.readouterr().out
    assert "p (randomization)" in out
    assert sum(line.startswith("AP ") for line in out.splitlines()) == 2
    with pytest.raises(SystemExit):
        main(["evaluate", "--model", "hybrid", "--table", str(prepared), "--drop_ratio", "0.3"])
    assert "drop_ratio=0.3 of hybrid" in capsys.readouterr().err


def test_evaluate_says_how_many_questions_its_filter_leaves_out(tmp_path, capsys):
    rows = ["question,text,label", "who?,krill,1", "who?,squid,0", "what?,fish,0", "why?,hare,0"]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    arguments = ["evaluate", "--model", "bm25", "--table", str(tmp_path / "t.csv")]
    main(arguments)
    assert "left out: 2 questions, as clean keeps questions with" in capsys.readouterr().out
    main([*arguments, "--question_filter", "raw"])
    assert "left out" not in capsys.readouterr().out


def test_evaluate_measures_labels_or_grades_of_a_graded_file(tmp_path, capsys):
    rows = ["question,text,label", "who?,krill,1", "who?,squid,3", "who?,hare,0"]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    graded = ["--table", str(tmp_path / "t.csv"), "--min_positive_grade", "2"]
    run = str(tmp_path / "r.run")
    flags = ["evaluate", "--model", "constant", *graded, "--measures"]
    main([*flags, '["RR"]'])
    assert "0.3333" in capsys.readouterr().out
    main([*flags, '["RR", "RR(rel=2)"]', "--relevance", "grade", "--output_run", run])
    means = [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:3]]
    assert means == ["0.5000", "0.3333"]
    calibrated = ["--model", "nowhere", "--output", str(tmp_path / "out"), *graded[:3], "4"]
    error_text = refused(capsys, "calibrate", *calibrated, "--question_filter", "no_all_negative")
    assert "no question left of 1 questions / 3 pairs" in error_text
    # The run has the order that was measured: the lower grade first.
    main(["evaluate", "--run", run, *graded, "--measures", '["RR(rel=2)"]', "--relevance", "grade"])
    assert "0.3333" in capsys.readouterr().out


def test_evaluate_checks_the_ids_of_a_run_before_it_scores(tmp_path, monkeypatch, capsys):
    rows = ["qid,question,text,label", "a b,who?,krill,1", "a b,who?,squid,0"]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    monkeypatch.setattr("as2ray.text.bm25.BM25.score_candidates", None)
    flags = ["--table", str(tmp_path / "t.csv"), "--output_run", str(tmp_path / "r.run")]
    assert "first 'a b'" in refused(capsys, "evaluate", "--model", "bm25", *flags)


def test_evaluate_of_a_ranker_equals_evaluate_of_its_run(prepared, checkpoint, tmp_path, capsys):
    server = tmp_path / "ranker.run"
    main(
        [
            "evaluate",
            "--model",
            str(checkpoint()),
            "--table",
            str(prepared),
            "--output_run",
            str(server),
        ]
    )
    first = capsys.readouterr().out.splitlines()[1]
    tiny.write_qrels(tmp_path / "qrels", tiny.candidates(12, seed=3))
    main(["evaluate", "--run", str(server), "--table", str(prepared)])
    assert capsys.readouterr().out.splitlines()[1] == first
    main(["evaluate", "--run", str(server), "--qrels", str(tmp_path / "qrels")])
    assert capsys.readouterr().out.splitlines()[1] == first
    assert json.loads(server.with_suffix(".json").read_text())["per_question"]


def test_evaluate_run_with_an_unfound_answer_counts_it_as_missed(tmp_path, capsys):
    table = tiny.candidates(4, seed=3)
    tiny.write_qrels(tmp_path / "qrels", table)
    negatives = table.filter(table["label"].to_numpy() == 0)
    write_run(tmp_path / "run", negatives, [1.0] * negatives.num_rows)
    main(["evaluate", "--run", str(tmp_path / "run"), "--qrels", str(tmp_path / "qrels")])
    assert "0.0000" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--qrels", "--table"])
def test_evaluate_calls_a_run_without_lines_empty(prepared, tmp_path, capsys, flag):
    run, qrels = tmp_path / "empty.run", tmp_path / "qrels"
    run.write_text("\n")
    qrels.write_text("q1 0 c1 1\n")
    judged = qrels if flag == "--qrels" else prepared
    assert "empty.run is empty" in refused(capsys, "evaluate", "--run", run, flag, judged)


@pytest.mark.parametrize(
    ("flags", "error_text"),
    [
        (["--run", "nowhere", "--table", "TABLE"], "no file nowhere"),
        (["--run", "nowhere", "--qrels", "nowhere"], "no file nowhere"),
        (["--run", "r", "--qrels", "q", "--output_run", "x.run"], "nothing to score or to write"),
        (["--run", "r", "--qrels", "q", "--relevance", "grade"], "nothing to score or to write"),
        (["--run", "r", "--qrels", "q", "--question_filter", "raw"], "with question_filter=raw;"),
        (["--run", "r", "--qrels", "q", "--min_positive_grade", "2"], "min_positive_grade=2.0;"),
        (["--model", "bm25", "--corpus", "wikiqa", "--min_positive_grade", "2"], "has labels"),
        (["--run", "r", "--qrels", "q", "--table", "TABLE"], "nothing to score or to write"),
        (["--model", "constant", "--table", "TABLE", "--output_run", "x.json"], "name it .run"),
        (
            ["--model", "bm25", "--table", "TABLE", "--drop_ratio", "0.3"],
            "a ranker that has stages",
        ),
    ],
)
def test_evaluate_of_what_is_not_there_or_would_be_lost_is_refused(
    prepared, capsys, flags, error_text
):
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", *(str(prepared) if one == "TABLE" else one for one in flags)])
    assert stopped.value.code == 2
    assert error_text in capsys.readouterr().err


def test_evaluate_with_a_preset_takes_the_measures_and_filter_of_its_paper(prepared, capsys):
    main(["evaluate", "--model", "bm25", "--table", str(prepared), "--preset", "cascade"])
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[1:5]] == ["AP", "nDCG@10", "P@1", "RR"]
    assert "no_all_negative" in printed
    flags = ["--measures", '["RR"]', "--question_filter", "raw"]
    main(["evaluate", "--model", "bm25", "--table", str(prepared), "--preset", "cascade", *flags])
    printed = capsys.readouterr().out
    assert "AP" not in printed
    assert "(raw)" in printed
    with pytest.raises(SystemExit):
        main(["evaluate", "--model", "bm25", "--table", str(prepared), "--preset", "bert"])
    assert "unknown preset 'bert'" in capsys.readouterr().err


def test_rank_and_evaluate_take_a_cascade_and_other_drop_ratios(
    cascade, checkpoint, prepared, tmp_path, capsys
):
    lines = tmp_path / "candidates.txt"
    lines.write_text("Badesso.\nKovarin ne.\nLala.\nMuri.\n")
    arguments = ["rank", "--model", cascade, "--question", "What is kovarin?"]
    main([*arguments, "--candidates", str(lines), "--drop_ratio", "0.5", "--jsonl", "true"])
    ranked = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [x["exit_layer"] for x in ranked] == [3, 2, 1, 1]
    main([*arguments, "--candidates", str(lines), "--drop_ratio", "0.0"])
    assert capsys.readouterr().out.count("layer  3") == 4
    main([*arguments, "--candidates", str(lines), "--drop_ratio", "0.5", "--top_k", "1"])
    shown = capsys.readouterr()
    assert shown.out.count("layer") == 1
    expected = "2 left after layer 1; 1 left after layer 2; 1 passed all 3: 58% of the layers\n"
    assert shown.err.endswith(expected)
    main([*arguments, "--candidates", str(lines), "--budget_ms", "0.001", "--drop_ratio", "0"])
    assert "4 were not scored; 0 left after layer 1" in capsys.readouterr().err
    ranker = load(cascade)
    ranker.margins, ranker.bm25_margin = Margins((9.0, 9.0)), 0.0
    for activation in ("sigmoid", "identity"):
        ranker.activation = activation
        saved = str(save(ranker, tmp_path / activation))
        asking = ["rank", "--model", saved, "--question", arguments[-1], "--candidates", str(lines)]
        for budget in ([], ["--budget_ms", "60000"]):
            main([*asking, *budget])
            assert "3 left before layer 1; 0 left after layer 1" in capsys.readouterr().err
        main([*asking, "--budget_ms", "0.001"])
        assert "were not scored; 0 left after layer 1" in capsys.readouterr().err
    one_exit = init_ranker(checkpoint(), max_length=60, exit_layers=[3])
    saved = str(save(one_exit, tmp_path / "one"))
    main(["rank", "--model", saved, "--question", arguments[-1], "--candidates", str(lines)])
    assert capsys.readouterr().err.endswith("4 passed all 3: 100% of the layers\n")
    with pytest.raises(SystemExit):
        main([*arguments, "--candidates", str(lines), "--budget_ms", "0"])
    assert "budget_ms" in capsys.readouterr().err
    main(["evaluate", "--model", cascade, "--table", str(prepared), "--drop_ratio", "0.5,0.2"])
    assert "AP" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["evaluate", "--model", cascade, "--table", str(prepared), "--drop_ratio", "half"])
    assert "numbers with commas" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["temperature", "isotonic"])
def test_calibrate_writes_a_ranker_with_its_map_and_a_plot(
    checkpoint, prepared, tmp_path, capsys, kind
):
    out = tmp_path / "calibrated"
    arguments = ["--model", str(checkpoint()), "--output", str(out), "--table", str(prepared)]
    main(["calibrate", *arguments, "--method", kind])
    shown = capsys.readouterr().out
    assert "ECE before" in shown
    assert "answer_scoring.json" not in shown
    assert load(out).calibration[0].method == kind
    for plot in ("reliability.png", "risk_coverage.png"):
        assert (out / plot).stat().st_size > 0


def test_calibrate_says_which_precision_can_be_reached(checkpoint, prepared, tmp_path, capsys):
    out = tmp_path / "calibrated"
    flags = ["--model", str(checkpoint()), "--output", str(out), "--table", str(prepared)]
    main(["calibrate", *flags, "--min_precision", "1"])
    assert "no threshold reaches a precision of 1; the highest" in " ".join(
        capsys.readouterr().out.split()
    )
    assert load(out).threshold is None


def test_calibrate_with_the_labels_of_one_question_is_refused(checkpoint, tmp_path, capsys):
    table = tiny.write_corpus(tmp_path / "one", tiny.candidates(1))
    flags = ["--model", checkpoint(), "--output", tmp_path / "out", "--table", table]
    assert "one question, so that none can be held out" in refused(capsys, "calibrate", *flags)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags", [(), ("--high_confidence", "true")])
def test_calibrate_stores_a_threshold_for_the_table_or_for_new_questions(
    checkpoint, prepared, tmp_path, capsys, flags
):
    out = tmp_path / "calibrated"
    arguments = ["--model", str(checkpoint()), "--output", str(out), "--table", str(prepared)]
    main(["calibrate", *arguments, "--min_precision", "0.4", *flags])
    assert "12 questions are few" in capsys.readouterr().out
    assert (load(out).threshold is None) == bool(flags)  # 12 questions make nothing sure


def test_calibrate_says_that_a_fitted_scoring_of_answers_is_left_out(
    checkpoint, prepared, tmp_path, capsys
):
    model, out = shutil.copytree(checkpoint(), tmp_path / "model"), tmp_path / "calibrated"
    AnswerScoring({"ranker": 1.0}).write(model)
    main(["calibrate", "--model", str(model), "--output", str(out), "--table", str(prepared)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "has no answer_scoring.json: that of" in shown
    assert AnswerScoring.read(out) is None


def test_calibrate_says_which_questions_are_on_the_subject_of_an_index(
    checkpoint, prepared, sentence_encoder, tmp_path, capsys
):
    rows = pa.table({"text": read_table(prepared)["question"].unique()})
    pq.write_table(rows, tmp_path / "questions.parquet")
    config = IndexConfig(sentence_splitter="lines", encoder=sentence_encoder)
    documents, index = tmp_path / "questions.parquet", tmp_path / "index"
    write_index(documents, index, config, load_encoder=load_sentence_encoder)
    model = shutil.copytree(checkpoint(), tmp_path / "model")
    AnswerScoring({"ranker": 1.0}, min_similarity=-1.0).write(model)  # not for the output
    flags = ["--model", str(model), "--table", str(prepared), "--index", str(index)]
    error_text = refused(capsys, "calibrate", *flags, "--output", str(tmp_path / "calibrated"))
    assert "has no similarity below which questions are on other subjects" in error_text
    assert not (tmp_path / "calibrated").exists()
    manifest = index / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), MIN_SIMILARITY: 0.995}))
    main(["calibrate", *flags, "--output", str(tmp_path / "calibrated")])
    shown = " ".join(capsys.readouterr().out.split())
    assert "subject: 100.0% of the table's questions, and 0.0% of 100 of general" in shown


def spoilt(table: pa.Table, how: str) -> pa.Table:
    if how == "no labels":
        return table.drop_columns(["label"])
    if how == "a pair twice":
        return pa.concat_tables([table, table.slice(table.num_rows - 1)])
    labels = table["label"].to_pylist()
    labels[3] = {"label 2": 2, "a null label": None}[how]
    return table.set_column(table.column_names.index("label"), "label", pa.array(labels, pa.int8()))


@pytest.mark.parametrize("how", ["no labels", "a pair twice", "label 2", "a null label"])
def test_table_that_is_no_candidates_table_is_refused(tmp_path, capsys, how):
    table = tiny.write_corpus(tmp_path / "table", spoilt(tiny.candidates(12, seed=3), how))
    evaluated = refused(capsys, "evaluate", "--model", "constant", "--table", table)
    given = ["--model", "nowhere", "--output", tmp_path / "out", "--table", table]
    assert "CorpusError" in evaluated
    assert "CorpusError" in refused(capsys, "calibrate", *given)


@pytest.fixture
def unscored(monkeypatch):
    """Nothing may be scored."""

    def score(*_):
        raise AssertionError("scored")

    monkeypatch.setattr(Ranker, "predict_table", score)
    monkeypatch.setattr(Ranker, "predict_exits", score)


@pytest.mark.usefixtures("unscored")
@pytest.mark.parametrize(
    ("flags", "error_text"),
    [
        (["--measures", '["AP", "nothing"]'], "measure 'nothing'"),
        (["--measures", "[]"], "no measures"),
        (["--measures", '["AP(rel=2)"]'], "--relevance grade"),
        (["--relevance", "grade"], "no column 'grade'"),
        (["--baseline", "nowhere"], "CheckpointError: nowhere"),
        (["--output_run", "nowhere/x.run"], "in an existing folder"),
        (["--output_run", "."], "in an existing folder"),
        (["--output_run", ".."], "in an existing folder"),
        (["--output_run", "config.json"], "name it .run"),
        (["--output_run", "config.run"], "another config.json beside it"),
        (["--output_run", "config.json/x.run"], "in an existing folder"),
    ],
)
def test_evaluate_tells_before_it_scores(
    checkpoint, prepared, tmp_path, monkeypatch, capsys, flags, error_text
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("mine")
    assert error_text in refused(
        capsys, "evaluate", "--model", checkpoint(), "--table", prepared, *flags
    )
    assert (tmp_path / "config.json").read_text() == "mine"


@pytest.mark.usefixtures("unscored")
def test_place_of_a_run_that_may_not_be_written_to_is_told_before_scoring(
    checkpoint, prepared, monkeypatch, capsys
):
    monkeypatch.setattr("as2ray.cli.evaluate.is_writable", lambda _: False)
    flags = ["--model", checkpoint(), "--table", prepared, "--output_run", prepared.parent / "r"]
    error_text = refused(capsys, "evaluate", *flags)
    assert f"{prepared.parent} may not be written to" in error_text


@pytest.mark.usefixtures("unscored")
def test_no_question_left_is_told_before_scoring(checkpoint, tmp_path, capsys):
    table = tiny.candidates(4)
    answers = table.filter(table["label"].to_numpy() == 1)
    prepared = tiny.write_corpus(tmp_path / "table", answers)
    arguments = ["--model", checkpoint(), "--table", prepared, "--question_filter", "clean"]
    assert "no question left" in refused(capsys, "evaluate", *arguments)
    assert "no question left" in refused(
        capsys, "calibrate", *arguments, "--output", tmp_path / "out"
    )


def test_evaluate_again_writes_over_its_own_run_and_measures(prepared, tmp_path, capsys):
    server = tmp_path / "my.run"
    for model in ("constant", "bm25"):
        main(["evaluate", "--model", model, "--table", str(prepared), "--output_run", str(server)])
    written = json.loads(server.with_suffix(".json").read_text())["measures"]
    assert f"AP       {written['AP']:.4f}" in capsys.readouterr().out


def test_calibrate_over_what_is_there_is_refused_before_the_table_is_read(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    arguments = ["calibrate", "--model", "nowhere", "--table", "nowhere"]
    for output in (tmp_path, tmp_path / "mine.txt", "."):
        assert "choose a new folder" in refused(capsys, *arguments, "--output", output)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    out = ["--output", tmp_path / "out"]
    assert "min_precision=1.5: Input should be less than or equal to 1" in refused(
        capsys, *arguments, *out, "--min_precision", "1.5"
    )
