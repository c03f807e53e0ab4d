"""Grids: what they hold, and that no kill, failure or second grid loses a run or does one twice."""

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.runs import assert_same, call, outcome, tree
from urrl import engines, paper
from urrl.bench import GRIDS, KEYS, View, paper_form, read_grid, run_cells
from urrl.cli import parser
from urrl.errors import UserError
from urrl.estimate import count_flops
from urrl.methods import METHODS
from urrl.run import make_run, train
from urrl.worker import work

TINY = """
dataset = "digits"
method = ["urrl", "proden"]
mu = [0.1, 0.3]
epochs = 2
subset = 60
[set]
width = 2
batch_size = 30
"""
# Long enough to be caught in the middle.
SLOW = TINY.replace("epochs = 2", "epochs = 5").replace("subset = 60", "subset = 200").replace("= 30", "= 10")
SLOW = SLOW.replace("mu = [0.1, 0.3]", "mu = [0.1, 0.2, 0.3]")


@pytest.fixture
def grid(tmp_path):
    def write(text=TINY):
        (tmp_path / "grid.toml").write_text(text)
        return str(tmp_path / "grid.toml")

    return write


def results(out: Path) -> dict:
    return {path.parent.name: outcome(path.parent) for path in out.glob("*/result.json")}


class Inline:
    """An engine without processes, where those are not what is tested."""

    def __init__(self, *_):
        pass

    def submit(self, job):
        return work(job)

    def poll(self, handle):
        return handle

    def close(self):
        pass


def bench(*arguments: object, engine=Inline):
    with mock.patch.dict(engines.ENGINES, local=engine):
        return call("bench", *arguments, "--threads", 1)


# ---- what a grid holds -----------------------------------------------------------------------------------


def test_settings_of_the_command_line_hold_for_every_cell(tmp_path):
    (tmp_path / "grid.toml").write_text('dataset = "digits"\nset.width = [4, 8]\nset.phi = [0.6, 0.7]')
    cells = read_grid(str(tmp_path / "grid.toml"), {}, None, {"width": 2})
    assert [(c.run.training.width, c.run.options.phi) for c in cells] == [(2, 0.6), (2, 0.7)]
    cells = read_grid("paper:phi", {"dataset": ["fmnist"], "seed": [0]}, None, {"width": 2})
    assert len(cells) == 5 and {c.run.training.width for c in cells} == {2}


@pytest.mark.parametrize("dataset", paper.ACCURACY)
def test_tables_of_the_paper(dataset):
    cells = read_grid(f"paper:{dataset}", {})
    assert len(cells) == 9 * 7 * 3 == len({cell.name for cell in cells})
    assert {(c.run.eta, c.run.mu) for c in cells} == set(paper.ACCURACY[dataset])
    assert {c.run.method for c in cells} == set(paper.METHODS) and {c.run.seed for c in cells} == {0, 1, 2}
    assert all(c.run.dataset == dataset and c.run.recipe == "fast" for c in cells)
    assert [c.run.seed for c in cells] == sorted(c.run.seed for c in cells)  # one seed of everything first
    given: dict[str, list] = {"method": ["urrl", "cc"], "seed": [0], "recipe": ["paper"], "epochs": [7], "subset": [90]}
    cells = read_grid(f"paper:{dataset}", given)
    assert len(cells) == 18
    assert all((c.run.recipe, c.run.training.epochs, c.run.subset) == ("paper", 7, 90) for c in cells)


@pytest.mark.parametrize("recipe", ["fast", "paper"])
def test_ablation_and_phi_are_about_the_paper_s_urrl(recipe):
    ablation = read_grid("paper:ablation", {"seed": [0], "recipe": [recipe]})
    phi = read_grid("paper:phi", {"seed": [0], "recipe": [recipe]})
    assert len(ablation) == 2 * 4 and len(phi) == 2 * 5
    for dataset, (eta, mu) in paper.STUDIED.items():
        rows = [c.run for c in ablation if c.run.dataset == dataset]
        assert [(r.options.use_m, r.options.use_cr, r.options.use_correction) for r in rows] == [
            row[1:4] for row in paper.ABLATION]  # fmt: skip
        values = [c.run for c in phi if c.run.dataset == dataset]
        assert [r.options.phi for r in values] == list(paper.PHI)
        assert all((r.eta, r.mu) == (eta, mu) and r.options.one_view == "" for r in rows + values)
        assert {r.training.net for r in rows} == {"lean" if recipe == "fast" else "preact"}
    shared = {c.name for c in ablation} & {c.name for c in phi}
    assert len(shared) == 2  # the whole URRL at the paper's phi is trained once for both
    assert paper_form("cifar100")["phi"] == 0.8 and paper_form("cifar10")["phi"] == 0.7


