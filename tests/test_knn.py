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


def test_no_row_asked_has_no_neighbours():
    """As in an epoch in which no set can change; few vectors and many take different ways."""
    for n in (20, 4 * knn.GROUP * 3):
        q = unit_rows(n, 8, torch.Generator().manual_seed(0))
        (found,) = knn.cosine_topk(q, 3, torch.empty(0, dtype=torch.long))
        assert [tuple(t.shape) for t in found] == [(0,), (0, 3), (0, 3)]


def test_only_the_asked_rows():
    q = unit_rows(30, 4, torch.Generator().manual_seed(0))
    asked = torch.tensor([7, 3, 29])
    everything = {int(r): set(v.tolist()) for rows, _, near in knn.cosine_topk(q, 5) for r, v in zip(rows, near)}
    some = {int(r): set(v.tolist()) for rows, _, near in knn.cosine_topk(q, 5, asked) for r, v in zip(rows, near)}
    assert some == {int(r): everything[int(r)] for r in asked}
    assert sum(len(rows) for rows, _, _ in knn.cosine_topk(q, 5, torch.empty(0, dtype=torch.long))) == 0


def clusters(n, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(
        unit_rows(8, 16, rng)[torch.arange(n) % 8] + 0.2 * unit_rows(n, 16, rng), dim=1
    )


@pytest.mark.parametrize("k", [5, 150])  # 150: cells too small, whose rows are searched exactly
def test_the_index_finds_nearly_the_same_neighbours(k, monkeypatch):
    pytest.importorskip("faiss", reason="the index needs faiss")
    q = clusters(2000)
    rows = torch.arange(1, 2000, 3)
    exact = {int(r): set(v.tolist()) for part, _, near in knn.cosine_topk(q, k, rows) for r, v in zip(part, near)}
    monkeypatch.setattr(knn, "EXACT", 0)
    monkeypatch.setattr(knn, "_exact", knn._exact if k > 5 else None)
    hits, seen = 0, []
    for part, similarity, near in knn.cosine_topk(q, k, rows):
        seen.append(part)
        assert (near >= 0).all() and (near != part[:, None]).all() and near.shape == (len(part), k)
        torch.testing.assert_close((q[part, None] * q[near]).sum(2), similarity, atol=1e-5, rtol=1e-4)
        assert all(len(set(row.tolist())) == k for row in near)
        hits += sum(len(exact[int(r)] & set(v.tolist())) for r, v in zip(part, near))
    assert torch.equal(torch.cat(seen), rows)
    assert hits / (k * len(rows)) > 0.95
