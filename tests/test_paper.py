"""The paper's numbers, against sums and single values typed from the print a second time."""

import pytest

from urrl import paper
from urrl.methods import METHODS

SUMS = {  # over the nine cells: mean and std of each method, in the paper's order
    "cifar10": [829.99, 427.02, 782.76, 773.47, 582.54, 550.77, 581.24, 5.37, 10.80, 2.69, 3.29, 4.17, 4.52, 4.66],
    "cifar100": [589.49, 159.98, 510.91, 542.67, 302.82, 258.43, 323.12, 3.74, 8.37, 8.86, 3.69, 6.11, 4.51, 4.49],
    "fmnist": [837.41, 639.56, 816.90, 828.18, 767.48, 753.10, 744.04, 1.55, 16.93, 1.92, 2.15, 5.39, 8.54, 12.89],
}
CELLS = {
    "cifar10": ([0.1, 0.3, 0.5], [0.1, 0.2, 0.3]),
    "cifar100": ([0.01, 0.05, 0.1], [0.1, 0.2, 0.3]),
    "fmnist": ([0.1, 0.3, 0.5], [0.1, 0.3, 0.5]),
}


@pytest.mark.parametrize("dataset", SUMS)
def test_accuracy_tables(dataset):
    table = paper.ACCURACY[dataset]
    etas, mus = CELLS[dataset]
    assert list(table) == [(eta, mu) for eta in etas for mu in mus]
    rows = list(table.values())
    assert all(tuple(row) == paper.METHODS for row in rows)
    means = [sum(row[m].mean for row in rows) for m in paper.METHODS]
    stds = [sum(row[m].std for row in rows) for m in paper.METHODS]
    assert [round(v, 2) for v in means + stds] == SUMS[dataset]
    assert all(max(row, key=lambda m: row[m].mean) == "urrl" for row in rows)  # all of its cells are bold


@pytest.mark.parametrize(
    ("dataset", "eta", "mu", "method", "value"),
    [
        ("cifar10", 0.1, 0.1, "urrl", (92.26, 0.53)),
        ("cifar10", 0.5, 0.3, "cc", (50.01, 0.09)),
        ("cifar10", 0.3, 0.2, "cr_dpll", (85.64, 0.18)),
        ("cifar100", 0.1, 0.3, "rabs", (9.45, 0.62)),
        ("cifar100", 0.05, 0.3, "pico", (55.81, 0.51)),
        ("fmnist", 0.5, 0.5, "proden", (78.37, 0.63)),
        ("fmnist", 0.3, 0.5, "rc", (79.32, 1.56)),
        ("fmnist", 0.3, 0.3, "urrl", (93.17, 0.19)),
    ],
)
def test_single_values(dataset, eta, mu, method, value):
    assert paper.ACCURACY[dataset][eta, mu][method] == value


def test_ablation():
    assert [row[1:4] for row in paper.ABLATION] == [
        (True, True, True), (True, True, False), (True, False, False), (False, False, False)]  # fmt: skip
    assert [row.accuracy["cifar10"].mean for row in paper.ABLATION] == [91.68, 88.96, 81.50, 75.65]
    assert [row.accuracy["cifar100"].mean for row in paper.ABLATION] == [62.97, 62.47, 54.58, 41.66]
    assert [row.accuracy["cifar10"].std for row in paper.ABLATION] == [0.45, 0.39, 0.59, 0.64]
    assert [row.accuracy["cifar100"].std for row in paper.ABLATION] == [0.28, 0.57, 0.62, 0.23]


def test_phi():
    assert list(paper.PHI) == [0.5, 0.6, 0.7, 0.8, 0.9]
    assert [row["cifar10"] for row in paper.PHI.values()] == [
        (82.46, 2.41), (90.25, 0.54), (91.68, 0.45), (89.41, 0.35), (88.91, 0.52)]  # fmt: skip
    assert [row["cifar100"] for row in paper.PHI.values()] == [
        (45.48, 0.86), (52.31, 0.47), (59.51, 0.07), (62.97, 0.28), (62.54, 0.18)]  # fmt: skip


def test_the_tables_agree_where_they_show_the_same_run():
    """URRL at its best phi, the whole URRL of the ablation and its cell of table 1 are one figure."""
    for dataset, cell in paper.STUDIED.items():
        best = max((row[dataset] for row in paper.PHI.values()), key=lambda v: v.mean)
        assert best == paper.ABLATION[0].accuracy[dataset] == paper.ACCURACY[dataset][cell]["urrl"]


def test_methods_are_ours():
    assert set(paper.METHODS) <= set(METHODS)