def test_studies_on_other_sets_and_methods():
    cells = read_grid("paper:ablation", {"dataset": ["fmnist"]})
    assert {c.run.dataset for c in cells} == {"fmnist"}
    views = {(t.again, t.scout, t.cutout, t.autoaugment) for t in (c.run.training for c in cells)}
    assert views == {(0.0, 0, -1, False)}  # the paper's, where the recipe has others
    with pytest.raises(UserError, match="has no data set 'digits'"):
        read_grid("paper:phi", {"dataset": ["digits"]})
    with pytest.raises(UserError, match="no other method"):
        read_grid("paper:phi", {"method": ["cc"]})
    tsne = read_grid("paper:tsne", {})
    assert [c.run.method for c in tsne] == list(paper.METHODS)
    assert {(c.run.dataset, c.run.eta, c.run.mu, c.run.seed) for c in tsne} == {("cifar10", 0.3, 0.3, 0)}


def test_a_name_tells_runs_apart_by_their_whole_config(grid):
    def names(text):
        return {cell.name for cell in read_grid(grid(text), {})}

    assert len(names(TINY)) == 4 and all(name.startswith("digits-") for name in names(TINY))
    assert names(TINY) == names(TINY)
    for other in (TINY.replace("width = 2", "width = 3"), TINY.replace("epochs = 2", "epochs = 3"), TINY + "lr = 0.01"):
        assert not names(TINY) & names(other)


def test_lists_multiply_out_and_the_command_line_goes_over_the_file(grid):
    text = 'dataset = "digits"\nmethod = "CR-DPLL"\neta = [0, 0.5]\nset.lr = [0.1, 0.2]\n'
    cells = read_grid(grid(text), {"seed": [0, 1, 2], "epochs": [4]})
    assert len(cells) == 2 * 2 * 3
    assert {(c.run.method, c.run.training.epochs, c.run.mu) for c in cells} == {("cr_dpll", 4, 0.3)}
    assert {(c.run.eta, c.run.training.lr) for c in cells} == {(0.0, 0.1), (0.0, 0.2), (0.5, 0.1), (0.5, 0.2)}


