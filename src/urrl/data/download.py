"""Official files: find them on this machine, or download them with a checksum and unpack them with care."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from urllib.request import urlopen

from urrl.errors import UserError, one_line

TIMEOUT = 30.0  # seconds of silence, not for the whole download
BLOCK = 1 << 18


@dataclass(frozen=True)
class Source:
    """A dataset's official files: what they are called, where they may lie, where they come from."""

    files: dict[str, int]  # file name -> rows in it; the test part comes last
    folders: tuple[str, ...]  # usual sub folders; a download goes into the first
    urls: dict[str, str]  # url -> md5: the files themselves, or a tar.gz with folders[0] in it; none: no download
    installed: Path | None = None  # where a system package puts the files
    hint: str = ""  # another way to get them, for the error message

    @property
    def test_rows(self) -> int:
        return list(self.files.values())[-1]


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "urrl"


def find(source: Source, data_dir: Path | None = None) -> Path | None:
    """The first folder with all the files: data_dir, $URRL_DATA, cache, system package."""
    environ = os.environ.get("URRL_DATA")
    for place in (data_dir, Path(environ) if environ else None, cache_dir(), source.installed):
        if place is None:
            continue
        for folder in (place, *(place / name for name in source.folders)):
            if all(os.path.isfile(folder / file) for file in source.files):
                return folder
    return None


def locate(source: Source, data_dir: Path | None = None) -> Path:
    """Where the files are; else a download."""
    if folder := find(source, data_dir):
        return folder
    if not source.urls:
        files = ", ".join(source.files)
        raise UserError(f"{files}: not found; put it into a folder named by --data-dir or URRL_DATA{source.hint}")
    return download(source)


def download(source: Source) -> Path:
    """Get the files into the cache folder. They are moved there when all are complete and checked."""
    cache = cache_dir()
    folder = cache / source.folders[0]
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Inside the cache: a move must not cross disks. A new name: two runs may download at once.
        with tempfile.TemporaryDirectory(prefix="part-", dir=cache) as scratch:
            for url, md5 in source.urls.items():
                path = Path(scratch, url.rsplit("/", 1)[-1])
                fetch(url, path, md5)
                if path.name not in source.files:
                    unpack(path, [f"{source.folders[0]}/{file}" for file in source.files], path.parent)
            folder.mkdir(parents=True, exist_ok=True)
            for file in source.files:
                os.replace(Path(scratch, file), folder / file)
    except (OSError, HTTPException, tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(
            f"cannot download {next(iter(source.urls))} ({one_line(error)}): put {', '.join(source.files)} into "
            f"{folder} or into a folder named by --data-dir or URRL_DATA{source.hint}"
        ) from error
    return folder


def fetch(url: str, path: Path, md5: str) -> None:
    """Download `url` to `path`; with a wrong checksum nothing stays. Network errors go to the caller."""
    from rich.console import Console
    from rich.progress import Progress

    digest = hashlib.md5(usedforsecurity=False)
    console = Console(stderr=True)
    with (
        urlopen(url, timeout=TIMEOUT) as reply,
        open(path, "wb") as file,
        Progress(console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task(path.name, total=int(reply.headers.get("Content-Length") or 0) or None)
        while block := reply.read(BLOCK):
            file.write(block)
            digest.update(block)
            progress.advance(bar, len(block))
    if digest.hexdigest() != md5:
        path.unlink()
        raise UserError(f"{url}: wrong checksum (md5 {digest.hexdigest()}, not {md5}), nothing was kept")


def unpack(archive: Path, members: Iterable[str], folder: Path) -> None:
    """Write the named regular files of a tar.gz into `folder`, flat; other plain members are left out.

    The whole archive is looked at before the first byte is written: one unsafe member refuses it all.
    """
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar.getmembers():
            path = PurePosixPath(member.name)
            if path.is_absolute() or ".." in path.parts or not (member.isreg() or member.isdir()):
                raise UserError(f"{archive.name}: refused, it holds the unsafe member {member.name!r}")
        found = {member.name: member for member in tar.getmembers() if member.isreg()}
        for name in members:
            stream = tar.extractfile(found[name]) if name in found else None
            if stream is None:
                raise UserError(f"{archive.name}: the file {name!r} is missing in it")
            with stream, open(folder / PurePosixPath(name).name, "wb") as file:
                shutil.copyfileobj(stream, file, BLOCK)
