"""Killed with -9 at random moments: what is resumed ends bit for bit as if nothing had happened."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import CONTEXT
from tests.runs import RECORDER, TINY, assert_same, call, outcome, tree
from tests.torture.conftest import LONG


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(a run that nothing interrupted, the seconds that it takes)."""
    folder = tmp_path_factory.mktemp("whole")
    for name in ("first", "second"):  # the first one has to import and to warm up
        began = time.monotonic()
        assert call(*TINY, "--out", folder / name).code == 0
    return folder / "second", time.monotonic() - began


def command(*arguments: object) -> None:
    """In a process of its own, forked from a server that has imported torch already."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.exit(call(*arguments).code)


def killed(seconds: float, *arguments: object) -> bool:
    """Whether the command was still running when it was killed so many seconds after its start."""
    process = CONTEXT.Process(target=command, args=arguments)
    process.start()
    process.join(seconds)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode != 0


def test_training_killed_at_random(whole, tmp_path, times, count):
    """Some runs are killed once, some again and again."""
    (folder, seconds), chance = whole, random.Random(0)
    expected = outcome(folder)
    kills = runs = 0
    while kills < times(4, 160):
        run = tmp_path / f"{runs}"
        runs += 1
        for _ in range(chance.choice([1, 1, 3])):
            kills += killed(chance.uniform(0, 1.5 * seconds), *TINY, "--out", run, "--resume")
        done = call(*TINY, "--out", run, "--resume")
        assert done.code == 0, done.err
        assert_same(outcome(run), expected, run.name)
        shutil.rmtree(run)
    count("kill -9 of a training", survived=kills, lost=0)


def start(*arguments: object, **options) -> subprocess.Popen:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "urrl", *map(str, arguments)], env=environ, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)  # fmt: skip


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def children(pid: int) -> set[int]:
    """All processes below this one."""
    found, parents = set(), {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    level = {pid}
    while level := {child for child, parent in parents.items() if parent in level}:
        found |= level
    return found


def wait_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 30
    while left := {pid for pid in pids if not gone(pid)}:
        assert time.monotonic() < deadline, f"processes {left} are left"
        time.sleep(0.05)


@pytest.mark.skipif(not LONG, reason="long; tests/test_bench.py has a shorter one")
def test_a_grid_killed_at_random(tmp_path, count):
    """The grid's own process: its workers go as well, and the next one goes on."""
    grid = tmp_path / "grid.toml"
    lines = [
        'dataset = "digits"',
        "subset = 60",
        "epochs = 3",
        "seed = [0, 1, 2, 3]",
        "set = {width = 2, batch_size = 16}",
    ]
    grid.write_text("\n".join(lines))
    chance = random.Random(1)
    arguments = ["bench", grid, "--quiet", "--jobs", 2, "--threads", 1]
    kills, rounds = 0, 0
    while kills < 30:
        out = tmp_path / f"killed-{rounds}"
        rounds += 1
        for _ in range(3):
            process = start(*arguments, "--out", out)
            time.sleep(chance.uniform(2, 9))
            workers = children(process.pid)
            process.kill()
            process.communicate()
            kills += process.returncode == -signal.SIGKILL
            wait_gone(workers)
        assert call(*arguments, "--out", out).code == 0
        results = {path.parent.name: outcome(path.parent) for path in out.glob("*/result.json")}
        if rounds == 1:
            assert call(*arguments, "--out", tmp_path / "whole").code == 0
            expected = {path.parent.name: outcome(path.parent) for path in (tmp_path / "whole").glob("*/result.json")}
        assert len(results) == 4
        assert_same(results, expected)
    count("kill -9 of a grid", survived=kills, lost=0)


def test_an_audit_killed_at_random(whole, tmp_path, times, count):
    """Its folder is there as a whole or not at all, and the next one clears away what is left."""
    folder, chance = whole[0], random.Random(2)
    began = time.monotonic()
    assert call("audit", folder, "--out", tmp_path / "whole").code == 0
    seconds, expected = time.monotonic() - began, tree(tmp_path / "whole")
    kills = 0
    while kills < times(2, 20):
        out = tmp_path / "audit" / "page"
        kills += killed(chance.uniform(0, 1.5 * seconds), "audit", folder, "--out", out)
        if not out.exists():
            assert call("audit", folder, "--out", out).code == 0
        assert tree(out) == expected and list(out.parent.iterdir()) == [out]
        shutil.rmtree(out.parent)
    count("kill -9 of an audit", survived=kills, lost=0)


def test_an_audit_killed_between_any_two_file_operations(whole, tmp_path, count):
    place = tmp_path / "place"
    place.mkdir()
    with RECORDER.recording(place) as copies:
        assert call("audit", whole[0], "--out", place / "page").code == 0
    assert len(copies) > 8
    for copy in copies:
        for part in copy.glob("page.*.part"):
            part.rename(copy / "page.999999999.part")  # of a process that is not there
        if not (copy / "page").exists():
            assert call("audit", whole[0], "--out", copy / "page").code == 0
        assert tree(copy / "page") == tree(place / "page") and list(copy.iterdir()) == [copy / "page"]
    count("kill between two file operations of an audit", survived=len(copies), lost=0)


def test_two_runs_into_one_folder(tmp_path, count):
    """The second is refused while the first lives, not after it was killed."""
    slow = ["train", "--dataset", "digits", "--epochs", 500, "--quiet", "--threads", 1, "--out", tmp_path / "run"]
    first = CONTEXT.Process(target=command, args=slow)
    first.start()
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not (metrics.exists() and metrics.read_text()):
        assert first.is_alive()
        time.sleep(0.01)
    for _ in range(3):
        second = call(*slow, "--resume")
        assert second.code == 2 and second.err.count("\n") == 1 and "another process is at work there" in second.err
    assert first.is_alive()
    first.kill()
    first.join()
    lines = len(metrics.read_text().splitlines())
    third = CONTEXT.Process(target=command, args=[*slow, "--resume"])
    third.start()
    while len(metrics.read_text().splitlines()) <= lines:
        assert third.is_alive()
        time.sleep(0.05)
    third.kill()
    third.join()
    count("second run into a folder that is in use", refused=3)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
def test_ctrl_c_leaves_no_process(tmp_path, times, count):
    """At any moment, of a grid and of a run that streams its images with worker processes."""
    from PIL import Image

    images = tmp_path / "images"
    images.mkdir()
    for i in range(64):
        Image.new("RGB", (16, 16), (4 * i, 255 - 4 * i, 7)).save(images / f"{i}.png")
    rows = "".join(f"{i}.png,{'a|b' if i % 2 else 'b'}\n" for i in range(64))
    (tmp_path / "labels.csv").write_text(f"item,candidates\n{rows}")
    (tmp_path / "grid.toml").write_text('dataset = "digits"\nepochs = 300\nseed = [0, 1]\n')
    stream = ["train", "--images", images, "--candidates", tmp_path / "labels.csv", "--stream", "--epochs", 300]
    grid = ["bench", tmp_path / "grid.toml", "--jobs", 2, "--threads", 1]
    chance = random.Random(3)
    stopped = 0
    for number in range(times(1, 10)):
        for arguments in (stream, grid):
            process = start(*arguments, "--quiet", "--out", tmp_path / f"{arguments[0]}{number}")
            time.sleep(chance.uniform(3, 9))
            workers = children(process.pid)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
            assert process.returncode in (130, -signal.SIGINT), err
            wait_gone(workers)
            stopped += 1
    count("Ctrl-C: processes left behind", none_left=stopped, left=0)
