"""The truth does not leak: scrambling the hidden labels of the training part changes nothing but the diagnostics."""

import dataclasses

import pytest
import torch

from tests.runs import assert_same, outcome
from tests.tools import PAPER_FORM
from urrl.methods import METHODS
from urrl.run import make_run, train

DIAGNOSTICS = ("corrected_precision", "true_in_set_before", "true_in_set_after", "label_accuracy")
SETTINGS: dict[str, object] = {"epochs": 3, "width": 2, "batch_size": 40}
OWN: dict[str, dict[str, object]] = {
    "urrl": {"k": 5, "phi": 0.2},
    "urrl, paper form": {**PAPER_FORM, "k": 5, "phi": 0.2},
}  # sets are corrected


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train_twice(name, folder):
    """(outcome with the true labels, outcome with scrambled ones, both on the same candidate sets)"""
    settings = SETTINGS | OWN.get(name, {})
    method = name.partition(",")[0]
    run, dataset, splits, sets = make_run("digits", method, "fast", settings, eta=0.3, mu=0.3, seed=0, subset=120)
    train(run, dataset, splits, sets, folder / "true", device="cpu")

    rng = torch.Generator().manual_seed(1)
    part, n = splits.train, len(dataset.classes)
    scrambled = (part.truth + torch.randint(1, n, part.truth.shape, generator=rng)) % n  # every label is another
    splits = dataclasses.replace(splits, train=dataclasses.replace(part, y=scrambled))
    dataset = dataclasses.replace(dataset, y=(dataset.truth + 1) % n)
    train(run, dataset, splits, sets, folder / "scrambled", device="cpu")
    return outcome(folder / "true"), outcome(folder / "scrambled")


def diagnostics(record):
    return {key: record.pop(key) for key in DIAGNOSTICS}


@pytest.mark.parametrize("name", [*(n for n, kind in METHODS.items() if kind.bound != "upper"), "urrl, paper form"])
def test_no_leak(name, tmp_path):
    true, scrambled = train_twice(name, tmp_path)
    # The diagnostics read the truth, so they must see it ...
    assert true["result"]["true_in_set_before"] > 0.7 > 0.5 > scrambled["result"]["true_in_set_before"]
    assert true["result"]["corrected"] > 0 or name not in OWN
    for run in (true, scrambled):
        for record in (run["result"], *run["metrics"]):
            diagnostics(record)
    # ... and nothing else may: weights, sets, label distributions, losses, validation and test accuracy.
    assert_same(true, scrambled)


def test_the_upper_bound_does_read_the_truth(tmp_path):
    """The test above can fail."""
    true, scrambled = train_twice("supervised", tmp_path)
    with pytest.raises(AssertionError, match="weights"):
        assert_same(true["model"], scrambled["model"])
