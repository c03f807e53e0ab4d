"""Tables on disk, .csv, .parquet or .json by their name: what is written here is read back as it was.

A spreadsheet takes a cell that begins with = + - @ for a formula. In a .csv such a cell, also after apostrophes, is
written with one more apostrophe before it and read without it: "=1+1" is kept as "'=1+1".
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from urrl.errors import UserError, one_line
from urrl.files import UNREADABLE, refuse_bomb, write_atomic, write_text
from urrl.parse import SEPARATOR

FORMATS = ("csv", "parquet", "json")
FORMULA = re.compile(r"'*[=+\-@\t\r\ufeff]")  # the last is a mark at the start of a file, which readers drop
ESCAPED = re.compile(r"'+[=+\-@\t\r\ufeff]")
BATCH = 4096  # rows of a .parquet that are unpacked at once
CHUNK = 20_000  # rows of a .csv that are held as text at once


def protect(text: str) -> str:
    return "'" + text if FORMULA.match(text) else text


def unprotect(text: str) -> str:
    return text[1:] if ESCAPED.match(text) else text


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """A column of lists stays one in .parquet and .json; in .csv its cells are "a|b"."""
    try:
        if path.suffix == ".csv":
            write_text(path, _as_csv(frame))
        elif path.suffix == ".parquet":
            one_kind = frame.apply(_of_one_kind)
            write_atomic(path, lambda file: one_kind.to_parquet(file, index=False))
        else:
            write_text(path, _as_json(frame))
    except UnicodeEncodeError as error:
        raise UserError(f"{path}: a name is no text that a file can hold ({error})") from None


def _of_one_kind(column: pd.Series) -> pd.Series:
    """Strings, where a column has strings and numbers: parquet has no such column."""
    kinds = {isinstance(value, str) for value in column if not isinstance(value, (list, np.ndarray))}
    return column.map(str) if len(kinds) > 1 and column.notna().all() else column


def _as_csv(frame: pd.DataFrame) -> str:
    text = frame.apply(lambda column: column if column.dtype.kind in "biuf" else column.map(_cell))
    text.columns = [protect(str(name)) for name in frame]
    written: str = text.to_csv(index=False, lineterminator="\n")
    if "\r" in written:  # which Python takes for an end of the line, but does not quote by itself
        written = text.to_csv(index=False, lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    return written


def _as_json(frame: pd.DataFrame) -> str:
    """A list of records. pandas writes their values alone: it cuts names off at a NUL."""
    rows = json.loads(frame.to_json(orient="values", double_precision=15))
    return json.dumps([dict(zip(map(str, frame), row)) for row in rows], ensure_ascii=False, indent=1)


def _cell(value: Any) -> str:
    if not isinstance(value, list):
        return "" if pd.isna(value) else protect(str(value))
    for name in map(str, value):
        if SEPARATOR in name or name != name.strip() or not name:
            raise UserError(f"{name!r} cannot be in a .csv cell like 'a{SEPARATOR}b': choose parquet or json")
    return protect(SEPARATOR.join(map(str, value)))


def read_table(path: Path, numbers: Callable[[list[str]], Collection[str]] = lambda names: (),
               skipped: list[str] | None = None) -> pd.DataFrame:  # fmt: skip
    """A table as it is in the file. All that is in a .csv is text, but for the columns of `numbers(names)`, where what
    is no number is nan. The index, "line" or "row", says where a row is, for messages. Rows with too many or too few
    fields are refused or, with a list to note them in, `skipped`."""
    try:
        if path.suffix == ".csv":
            return _read_csv(path, numbers, skipped)
        if path.suffix == ".parquet":
            frame = _read_parquet(path)
        elif path.suffix == ".json":
            frame = pd.DataFrame(json.loads(path.read_text("utf-8")))
        else:
            raise UserError(f"{path}: a table is a file that ends with .{', .'.join(FORMATS)}")
        if not frame.columns.is_unique or not all(isinstance(name, str) for name in frame):
            raise ValueError("its columns should have names, each another")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except UserError:
        raise
    except UNREADABLE as error:
        raise UserError(f"{path}: not a table ({one_line(error)})") from None
    return frame.set_axis(pd.RangeIndex(len(frame), name="row"))


def _read_parquet(path: Path) -> pd.DataFrame:
    """In small batches, because lists may be of any length. What the metadata says of a column is not asked for: where
    it is damaged, pyarrow ends the process."""
    batches, size = [], 0
    with pq.ParquetFile(path) as file:
        refuse_bomb(path, 8 * file.metadata.num_rows * file.metadata.num_columns)
        for batch in file.iter_batches(BATCH):
            size += batch.nbytes
            refuse_bomb(path, size)
            batches.append(batch)
        table = pa.Table.from_batches(batches, file.schema_arrow)
    table.validate(full=True)  # that text is text, among others
    return table.to_pandas()


def _read_csv(path: Path, numbers: Callable[[list[str]], Collection[str]], skipped: list[str] | None) -> pd.DataFrame:
    chunks: list[pd.DataFrame] = []
    rows: list[list[str]] = []
    places: list[int] = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file)
        try:
            names = [unprotect(name) for name in next(lines, [])]
            if not names or len(set(names)) < len(names):
                raise UserError(f"{path}: the first line should name the columns, each by another name")
            numeric = set(numbers(names))
            for row in lines:
                if len(row) == len(names):
                    rows.append(row)
                    places.append(lines.line_num)
                elif row:  # an empty line is no row
                    wrong = f"line {lines.line_num}: {len(row)} fields, but the first line has {len(names)}"
                    refuse(f"{path}, {wrong}", skipped)
                if len(rows) == CHUNK:
                    chunks.append(_chunk(names, rows, places, numeric))
                    rows, places = [], []
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text ({error.reason}, near line {lines.line_num + 1})") from None
        except csv.Error as error:
            raise UserError(f"{path}, line {lines.line_num}: {error}") from None
    return pd.concat([*chunks, _chunk(names, rows, places, numeric)])


def _chunk(names: list[str], rows: list[list[str]], places: list[int], numeric: set[str]) -> pd.DataFrame:
    columns = dict(zip(names, zip(*rows))) if rows else dict.fromkeys(names, ())
    held = {
        name: as_numbers(pd.Series(list(cells), dtype=object))
        if name in numeric
        else np.array([unprotect(cell) if cell[:1] == "'" else cell for cell in cells], dtype=object)
        for name, cells in columns.items()
    }
    return pd.DataFrame(held, index=pd.Index(places, name="line"))


def as_numbers(cells: pd.Series) -> np.ndarray:
    """(n,), nan where a cell is no number."""
    try:
        numbers = pd.to_numeric(cells, errors="coerce")
    except (OverflowError, TypeError, ValueError):  # a whole number beyond all floats, a list
        numbers = pd.to_numeric(cells.map(str), errors="coerce")
    return numbers.to_numpy(np.float64)


def refuse(message: str, skipped: list[str] | None) -> None:
    """A bad row: an error, or noted where rows may be skipped."""
    if skipped is None:
        raise UserError(message)
    skipped.append(message)
