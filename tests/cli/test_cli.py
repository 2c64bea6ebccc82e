"""The command line, as a user calls it."""

import csv
import json
import os
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny

from as2ray.cascade.margins import Margins
from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.loading import load
from as2ray.checkpoints.saving import save
from as2ray.checkpoints.sentence_encoder import load_sentence_encoder
from as2ray.cli.main import main
from as2ray.corpora.preparation import read_split
from as2ray.errors import CorpusError
from as2ray.experiments.tables import read_table
from as2ray.models.ranker import Ranker
from as2ray.retrieval.answer_scoring import AnswerScoring
from as2ray.retrieval.index_writer import IndexConfig, write_index
from as2ray.retrieval.sentence_index import MIN_SIMILARITY
from as2ray.tables.trec import write_run


@pytest.fixture
def prepared(tmp_path):
    return tiny.write_corpus(tmp_path / "table", tiny.candidates(12, seed=3))


@pytest.fixture
def cascade(checkpoint, tmp_path) -> str:
    made = init_ranker(checkpoint("bert", None), max_length=60, exit_layers=[1, 2, 3])
    return str(save(made, tmp_path / "cascade"))


def test_corpora_list_names_every_corpus(capsys):
    main(["corpora", "list"])
    out = capsys.readouterr().out
    for name in ("wikiqa", "trecqa", "asnq", "squad", "qnli", "python_reference"):
        assert name in out


def test_corpora_stats_of_the_embedded_corpus_is_json(capsys):
    main(["corpora", "stats", "--corpus", "python_reference", "--split", "dev"])
    assert "questions" in capsys.readouterr().out


def test_corpora_stats_count_word_pieces_of_a_tokenizer(checkpoint, capsys):
    given = ["--corpus", "python_reference", "--split", "dev"]
    main(["corpora", "stats", *given])
    words = json.loads(capsys.readouterr().out)
    main(["corpora", "stats", *given, "--tokenizer", str(checkpoint("bert"))])
    pieces = json.loads(capsys.readouterr().out)
    # Words that the vocabulary lacks are several pieces.
    assert pieces["question_tokens"]["mean"] > words["question_tokens"]["mean"] + 1
    assert pieces["candidate_tokens"]["max"] > words["candidate_tokens"]["max"]
    assert words["positives_per_question"]["mean"] == pytest.approx(
        words["counts"]["num_positives"] / words["counts"]["num_questions"]
    )
    assert pieces["counts"] == words["counts"]


def test_corpora_prepare_writes_parquet_and_manifest(tmp_path):
    out = tmp_path / "prepared"
    given = ["--corpus", "python_reference", "--output", str(out), "--splits", '{"test": "raw"}']
    main(["corpora", "prepare", *given])
    assert list((out / "test").glob("*.parquet"))
    assert json.loads((out / "manifest.json").read_text())["corpus"] == "python_reference"


def test_corpora_verify_without_data_fails(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["corpora", "verify", "--data_root", str(tmp_path)])


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
    told = refused(capsys, "calibrate", *calibrated, "--question_filter", "no_all_negative")
    assert "no question left of 1 questions / 3 pairs" in told
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


