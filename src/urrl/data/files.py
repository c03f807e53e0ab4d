"""A user's own data in files: a folder of images with a table of their candidate sets, a table of features, an .npz.

Every bad row is an error that names it or, where rows may be skipped, a line in a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from urrl.data.own import LARGEST, as_items, from_arrays, own_shape, own_size, stack_images
from urrl.data.readers import Dataset
from urrl.data.stream import from_files, identify, open_image
from urrl.errors import UserError, one_line
from urrl.files import UNREADABLE, read_npz
from urrl.parse import from_annotations, missing, parse_candidates
from urrl.tables import as_numbers, read_table, refuse

IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".pgm", ".ppm")


class Loaded(NamedTuple):
    dataset: Dataset
    items: list[Any]  # their names
    features: list[str] | None  # names of a table's features
    skipped: list[str]  # a line for each row that was left out


class Rows(NamedTuple):
    table: str  # where they are from, for messages: "labels.csv, line"
    places: np.ndarray  # (n,) and which line that is
    items: np.ndarray  # (n,) names
    candidates: np.ndarray  # (n,) or, as a mask, (n, C)
    x: np.ndarray  # (n, d) features, (n, H, W) or (n, H, W, 3) images, or (n,) paths of image files

    def keep(self, good: np.ndarray) -> Rows:
        return Rows(self.table, *(column[good] for column in self[1:]))

    def refuse(self, i: int, problem: object, note: list[str] | None) -> None:
        refuse(f"{self.table} {self.places[i]}: {problem}", note)


def load_source(source: dict[str, Any]) -> Loaded:
    """What a run on files learns from: {"images": folder, "candidates": table}, {"table": file, "features": patterns or
    names, "candidates": column} or {"npz": file}; "classes": all that there may be; "skip_bad": without bad rows;
    "stream": images stay in their files. "candidates" of a table or an .npz may also be a table with the columns item
    and candidates, as an audit writes it."""
    skipped: list[str] = []
    note = skipped if source.get("skip_bad") else None
    features, classes = None, source.get("classes")
    if "images" in source:
        rows = _image_rows(Path(source["images"]), Path(source["candidates"]), note)
    elif "table" in source:
        rows, features = _table_rows(Path(source["table"]), source["features"], source["candidates"], note)
    else:
        rows, classes = _npz_rows(Path(source["npz"]), classes, source.get("candidates"), note)
    rows = rows.keep(_first_of_each(rows, note))
    good, S, names = _sets(rows, classes, note)
    rows = rows.keep(good)
    x: Any
    if source.get("stream"):
        good = _readable(rows, note)
        x = from_files(rows.x[good].tolist(), own_shape(rows.x[good]))
    else:
        good, x = _read_images(rows, note) if rows.x.dtype == object else _finite(rows, features, note)
    if not good.any():
        raise UserError(f"there is no item to learn from ({len(skipped)} rows were bad)")
    return Loaded(from_arrays(x, S[torch.from_numpy(good)], names), rows.items[good].tolist(), features, skipped)


# ---- the three kinds of files ----------------------------------------------------------------------------


def _image_rows(folder: Path, labels: Path, note: list[str] | None) -> Rows:
    """The table has a row for each image: `item`, its file below the folder, and `candidates`; or a row for each label
    that somebody gave, with the columns item, annotator and label."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder")
    frame = read_table(labels, skipped=note)
    if "candidates" not in frame and {"item", "annotator", "label"} <= set(frame):
        empty = frame["label"].isna() | (frame["label"].map(str) == "")
        for place in frame.index[empty]:
            refuse(f"{labels}, {frame.index.name} {place}: the label is missing", note)
        frame = frame[~empty]
        items, sets = from_annotations(frame["item"], frame["annotator"], frame["label"])
        first = dict(zip(frame["item"][::-1], frame.index[::-1]))
        places = pd.Index([first[item] for item in items], name=frame.index.name)
        frame = pd.DataFrame({"item": items, "candidates": [sorted(s, key=str) for s in sets]}, places)
    paths = _objects(folder / str(item) for item in _column(frame, "item", labels))
    rows = _rows(frame, _column(frame, "candidates", labels), paths, labels)
    inside = np.array([_below(str(item)) for item in rows.items], dtype=bool)
    for i in (~inside).nonzero()[0].tolist():
        rows.refuse(i, f"the item {str(rows.items[i])!r} is not below the folder of images", note)
    return rows.keep(inside)


