"""Augmentation against slow oracles: PIL one image at a time, F.pad and slices, and counts of the draws."""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from urrl.data import augment
from urrl.data.augment import (
    OPERATIONS,
    POLICIES,
    RANGES,
    SUBPOLICIES,
    Policy,
    make_views,
    normalise,
    strong,
    weak,
)

CIFAR = POLICIES["cifar"]
RAW = Policy(False, 0, 0, False, mean=(0.0,) * 3, std=(1.0,) * 3)  # nothing done: a view is pixels / 255
RAW1 = replace(RAW, mean=(0.0,), std=(1.0,))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads that wait for each other on a busy machine make these small tensors 200 times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int = 24, c: int = 3, h: int = 32, w: int = 32) -> Tensor:
    """Noise, smooth ramps, few levels, narrow ranges and constants: (n, c, h, w) uint8."""
    g = seeded(5)
    noise = torch.randint(0, 256, (n, c, h, w), generator=g)
    ramp = (torch.arange(h)[:, None] * 5 + torch.arange(w) * 2 + torch.arange(c).view(c, 1, 1) * 20) % 256
    kinds = [
        noise[0::6],
        ramp + noise[1::6] // 16,
        noise[2::6] // 64 * 80,
        90 + noise[3::6] // 5,
        noise[4::6] % 3,
    ]
    kinds.append((noise[5::6, :, :1, :1] + torch.zeros(h, w)).long())
    return torch.cat(kinds).clamp(0, 255).to(torch.uint8)


def pixels(views: Tensor) -> Tensor:
    """Undo the normalisation of RAW."""
    return (views * 255).round().to(torch.uint8)


# ---- the operations, against PIL -------------------------------------------------------------------


def pil_operation(image: Image.Image, name: str, m: float) -> Image.Image:
    w, h = image.size
    affine = {
        "ShearX": (1, m, 0, 0, 1, 0),
        "ShearY": (1, 0, 0, m, 1, 0),
        "TranslateX": (1, 0, -int(m * w), 0, 1, 0),
        "TranslateY": (1, 0, 0, 0, 1, -int(m * h)),
    }
    if name in affine:
        return image.transform(image.size, Image.Transform.AFFINE, affine[name], Image.Resampling.NEAREST)
    if name == "Rotate":
        return image.rotate(m, Image.Resampling.NEAREST)
    if name in ("Color", "Contrast", "Sharpness", "Brightness"):
        enhanced: Image.Image = getattr(ImageEnhance, name)(image).enhance(m)
        return enhanced
    if name == "Posterize":
        return ImageOps.posterize(image, round(m))
    if name == "Solarize":
        return ImageOps.solarize(image, m)  # type: ignore[arg-type]  # a float threshold is compared as it is
    changed: Image.Image = getattr(ImageOps, name.lower())(image)
    return changed


def to_pil(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy())


def with_pil(x: Tensor, name: str, m: float) -> np.ndarray:
    """(n, c, h, w) -> (n, h, w, c)"""
    out = np.stack([np.asarray(pil_operation(to_pil(image), name, m)) for image in x])
    return out.reshape(len(x), *x.shape[2:], x.shape[1])


def batched(x: Tensor, name: str, m: float) -> np.ndarray:
    op = torch.full((len(x),), OPERATIONS.index(name))
    magnitude = torch.full((len(x),), m, dtype=torch.float64)
    out = augment.apply_operations(x.permute(0, 2, 3, 1).contiguous(), op, magnitude)
    assert out.dtype == torch.uint8
    return out.numpy()


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (3, 17, 40)], ids=str)
def test_operation_matches_pil_at_every_level(name: str, shape: tuple[int, int, int]) -> None:
    x = images(24, *shape)
    plain = x.permute(0, 2, 3, 1).numpy()
    changed = False
    for m in {augment.magnitude_of(name, level, sign) for level in range(10) for sign in (1, -1)}:
        got, want = batched(x, name, m), with_pil(x, name, m)
        if name == "AutoContrast":  # see the next test
            want = np.where(got - want == 1, got, want)
        assert np.array_equal(got, want), (name, m)
        changed |= not np.array_equal(want, plain)
    assert changed or (name == "Color" and shape[0] == 1)


