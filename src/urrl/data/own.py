"""A user's own items: arrays, tables, images in files. Features stay as they are; the policy scales them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from urrl.data.augment import AnyPolicy, Features, Policy
from urrl.data.readers import Dataset
from urrl.data.stream import Items, Streamed, identify, open_image
from urrl.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

LARGEST = 1e30  # of a feature: its square must be a number too
SIDE = 32  # of images that are read from files and differ in size, in pixels


def from_arrays(
    x: Any, S: Tensor | None, classes: Sequence[Any], y: Tensor | None = None, augment: str | AnyPolicy | None = None,
    name: str = "own",
) -> Dataset:  # fmt: skip
    """A data set of items in any form that `as_items` takes, or Streamed, candidate sets (n, C) and, where they are
    known, the true labels; `augment`: the views, chosen from the items where it is not given."""
    items = x if isinstance(x, Streamed) else as_items(x)
    for what, rows in (("candidate sets", S), ("true labels", y)):
        if rows is not None and len(rows) != len(items):
            raise UserError(f"{len(items)} items, but {len(rows)} {what}")
    return Dataset(name, items, y, tuple(classes), official_test=0, augment=augment or own_policy(items), S=S)


def as_items(x: Any, size: tuple[int, int] | None = None) -> Tensor:
    """(n, d) float features or (n, ch, H, W) uint8 images from an array, a tensor, a frame, a column, a list of rows,
    of images or of paths of image files, which are read in that size (width, height)."""
    if isinstance(x, Tensor):
        if x.dim() == 4 and x.dtype == torch.uint8:
            return x  # as torch has images: (n, ch, H, W)
        x = x.detach().cpu().numpy()
    if isinstance(x, (list, tuple)) or type(x).__name__ in ("Column", "Series", "ChunkedArray"):
        x = _from_rows(list(x), size)
    array = x.to_numpy() if hasattr(x, "to_numpy") else np.asarray(x)
    if array.dtype == np.uint8 and array.ndim in (3, 4):
        if not array.size:
            raise UserError(f"there are no images: the array is {array.shape}")
        return torch.from_numpy(array[..., None] if array.ndim == 3 else array).permute(0, 3, 1, 2).contiguous()
    if array.ndim != 2:
        images = "uint8 images (n, H, W) or (n, H, W, channels)"
        raise UserError(f"items are features (n, d) or {images}, not {array.dtype} {array.shape}")
    return _features(array)


def _features(array: np.ndarray) -> Tensor:
    if array.dtype.kind not in "fiub":
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise UserError(f"features are numbers ({error})") from None
    if array.dtype != np.float32:
        array = array.astype(np.float64)
    if not array.size:
        raise UserError(f"there are no features: the array is {array.shape}")
    wrong = (~(np.abs(array) <= LARGEST)).nonzero()
    if len(wrong[0]):
        row, column = int(wrong[0][0]), int(wrong[1][0])
        value = array[row, column]
        what = "NaN" if np.isnan(value) else "inf" if np.isinf(value) else f"{value:g}, too large to be scaled"
        raise UserError(f"row {row}: feature {column} is {what} ({len(np.unique(wrong[0]))} such rows)")
    return torch.from_numpy(np.ascontiguousarray(array))


def _from_rows(rows: list[Any], size: tuple[int, int] | None) -> np.ndarray:
    if not rows:
        raise UserError("there are no items: the list is empty")
    if isinstance(rows[0], (str, os.PathLike)):
        return read_images([Path(row) for row in rows], size)
    if hasattr(rows[0], "convert"):  # PIL images, as a column of a Hugging Face data set gives them
        mode = "RGB" if any(len(image.getbands()) > 2 for image in rows) else "L"
        rows = [np.asarray(image.convert(mode)) for image in rows]
    shape = np.shape(rows[0])
    for number, row in enumerate(rows):
        if np.shape(row) != shape:
            raise UserError(f"row {number} has the shape {np.shape(row)}, row 0 has {shape}")
    return np.asarray(rows)


def read_images(paths: Sequence[Path], size: tuple[int, int] | None = None) -> np.ndarray:
    """(n, H, W) or (n, H, W, 3) uint8: grey where every image is, of one size (width, height) or of `own_size`."""
    size = size or own_size(paths)
    return stack_images([open_image(path, size) for path in paths])


def own_size(paths: Iterable[Path]) -> tuple[int, int]:
    """(width, height): the images' own where all have the same and it is small, else a square of SIDE."""
    sizes = set()
    for path in paths:
        with contextlib.suppress(UserError), identify(path) as image:  # who reads the image says what is wrong with it
            sizes.add(image.size)
        if len(sizes) > 1:
            break
    own = sizes.pop() if len(sizes) == 1 else (SIDE, SIDE)
    return own if min(own) >= 8 and max(own) <= 2 * SIDE else (SIDE, SIDE)


def own_shape(paths: Iterable[Path]) -> tuple[int, int, int]:
    """(ch, H, W) for images that are not read yet: colour where one of them has it."""
    width, height = own_size(paths)
    for path in paths:
        with contextlib.suppress(UserError), identify(path) as image:
            if not (image.mode in ("1", "L") or image.mode.startswith("I")):
                return 3, height, width
    return 1, height, width


def stack_images(images: Sequence[Image.Image]) -> np.ndarray:
    mode = "L" if all(image.mode == "L" for image in images) else "RGB"
    return np.stack([np.asarray(image.convert(mode)) for image in images])


def own_policy(x: Items) -> AnyPolicy:
    """Views for items of which nothing else is known. Rows of equal length are embeddings: their geometry is that of
    the cosine, so all features are scaled alike; other features are each scaled to a standard deviation of 1. Colour
    images are taken for photographs, which may be mirrored; grey ones may be writing, which may not."""
    if isinstance(x, Tensor) and x.dim() == 2:
        mean, std = x.double().mean(0), x.double().std(0, correction=0)
        norm = x.double().norm(dim=1)
        if x.shape[1] > 1 and float(norm.min()) > 0.99 * float(norm.max()):
            std = std.square().mean().sqrt().expand_as(std)
        std = torch.where(std > 1e-9 * mean.abs().clamp_min(1e-30), std, 1.0)  # a constant feature stays 0
        return Features(tuple(mean.tolist()), tuple(std.tolist()))
    few = x[:: max(1, len(x) // 5000)]
    few = few.small() if isinstance(few, Streamed) else few
    some = few.float().div(255).transpose(0, 1).flatten(1)  # (ch, many)
    mean, std = some.mean(1), some.std(1, correction=0).clamp_min(1e-3)
    side, colour = min(x.shape[2:]), x.shape[1] == 3
    return Policy(colour, side // 8, side // 2, colour, tuple(mean.tolist()), tuple(std.tolist()))


def data_sha256(dataset: Dataset) -> str:
    """Of the items' shape, type and content, of images that are streamed their names; and of their sets and classes."""
    x = dataset.x
    digest = hashlib.sha256(f"{tuple(x.shape)} {dataset.classes}".encode(errors="surrogatepass"))
    if isinstance(x, Streamed):
        digest.update("\n".join(x.names).encode(errors="surrogatepass"))
    else:
        digest.update(str(x.dtype).encode())
        digest.update(x.contiguous().numpy().data)
    if dataset.S is not None:
        digest.update(np.packbits(dataset.S.numpy()).data)
    return digest.hexdigest()
