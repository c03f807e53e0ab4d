"""A run that is killed, damaged or stopped at any moment and resumed ends as if nothing had happened."""

import hashlib
import io
import itertools
import json
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from tests.runs import PAPER, RECORDER, TINY, assert_same, call, flip, outcome, tree, unfinished
from tests.test_cli import assert_refused
from urrl import checkpoint
from urrl.methods import Step
from urrl.methods.urrl import URRL
from urrl.predict import load_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = call(*TINY, "--out", folder)
    assert (done.code, done.err) == (0, "")
    assert json.loads((folder / "result.json").read_text())["corrected"] > 3  # S is a part of what must come back
    return folder


# ---- killed ----------------------------------------------------------------------------------------------

# Long enough to be caught in the middle: some tenths of a second an epoch.
SLOW = shlex.split("train --dataset digits --subset 400 --epochs 6 --threads 1")
SLOW += [*shlex.split("--set width=8 --set batch_size=16 --set k=5 --set phi=0.2"), *PAPER]


def start(*arguments: object) -> subprocess.Popen:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "urrl", *map(str, arguments)],
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def wait_for(process: subprocess.Popen, seen) -> None:
    deadline = time.monotonic() + 120
    while not seen():
        assert process.poll() is None, f"ended too early: {process.communicate()}"
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def lines(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def at_the_checkpoint(run):
    return (run / "last.ckpt").exists()


def in_the_middle_of_an_epoch(run):
    if lines(run) < 3:
        return False
    time.sleep(0.05)
    return True


def while_a_checkpoint_is_written(run):
    return lines(run) >= 2 and any(run.glob("last.ckpt.*.part"))


@pytest.mark.parametrize(
    ("ema", "moments"),
    [(0, [at_the_checkpoint, in_the_middle_of_an_epoch]), (0.9, [while_a_checkpoint_is_written])],
)
def test_killed_again_and_again(tmp_path, ema, moments):
    arguments = [*SLOW, "--set", f"ema={ema}", "--quiet"]
    for moment in moments:
        process = start(*arguments, "--out", tmp_path / "killed", "--resume")
        wait_for(process, lambda moment=moment: moment(tmp_path / "killed"))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "killed" / "result.json").exists()
    done = call(*arguments, "--out", tmp_path / "killed", "--resume")
    assert done.code == 0
    assert call(*arguments, "--out", tmp_path / "whole").code == 0
    assert_same(outcome(tmp_path / "killed"), outcome(tmp_path / "whole"))


def test_killed_between_any_two_file_operations(whole, tmp_path):
    with RECORDER.recording(tmp_path / "run") as copies:
        assert call(*TINY, "--out", tmp_path / "run").code == 0
    found = [sorted(tree(copy)) for copy in copies]
    assert found[0] == []  # from the empty folder ...
    assert any("previous.ckpt" in names and "last.ckpt" not in names for names in found)  # ... through all ...
    assert any(name.startswith("result.json.") for name in found[-2]) and "result.json" in found[-1]  # ... to the end
    assert len(copies) > 20
    expected = outcome(whole)
    for copy in copies:
        assert call(*TINY, "--out", copy, "--resume").code == 0, tree(copy).keys()
        assert_same(outcome(copy), expected, copy.name)


def test_sure_labels_go_on(tmp_path):
    """What the network said in former epochs, and which labels are sure, is in the checkpoint."""
    small = "train --dataset digits --subset 120 --epochs 6 --threads 1 --quiet --set width=2 --set batch_size=40"
    sure = shlex.split(f"{small} --set learn=sets --set alpha=0 --set voting=0.2 --set sure=0.5 --set sure_from=0.3")
    assert call(*sure, "--out", tmp_path / "whole").code == 0
    records = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all(record["sure"] > 0 for record in records[2:])
    run = unfinished(tmp_path / "whole", tmp_path / "run")
    (run / "previous.ckpt").replace(run / "last.ckpt")
    assert call(*sure, "--out", run, "--resume").code == 0
    assert_same(outcome(run), outcome(tmp_path / "whole"))


