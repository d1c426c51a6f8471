"""Settings for all tests: repeatable, single-threaded, offline."""

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_SILENT", "true")

import pytest
import torch

# A shell has its background jobs ignore Ctrl-C, nohup SIGHUP; runs would inherit that.
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1):
    if signal.getsignal(number) == signal.SIG_IGN:
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