def test_rank_reads_candidates_and_prints_best_first(checkpoint, tmp_path, capsys):
    (tmp_path / "c.txt").write_text("This one.\n\nThat other one.\n")
    arguments = ["--model", str(checkpoint()), "--question", "Which?"]
    main(["rank", *arguments, "--candidates", str(tmp_path / "c.txt"), "--jsonl", "true"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 2
    assert lines[0]["score"] >= lines[1]["score"]


def test_rank_reads_a_line_a_candidate_whatever_the_line_holds(checkpoint, tmp_path, capsys):
    texts = ["One\u2028line.", "Another\x0cone."]
    (tmp_path / "c.txt").write_text("\n".join(texts), encoding="utf-8")
    asked = ["rank", "--model", str(checkpoint()), "--question", "Which?", "--candidates"]
    main([*asked, str(tmp_path / "c.txt"), "--jsonl", "true"])
    lines = capsys.readouterr().out.split("\n")[:-1]
    assert sorted(json.loads(line)["text"] for line in lines) == sorted(texts)
    (tmp_path / "c.txt").write_bytes(b"\xff")
    for name in ("c.txt", "nowhere"):
        with pytest.raises(SystemExit) as stopped:
            main([*asked, str(tmp_path / name)])
        assert stopped.value.code == 2
        assert "a file of UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--run", "nowhere", "--table", "TABLE"], "no file nowhere"),
        (["--run", "nowhere", "--qrels", "nowhere"], "no file nowhere"),
        (["--run", "r", "--qrels", "q", "--output_run", "x.run"], "nothing to score or to write"),
        (["--run", "r", "--qrels", "q", "--relevance", "grade"], "nothing to score or to write"),
        (["--model", "bm25", "--corpus", "wikiqa", "--min_positive_grade", "2"], "has labels"),
        (["--run", "r", "--qrels", "q", "--table", "TABLE"], "nothing to score or to write"),
        (["--model", "constant", "--table", "TABLE", "--output_run", "x.json"], "name it .run"),
        (
            ["--model", "bm25", "--table", "TABLE", "--drop_ratio", "0.3"],
            "a ranker that has stages",
        ),
    ],
)
def test_evaluate_of_what_is_not_there_or_would_be_lost_is_refused(prepared, capsys, flags, told):
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", *(str(prepared) if one == "TABLE" else one for one in flags)])
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


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


def test_corpora_leaks_finds_shared_and_almost_equal_questions(tmp_path, capsys):
    questions = [["Who was Ada Lovelace?", "What is BM25?"], ["Who was Ada Lovelace really?", "x"]]
    folders = []
    for name, texts in zip("ab", [*questions]):
        table = tiny.candidates(2)
        column = pa.array([texts[row % 2] for row in range(table.num_rows)])
        place = table.column_names.index("question")
        table = table.set_column(place, "question", column)
        folders.append(str(tiny.write_corpus(tmp_path / name, table)))
    main(["corpora", "leaks", "--table", folders[0], "--other_table", folders[1]])
    printed = capsys.readouterr().out
    assert "0.80" in printed
    assert "0 questions are in both tables; 1 pairs have a similarity of 0.75" in printed
    with pytest.raises(SystemExit):
        main(["corpora", "leaks", "--table", "a", "--other_table", "b", "--min_similarity", "0"])
    assert "min_similarity=0: Input should be greater than 0" in capsys.readouterr().err


def test_names_of_files_are_shown_as_they_are(tmp_path, capsys):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "one.txt").write_text("Kovarin ne badesso.")
    flags = ["--encoder", "none", "--output"]
    main(["index", str(folder), *flags, str(tmp_path / "[bold]:dog:")])
    assert "[bold]:dog:" in capsys.readouterr().out
    (folder / "[red]two.txt").write_bytes(b"")
    main(["index", str(folder), *flags, str(tmp_path / "second")])
    assert "[red]two.txt" in capsys.readouterr().out


