"""Fetching from a folder in the layout of the hub, from a publisher, and from no network."""

import json
import re
import threading
import zipfile
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny

from as2ray.cli.main import main
from as2ray.corpora import msmarco, trecqa, wikiqa
from as2ray.corpora.download import download_split
from as2ray.corpora.preparation import read_split
from as2ray.corpora.registry import CORPORA
from as2ray.errors import ConfigError, CorpusError
from as2ray.tables.raw_files import HUB_COPIES


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A copy of microsoft/wiki_qa, made from a release in the publisher's format."""
    monkeypatch.setenv(HUB_COPIES, str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    release = tmp_path / "release"
    release.mkdir()
    tiny.write_wikiqa(release, "dev", 0, 9)
    rows = wikiqa.raw_files.read_tsv(release / "WikiQA-dev.tsv", wikiqa.COLUMNS, has_header=True)
    (table,) = rows
    columns = wikiqa.CANDIDATE_COLUMNS
    names = {columns[name]: wikiqa.HUB_COLUMNS[name] for name in columns}
    table = table.select(list(names)).rename_columns(list(names.values()))
    folder = tmp_path / "hub" / wikiqa.HUB_DATASET / "data"
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "validation-00000-of-00001.parquet")
    return release


def test_split_is_fetched_from_a_folder_in_the_layout_of_the_hub(hub, capsys):
    with pytest.raises(SystemExit):
        main(["corpora", "fetch", "--corpus", "wikiqa", "--splits", '["dev"]'])
    assert "published are 296 questions" in capsys.readouterr().err
    fetched = read_split("wikiqa", "dev", "hub", verify=False)
    assert fetched.num_rows > 9
    assert fetched.equals(read_split("wikiqa", "dev", hub, verify=False))


def test_without_a_network_fetching_ends_with_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SystemExit):
        main(["corpora", "fetch", "--corpus", "wikiqa", "--splits", '["dev"]'])
    told = capsys.readouterr().err
    assert "microsoft/wiki_qa cannot be read from the hub" in told
    assert "Traceback" not in told
    revision = {"hub_revision": "refs/convert/parquet"}
    splits = dict.fromkeys(("wikiqa", "asnq", "qnli", "squad", "hotpotqa", "nq"), "train")
    for corpus, split in {**splits, "msmarco": "qa-train"}.items():
        with pytest.raises(CorpusError, match=r"@refs/convert/parquet cannot be read"):
            read_split(corpus, split, "hub", **revision)


