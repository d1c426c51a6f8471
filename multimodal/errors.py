"""Errors that end a command with one sentence. A user's mistake is a `ValueError`."""

STOPPED = 75
"""Exit code of a run that was asked to stop and has: the same command goes on (EX_TEMPFAIL)."""


class RunStopped(RuntimeError):
    """Training cannot go on, for a reason that the message gives with what to do."""


class StopRequested(SystemExit):
    """Somebody has asked the run to stop. Uncaught, it ends the process with code `STOPPED`.

    Args:
        reason: the signal's name.
    """

    def __init__(self, reason: str):
        super().__init__(STOPPED)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason
