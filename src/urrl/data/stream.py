"""Images that stay on the disk: files of a folder, members of tar shards (WebDataset), rows of parquet shards.

Items have an index as those of a tensor have, and the loop asks for them in the same order, so a run that streams its
images is the run on a tensor of them. Worker processes read and decode the next batches while a step computes.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import struct
import tarfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from urrl.errors import UserError, one_line

if TYPE_CHECKING:
    from PIL import Image

SMALL = 32  # side of the copies that are looked at as a whole, in pixels
CPU = torch.device("cpu")
AHEAD = 2  # batches that each worker has ready

Rows = slice | Tensor  # numbers of rows


@dataclass(frozen=True, eq=False)
class Streamed:
    """Stands where a tensor (n, ch, H, W) of uint8 images stands."""

    read: Callable[[int], bytes | Path]  # an encoded image by its place among all
    names: Sequence[str]  # of all, for messages
    place: Tensor  # (n,) those that this is
    size: tuple[int, int, int]  # ch, H, W: images are scaled to it and cropped in the middle
    workers: int  # processes that read and decode; 0: none but this
    device: torch.device = CPU

    def __len__(self) -> int:
        return len(self.place)

    @overload
    def __getitem__(self, rows: int) -> Tensor: ...

    @overload
    def __getitem__(self, rows: Rows) -> Streamed: ...

    def __getitem__(self, rows: int | Rows) -> Tensor | Streamed:
        if isinstance(rows, int):
            return self.decode(slice(rows, rows + 1))[0]
        return dataclasses.replace(self, place=self.place[rows])

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.size)

    def dim(self) -> int:
        return 4

    def to(self, device: torch.device) -> Streamed:
        return dataclasses.replace(self, device=device)

    def decode(self, rows: Rows) -> Tensor:
        images = [_pixels(self.read(i), self.names[i], self.size) for i in self.place[rows].tolist()]
        return torch.from_numpy(np.stack(images)) if images else torch.empty((0, *self.size), dtype=torch.uint8)

    def batches(self, wanted: Sequence[Rows], shrink: int = 0) -> Iterator[Tensor]:
        """The rows of each of `wanted` in turn; with `shrink`, made so small."""
        loader = torch.utils.data.DataLoader(
            _Batches(self, wanted, shrink), batch_size=None, num_workers=self.workers,
            prefetch_factor=AHEAD if self.workers else None, generator=torch.Generator(),  # the loop has the global one
            pin_memory=self.device.type == "cuda",  # so that a copy to the GPU does not hold up the step
        )  # fmt: skip
        for batch in loader:
            if isinstance(batch, UserError):
                raise batch
            yield batch.to(self.device, non_blocking=True)

    def small(self) -> Tensor:
        """All images as one tensor, at most 32 pixels a side: what a first look at raw items takes."""
        return torch.cat(list(self.batches([slice(i, i + 256) for i in range(0, len(self), 256)], SMALL)))


Items = Tensor | Streamed


def rows_of(x: Items, wanted: Sequence[Rows]) -> Iterator[Tensor]:
    """The rows of each of `wanted` in turn, of a tensor or from the disk."""
    return x.batches(wanted) if isinstance(x, Streamed) else (x[rows] for rows in wanted)


@dataclass(frozen=True)
class _Batches(torch.utils.data.Dataset):
    """What the workers see: the batches by their number."""

    x: Streamed
    wanted: Sequence[Rows]
    shrink: int

    def __len__(self) -> int:
        return len(self.wanted)

    def __getitem__(self, number: int) -> Tensor | UserError:
        if number >= len(self):
            raise IndexError
        try:
            images = self.x.decode(self.wanted[number])
        except UserError as error:  # to be raised by the main process, without the worker's traceback
            return error
        scale = self.shrink / max(images.shape[2:]) if self.shrink else 1
        if scale >= 1:
            return images
        return F.interpolate(images.float(), scale_factor=scale, mode="area").round().to(torch.uint8)


FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM")  # Pillow would start Ghostscript for some others


def identify(source: Path | BinaryIO) -> Image.Image:
    """An image whose header alone is read yet; of one that cannot be read or is absurdly large, UserError."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # from 90 million pixels
            return Image.open(source, formats=FORMATS)
    except FileNotFoundError:
        raise UserError("no such file") from None
    except (*_UNREADABLE, Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise UserError(f"not an image that can be read ({one_line(error)})") from None


_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, KeyError, OverflowError, MemoryError,
               struct.error, zlib.error, RuntimeError)  # fmt: skip  # what Pillow raises on damaged files


def open_image(source: Path | bytes, size: tuple[int, int], name: object = None) -> Image.Image:
    """A grey or RGB image, upright, scaled until it covers the size (width, height) and cropped in the middle."""
    from PIL import Image, ImageOps

    try:
        with identify(io.BytesIO(source) if isinstance(source, bytes) else source) as image, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged metadata
            upright = ImageOps.exif_transpose(image)
            if upright.mode.startswith("I"):  # 16 bits, which older versions of Pillow keep in 32
                upright = Image.fromarray((np.asarray(upright).clip(0, 65535) >> 8).astype(np.uint8))
            grey = upright.mode in ("1", "L")
            return ImageOps.fit(upright.convert("L" if grey else "RGB"), size)
    except UserError as error:
        raise UserError(f"{name or source}: {error}") from None
    except _UNREADABLE as error:
        raise UserError(f"{name or source}: not an image that can be read ({one_line(error)})") from None


def _pixels(source: Path | bytes, name: str, size: tuple[int, int, int]) -> np.ndarray:
    """(ch, H, W) uint8."""
    channels, height, width = size
    image = open_image(source, (width, height), name).convert("L" if channels == 1 else "RGB")
    return np.asarray(image).reshape(height, width, channels).transpose(2, 0, 1)


# ---- where images are --------------------------------------------------------------------------------------


def from_files(paths: Sequence[Path], size: tuple[int, int, int], workers: int | None = None) -> Streamed:
    return _streamed(list(paths).__getitem__, [str(path) for path in paths], size, workers)


def from_tar(shards: Sequence[Path], size: tuple[int, int, int], suffixes: Sequence[str] = (".jpg", ".jpeg", ".png"),
             workers: int | None = None) -> Streamed:  # fmt: skip
    """Every member with one of the suffixes, shard by shard, as `shard.tar/member`. A look at the headers tells where
    each one begins; it is read from there."""
    names, where = [], []
    for number, shard in enumerate(shards):
        try:
            with tarfile.open(shard, "r:") as tar:
                for member in tar:
                    if member.isfile() and member.name.lower().endswith(tuple(suffixes)):
                        names.append(f"{shard}/{member.name}")
                        where.append((number, member.offset_data, member.size))
        except FileNotFoundError:
            raise UserError(f"{shard}: no such file") from None
        except (OSError, tarfile.TarError) as error:
            raise UserError(f"{shard}: not a tar file without compression ({error})") from None
    return _streamed(functools.partial(_read_part, list(shards), np.array(where, dtype=np.int64)), names, size, workers)


def _read_part(shards: list[Path], where: np.ndarray, item: int) -> bytes:
    number, start, length = where[item].tolist()
    with open(shards[number], "rb") as file:
        file.seek(start)
        return file.read(length)


def from_parquet(
    shards: Sequence[Path], column: str, size: tuple[int, int, int], workers: int | None = None
) -> Streamed:
    """The rows of a column of encoded images, or of {bytes, path} as Hugging Face keeps them, as `x.parquet, row N`. A
    row is read with its row group: shards for streaming have small ones, about a hundred rows."""
    import pyarrow.parquet as parquet

    names: list[str] = []
    groups = []  # shard, group, first row of all
    for number, shard in enumerate(shards):
        try:
            meta = parquet.read_metadata(shard)
        except FileNotFoundError:
            raise UserError(f"{shard}: no such file") from None
        except (OSError, ValueError) as error:
            raise UserError(f"{shard}: not a parquet file ({error})") from None
        if column not in meta.schema.to_arrow_schema().names:
            raise UserError(f"{shard}: there is no column {column!r}")
        first = len(names)
        for group in range(meta.num_row_groups):
            groups.append((number, group, first))
            first += meta.row_group(group).num_rows
        names += [f"{shard}, row {row}" for row in range(meta.num_rows)]
    read = functools.partial(_read_row, list(shards), column, np.array(groups, dtype=np.int64))
    return _streamed(read, names, size, workers)


def _read_row(shards: list[Path], column: str, groups: np.ndarray, item: int) -> bytes:
    number = int(np.searchsorted(groups[:, 2], item, side="right")) - 1
    shard, group, first = groups[number].tolist()
    value = _read_group(shards[shard], group, column)[item - first].as_py()
    return (value["bytes"] if isinstance(value, dict) else value) or b""


@functools.lru_cache(maxsize=64)
def _read_group(shard: Path, group: int, column: str) -> Any:
    import pyarrow.parquet as parquet

    return parquet.ParquetFile(shard).read_row_group(group, columns=[column]).column(0)


def _streamed(
    read: Callable[[int], bytes | Path], names: list[str], size: tuple[int, int, int], workers: int | None
) -> Streamed:
    if not names:
        raise UserError("there are no images")
    if workers is None:  # a process's share of the cores, without its own, up to 8
        workers = min(8, max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1))
    return Streamed(read, names, torch.arange(len(names)), size, workers)
