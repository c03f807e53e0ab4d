"""Exact neighbours: the same as sorting all similarities, self excluded by index."""

import pytest
import torch

from tests.tools import unit_rows
from urrl import knn


@pytest.mark.parametrize("n", [2, 3, 50, 700, 1001])
@pytest.mark.parametrize("k", [1, 5, 10, 200])  # 1 and 5 take the way through groups where n is large
def test_neighbours_are_those_of_a_full_sort(n, k, monkeypatch):
    monkeypatch.setattr(knn, "BUFFER", 4096)  # several chunks
    q = unit_rows(n, 6, torch.Generator().manual_seed(n))
    full = q @ q.T
    full.fill_diagonal_(-torch.inf)
    best = full.sort(1, descending=True).values[:, : min(k, n - 1)]
    seen = []
    for rows, similarity, neighbour in knn.cosine_topk(q, k):
        seen.append(rows)
        assert (neighbour != rows[:, None]).all()
        torch.testing.assert_close(similarity.sort(1, descending=True).values, best[rows])
        torch.testing.assert_close((q[rows, None] * q[neighbour]).sum(2), similarity)
        assert all(len(set(row.tolist())) == len(row) for row in neighbour)
    assert torch.equal(torch.cat(seen), torch.arange(n))


def test_duplicates_keep_self_out_and_each_other_in():
    q = torch.tensor([[1.0, 0.0]] * 3 + [[0.0, 1.0]])
    for rows, _, neighbour in knn.cosine_topk(q, 2):
        found = {int(r): set(row.tolist()) for r, row in zip(rows, neighbour)}
    assert found[0] == {1, 2} and found[1] == {0, 2} and found[2] == {0, 1}


def test_only_the_asked_rows():
    q = unit_rows(30, 4, torch.Generator().manual_seed(0))
    asked = torch.tensor([7, 3, 29])
    everything = {int(r): set(v.tolist()) for rows, _, near in knn.cosine_topk(q, 5) for r, v in zip(rows, near)}
    some = {int(r): set(v.tolist()) for rows, _, near in knn.cosine_topk(q, 5, asked) for r, v in zip(rows, near)}
    assert some == {int(r): everything[int(r)] for r in asked}
    assert sum(len(rows) for rows, _, _ in knn.cosine_topk(q, 5, torch.empty(0, dtype=torch.long))) == 0
