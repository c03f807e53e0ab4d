"""The same seed gives the same bytes; a long run takes no more memory, files or processes than a short one."""

import os
import resource
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import CONTEXT
from tests.runs import TINY, assert_same, call, outcome
from urrl.methods import METHODS


def in_process(function, *arguments: object) -> None:
    process = CONTEXT.Process(target=function, args=arguments)
    process.start()
    process.join(600)
    process.kill()
    process.join()
    assert process.exitcode == 0


def command(*arguments: object) -> None:
    sys.exit(call(*arguments).code)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_bytes_in_another_process(tmp_path, method, times, count):
    if method not in times(("urrl", "pico_plus"), METHODS):
        pytest.skip("long version only")
    tiny = [*TINY[: TINY.index("--set")], "--set", "width=2", "--set", "batch_size=40", "--method", method]
    for name in "ab":
        in_process(command, *tiny, "--out", tmp_path / name)
    assert_same(outcome(tmp_path / "a"), outcome(tmp_path / "b"))
    assert (tmp_path / "a" / "model.ckpt").read_bytes() == (tmp_path / "b" / "model.ckpt").read_bytes()
    count("runs repeated in another process", the_same_bytes=1, other=0)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="there is one core")
def test_one_thread_and_two(tmp_path, times, count):
    """Sums over a batch are split among threads, so the last bits may differ; sets and labels of a short run do not."""
    one, two = ([word if word != "1" else str(n) for word in TINY] for n in (1, 2))
    for name, tiny in (("one", one), ("two", two), ("two again", two)):
        in_process(command, *tiny, "--out", tmp_path / name)
    a, b = outcome(tmp_path / "one"), outcome(tmp_path / "two")
    assert_same(b, outcome(tmp_path / "two again"))
    assert torch.equal(a["last"]["method"]["S"], b["last"]["method"]["S"])
    for name, tensor in a["model"]["weights"].items():
        torch.testing.assert_close(b["model"]["weights"][name], tensor, rtol=1e-3, atol=1e-4)
    same = all(torch.equal(b["model"]["weights"][name], tensor) for name, tensor in a["model"]["weights"].items())
    count("runs with one thread and with two", the_same_bytes=int(same), the_same_to_1e_4=int(not same))


def held() -> tuple[int, int]:
    """(bytes in memory, open files) of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize(), len(os.listdir("/proc/self/fd"))


def long_run(folder: Path, epochs: int) -> None:
    """Watches itself while it trains; exit code 0 where nothing has grown."""
    from urrl import checkpoint

    seen = []

    def save_epoch(*arguments, good=checkpoint.save_epoch):
        good(*arguments)
        seen.append(held())

    checkpoint.save_epoch = save_epoch
    words = [str(epochs) if word == "3" else word for word in TINY]
    assert call(*words, "--out", folder).code == 0
    (first, files), (last, files_now) = seen[len(seen) // 4], seen[-1]
    Path(f"{folder}.txt").write_text(f"{first} {last} {files} {files_now}")
    sys.exit(0 if last - first < 4_000_000 and files_now == files else 1)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_long_run_does_not_grow(tmp_path, times, count):
    epochs = times(40, 200)
    in_process(long_run, tmp_path / "run", epochs)
    first, last, *_ = map(int, (tmp_path / "run.txt").read_text().split())
    assert (tmp_path / "run" / "last.ckpt").stat().st_size < 500_000
    count(f"bytes that a run grew by over the last three quarters of {epochs} epochs", bytes=last - first)