def _below(item: str) -> bool:
    path = Path(item)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in item


def _table_rows(path: Path, features: str | list[str] | None, candidates: str, note: list[str] | None
                ) -> tuple[Rows, list[str]]:  # fmt: skip
    frame = read_table(path, lambda names: _feature_names(path, names, features, candidates), note)
    names = _feature_names(path, list(frame), features, candidates)
    if "" in names:
        raise UserError(f"{path}: a column has no name, perhaps a row number: --features says which columns count")
    if candidates not in frame and Path(candidates).is_file():
        if features is None:  # a column of labels in the table would be one
            raise UserError(f"{path}: with the candidates in {candidates}, --features must say which columns count")
        return _with_sets(_rows(frame, frame.index, _numbers(frame[names]), path), Path(candidates), note), names
    return _rows(frame, _column(frame, candidates, path), _numbers(frame[names]), path), names


def _with_sets(rows: Rows, path: Path, note: list[str] | None) -> Rows:
    """Items with the candidates that another table has for them."""
    labels = read_table(path, skipped=note)
    items = _column(labels, "item", path).map(str)
    if items.duplicated().any():
        raise UserError(f"{path}: the item {items[items.duplicated()].iloc[0]!r} is there twice")
    of = dict(zip(items, _column(labels, "candidates", path)))
    known = np.array([str(item) in of for item in rows.items], dtype=bool)
    for i in (~known).nonzero()[0].tolist():
        rows.refuse(i, f"the item {str(rows.items[i])!r} is not in {path}", note)
    kept = rows.keep(known)
    return kept._replace(candidates=_objects(of[str(item)] for item in kept.items))


def _npz_rows(path: Path, classes: Sequence[str] | None, labels: str | None, note: list[str] | None
              ) -> tuple[Rows, Sequence[Any] | None]:  # fmt: skip
    """x: features (n, d) or uint8 images (n, H, W) or (n, H, W, 3); candidates: labels or "a|b" strings (n,) or a mask
    (n, C); perhaps classes (C,), the names of its columns, and item (n,), the names of the rows."""
    held = read_npz(path)
    for key in ("x",) if labels else ("x", "candidates"):
        if key not in held:
            raise UserError(f"{path}: there is no array {key!r}, only {', '.join(map(repr, held))}")
    for key, most in (("x", 4), ("candidates", 2), ("item", 1), ("classes", 1)):
        if key in held and not 1 <= held[key].ndim <= most:
            raise UserError(f"{path}: the array {key!r} has {held[key].ndim} dimensions")
    frame = pd.DataFrame(index=pd.RangeIndex(len(held["x"]), name="row"))
    for key in ("candidates", "item"):
        if key in held and len(held[key]) != len(frame):
            raise UserError(f"{path}: {len(frame)} rows of x, but {len(held[key])} of {key}")
    if "item" in held:
        frame["item"] = held["item"]
    if "classes" in held:
        if classes:
            raise UserError(f"{path}: names its classes itself: --classes does not go with it")
        classes = held["classes"].tolist()
    if labels:
        return _with_sets(_rows(frame, frame.index, held["x"], path), Path(labels), note), classes
    return _rows(frame, held["candidates"], held["x"], path), classes


def _rows(frame: pd.DataFrame, candidates: Any, x: np.ndarray, path: Path) -> Rows:
    items = np.arange(len(frame))
    if "item" in frame:
        items = _objects(item if isinstance(item, (str, int, float)) else str(item) for item in frame["item"])
    return Rows(f"{path}, {frame.index.name}", frame.index.to_numpy(), items, np.asarray(candidates), x)


def _column(frame: pd.DataFrame, name: str, path: Path) -> pd.Series:
    if name not in frame:
        raise UserError(f"{path}: there is no column {name!r}, only {', '.join(map(repr, frame.columns))}")
    return frame[name]


def _feature_names(path: Path, names: Sequence[str], features: str | list[str] | None, candidates: str | None
                   ) -> list[str]:  # fmt: skip
    """The columns that patterns like "a,b,x*" name, or those of a list; None: all but the item and its candidates."""
    others = [name for name in names if name not in ("item", candidates)]
    if features is None:
        return others
    chosen: list[str] = []
    patterns = isinstance(features, str)
    for pattern in [part.strip() for part in features.split(",")] if isinstance(features, str) else features:
        found = [name for name in others if name == pattern or (patterns and fnmatchcase(name, pattern))]
        if not found:
            raise UserError(f"{path}: no column is called {pattern!r}; there are: {', '.join(others)}")
        chosen += [name for name in found if name not in chosen]
    return chosen


