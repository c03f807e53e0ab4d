"""Files that are whole or not there at all."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

# What numpy, scipy, torch, zipfile and json raise on a damaged or foreign file.
UNREADABLE = (OSError, ValueError, KeyError, EOFError, AttributeError, TypeError, RuntimeError, zlib.error,
              zipfile.BadZipFile, pickle.UnpicklingError)  # fmt: skip


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write beside the target, flush to the disk, move into place. A failure leaves the old file as it was."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda file: file.write(text.encode()))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