def test_ms_marco_is_fetched_from_a_folder_in_the_layout_of_the_hub(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(HUB_COPIES, str(tmp_path / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [
        {
            "answers": ["no answer present."] if number else ["a bank"],
            "passages": {
                "is_selected": [0, 1 - number, 0],
                "passage_text": [f"passage {number}.{k}" for k in range(3)],
                "url": ["https://a.example"] * 3,
            },
            "query": f" query {number}?",
            "query_id": 90 + number,
            "query_type": "DESCRIPTION",
            "wellFormedAnswers": [],
        }
        for number in range(2)
    ]
    folder = tmp_path / "hub" / msmarco.HUB_DATASET
    (folder / "v2.1").mkdir(parents=True)
    pq.write_table(
        pa.Table.from_pylist(rows), folder / "v2.1" / "validation-00000-of-00001.parquet"
    )
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: v2.1\n  data_files:\n  - split: validation\n"
        "    path: v2.1/validation-*\n---\n"
    )
    main(["corpora", "fetch", "--corpus", "msmarco", "--splits", '["qa-dev"]'])
    shown = " ".join(capsys.readouterr().out.split())
    assert "microsoft/ms_marco, license non-commercial research" in shown
    assert "qa-dev: 2 questions / 6 pairs / 1 positives" in shown
    table = read_split("msmarco", "qa-dev", "hub")
    assert table.select(["question_id", "question", "candidate_id", "label"]).to_pylist()[1] == {
        "question_id": "90",
        "question": "query 0?",
        "candidate_id": "90-1",
        "label": 1,
    }
    assert table["candidate"].to_pylist() == [
        row for r in rows for row in r["passages"]["passage_text"]
    ]


def test_splits_that_are_not_on_the_hub_or_only_there_are_refused(tmp_path):
    with pytest.raises(CorpusError, match=r"has no split 'train' of corpus 'msmarco'\n.*'qa-dev'"):
        read_split("msmarco", "train", "hub")
    with pytest.raises(CorpusError, match="'qa-dev': it is read from the hub alone"):
        read_split("msmarco", "qa-dev", tmp_path)
    assert "as2ray corpora fetch" in msmarco.CORPUS.fetch_command("qa-dev", tmp_path)


@pytest.mark.parametrize(
    ("corpus", "split", "names"),
    [
        ("squad", "dev", ["dev-v1.1.json"]),
        ("trecqa", "dev", ["jacana-qa-naacl2013-data-results.tar.bz2"]),
        ("dpr", "psgs_w100", ["psgs_w100.tsv.gz"]),
        ("msmarco", "passages", ["collectionandqueries.tar.gz"]),
        ("msmarco", "dev", ["collectionandqueries.tar.gz"]),
        (
            *("msmarco", "doc-dev"),
            [
                *("msmarco-docs.tsv.gz", "msmarco-docdev-top100.gz"),
                *("msmarco-docdev-queries.tsv.gz", "msmarco-docdev-qrels.tsv.gz"),
            ],
        ),
        ("yahoo_answers", "l6-train", []),  # asks to accept a license
    ],
)
def test_split_is_downloaded_from_the_addresses_of_its_files_or_of_archives(corpus, split, names):
    urls = CORPORA[corpus].split_urls(split)
    assert [url.rpartition("/")[2] for url in urls] == names


def test_archive_that_was_unpacked_is_not_downloaded_for_a_file_that_it_lacks(tmp_path):
    for name in ("collection.tsv", "queries.train.tsv", "qrels.train.tsv"):
        (tmp_path / name).touch()
    with pytest.raises(CorpusError, match=r"has no run\.train\.tsv or bm25"):
        download_split(CORPORA["msmarco"], "train", tmp_path)


class RangeHandler(SimpleHTTPRequestHandler):
    """Serves a folder; sends the rest of a file to who has its beginning."""

    def do_GET(self):
        content = (Path(self.directory) / self.path.lstrip("/")).read_bytes()
        start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        self.server.starts.append(start)
        self.send_response(416 if start >= len(content) else 206)
        self.send_header("Content-Length", str(len(content[start:])))
        self.end_headers()
        self.wfile.write(content[start:])

    def log_message(self, *_):
        pass


@pytest.fixture
def publisher(tmp_path, monkeypatch):
    """A server with an archive of TREC-QA's dev split, which the corpus has as its address."""
    release = tmp_path / "release" / "top"
    release.mkdir(parents=True)
    candidates = [{"sentence": "They eat krill.", "label": 1}, {"sentence": "No.", "label": 0}]
    question = {"question": "What do whales eat?", "candidates": candidates}
    (release / "dev.jsonl").write_text((json.dumps(question) + "\n") * 5)
    with zipfile.ZipFile(tmp_path / "release" / "trecqa.zip", "w") as archive:
        for path in release.iterdir():
            archive.write(path, path.relative_to(tmp_path / "release"))
        archive.writestr("__MACOSX/top/._dev.jsonl", "")
    handler = partial(RangeHandler, directory=str(tmp_path / "release"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.starts = []
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        server.url = f"http://127.0.0.1:{server.server_port}/trecqa.zip"
        corpus = replace(trecqa.CORPUS, urls=(server.url,), published_counts=())
        monkeypatch.setitem(CORPORA, "trecqa", corpus)
        monkeypatch.setenv("AS2RAY_DATA", str(tmp_path / "data"))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield server
        server.shutdown()


FETCH_TRECQA = ["corpora", "fetch", "--corpus", "trecqa", "--splits", '["dev"]']


def test_release_of_a_publisher_is_downloaded_unpacked_and_counted(publisher, tmp_path, capsys):
    (tmp_path / "data" / "trecqa" / "tanda").mkdir(parents=True)
    (tmp_path / "data" / "trecqa" / "tanda" / "test.jsonl").touch()
    main(FETCH_TRECQA)
    shown = capsys.readouterr()
    assert "license none stated" in shown.out
    assert "dev: 5 questions" in shown.out
    assert "trecqa.zip, 0 MB: complete" in shown.err
    folder = tmp_path / "data" / "trecqa"
    assert read_split("trecqa", "dev", verify=False).num_rows
    assert sorted(path.name for path in folder.iterdir()) == ["dev.jsonl", "tanda"]
    assert (folder / "tanda" / "test.jsonl").exists()  # what was there stays
    main(FETCH_TRECQA)
    assert publisher.starts == [0]  # what is there is not downloaded again
    with pytest.raises(SystemExit):  # all splits, of which the archive has one
        main(["corpora", "fetch", "--corpus", "trecqa"])
    assert "the release of corpus 'trecqa' has no train.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("is_complete", [False, True])
def test_interrupted_download_of_a_release_continues(publisher, tmp_path, is_complete):
    content = (tmp_path / "release" / "trecqa.zip").read_bytes()
    folder = tmp_path / "data" / "trecqa"
    folder.mkdir(parents=True)
    size = len(content) if is_complete else 100
    (folder / "trecqa.zip.part").write_bytes(content[:size])
    main(FETCH_TRECQA)
    assert publisher.starts == [size]
    assert [path.name for path in folder.iterdir()] == ["dev.jsonl"]


def test_release_without_a_network_an_address_or_the_file_ends_with_one_sentence(
    publisher, tmp_path, capsys
):
    with pytest.raises(CorpusError, match=r"the release .* has no train.jsonl"):
        download_split(CORPORA["trecqa"], "train", tmp_path)
    publisher.shutdown()
    publisher.server_close()
    with pytest.raises(SystemExit):
        main(FETCH_TRECQA)
    shown = capsys.readouterr().err
    assert f"{publisher.url} cannot be downloaded" in shown
    assert "Traceback" not in shown
    with pytest.raises(CorpusError, match="of corpus 'annotated' has no address"):
        download_split(CORPORA["annotated"], "dev", tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'dev'"):
        download_split(CORPORA["trecqa"], "dve", tmp_path)


def test_without_splits_those_whose_file_has_to_be_asked_for_are_named(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("AS2RAY_DATA", str(tmp_path))
    folder = tmp_path / "yahoo_answers"
    folder.mkdir()
    records = [
        {"id": n, "question": f"how do i mend thing {n}?", "nbestanswers": [f"with glue {n}."]}
        for n in range(120)
    ]
    (folder / "nfL6.json").write_text(json.dumps(records))
    fetch = ["corpora", "fetch", "--corpus", "yahoo_answers"]
    main(fetch)
    shown = capsys.readouterr().out
    assert re.findall(r"^(\S+): \d+ questions", shown, re.MULTILINE) == ["train", "dev", "test"]
    assert shown.endswith(
        "l6-train, l6-dev, l6-test not fetched: FullOct2007.xml of corpus 'yahoo_answers' has no "
        "address; see https://webscope.sandbox.yahoo.com/\n"
    )
    with pytest.raises(SystemExit) as refusal:
        main([*fetch, "--splits", '["train", "l6-dev"]'])
    assert refusal.value.code == 2
    assert "FullOct2007.xml" in capsys.readouterr().err


def test_corpus_without_any_address_or_file_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("AS2RAY_DATA", str(tmp_path))
    with pytest.raises(SystemExit) as refusal:
        main(["corpora", "fetch", "--corpus", "annotated"])
    assert refusal.value.code == 2
    assert "of corpus 'annotated' has no address" in capsys.readouterr().err
