"""Several processes that train as one, started by torchrun.

Each process sends its share of a batch's rows through the network. The outputs are gathered, so that every process
computes the loss of the whole batch, and the same labels, queues and prototypes after it; only the gradients of the
weights, each from its own rows, are summed. Methods therefore need not know how many processes there are, and all of
them hold the same state at any time. All draws are made for the whole batch, too. A method whose loss is a sum over
rows may leave out the gathering: see `Step.own`.

With one process nothing here communicates.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from urrl.errors import Lost, UserError

T = TypeVar("T")
PIECE = 2**16  # rows

_rank, _world = 0, 1  # of the job that runs


def rank() -> int:
    return _rank


def world() -> int:
    return _world


def local_rank() -> int:
    """Among the processes of this machine: the number of its GPU."""
    return int(os.environ["LOCAL_RANK"]) if _world > 1 else 0


def restarts() -> int:
    """How many times torchrun has started this job again, after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


@contextlib.contextmanager
def job() -> Iterator[None]:
    """Inside, the processes that torchrun started are one. A process waits for the others no longer than URRL_TIMEOUT
    seconds (600), then it raises Lost. The first process that fails leaves with its error, to be told; the others,
    which fail of the same or because they have lost that one, just exit."""
    import torch.distributed as dist

    global _rank, _world
    _rank, _world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if local_rank() < torch.cuda.device_count():
        torch.cuda.set_device(local_rank())
    try:
        timeout = timedelta(seconds=float(os.environ.get("URRL_TIMEOUT", 600)))
    except (ValueError, OverflowError):
        raise UserError(f"URRL_TIMEOUT is a number of seconds, not {os.environ['URRL_TIMEOUT']!r}") from None
    store, *_ = next(dist.rendezvous("env://", timeout=timeout))
    store = dist.PrefixStore(f"start {restarts()}", store)  # else a job that is started again finds the dead one's keys
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        _call(dist.init_process_group, backend, store=store, rank=_rank, world_size=_world, timeout=timeout)
        _call(dist.barrier)  # else one that fails at once is gone before the others have met it
        yield
        _call(dist.barrier)  # gloo aborts where one process leaves while another still talks to it
    except (UserError, OSError, Lost) as error:
        with contextlib.suppress(RuntimeError):  # where the store has gone, too
            if store.add("told", 1) > 1:
                raise SystemExit(1 if isinstance(error, Lost) else 2) from None
        raise
    finally:
        _rank, _world = 0, 1
        if dist.is_initialized():
            dist.destroy_process_group()


