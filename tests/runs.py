"""Small runs on digits for the tests: how to make one, kill one, and compare two bit for bit."""

import contextlib
import io
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from tests.tools import PAPER_FORM
from urrl import checkpoint
from urrl.candidates import CandidateSets
from urrl.cli import main
from urrl.files import read_json, unseal

# Neighbours few and phi low: the sets are corrected from the first epochs on, so that a resumed S matters.
TINY = shlex.split("train --dataset digits --subset 120 --epochs 3 --threads 1 --quiet")
TINY += shlex.split("--set width=2 --set batch_size=40 --set k=5 --set phi=0.2")
PAPER = [word for key, value in PAPER_FORM.items() for word in ("--set", f"{key}={value}")]  # the paper's form of URRL
TINY += PAPER


class Done(NamedTuple):
    code: int
    out: str
    err: str


def call(*arguments: object) -> Done:
    """The command line in this process: no seconds of imports."""
    out, err, threads = io.StringIO(), io.StringIO(), torch.get_num_threads()
    argv = mock.patch.object(sys, "argv", ["urrl", *map(str, arguments)])
    with argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main()
        except SystemExit as stop:
            assert isinstance(stop.code, int)
            code = stop.code
        finally:
            torch.set_num_threads(threads)
    return Done(code, out.getvalue(), err.getvalue())


def tree(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, to see whether a command changed it."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def unfinished(run: Path, to: Path) -> Path:
    """A copy of a finished run as it was at its last checkpoint."""
    shutil.copytree(run, to)
    for name in ("model.ckpt", "curves.png", "result.json"):
        (to / name).unlink()
    return to


def outcome(run: Path) -> dict[str, Any]:
    """All that a finished run has made, without the times."""
    last = checkpoint.load(run / "last.ckpt")
    last["state"].pop("seconds"), last["state"].pop("history")
    result = read_json(run / "result.json")
    records = [unseal(line, run) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "files": sorted(p.name for p in run.iterdir()),
        "config": (run / "config.json").read_bytes(),
        "sets": CandidateSets.load(run / "candidates.npz").sha256,
        "model": checkpoint.load(run / "model.ckpt"),
        "last": last,
        "metrics": [without(record, "seconds", "once_per_epoch") for record in records],
        "result": without(result, "seconds", "samples_per_second", "date"),
    }


def without(record: dict[str, Any], *keys: str) -> dict[str, Any]:
    assert record.keys() >= set(keys)
    return {key: value for key, value in record.items() if key not in keys}


def assert_same(a: Any, b: Any, where: str = "run") -> None:
    """Equal to the last bit, tensors and all."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, (left, right) in enumerate(zip(a, b)):
            assert_same(left, right, f"{where}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    else:
        assert a == b, where


class Recorder:
    """Copies a run's folder before each of its file operations: what a kill -9 at that moment would leave.
    An audit hook sees every open, rename and removal, and cannot be taken away again: there is one, asleep."""

    folder: Path | None = None
    seen: dict | None = None
    copies: list[Path]

    def __init__(self) -> None:
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple) -> None:
        if self.folder is None or event not in ("open", "os.rename", "os.remove", "os.mkdir"):
            return
        path = arguments[0]
        if not (isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(self.folder)):
            return
        folder, self.folder = self.folder, None  # do not hear the copying
        copy = folder.with_name(f"{folder.name}-{len(self.copies):02}")
        if folder.exists() and tree(folder) != self.seen:
            self.seen = tree(folder)
            self.copies.append(Path(shutil.copytree(folder, copy)))
            for part in copy.glob("*.part"):  # of another process than the one that resumes
                part.rename(part.with_name(part.name.replace(f".{os.getpid()}.", ".1.")))
        self.folder = folder

    @contextlib.contextmanager
    def recording(self, folder: Path):
        self.folder, self.seen, self.copies = folder, None, []
        try:
            yield self.copies
        finally:
            self.folder = None


RECORDER = Recorder()


def flip(position: int):
    def damage(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[position if position >= 0 else len(content) // 2] ^= 1
        return bytes(changed)

    return damage
