"""`--tensorboard` writes what metrics.jsonl holds, once an epoch, also across a kill."""

import json
import sys

import pytest

from tests.runs import TINY, call, unfinished


def scalars(folder):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = reader.EventAccumulator(str(folder))
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_the_figures_of_every_epoch(tmp_path):
    pytest.importorskip("tensorboard", reason="the extra `tensorboard` is not installed")
    run = tmp_path / "run"
    assert call(*TINY, "--out", run, "--tensorboard").code == 0
    again = unfinished(run, tmp_path / "again")  # as if killed after its last epoch
    assert call(*TINY, "--out", again, "--tensorboard", "--resume").code == 0
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for folder in (run, again):
        written = scalars(folder / "tensorboard")
        for name in ("loss", "sup", "val_accuracy", "em_bound", "corrected"):
            assert written[name] == [(r["epoch"], pytest.approx(r[name], rel=1e-6)) for r in records]
        assert "epoch" not in written


def test_off_by_default(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert call(*TINY, "--out", tmp_path / "run").code == 0
    assert not (tmp_path / "run" / "tensorboard").exists()
    done = call(*TINY, "--out", tmp_path / "other", "--tensorboard")
    assert done.code == 2 and "urrl[tensorboard]" in done.err and not (tmp_path / "other").exists()
