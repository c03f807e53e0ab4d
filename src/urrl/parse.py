"""Candidate sets as people have them: lists, masks, labels, strings, columns of a table, votes of annotators."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor

from urrl.candidates import CandidateSets
from urrl.errors import UserError, one_line

SEPARATOR = "|"  # between the classes of a set that is written as a string


def parse_candidates(
    candidates: Any, classes: Sequence[Any] | None = None, bad: dict[int, str] | None = None
) -> tuple[CandidateSets, list[Any]]:
    """(S, names of its columns) from any of

        [{"cat", "lynx"}, {"dog"}]    lists, tuples, sets or arrays of classes; an object array or a column of them
        ["cat|lynx", "dog"]           strings
        ["cat", "dog"], [3, 1]        ordinary labels: one candidate each
        (n, C) bool, 0/1 or sparse    a mask; its columns are the classes 0 ... C - 1 unless `classes` names them

    An empty set, an empty string or a missing value is an item without a label: it gets every class. Without `classes`,
    they are those that occur, sorted; names stay what they are, strings or numbers. A row that is wrong is an error or,
    where there is a `bad` to note it in, by its number, an item without a label; a mask is right or wrong as a whole.
    """

    def refuse(number: int, problem: object) -> list[Any]:
        if bad is None:
            raise UserError(f"row {number}: {problem}")
        bad[number] = str(problem)
        return []

    names = _checked_names(classes)
    if isinstance(candidates, CandidateSets):
        return candidates, _column_names(candidates.n_classes, names)
    mask = _as_mask(candidates)
    if mask is not None:
        return CandidateSets(_fill_empty(mask)), _column_names(mask.shape[1], names)
    sets: list[list[Any]] = []
    for number, row in enumerate(_rows(candidates)):
        try:
            sets.append(_members(row, names))
        except UserError as error:
            sets.append(refuse(number, error))
    if not sets:
        raise UserError("there are no candidate sets: the list is empty")
    if names is None:
        first = next((name for members in sets for name in members), None)
        for number, members in enumerate(sets):
            for name in members:
                if isinstance(name, str) != isinstance(first, str):
                    problem = f"class {name!r} is a {_kind(name)}, but others are {_kind(first)}s"
                    sets[number] = refuse(number, problem)
                    break
    found = names if names is not None else sorted({name for members in sets for name in members})
    if len(found) < 1:
        raise UserError("no row has a candidate class: give `classes` where every item is without a label")
    column = {name: c for c, name in enumerate(found)}
    where, which = [], []
    for number, members in enumerate(sets):
        for name in members:
            if name not in column:
                members = refuse(number, f"class {name!r} is unknown; there are: {_listed(found)}")
                break
        where += [number] * len(members)
        which += [column[name] for name in members]
    mask = torch.zeros(len(sets), len(found), dtype=torch.bool)
    mask[where, which] = True
    return CandidateSets(_fill_empty(mask)), found


def from_annotations(
    item: Iterable[Any], annotator: Iterable[Any], label: Iterable[Any], how: str | int | float = "union"
) -> tuple[list[Any], list[frozenset[Any]]]:
    """(items, their candidate sets) from a long table with a row for each label that an annotator gave to an item, in
    the order of the items' first rows. `how`: "union" takes every label, a whole number those that at least so many
    annotators gave, a share (0.5) those that at least that share of the item's annotators gave. An item of which no
    label has enough votes has an empty set: it counts as unlabelled."""
    columns = [[_plain(value) for value in _rows(column)] for column in (item, annotator, label)]
    if len({len(column) for column in columns}) != 1:
        raise UserError(f"item, annotator and label differ in length: {', '.join(str(len(c)) for c in columns)}")
    how = _plain(how)
    whole = isinstance(how, int) and not isinstance(how, bool) and how >= 1
    union = isinstance(how, str) and how == "union"
    if not union and not whole and not (isinstance(how, float) and 0 < how <= 1):
        raise UserError(f"how is 'union', a number of votes from 1 or a share above 0 and up to 1, not {how!r}")
    votes: dict[Any, set[tuple[Any, Any]]] = defaultdict(set)  # a vote that is in the table twice counts once
    for number, (i, a, l) in enumerate(zip(*columns)):
        if missing(i) or missing(a) or missing(l):
            raise UserError(f"row {number}: the item, the annotator or the label is missing")
        for value in (i, a, l):
            if not isinstance(value, (str, int, float)):
                raise UserError(f"row {number}: items, annotators and labels are strings or numbers, not {value!r}")
        try:
            labels = _members(l, None)  # "cat|lynx" are two
        except UserError as error:
            raise UserError(f"row {number}: {error}") from None
        if not labels:
            raise UserError(f"row {number}: the label is missing")
        votes[i].update((a, label) for label in labels)
    sets = []
    for given in votes.values():
        count = Counter(l for _, l in given)
        people = len({a for a, _ in given})
        needed = 1 if isinstance(how, str) else how if whole else how * people - 1e-9
        sets.append(frozenset(l for l, n in count.items() if n >= needed))
    return list(votes), sets


def _checked_names(classes: Sequence[Any] | None) -> list[Any] | None:
    if classes is None:
        return None
    classes = _plain(classes)
    if isinstance(classes, (str, bytes)) or not isinstance(classes, Iterable):
        raise UserError(f"classes are a list of names, not {classes!r}")
    names = [_plain(name) for name in classes]
    for name in names:
        if missing(name) or not isinstance(name, (str, int, float)):
            raise UserError(f"the name of a class is a string or a number, not {name!r}")
        if isinstance(name, str) != isinstance(names[0], str):
            raise UserError(f"class {name!r} is a {_kind(name)}, but {names[0]!r} is a {_kind(names[0])}")
    if len(set(names)) != len(names):
        twice = next(name for name, n in Counter(names).items() if n > 1)
        raise UserError(f"class {twice!r} is named twice")
    return names


def _column_names(n_classes: int, names: list[Any] | None) -> list[Any]:
    if names is None:
        return list(range(n_classes))
    if len(names) != n_classes:
        raise UserError(f"the candidate sets have {n_classes} columns, but {len(names)} classes are named")
    return names


def _as_mask(candidates: Any) -> Tensor | None:
    """(n, C) bool of a 2-D mask, dense or sparse; None for everything else."""
    if hasattr(candidates, "tocsr"):
        candidates = candidates.toarray()
    elif hasattr(candidates, "to_numpy") and len(getattr(candidates, "shape", ())) == 2:
        candidates = candidates.to_numpy()  # a frame
    elif hasattr(candidates, "__array__"):
        candidates = np.asarray(candidates)
    if not isinstance(candidates, np.ndarray) or candidates.ndim != 2 or candidates.dtype.kind in "OUS":
        return None
    if candidates.shape[1] == 1 and candidates.dtype != bool:
        return None  # a column of labels
    wrong = ((candidates != 0) & (candidates != 1)).any(1).nonzero()[0]
    if len(wrong):
        raise UserError(f"row {wrong[0]}: a 2-D array of candidates is a mask of 0 and 1, "
                        f"not {one_line(candidates[wrong[0]])}")  # fmt: skip
    if not candidates.size:
        raise UserError(f"there are no candidate sets: the mask is {candidates.shape}")
    return torch.from_numpy(candidates.astype(bool))


def _fill_empty(mask: Tensor) -> Tensor:
    """An empty set says nothing, nor does one of all classes."""
    return mask | ~mask.any(1, keepdim=True)


def _rows(candidates: Any) -> Iterable[Any]:
    if isinstance(candidates, (str, bytes, dict)):
        raise UserError(
            f"candidates are a list, an array or a column with a row for each item, not a {_kind(candidates)}"
        )
    if hasattr(candidates, "to_numpy") and len(getattr(candidates, "shape", ())) == 2:  # a frame
        candidates = candidates.to_numpy()
    elif hasattr(candidates, "__array__") and not isinstance(candidates, Iterable):
        candidates = np.asarray(candidates)
    if isinstance(candidates, np.ndarray) and candidates.ndim == 2 and candidates.shape[1] == 1:
        candidates = candidates[:, 0]
    if isinstance(candidates, np.ndarray) and candidates.ndim == 0:
        raise UserError("candidates are a list, an array or a column with a row for each item, not one value")
    for name in ("to_pylist", "to_list", "tolist"):  # pyarrow, polars and pandas, numpy
        if hasattr(candidates, name):
            return getattr(candidates, name)()
    if not isinstance(candidates, Iterable):
        raise UserError(
            f"candidates are a list, an array or a column with a row for each item, not a {_kind(candidates)}"
        )
    return candidates


def _members(row: Any, names: list[Any] | None) -> list[Any]:
    """The classes of one row."""
    row = _plain(row)
    if isinstance(row, str):
        if names is not None and row in names:
            return [row]
        parts = [part.strip() for part in row.split(SEPARATOR)]
        if len(parts) > 1 and not all(parts):
            raise UserError(f"{row!r} names an empty class")
        return parts if parts[0] else []
    if missing(row):
        return []
    if isinstance(row, (Set, list, tuple, np.ndarray)):
        members = [_plain(member) for member in (row.tolist() if isinstance(row, np.ndarray) else row)]
        if any(isinstance(member, bool) for member in members):
            raise UserError("True and False are no classes; give a mask as one (n, C) array")
    else:
        members = [_plain(row)]
    for member in members:
        if missing(member) or not isinstance(member, (str, int, float)):
            raise UserError(f"a class is a string or a number, not {member!r}")
        if isinstance(member, float) and not member.is_integer():
            raise UserError(f"a class is a string or a whole number, not {member!r}")
    return members


def _plain(value: Any) -> Any:
    """Of numpy's scalars, Python's."""
    scalar = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and not value.ndim)
    return value.item() if scalar else value


def missing(value: Any) -> bool:
    """None, NaN, and what pandas writes for a missing value."""
    return (
        value is None
        or (isinstance(value, float) and math.isnan(value))
        or type(value).__name__ in ("NAType", "NaTType")
    )


def _kind(value: Any) -> str:
    return {"str": "string", "int": "number", "float": "number"}.get(type(value).__name__, type(value).__name__)


def _listed(names: list[Any]) -> str:
    return ", ".join(map(str, names[:10])) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
