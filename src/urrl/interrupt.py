"""Ctrl-C that is not lost: Python drops a KeyboardInterrupt that is raised while an object is being deleted, and worker
processes are stopped just then. So it is remembered, and long work asks."""

from __future__ import annotations

import signal
import threading
from typing import Any

_asked = False


def remember() -> None:
    """From now on; where someone else handles Ctrl-C or ignores it, it stays theirs."""
    global _asked
    _asked = False
    known = signal.getsignal(signal.SIGINT) in (signal.default_int_handler, _stop)
    if known and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _stop)


def check() -> None:
    """Raise what was dropped."""
    if _asked:
        raise KeyboardInterrupt


def _stop(*_: Any) -> None:
    global _asked
    _asked = True
    raise KeyboardInterrupt
