"""Shared by the tests: real processes on CPU."""

import pickle
import socket
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(*args)` in `world_size` gloo processes and return what each returned.

    `function` stands at the top level of a test file. A failing rank's traceback is raised here.
    """
    # Ranks fork from a server that has imported torch once, and started no thread of it.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch._dynamo"])
    box = context.SimpleQueue()
    port = free_port()
    processes = [
        context.Process(target=_rank, args=(r, world_size, port, function, args, box))
        for r in range(world_size)
    ]
    for process in processes:
        process.start()
    results = dict(pickle.loads(box.get()) for _ in processes)
    for process in processes:
        process.join()
    errors = [value for ok, value in results.values() if not ok]
    if errors:
        raise AssertionError("\n".join(errors))
    return [results[r][1] for r in range(world_size)]


def _rank(rank: int, world_size: int, port: int, function, args, box) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
        )
        outcome = (True, function(*args))
    except BaseException:
        outcome = (False, f"rank {rank}:\n{traceback.format_exc()}")
    # As plain bytes: a tensor in shared memory would vanish with the process.
    box.put(pickle.dumps((rank, outcome)))
    if dist.is_initialized():
        dist.destroy_process_group()
