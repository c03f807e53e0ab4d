"""Jobs of several processes for the tests, forked from a server that has imported torch already: torchrun takes
seconds to start."""

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.test_distributed", "sklearn.datasets", "torch.distributed"])


class Ended:
    """How a process ended: its exit code, what it wrote to stderr, and what the function returned."""

    def __init__(self, code: int, err: str, value: Any):
        self.code, self.err, self.value = code, err, value


def run(world: int, function: Callable[..., Any], *arguments: Any, timeout: float = 120, **environ: str) -> list[Ended]:
    """function(*arguments) in so many processes, each with the environment that torchrun would give it. As torchrun
    does, we keep the store where they meet."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for rank in range(world):
            variables = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": store.port, "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": 0,
                "TORCHELASTIC_USE_AGENT_STORE": True, "CUDA_VISIBLE_DEVICES": "",
            }  # fmt: skip
            environment = {name: str(value) for name, value in variables.items()} | environ
            processes.append(CONTEXT.Process(target=_child, args=(folder, environment, function, arguments)))
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout)
        alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        assert not alive, f"processes {alive} of {world} hang"
        ended = []
        for rank, process in enumerate(processes):
            value = Path(folder) / f"{rank}.pt"
            assert process.exitcode is not None
            ended.append(
                Ended(
                    process.exitcode,
                    (Path(folder) / f"{rank}.err").read_text(),
                    torch.load(value, weights_only=False) if value.exists() else None,
                )
            )
        return ended


def values(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What the function returns on each process of a job."""
    ended = run(world, _in_job, function, arguments)
    assert [e.code for e in ended] == [0] * world, "\n".join(e.err for e in ended)
    return [e.value for e in ended]


def _in_job(function: Callable[..., Any], arguments: tuple) -> Any:
    from urrl import distributed

    with distributed.job():
        return function(*arguments)


def _child(folder: str, environ: dict[str, str], function: Callable[..., Any], arguments: tuple) -> None:
    os.environ |= environ
    torch.set_num_threads(1)
    rank = environ["RANK"]
    sys.stderr = open(Path(folder) / f"{rank}.err", "w", buffering=1)
    sys.stdout = open(os.devnull, "w")
    try:
        torch.save(function(*arguments), Path(folder) / f"{rank}.pt")
    except Exception:
        traceback.print_exc()
        raise