def _call(collective: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    try:
        collective(*arguments, **options)
    except RuntimeError as error:
        reason = re.sub(r"^\[.*?\] ", "", str(error).strip().splitlines()[0]).partition(". ")[0]
        raise Lost(f"process {_rank} of {_world} lost contact with the others ({reason})") from None


# ---- rows --------------------------------------------------------------------------------------------------


def share(total: int, of: int | None = None) -> slice:
    """The rows, of so many, that belong to this process (or to another): as equal parts as can be, in order."""
    rows, more = divmod(total, _world)
    of = _rank if of is None else of
    start = of * rows + min(of, more)
    return slice(start, start + rows + (of < more))


def gather(parts: Sequence[Tensor], total: int) -> list[Tensor]:
    """(b, ...) each, the rows of this process -> (total, ...) each, everybody's, all in one go.
    Everybody goes on to compute the same from them, so the gradient of its own rows is known to each process."""
    if _world == 1:
        return list(parts)
    return list(_Gather.apply(total, *parts))


def total(rows: int) -> int:
    """How many rows all processes have, if this one has so many."""
    return int(summed(torch.tensor(rows)))


def every(step: int, rows: int) -> Tensor:
    """Where each step-th of all rows, from the first, lies among the `rows` that are this process's share."""
    return torch.arange(-share(total(rows)).start % step, rows, step)


def everyone(x: Tensor) -> Tensor:
    """(b, ...), as many rows as this process has of something -> everybody's, in the order of the processes."""
    if _world == 1:
        return x
    import torch.distributed as dist

    counts = [torch.empty(1, dtype=torch.long, device=x.device) for _ in range(_world)]
    _call(dist.all_gather, counts, torch.tensor([len(x)], device=x.device))
    most = max(map(int, counts))
    padded = x.new_zeros(most, *x.shape[1:])
    padded[: len(x)] = x
    out = x.new_empty(_world, *padded.shape)
    _call(dist.all_gather, list(out), padded)
    return torch.cat([rows[: int(count)] for rows, count in zip(out, counts)])


def pieces(x: Tensor, total: int) -> Iterator[tuple[int, Tensor]]:
    """Everybody's rows in turn, (number of the first row, rows), at most PIECE at a time, where x holds this process's
    share of so many: what takes them in need never hold them all."""
    if _world == 1:
        yield 0, x
        return
    import torch.distributed as dist

    for process in range(_world):
        rows = share(total, process)
        for start in range(rows.start, rows.stop, PIECE):
            stop = min(start + PIECE, rows.stop)
            mine = x[start - rows.start : stop - rows.start].contiguous() if process == _rank else None
            piece = x.new_empty(stop - start, *x.shape[1:]) if mine is None else mine
            _call(dist.broadcast, piece, process)
            yield start, piece


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: int, *parts: Tensor) -> tuple[Tensor, ...]:
        import torch.distributed as dist

        ctx.total = total
        ctx.set_materialize_grads(False)  # a weight that nothing depends on has no gradient, as with one process
        most = -(-total // _world)
        flat = torch.cat([part.reshape(len(part), math.prod(part.shape[1:])) for part in parts], 1)  # (b, F)
        out = flat.new_empty(_world, most, flat.shape[1])
        _call(dist.all_gather, list(out), F.pad(flat, (0, 0, 0, most - len(flat))))
        full = total % _world or _world  # so many processes have `most` rows, the others one less
        whole = torch.cat([out[:full].flatten(0, 1), out[full:, : most - 1].flatten(0, 1)])  # (total, F)
        columns = whole.split([math.prod(part.shape[1:]) for part in parts], 1)
        return tuple(
            rows.reshape(total, *part.shape[1:]).to(part.dtype).contiguous() for rows, part in zip(columns, parts)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        own = share(ctx.total)
        return None, *(None if gradient is None else gradient[own] for gradient in gradients)


def partners(x: Tensor, partner: Tensor) -> Tensor:
    """x[partner], where x (b, ...) holds this process's rows of a batch and partner (B,) is a permutation of the whole
    batch's: (b, ...). Each row travels to the one process that needs it."""
    if _world == 1:
        return x[partner]
    import torch.distributed as dist

    partner = partner.cpu()
    shares = [share(len(partner), process) for process in range(_world)]
    mine = shares[_rank]
    leaving = []  # for every process the rows of mine that it needs, in its order
    for rows in (partner[theirs] for theirs in shares):
        leaving.append(rows[(rows >= mine.start) & (rows < mine.stop)] - mine.start)
    owner = torch.bucketize(partner[mine], torch.tensor([theirs.stop for theirs in shares]), right=True)  # (b,)
    rows = x[torch.cat(leaving).to(x.device)].contiguous()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)  # comes in the order of the owners
    _call(dist.all_to_all_single, out, rows, owner.bincount(minlength=_world).tolist(), [len(r) for r in leaving])
    return out[owner.argsort(stable=True).argsort().to(x.device)]


# ---- sums --------------------------------------------------------------------------------------------------


def summed(x: Tensor) -> Tensor:
    """The sum over the processes, in place."""
    if _world > 1:
        import torch.distributed as dist

        _call(dist.all_reduce, x)
    return x


def mean(x: Tensor) -> Tensor:
    """(..., b) -> (...): over the last dimension, of which every process has some; in double precision, which not every
    device has, so that it does not depend on who has what."""
    x = x.cpu().double()
    total, count = summed(torch.stack([x.sum(-1), torch.full(x.shape[:-1], x.shape[-1]).double()]))
    return total / count


def _total_of_all(tensors: Iterable[Tensor], factor: float = 1.0) -> None:
    """The sums over the processes of many tensors, times a factor, in place and in one go."""
    # in the order in which images of channels_last memory lie: any other is slower to copy
    tensors = [t.permute(0, 2, 3, 1) if t.dim() == 4 else t for t in tensors]
    flat = summed(torch.cat([t.flatten() for t in tensors])).mul_(factor)
    for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        t.copy_(part.view(t.shape))


def sum_gradients(net: nn.Module) -> None:
    """Each process has the gradient by way of its own rows."""
    if _world > 1:
        _total_of_all(p.grad for p in net.parameters() if p.grad is not None)


# ---- batch normalisation -----------------------------------------------------------------------------------


def average_statistics(*modules: nn.Module) -> None:
    """After an epoch: the running statistics, each process's of its own rows, become everybody's mean."""
    norms = dict.fromkeys(m for module in modules for m in module.modules() if isinstance(m, _BatchNorm))
    if _world > 1 and norms:
        _total_of_all((t for m in norms for t in (m.running_mean, m.running_var) if t is not None), 1 / _world)


def synchronise(module: nn.Module) -> None:
    """Batch normalisation over the rows of all processes, where each would do with its own."""
    for norm in module.modules():
        if isinstance(norm, _BatchNorm):
            norm.__class__ = SynchronisedNorm


class SynchronisedNorm(_BatchNorm):
    """torch.nn.SyncBatchNorm, which runs on GPUs alone, for any device. A process may have no rows at all; one process
    alone takes the same sums."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        y, mean, var, n = _Normalise.apply(input, self.weight, self.bias, self.eps)
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        self.running_mean.lerp_(mean, self.momentum or 0.1)
        self.running_var.lerp_(var * n / (n - 1), self.momentum or 0.1)
        return y


class _Normalise(torch.autograd.Function):
    """Sums are taken in double precision, so that they do not depend on which process has which rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
        dims = [d for d in range(x.dim()) if d != 1]
        rows = torch.tensor([x.numel() / x.shape[1]], dtype=torch.double, device=x.device)
        sums = summed(torch.cat([x.sum(dims, dtype=torch.double), rows]))  # (channels + 1,)
        n = sums[-1].float()
        mean = (sums[:-1] / sums[-1]).float()
        var = (summed((x - _wide(mean, x)).square().sum(dims, dtype=torch.double)) / sums[-1]).float()
        ctx.save_for_backward(x, weight, mean, (var + eps).rsqrt(), n)
        ctx.mark_non_differentiable(mean, var, n)
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps), mean, var, n

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, n = ctx.saved_tensors
        dims = [d for d in range(x.dim()) if d != 1]
        normal = (x - _wide(mean, x)) * _wide(scale, x)
        own = torch.stack([part.sum(dims, dtype=torch.double) for part in (dy, dy * normal)])  # by way of own rows
        by_mean, by_var = (summed(own.clone()) / n).float()
        dx = _wide(weight * scale, x) * (dy - _wide(by_mean, x) - normal * _wide(by_var, x))
        return dx, own[1].float(), own[0].float(), None