def test_a_scout_and_the_network_after_it_go_on(tmp_path, monkeypatch):
    """Stopped before the scout has told what it knows, after that, and near the end: the same bits. The model is of the
    whole width, from the best of its own epochs."""
    small = "train --dataset digits --subset 120 --epochs 6 --threads 1 --quiet --set batch_size=40"
    small += " --set scouting=0.6 --set again=0.3 --set learn=sets --set alpha=0 --set voting=0.2"
    small += " --set sure=0.5 --set sure_prior=0.5 --set sure_from=0.3"
    scouted = shlex.split(f"{small} --set width=4 --set scout=2")
    whole = tmp_path / "whole"
    assert call(*scouted, "--out", whole).code == 0
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [record["sure"] > 0 for record in records] == 2 * [False] + 4 * [True]
    costs = [b["flops"] - a["flops"] for a, b in itertools.pairwise(records)]
    assert min(costs[3:]) > 2 * max(costs[:3])
    result = json.loads((whole / "result.json").read_text())
    net, *_ = load_model(whole)
    assert result["best_epoch"] >= 4 and result["parameters"] == sum(p.numel() for p in net.parameters())
    assert net.classifier.in_features == 4 * 4  # of the fast net
    save = checkpoint.save_epoch
    for epochs in (2, 3, 4, 5):

        def save_and_stop(folder, state, epochs=epochs):
            save(folder, state)
            if state["state"]["epoch"] == epochs:
                raise KeyboardInterrupt

        run = tmp_path / str(epochs)
        monkeypatch.setattr(checkpoint, "save_epoch", save_and_stop)
        assert call(*scouted, "--out", run).code != 0
        monkeypatch.setattr(checkpoint, "save_epoch", save)
        assert call(*scouted, "--out", run, "--resume").code == 0
        assert_same(outcome(run), outcome(whole), str(epochs))


def test_one_epoch_has_no_room_for_a_scout(tmp_path):
    assert call(*TINY, "--epochs", "1", "--set", "scout=1", "--out", tmp_path / "run").code == 0
    assert load_model(tmp_path / "run")[0].classifier.in_features == 4 * 2


@pytest.mark.parametrize("wrong", ["scout=2 --set patience=3", "scout=2 --set again=0.5"])
def test_a_scout_takes_its_part_of_a_run(tmp_path, wrong):
    assert_refused(
        call(*TINY, "--out", tmp_path / "run", "--set", *wrong.split()), "scout takes patience=0 and an again below"
    )
    assert tree(tmp_path) == {}


def test_a_torn_line_of_metrics_is_mended(whole, tmp_path):
    run = unfinished(whole, tmp_path / "run")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 3, "lo')
    assert call(*TINY, "--out", run, "--resume").code == 0
    assert_same(outcome(run), outcome(whole))


# ---- damaged ---------------------------------------------------------------------------------------------


