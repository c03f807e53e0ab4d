"""Disks that are full, files that are damaged, folders that cannot be written: a clear line, nothing lost."""

import ctypes
import errno
import os
import random
import resource
import shutil
import stat
import sys
from pathlib import Path

import numpy as np
import pytest

import urrl.files
from tests.processes import CONTEXT
from tests.runs import TINY, assert_same, call, flip, outcome, tree, unfinished


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert call(*TINY, "--out", folder).code == 0
    return folder


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Items to predict."""
    path = tmp_path_factory.mktemp("images") / "images.npy"
    np.save(path, np.random.default_rng(0).integers(0, 17, (20, 8, 8), dtype=np.uint8))
    return path


# ---- the disk ------------------------------------------------------------------------------------------------


class Disk:
    """Fails at the n-th of the operations write, fsync and rename on files of ours, with a real error number."""

    def __init__(self, monkeypatch, fails_at: int | None = None, error: int = errno.ENOSPC):
        self.done, self.fails_at, self.error = 0, fails_at, error
        monkeypatch.setattr(os, "fsync", self.watched(os.fsync))
        monkeypatch.setattr(os, "replace", self.watched(os.replace))
        monkeypatch.setattr(urrl.files, "open", self.open, raising=False)

    def watched(self, operation):
        def wrapped(*arguments):
            self.tick()
            return operation(*arguments)

        return wrapped

    def tick(self) -> None:
        self.done += 1
        if self.done == self.fails_at:
            raise OSError(self.error, os.strerror(self.error))

    def open(self, path, mode="r", *arguments, **options):
        file = open(path, mode, *arguments, **options)
        if "r" in mode:
            return file
        return Watched(file, self)


class Watched:
    def __init__(self, file, disk: Disk):
        self.file, self.disk = file, disk

    def write(self, content):
        half = len(content) // 2
        self.file.write(content[:half])  # a full disk takes a part
        self.disk.tick()
        return half + self.file.write(content[half:])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_an_error_at_every_write_fsync_and_rename(whole, tmp_path, monkeypatch, times, count):
    with monkeypatch.context() as patched:
        disk = Disk(patched)
        assert call(*TINY, "--out", tmp_path / "counted").code == 0
    assert disk.done > 30
    expected = outcome(whole)
    survived = 0
    for error in times([errno.ENOSPC], [errno.ENOSPC, errno.EIO]):
        for place in range(1, disk.done + 1, times(9, 1)):
            run = tmp_path / f"{error}-{place}"
            with monkeypatch.context() as patched:
                failing = Disk(patched, place, error)
                done = call(*TINY, "--out", run)
            assert failing.done >= place
            if done.code:  # else it was the fsync of a folder, which not every file system has
                assert done.code == 2 and done.err.count("\n") == 1 and os.strerror(error) in done.err, done.err
                assert not (run / "result.json").exists() and not any(run.rglob("*.part"))
            done = call(*TINY, "--out", run, "--resume")
            assert done.code == 0, done.err
            assert_same(outcome(run), expected, run.name)
            survived += 1
    count("disk full or broken at a write, fsync or rename", survived=survived, lost=0)


def limited(size: int, *arguments: object) -> None:
    """In a process of its own, in which no file can grow beyond so many bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    done = call(*arguments)
    sys.exit(done.code if done.err.count("\n") == 1 or done.code == 0 else 99)


def in_process(function, *arguments: object) -> int:
    process = CONTEXT.Process(target=function, args=arguments)
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def test_a_file_that_may_not_grow(whole, tmp_path, times, count):
    """The kernel's own refusal, in the middle of a file."""
    expected = outcome(whole)
    largest = (whole / "last.ckpt").stat().st_size
    sizes = [largest // 2, *random.Random(0).sample(range(1, largest), times(1, 20))]
    for size in sizes:
        run = tmp_path / f"{size}"
        assert in_process(limited, size, *TINY, "--out", run) == 2
        assert not (run / "result.json").exists() and not any(run.rglob("*.part"))
        assert call(*TINY, "--out", run, "--resume").code == 0
        assert_same(outcome(run), expected, run.name)
    count("file size limit of the kernel", survived=len(sizes), lost=0)


def without_privileges(*arguments: object) -> None:
    """Root may write everywhere, unless it gives up that it may (CAP_DAC_OVERRIDE)."""
    if os.getuid() == 0:
        libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(header, sets) == 0
        sets[0] &= ~0b110
        assert libc.capset(header, sets) == 0
    done = call(*arguments)
    sys.exit(done.code if done.err.count("\n") == 1 else 99)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="drops privileges as Linux has them")
def test_folders_that_cannot_be_written(whole, images, tmp_path, count):
    place = tmp_path / "place"
    run = unfinished(whole, place / "run")
    finished = Path(shutil.copytree(whole, place / "finished"))
    before = tree(place)
    for path in [*place.rglob("*"), place]:
        path.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH | (0o111 if path.is_dir() else 0))
    commands = [
        [*TINY, "--out", run, "--resume"],
        [*TINY, "--out", place / "new"],
        ["predict", finished, images, "--out", place / "labels.csv"],
        ["audit", finished, "--out", place / "audit"],
        ["generate", "--dataset", "digits", "--out", place / "sets.npz"],
        ["export", finished, "--torch", place / "model.pt2"],
        ["bench", place / "run" / "config.json", "--out", place],
        ["report", place, "--out", place / "page.html"],
    ]
    for arguments in commands:
        assert in_process(without_privileges, *arguments) == 2, arguments
        assert tree(place) == before, arguments
    for path in [place, *place.rglob("*")]:
        path.chmod(0o755)
    count("folder that cannot be written", refused=len(commands))


