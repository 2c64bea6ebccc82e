"""Mistakes of a newcomer: a few lines, no traceback, exit status 2, and the nearest known name."""

import re
import subprocess
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import pytest
import tiny
from pyarrow import csv

import as2ray
from as2ray.cli.index import index
from as2ray.cli.main import COMMANDS, main
from as2ray.errors import ResourceError
from as2ray.text.bm25 import BM25
from pipelines import own_documents
from pipelines.transfer_adapt import PIPELINE

MAX_LINES = 6
RECIPES = Path(__file__).parents[2] / "pipelines/recipes"
RECIPE = str(RECIPES / "tanda_minilm.yaml")
PIPELINES = ("own_documents", "pseudo_label", "cascade", "distill", "search", "build_asnq")


def errors_of(command, arguments, capsys):
    """Standard error of a command that must exit with 2, without the log."""
    with pytest.raises(SystemExit) as stopped:
        command(arguments)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert 0 < len(error.splitlines()) <= MAX_LINES
    assert "Traceback" not in error
    return error


def test_truth_flag_may_stand_without_its_value(tmp_path, capsys):
    (tmp_path / "whales.txt").write_text("A whale is long.")
    index = ["index", str(tmp_path / "whales.txt"), "--output", str(tmp_path / "index"), "--quiet"]
    main([*index, "--encoder", "none"])
    assert "exists" in errors_of(main, [*index, "--encoder", "none"], capsys)
    main([*index, "--overwrite", "--encoder", "none"])
    main([*index, "--encoder", "none", "--overwrite"])
    assert "exists" in errors_of(main, [*index, "--overwrite", "false"], capsys)
    (tmp_path / "store").mkdir()
    prune = ["store", "prune", "--store", str(tmp_path / "store"), "--keep", "[]", "--dry_run"]
    assert "expected one argument" not in errors_of(main, prune, capsys)