def test_saved_candidate_sets(grid, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("generate", "--dataset", "digits", "--eta", 0.4, "--mu", 0.2, "--out", "sets.npz").code == 0
    (cell,) = read_grid(grid('dataset = "digits"\ncandidates = "sets.npz"'), {})
    assert (cell.run.eta, cell.run.mu) == (0.4, 0.2) and cell.run.sets_sha256
    assert cell.arguments["candidates"] == str(tmp_path / "sets.npz")
    done = bench(grid('dataset = "digits"\ncandidates = "other.npz"'), "--out", tmp_path / "out")
    assert done.code == 2 and "other.npz: no such file" in done.err


def test_the_keys_of_a_file_are_the_options_of_train():
    commands: Any = parser()._subparsers
    options = {action.dest for action in commands._group_actions[0].choices["train"]._actions}
    machine = {"help", "out", "resume", "data_dir", "device", "threads", "quiet", "tensorboard"}
    own_data = {"images", "table", "features", "npz", "classes", "skip_bad", "stream"}  # a grid has data sets by name
    assert options - machine - own_data == set(KEYS) | {"settings"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('dataset = "digits"\n\ncolour = 1', ["line 3", "'colour' is unknown", "dataset"]),
        ('dataset = "digits"\neta = ["much"]', ["line 2", "eta takes numbers, not 'much'"]),
        ('dataset = "digits"\nseed = 1.5', ["line 2", "seed takes whole numbers, not 1.5"]),
        ('dataset = "digits"\nseed = true', ["line 2", "seed takes whole numbers, not True"]),
        ('dataset = "digits"\nmu = []', ["line 2", "empty list"]),
        ('dataset = "digits"\nmethod = ["urrl", "magic"]', ["line 2", "method 'magic' is unknown"]),
        ('dataset = "digits"\nrecipe = "slow"', ["line 2", "recipe 'slow' is unknown"]),
        ('dataset = "digits"\n[set]\nwidth = 2\nphy = 1', ["line 4", "phy: no such option"]),
        ('dataset = "digits"\nset.phi = [0.5, 2]', ["line 2", "option phi must be between 0 and 1, not 2"]),
        ('dataset = "digits"\nset = 3', ["line 2", "set is a table"]),
        ('dataset = "digits"\nepochs = 2\nset.epochs = 3', ["line 2", "epochs is given twice"]),
        ('dataset = "digits"\nmu = 0.1 0.2', ["line 2"]),
        ("mu = 0.1", ["there is no dataset"]),
        ('dataset = "digits"\nmu = 1.5', ["mu is a probability"]),
        ('dataset = "nowhere"', ["unknown dataset 'nowhere'"]),
        ('dataset = "digits"\nsubset = 0', ["subset must be from 1"]),
        ('dataset = "digits"\nsplit = "odd"', ["unknown split 'odd'"]),
    ],
)
def test_bad_grids_are_refused_with_the_line_and_nothing_is_written(grid, tmp_path, text, words):
    done = bench(grid(text), "--out", tmp_path / "out")
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1, done
    assert done.err.startswith("urrl: ")
    for word in words:
        assert word in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["paper:mnist"], ", ".join(GRIDS)),
        (["nowhere.toml"], "neither a file nor"),
        (["paper:fmnist", "--jobs", "0"], "--jobs"),
        (["paper:fmnist", "--seeds", "0"], "--seeds"),
        (["paper:fmnist", "--epochs", "0"], "epochs must be"),
        (["paper:fmnist", "--methods", ""], "method"),
        (["paper:phi", "--datasets", ""], "data set"),
        (["paper:fmnist", "--methods", "magic"], "magic"),
        (["paper:fmnist", "--engine", "steam"], "local, slurm, ray"),
        (["paper:fmnist", "--recipe", "slow"], "slow"),
        (["paper:fmnist", "--data-dir", "nowhere"], "nowhere"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, arguments, word):
    done = bench(*arguments, "--out", tmp_path / "out")
    assert done.code == 2 and word in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_dry_run(grid, tmp_path):
    done = bench(grid(), "--out", tmp_path / "out", "--dry-run", "--jobs", 2)
    assert done.code == 0, done.err
    assert (
        done.out.count("  to do\n") == 4
        and "4 cells (4 to do); left: " in done.out
        and "2 jobs of 1 thread" in done.out
    )
    assert not (tmp_path / "out").exists()


def test_the_estimate_of_the_operations_is_near(finished):
    """Without a finished run to look at: within a third of what the run counted."""
    for cell in read_grid(str(finished / "grid.toml"), {})[:2]:
        counted = json.loads((finished / "out" / cell.name / "result.json").read_text())["train_flops"]
        assert count_flops(cell) == pytest.approx(counted, rel=0.33)


def test_the_estimate_of_a_run_with_a_scout(tmp_path):
    """A scout's epochs cost a fraction of the others; as many of each as the run has."""
    grid = tmp_path / "grid.toml"
    grid.write_text(
        'dataset = "digits"\nepochs = 5\nsubset = 200\n[set]\nscout = 2\nscouting = 0.8\nwidth = 12\nbatch_size = 16\n'
    )
    (cell,) = read_grid(str(grid), {})
    run, dataset, splits, sets = make_run(**cell.arguments)
    counted = train(run, dataset, splits, sets, tmp_path / "run", device="cpu")["train_flops"]
    assert count_flops(cell) == pytest.approx(counted, rel=0.33)


def test_all_methods(monkeypatch, tmp_path):
    seen: list[list[str]] = []
    monkeypatch.setattr("urrl.bench.check_data", lambda cells: seen.append([cell.run.method for cell in cells]))
    monkeypatch.setattr("urrl.estimate.dry_run", lambda *_: None)
    assert bench("paper:tsne", "--methods", "all", "--out", tmp_path / "out", "--dry-run").code == 0
    assert seen == [list(METHODS)]


# ---- doing it --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A grid that nothing disturbed, with two jobs."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "grid.toml").write_text(TINY)
    done = bench(folder / "grid.toml", "--out", folder / "out", "--jobs", 2, engine=engines.Local)
    assert done.code == 0, done
    assert "4 cells: 4 done (0 of them before)" in done.out
    assert [line.split()[0] for line in done.err.splitlines()] == ["1/4", "2/4", "3/4", "4/4"]
    return folder


