"""Checkpoints: whole or not there, checked by their hash, loaded without executing anything.

A file is the sha256 of its payload (32 bytes), then the payload, a zip written by torch.save. `last.ckpt` is the
newest epoch, `previous.ckpt` the one before, for when the newest is damaged.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from urrl.errors import UserError
from urrl.files import UNREADABLE, write_atomic

LAST, PREVIOUS, MODEL = "last.ckpt", "previous.ckpt", "model.ckpt"


def save(path: Path, state: dict[str, Any]) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    payload = buffer.getbuffer()
    digest = hashlib.sha256(payload).digest()

    def write(file: Any) -> None:
        file.write(digest)
        file.write(payload)

    write_atomic(path, write)


def load(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        raise UserError(f"{path}: damaged (its checksum does not match)")
    try:
        with zipfile.ZipFile(io.BytesIO(content[32:])) as packed:
            if any(member.compress_type != zipfile.ZIP_STORED for member in packed.infolist()):
                raise ValueError("it is compressed, and we never write one that is")  # it could unpack to any size
        state: dict[str, Any] = torch.load(io.BytesIO(content[32:]), map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise UserError(f"{path}: not a checkpoint ({str(error).partition(chr(10))[0]})") from None
    return state


def save_epoch(folder: Path, state: dict[str, Any]) -> None:
    """The newest becomes the previous; at every moment one of the two is whole."""
    last = folder / LAST
    if last.exists():
        os.replace(last, folder / PREVIOUS)
    save(last, state)


def load_epoch(folder: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The newest undamaged state; None where no epoch was finished yet."""
    problem = None
    for name in (LAST, PREVIOUS):
        if (folder / name).exists():
            try:
                state = load(folder / name)
            except UserError as error:
                problem = str(error)
                continue
            if problem:
                say(f"{problem}; going on from {name}, one epoch earlier")
            os.replace(folder / name, folder / LAST)  # a damaged file must not become the previous one
            return state
    if problem:
        raise UserError(f"{problem}, and there is no earlier one")
    return None
