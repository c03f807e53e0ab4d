"""Runs on a user's own data: no true label anywhere, features and images in the forms that people have."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from urrl.candidates import generate
from urrl.data import hold_out
from urrl.data.augment import Features, find_policy, make_views, normalise
from urrl.data.own import as_items, data_sha256, from_arrays, own_policy, read_images
from urrl.errors import UserError
from urrl.evaluate import set_scores
from urrl.predict import load_model
from urrl.run import make_own_run, train

TINY = {"epochs": 3, "width": 8, "batch_size": 32}


def blobs(n=120, C=3, d=6, seed=0):
    rng = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % C
    x = 3 * torch.nn.functional.normalize(torch.randn(C, d, generator=rng), dim=1)[y] + torch.randn(n, d, generator=rng)
    return 100 * x + 7, generate(y, C, 0.3, 0.2, seed=seed).mask


@pytest.mark.parametrize("method", ["urrl", "proden"])
def test_a_run_without_truth(tmp_path, method):
    x, S = blobs()
    data = from_arrays(x.numpy(), S, ["a", "b", "c"])
    run, splits, sets = make_own_run(data, method, TINY, seed=0)
    assert (len(splits.train), len(splits.val), len(splits.test)) == (108, 12, 0)
    result = train(run, data, splits, sets, tmp_path / "run", device="cpu")
    assert result["test_accuracy"] is None and result["val_accuracy"] is None and result["label_accuracy"] is None
    assert 0 <= result["val_approximated"] <= result["val_covering"] <= 1
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result["best_epoch"] == max(range(3), key=lambda epoch: (records[epoch]["val_likelihood"], epoch))
    assert result["eta"] is None and run.data_sha256 == data_sha256(data)
    _, _, policy, classes, shape = load_model(tmp_path / "run")
    assert isinstance(policy, Features) and policy == data.augment
    assert classes == ["a", "b", "c"] and shape == (6,)
    with pytest.raises(UserError, match="learns from the true labels"):
        make_own_run(data, "supervised", TINY, seed=0)


def test_hold_out_is_seeded_and_may_be_nothing():
    x, S = blobs()
    data = from_arrays(x, S, "abc")
    assert torch.equal(hold_out(data, 0.1, 5).val.index, hold_out(data, 0.1, 5).val.index)
    assert not torch.equal(hold_out(data, 0.1, 5).val.index, hold_out(data, 0.1, 6).val.index)
    splits = hold_out(data, 0.25, 0)
    both = torch.cat([splits.train.index, splits.val.index])
    assert both.sort().values.tolist() == list(range(120))
    assert splits.val.S is not None and torch.equal(splits.val.S, S[splits.val.index])
    assert (len(hold_out(data, 0.0).val), len(hold_out(data, 1.0).train)) == (0, 2)


def test_set_scores_by_hand():
    f = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.1, 0.8], [0.9, 0.1, 0.0]])
    S = torch.tensor([[1, 1, 0], [1, 0, 1], [0, 0, 1], [1, 1, 1]]).bool()  # the last names every class: left out
    scores = set_scores(f, S)
    assert scores["covering"] == pytest.approx(2 / 3)
    assert scores["approximated"] == pytest.approx((0.6 / 0.9 + 0 + 1) / 3)
    assert scores["likelihood"] < 0
    assert set_scores(f[3:], S[3:]) == {"covering": 1.0, "approximated": 1.0, "likelihood": 0.0}


def test_features_are_scaled_and_their_views_are_perturbed():
    x, _ = blobs(2000)
    policy = own_policy(x)
    z = normalise(x, policy)
    torch.testing.assert_close(z.mean(0), torch.zeros(6), atol=1e-4, rtol=0)
    torch.testing.assert_close(z.std(0), torch.ones(6), atol=1e-2, rtol=0)
    views = make_views(x, ("plain", "weak", "strong", "weak2"), policy, torch.Generator().manual_seed(0))
    assert torch.equal(views["plain"], z) and not torch.equal(views["weak"], views["weak2"])
    again = make_views(x, ("plain", "weak"), policy, torch.Generator().manual_seed(0))
    assert torch.equal(again["weak"], views["weak"])
    moved = {name: float((views[name] - z).square().mean()) for name in ("weak", "strong")}
    assert 0 < moved["weak"] < moved["strong"]
    torch.testing.assert_close(views["strong"].mean(0), torch.zeros(6), atol=0.1, rtol=0)  # swaps keep the marginal
    assert find_policy(json.loads(json.dumps(vars(policy)))) == policy


def test_a_constant_feature_and_a_large_offset():
    x = torch.randn(50, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x[:, 1] = 5.0
    x[:, 2] += 1.7e9  # a time stamp: float32 would lose it
    z = normalise(x, own_policy(x))
    assert torch.isfinite(z).all() and (z[:, 1] == 0).all()
    assert float(z[:, 2].std()) == pytest.approx(1, abs=0.05)


def test_embeddings_keep_the_proportions_of_their_directions():
    q = torch.nn.functional.normalize(torch.randn(200, 8) * torch.tensor([5.0, 1, 1, 1, 1, 1, 1, 1]), dim=1)
    policy = own_policy(q)
    assert isinstance(policy, Features) and len(set(policy.std)) == 1
    assert len(set(own_policy(q * torch.arange(1, 201)[:, None]).std)) == 8


def test_forms_of_features():
    table = np.arange(12, dtype=np.float64).reshape(4, 3)
    for x in (table, table.astype(int), table.tolist(), torch.from_numpy(table), pd.DataFrame(table), list(table)):
        assert as_items(x).dtype == torch.float64 and as_items(x).tolist() == table.tolist()
    assert as_items(table.astype(np.float32)).dtype == torch.float32


def test_forms_of_images(tmp_path):
    rng = np.random.default_rng(0)
    grey, colour = rng.integers(0, 256, (2, 9, 10), np.uint8), rng.integers(0, 256, (2, 9, 10, 3), np.uint8)
    assert as_items(grey).shape == (2, 1, 9, 10) and as_items(colour).shape == (2, 3, 9, 10)
    assert torch.equal(as_items([Image.fromarray(a) for a in colour]), as_items(colour))
    paths = [tmp_path / "grey.png", tmp_path / "colour.png"]
    Image.fromarray(grey[0]).save(paths[0])
    Image.fromarray(colour[0]).save(paths[1])
    assert as_items(paths).shape == (2, 3, 9, 10) and as_items([str(paths[0])]).shape == (1, 1, 9, 10)
    assert read_images(paths[:1], (9, 12)).shape == (1, 12, 9)
    Image.fromarray(grey[0]).resize((80, 50)).save(paths[0])  # differs from the other in size
    assert as_items(paths).shape == (2, 3, 32, 32) and as_items([paths[0]]).shape == (1, 1, 32, 32)
    policy = own_policy(as_items(colour))
    assert find_policy(json.loads(json.dumps(vars(policy)))) == policy


def test_bad_items_get_a_line_with_their_row_or_file(tmp_path):
    bad = tmp_path / "bad.png"
    bad.write_bytes(b"\x89PNG\r\n\x1a\nno more")
    nan = np.zeros((4, 3))
    nan[2, 1] = np.nan
    for x, message in (
        (nan, "row 2: feature 1 is NaN"),
        ([[1, 2], [3]], r"row 1 has the shape \(1,\), row 0 has \(2,\)"),
        (np.zeros(4), "items are features"),
        ([], "the list is empty"),
        (np.zeros((0, 3)), "there are no features"),
        (pd.DataFrame({"a": ["x", "y"]}), "features are numbers"),
        ([tmp_path / "none.png"], "none.png: no such file"),
        ([bad], "bad.png: not an image"),
    ):
        with pytest.raises(UserError, match=message):
            as_items(x)
    with pytest.raises(UserError, match="4 items, but 3 candidate sets"):
        from_arrays(np.zeros((4, 2)), torch.ones(3, 2).bool(), "ab")
