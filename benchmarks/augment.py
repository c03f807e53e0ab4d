"""Views a second on one thread: our whole-batch augmentation over a per-image PIL pipeline of the same operations.

python benchmarks/augment.py [--repeats 9]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps

from urrl.data.augment import OPERATIONS, POLICIES, draw_operations, strong, weak

B = 256


def pil_operation(image: Image.Image, name: str, m: float) -> Image.Image:
    """One AutoAugment operation, as PIL does it."""
    enhance = {"Color": ImageEnhance.Color, "Contrast": ImageEnhance.Contrast, "Sharpness": ImageEnhance.Sharpness,
               "Brightness": ImageEnhance.Brightness}  # fmt: skip
    if name in enhance:
        return enhance[name](image).enhance(m)
    if name == "Rotate":
        return image.rotate(m)
    if name in ("ShearX", "ShearY", "TranslateX", "TranslateY"):
        matrix = {"ShearX": (1, m, 0, 0, 1, 0), "ShearY": (1, 0, 0, m, 1, 0),
                  "TranslateX": (1, 0, 32 * m, 0, 1, 0), "TranslateY": (1, 0, 0, 0, 1, 32 * m)}[name]  # fmt: skip
        return image.transform(image.size, Image.Transform.AFFINE, matrix)
    if name == "Posterize":
        return ImageOps.posterize(image, round(m))
    if name == "Solarize":
        return ImageOps.solarize(image, int(m))
    return getattr(ImageOps, name.lower())(image)  # AutoContrast, Equalize, Invert


def pil_view(
    array: np.ndarray, flip: bool, row: int, col: int, steps: list[tuple[str, float]], hole: bool
) -> np.ndarray:
    padded = np.pad(array, ((4, 4), (4, 4), (0, 0)), mode="reflect")
    image = Image.fromarray(padded[row : row + 32, col : col + 32])
    if flip:
        image = ImageOps.mirror(image)
    if hole:
        pixels = np.array(image)
        pixels[max(0, row * 4 - 8) : row * 4 + 8, max(0, col * 4 - 8) : col * 4 + 8] = 0
        image = Image.fromarray(pixels)
    for name, magnitude in steps:
        image = pil_operation(image, name, magnitude)
    return (np.asarray(image, dtype=np.float32) / 255 - 0.5) / 0.25


def per_second(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return B / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    # Smooth images, so that the histogram operations have something to do.
    x = torch.nn.functional.interpolate(torch.rand(B, 3, 8, 8, generator=rng), 32, mode="bilinear").mul(255).byte()
    arrays = list(x.permute(0, 2, 3, 1).contiguous().numpy())
    policy = POLICIES["cifar"]

    def pil(is_strong: bool) -> None:
        draws = np.random.default_rng(0)
        code, magnitude = draw_operations(B, rng)
        for i, array in enumerate(arrays):
            steps = [(OPERATIONS[c[i]], float(m[i])) for c, m in zip(code.tolist(), magnitude) if c[i] >= 0]
            row, col = (int(v) for v in draws.integers(0, 9, 2))
            pil_view(array, draws.random() < 0.5, row, col, steps if is_strong else [], is_strong)

    figures: dict[str, float] = {}
    for name, view in (("weak", weak), ("strong", strong)):
        ours, theirs = partial(view, x, policy, rng), partial(pil, name == "strong")
        ours()
        pairs = [(per_second(ours), per_second(theirs)) for _ in range(args.repeats)]
        figures[f"{name}_per_second"] = statistics.median(a for a, _ in pairs)
        figures[f"{name}_over_pil"] = statistics.median(a / b for a, b in pairs)
        print(f"{name:<8}{figures[f'{name}_per_second']:>10.0f} img/s{figures[f'{name}_over_pil']:>8.1f} x PIL")
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