def test_lists_to_annotate_have_all_sentences_of_documents_and_read_back(
    tmp_path, checkpoint, capsys
):
    for name, text in {
        "one": "Kovarin is red. Nobody knows why. Nobody knows why.",
        "two": "It is a stone, and not kovarin. It shines.",
        "three": "Quintol is blue.",
    }.items():
        (tmp_path / "in" / f"{name}.txt").parent.mkdir(exist_ok=True)
        (tmp_path / "in" / f"{name}.txt").write_text(text)
    (tmp_path / "questions.txt").write_text("What is kovarin?\nZzz qqq?\n")
    index, lists = str(tmp_path / "index"), tmp_path / "annotated"
    main(["index", str(tmp_path / "in"), "--encoder", "none", "--output", index])
    lists.mkdir()
    flags = ["--index", index, "--questions", str(tmp_path / "questions.txt"), "--output"]
    main(["annotate", *flags, str(lists / "train.csv"), "--num_documents", "2"])
    ranked = tmp_path / "ranked.csv"
    main(["annotate", *flags, str(ranked), "--model", str(checkpoint("bert")), "--top_k", "2"])
    assert "2 candidates of 2 questions" in capsys.readouterr().out.replace("\n", " ")
    with open(lists / "train.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    # All sentences of the documents, those without a word of the question too, each text once.
    assert {row["candidate"]: row["document_id"] for row in rows if row["question_id"] == "q0"} == {
        "Kovarin is red.": "one.txt",
        "Nobody knows why.": "one.txt",
        "It is a stone, and not kovarin.": "two.txt",
        "It shines.": "two.txt",
    }
    scores = [float(row["score"]) for row in rows if row["question_id"] == "q0"]
    assert scores == sorted(scores, reverse=True)
    assert {row["label"] for row in rows} == {""}
    assert "exists; somebody may have labeled it" in refused(
        capsys, "annotate", *flags, str(lists / "train.csv")
    )

    labels = {"Kovarin is red.": "1", "It is a stone, and not kovarin.": "0"}
    rows = [{**row, "label": labels.get(row["candidate"], "")} for row in rows]
    with open(lists / "train.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    table = read_split("annotated", "train", lists)
    found = zip(table["candidate"].to_pylist(), table["label"].to_pylist())
    assert dict(found) == {text: int(label) for text, label in labels.items()}
    (lists / "train.csv").write_text((lists / "train.csv").read_text().replace(",1\n", ",yes\n"))
    with pytest.raises(CorpusError, match="label 'yes'; expected 0, 1 or nothing"):
        read_split("annotated", "train", lists)


def test_index_with_an_encoder_answers_a_question_that_shares_no_word(
    tmp_path, checkpoint, sentence_encoder, capsys
):
    (tmp_path / "one.txt").write_text("Kovarin ne badesso.")
    index = str(tmp_path / "i")
    main(["index", str(tmp_path / "one.txt"), "--output", index, "--encoder", sentence_encoder])
    flags = ["--index", index, "--model", str(checkpoint())]
    capsys.readouterr()
    main(["ask", "what?", *flags])
    assert "Kovarin ne badesso." in capsys.readouterr().out


def test_error_of_the_user_is_told_without_a_trace(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["evaluate", "--model", "constant", "--corpus", "nothing"])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert "unknown corpus 'nothing'" in told
    assert "wikiqa" in told
    assert "Traceback" not in told


def test_cost_prints_the_paper_s_savings(capsys):
    main(["cost", "--exit_layers", "4,6,8,10,12", "--drop_ratio", "0.3"])
    shown = capsys.readouterr().out
    formula = next(line for line in shown.splitlines() if "formula" in line)
    assert formula.split()[-4:] == ["-37.1", "%", "+53.6", "%"]


def test_cost_prints_the_batches_of_the_paper_s_example(capsys):
    # Section 4.3.2; its mean of 80.2 has a last batch of 28, where its text has 31.
    main(["cost", "--drop_ratio", "0.3", "--rounding", "nearest", "--memory_batch", "84"])
    lines = {line.strip(): line.split() for line in capsys.readouterr().out.splitlines()}
    cells = {
        label: row
        for line, row in lines.items()
        for label in ("mean", "largest", "through")
        if line.startswith(label)
    }
    assert cells["mean"][3:8] == ["128,", "90,", "63,", "44,", "31"]
    assert cells["mean"][-1] == f"{(4 * 128 + 2 * (90 + 63 + 44 + 31)) / 12:.1f}"
    assert cells["largest"][-1] == "133"
    assert cells["through"][-2:] == ["+52.4", "%"]


def test_cost_of_dropping_nothing_is_that_of_nothing_dropped(capsys):
    main(["cost", "--exit_layers", "4,6,8,10,12", "--drop_ratio", "0"])
    shown = capsys.readouterr().out
    formula = next(line for line in shown.splitlines() if "formula" in line)
    assert formula.split()[-4:-2] == ["+0.0", "%"]


def test_cost_of_a_cascade_stands_three_ways_beside_each_other(cascade, prepared, capsys):
    main(
        [
            "cost",
            "--model",
            cascade,
            "--table",
            str(prepared),
            "--drop_ratio",
            "0.5,0.5",
            "--num_repeats",
            "1",
        ]
    )
    shown = capsys.readouterr().out
    assert "drop 0.5, 0.5" in shown
    assert [line.split()[0] for line in shown.splitlines()[1:]] == ["layers", "operations", "time,"]


def test_cost_of_a_ranker_of_one_piece_is_refused(checkpoint, prepared, capsys):
    with pytest.raises(SystemExit):
        main(["cost", "--model", str(checkpoint("bert")), "--table", str(prepared)])
    assert "PointwiseRanker" in capsys.readouterr().err


def test_rank_and_evaluate_take_a_cascade_and_other_drop_ratios(
    cascade, prepared, tmp_path, capsys
):
    lines = tmp_path / "candidates.txt"
    lines.write_text("Badesso.\nKovarin ne.\nLala.\nMuri.\n")
    asked = ["rank", "--model", cascade, "--question", "What is kovarin?"]
    main([*asked, "--candidates", str(lines), "--drop_ratio", "0.5", "--jsonl", "true"])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [x["exit_layer"] for x in found] == [3, 2, 1, 1]
    main([*asked, "--candidates", str(lines), "--drop_ratio", "0.0"])
    assert capsys.readouterr().out.count("layer  3") == 4
    main([*asked, "--candidates", str(lines), "--drop_ratio", "0.5", "--top_k", "1"])
    shown = capsys.readouterr()
    assert shown.out.count("layer") == 1
    expected = "2 left after layer 1; 1 left after layer 2; 1 passed all 3: 58% of the layers\n"
    assert shown.err.endswith(expected)
    main([*asked, "--candidates", str(lines), "--budget_ms", "0.001", "--drop_ratio", "0"])
    assert "4 were not scored; 0 left after layer 1" in capsys.readouterr().err
    ranker = load(cascade)
    ranker.margins, ranker.bm25_margin = Margins((9.0, 9.0)), 0.0
    saved = str(save(ranker, tmp_path / "bm25"))
    main(["rank", "--model", saved, "--question", asked[-1], "--candidates", str(lines)])
    assert "3 left before layer 1; 0 left after layer 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*asked, "--candidates", str(lines), "--budget_ms", "0"])
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
    asked = ["--model", str(checkpoint()), "--output", str(out), "--table", str(prepared)]
    main(["calibrate", *asked, "--method", kind])
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
    assert "no threshold is sure to reach a precision of 1; the highest" in " ".join(
        capsys.readouterr().out.split()
    )
    assert load(out).threshold is None


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
    flags = ["--model", str(checkpoint()), "--table", str(prepared), "--index", str(index)]
    told = refused(capsys, "calibrate", *flags, "--output", str(tmp_path / "calibrated"))
    assert "has a similarity below which questions are on other subjects" in told
    assert not (tmp_path / "calibrated").exists()
    manifest = index / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), MIN_SIMILARITY: 0.995}))
    main(["calibrate", *flags, "--output", str(tmp_path / "calibrated")])
    shown = " ".join(capsys.readouterr().out.split())
    assert "subject: 100.0% of the table's questions, and 0.0% of 100 of general" in shown


