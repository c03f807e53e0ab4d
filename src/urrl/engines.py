"""Who does the runs of a grid. What is done, failed or half done is in the runs' folders: an engine only places work.

An engine has `submit(job) -> handle`; `poll(handle)`, which gives None while it runs, then the worker's answer or
"died: ..."; and `close()`, which leaves nothing running on this machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from urrl.errors import UserError
from urrl.worker import work

Job = dict[str, Any]


class Engine(Protocol):
    def submit(self, job: Job) -> Any: ...
    def poll(self, handle: Any) -> str | None: ...
    def close(self) -> None: ...


class Local:
    """Processes of this machine, each used for run after run: importing torch takes longer than a small run."""

    def __init__(self, out: Path, threads: int, device: str):
        # Threads of two processes that fight for the same cores make both crawl.
        self.environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        (out / "logs").mkdir(parents=True, exist_ok=True)
        self.log = open(out / "logs" / "workers.log", "ab")
        self.idle: list[subprocess.Popen[bytes]] = []
        self.all: list[subprocess.Popen[bytes]] = []

    def submit(self, job: Job) -> subprocess.Popen[bytes]:
        process = self.idle.pop() if self.idle else self._start()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died while it was idle; poll will tell
            process.stdin.write(json.dumps(job).encode() + b"\n")
        return process

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "urrl.worker"], env=self.environment, bufsize=0, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self.log, start_new_session=True,  # Ctrl-C is for the grid alone
        )  # fmt: skip
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self.all.append(process)
        return process

    def poll(self, handle: subprocess.Popen[bytes]) -> str | None:
        assert handle.stdout is not None
        ended = handle.poll()  # before the pipe is read: a last answer is not lost
        if answer := handle.stdout.read(100):
            if ended is None:
                self.idle.append(handle)
            return answer.decode().strip()
        if ended is None:
            return None
        return f"died: killed by signal {-ended}" if ended < 0 else f"died: exit code {ended}"

    def close(self) -> None:
        for process in self.all:
            process.kill()
        for process in self.all:
            process.wait()
        self.log.close()


class Slurm:
    """A Slurm job a run, through submitit. `sbatch` reads the partition, the account, the time limit ... from the
    environment (SBATCH_PARTITION, SBATCH_ACCOUNT, SBATCH_TIMELIMIT ...)."""

    def __init__(self, out: Path, threads: int, device: str, cluster: str = "slurm"):
        try:
            import submitit
        except ImportError:
            raise UserError("--engine slurm takes submitit: pip install 'urrl[slurm]'") from None
        try:
            self.executor = submitit.AutoExecutor(folder=out / "logs" / "slurm", cluster=cluster)
        except RuntimeError as error:
            raise UserError(f"--engine slurm: {error}") from None
        gpus = {"gpus_per_node": 1} if device.startswith("cuda") else {}
        self.executor.update_parameters(name="urrl", cpus_per_task=threads, timeout_min=24 * 60, **gpus)
        self.all: list[Any] = []

    def submit(self, job: Job) -> Any:
        self.all.append(self.executor.submit(work, job))
        return self.all[-1]

    def poll(self, handle: Any) -> str | None:
        if not handle.done():
            return None
        try:
            return str(handle.result())
        except Exception as error:  # a time limit, a lost node: whatever submitit makes of it
            return f"died: {_first_line(error)}"

    def close(self) -> None:
        for handle in self.all:
            if not handle.done():
                handle.cancel()


class Ray:
    """Tasks of a Ray cluster, at RAY_ADDRESS, or of one started here for the grid."""

    def __init__(self, out: Path, threads: int, device: str):
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else a token is written into the home folder
        try:
            import ray
        except ImportError:
            raise UserError("--engine ray takes Ray: pip install 'urrl[ray]'") from None
        self.ray = ray
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        gpus = 1 if device.startswith("cuda") else 0
        self.task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0)(work)

    def submit(self, job: Job) -> Any:
        return self.task.remote(job)

    def poll(self, handle: Any) -> str | None:
        ready, _ = self.ray.wait([handle], timeout=0)
        if not ready:
            return None
        try:
            return str(self.ray.get(handle))
        except Exception as error:  # a worker or a node that is gone
            return f"died: {_first_line(error)}"

    def close(self) -> None:
        self.ray.shutdown()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


ENGINES: dict[str, Callable[[Path, int, str], Engine]] = {"local": Local, "slurm": Slurm, "ray": Ray}
