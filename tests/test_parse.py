"""Candidate sets in every form that people have them, and one line that names the row where they are wrong."""

import re
import time

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch

from urrl.candidates import CandidateSets
from urrl.errors import UserError
from urrl.parse import from_annotations, parse_candidates

WANTED = [[True, False, True], [False, True, False], [True, True, True]]  # of cat, dog, lynx; the last has no label


def object_array(rows):
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    return array


ROWS = [{"cat", "lynx"}, {"dog"}, set()]
NAMED = {
    "sets": ROWS,
    "lists": [["lynx", "cat"], ["dog"], []],
    "tuples": (("cat", "lynx"), ("dog",), ()),
    "arrays": [np.array(["cat", "lynx"]), np.array(["dog"]), np.array([], dtype=str)],
    "a label and a list": [["cat", "lynx"], "dog", None],
    "object array": object_array(ROWS),
    "strings": ["cat|lynx", "dog", ""],
    "strings with spaces": [" lynx | cat", "dog ", " "],
    "string array": np.array(["cat|lynx", "dog", ""]),
    "column of strings": pd.Series(["cat|lynx", "dog", None]),
    "column of lists": pd.Series([["cat", "lynx"], ["dog"], []]),
    "frame": pd.DataFrame({"candidates": ["cat|lynx", "dog", float("nan")]}),
    "generator": (row for row in ROWS),
}
MASKS = {
    "bool": np.array([[1, 0, 1], [0, 1, 0], [0, 0, 0]], dtype=bool),
    "zeros and ones": np.array([[1, 0, 1], [0, 1, 0], [0, 0, 0]]),
    "sparse": scipy.sparse.csr_array(np.array([[1, 0, 1], [0, 1, 0], [0, 0, 0]])),
    "coordinates": scipy.sparse.coo_matrix(np.array([[1, 0, 1], [0, 1, 0], [0, 0, 0]])),
    "tensor": torch.tensor([[1, 0, 1], [0, 1, 0], [0, 0, 0]], dtype=torch.bool),
    "frame": pd.DataFrame([[1, 0, 1], [0, 1, 0], [0, 0, 0]]),
    "sets": CandidateSets(torch.tensor(WANTED)),
}


@pytest.mark.parametrize("form", NAMED)
def test_names(form):
    sets, classes = parse_candidates(NAMED[form])
    assert classes == ["cat", "dog", "lynx"] and all(type(name) is str for name in classes)
    assert sets.mask.tolist() == WANTED
    assert sets.mask.all(1).tolist() == [False, False, True]


@pytest.mark.parametrize("form", MASKS)
def test_masks(form):
    sets, classes = parse_candidates(MASKS[form])
    assert classes == [0, 1, 2] and sets.mask.tolist() == WANTED
    assert parse_candidates(MASKS[form], ["cat", "dog", "lynx"])[1] == ["cat", "dog", "lynx"]
    with pytest.raises(UserError, match="3 columns, but 2 classes"):
        parse_candidates(MASKS[form], ["cat", "dog"])


def test_polars_and_arrow():
    polars, arrow = pytest.importorskip("polars"), pytest.importorskip("pyarrow")
    for column in (
        polars.Series(["cat|lynx", "dog", None]),
        polars.DataFrame({"c": ["cat|lynx", "dog", ""]}),
        polars.Series([["cat", "lynx"], ["dog"], []]),
        arrow.array([["cat", "lynx"], ["dog"], None]),
    ):
        sets, classes = parse_candidates(column)
        assert classes == ["cat", "dog", "lynx"] and sets.mask.tolist() == WANTED


@pytest.mark.parametrize("y", [[3, 1, 3], np.array([3, 1, 3]), pd.Series([3, 1, 3]), np.array([[3], [1], [3]]),
                               torch.tensor([3, 1, 3]), [{3}, {1}, {3}]])  # fmt: skip
def test_ordinary_labels_are_sets_of_one(y):
    sets, classes = parse_candidates(y)
    assert classes == [1, 3] and all(type(name) is int for name in classes)
    assert sets.mask.tolist() == [[False, True], [True, False], [False, True]]