def test_rank_of_passages_prints_them_with_their_sentences(checkpoint, tmp_path, capsys):
    made = init_ranker(
        checkpoint("bert", None, initializer_range=0.3), max_length=60, is_joint=True
    )
    model = str(save(made, tmp_path / "joint"))
    (tmp_path / "p.jsonl").write_text('["Lala.", "Kovarin ne."]\n["Muri."]\n')
    asked = ["rank", "--model", model, "--question", "What is kovarin?"]
    main([*asked, "--passages", str(tmp_path / "p.jsonl"), "--jsonl", "true"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert sorted(line["index"] for line in lines) == [0, 1]
    assert lines[0]["score"] >= lines[1]["score"]
    main([*asked, "--passages", str(tmp_path / "p.jsonl")])
    assert "passage 0" in capsys.readouterr().out
    for flags in (["--drop_ratio", "0.5"], ["--candidates", "c.txt"]):
        with pytest.raises(SystemExit):
            main([*asked, "--passages", str(tmp_path / "p.jsonl"), *flags])
        assert "--passages cannot be combined" in capsys.readouterr().err
    (tmp_path / "p.jsonl").write_text('["Lala."]\n[]\n')
    with pytest.raises(SystemExit):
        main([*asked, "--passages", str(tmp_path / "p.jsonl")])
    assert "passage 2: '[]'" in capsys.readouterr().err
    for line in ("not a list", '["\\ud83d"]', "[1]", '"text"', "[" * 100_000):
        (tmp_path / "p.jsonl").write_text(line + "\n")
        with pytest.raises(SystemExit):
            main([*asked, "--passages", str(tmp_path / "p.jsonl")])
        assert f"passage 1: {line[:80]!r}" in capsys.readouterr().err
    plain = str(checkpoint("bert", 2))
    with pytest.raises(SystemExit):
        main(["rank", "--model", plain, "--question", "?", "--passages", str(tmp_path / "p.jsonl")])
    assert "only a joint model" in capsys.readouterr().err


def test_serve_s_settings_are_flags(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "--help"])
    assert stopped.value.code == 0
    told = capsys.readouterr().out
    for flag in (
        "--host",
        "--settings.limits.max_candidates",
        "--settings.load_shedding.max_drop_ratio",
    ):
        assert flag in told


@pytest.fixture
def served(monkeypatch) -> list:
    """What would be served."""
    from as2ray.serving import server

    found = []
    monkeypatch.setattr(server, "run_server", lambda *given: found.append(given))
    return found


def test_serve_finds_its_files_from_wherever_replicas_stand(cascade, tmp_path, monkeypatch, served):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokens").write_text("one\n")
    main(
        ["serve", "--model", "cascade", "--settings.auth_token_file", "tokens", "--index", "index"]
    )
    [(settings, host, _)] = served
    assert settings.models == {"default": cascade}
    assert settings.auth_token_file == str(tmp_path / "tokens")
    assert settings.index_path == str(tmp_path / "index")
    assert host == "127.0.0.1"


def test_serve_of_what_is_no_ranker_is_refused_before_ray_starts(tmp_path, capsys, served):
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "--model", str(tmp_path)])
    assert (stopped.value.code, served) == (2, [])
    assert "CheckpointError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--model_name", "two words"], "models"),
        (["--settings.auth_token_file", "nowhere/tokens"], "one token per line"),
        (["--settings.overload_status_code", "500"], "overload_status_code"),
        (["--settings.limits.max_candidates", "0"], "max_candidates=0: Input should be"),
        (
            ["--settings.load_shedding.max_drop_ratio", "2"],
            "max_drop_ratio=2: Input should be less",
        ),
        (
            ["--settings.batching.max_queued_tokens", "600"],
            "is above batching.max_queued_tokens=600",
        ),
        (["--settings.replicas.min_replicas", "5"], "min_replicas=5 is above max_replicas=1"),
    ],
)
def test_serve_with_wrong_settings_is_refused_before_ray_starts(cascade, capsys, flags, told):
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "--model", cascade, *flags])
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


