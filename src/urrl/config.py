"""Every setting of a run, with a line of doc each; strict on unknown keys, types and ranges; named recipes."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, TypeVar

from urrl.errors import UserError

T = TypeVar("T")
LARGEST = 1e30  # single precision holds little more
SMALLEST = 16  # pixels a side of what net=lean, which halves it three times, takes


def option(default: Any, doc: str, low: float | None = None, high: float | None = None,
           choices: tuple[str, ...] = ()) -> Any:  # fmt: skip
    """A dataclass field with its doc and its range, both ends included."""
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "choices": choices})


@dataclass(frozen=True)
class Training:
    """How a network is trained, whatever the method."""

    net: str = option("preact", "preact (PreAct ResNet-18), lean or fast (small, for CPUs) or mlp (feature vectors)")
    width: int = option(64, "channels of the first stage", 1, 4096)
    embed_dim: int = option(50, "size d of the embedding q", 1, 65536)
    head: str = option("linear", "embedding head", choices=("linear", "mlp"))
    members: int = option(1, "networks that learn apart and predict together, by their mean", 1, 100)
    epochs: int = option(500, "passes over the training part, of each member", 1, 32_767)
    batch_size: int = option(256, "items a step, of each member", 2, 1_000_000)
    lr: float = option(0.05, "highest learning rate", 0)
    warmup: float = option(0.0, "share of all steps in which the learning rate climbs to its highest", 0, 1)
    schedule: str = option("cosine", "how the learning rate falls to zero", choices=("cosine", "linear"))
    again: float = option(0.0, "share of all steps after which the learning rate, at zero, climbs once more, to 0.6 of "
                          "its highest; 0 = never", 0, 0.99)  # fmt: skip
    scout: int = option(0, "width of a network that learns first; then one of the whole width begins, with a climb of "
                        "its own; 0 = none", 0, 4096)  # fmt: skip
    scouting: float = option(0.3, "share of all steps that are the scout's", 0, 0.99)
    momentum: float = option(0.9, "SGD momentum", 0, 1)
    nesterov: bool = option(False, "Nesterov momentum")
    weight_decay: float = option(1e-3, "L2 penalty; -1 = one that fits the length of the run", -1)
    decay_norm: bool = option(True, "weight decay on biases and normalisation layers too")
    norm_lr: float = option(1.0, "learning rate of the biases of normalisation layers, as a multiple of lr", 0)
    ema: float = option(0.0, "decay of the averaged weights that are evaluated; 0 = none", 0, 1)
    pad: int = option(-1, "views are moved by up to so many pixels; -1 = as the paper does with these images", -1, 64)
    cutout: int = option(-1, "side of the square cut out of strong views, in pixels; -1 = as the paper does", -1, 4096)
    autoaugment: bool = option(False, "strong views by AutoAugment where the paper has it not, too: on grey images")
    flip_test: bool = option(False, "test and predict with the mean over the image and its mirror image")
    move_test: int = option(0, "and over images moved by so many pixels, up-left and down-right", 0, 4)
    bf16: bool = option(False, "all but the test in bfloat16 on a CPU too: for CPUs with AVX512-BF16 or AMX, "
                        "others are far slower")  # fmt: skip
    compile: bool = option(False, "torch.compile the network; takes a C++ compiler and a minute or two at the start")
    sync_bn: bool = option(False, "under torchrun: batch normalisation over the rows of all processes")
    patience: int = option(25, "stop after so many epochs without a better validation; 0 = never", 0)

    def __post_init__(self) -> None:
        if -1 < self.weight_decay < 0:
            raise UserError(f"option weight_decay must be at least 0, or -1, not {self.weight_decay}")
        if self.nesterov and not self.momentum:
            raise UserError("option nesterov takes a momentum above 0 (or --set nesterov=false)")
        if self.scout and (self.patience or self.again >= self.scouting):
            raise UserError("option scout takes patience=0 and an again below scouting (or --set scout=0)")


@dataclass(frozen=True)
class Run:
    """One cell of a table: what is trained on what."""

    dataset: str
    method: str
    eta: float | None  # None, as mu and convention: the sets came with the data
    mu: float | None
    convention: str | None
    seed: int
    recipe: str
    split: str
    subset: int | None
    training: Training
    options: Any  # the method's own Config
    sets_sha256: str | None = None  # of candidate sets that came from a file instead of a generator
    data_sha256: str | None = None  # of a user's own items, which have no name that others know
    source: dict[str, Any] | None = None  # a user's own files, as `load_source` takes them

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def describe(config: type) -> list[tuple[str, str, Any, str]]:
    """(name, type, default, doc) of every option."""
    return [(f.name, str(f.type), f.default, f.metadata["doc"]) for f in dataclasses.fields(config)]


def build(config: type[T], values: dict[str, Any]) -> T:
    """A config from plain values: every key known, every value of the right type and in range."""
    fields = {f.name: f for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    checked = {}
    for name, value in values.items():
        if name not in fields:
            raise UserError(f"option {name!r} is unknown; there are: {', '.join(fields)}")
        f = fields[name]
        kind = {"int": int, "float": float, "bool": bool, "str": str}[str(f.type)]
        if kind is float and type(value) is int:
            value = float(value) if abs(value) <= LARGEST else math.inf
        if type(value) is not kind:
            raise UserError(f"option {name} takes {_ARTICLE[kind]}, not {value!r}")
        if isinstance(value, float) and not abs(value) <= LARGEST:
            raise UserError(f"option {name} takes a finite number, not {value}")
        low, high, choices = (f.metadata[key] for key in ("low", "high", "choices"))
        if kind in (int, float) and not ((low is None or value >= low) and (high is None or value <= high)):
            if high is None:
                raise UserError(f"option {name} must be at least {low}, not {value}")
            raise UserError(f"option {name} must be between {low} and {high}, not {value}")
        if choices and value not in choices:
            raise UserError(f"option {name} must be one of {', '.join(choices)}, not {value!r}")
        checked[name] = value
    return config(**checked)


_ARTICLE = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """`["w_m=3", "use_cr=false"]` -> values; a word that is no JSON stays a string."""
    values: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise UserError(f"--set takes KEY=VALUE, not {setting!r}")
        if name in values:
            raise UserError(f"--set {name} is given twice")
        try:
            values[name] = json.loads(re.sub(r"^(-?)\.(?=\d)", r"\g<1>0.", text))  # .5 is a number to people
        except (ValueError, RecursionError):
            values[name] = text
    return values


_ON_PICO = ("pico", "pico_plus", "alim", "irnet")  # PiCO and what builds on it


def _paper(dataset: str, method: str, epochs: Any = None) -> dict[str, Any]:
    """The paper's settings as printed, and the compared methods' own; all defaults are the papers'."""
    values: dict[str, Any] = {}
    if method in _ON_PICO:
        values |= dict(head="mlp", embed_dim=128, lr=0.01)
    if method == "cr_dpll":
        values |= dict(lr=0.1, weight_decay=1e-4)
    if dataset == "cifar100":
        values |= {"urrl": dict(phi=0.8), "pico_plus": dict(warm=0.0625, select=0.0625, neighbours=5)}.get(method, {})
    return values


