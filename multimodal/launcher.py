"""What has started this process: torchrun, `accelerate launch`, or nothing of the kind."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_NAMES = {"torchrun", "distributed.run", "accelerate", "accelerate-launch", "commands.launch"}
"""Of scripts and modules, these without their package."""
_OF_PROCESSES = ("--num_processes", "--num-processes")


@dataclass(frozen=True)
class Launcher:
    """The process that watches over this one and should not be outlived."""

    process: int
    """Its number, or -1 if it had gone before this process could look."""
    arguments: tuple[str, ...] = ()

    def is_gone(self) -> bool:
        """Whether it has ended, so that this process is an orphan."""
        return os.getppid() != self.process

    def processes(self) -> int | None:
        """How many processes the command line of `accelerate launch` asks for, if it says so."""
        for place, argument in enumerate(self.arguments):
            name, equals, value = argument.partition("=")
            if name in _OF_PROCESSES:
                value = value if equals else "".join(self.arguments[place + 1 : place + 2])
                return int(value) if value.isdigit() else None
        return None


@cache
def launcher() -> Launcher | None:
    """The launcher of this process, found at the first call: ask early, while it surely lives."""
    parent = os.getppid()
    arguments = _command_line(parent)
    names = {
        Path(argument).name.removeprefix("torch.").removeprefix("accelerate.")
        for argument in arguments[:4]
    }
    if names & _NAMES:
        return Launcher(parent, arguments)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return Launcher(parent if parent != 1 else -1)  # a script that torchrun runs, or an orphan


def _command_line(process: int) -> tuple[str, ...]:
    """Empty where the system does not tell."""
    try:
        text = Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.split("\0")[:-1])
