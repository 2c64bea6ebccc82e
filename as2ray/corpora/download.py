"""Downloads the files of a release from their addresses, and unpacks archives."""

import os
import shutil
import tarfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Final
from urllib.error import HTTPError

from as2ray.corpora.corpus import ARCHIVES, Corpus
from as2ray.errors import CorpusError
from as2ray.progress import task
from as2ray.tables.raw_files import find_file

MAC_FOLDER: Final = "__MACOSX"
"""Folder that archives made on a Mac have beside their content."""

CHUNK_BYTES: Final = 1 << 20
TIMEOUT_S: Final = 60
"""Maximum seconds without a byte."""


class NoAddressError(CorpusError):
    """A file of a release has no address: it has to be asked for, or made."""


def download_split(corpus: Corpus, split: str, folder: Path) -> None:
    """Downloads the files of a split, or of a collection, that are not there yet.

    Args:
        corpus: The corpus.
        split: One of its splits or collections.
        folder: Folder of the release.

    Raises:
        ConfigError: There is no such split.
        NoAddressError: A file is not there and has no address.
        CorpusError: The files cannot be downloaded, or have other names.
    """
    needed = [names for names in corpus.needed_files(split) if names]
    missing = [names for names in needed if not find_file(folder, names)]
    if not missing:
        return
    if not (urls := corpus.split_urls(split)):
        raise NoAddressError(
            f"{' or '.join(missing[0])} of corpus {corpus.name!r} has no address",
            fix=corpus.fetch_command(split, folder),
        )
    # Where some files are there, an archive was unpacked, and has no others.
    is_unpacked = len(missing) < len(needed)
    download_release([u for u in urls if not (is_unpacked and u.endswith(ARCHIVES))], folder)
    if missing := [names for names in missing if not find_file(folder, names)]:
        problem = f"the release of corpus {corpus.name!r} has no {' or '.join(missing[0])}"
        raise CorpusError(problem, fix=f"get or make this file, and put it into {folder}")


def download_release(urls: Sequence[str], folder: Path) -> None:
    """Downloads files into a folder; archives are unpacked there and removed.

    An interrupted download leaves `NAME.part`, from which the next one continues.

    Args:
        urls: Addresses of the files; those that are there are not downloaded. If an archive has
            all in one folder, the content of this folder is unpacked.
        folder: Where the files are written; it is created.

    Raises:
        CorpusError: A file cannot be downloaded or unpacked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for url in urls:
        path = folder / PurePosixPath(url).name
        try:
            if not path.exists():
                _download(url, path)
            if path.name.endswith(ARCHIVES):
                _unpack(path)
        except (OSError, EOFError, shutil.ReadError, tarfile.TarError) as error:
            raise CorpusError(
                f"{url} cannot be downloaded: {error}",
                fix=f"run the command again, it continues; or put the files into {folder}",
            ) from error


def _download(url: str, path: Path) -> None:
    part = path.with_name(f"{path.name}.part")
    num_bytes = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={num_bytes}-"})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except HTTPError as error:
        if error.code != 416 or not num_bytes:  # 416: nothing comes after what is there
            raise
        part.rename(path)
        return
    with response:
        is_rest = response.status == 206
        length = int(response.headers["Content-Length"] or 0)
        total = length + num_bytes * is_rest
        name = f"{path.name}, {total / 1e6:,.0f} MB"
        with (
            task(name, total or None, "bytes") as advance,
            part.open("ab" if is_rest else "wb") as f,
        ):
            if is_rest and num_bytes:
                advance(num_bytes)
            while chunk := response.read(CHUNK_BYTES):
                f.write(chunk)
                advance(len(chunk))
    if total and part.stat().st_size < total:
        raise OSError(f"the connection ended after {part.stat().st_size:,} of {total:,} bytes")
    part.rename(path)


def _unpack(archive: Path) -> None:
    with TemporaryDirectory(dir=archive.parent) as temporary:
        if archive.suffix == ".zip":
            shutil.unpack_archive(archive, temporary)
        else:  # The filter refuses paths outside the folder; those of a zip file are cut.
            shutil.unpack_archive(archive, temporary, filter="data")
        root, is_lone_folder = Path(temporary), True
        while is_lone_folder:
            content = [path for path in root.iterdir() if path.name != MAC_FOLDER]
            is_lone_folder = len(content) == 1 and content[0].is_dir()
            root = content[0] if is_lone_folder else root
        # Other files of the folder stay.
        ignored = shutil.ignore_patterns(MAC_FOLDER)
        shutil.copytree(root, archive.parent, False, ignored, os.replace, dirs_exist_ok=True)
    archive.unlink()