def _numbers(frame: pd.DataFrame) -> np.ndarray:
    """(n, d), nan where a cell is no number."""
    return np.stack([as_numbers(frame[name]) for name in frame], 1) if len(frame.columns) else np.empty((len(frame), 0))


def _objects(values: Iterable[Any]) -> np.ndarray:
    """(n,): numpy would make more dimensions of a list of lists."""
    held = list(values)
    array = np.empty(len(held), dtype=object)
    array[:] = held
    return array


# ---- the rows that are good ------------------------------------------------------------------------------


def _first_of_each(rows: Rows, note: list[str] | None) -> np.ndarray:
    again = pd.Series(rows.items).duplicated().to_numpy()
    for i in again.nonzero()[0]:
        rows.refuse(i, f"the item {str(rows.items[i])!r} is there twice", note)
    return ~again


def _sets(rows: Rows, classes: Sequence[Any] | None, note: list[str] | None) -> tuple[np.ndarray, Tensor, list[Any]]:
    """(good (n,), S of the good ones, names of the classes). A set that occurs a thousand times is parsed once."""
    good = np.ones(len(rows.items), dtype=bool)
    if classes is not None and all(str(c).removeprefix("-").isdecimal() for c in classes):
        classes = [(int if _numbered(rows.candidates) else str)(c) for c in classes]
    if rows.candidates.ndim == 2:
        sets, names = parse_candidates(rows.candidates, classes)
        return good, sets.mask, _enough(names, sets.mask)
    cells = _objects(tuple(c) if isinstance(c, (list, np.ndarray)) else c for c in rows.candidates.tolist())
    if _numbered(cells):  # a column of whole numbers with a gap comes as 1.0, 2.0, nan
        cells = _objects(int(c) if isinstance(c, float) and c.is_integer() else c for c in cells)
    try:
        code, distinct = pd.factorize(cells, use_na_sentinel=False)
    except TypeError:  # a list in a list, a dictionary: the parser says so
        code, distinct = np.arange(len(cells)), cells
    bad: dict[int, str] = {}
    problem = None
    try:
        sets, names = parse_candidates(list(distinct), classes, bad)
    except UserError as error:  # of all rows together: one that is wrong by itself is told first
        problem = error
    for i in np.isin(code, list(bad)).nonzero()[0].tolist():
        rows.refuse(i, bad[code[i]], note)
        good[i] = False
    if problem is not None:
        raise problem
    S = sets.mask[torch.from_numpy(code[good])]
    return good, S, _enough(names, S)


def _numbered(candidates: np.ndarray) -> bool:
    """Whether classes go by numbers: the first that is named does, or a mask is of 0 and 1."""
    if candidates.ndim == 2:
        return candidates.dtype.kind in "iu"
    cells = (c if isinstance(c, (list, tuple, np.ndarray)) else [c] for c in candidates.tolist())
    first = next((member for cell in cells for member in cell if not missing(member)), None)
    return isinstance(first, (int, float, np.number))


def _enough(names: list[Any], S: Tensor) -> list[Any]:
    if len(names) < 2:
        raise UserError(f"there is only one class, {names[0]!r}: nothing can be learned")
    if bool(S.all()):
        raise UserError("every item names every class: nothing can be learned")
    return names


def _readable(rows: Rows, note: list[str] | None) -> np.ndarray:
    """(n,) whether the head of each image can be read; the whole is, when its turn comes."""
    good = np.ones(len(rows.x), dtype=bool)
    for i, path in enumerate(rows.x):
        try:
            identify(path).close()
        except UserError as error:
            rows.refuse(i, f"{path}: {error}", note)
            good[i] = False
    return good


def _read_images(rows: Rows, note: list[str] | None) -> tuple[np.ndarray, np.ndarray]:
    """(good (n,), the good images), all of one size."""
    size = own_size(rows.x)
    good, images = np.ones(len(rows.x), dtype=bool), []
    for i, path in enumerate(rows.x):
        try:
            images.append(open_image(path, size))
        except UserError as error:
            rows.refuse(i, error, note)
            good[i] = False
    return good, stack_images(images) if images else np.empty(0)


