"""The scikit-learn front door: scikit-learn's own battery, its tools around it, and what a fit leaves behind."""

import sys
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import urrl
from urrl import PartialLabelClassifier, URRLClassifier, candidate_score
from urrl.candidates import generate
from urrl.data.augment import Features
from urrl.errors import UserError
from urrl.methods import METHODS

EXPECTED = {
    "check_methods_subset_invariance": "asks for 1e-7; in float32 the size of a batch changes the rounding",
}


@parametrize_with_checks(
    [URRLClassifier(epochs=6), PartialLabelClassifier("proden", epochs=6)], expected_failed_checks=lambda _: EXPECTED
)
def test_scikit_learn_agrees(estimator, check):
    check(estimator)


def blobs(n=240, C=3, d=5, eta=0.3, mu=0.2, seed=0):
    """(features, candidate sets by name, true names)"""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % C
    x = 4 * rng.normal(size=(C, d))[y] + rng.normal(size=(n, d))
    S = generate(torch.from_numpy(y), C, eta, mu, seed=seed).mask.numpy()
    names = np.array(["cat", "dog", "lynx"])
    rows = np.empty(n, dtype=object)
    rows[:] = [frozenset(names[row].tolist()) for row in S]
    return x, rows, names[y]


@pytest.fixture(scope="module")
def fitted():
    x, rows, _ = blobs()
    return URRLClassifier(epochs=20, validation_fraction=0.1, random_state=0).fit(x, rows)


def test_what_a_fit_leaves(fitted):
    x, rows, y = blobs()
    assert fitted.classes_.tolist() == ["cat", "dog", "lynx"] and fitted.n_features_in_ == 5
    assert fitted.score(x, y) > 0.95 and (fitted.transduction_ == y).mean() > 0.95
    assert (fitted.predict(x) == fitted.classes_[fitted.predict_proba(x).argmax(1)]).all()
    np.testing.assert_allclose(fitted.predict_proba(x).sum(1), 1)
    np.testing.assert_allclose(np.linalg.norm(fitted.transform(x), axis=1), 1, rtol=1e-5)
    l, S = fitted.label_distributions_, fitted.candidates_
    np.testing.assert_allclose(l.sum(1), 1, rtol=1e-5)
    given = np.array([[name in row for name in fitted.classes_] for row in rows])
    assert (given <= S).all() and (l[~S] == 0).all()
    assert ((fitted.added_ >= 0) == (S & ~given)).all() and (S & ~given).any()  # some sets were corrected
    assert [record["epoch"] for record in fitted.history_] == list(range(20))
    merit = [record["val_likelihood"] for record in fitted.history_]
    assert merit[fitted.best_epoch_] == max(merit) and fitted.history_[0]["val_accuracy"] is None
    assert fitted.noise_.rows > 0.9 * len(x) and 0 < fitted.noise_.mu.low < 0.25


def test_the_same_seed_gives_the_same_model_and_leaves_torch_alone(fitted):
    x, rows, _ = blobs()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    again = clone(fitted).fit(x, rows)
    assert torch.equal(torch.get_rng_state(), state)
    assert (again.predict_proba(x) == fitted.predict_proba(x)).all()
    other = clone(fitted).set_params(random_state=1).fit(x, rows)
    assert (other.predict_proba(x) != fitted.predict_proba(x)).any()


def test_every_form_of_candidates_gives_the_same_model(fitted):
    x, rows, _ = blobs()
    strings = ["|".join(sorted(row)) for row in rows]
    for y in (strings, pd.Series(strings), [list(row) for row in rows]):
        assert (clone(fitted).fit(x, y).predict_proba(x) == fitted.predict_proba(x)).all()
    mask = np.array([[name in row for name in fitted.classes_] for row in rows])
    named = clone(fitted).set_params(classes=["cat", "dog", "lynx"]).fit(x, mask)
    assert (named.predict(x) == fitted.predict(x)).all()


def test_without_held_out_rows_the_last_epoch_is_taken():
    x, rows, _ = blobs(60)
    clf = URRLClassifier(epochs=3, random_state=0).fit(x, rows)
    assert clf.best_epoch_ == 2 and "val_likelihood" not in clf.history_[0]


