import errno
import os
import shutil
from pathlib import Path

import pytest

from as2ray.errors import ConfigError
from as2ray.training.checkpoint_store import LocalCheckpointStore


@pytest.fixture
def run(tmp_path) -> LocalCheckpointStore:
    return LocalCheckpointStore(tmp_path / "run", "dev/AP")


def written(tmp_path, content: str) -> Path:
    """A checkpoint of one file, in a folder of its own."""
    folder = tmp_path / f"made-{content}"
    folder.mkdir()
    (folder / "weights").write_text(content)
    return folder


def held(run: LocalCheckpointStore) -> str | None:
    """What a later try goes on with."""
    with run.open_last_checkpoint() as folder:
        return None if folder is None else weights(folder)


def weights(folder: Path | None) -> str:
    assert folder is not None
    return (folder / "weights").read_text()


def test_run_before_its_first_report_has_nothing(run):
    assert held(run) is None
    assert run.best_checkpoint() is None


def test_run_after_reports_resumes_from_the_last_and_keeps_the_best(run, tmp_path):
    for number, value in enumerate([0.5, 0.7, 0.6]):
        run.report({"dev/AP": value}, written(tmp_path, str(number)))
    assert held(run) == "2"
    assert weights(run.best_checkpoint()) == "1"
    assert not list(tmp_path.glob("made-*"))  # the checkpoints were taken over


@pytest.mark.parametrize("links", [True, False])
def test_best_that_is_the_last_takes_no_room_of_its_own_where_files_have_two_names(
    run, tmp_path, monkeypatch, links
):
    if not links:

        def refused(*_):
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refused)
    run.report({"dev/AP": 0.5}, written(tmp_path, "first"))
    best, last = (run.folder / name / "weights" for name in ("best", "last"))
    assert best.samefile(last) == links
    run.report({"dev/AP": 0.4}, written(tmp_path, "second"))
    assert (best.read_text(), last.read_text()) == ("first", "second")


def test_run_equal_values_keep_the_later_as_best(run, tmp_path):
    for number in range(2):
        run.report({"dev/AP": 0.5}, written(tmp_path, str(number)))
    assert weights(run.best_checkpoint()) == "1"


def test_run_of_another_process_goes_on_where_it_ended(run, tmp_path):
    run.report({"dev/AP": 0.5}, written(tmp_path, "first"))
    again = LocalCheckpointStore(run.folder, "dev/AP")
    assert held(again) == "first"
    again.report({"dev/AP": 0.4}, written(tmp_path, "second"))
    assert weights(again.best_checkpoint()) == "first"
    assert held(again) == "second"


def test_run_report_without_a_checkpoint_changes_nothing(run):
    run.report({"dev/AP": 0.5}, None)
    assert held(run) is None


def test_run_report_without_the_selecting_metric_is_refused_with_those_there(run, tmp_path):
    with pytest.raises(ConfigError, match=r"metric 'dev/AP'.* not among \['test/AP'\]"):
        run.report({"test/AP": 0.5}, written(tmp_path, "first"))


@pytest.mark.parametrize("best", [True, False])
def test_run_killed_while_it_takes_a_checkpoint_over_still_has_the_older(
    run, tmp_path, monkeypatch, best
):
    run.report({"dev/AP": 0.5}, written(tmp_path, "older"))

    def killed(source, target, *_, **__):
        Path(target).mkdir(exist_ok=True)
        (Path(target) / "half").touch()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # Another file system than the temporary folder's: a move copies file by file.
        patch.setattr(shutil, "copytree" if best else "move", killed)
        with pytest.raises(KeyboardInterrupt):
            run.report({"dev/AP": 0.6 if best else 0.4}, written(tmp_path, "newer"))
    again = LocalCheckpointStore(run.folder, "dev/AP")
    assert held(again) == "older"
    assert weights(again.best_checkpoint()) == "older"
    again.report({"dev/AP": 0.9}, written(tmp_path, "newest"))
    assert held(again) == "newest"
    assert weights(again.best_checkpoint()) == "newest"
    assert not list(run.folder.rglob("half"))


def test_run_killed_between_old_and_new_still_has_the_older(run, tmp_path, monkeypatch):
    run.report({"dev/AP": 0.5}, written(tmp_path, "older"))

    def killed(source, target, rename=os.rename):
        if Path(target).name == "last":
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run.report({"dev/AP": 0.4}, written(tmp_path, "newer"))
    assert held(LocalCheckpointStore(run.folder, "dev/AP")) == "older"