def _finite(rows: Rows, features: list[str] | None, note: list[str] | None) -> tuple[np.ndarray, np.ndarray]:
    """(good (n,), the good items)."""
    if rows.x.dtype.kind not in "fiub":
        raise UserError(f"{rows.table} 0: x is an array of numbers, not of {rows.x.dtype}")
    usable: np.ndarray = np.ones(rows.x.shape, bool)
    if rows.x.dtype.kind == "f":
        usable = np.abs(rows.x.astype(np.float64)) <= LARGEST
    good = np.asarray(usable.all(tuple(range(1, usable.ndim))))
    for i in (~good).nonzero()[0].tolist():
        column = int(usable[i].reshape(-1).argmin())
        wrong = "too large to be scaled" if np.isfinite(rows.x[i].reshape(-1)[column]) else "no finite number"
        rows.refuse(i, f"feature {features[column] if features else column!r} is {wrong}", note)
    return good, rows.x[good]


# ---- items to predict ------------------------------------------------------------------------------------


def items_to_predict(path: Path, shape: tuple[int, ...], features: list[str] | None, note: list[str] | None,
                     chunk: int = 500) -> tuple[int, Iterator[tuple[list[Any], Tensor]]]:  # fmt: skip
    """(how many, chunks of (names, items)) of a folder of images, a table, an .npz or an .npy file; of a folder no more
    than a chunk is held at once."""
    if path.is_dir():
        if len(shape) != 3:
            raise UserError(f"{path}: the run takes {shape[0]} features, not images")
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGES and file.is_file())
        if not files:
            raise UserError(f"{path}: there is no image in it ({', '.join(IMAGES)})")
        return len(files), _image_chunks(path, files, shape, note, chunk)
    if path.suffix in (".npy", ".npz"):
        array, names = _array(path)
        array = _checked(path, array, shape)
        if len(shape) == 1 and len(array):
            good, array = _finite(Rows(f"{path}, row", np.arange(len(array)), names, names, array), None, note)
            names = names[good]
        x, names = as_items(array) if len(array) else torch.empty(0, *shape), names.tolist()
    else:
        if features is None:
            raise UserError(f"{path}: the run was not trained on a table")
        frame = read_table(path, lambda columns: features, note)
        values = _numbers(frame[_feature_names(path, list(frame), features, None)])
        rows = _rows(frame, frame.index, values, path)
        good, values = _finite(rows, features, note)
        x, names = as_items(values) if len(values) else torch.empty(0, *shape), rows.items[good].tolist()
    return len(x), ((names[i : i + chunk], x[i : i + chunk]) for i in range(0, len(x), chunk))


def _image_chunks(folder: Path, files: list[Path], shape: tuple[int, ...], note: list[str] | None, chunk: int
                  ) -> Iterator[tuple[list[Any], Tensor]]:  # fmt: skip
    channels, height, width = shape
    for start in range(0, len(files), chunk):
        names, images = [], []
        for file in files[start : start + chunk]:
            try:
                images.append(open_image(file, (width, height)).convert("L" if channels == 1 else "RGB"))
                names.append(str(file.relative_to(folder)))
            except UserError as error:
                refuse(str(error), note)
        yield names, as_items(stack_images(images)) if images else torch.empty(0, *shape, dtype=torch.uint8)


def _array(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """(items, their names)."""
    if path.suffix == ".npz":
        held = read_npz(path)
        if "x" not in held:
            raise UserError(f"{path}: there is no array 'x', only {', '.join(map(repr, held))}")
        array = held["x"]
        names = held.get("item", np.arange(len(array) if array.ndim else 0))
        if names.shape != array.shape[:1]:
            raise UserError(f"{path}: {array.shape} items, but {names.shape} names of them")
        return array, names
    try:
        array = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UNREADABLE as error:
        raise UserError(f"{path}: not an array file ({one_line(error)})") from None
    if not isinstance(array, np.ndarray):
        raise UserError(f"{path}: items are one array, not an archive")
    return array, np.arange(len(array) if array.ndim else 0)


def _checked(path: Path, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The array, with a channel; of the shape that the run takes."""
    if len(shape) == 3 and array.dtype != np.uint8:
        raise UserError(f"{path}: images are one uint8 array, not {array.dtype}")
    images = array[..., None] if len(shape) == 3 and array.ndim == 3 else array
    wanted = (shape[1], shape[2], shape[0]) if len(shape) == 3 else shape
    if images.shape[1:] != wanted:
        kind = "images" if len(shape) == 3 else "features"
        raise UserError(f"{path}: the run takes {kind} of {wanted}, these are {images.shape[1:]}")
    return images
