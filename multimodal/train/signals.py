"""Requests to stop: SIGTERM, SIGINT, SIGUSR1 and SIGHUP.

A handler only takes note. While there is work to lose, the loop asks at each step what was noted,
and all ranks learn of it by the step's own reduction; before and after, when there is nothing to
lose, the handler ends the run by itself. A second Ctrl-C ends it in any case.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any

from multimodal.errors import StopRequested

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_IMPATIENT_AFTER = 0.5
"""Seconds after which a further Ctrl-C is one of its own: launchers pass the first one on too."""


class Signals:
    """A context manager that takes note of requests to stop, and gives back the handlers it found.

    Signals that are ignored, as `nohup` sees to, stay so. Python allows handlers in the main thread
    only; in another one, signals do what they did before.
    """

    def __init__(self):
        self._process = os.getpid()
        self._noted: str | None = None
        self._only_note = False
        self._interrupted = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            found = {number: signal.getsignal(number) for number in SIGNALS}
            self._before = {n: old for n, old in found.items() if old not in (signal.SIG_IGN, None)}
            for number in self._before:
                signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @property
    def requested(self) -> str | None:
        """Which signal has asked this process to stop, if any."""
        return self._noted

    def check(self) -> None:
        """End here if a stop is requested.

        Raises:
            StopRequested: if so.
        """
        if self._noted is not None:
            raise StopRequested(self._noted)

    def hold(self) -> None:
        """From here on there is work to lose, and a signal ends nothing by itself.

        Raises:
            StopRequested: when a stop is requested already.
        """
        self._only_note = True
        self.check()

    def release(self) -> None:
        """From here on there is nothing to lose.

        Raises:
            StopRequested: when a stop is requested already.
        """
        self._only_note = False
        self.check()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child that has not set handlers of its own
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._interrupted and now - self._interrupted > _IMPATIENT_AFTER:
                raise KeyboardInterrupt
            self._interrupted = self._interrupted or now
        if self._noted is None:
            self._noted = signal.Signals(number).name
            if not self._only_note:
                raise StopRequested(self._noted)
            os.write(2, f"{self._noted}: stopping after this step\n".encode())
