"""Files that are whole or not there at all, and say when they are not what was written."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from urrl.errors import Busy, UserError, one_line

try:
    import fcntl
except ImportError:  # Windows: nothing keeps two processes apart there
    fcntl = None  # type: ignore[assignment]

# What numpy, scipy, torch, zipfile and json raise on a damaged or foreign file.
UNREADABLE = (OSError, ValueError, LookupError, EOFError, AttributeError, TypeError, RuntimeError, MemoryError,
              ArithmeticError, AssertionError, SyntaxError, struct.error, zlib.error, zipfile.BadZipFile,
              pickle.UnpicklingError)  # fmt: skip

# A file that unpacks to more than this, and to more than so many times its own size, is refused as a bomb.
LARGE, RATIO = 1 << 30, 100


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """The system does not say which file it could not write."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside the target, flush to the disk, move into place. A failure leaves the old file as it was."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with _named(path), open(part, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not every system can: then a power cut may bring the old file back
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def alive(pid: str) -> bool:
    """Whether a process of this machine has that number; anything that is no number is taken for one that lives."""
    if not pid.isdecimal():
        return True
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda file: file.write(text.encode()))


def append_text(path: Path, text: str) -> None:
    with _named(path), open(path, "a") as file:
        file.write(text)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """With the hash of all the rest under `sha256`, so that `unseal` sees a changed bit."""
    return {**value, "sha256": _digest(value)}


def unseal(text: str | bytes, where: object) -> dict[str, Any]:
    """What `sealed` was given, from its JSON; a record without a hash is taken as it is."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("not an object")
        last = next(reversed(value.values()), None)
        seal = value.pop("sha256", None)
        if seal is None and isinstance(last, str) and len(last) == 64:
            raise ValueError("its checksum has another name")
        if seal is not None and seal != _digest(value):
            raise ValueError("its checksum does not match")
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: damaged ({one_line(error)})") from None
    return value


def read_json(path: Path) -> dict[str, Any]:
    try:
        return unseal(path.read_bytes(), path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def refuse_bomb(path: Path, unpacked: int) -> None:
    if unpacked > max(LARGE, RATIO * os.path.getsize(path)):
        raise UserError(f"{path}: refused, it would unpack to {unpacked / 1e9:.1f} GB")


def read_npz(path: Path) -> dict[str, np.ndarray]:
    """Plain arrays; objects, which could execute something, are refused."""
    try:
        with zipfile.ZipFile(path) as packed:
            refuse_bomb(path, sum(member.file_size for member in packed.infolist()))
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        if not arrays or not all(isinstance(array, np.ndarray) for array in arrays.values()):
            raise ValueError("a member is no array")
        return arrays
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UserError:
        raise
    except UNREADABLE as error:
        raise UserError(f"{path}: not an .npz file of plain arrays ({one_line(error)})") from None


_HELD: set[IO[Any]] = set()
if hasattr(os, "register_at_fork"):  # a lock lives as long as any process that has inherited it
    os.register_at_fork(after_in_child=lambda: [file.close() for file in _HELD])


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """The file is ours alone until the end of the block, or Busy is raised. A process that dies holds nothing, and
    neither do its children."""
    with open(path, "r+b") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(f"{path.parent}: another process is at work there; nothing was changed") from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # a file system without locks
                    raise
        _HELD.add(file)
        try:
            yield
        finally:
            _HELD.remove(file)
