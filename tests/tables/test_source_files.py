"""Files outside the store, which may change."""

import os

import pytest

from as2ray.errors import StaleStageError
from as2ray.tables import source_files
from as2ray.tables.source_files import check_files, describe_files, model_files


@pytest.fixture
def files(tmp_path):
    for name, text in {"a": "one", "b": "two", "c/config.json": "{}", ".d": "", "e/f": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return model_files(str(tmp_path))


def check(stored, files):
    check_files(stored, files, "the model", "fix")


def test_model_files_are_those_of_the_folder_and_settings_of_modules(files):
    assert list(files) == ["a", "b", "c/config.json"]
    assert model_files("organization/name") == {}


def test_changed_file_of_the_same_size_an_added_one_and_a_missing_one_are_named(files, tmp_path):
    stored = describe_files(files)
    check(stored, files)
    (tmp_path / "b").write_text("2nd")
    (tmp_path / "a").unlink()
    (tmp_path / "g").touch()
    with pytest.raises(StaleStageError, match=r"the model has changed since .*: a, b, g\n"):
        check(stored, model_files(str(tmp_path)))


def test_only_a_file_with_another_time_is_read(files, tmp_path, monkeypatch):
    stored = describe_files(files)
    os.utime(tmp_path / "a", (1, 1))
    read = []
    hash_file = source_files.hash_file
    monkeypatch.setattr(source_files, "hash_file", lambda p: read.append(p.name) or hash_file(p))
    check(stored, files)
    assert read == ["a"]


def test_sizes_that_older_versions_stored_are_compared(files, tmp_path):
    stored = {"a": 3, "b": 3}
    check(stored, files)
    check(None, files)
    (tmp_path / "b").write_text("twelve")
    with pytest.raises(StaleStageError, match=": b"):
        check(stored, files)
    check(stored, {})
