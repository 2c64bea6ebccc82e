"""Archives of releases are unpacked into their folder alone."""

import io
import tarfile

import pytest

from as2ray.corpora.download import download_release
from as2ray.errors import CorpusError


def write_archive(path, *names):
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"text"))


def test_archive_that_is_there_is_unpacked_without_its_lone_folder(tmp_path):
    write_archive(tmp_path / "a.tar.gz", "release/dev.tsv", "release/more/test.tsv")
    download_release(["https://nowhere.invalid/a.tar.gz"], tmp_path)
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    assert files == {"dev.tsv", "more/test.tsv"}


def test_archive_with_a_path_outside_is_refused(tmp_path):
    folder = tmp_path / "release" / "files"
    folder.mkdir(parents=True)
    write_archive(folder / "a.tar.gz", "../../evil.txt")
    with pytest.raises(CorpusError, match="outside"):
        download_release(["https://nowhere.invalid/a.tar.gz"], folder)
    assert not list(tmp_path.rglob("evil.txt"))