def test_a_run_of_a_grid_is_what_train_makes(finished, tmp_path):
    arguments = "train --dataset digits --method proden --mu 0.1 --epochs 2 --subset 60 --threads 1 --quiet"
    settings = ["--set", "width=2", "--set", "batch_size=30"]
    assert call(*arguments.split(), *settings, "--out", tmp_path / "run").code == 0
    (same,) = (finished / "out").glob("digits-proden-eta0.3-mu0.1-seed0-*")
    assert_same(outcome(tmp_path / "run"), outcome(same))


def test_what_is_done_is_skipped(finished):
    before = tree(finished / "out")
    done = bench(finished / "grid.toml", "--out", finished / "out")
    assert done.code == 0 and "4 done (4 of them before)" in done.out and done.err == ""
    assert tree(finished / "out") == before


def test_a_grid_grows(finished, tmp_path):
    out = tmp_path / "out"
    subprocess.run(["cp", "-r", str(finished / "out"), str(out)], check=True)
    before = tree(out)
    (tmp_path / "more.toml").write_text(TINY + "lr = [0.1, 0.01]")
    done = bench(tmp_path / "more.toml", "--out", out, "--dry-run")
    assert "8 cells (4 done, 4 to do)" in done.out or "8 cells (4 to do, 4 done)" in done.out
    assert tree(out) == before


def test_failures_are_kept_and_retried_only_when_asked(grid, tmp_path):
    out = tmp_path / "out"
    path = grid(TINY.replace("width = 2", "width = 2\nlr = [0.1, 1e30]").replace("mu = [0.1, 0.3]", ""))
    first = bench(path, "--out", out)
    assert first.code == 1 and "2 done" in first.out and "2 failed" in first.out
    errors = sorted(out.glob("*/error.json"))
    assert len(errors) == 2 and not any((e.parent / "result.json").exists() for e in errors)
    said = json.loads(errors[0].read_text())
    assert said["error"].startswith("Diverged: ") and "\n" not in said["error"] and said["error"] in first.err
    assert "Traceback" in (out / said["log"]).read_text()

    second = bench(path, "--out", out)  # left alone
    assert second.code == 1 and "2 done (2 of them before), 2 failed" in second.out
    assert [e.stat().st_mtime_ns for e in errors] == [e.stat().st_mtime_ns for e in sorted(out.glob("*/error.json"))]
    stamps = [e.stat().st_mtime_ns for e in errors]
    third = bench(path, "--out", out, "--retry-failed")
    assert third.code == 1 and all(e.stat().st_mtime_ns > stamp for e, stamp in zip(errors, stamps))


def test_a_failure_before_the_folder_was_made_can_be_retried(finished, tmp_path, monkeypatch):
    """error.json alone must not make the folder a stranger's."""
    out = tmp_path / "out"
    cell = read_grid(str(finished / "grid.toml"), {})[0]
    (out / cell.name).mkdir(parents=True)
    (out / cell.name / "error.json").write_text('{"error": "OSError: no space", "log": "x"}')
    (tmp_path / "one.toml").write_text(TINY.replace('["urrl", "proden"]', '"urrl"').replace("[0.1, 0.3]", "0.1"))
    assert bench(tmp_path / "one.toml", "--out", out).code == 1
    assert bench(tmp_path / "one.toml", "--out", out, "--retry-failed").code == 0
    assert_same(outcome(out / cell.name), outcome(finished / "out" / cell.name))


# ---- kills -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    """The undisturbed grid that the killed one is compared with."""
    folder = tmp_path_factory.mktemp("slow")
    (folder / "grid.toml").write_text(SLOW)
    assert bench(folder / "grid.toml", "--out", folder / "out").code == 0
    assert len(results(folder / "out")) == 6
    return folder


