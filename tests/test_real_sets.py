"""The sets that bring their own candidate sets: small files in the published formats, and the real ones where there."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat
from scipy.sparse import csc_matrix

from tests.runs import call
from tests.test_cli import assert_refused
from urrl.candidates import CandidateSets, make_unreliable
from urrl.data import FOLDS, Dataset, load, readers, split
from urrl.data.readers import ANNOTATORS, CIFAR10N, CIFAR10N_NPZ, read_table
from urrl.errors import UserError
from urrl.run import make_run, make_sets

REAL = os.environ.get("URRL_DATA")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("URRL_DATA", raising=False)
    monkeypatch.chdir(tmp_path)


def table(rows: int = 30, classes: int = 4) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    y = rng.integers(classes, size=rows)
    given = rng.random((rows, classes)) < 0.3
    given[np.arange(rows), y] = True
    return {"data": rng.normal(size=(rows, 3)), "target": np.eye(classes)[y].T, "partial_target": given.T * 1.0}


def test_tables_are_read_sparse_and_dense(tmp_path: Path) -> None:
    held = table()
    savemat("dense.mat", held)
    savemat("sparse.mat", {k: v if k == "data" else csc_matrix(v) for k, v in held.items()})
    for name in ("dense.mat", "sparse.mat"):
        x, y, candidates = read_table(tmp_path / name, 30)
        assert x.dtype == torch.float32 and np.allclose(x.numpy(), held["data"])
        assert y.tolist() == held["target"].argmax(0).tolist()
        assert (candidates.numpy() == (held["partial_target"].T > 0)).all()


@pytest.mark.parametrize("damage, words", [
    (lambda held: held["data"].__setitem__((3, 1), np.nan), "no number"),
    (lambda held: held["partial_target"].__setitem__((slice(None), 2), 0), "no candidate"),
    (lambda held: held["target"].__setitem__((slice(None), 2), 1), "not one true label"),
    (lambda held: held.update(data=held["data"][:-1]), "30 rows"),
    (lambda held: held.pop("target"), "cannot read"),
])  # fmt: skip
def test_damaged_tables_are_refused(tmp_path: Path, damage, words: str) -> None:
    held = table()
    damage(held)
    savemat("bad.mat", held)
    with pytest.raises(UserError, match=words):
        read_table(tmp_path / "bad.mat", 30)
    (tmp_path / "bad.mat").write_bytes(b"not a mat file at all" * 20)
    with pytest.raises(UserError, match="cannot read"):
        read_table(tmp_path / "bad.mat", 30)


@pytest.mark.parametrize("name", ["lost", "msrcv2", "birdsong"])
def test_a_missing_table_says_where_to_put_it(name: str) -> None:
    assert_refused(call("train", "--dataset", name), "--data-dir", "URRL_DATA", "palm.seu.edu.cn")


@pytest.fixture
def images(monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """CIFAR-10 with 6 training images and 2 test images."""
    x, y = torch.zeros(8, 3, 32, 32, dtype=torch.uint8), torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    small = Dataset("cifar10", x, y, readers.CIFAR10_CLASSES, official_test=2, augment="cifar")
    monkeypatch.setattr(readers, "cifar10", lambda data_dir: small)
    for source in ("CIFAR10N", "CIFAR10N_NPZ"):
        monkeypatch.setattr(readers, source, replace(getattr(readers, source), urls={}))
    return small


def annotated(images: Dataset) -> dict[str, np.ndarray]:
    y = images.truth[:6].numpy()
    return {"clean_label": y, ANNOTATORS[0]: y, ANNOTATORS[1]: (y + 1) % 10, ANNOTATORS[2]: (y + 1) % 10}


@pytest.mark.parametrize("file", [*CIFAR10N.files, *CIFAR10N_NPZ.files])
def test_cifar10n_is_the_union_of_three_annotators(images: Dataset, file: str) -> None:
    def save(held: dict[str, np.ndarray], path: str) -> None:
        torch.save(held, path) if path.endswith(".pt") else np.savez(path, **held)  # type: ignore[arg-type]

    save(annotated(images), file)
    dataset = load("cifar10n", Path("."))
    assert dataset.S is not None and dataset.S.shape == (8, 10)
    assert [row.nonzero().squeeze(1).tolist() for row in dataset.S[:6]] == [
        sorted({int(c), (int(c) + 1) % 10}) for c in images.truth[:6]
    ]
    with pytest.raises(UserError, match="'official'"):  # the test part has no candidate sets: it must not be trained on
        split(dataset, "paper")
    parts = split(dataset, "official")
    assert parts.test.truth.tolist() == [2, 6]
    _, sets = make_sets(dataset, "official", None, None, None, None, 0)
    assert torch.equal(sets.mask, dataset.S[parts.train.index])

    save({**annotated(images), "clean_label": images.truth[:6].numpy()[::-1].copy()}, file)
    with pytest.raises(UserError, match="another order"):
        load("cifar10n", Path("."))
    save({**annotated(images), ANNOTATORS[2]: np.full(6, 10)}, file)
    with pytest.raises(UserError, match="out of range"):
        load("cifar10n", Path("."))
    Path(file).write_bytes(b"nonsense")
    with pytest.raises(UserError, match="cannot read"):
        load("cifar10n", Path("."))


def test_a_pickle_that_would_run_code_is_refused(images: Dataset) -> None:
    class Evil:
        def __reduce__(self):
            return os.mkdir, ("harm",)

    torch.save({**annotated(images), "extra": Evil()}, "CIFAR-10_human.pt")
    with pytest.raises(UserError, match="cannot read"):
        load("cifar10n", Path("."))
    assert not Path("harm").exists()


def test_ten_folds_are_a_partition() -> None:
    dataset = load("digits")
    parts = [split(dataset, kind, seed=3) for kind in FOLDS]
    assert torch.cat([p.test.index for p in parts]).sort().values.tolist() == list(range(1797))
    for p in parts:
        assert torch.cat([p.train.index, p.test.index]).sort().values.tolist() == list(range(1797))
        assert abs(len(p.test) - 179.7) < 1 and len(p.val) == 0
    with pytest.raises(UserError, match="fold:9"):
        split(dataset, "fold:10")


def test_unreliability_is_put_into_real_sets() -> None:
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(8, (4000,), generator=rng)
    mask = torch.rand(4000, 8, generator=rng) < 0.2
    mask[torch.arange(4000), y] = True
    mask[:5] = True  # full sets have nothing to swap with
    mask[5:10] = False
    mask[torch.arange(5, 10), (y[5:10] + 1) % 8] = True  # wrong before
    own = CandidateSets(mask)
    assert torch.equal(make_unreliable(own, y, 0.0).mask, mask)
    swapped = make_unreliable(own, y, 0.4, seed=1)
    assert torch.equal(swapped.mask.sum(1), mask.sum(1)) and torch.equal(swapped.mask[:10], mask[:10])
    missing = ~swapped.mask[torch.arange(4000), y]
    assert abs(float(missing[10:].double().mean()) - 0.4) < 0.03
    assert torch.equal(swapped.mask[~missing], mask[~missing])
    assert torch.equal(make_unreliable(own, y, 0.4, seed=1).mask, swapped.mask)
    assert swapped.about == {"mu": 0.4, "convention": "swap", "seed": 1}
    with pytest.raises(UserError, match="mu"):
        make_unreliable(own, y, 1.5)


def test_rates_of_drawn_sets_do_not_apply_to_own_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    held = table()
    savemat("lost.mat", held)
    monkeypatch.setattr(readers, "LOST", replace(readers.LOST, files={"lost.mat": 30}))
    for wrong in (["--eta", "0.3"], ["--convention", "paper"]):
        assert_refused(call("train", "--dataset", "lost", "--data-dir", ".", *wrong), "own candidate sets")
    done = call(
        "generate", "--dataset", "lost", "--data-dir", ".", "--mu", "0.5", "--split", "fold:2", "--out", "s.npz"
    )
    assert done.code == 0
    assert CandidateSets.load(Path("s.npz")).about == {
        "mu": 0.5, "convention": "swap", "seed": 0, "dataset": "lost", "split": "fold:2", "subset": None,
    }  # fmt: skip


@pytest.mark.skipif(not REAL, reason="URRL_DATA does not name a folder with the real sets")
@pytest.mark.parametrize("name, shape, classes, size, missing", [
    ("lost", (1122, 108), 16, 2.23, 0.0),
    ("msrcv2", (1758, 48), 23, 3.16, 0.0),
    ("birdsong", (4998, 38), 13, 2.18, 0.0),
    ("cifar10n", (60000, 3, 32, 32), 10, 1.46, 0.0213),
])  # fmt: skip
def test_the_real_ones(name: str, shape: tuple[int, ...], classes: int, size: float, missing: float) -> None:
    assert REAL
    try:
        dataset = load(name, Path(REAL))
    except UserError as error:
        pytest.skip(str(error))
    assert dataset.S is not None
    assert (tuple(dataset.x.shape), len(dataset.classes)) == (shape, classes)
    given = dataset.S[: len(dataset.S) - dataset.official_test]
    y = dataset.truth[: len(given)]
    assert float(given.sum(1).double().mean()) == pytest.approx(size, abs=0.01)
    assert float((~given[torch.arange(len(y)), y]).double().mean()) == pytest.approx(missing, abs=1e-4)


def test_a_run_says_whose_sets_it_has() -> None:
    run, *_ = make_run("digits", "average", "fast", {}, subset=50)
    assert (run.eta, run.mu, run.convention) == (0.3, 0.3, "paper")
