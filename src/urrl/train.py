"""The training loop, the only one.

Randomness is a function of (seed, epoch): the order, the augmentation and the method's own draws are seeded anew
at each epoch, so that a resumed run goes on bit for bit from the end of its last epoch.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode

from urrl import checkpoint, distributed, interrupt
from urrl.config import Training
from urrl.data.augment import AnyPolicy, Rows, make_views, normalise
from urrl.data.stream import Items, rows_of
from urrl.errors import UserError, one_line
from urrl.evaluate import outputs
from urrl.files import UNREADABLE, append_text, sealed, unseal, write_text
from urrl.methods import Batch, Method
from urrl.nets import Network, Out, build_network
from urrl.progress import Progress
from urrl.seeding import derive_seed, generator

SHRINK = 2.5  # of weight_decay=-1; how it was found: docs/trials.md
SETTLED = 0.1  # of the run: what the lean net's stem learns, it learns at the start, as in cifar10-airbench
SECOND = 0.6  # the learning rate's second peak, where it climbs again, beside the first
PIXELS = 4_000_000  # of the images with which a network begins


class Diverged(Exception):
    """The loss is not a number any more. The last good state is kept."""


@dataclass
class State:
    """What moves besides the method, the optimiser and the averaged weights."""

    epoch: int = 0  # epochs finished
    best: float = -math.inf
    best_epoch: int = 0
    best_weights: dict[str, Tensor] = field(default_factory=dict)
    flops: int = 0  # of everything since the start: steps, passes over all items, neighbours, validation
    seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)  # a record an epoch, as in metrics.jsonl


def fit(method: Method, x: Items, policy: AnyPolicy, training: Training, seed: int,
        examine: Callable[[Network], dict[str, Any]], folder: Path | None, resume: bool, show: Progress
        ) -> State:  # fmt: skip
    """Train `method` on x (n, ...). `examine(net)` is asked after each epoch for a record of the validation, by which
    the best epoch is chosen. Writes metrics.jsonl and the checkpoints into the folder; None: keeps all in memory."""
    x = x.to(next(method.net.parameters()).device)
    method.total_epochs, method.may_stop, method.scouted = training.epochs, training.patience > 0, scouted(training)
    turn = method.scouted
    exact: dict[str, Any] = {"scouting": turn / training.epochs} if turn else {"scout": 0}
    training = dataclasses.replace(training, **exact)  # a network begins with an epoch
    steps = count_batches(len(x), training.batch_size)  # an epoch, each with a batch for every member
    start, end = 0, turn or training.epochs  # the epochs in which this network learns
    total = training.epochs * steps
    net, average, optimiser = _learner(method.net, training, total, 0, training.scouting if turn else 1)
    judged = average or net  # what is evaluated, and what sees all items between epochs
    counting = functools.partial(counted, training.compile, folder is not None)
    half = half_precision(x.device, training.bf16)
    scaler = torch.amp.GradScaler(x.device.type, enabled=half == torch.float16)
    state = State()

    def take_over() -> None:
        """The scout has told what it knows, and the network of the run begins."""
        nonlocal net, average, optimiser, judged, start, end
        start, end = turn, training.epochs
        own = new_network(training, training.width, x, policy, method.S.shape[1], derive_seed(seed, "weights", "own"))
        method.net = own.to(x.device)
        net, average, optimiser = _learner(method.net, training, total, training.scouting, 1)
        judged = average or net

    load = functools.partial(checkpoint.load_epoch, folder, show.say) if folder and resume else None
    if load and (saved := distributed.on_first(load)):
        try:
            if turn and saved["state"]["epoch"] > turn:
                take_over()
            method.load_state_dict(saved["method"])
            optimiser.load_state_dict(saved["optimiser"])
            if average is not None:
                average.load_state_dict(saved["average"])
            if scaler.is_enabled():
                scaler.load_state_dict(saved["scaler"])
            state = State(**saved["state"])
        except UNREADABLE as error:
            raise UserError(f"{folder}: its checkpoint is of another run ({one_line(error)[:100]} ...)") from None
    # A killed run can have written a line that its checkpoint does not know: the checkpoint is right.
    if distributed.rank() > 0:
        folder = None  # the first process writes
    if folder:
        write_text(folder / "metrics.jsonl", "".join(map(line_of, state.history)))

    own = x[distributed.share(len(x))]

    def look(turn: int = 0) -> Out:
        with torch.autocast(x.device.type, half, enabled=half is not None):
            return outputs(judged, own, policy, training.flip_test, training.move_test, turn=turn)

    show.start(training.epochs, steps, state.epoch)
    if state.epoch == 0:
        began = time.perf_counter()
        with counting() as counter:
            # features may be of any scale
            method.prepare(normalise(x, policy) if isinstance(x, Tensor) and x.dim() == 2 else x)
        state.flops += _operations(counter)
        state.seconds += time.perf_counter() - began
    for epoch in range(state.epoch, training.epochs):
        if training.patience and epoch - state.best_epoch > training.patience:
            break
        began = time.perf_counter()
        torch.manual_seed(derive_seed(seed, "method", epoch))
        method.train()
        with counting() as counter:
            figures = method.begin_epoch(epoch, look)
        state.flops += _operations(counter)
        if turn and epoch == turn:
            take_over()
            state.best = -math.inf
        if epoch - start >= SETTLED * (end - start):
            net.settle()
        prepared = time.perf_counter()

        sums: dict[str, Tensor] = {}
        rng = generator(seed, "views", epoch)
        orders = [torch.randperm(len(x), generator=rng).tensor_split(steps) for _ in range(training.members)]
        indices = [torch.cat(parts) for parts in zip(*orders)]  # of a step: each member's rows, one after the other
        rows = training.members * len(x)
        for number, batch in enumerate(batches(x, indices, policy, method.views, rng)):
            interrupt.check()
            rate = learning_rate(epoch * steps + number, total, training)
            for group in optimiser.param_groups:
                group["lr"] = rate * group["pace"]
            # The first step's operations are counted, and stand for the epoch's other steps.
            with counting() if number == 0 else contextlib.nullcontext(counter) as counter:
                with torch.autocast(x.device.type, half, enabled=half is not None):
                    step = method.loss(batch)
                optimiser.zero_grad(set_to_none=True)
                scaler.scale(step.total * training.members).backward()  # a mean over all, as if each were alone
                distributed.sum_gradients(net)
                scaler.step(optimiser)
                scaler.update()
                if average is not None:
                    _average(average, net, training.ema, (epoch - start) * steps + number)
                method.refine(batch, step)
            if number == 0:
                state.flops += round(_operations(counter) * rows / len(batch.index))
            for name, term in {"loss": step.total, **step.terms}.items():
                sums[name] = sums.get(name, 0) + term.detach() * len(batch.index)
            if (number % 20 == 0 or number == steps - 1) and not math.isfinite(loss := float(sums["loss"])):
                raise Diverged(f"the loss became {loss} in epoch {epoch + 1} (learning rate {rate:.4g})")
            show.step()
        if not all(bool(torch.isfinite(t).all()) for t in net.state_dict().values()):
            raise Diverged(f"the weights overflowed in epoch {epoch + 1} (learning rate {rate:.4g})")
        distributed.average_statistics(method, judged)
        if step.own:
            sums = {name: distributed.summed(term) for name, term in sums.items()}
        trained = time.perf_counter()

        with counting() as counter, torch.autocast(x.device.type, half, enabled=half is not None):
            exam = examine(judged)
        state.flops += _operations(counter)
        state.epoch = epoch + 1
        merit = _merit(exam, epoch)
        if math.isnan(merit):
            raise Diverged(f"the validation became nan in epoch {epoch + 1} (learning rate {rate:.4g})")
        if merit >= state.best:  # a tie counts as better, as in the authors' code
            state.best, state.best_epoch = merit, epoch
            state.best_weights = {name: t.cpu().clone() for name, t in judged.state_dict().items()}
        ended = time.perf_counter()
        state.seconds += ended - began
        record = {
            "epoch": epoch,
            **{name: float(total) / rows for name, total in sums.items()},
            **figures,
            **exam,
            "lr": rate,
            "flops": state.flops,
            "seconds": round(state.seconds, 3),
            "once_per_epoch": round(1 - (trained - prepared) / (ended - began), 4),  # share of the epoch's time
        }
        state.history.append(record)
        if folder:
            checkpoint.save_epoch(
                folder,
                {
                    "method": method.state_dict(),
                    "optimiser": optimiser.state_dict(),
                    "average": average.state_dict() if average is not None else None,
                    "scaler": scaler.state_dict(),
                    "state": vars(state),
                },
            )
            append_text(folder / "metrics.jsonl", line_of(record))
        show.epoch(record)
    return state


def new_network(t: Training, width: int, x: Items, policy: AnyPolicy, n_classes: int, seed: int) -> Network:
    """Freshly initialised by the seed and by some of the items x, on the CPU."""
    shape = tuple(x.shape[1:])
    torch.manual_seed(seed)
    net = build_network(t.net, shape, n_classes, width, t.embed_dim, t.head, t.members)
    some = slice(0, max(1, PIXELS // math.prod(shape)))
    net.begin(normalise(next(rows_of(x, [some])).cpu(), policy))
    if t.sync_bn:
        distributed.synchronise(net)
    if len(shape) == 3:
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # twice as fast on CPUs
    return net


def _learner(net: Network, training: Training, steps: int, begin: float, end: float
             ) -> tuple[Network, Network | None, torch.optim.SGD]:  # fmt: skip
    """(net, its averaged weights, optimiser) from one share of a run's steps to another."""
    average = copy.deepcopy(net) if training.ema else None
    groups = _parameter_groups(net, training, weight_decay(training, steps, begin, end))
    optimiser = torch.optim.SGD(groups, training.lr, training.momentum, nesterov=training.nesterov)
    if training.compile:
        net.compile(dynamic=True)  # after the copy for the averaged weights, which runs too seldom to pay
    return net, average, optimiser


