"""Errors that end a command with one sentence. A user's mistake is a `ValueError`."""


class RunStopped(RuntimeError):
    """Training cannot go on, for a reason that the message gives with what to do."""