def refused(capsys, *arguments: object) -> str:
    """What a command that ends in order, by an error of the user's, tells."""
    with pytest.raises(SystemExit) as stopped:
        main([str(one) for one in arguments])
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    return told


def test_rank_of_candidates_after_a_byte_order_mark_does_not_see_it(checkpoint, tmp_path, capsys):
    (tmp_path / "c.txt").write_text("Kovarin.\n", encoding="utf-8-sig")
    asked = ["rank", "--model", str(checkpoint()), "--question", "Which?", "--jsonl", "true"]
    main([*asked, "--candidates", str(tmp_path / "c.txt")])
    assert json.loads(capsys.readouterr().out)["text"] == "Kovarin."


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
    ("flags", "told"),
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
    checkpoint, prepared, tmp_path, monkeypatch, capsys, flags, told
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("mine")
    assert told in refused(capsys, "evaluate", "--model", checkpoint(), "--table", prepared, *flags)
    assert (tmp_path / "config.json").read_text() == "mine"


@pytest.mark.usefixtures("unscored")
def test_no_question_left_is_told_before_scoring(checkpoint, tmp_path, capsys):
    table = tiny.candidates(4)
    answers = table.filter(table["label"].to_numpy() == 1)
    prepared = tiny.write_corpus(tmp_path / "table", answers)
    asked = ["--model", checkpoint(), "--table", prepared, "--question_filter", "clean"]
    assert "no question left" in refused(capsys, "evaluate", *asked)
    assert "no question left" in refused(capsys, "calibrate", *asked, "--output", tmp_path / "out")


