import os
import shutil
from pathlib import Path

import pytest

from as2ray.training.checkpoint_store import LocalCheckpointStore, hardlink_or_copy


@pytest.fixture
def run(tmp_path) -> LocalCheckpointStore:
    return LocalCheckpointStore(tmp_path / "run")


def write_state(tmp_path, content: str) -> Path:
    """A resume state of one file, in a folder of its own."""
    folder = tmp_path / f"state-{content}"
    folder.mkdir()
    (folder / "weights").write_text(content)
    return folder


def read_last(run: LocalCheckpointStore) -> str | None:
    """What a later attempt resumes from."""
    with run.open_last_checkpoint() as folder:
        return None if folder is None else (folder / "weights").read_text()


def test_run_without_a_saved_state_has_none(run):
    run.save(None)
    assert read_last(run) is None


def test_run_of_another_process_resumes_from_the_last_state(run, tmp_path):
    for content in ("first", "second"):
        run.save(write_state(tmp_path, content))
    assert read_last(LocalCheckpointStore(run.folder)) == "second"
    assert not list(tmp_path.glob("state-*"))  # the folders were moved


def test_run_killed_while_it_takes_a_state_over_still_has_the_older(run, tmp_path, monkeypatch):
    run.save(write_state(tmp_path, "older"))

    def kill(source, target, *_, **__):
        (Path(target).parent / "half").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # Another file system than the temporary folder's: a move copies file by file.
        patch.setattr(shutil, "move", kill)
        with pytest.raises(KeyboardInterrupt):
            run.save(write_state(tmp_path, "newer"))
    again = LocalCheckpointStore(run.folder)
    assert read_last(again) == "older"
    again.save(write_state(tmp_path, "newest"))
    assert read_last(again) == "newest"
    assert not list(run.folder.rglob("half"))


def test_run_killed_between_old_and_new_still_has_the_older(run, tmp_path, monkeypatch):
    run.save(write_state(tmp_path, "older"))

    def kill(source, target, rename=os.rename):
        if Path(target).name == "last":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", kill)
        patch.setattr(os, "replace", kill)
        with pytest.raises(KeyboardInterrupt):
            run.save(write_state(tmp_path, "newer"))
    assert read_last(LocalCheckpointStore(run.folder)) == "older"


@pytest.mark.parametrize("has_links", [True, False])
def test_copy_is_a_second_name_where_the_file_system_has_them(tmp_path, monkeypatch, has_links):
    if not has_links:

        def refuse(*_):
            raise OSError("Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("new")
    target.write_text("old")
    hardlink_or_copy(str(source), str(target))
    assert target.read_text() == "new"
    assert source.samefile(target) == has_links
