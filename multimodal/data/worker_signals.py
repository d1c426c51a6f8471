"""Signals and loader workers: what terminals and launchers send to them too is for the run.

torchrun and terminals signal a whole process group, SLURM all processes of a job step. A worker
that died of it would end the run before the run could save.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_TO_THE_RUN = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2): the signal that a process gets when its parent dies."""


@contextmanager
def held_back() -> Iterator[None]:
    """Where workers are started, which begin with signals held back as they are here."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_THE_RUN)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_the_run() -> None:
    """In a worker: end by nothing but the SIGTERM, or the death, of the process that started it."""
    if sys.platform != "linux":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        return
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        received = signal.sigwaitinfo(_TO_THE_RUN)
        if received.si_signo == signal.SIGTERM and received.si_pid == parent:
            break
    os._exit(0)