def test_evaluate_again_writes_over_its_own_run_and_measures(prepared, tmp_path, capsys):
    server = tmp_path / "my.run"
    for model in ("constant", "bm25"):
        main(["evaluate", "--model", model, "--table", str(prepared), "--output_run", str(server)])
    written = json.loads(server.with_suffix(".json").read_text())["measures"]
    assert f"AP       {written['AP']:.4f}" in capsys.readouterr().out


def test_calibrate_over_what_is_there_is_refused_before_the_table_is_read(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    asked = ["calibrate", "--model", "nowhere", "--table", "nowhere"]
    for output in (tmp_path, tmp_path / "mine.txt", "."):
        assert "choose a new folder" in refused(capsys, *asked, "--output", output)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    out = ["--output", tmp_path / "out"]
    assert "min_precision=1.5: Input should be less than or equal to 1" in refused(
        capsys, *asked, *out, "--min_precision", "1.5"
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--exit_layers", "12,4"], "not ascending numbers"),
        (["--exit_layers", "0,4"], "not ascending numbers"),
        (["--num_candidates", "0"], "num_candidates=0"),
        (["--tokens_per_pair", "-3"], "tokens_per_pair=-3"),
        (["--table", "nowhere"], "no model"),
        (["--corpus", "wikiqa"], "no model"),
        (["--margins", "0.5"], "margins=0.5 without scores"),
        (
            ["--model", "MODEL", "--table", "TABLE", "--exit_layers", "1,3", "--budget_ms", "3"],
            "budget_ms=3.0, exit_layers=1,3 without scores",
        ),
        (["--model", "MODEL", "--table", "TABLE", "--num_repeats", "0"], "num_repeats=0"),
    ],
)
def test_cost_of_what_cannot_be_is_refused(cascade, prepared, capsys, flags, told):
    names = {"MODEL": cascade, "TABLE": prepared}
    assert told in refused(capsys, "cost", *(names.get(flag, flag) for flag in flags))


@pytest.mark.parametrize("options", ['{"source": "x"}', '{"filter": "raw"}', '{1: 2, "a": 3}'])
def test_options_that_a_corpus_does_not_have_are_refused(tmp_path, capsys, options):
    named = ["--corpus", "python_reference", "--corpus_options", options]
    prepare = ["--output", tmp_path / "out", "--splits", '{"test": "raw"}']
    for command in (
        ["evaluate", "--model", "constant", *named],
        ["corpora", "stats", "--split", "dev", *named],
        ["corpora", "prepare", *prepare, *named],
    ):
        assert "unknown options" in refused(capsys, *command)


def test_error_of_the_system_is_told_in_a_line(monkeypatch, capsys):
    def fails(*_):
        raise PermissionError(13, "Permission denied", "locked")

    monkeypatch.setattr("as2ray.corpora.verification.list_corpora", fails)
    assert "PermissionError: [Errno 13]" in refused(capsys, "corpora", "list")


def test_reader_who_goes_away_is_no_error(checkpoint, tmp_path, monkeypatch, capsys):
    (tmp_path / "c.txt").write_text("This one.\nThat other one.\n")
    read, write = os.pipe()
    os.close(read)
    asked = ["rank", "--model", str(checkpoint()), "--question", "Which?"]
    with os.fdopen(write, "w") as gone:
        monkeypatch.setattr("sys.stdout", gone)
        with pytest.raises(SystemExit) as stopped:
            main([*asked, "--candidates", str(tmp_path / "c.txt")])
    monkeypatch.undo()
    assert stopped.value.code == 1
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], "give either --table or --corpus"),
        (["--table", "here", "--corpus", "wikiqa"], "give either --table or --corpus"),
        (["--corpus", "nothing"], "unknown corpus 'nothing'"),
        (["--table", "nowhere", "--workers", "0"], "workers=0: Input should be greater than 0"),
    ],
)
def test_stream_of_what_cannot_be_read_is_refused(flags, problem, capsys):
    with pytest.raises(SystemExit):
        main(["stream", *flags])
    assert problem in capsys.readouterr().err
