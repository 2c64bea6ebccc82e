import os

import pytest

from as2ray.tables.atomic import atomic_file, atomic_folder, is_writable


def content(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    for text in ("old", "new"):
        with atomic_file(str(path)) as temporary:
            assert temporary.parent == tmp_path
            temporary.write_text(text)
            assert content(tmp_path).get("file") == {"new": "old"}.get(text)
        assert content(tmp_path) == {"file": text}
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="nothing written"), atomic_file(path):
        raise ValueError("nothing written")
    assert content(tmp_path) == {"file": "new"}


def test_folder_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "parent" / "folder"
    for name in ("old", "new"):
        with atomic_folder(str(path), overwrite=name == "new") as new:
            assert new.parent == path.parent
            (new / name).write_text(name)
        assert content(tmp_path) == {f"parent/folder/{name}": name}
    with pytest.raises(KeyboardInterrupt), atomic_folder(path, overwrite=True) as new:  # noqa: PT012
        (new / "half").write_text("half")
        raise KeyboardInterrupt
    assert content(tmp_path) == {"parent/folder/new": "new"}
    assert len(list(path.parent.iterdir())) == 1


def test_folder_is_replaced_only_if_asked(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(FileExistsError, match="folder exists"), atomic_folder(path):
        pytest.fail("the body is not run")
    late = tmp_path / "late"
    with pytest.raises(FileExistsError, match="late exists"), atomic_folder(late):
        late.write_text("made meanwhile by another process")
    assert {p.name for p in tmp_path.iterdir()} == {"folder", "late"}
    assert late.is_file()


def test_older_folder_comes_back_where_the_new_one_cannot_take_its_place(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").write_text("old")
    with pytest.raises(FileNotFoundError), atomic_folder(path, overwrite=True) as new:
        new.rmdir()
    assert content(tmp_path) == {"folder/old": "old"}


def test_folder_is_writable_for_who_may_make_files_there(tmp_path):
    assert is_writable(tmp_path)
    tmp_path.chmod(0o555)
    user = os.geteuid()
    if user == 0:  # who may write everywhere
        os.seteuid(65_534)
    try:
        assert not is_writable(tmp_path)
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o755)