DAMAGES = {
    "half": lambda content: content[: len(content) // 2],
    "no_last_byte": lambda content: content[:-1],
    "empty": lambda content: b"",
    "shorter_than_its_hash": lambda content: content[:20],
    "bit_of_the_hash": flip(0),
    "bit_in_the_middle": flip(-1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_checkpoint_falls_back(whole, tmp_path, damage):
    run = unfinished(whole, tmp_path / "run")
    last = run / "last.ckpt"
    last.write_bytes(damage(last.read_bytes()))
    with RECORDER.recording(run) as copies:
        done = call(*TINY, "--out", run, "--resume")
    assert done.code == 0
    assert done.err.count("\n") == 1 and "last.ckpt: damaged" in done.err and "previous.ckpt" in done.err
    assert_same(outcome(run), outcome(whole))
    for copy in copies:  # a whole checkpoint is there at every moment
        assert checkpoint.load_epoch(copy, lambda message: None) is not None


def test_both_checkpoints_damaged(whole, tmp_path):
    run = unfinished(whole, tmp_path / "run")
    for name in ("last.ckpt", "previous.ckpt"):
        (run / name).write_bytes(flip(-1)((run / name).read_bytes()))
    before = tree(run)
    done = call(*TINY, "--out", run, "--resume")
    assert done.code == 2
    assert done.err.count("\n") == 1 and "damaged" in done.err
    assert tree(run) == before


@pytest.mark.parametrize("name", ["candidates.npz", "config.json"])
def test_other_damaged_files(whole, tmp_path, name):
    run = unfinished(whole, tmp_path / "run")
    (run / name).write_bytes((run / name).read_bytes()[:-30])
    before = tree(run)
    done = call(*TINY, "--out", run, "--resume")
    assert done.code == 2
    assert done.err.count("\n") == 1 and name in done.err
    assert tree(run) == before


# ---- malicious -------------------------------------------------------------------------------------------


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def as_zip(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def as_pickle(value: object) -> bytes:
    return pickle.dumps(value, protocol=2)


@pytest.mark.parametrize("pack", [as_zip, as_pickle])
def test_a_checkpoint_executes_nothing(whole, tmp_path, pack):
    payload = pack({"method": Evil(tmp_path / "executed")})
    crafted = hashlib.sha256(payload).digest() + payload

    run = unfinished(whole, tmp_path / "run")
    for name in ("last.ckpt", "previous.ckpt"):
        (run / name).write_bytes(crafted)
    done = call(*TINY, "--out", run, "--resume")
    assert done.code == 2
    assert done.err.count("\n") == 1 and "not a checkpoint" in done.err

    finished = Path(shutil.copytree(whole, tmp_path / "finished"))
    (finished / "model.ckpt").write_bytes(crafted)
    done = call("predict", finished, tmp_path / "images.npy", "--out", tmp_path / "labels.csv")
    assert done.code == 2
    assert done.err.count("\n") == 1 and "model.ckpt: not a checkpoint" in done.err

    assert not (tmp_path / "executed").exists()
    torch.load(io.BytesIO(payload), weights_only=False) if pack is as_zip else pickle.loads(payload)
    assert (tmp_path / "executed").exists()  # it would have


# ---- diverged --------------------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_keeps_the_last_good_epoch(whole, tmp_path, monkeypatch):
    calls = 0

    def poisoned(self, batch, good=URRL.loss):
        nonlocal calls
        calls += 1
        step = good(self, batch)
        return Step(step.total * float("nan"), step.terms, step.outs) if calls == 8 else step  # in the third epoch

    with monkeypatch.context() as patched:
        patched.setattr(URRL, "loss", poisoned)
        done = call(*TINY, "--out", tmp_path / "run")
    assert done.code == 1
    assert done.err.count("\n") == 1 and "loss became nan" in done.err
    state = checkpoint.load(tmp_path / "run" / "last.ckpt")
    assert state["state"]["epoch"] == 2 == lines(tmp_path / "run")
    assert all(tensor.isfinite().all() for tensor in state["method"].values())
    assert not (tmp_path / "run" / "result.json").exists()

    assert call(*TINY, "--out", tmp_path / "run", "--resume").code == 0
    assert_same(outcome(tmp_path / "run"), outcome(whole))


def test_a_learning_rate_that_diverges(tmp_path):
    for resume in ([], ["--resume"]):
        done = call(*TINY, "--set", "lr=1e30", "--out", tmp_path / "run", *resume)
        assert done.code == 1
        assert done.err.count("\n") == 1 and str(tmp_path / "run") in done.err
        assert "loss became" in done.err or "weights overflowed" in done.err
        assert not (tmp_path / "run" / "result.json").exists()


# ---- stopped by hand, and done ---------------------------------------------------------------------------


def test_ctrl_c_prints_the_command_that_goes_on(tmp_path):
    run = tmp_path / "a folder"  # a name that needs quoting
    process = start(*SLOW, "--out", run)
    wait_for(process, lambda: lines(run) >= 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert not any(run.glob("*.part")) and not (run / "result.json").exists()

    command = err.splitlines()[-1].partition("to go on: ")[2]
    program, *arguments = shlex.split(command)
    assert program == "urrl"
    done = call(*arguments)
    assert done.code == 0
    assert "epoch   1/6" not in done.err and "epoch   6/6" in done.err  # it went on, and did not start again
    assert call(*SLOW, "--out", tmp_path / "whole").code == 0
    assert_same(outcome(run), outcome(tmp_path / "whole"))


def test_ctrl_c_while_an_object_is_deleted(whole, tmp_path, monkeypatch):
    """Python drops it; we do not."""

    class Doomed:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.001)  # here it is raised, and ignored

    def refine(self, batch, step, good=URRL.refine):
        good(self, batch, step)
        Doomed()

    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore", pytest.PytestUnraisableExceptionWarning)
        patched.setattr(URRL, "refine", refine)
        done = call(*TINY, "--out", tmp_path / "run")
    assert done.code == 130 and "to go on" in done.err
    assert call(*TINY, "--out", tmp_path / "run", "--resume").code == 0
    assert_same(outcome(tmp_path / "run"), outcome(whole))


def test_a_finished_run_is_left_as_it_is(whole, tmp_path):
    run = Path(shutil.copytree(whole, tmp_path / "run"))
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    content = tree(run)
    done = call(*TINY, "--out", run, "--resume")
    assert (done.code, done.err) == (0, "")
    assert f"{json.loads((run / 'result.json').read_text())['test_accuracy']:.2%}" in done.out
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir()} == before
    assert tree(run) == content