def test_scores_of_candidates(fitted):
    x, rows, _ = blobs()
    predicted = fitted.predict(x)
    assert fitted.score(x, rows) == pytest.approx(np.mean([p in row for p, row in zip(predicted, rows)]))
    assert fitted.score(x[:2], ["wolf", "wolf|" + predicted[1]]) == 0.5  # a class that it does not know is never right
    assert candidate_score(fitted, x, rows) < 0
    shuffled = np.roll(x, 1, axis=0)
    assert candidate_score(fitted, x, rows) > candidate_score(fitted, shuffled, rows)


def test_who_has_no_label_may_be_of_any_class_that_was_learned(fitted):
    x, _, _ = blobs()
    said = fitted.predict(x[:5])
    assert fitted.score(x[:5], ["", "", "", "", said[4]]) == 1.0
    assert np.isfinite(candidate_score(fitted, x[:5], ["", "", "", "", "cat"]))


def test_label_issues(fitted):
    x, rows, y = blobs()
    names = [f"row {i}" for i in range(len(x))]
    issues = fitted.label_issues(x, names)
    assert sorted(issues["item"]) == sorted(names) and issues["evidence"].is_monotonic_decreasing
    assert [set(given) for given in issues["given"].sort_index()] == [set(row) for row in rows]
    missing = np.array([name not in row for name, row in zip(y, rows)])
    worst = issues.index[: missing.sum() // 2]
    assert missing[worst].mean() > 0.8 and (issues["suggested"][worst] == y[worst]).mean() > 0.8
    with pytest.raises(UserError, match="fitted on 240"):
        fitted.label_issues(x[:-1])


def test_pipeline_search_cross_validation_and_joblib(fitted, tmp_path):
    x, rows, _ = blobs(120)
    pipe = make_pipeline(StandardScaler(), URRLClassifier(epochs=4, random_state=0))
    search = GridSearchCV(pipe, {"urrlclassifier__phi": [0.6, 0.9]}, scoring=candidate_score_of_pipeline, cv=2)
    search.fit(x, rows)
    assert search.best_score_ < 0 and set(search.best_params_) == {"urrlclassifier__phi"}
    direct = GridSearchCV(URRLClassifier(epochs=4, random_state=0), {"phi": [0.6, 0.9]}, scoring=candidate_score, cv=2)
    assert np.isfinite(direct.fit(x, rows).cv_results_["mean_test_score"]).all()
    for candidates in (rows, ["|".join(row) for row in rows]):
        scores = cross_val_score(URRLClassifier(epochs=4), x, candidates, cv=KFold(3))
        assert scores.shape == (3,) and (scores > 0.4).all()
    joblib.dump(fitted, tmp_path / "model.joblib")
    loaded = joblib.load(tmp_path / "model.joblib")
    assert (loaded.predict_proba(x) == fitted.predict_proba(x)).all()


def candidate_score_of_pipeline(pipe, X, y):
    return candidate_score(pipe[-1], pipe[:-1].transform(X), y)


def test_unlabelled_items_and_ordinary_noisy_labels():
    x, rows, y = blobs(300)
    some = [row if i % 4 else frozenset() for i, row in enumerate(rows)]
    clf = URRLClassifier(epochs=12, random_state=0).fit(x, some)
    assert clf.candidates_[::4].all() and (clf.transduction_[::4] == y[::4]).mean() > 0.9
    rng = np.random.default_rng(0)
    noisy = np.where(rng.random(300) < 0.3, rng.permutation(y), y)
    assert URRLClassifier(epochs=12, random_state=0).fit(x, noisy).score(x, y) > 0.9


def test_images_paths_and_frames(tmp_path):
    digits = load_digits()
    images = (digits.images[:90] * 15).astype(np.uint8)
    clf = URRLClassifier(epochs=1, width=2, random_state=0).fit(images, digits.target[:90])
    assert clf.n_features_in_ == 64 and clf.predict(images).shape == (90,)
    assert (clf.predict_proba(images[..., None]) == clf.predict_proba(images)).all()
    paths = [tmp_path / f"{i}.png" for i in range(12)]
    for path, image in zip(paths, images):
        Image.fromarray(image).save(path)
    from_files = URRLClassifier(epochs=1, width=2, random_state=0).fit(paths, digits.target[:12])
    assert from_files.predict([str(path) for path in paths]).shape == (12,)
    column = type("Column", (list,), {})([Image.open(path) for path in paths])  # as Hugging Face has one
    for x in (pd.Series(paths), np.array(paths), np.array([str(path) for path in paths]), column):
        np.testing.assert_array_equal(from_files.predict(x), from_files.predict(paths))
    Image.fromarray(images[0]).resize((50, 40)).save(paths[0])  # of another size than those it was fitted on
    assert from_files.predict([paths[0]]).shape == (1,)
    with pytest.raises(UserError, match=r"takes items of \(1, 8, 8\), these are \(1, 9, 9\)"):
        clf.predict(np.zeros((2, 9, 9), np.uint8))
    frame = pd.DataFrame(digits.data[:90], columns=[f"pixel {i}" for i in range(64)])
    clf = URRLClassifier(epochs=1, random_state=0).fit(frame, digits.target[:90])
    assert clf.feature_names_in_[1] == "pixel 1"
    with pytest.raises(ValueError, match="feature names"):
        clf.predict(frame[frame.columns[::-1]])


@pytest.mark.parametrize("method", [name for name, kind in METHODS.items() if kind.bound != "upper"])
def test_every_method(method):
    x, rows, y = blobs(150)
    clf = PartialLabelClassifier(method, epochs=3, width=16, random_state=0).fit(x, rows)
    assert clf.score(x, y) > 0.5
    np.testing.assert_allclose(clf.label_distributions_.sum(1), 1, rtol=1e-4)


def test_odd_data_works():
    x, rows, _ = blobs(60)
    fast = URRLClassifier(epochs=2, width=8, random_state=0)
    for odd in (np.zeros_like(x), np.ones((60, 1)), np.hstack([x, np.full((60, 1), 3.0)])):
        assert np.isfinite(clone(fast).fit(odd, rows).predict_proba(odd)).all()
    everything = clone(fast).fit(x, np.ones((60, 3), dtype=bool))  # says nothing at all
    assert np.isfinite(everything.predict_proba(x)).all()
    assert clone(fast).fit(x[:3], ["a", "b", "c"]).predict(x[:3]).shape == (3,)  # fewer items than neighbours


def test_a_grey_image_among_colour_ones(tmp_path):
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{i}.png" for i in range(12)]
    for i, path in enumerate(paths):
        Image.fromarray(rng.integers(0, 256, (8, 8) if i % 2 else (8, 8, 3), np.uint8)).save(path)
    model = URRLClassifier(epochs=1, width=4).fit(paths, np.arange(12) % 3)
    assert len(model.predict(paths[1:2])) == 1
    with pytest.raises(UserError, match="uint8"):
        model.predict(torch.rand(2, 3, 8, 8))


def test_bad_settings_get_a_line():
    x, rows, _ = blobs(30)
    nothing: Any = None
    word: Any = "cifar"
    for clf, message in (
        (URRLClassifier(options={"no_such": 1}), "no_such: no such option"),
        (URRLClassifier(phi=2.0), "phi must be between 0 and 1"),
        (URRLClassifier(phi="high"), "phi is 'auto' or a number"),
        (URRLClassifier(phi=nothing), "phi is 'auto' or a number"),
        (URRLClassifier(options={"phi": 0.9}), "phi is a parameter of its own"),
        (URRLClassifier(epochs=1, options={"epochs": 3}), "epochs is given twice"),
        (URRLClassifier(validation_fraction=1.0), "validation_fraction is a share"),
        (URRLClassifier(validation_fraction=word), "validation_fraction is a share"),
        (URRLClassifier(augment=word), "the policy is for images"),
        (URRLClassifier(classes=["cat", "dog"]), "class 'lynx' is unknown"),
        (URRLClassifier(device="abacus"), "device 'abacus' cannot be used"),
        (PartialLabelClassifier("magic"), "method 'magic' is unknown"),
        (PartialLabelClassifier("supervised"), "learns from the true labels"),
        (URRLClassifier(augment=Features((0.0,), (1.0,))), "the policy is for 1 features"),
    ):
        with pytest.raises(ValueError, match=message):
            clf.fit(x, rows)
    with pytest.raises(UserError, match="30 items, but 29 candidate sets"):
        URRLClassifier(epochs=1).fit(x, rows[:-1])


def test_importing_the_package_stays_light():
    import subprocess

    code = "import sys, urrl; assert not {'torch', 'sklearn', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        urrl.nothing  # noqa: B018
