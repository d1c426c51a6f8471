"""Notices a run that hangs, has lost a process or its launcher, and says where it was.

A thread watches, since the main one may be the one that hangs.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Literal, NamedTuple, TypeVar

from multimodal.config import parse_duration
from multimodal.distributed import Left, is_of_collectives, post_left, rank, who_left
from multimodal.errors import STOPPED, RunStopped, StopRequested
from multimodal.launcher import launcher
from multimodal.train.signals import Signals

log = logging.getLogger(__name__)

T = TypeVar("T")
Phase = Literal["join", "start", "data", "step", "save", "evaluate", "finish"]
_PATIENCE: dict[Phase, int] = {"join": 6, "start": 6, "save": 6, "finish": 6}
"""Times the limit for phases that are long by right and show nothing meanwhile."""
_ALONE: tuple[Phase, ...] = ("join", "start", "finish")
"""Phases that a signal ends on its own rank only; in the others it is agreed on."""
_TICK = 1.0
"""Seconds between two looks."""
_LEAVE_SECONDS = 20
"""That the main thread has to end by itself after another process has left."""
_ASK_SECONDS = 5
"""That whoever holds the notes has to answer a process that leaves."""


class Place(NamedTuple):
    """Where a run is."""

    phase: Phase
    step: int

    def __str__(self) -> str:
        number = rank() or int(os.environ.get("RANK", "0"))  # the latter before it has joined
        return f"rank {number}, step {self.step}, phase {self.phase!r}"


def timeout_seconds(timeout: str | None) -> float | None:
    """Seconds of a `train.timeout`."""
    return None if timeout is None else 60 * parse_duration(timeout).value


class Watchdog:
    """A context manager around all that a run does.

    It ends the process with code 1 when nothing has moved for `timeout`, or when another process
    has left and this one cannot follow by itself. Time counts in ticks of this thread, so that a
    suspended process (Ctrl-Z, a laptop's lid) does not look hung when it goes on.

    Args:
        limit: seconds of `train.timeout`, or None to wait forever; the phases "join", "start",
            "save" and "finish" may take six times that.
        signals: what this process has been asked.
    """

    def __init__(self, limit: float | None, signals: Signals):
        self.signals = signals
        self._limit = limit
        self._launcher = launcher()
        self._place = Place("join", 0)
        self._moves = 0
        self._left: Left | None = None
        self._main = threading.get_ident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._ear = threading.Thread(target=self._listen, name="watchdog's ear", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        self._ear.start()
        return self

    def at(self, phase: Phase, step: int) -> None:
        """A phase begins."""
        self._place = Place(phase, step)
        self._moves += 1

    def progress(self, count: int = 0) -> None:
        """Something has moved within the phase.

        Raises:
            StopRequested: when this process has been asked to stop.
        """
        self._moves += 1
        self.signals.check()

    def stopped(self) -> StopRequested:
        """The end on which all ranks have agreed."""
        return StopRequested(self.signals.requested or "a signal to another process")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tell the other ranks why this one leaves, and the user which rank has failed first.

        Raises:
            RunStopped: when another rank was first, or somebody has called `sys.exit`.
            StopRequested: when another rank was asked to stop, and so this one is, too.
        """
        try:
            if error is not None:
                self._leave(error)
        finally:
            self._done.set()
            self._thread.join()
            self._ear.join(_ASK_SECONDS)

    def _leave(self, error: BaseException) -> None:
        if is_of_collectives(error):
            first = self._left or _briefly(who_left)
            if first is not None and first.stopped:
                raise StopRequested(first.reason) from error
            if first is None and self._place.phase == "join":
                why = f"cannot join the other processes: {error}"
                raise RunStopped(f"{self._place}: {why}") from error
            sentence = str(error).partition(". ")[0]
            why = first.reason if first else f"killed, out of memory or not reachable ({sentence})"
            raise RunStopped(f"{self._place}: another process has ended: {why}") from error
        if isinstance(error, StopRequested):
            if self._place.phase in _ALONE:  # else all ranks have agreed to it
                _briefly(partial(post_left, Left(error.reason, stopped=True), stay=True))
            return
        told = isinstance(error, ValueError | RunStopped)  # most likely by all ranks
        reason = f"{self._place}: {type(error).__name__}: {error}"
        _briefly(partial(post_left, Left(reason, stopped=False), stay=not told))
        if isinstance(error, SystemExit):
            raise RunStopped(f"{self._place}: sys.exit({error.code}) before the end") from error
        if not told and not isinstance(error, KeyboardInterrupt):
            error.add_note(f"on {self._place}")

    def _watch(self) -> None:
        tick = _TICK if self._limit is None else min(_TICK, self._limit / 20)
        still = left_for = 0.0
        moves, orphaned = self._moves, False
        while not self._done.wait(tick):
            still = 0.0 if moves != self._moves else still + tick
            moves = self._moves
            if not orphaned and self._launcher is not None and self._launcher.is_gone():
                orphaned = True
                log.warning("the launcher has ended; stopping as on SIGTERM")
                signal.pthread_kill(self._main, signal.SIGTERM)
            left_for = 0.0 if self._left is None else left_for + tick
            if self._left is not None and left_for > _LEAVE_SECONDS:
                code = STOPPED if self._left.stopped else 1
                self._end(f"another process has ended: {self._left.reason}", code)
            patience = _PATIENCE.get(self._place.phase, 1)
            if self._limit is not None and still > self._limit * patience:
                self._end(
                    f"nothing has moved for {still / 60:.3g} min (train.timeout is "
                    f"{self._limit / 60:.3g} min; raise it if the work may take so long)"
                )

    def _listen(self) -> None:
        """Apart from the watching, since whoever holds the notes may hang too."""
        while not self._done.wait(_TICK):
            self._left = self._left or who_left()

    def _end(self, why: str, code: int = 1) -> None:
        last_resort = threading.Timer(_LEAVE_SECONDS, os._exit, (code,))
        last_resort.daemon = True
        last_resort.start()  # the log may be what hangs
        frame = sys._current_frames().get(self._main)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else "unknown\n"
        log.critical("%s: %s. It was here:\n%sending with code %d", self._place, why, stack, code)
        logging.shutdown()
        os._exit(code)


def _briefly(call: Callable[[], T]) -> T | None:
    """What `call` returns, or None if whoever holds the notes hangs and does not answer."""
    answers: list[T] = []
    asking = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    asking.start()
    asking.join(_ASK_SECONDS)
    return answers[0] if answers else None