def test_whole_floats_and_non_ascii_names():
    assert parse_candidates(np.array([1.0, 0.0]))[1] == [0.0, 1.0]
    assert parse_candidates(["猫|山猫", "чиж"])[1] == ["чиж", "山猫", "猫"]


def test_given_classes_fix_the_columns():
    sets, classes = parse_candidates(["dog|cat"], classes=["lynx", "dog", "cat"])
    assert classes == ["lynx", "dog", "cat"] and sets.mask.tolist() == [[False, True, True]]
    sets, _ = parse_candidates(["a|b", "c"], classes=["a|b", "c"])  # a name may hold the separator
    assert sets.mask.tolist() == [[True, False], [False, True]]
    assert parse_candidates([[], []], classes=["a", "b"])[0].mask.all()


@pytest.mark.parametrize(
    ("candidates", "classes", "message"),
    [
        (["cat", "wolf"], ["cat", "dog"], "row 1: class 'wolf' is unknown; there are: cat, dog"),
        ([["cat"], ["dog", 3]], None, "row 1: class 3 is a number, but others are strings"),
        ([["cat"], [("dog",)]], None, "row 1: a class is a string or a number, not ('dog',)"),
        ([["cat"], [float("nan")]], None, "row 1: a class is a string or a number, not nan"),
        ([[True, False], [False, True]], None, "row 0: True and False are no classes"),
        (["cat||dog"], None, "row 0: 'cat||dog' names an empty class"),
        (np.array([[1, 0], [2, 1]]), None, "row 1: a 2-D array of candidates is a mask"),
        ([0.5, 1.0], None, "row 0: a class is a string or a whole number, not 0.5"),
        ([], None, "the list is empty"),
        ([[], []], None, "no row has a candidate class"),
        (["a"], ["a", "a"], "class 'a' is named twice"),
        ("cat|dog", None, "not a string"),
        (5, None, "not a number"),
        (np.zeros((0, 3), dtype=bool), None, "there are no candidate sets"),
    ],
)
def test_bad_input_names_its_row(candidates, classes, message):
    with pytest.raises(UserError, match=re.escape(message)) as error:
        parse_candidates(candidates, classes)
    assert "\n" not in str(error.value)


ITEM = [7, 7, 7, 5, 5, 7, 7]
WHO = ["a", "b", "c", "a", "b", "a", "c"]
LABEL = [
    "cat",
    "cat",
    "dog",
    "dog",
    "lynx",
    "cat",
    "lynx",
]  # item 7: cat by a and b, dog and lynx by c; the 6th row is twice


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("union", [{"cat", "dog", "lynx"}, {"dog", "lynx"}]),
        (1, [{"cat", "dog", "lynx"}, {"dog", "lynx"}]),
        (2, [{"cat"}, set()]),
        (0.5, [{"cat"}, {"dog", "lynx"}]),
        (2 / 3, [{"cat"}, set()]),
        (1.0, [set(), set()]),
    ],
)
def test_annotations(how, wanted):
    assert from_annotations(ITEM, WHO, LABEL, how) == ([7, 5], wanted)
    frame = pd.DataFrame({"item": ITEM, "annotator": WHO, "label": LABEL})
    assert from_annotations(frame.item, frame.annotator, frame.label, how) == ([7, 5], wanted)


def test_bad_annotations():
    with pytest.raises(UserError, match="differ in length: 2, 1, 1"):
        from_annotations([1, 2], ["a"], ["cat"])
    with pytest.raises(UserError, match="row 1: the item, the annotator or the label is missing"):
        from_annotations([1, 2], ["a", None], ["cat", "dog"])
    for how in (0, True, 1.5, "majority"):
        with pytest.raises(UserError, match="how is"):
            from_annotations([1], ["a"], ["cat"], how)


def test_a_million_rows_take_seconds():
    rows = ["cat|lynx", "dog", "", "dog|cat"] * 250_000
    began = time.process_time()
    sets, _ = parse_candidates(rows)
    assert len(sets) == 1_000_000 and time.process_time() - began < 20
