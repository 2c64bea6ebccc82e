"""The command `as2ray store`, as a user calls it."""

import json

import pytest

from as2ray.cli.main import main
from as2ray.experiments.store import Store

KEPT, OTHER = "0" * 16, "f" * 16


@pytest.fixture
def store(tmp_path):
    """A store with two stages, and an output that links the first."""
    store = Store(str(tmp_path / "store"))
    for digest in (KEPT, OTHER):
        folder = store.work_folder("PreparedTable", digest)
        folder.mkdir(parents=True)
        (folder / "part-0.parquet").write_bytes(b"x" * 10_000)
        store.commit("PreparedTable", digest, {"outputs": {}})
    (tmp_path / "output").mkdir()
    links = {"tables/test": {"kind": "PreparedTable", "digest": KEPT, "inputs": {}}}
    (tmp_path / "output/stages.json").write_text(json.dumps(links))
    return store


def prune(store, output, *flags):
    keep = json.dumps([str(output)])
    main(["store", "prune", "--store", store.uri, "--keep", keep, *flags])


def test_store_list_names_each_stage_with_its_size(store, capsys):
    main(["store", "list", "--store", store.uri])
    lines = capsys.readouterr().out.splitlines()
    sizes = [stage.num_bytes for stage in store.stored_stages()]
    assert lines[1].split() == ["PreparedTable", KEPT, f"{sizes[0]:,}", "complete"]
    assert lines[-1] == f"2 stages with {sum(sizes):,} bytes in the store"


def test_store_prune_removes_what_no_kept_output_links(store, tmp_path, capsys):
    size = store.stored_stages()[1].num_bytes
    prune(store, tmp_path / "output", "--dry_run", "true")
    assert len(store.stored_stages()) == 2
    prune(store, tmp_path / "output")
    lines = capsys.readouterr().out.splitlines()
    assert f"1 stages with {size:,} bytes would be removed" in lines
    assert lines[-1] == f"1 stages with {size:,} bytes removed"
    assert [stage.digest for stage in store.stored_stages()] == [KEPT]
    assert not (tmp_path / "store/PreparedTable" / OTHER).exists()


def test_store_prune_of_a_folder_that_is_no_output_removes_nothing(store, tmp_path, capsys):
    with pytest.raises(SystemExit):
        prune(store, tmp_path)
    assert "has no stages.json" in capsys.readouterr().err
    assert len(store.stored_stages()) == 2


@pytest.mark.parametrize(
    "content", ['{"tables/test": {"ki', '["tables/test"]', '{"a": {"kind": "A"}}']
)
def test_store_prune_with_damaged_links_removes_nothing(store, tmp_path, capsys, content):
    (tmp_path / "output/stages.json").write_text(content)
    with pytest.raises(SystemExit):
        prune(store, tmp_path / "output")
    assert "stages.json is damaged" in capsys.readouterr().err
    assert len(store.stored_stages()) == 2


def test_store_list_of_an_unknown_scheme_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["store", "list", "--store", "ftp://host/store"])
    assert "unknown scheme of a store 'ftp'" in capsys.readouterr().err
