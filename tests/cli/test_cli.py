"""The command line, as a user calls it."""

import csv
import gzip
import json
import os

import pyarrow as pa
import pyarrow.csv
import pytest
import tiny
from refusals import refused

from as2ray.checkpoints.initialization import init_ranker
from as2ray.checkpoints.saving import save
from as2ray.cli.cascade import read_pairs
from as2ray.cli.console import read_lines
from as2ray.cli.main import main
from as2ray.corpora.preparation import read_split
from as2ray.errors import CorpusError


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


def test_files_of_lines_may_be_compressed_and_have_a_byte_order_mark(tmp_path):
    path = tmp_path / "lines.txt.gz"
    path.write_bytes(gzip.compress("\ufeffOne.\r\n\r\nAnother.\r\n".encode()))
    assert read_lines(str(path)) == ["One.", "Another."]
    record = json.dumps({"question": "Why?", "candidates": ["So.", "No."]})
    (tmp_path / "pairs.jsonl.gz").write_bytes(gzip.compress(f"\ufeff{record}\n".encode()))
    assert read_pairs(tmp_path / "pairs.jsonl.gz")["candidate"].to_pylist() == ["So.", "No."]
    for damaged in (path.read_bytes()[:-12], b"One.\n"):
        path.write_bytes(damaged)
        with pytest.raises(CorpusError, match="cannot be read as a file of UTF-8 text"):
            read_lines(str(path))


def test_annotate_without_a_question_writes_no_list(tmp_path, capsys):
    (tmp_path / "questions.txt").write_text("\n")
    flags = ["--index", "nowhere", "--questions", tmp_path / "questions.txt"]
    error_text = refused(capsys, "annotate", *flags, "--output", tmp_path / "lists.csv")
    assert "questions.txt has no line with a question" in error_text
    assert not (tmp_path / "lists.csv").exists()


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


def test_corpora_leaks_reads_csv_too(tmp_path, capsys):
    table = tiny.with_distinct_questions(tiny.candidates(3))
    path, folder = str(tmp_path / "t.csv"), str(tiny.write_corpus(tmp_path / "t", table))
    pyarrow.csv.write_csv(table, path)
    for other in (path, folder):
        main(["corpora", "leaks", "--table", path, "--other_table", other])
        assert "3 questions are in both tables" in capsys.readouterr().out
    renamed = table.rename_columns(["q" if x == "question" else x for x in table.column_names])
    pyarrow.csv.write_csv(renamed, path)
    for other in (path, str(tiny.write_corpus(tmp_path / "q", renamed))):
        flags = ["--other_table", other, "--columns", '{"question": "q"}']
        main(["corpora", "leaks", "--table", path, *flags])
        assert "3 questions are in both tables" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["corpora", "leaks", "--table", path, "--other_table", path, "--max_examples", "-1"])
    assert "max_examples=-1" in capsys.readouterr().err


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
    (tmp_path / "questions.txt").write_text("What is kovarin?\nZzz qqq?\nWhat is kovarin?\n")
    index, lists = str(tmp_path / "index"), tmp_path / "annotated"
    main(["index", str(tmp_path / "in"), "--encoder", "none", "--output", index])
    lists.mkdir()
    flags = ["--index", index, "--questions", str(tmp_path / "questions.txt"), "--output"]
    main(["annotate", *flags, str(lists / "train.csv"), "--num_documents", "2"])
    ranked = tmp_path / "ranked.csv"
    main(["annotate", *flags, str(ranked), "--model", str(checkpoint("bert")), "--top_k", "2"])
    report = capsys.readouterr().out.replace("\n", " ")
    assert "2 candidates of 1 questions" in report
    assert "left out: 1 of 2 questions, which have no word of the documents" in report
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


def test_command_that_is_interrupted_says_so_without_a_trace(monkeypatch, capsys):
    def interrupt(flags):
        raise KeyboardInterrupt

    monkeypatch.setattr("as2ray.cli.main._run", interrupt)
    with pytest.raises(SystemExit, match="130"):
        main(["train"])
    assert capsys.readouterr().err == "interrupted\n"


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


def test_rank_of_a_file_without_a_text_is_refused(checkpoint, tmp_path, capsys):
    (tmp_path / "c.txt").write_text("\n \n")
    flags = ("--model", checkpoint(), "--question", "Which?", "--candidates", tmp_path / "c.txt")
    assert "c.txt has no line with a text" in refused(capsys, "rank", *flags)


def test_cost_of_a_ranker_of_one_piece_is_refused(checkpoint, prepared, capsys):
    with pytest.raises(SystemExit):
        main(["cost", "--model", str(checkpoint("bert")), "--table", str(prepared)])
    assert "PointwiseRanker" in capsys.readouterr().err


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
    assert "passage 1: '[]'" in capsys.readouterr().err
    for line in ("not a list", '["\\ud83d"]', "[1]", '"text"', "[" * 100_000):
        (tmp_path / "p.jsonl").write_text(line + "\n")
        with pytest.raises(SystemExit):
            main([*asked, "--passages", str(tmp_path / "p.jsonl")])
        assert f"passage 0: {line[:80]!r}" in capsys.readouterr().err
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
        (["--model_name", "two words"], "the name of the model"),
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


def test_rank_of_candidates_after_a_byte_order_mark_does_not_see_it(checkpoint, tmp_path, capsys):
    (tmp_path / "c.txt").write_text("Kovarin.\n", encoding="utf-8-sig")
    asked = ["rank", "--model", str(checkpoint()), "--question", "Which?", "--jsonl", "true"]
    main([*asked, "--candidates", str(tmp_path / "c.txt")])
    assert json.loads(capsys.readouterr().out)["text"] == "Kovarin."


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