def start(path: Path, out: Path, jobs: int = 2) -> subprocess.Popen:
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "urrl", "bench", str(path), "--out", str(out), "--threads", "1"]
    return subprocess.Popen(
        [*command, "--jobs", str(jobs)], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def workers(process: subprocess.Popen) -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def lines(out: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in out.glob("*/metrics.jsonl"))


def wait_until(seen, seconds=100.0) -> None:
    deadline = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def stamps(out: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in out.glob("*/result.json")}


def test_killed_grids_and_workers_lose_nothing_and_do_nothing_twice(slow, tmp_path):
    out, done = tmp_path / "out", dict[str, int]()
    for epochs in (3, 12):
        process = start(slow / "grid.toml", out)
        wait_until(lambda epochs=epochs, process=process: lines(out) >= epochs or process.poll() is not None)
        pids = workers(process)
        process.kill()
        process.communicate()
        assert len(pids) == 2
        wait_until(lambda pids=pids: not any(map(alive, pids)), 20)  # nobody goes on alone
        assert all(stamps(out).get(path) == stamp for path, stamp in done.items())
        done = stamps(out)
    assert 0 < len(done) < 6
    process, before = start(slow / "grid.toml", out), lines(out)
    wait_until(lambda: lines(out) > before or process.poll() is not None)
    os.kill(workers(process)[0], signal.SIGKILL)  # a worker this time: the grid goes on
    text, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert errors.count("killed by signal 9; it goes on from its last epoch later") == 1
    assert f"6 done ({len(done)} of them before)" in text
    assert all(stamps(out)[path] == stamp for path, stamp in done.items())
    assert_same(results(out), results(slow / "out"))


def test_ctrl_c_ends_the_workers_and_says_how_to_go_on(slow, tmp_path):
    out = tmp_path / "out"
    process = start(slow / "grid.toml", out)
    wait_until(lambda: lines(out) >= 1 or process.poll() is not None)
    pids = workers(process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "to go on: urrl bench" in errors and "Traceback" not in errors
    assert len(pids) == 2 and not any(map(alive, pids))


def test_two_grids_in_one_folder_share_the_work(finished, tmp_path):
    out = tmp_path / "out"
    both = [start(finished / "grid.toml", out, jobs=1) for _ in range(2)]
    errors = []
    for process in both:
        text, said = process.communicate(timeout=250)
        assert process.returncode == 0 and "4 done" in text
        errors += said.splitlines()
    trained = [line.split()[1] for line in errors if "by another process" not in line]
    assert sorted(trained) == sorted(path.parent.name for path in out.glob("*/result.json"))
    assert_same(results(out), results(finished / "out"))


def test_a_worker_that_dies_again_and_again_is_left(finished, tmp_path, capsys):
    class Deadly:
        submitted = 0

        def submit(self, job):
            self.submitted += 1

        def poll(self, handle):
            return "died: killed by signal 9"

        def close(self):
            self.closed = True

    cells = read_grid(str(finished / "grid.toml"), {})[:1]
    engine = Deadly()
    with View(cells, tmp_path, quiet=False) as view:
        run_cells(cells, tmp_path, engine, 1, view, lambda cell: {})
    assert engine.submitted == 3 and engine.closed
    assert capsys.readouterr().err.splitlines()[-1].endswith("left as it is")


# ---- the view on a terminal ------------------------------------------------------------------------------


def test_bars_on_a_terminal(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("FORCE_COLOR", "1")
    cells = read_grid(str(finished / "grid.toml"), {})
    with View(cells, finished / "out", quiet=False) as view:
        view.update(cells[:2])
        view.ended(cells[0], "done")
        view.update(cells[1:3])
        view.bar.refresh()
    text = capsys.readouterr().err
    assert "1/4 cells" in text and cells[1].name in text and "epoch 2/2" in text and "left" in text


# ---- the other engines -----------------------------------------------------------------------------------


def through(make_engine, finished, out) -> None:
    """The grid by another engine gives the same results."""
    cells = read_grid(str(finished / "grid.toml"), {"method": ["urrl"]})
    job = {"out": str(out), "threads": 1, "device": "cpu"}
    with View(cells, out, quiet=True) as view:
        run_cells(cells, out, make_engine(out, 1, "cpu"), 2, view,
                  lambda cell: {**job, "name": cell.name, "arguments": cell.arguments})  # fmt: skip
    for cell in cells:
        assert_same(outcome(out / cell.name), outcome(finished / "out" / cell.name))


def test_submitit_gives_the_same(finished, tmp_path, monkeypatch):
    pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    through(partial(engines.Slurm, cluster="local"), finished, tmp_path / "out")


def test_ray_gives_the_same(finished, tmp_path, monkeypatch):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    through(engines.Ray, finished, tmp_path / "out")
    assert not list(home.rglob("*token*"))


@pytest.mark.parametrize(("engine", "extra"), [("slurm", "urrl[slurm]"), ("ray", "urrl[ray]")])
def test_missing_extras_are_named(grid, tmp_path, monkeypatch, engine, extra):
    monkeypatch.setitem(sys.modules, {"slurm": "submitit", "ray": "ray"}[engine], None)
    done = bench(grid(), "--out", tmp_path / "out", "--engine", engine)
    assert done.code == 2 and extra in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_no_extra_is_imported_unless_asked_for():
    code = "import sys, urrl.bench, urrl.worker; print(*sys.modules)"
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"submitit", "ray", "openTSNE", "tensorboard", "rich"}