def _wide(channels: Tensor, x: Tensor) -> Tensor:
    return channels.view(1, -1, *[1] * (x.dim() - 2))


# ---- work that is not done by all alike --------------------------------------------------------------------


def on_first(work: Callable[[], T]) -> T:
    """What the first process makes of `work`, on all of them."""
    if _world == 1:
        return work()
    import torch.distributed as dist

    box = [_attempt(work if _rank == 0 else None)]
    _call(dist.broadcast_object_list, box)
    return box[0]  # type: ignore[return-value]


def in_turn(work: Callable[[], T]) -> T:
    """`work` on one process of each machine, then on the others: they find what the first has downloaded."""
    if _world == 1:
        return work()
    first = local_rank() == 0
    early = _attempt(work if first else None)
    late = _attempt(None if first else work)
    return early if first else late  # type: ignore[return-value]


def _attempt(work: Callable[[], T] | None) -> T | None:
    """`work` where there is some. What one process cannot do none can."""
    import torch.distributed as dist

    value: T | None = None
    problem: Exception | None = None
    try:
        value = work() if work else None
    except (UserError, OSError) as error:
        problem = error
    problems: list[Exception | None] = [None] * _world
    _call(dist.all_gather_object, problems, problem)
    for problem in filter(None, problems):
        raise problem
    return value