_FEW = dict(alpha=1.0, learn="labels", voting=1.0)  # a few hundred items a class: mixed, they are not learned by heart

# Where there is time for it URRL learns labels that are sure. In fewer epochs they cost more than they bring.
ENOUGH = 60
_LONG: dict[str, dict[str, Any]] = {
    "fmnist": dict(
        voting=0.05, sure=0.95, sure_from=0.18, sure_strong=0.5, fade=0.3, again=0.18, cutout=8, autoaugment=True
    ),
    # A scout learns from the sets, and a wider net begins with what it is sure of; without L_m, since the only
    # prototypes then are the scout's, whose embeddings lie elsewhere.
    "cifar10": dict(
        scout=24, scouting=0.26, voting=0.1, use_m=False, sure=0.95, sure_from=0.26, sure_own=0.5, sure_prior=0.5,
        sure_again=0.55, sure_strong=0.7, cutout=12,
    ),
}  # fmt: skip


def _fast(dataset: str, method: str, epochs: Any = None) -> dict[str, Any]:
    """For two cores: a small net, a short schedule with a warm-up, no early stop; URRL with its fast switches."""
    values: dict[str, Any] = dict(
        net="lean", width=16, embed_dim=64, epochs=40, lr=0.1, warmup=0.2, schedule="linear", nesterov=True,
        weight_decay=5e-4, decay_norm=False, ema=0.997, patience=0, flip_test=True, move_test=1,
    )  # fmt: skip
    if method == "urrl":
        values |= dict(start="vote", vote="sets", one_view="weak", learn="sets", voting=0.25, alpha=0.0, w_m=1.0)
    if dataset == "fmnist":
        values |= dict(epochs=100, pad=2, lr=0.2, weight_decay=-1.0)
    if dataset in ("cifar10", "cifar100", "cifar10n"):
        values |= dict(width=24, weight_decay=-1.0, norm_lr=16.0)
    if dataset == "cifar10":
        values |= dict(width=40, epochs=60)
    if dataset == "digits":
        values |= dict(net="fast", width=16, epochs=60, batch_size=64, ema=0.98, flip_test=False, move_test=0)
        if method == "urrl":
            values |= _FEW
    if method == "urrl" and not (isinstance(epochs, int) and epochs < ENOUGH):
        values |= _LONG.get(dataset, {})
    return values | _fast_baseline(method)