SERVE = ("serve", "--model", "own/ranker")
TRAIN = ("train", "--table", "x.csv", "--output", "out")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["rnak"], "unknown command 'rnak'\n  fix: did you mean 'rank'?"),
        (["train", "--tabel", "x"], "unknown flag --tabel\n  fix: did you mean '--table'?"),
        ([*TRAIN, "--epochs", "3"], "did you mean '--training.epochs'?"),
        ([*TRAIN, "--model.path", "m"], "--model.path\n  fix: did you mean '--model'?"),
        ([*TRAIN, "--training.epoch", "3"], "did you mean '--training.epochs'?"),
        (["rank", "--mod", "m", "--question", "q"], "unknown flag --mod\n"),  # no abbreviation
        (["rank", "--model", "m"], "--question must be given\n  fix: see as2ray rank --help"),
        (["corpora", "stats"], "--corpus, --split must be given\n  fix: see as2ray corpora stats"),
        (["ask", "q?", "idx"], "'idx' follows no flag\n  fix: "),
        (["serve"], "there is nothing to serve\n  fix: give --model, --index, or both"),
        (["serve", "--index", "", "--port", "0"], " is not an index: "),
        ([*SERVE, "--model_name", "a b"], "the name of the model 'a b' must be of visible ASCII"),
        (
            [*SERVE, "--settings.overload_status_code", "500"],
            "settings.overload_status_code=500 is none of 429, 503\n",
        ),
        (
            [*SERVE, "--settings.cors_origins", "http://a.com"],
            """settings.cors_origins=http://a.com is no list\n  fix: write it as '["A", "B"]'""",
        ),
        ([*TRAIN, "--training.epochs", "many"], "training.epochs=many is no int"),
        ([*TRAIN, "--columns", "q=question"], """write it as '{"NAME": "VALUE"}'"""),
        (["evaluate", "--measures", "AP"], "measures=AP is no list[str] or null\n  fix: write"),
        (
            ["store", "prune", "--store", "s", "--keep", "output"],
            """keep=output is no list\n  fix: write it as '["A", "B"]'""",
        ),
        ([*TRAIN, "--training.global_batch_size", "0"], "should be greater than 0"),
        (
            [*TRAIN, "--training.lr_scheduler_type", "linaer"],
            "training.lr_scheduler_type=linaer is none of linear, triangular, constant\n"
            "  fix: did you mean 'linear'?",
        ),
        (["evaluate", "--question_filter", "claen"], "did you mean 'clean'?"),
        (["corpora", "prepair"], "subcommand: prepair is none of fetch, leaks, list, prepare"),
        (["corpora"], "corpora needs a subcommand\n  fix: see as2ray corpora --help"),
        (["evaluate", "--run", "x"], "a run needs --qrels, --table or --corpus"),
        (["evaluate", "--model", "bm25", "--corpus", "wikqa"], "did you mean 'wikiqa'?"),
        (["evaluate", "--model", "bm25", "--table", "tabel"], "did you mean 'table'?"),
        (["stream", "--table", "t.csv"], "not a complete Parquet file: "),
        (["ask", "q?", "--index", "built"], "did you mean built/index?"),
        (["rank", "--model", "own/rankr", "--question", "q"], "HF_HUB_OFFLINE is set"),
        (["rank", "--model", "./own/rankr", "--question", "q"], "did you mean 'ranker'?"),
        (
            [*TRAIN[:2], "table", "--output", "o", "--loss", "cross"],
            "did you mean 'cross_entropy'?",
        ),
        ([*TRAIN[:2], "table", "--output", "o", "--model", "no/where"], "no/where is no folder"),
    ],
)
def test_mistake_on_the_command_line(
    arguments, problem, tmp_path, monkeypatch, capsys, sentence_encoder
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    tiny.write_corpus(tmp_path / "table", tiny.with_distinct_questions(tiny.candidates(12)))
    (tmp_path / "built/index").mkdir(parents=True)
    (tmp_path / "built/index/manifest.json").write_text("{}")
    (tmp_path / "own/ranker").mkdir(parents=True)
    (tmp_path / "t.csv").write_text("question,candidate,label\n")
    monkeypatch.setattr("as2ray.distributed.cluster.ray_session", None)  # Ray is not started
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # nor by tests before
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert problem in errors_of(main, arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--config", RECIPE.replace("minilm", "minilmm")], "did you mean 'tanda_minilm.yaml'?"),
        (["--config", "nothing_of_it.yaml"], "there is no such file\n"),
        (["--config", "elsewhere/tanda_table3.yaml"], "there is no such file\n"),
        (["--config", RECIPE, "--sedes", "[0]"], "sedes: unknown key; did you mean 'seeds'?"),
        (["--config", RECIPE, "--worker.num_workers", "1"], "did you mean 'workers'?"),
        (["--config", RECIPE, "--runs.wikqa.loss", "margin_ranking"], "did you mean 'wikiqa'?"),
        (["--config", RECIPE, "--workers.gpu", "1"], "did you mean 'gpus_per_worker'?"),
        (["--config", RECIPE, "--dev", "wikiqa-deev"], "did you mean 'wikiqa-dev'?"),
        (["--config", RECIPE, "--tables.wikiqa-dev.corpus", "wikqa"], "did you mean 'wikiqa'?"),
        (["--config", RECIPE, "--tables.wikiqa-dev.split", "deev"], "did you mean 'dev'?"),
        (["--config", RECIPE, "--seeds", "many"], "seeds='many': Input should be a valid list"),
        (["--config", RECIPE, "--measures", '["AP(rel=2)"]'], "AP(rel=2): labels are 0 and 1"),
        (["--config", RECIPE, "--profile", "nodes"], "did you mean 'node'?"),
        (["--config", str(RECIPES / "no_profiles.yaml"), "--profile", "node"], "no `profiles`"),
        (["--config", RECIPE, "--workers.num_workers", "0"], "set AS2RAY_DATA"),
        (["--config", RECIPE, "--output", ""], "output='': String should have at least 1"),
        (["--config", RECIPE, "--store", ""], "store='': String should have at least 1"),
        (["--config", RECIPE], "set AS2RAY_DATA"),
        (["--config", Path(RECIPE).name], "set AS2RAY_DATA"),  # the one that is installed
        (["--config", f"pipelines/recipes/{Path(RECIPE).name}"], "set AS2RAY_DATA"),
        (["--seeds", "[0]"], "runs, baseline: required, and not given\n  fix: name a recipe:"),
    ],
)
def test_mistake_in_a_recipe(arguments, problem, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AS2RAY_DATA", raising=False)
    monkeypatch.delattr("as2ray.distributed.cluster.ray_session")  # nothing is started
    if "no_profiles" in arguments[1]:
        text = Path(RECIPE).read_text().partition("\nprofiles:")[0]
        arguments = ["--config", "no_profiles.yaml", *arguments[2:]]
        Path("no_profiles.yaml").write_text(text)
    error = errors_of(PIPELINE.command, ["--output", "out/recipe", *arguments], capsys)
    assert problem in error


def test_folder_of_documents_that_is_not_given_is_asked_for(tmp_path, capsys):
    error = errors_of(own_documents.PIPELINE.command, ["--output", str(tmp_path / "out")], capsys)
    assert "documents: required, and not given\n  fix: give --documents, or a recipe" in error


def test_gpus_that_no_node_has_are_answered_with_their_flag():
    from as2ray.distributed.plan import check_capacity
    from as2ray.distributed.workers_config import WorkersConfig

    with pytest.raises(ResourceError, match=r"--workers\.gpus_per_worker 0"):
        check_capacity(WorkersConfig(gpus_per_worker=1), [{"CPU": 64.0}])


def test_table_in_csv_is_read_where_a_prepared_one_is(tmp_path, capsys):
    csv.write_csv(tiny.candidates(12, seed=3), tmp_path / "table.csv")
    main(["evaluate", "--model", "bm25", "--table", str(tmp_path / "table.csv")])
    assert "12 questions / 60 pairs" in capsys.readouterr().out


def test_version_and_help_list_every_command(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"as2ray {as2ray.__version__}\n"
    main([])
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)
    with pytest.raises(SystemExit) as stopped:
        main(["train", "--help"])
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Table that selects the best checkpoint" in text
    assert "Peak learning rate of AdamW." in text  # the docstring of an attribute


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        *((main, [name]) for name in COMMANDS if name not in ("corpora", "store")),
        *((main, ["corpora", name]) for name in ("prepare", "fetch", "stats", "leaks", "verify")),
        *((import_module(f"pipelines.{name}").PIPELINE.command, []) for name in PIPELINES),
    ],
)
def test_help_explains_every_key(command, arguments, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100000")  # nothing is wrapped
    with pytest.raises(SystemExit):
        command([*arguments, "--help"])
    usage, _, text = capsys.readouterr().out.partition("\noptions:\n")
    assert len(re.findall(r"^  -", text, re.MULTILINE)) > 3
    assert re.findall(r"^ .*\S {2,}\(.*|^ +\(.*", text, re.MULTILINE) == []  # types without text
    if arguments:
        assert usage.startswith("usage: as2ray [options] ")


def test_default_bm25_of_an_index_is_that_of_bm25():
    assert asdict(BM25()).items() <= index.__kwdefaults__.items()


def test_help_loads_no_heavy_module():
    heavy = {"torch", "transformers", "ray", "scipy", "pandas", "datasets", "matplotlib"}
    heavy |= {"bm25s", "faiss", "sentence_transformers", "fastapi", "starlette"}
    heavy |= {"as2ray.corpora.registry", "as2ray.corpora.preparation"}
    code = (
        "import sys\n"
        "from as2ray.cli.main import COMMANDS, main\n"
        "main(['--help'])\n"
        "assert not {'numpy', 'pyarrow'} & sys.modules.keys()\n"
        "for command in [[name] for name in COMMANDS] + [['corpora', 'prepare']]:\n"
        "    try:\n"
        "        main([*command, '--help'])\n"
        "    except SystemExit:\n"
        f"        loaded = {heavy} & sys.modules.keys()\n"
        "        assert not loaded, (command, loaded)\n"
        "from as2ray.cli import stream\n"
        "stream.console_log = None\n"
        "try:\n"
        "    stream.stream(table='x')\n"
        "except TypeError:\n"
        "    assert 'ray' not in sys.modules  # its console would not be ours\n"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