# ---- damage --------------------------------------------------------------------------------------------------


def damaged(content: bytes, chance: random.Random) -> bytes:
    if chance.random() < 0.5:
        return content[: chance.randrange(len(content))]
    place, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
    return content[:place] + bytes([content[place] ^ bit]) + content[place + 1 :]


def test_damage_to_any_file_of_an_unfinished_run(whole, tmp_path, times, count):
    """What is not made again is refused, by the name of the file; nothing wrong comes out."""
    expected, chance = outcome(whole), random.Random(0)
    figures = {"made_again": 0, "refused": 0}
    names = ["last.ckpt", "previous.ckpt", "candidates.npz", "config.json", "metrics.jsonl"]
    for number in range(times(10, 200)):
        run = unfinished(whole, tmp_path / f"{number}")
        name = names[number % len(names)]
        (run / name).write_bytes(damaged((run / name).read_bytes(), chance))
        before = tree(run)
        done = call(*TINY, "--out", run, "--resume")
        if done.code:
            assert done.code == 2 and done.err.count("\n") == 1 and name in done.err, done.err
            assert tree(run) == before
            assert name in ("candidates.npz", "config.json")
            figures["refused"] += 1
        else:
            assert_same({**outcome(run), "config": None}, {**expected, "config": None})
            figures["made_again"] += 1
        shutil.rmtree(run)
    count("truncated or flipped file of an unfinished run", **figures, wrong_results=0)


def test_damage_to_any_file_of_a_finished_run(whole, images, tmp_path, times, count):
    """The result is made again, or predict, audit and report say which file is damaged."""
    expected, chance = outcome(whole), random.Random(1)
    assert call("predict", whole, images, "--out", tmp_path / "labels.csv").code == 0
    labels = (tmp_path / "labels.csv").read_bytes()
    assert call("audit", whole, "--out", tmp_path / "audit").code == 0
    audit = tree(tmp_path / "audit")
    figures = {"made_again": 0, "refused": 0, "harmless": 0}
    names = ["result.json", "model.ckpt", "metrics.jsonl", "config.json", "candidates.npz", "last.ckpt"]
    for number in range(times(12, 150)):
        place = tmp_path / f"{number}"
        run = Path(shutil.copytree(whole, place / "run"))
        name = names[number % len(names)]
        (run / name).write_bytes(damaged((run / name).read_bytes(), chance))
        predicted = call("predict", run, images, "--out", place / "labels.csv")
        audited = call("audit", run, "--out", place / "audit")
        reported = call("report", place)
        for done in (predicted, audited, reported):
            assert done.code in (0, 2) and (done.code == 0 or (done.err.count("\n") == 1 and name in done.err)), done
        if predicted.code == 0:
            assert (place / "labels.csv").read_bytes() == labels
        assert (predicted.code == 2) == (name in ("model.ckpt", "config.json")) or name == "config.json"
        if audited.code == 0:  # a file may be damaged where nothing is kept, as in the date of a zip's member
            assert tree(place / "audit") == audit
        assert audited.code == 2 or name != "last.ckpt"
        if name in ("result.json", "metrics.jsonl") and reported.err:
            assert name in reported.err  # counted as missing, or read from the checkpoint
        done = call(*TINY, "--out", run, "--resume")
        if name == "result.json" and done.err:
            assert "made again" in done.err and done.code == 0
            assert_same(outcome(run), expected)
            figures["made_again"] += 1
        elif predicted.code or audited.code or reported.code or reported.err:
            figures["refused"] += 1
        else:
            figures["harmless"] += 1  # a flipped blank, say
        shutil.rmtree(place)
    count("truncated or flipped file of a finished run", **figures, wrong_results=0)


def test_a_flipped_digit_of_a_result_is_seen(whole, tmp_path):
    """It is still JSON, and a plausible one."""
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    for name, key in (("result.json", '"test_accuracy": 0.'), ("metrics.jsonl", '"val_accuracy": 0.')):
        text = (run / name).read_text()
        place = text.index(key) + len(key)
        (run / name).write_bytes(flip(len(text[:place].encode()))((run / name).read_bytes()))
    done = call("report", tmp_path)
    assert done.code == 0 and "result.json: damaged" in done.err and "metrics.jsonl, line 1: damaged" in done.err
    assert "1 runs: 0 finished" in done.out or "0 finished" in done.out


def test_the_checkpoint_of_another_run(whole, tmp_path):
    """Whole, with a good checksum, and not ours."""
    other = [word.replace("width=2", "width=3") for word in TINY]
    assert call(*other, "--out", tmp_path / "other").code == 0
    run = unfinished(whole, tmp_path / "run")
    for name in ("last.ckpt", "previous.ckpt"):
        shutil.copy(tmp_path / "other" / name, run / name)
    done = call(*TINY, "--out", run, "--resume")
    assert done.code == 2 and done.err.count("\n") == 1 and "of another run" in done.err
    finished = Path(shutil.copytree(whole, tmp_path / "finished"))
    shutil.copy(tmp_path / "other" / "model.ckpt", finished / "model.ckpt")
    done = call("audit", finished, "--out", tmp_path / "audit")
    assert done.code == 2 and done.err.count("\n") == 1 and "model.ckpt: not the model of this run" in done.err