def test_autocontrast_is_the_exact_quotient_and_pil_one_short_now_and_then() -> None:
    differs = total = 0
    for low, high in [(0, 255), (0, 254), (3, 77), (100, 101), (10, 200), (64, 191), (1, 50)]:
        x = torch.arange(low, high + 1, dtype=torch.uint8).view(1, 1, 1, -1)
        got = batched(x, "AutoContrast", 0.0).astype(int).reshape(-1)
        assert got.tolist() == [(v - low) * 255 // (high - low) for v in range(low, high + 1)]
        short = got - with_pil(x, "AutoContrast", 0.0).reshape(-1)
        assert short.min() >= 0 and short.max() <= 1
        differs, total = differs + int(short.sum()), total + len(short)
    assert differs < 0.02 * total


def test_a_stage_gives_each_image_its_own_operation_and_magnitude() -> None:
    x = images(24)
    choices = [(name, augment.magnitude_of(name, level)) for name in OPERATIONS for level in (4, 9)]
    op, m = zip(*[choices[(5 * i) % len(choices)] for i in range(len(x))], strict=True)
    code = torch.tensor([OPERATIONS.index(name) for name in op])
    code[3] = -1
    magnitude = torch.tensor(m, dtype=torch.float64)
    out = augment.apply_operations(x.permute(0, 2, 3, 1).contiguous(), code, magnitude)
    for i in range(len(x)):
        want = with_pil(x[i : i + 1], op[i], m[i])[0] if i != 3 else x[i].permute(1, 2, 0).numpy()
        assert np.abs(out[i].numpy().astype(int) - want).max() <= 1, op[i]


# ---- the sub-policies ------------------------------------------------------------------------------


def test_the_table_is_the_published_one() -> None:
    """A slip in one figure shows nowhere else. The digest is of a copy compared with torchvision's."""
    text = "\n".join(" ".join(line) for line in SUBPOLICIES)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "26359816a2879acb"


def span(name: str, magnitude: float) -> float:
    """How far from the operation's start, without the sign."""
    return round(abs(magnitude - RANGES[name][0]), 6)


def test_draws_follow_the_table() -> None:
    """Every (operation, magnitude) pair of the two stages comes as often as uniform sub-policies say."""
    n = 50_000
    op, magnitude = augment.draw_operations(n, seeded())
    expected: dict[tuple[float, ...], float] = defaultdict(float)
    for first, p, level, second, q, level2 in SUBPOLICIES:
        for happens in product((True, False), repeat=2):
            pair: list[float] = []
            chance = 1 / len(SUBPOLICIES)
            for yes, name, prob, lev in zip(happens, (first, second), (p, q), (level, level2), strict=True):
                chance *= float(prob) if yes else 1 - float(prob)
                distance = span(name, augment.magnitude_of(name, int(lev)))
                pair += [OPERATIONS.index(name), distance] if yes else [-1, 0]
            expected[tuple(pair)] += chance
    found: Counter[tuple[float, ...]] = Counter()
    for a, m, b, m2 in zip(*(t.tolist() for t in (op[0], magnitude[0], op[1], magnitude[1])), strict=True):
        found[(a, span(OPERATIONS[a], m) if a >= 0 else 0, b, span(OPERATIONS[b], m2) if b >= 0 else 0)] += 1
    assert len(SUBPOLICIES) == 25 and set(found) <= {key for key, chance in expected.items() if chance > 0}
    for key, chance in expected.items():
        assert found[key] / n == pytest.approx(chance, abs=5 * (chance / n) ** 0.5 + 1e-9), key


def test_signed_operations_go_both_ways_and_the_others_do_not() -> None:
    op, magnitude = augment.draw_operations(50_000, seeded(1))
    assert set(op.view(-1).tolist()) == set(range(-1, len(OPERATIONS))) - {OPERATIONS.index("ShearX")}
    for code, name in enumerate(OPERATIONS):
        start, _, signed = RANGES[name]
        m = magnitude[(op == code) & (magnitude != start)]
        if len(m):
            assert (m > start).double().mean() == pytest.approx(0.5 if signed else 0.0, abs=0.05), name
    both = (op == OPERATIONS.index("TranslateY")).all(0)  # the two stages draw their own signs
    assert (magnitude[0] * magnitude[1])[both].gt(0).double().mean() == pytest.approx(0.5, abs=0.1)


# ---- flip, crop, cutout ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (3, 9, 14)], ids=str)
def test_flip_crop_is_flip_pad_slice(shape: tuple[int, int, int]) -> None:
    x, pad = images(24, *shape), 4
    n, (_, h, w) = len(x), shape
    flip = torch.rand(n, generator=seeded(1)) < 0.5
    down, right = torch.randint(-pad, pad + 1, (2, n), generator=seeded(2))
    down[:4], right[:4] = (
        torch.tensor([-pad, pad, -pad, pad]),
        torch.tensor([-pad, -pad, pad, pad]),
    )  # the corners
    got = augment.flip_crop(x, flip, down, right).permute(0, 3, 1, 2)
    for i in range(n):
        image = x[i].flip(2) if flip[i] else x[i]
        padded = F.pad(image[None].float(), (pad,) * 4, mode="reflect")[0].to(torch.uint8)
        top, left = pad + int(down[i]), pad + int(right[i])
        assert torch.equal(got[i], padded[:, top : top + h, left : left + w])


def test_flip_crop_takes_any_memory_layout() -> None:
    x = images(12)
    args = torch.tensor([True, False] * 6), torch.arange(12) % 5 - 2, torch.arange(12) % 3 - 1
    other = x.to(memory_format=torch.channels_last)
    assert torch.equal(augment.flip_crop(x, *args), augment.flip_crop(other, *args))


def test_weak_draws_every_flip_and_shift_evenly() -> None:
    """An image whose pixel values tell where they came from: the draw can be read back from the view."""
    h = w = 12
    place = (torch.arange(h)[:, None] * w + torch.arange(w)).to(torch.uint8)
    x = place.expand(9_000, 1, h, w)
    policy = replace(RAW1, flip=True, pad=1)
    y = pixels(weak(x, policy, seeded()))[:, 0].int()
    row, col, step = y[:, 5, 5] // w, y[:, 5, 5] % w, y[:, 5, 6] - y[:, 5, 5]
    draws = Counter(zip(row.tolist(), col.tolist(), step.tolist(), strict=True))
    assert len(draws) == 2 * 3 * 3 and set(step.tolist()) == {1, -1}
    assert min(draws.values()) > 400 and max(draws.values()) < 600  # 500 each, sd 22


@pytest.mark.parametrize(("side", "size"), [(16, 32), (3, 8), (16, 28)])
def test_cutout_holes(side: int, size: int) -> None:
    n = 4_000
    x = torch.full((n, 1, size, size), 255, dtype=torch.uint8)
    hole = pixels(strong(x, replace(RAW1, cutout=side), seeded()))[:, 0] == 0  # (n, size, size)
    rows, cols = hole.any(2), hole.any(1)
    assert torch.equal(hole, rows[:, :, None] & cols[:, None, :])  # a rectangle
    for span in (rows, cols):
        length = span.sum(1)
        first, last = span.int().argmax(1), size - 1 - span.flip(1).int().argmax(1)
        assert torch.equal(last - first + 1, length)  # in one piece
        assert length.max() == side and length.min() == side // 2 + side % 2  # clipped to half
        touches = (first == 0) | (last == size - 1)
        assert (length[~touches] == side).all()
        centre = torch.where(first > 0, first + side // 2, last - (side - 1 - side // 2))
        counts = torch.bincount(centre, minlength=size)
        assert len(counts) == size and counts.min() > 0.5 * n / size and counts.max() < 1.5 * n / size
    want = np.mean([min(c - side // 2 + side, size) - max(c - side // 2, 0) for c in range(size)]) ** 2
    assert hole.double().sum((1, 2)).mean().item() == pytest.approx(want, rel=0.03)


# ---- the views -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "c", "side"), [("cifar", 3, 32), ("fmnist", 1, 28), ("digits", 1, 8)])
def test_views_have_shape_type_and_layout_and_leave_the_input_alone(name: str, c: int, side: int) -> None:
    x = images(24, c, side, side)
    before = x.clone()
    names = ("plain", "weak", "strong", "strong2")
    views = make_views(x, names, POLICIES[name], seeded())
    assert tuple(views) == names and torch.equal(x, before)
    for view in views.values():
        assert view.shape == x.shape and view.dtype == torch.float32
        assert view.is_contiguous(memory_format=torch.channels_last)
        assert view.isfinite().all()
    assert not torch.equal(views["strong"], views["strong2"])


def test_normalise() -> None:
    x = images()
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (CIFAR.mean, CIFAR.std))
    torch.testing.assert_close(normalise(x, CIFAR), (x / 255 - mean) / std, rtol=1e-5, atol=1e-6)


def test_digits_statistics() -> None:
    data = pytest.importorskip("sklearn.datasets").load_digits().images
    x = torch.from_numpy(np.rint(data * 255 / 16)).to(torch.uint8)[:, None]
    y = normalise(x, POLICIES["digits"])
    assert y.mean().item() == pytest.approx(0, abs=1e-3) and y.std().item() == pytest.approx(1, abs=1e-3)


def test_the_identity_when_nothing_is_drawn() -> None:
    x = images()
    for view in (weak, strong):
        assert torch.equal(view(x, RAW, seeded()), normalise(x, RAW))
    nothing = torch.full((len(x),), -1)
    channels_last = x.permute(0, 2, 3, 1).contiguous()
    assert torch.equal(augment.apply_operations(channels_last, nothing, torch.zeros(len(x))), channels_last)


@pytest.mark.parametrize("view", [weak, strong])
def test_draws_are_per_sample_and_repeatable(view: Callable[..., Tensor]) -> None:
    x = images()[:1].expand(64, 3, 32, 32)  # one image 64 times
    views = view(x, CIFAR, seeded(3))
    assert torch.equal(views, view(x, CIFAR, seeded(3)))
    assert not torch.equal(views, view(x, CIFAR, seeded(4)))
    assert len({v.numpy().tobytes() for v in views.contiguous()}) > 45  # of 162 weak views about 53 are met


def test_strong_is_crop_then_cutout_then_the_two_operations() -> None:
    """The same draws replayed one image at a time with PIL: strong, end to end."""
    x, policy = images(240), replace(RAW, flip=True, pad=4, cutout=16, autoaugment=True)
    got = pixels(strong(x, policy, seeded(8))).permute(0, 2, 3, 1).numpy()
    g = seeded(8)
    rows = augment.Rows(slice(None), len(x))
    cut = augment._cutout(augment._flip_crop(x, policy, g, rows), policy.cutout, g, rows)
    op, magnitude = augment.draw_operations(len(x), g)
    exact = 0
    for i, image in enumerate(cut.permute(0, 3, 1, 2)):
        picture = to_pil(image)
        names = [OPERATIONS[code] for code in op[:, i] if code >= 0]
        for name, m in zip(names, magnitude[op[:, i] >= 0, i].tolist(), strict=True):
            picture = pil_operation(picture, name, m)
        if "AutoContrast" not in names:
            assert np.array_equal(got[i], np.asarray(picture)), names
            exact += len(names) == 2
    assert exact > 40


def test_mistakes_are_named() -> None:
    x = images()
    with pytest.raises(ValueError, match="unknown view 'medium'"):
        make_views(x, ("medium",), CIFAR, seeded())
    with pytest.raises(TypeError, match="uint8"):
        weak(x.float(), CIFAR, seeded())
    with pytest.raises(ValueError, match="channels"):
        weak(x, POLICIES["fmnist"], seeded())
    with pytest.raises(ValueError, match="padding"):
        weak(x[:, :, :4], CIFAR, seeded())


def test_picture(tmp_path: Path) -> None:
    x = images(12)
    grid = augment.picture(x, CIFAR, seeded(), rows=3)
    assert grid.shape == (3 * 32, 9 * 32, 3) and grid.dtype == np.uint8
    assert np.array_equal(grid[:32, :32], x[0].permute(1, 2, 0).numpy())  # the original first
    for name, c in (("cifar", 3), ("digits", 1)):
        augment.save_picture(images(12, c), POLICIES[name], tmp_path / f"{name}.png")
        assert Image.open(tmp_path / f"{name}.png").size[0] > 9 * 32