def scouted(training: Training) -> int:
    """The epochs of the scout, of which there are some, and some after it."""
    return min(math.ceil(training.scouting * training.epochs - 1e-9), training.epochs - 1) if training.scout else 0


def line_of(record: dict[str, Any]) -> str:
    """Of metrics.jsonl."""
    return json.dumps(sealed(record)) + "\n"


def read_history(folder: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The records of a run's epochs: of metrics.jsonl or, where a line is damaged, of the last checkpoint."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # a line without an end is being written
    try:
        return [unseal(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
    except UserError as error:
        say(f"{error}; the epochs are read from {checkpoint.LAST}")
        return list(checkpoint.load(folder / checkpoint.LAST)["state"]["history"])


def half_precision(device: torch.device, bf16: bool = False) -> torch.dtype | None:
    """What all but the test computes in, where that is faster: on CUDA and, if asked, on CPUs; losses are float32."""
    if device.type == "cpu" and bf16:
        return torch.bfloat16
    if device.type != "cuda":
        return None
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


@contextlib.contextmanager
def counted(compiled: bool, recorded: bool) -> Iterator[FlopCounterMode]:
    """Counts operations; a compiled network runs uncompiled for it, since the counter does not see into its code.
    Counting doubles the time of small tensors: only for a run that leaves a record."""
    if not recorded:
        yield FlopCounterMode(display=False)
        return
    eager = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()  # its import is slow
    with eager, FlopCounterMode(display=False) as counter:
        yield counter


def _merit(exam: dict[str, Any], epoch: int) -> float:
    """What the best epoch has most of: the likelihood of held-out candidate sets, the validation accuracy or, without
    any held-out row, training."""
    merits = (exam.get(name) for name in ("val_likelihood", "val_accuracy"))
    return next((float(merit) for merit in merits if merit is not None), float(epoch))


def count_batches(n: int, size: int) -> int:
    """Of at least two items each: one alone has no batch statistics."""
    return max(1, min(math.ceil(n / size), n // 2))


def batches(x: Items, indices: list[Tensor], policy: AnyPolicy, views: tuple[str, ...], rng: torch.Generator
            ) -> Iterator[Batch]:  # fmt: skip
    """Of these rows each. Of several processes each has the views of its share."""
    shares = [distributed.share(len(index)) for index in indices]
    for index, own, rows in zip(indices, shares, rows_of(x, [index[own] for index, own in zip(indices, shares)])):
        yield Batch(index.to(x.device), make_views(rows, views, policy, rng, Rows(own, len(index))))


def _operations(counter: FlopCounterMode) -> int:
    """By all processes."""
    return int(distributed.summed(torch.tensor(counter.get_total_flops())))


def climbs(training: Training) -> list[tuple[float, float, float]]:
    """(begin, end, highest learning rate) of each, as shares of all steps and of lr."""
    tops = {0.0: 1.0}
    if training.again:
        tops[training.again] = SECOND
    if training.scout:
        tops[training.scouting] = 1.0
    return [(begin, end, top) for (begin, top), end in zip(tops.items(), [*list(tops)[1:], 1.0])]


def learning_rate(step: int, steps: int, training: Training) -> float:
    """Up along a line over the warm-up, then down to zero, in every climb: a function of the step, so there is no state
    to keep."""
    done = (step + 1) / (steps + 1)
    begin, end, top = next(climb for climb in reversed(climbs(training)) if done >= climb[0])
    done = (done - begin) / (end - begin)
    if done < training.warmup:
        return training.lr * top * done / training.warmup
    left = (1 - done) / (1 - training.warmup)
    fall = left if training.schedule == "linear" else (1 + math.cos(math.pi * (1 - left))) / 2
    return training.lr * top * fall


def weight_decay(training: Training, steps: int, begin: float = 0.0, end: float = 1.0) -> float:
    """Of a network that learns from one share of a run's steps to another. -1: by it alone a weight would shrink to
    e^-SHRINK. At a step it loses lr / (1 - momentum) times the decay, and the learning rate is half of its highest in
    the mean of a climb, so a short run takes more decay."""
    if training.weight_decay >= 0 or not training.lr:
        return max(0.0, training.weight_decay)
    mean = training.lr / 2 * sum((to - since) * top for since, to, top in climbs(training) if begin <= since < end)
    return SHRINK * (1 - training.momentum) / (mean * steps)


def _parameter_groups(net: Network, training: Training, decay: float) -> list[dict[str, Any]]:
    """By their pace, a multiple of the learning rate, and their decay."""
    norms = (layer for layer in net.modules() if isinstance(layer, _BatchNorm))
    biases = {id(layer.bias) for layer in norms}
    groups: dict[tuple[float, float], list[Tensor]] = {}
    for p in net.parameters():
        key = (training.norm_lr if id(p) in biases else 1.0, decay if training.decay_norm or p.dim() > 1 else 0.0)
        groups.setdefault(key, []).append(p)
    return [{"params": own, "pace": pace, "weight_decay": loss} for (pace, loss), own in groups.items()]


@torch.no_grad()
def _average(average: Network, net: Network, decay: float, step: int) -> None:
    """Exponential moving average of the weights; the first steps are averaged over a shorter time."""
    decay = min(decay, (1 + step) / (10 + step))
    old, new = average.state_dict().values(), net.state_dict().values()
    floats = [(a, b) for a, b in zip(old, new) if a.is_floating_point()]
    torch._foreach_lerp_([a for a, _ in floats], [b for _, b in floats], 1 - decay)
    for a, b in zip(old, new):
        if not a.is_floating_point():
            a.copy_(b)
