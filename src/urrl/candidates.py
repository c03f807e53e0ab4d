"""Candidate sets S: what they are, how the literature draws them, how they are kept on disk.

`paper` is the convention of URRL: the label, corrupted with probability mu, is always in the set; every
other class, the true one included, enters with probability eta. A corrupted item's true label can so come
back: the rate of missing true labels is mu * (1 - eta). Results under different conventions do not compare.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from urrl.errors import UserError, one_line
from urrl.files import UNREADABLE, read_npz, refuse_bomb, write_atomic
from urrl.seeding import generator


@dataclass(frozen=True)
class CandidateSets:
    """S: `mask[i, c]` says whether class c is a candidate of item i. Every row is non-empty."""

    mask: Tensor  # (n, C) bool
    about: dict[str, Any] = field(default_factory=dict)  # how they were made: eta, mu, convention, seed ...

    def __post_init__(self) -> None:
        if self.mask.dim() != 2 or self.mask.dtype != torch.bool:
            raise ValueError(f"a mask is an (n, C) bool tensor, not {tuple(self.mask.shape)} {self.mask.dtype}")
        empty = (~self.mask.any(1)).nonzero()
        if len(empty):
            raise UserError(f"candidate set of row {int(empty[0])} is empty ({len(empty)} such rows)")

    def __len__(self) -> int:
        return len(self.mask)

    @property
    def n_classes(self) -> int:
        return self.mask.shape[1]

    @property
    def mean_size(self) -> float:
        return float(self.mask.sum(1).double().mean())

    @property
    def sha256(self) -> str:
        """Of the content alone: two files with the same sets have the same hash."""
        shape = np.asarray(self.mask.shape, "<i8").tobytes()
        return hashlib.sha256(shape + np.packbits(self.mask.cpu().numpy()).tobytes()).hexdigest()

    @classmethod
    def of_labels(cls, y: Tensor, n_classes: int) -> CandidateSets:
        """Ordinary labels: one candidate each."""
        return cls(torch.nn.functional.one_hot(y, n_classes).bool())

    def save(self, path: Path) -> None:
        bits = np.packbits(self.mask.cpu().numpy())
        about = json.dumps({**self.about, "sha256": self.sha256}, sort_keys=True)

        def write(file: Any) -> None:
            np.savez_compressed(file, bits=bits, shape=np.asarray(self.mask.shape), about=np.asarray(about))

        write_atomic(path, write)

    @classmethod
    def load(cls, path: Path) -> CandidateSets:
        try:
            file = read_npz(path)
            n, n_classes = (int(v) for v in file["shape"])
            bits, about = file["bits"], json.loads(str(file["about"]))
            if n < 1 or n_classes < 2 or bits.dtype != np.uint8 or len(bits) != (n * n_classes + 7) // 8:
                raise ValueError("shape and content disagree")
            refuse_bomb(path, n * n_classes)
            mask = np.unpackbits(bits, count=n * n_classes).reshape(n, n_classes).view(bool)
            recorded = about.pop("sha256")
        except UserError:
            raise
        except UNREADABLE as error:
            raise UserError(f"{path}: not a candidate-set file ({one_line(error)})") from None
        sets = cls(torch.from_numpy(mask), about)
        if sets.sha256 != recorded:
            raise UserError(f"{path}: content does not match its recorded hash; the file is damaged")
        return sets


def uniform_transition(n_classes: int, mu: float) -> Tensor:
    """T[u, v] = P(label u is recorded as v): kept with 1 - mu, else any other class alike."""
    T = torch.full((n_classes, n_classes), mu / (n_classes - 1), dtype=torch.float64)
    return T.fill_diagonal_(1 - mu)


def corrupt(y: Tensor, transition: Tensor, rng: torch.Generator) -> Tensor:
    """Each label moves by its row of the transition matrix."""
    cdf = transition.cumsum(1)[:, :-1].contiguous()  # the last class takes what is left
    draw = torch.rand(len(y), dtype=torch.float64, generator=rng)
    return (draw[:, None] >= cdf[y]).sum(1)


def _bernoulli(y: Tensor, n_classes: int, p: float, rng: torch.Generator) -> Tensor:
    return torch.rand(len(y), n_classes, generator=rng) < p


def _with(mask: Tensor, label: Tensor, value: bool | Tensor = True) -> Tensor:
    mask[torch.arange(len(mask)), label] = value
    return mask


def _paper(y: Tensor, C: int, eta: float, transition: Tensor, rng: torch.Generator) -> Tensor:
    kept = corrupt(y, transition, rng)
    return _with(_bernoulli(y, C, eta, rng), kept)


def _clean(y: Tensor, C: int, eta: float, transition: Tensor, rng: torch.Generator) -> Tensor:
    return _with(_bernoulli(y, C, eta, rng), y)


def _clean_forced(y: Tensor, C: int, eta: float, transition: Tensor, rng: torch.Generator) -> Tensor:
    """PRODEN, CR-DPLL: an item that drew no wrong label gets one, any alike."""
    mask = _clean(y, C, eta, transition, rng)
    wrong = (y + torch.randint(1, C, y.shape, generator=rng)) % C
    alone = mask.sum(1) == 1
    mask[alone, wrong[alone]] = True
    return mask


def _dropped(y: Tensor, transition: Tensor, rng: torch.Generator) -> Tensor:
    """Which items lose their true label: with the probability that the matrix moves it."""
    leave = 1 - transition.diagonal()[y]
    return torch.rand(len(y), dtype=torch.float64, generator=rng) < leave


def _pico_plus(y: Tensor, C: int, eta: float, transition: Tensor, rng: torch.Generator) -> Tensor:
    mask = torch.zeros(len(y), C, dtype=torch.bool)
    todo = torch.arange(len(y))
    while len(todo):  # empty sets are drawn again, whole
        drawn = _bernoulli(y[todo], C, eta, rng)
        mask[todo] = _with(drawn, y[todo], ~_dropped(y[todo], transition, rng))
        todo = todo[~mask[todo].any(1)]
    return mask


def _swap(y: Tensor, C: int, eta: float, transition: Tensor, rng: torch.Generator) -> Tensor:
    """ALIM, IRNet: a clean set whose true label is then swapped for a non-candidate; full sets stay."""
    return _swap_out(_clean(y, C, eta, transition, rng), y, transition, rng)


def _swap_out(mask: Tensor, y: Tensor, transition: Tensor, rng: torch.Generator) -> Tensor:
    into = torch.rand(mask.shape, generator=rng).masked_fill(mask, -1).argmax(1)  # any non-candidate alike
    swapped = _dropped(y, transition, rng) & ~mask.all(1)
    mask[swapped, y[swapped]] = False
    mask[swapped, into[swapped]] = True
    return mask


def _fredis(y: Tensor, C: int, eta: float, transition: Tensor, rng: torch.Generator) -> Tensor:
    """At least one wrong label; a dropped true label cannot return."""
    mask = _clean_forced(y, C, eta, transition, rng)
    return _with(mask, y, ~_dropped(y, transition, rng))


CONVENTIONS: dict[str, Callable[..., Tensor]] = {
    "paper": _paper,
    "pico+": _pico_plus,
    "swap": _swap,
    "fredis": _fredis,
    "clean": _clean,
    "clean-forced": _clean_forced,
}


def generate(
    y: Tensor,
    n_classes: int,
    eta: float,
    mu: float = 0.0,
    convention: str = "paper",
    seed: int = 0,
    transition: Tensor | None = None,
) -> CandidateSets:
    """Draw candidate sets for the true labels y. The same arguments give the same bytes.

    `transition` replaces the uniform corruption by a (C, C) matrix whose rows sum to 1; then mu is not used.
    """
    if convention not in CONVENTIONS:
        raise UserError(f"convention {convention!r} is unknown; there are: {', '.join(CONVENTIONS)}")
    _check_rate("eta", eta)
    _check_rate("mu", mu)
    if n_classes < 2:
        raise UserError(f"there must be at least 2 classes, not {n_classes}")
    if convention.startswith("clean") and (mu > 0 or transition is not None):
        raise UserError(f"convention {convention!r} keeps every true label: mu must be 0, not {mu}")
    if convention == "pico+" and eta == 0 and mu == 1:
        raise UserError("convention 'pico+' with eta 0 and mu 1 has only empty sets")
    T = uniform_transition(n_classes, mu) if transition is None else transition.double()
    if T.shape != (n_classes, n_classes) or (T < 0).any():
        raise UserError(f"a transition matrix for {n_classes} classes is ({n_classes}, {n_classes}) without negatives")
    if not torch.allclose(T.sum(1), torch.ones(n_classes, dtype=torch.float64)):
        raise UserError("each row of a transition matrix sums to 1")
    rng = generator(seed, "candidates")
    mask = CONVENTIONS[convention](y.cpu(), n_classes, eta, T, rng)
    about = {"eta": eta, "mu": mu, "convention": convention, "seed": seed}
    return CandidateSets(mask, about if transition is None else {**about, "mu": None})


def make_unreliable(sets: CandidateSets, y: Tensor, mu: float, seed: int = 0) -> CandidateSets:
    """Real candidate sets, of which a share mu has the true label swapped for a non-candidate, as in `swap`: a full set
    stays, and so does the size of each."""
    _check_rate("mu", mu)
    missing = ~sets.mask[torch.arange(len(y)), y]  # some of them may be wrong already: those stay as they are
    mask = _swap_out(sets.mask.clone(), y, uniform_transition(sets.n_classes, mu), generator(seed, "candidates"))
    mask[missing] = sets.mask[missing]
    return CandidateSets(mask, {"mu": mu, "convention": "swap", "seed": seed})


def _check_rate(name: str, rate: float) -> None:
    if not 0 <= rate <= 1:
        raise UserError(f"{name} is a probability between 0 and 1, not {rate}")