def _fast_baseline(method: str) -> dict[str, Any]:
    """What the compared methods need in a short run."""
    values: dict[str, Any] = {}
    if method in _ON_PICO:  # a fifth of the learning rate, as in the papers
        values |= dict(head="mlp", embed_dim=128, lr=0.02)
    # The papers' shares of a run are thousands of steps; here they would end before anything is learned.
    return values | {"pico_plus": dict(select=0.3, knn=0.3), "alim": dict(start=0.3)}.get(method, {})


RECIPES = {"paper": _paper, "fast": _fast}  # (dataset, method, epochs that the user asks for) -> settings


def by_size(n: int, shape: tuple[int, ...], method: str) -> dict[str, Any]:
    """What `fast` becomes for data without settings of its own, from the number and the shape of its items alone."""
    batch = 2 ** min(8, max(4, round(math.log2(n / 16))))
    steps = 600 if len(shape) == 1 else 1500
    epochs = min(100, max(25, round(steps * batch / n)))
    ema = 0.98 if n * epochs / batch < 5000 else 0.997
    values = dict(epochs=epochs, batch_size=batch, ema=ema, flip_test=False, move_test=0)
    if method == "urrl" and n < 20_000:
        values |= _FEW
    if len(shape) == 1:
        values |= dict(net="mlp", width=256, weight_decay=5e-3)
        if method == "urrl":
            values |= dict(learn="labels", voting=1.0)
        return values if method in _ON_PICO else values | dict(lr=0.05)
    if min(shape[1:]) < SMALLEST:
        return values | dict(net="fast", width=16)
    return values | dict(net="lean", width=24 if shape[0] == 3 else 16)  # colour has more to tell apart


def resolve(dataset: str, method: str, recipe: str, method_config: type, settings: dict[str, Any],
            base: dict[str, Any] | None = None, **cell: Any) -> Run:  # fmt: skip
    """A run from its recipe, what is known of the data (`base`) and the user's own settings, the later over the
    earlier."""
    if recipe not in RECIPES:
        raise UserError(f"recipe {recipe!r} is unknown; there are: {', '.join(RECIPES)}")
    training = {f.name for f in dataclasses.fields(Training)}
    own = {f.name for f in dataclasses.fields(method_config)}
    for name in settings:
        if name not in training | own:
            known = ", ".join(sorted(own) + sorted(training))
            raise UserError(f"--set {name}: no such option for method {method!r}; there are: {known}")
    values = RECIPES[recipe](dataset, method, settings.get("epochs")) | (base or {}) | settings
    if method in _ON_PICO and values.get("members", 1) != 1:
        raise UserError(f"option members above 1 does not go with {method}, which contrasts embeddings of all items: "
                        "members do not share them")  # fmt: skip
    if method in _ON_PICO and values.get("scout"):
        raise UserError(f"option scout does not go with {method}, which keeps a copy of its network")
    return Run(
        dataset=dataset, method=method, recipe=recipe, **cell,
        training=build(Training, {k: v for k, v in values.items() if k in training}),
        options=build(method_config, {k: v for k, v in values.items() if k in own}),
    )  # fmt: skip
