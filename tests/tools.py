"""Shared by the tests: real processes on CPU, tiny data, tiny runs."""

import copy
import io
import json
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from PIL import Image

from multimodal.config import Config
from multimodal.config_io import check, merge, parse_override

ROOT = Path(__file__).parent.parent
COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 200, 40),
    "blue": (40, 60, 220),
    "white": (245, 245, 245),
}
SHAPES = ("disc", "bar", "frame")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `function(*args)` in `world_size` gloo processes and return what each returned.

    `function` stands at the top level of a test file. A failing rank's traceback is raised here.
    """
    # Ranks fork from a server that has imported everything once, and has no threads.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "multimodal.train.loop"])
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
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
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


def picture(colour: str, shape: str, size: int = 20) -> bytes:
    """A PNG of a coloured shape on black."""
    image = Image.new("RGB", (size, size))
    for x in range(size):
        for y in range(size):
            dx, dy = abs(2 * x - size + 1) / size, abs(2 * y - size + 1) / size
            inside = {"disc": dx * dx + dy * dy < 0.6, "bar": dy < 0.3, "frame": max(dx, dy) > 0.6}
            if inside[shape]:
                image.putpixel((x, y), COLOURS[colour])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def make_shards(
    folder: Path, count: int, *, per_shard: int = 13, broken: tuple[int, ...] = (), seed: int = 0
) -> Path:
    """Tar shards of coloured shapes, each with two captions and the shape as its class.

    Args:
        broken: numbers of the samples whose picture is no picture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    for shard in range(-(-count // per_shard)):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as tar:
            for number in range(shard * per_shard, min(count, (shard + 1) * per_shard)):
                colour, shape = draw.choice(list(COLOURS)), draw.choice(SHAPES)
                image = b"no picture" if number in broken else picture(colour, shape)
                texts = [f"a {colour} {shape}", f"{shape} number {number} in {colour}"]
                _add(tar, f"{number:06d}.png", image)
                _add(tar, f"{number:06d}.json", json.dumps({"captions": texts}).encode())
                _add(tar, f"{number:06d}.cls", shape.encode())
    return folder


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


TINY = {
    "seed": 3,
    "model": {
        "image": {
            "kind": "vit",
            "image_size": 16,
            "patch_size": 4,
            "width": 16,
            "depth": 2,
            "heads": 2,
        },
        "text": {
            "kind": "transformer",
            "width": 16,
            "depth": 2,
            "heads": 2,
            "vocab_size": 300,
            "context_length": 16,
        },
        "embed_dim": 12,
        "tokenizer": {"kind": "bpe"},
    },
    "train": {"batch_size": 8, "duration": "12 steps"},
    "optim": {"lr": 1e-3, "warmup": "3 steps"},
    "checkpoint": {"every": "4 steps"},
    "log": {"every": "1 steps"},
}
"""A run of a second or two, but for what it trains on and where it goes."""

RANDOM = (
    "model.image.patch_dropout=0.25",
    "model.image.dropout=0.1",
    "model.text.dropout=0.1",
    "model.image.drop_path=0.2",
    "data.augment.flip=0.5",
    "data.augment.color_jitter=0.5",
    "data.workers=2",
)
"""Overrides that turn on everything random."""

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
"""What `accelerate launch --use_fsdp --fsdp_version 2` sets."""


def tiny_tree(run: Path, shards: Path, *overrides: str) -> dict[str, Any]:
    """`TINY` with its paths and `key=value` overrides, as a tree of settings."""
    data = {"train": {"kind": "shards", "path": str(shards)}, "workers": 0}
    tree: dict[str, Any] = merge(copy.deepcopy(TINY), {"run": str(run), "data": data})
    for override in overrides:
        tree = merge(tree, parse_override(override))
    return tree


def tiny_config(run: Path, shards: Path, *overrides: str) -> Config:
    return check(tiny_tree(run, shards, *overrides), Config)


def retrieval(shards: Path, every: str | None = None) -> dict[str, Any]:
    """The setting of an evaluation."""
    data = {"kind": "shards", "path": str(shards)}
    return {"kind": "retrieval", "data": data, "every": every}


def write_config(path: Path, tree: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(dict(tree)), encoding="utf-8")
    return path


def environment(**extra: str) -> dict[str, str]:
    """For child processes: one thread, no network, this checkout."""
    own = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "WANDB_SILENT": "true",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return {**os.environ, **own, **extra}


def start(*command: str, **extra: str) -> subprocess.Popen:
    """Start `python COMMAND...` with its output in a pipe, as a process group of its own."""
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, code: int = 0, within: float = 240) -> str:
    """Wait for a started process, expect an exit code, and return what it wrote."""
    try:
        output, _ = process.communicate(timeout=within)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"no end after {within} s:\n{process.communicate()[0]}") from None
    assert process.returncode == code, output
    return output


def wait_for_step(process: subprocess.Popen, run: Path, step: int) -> None:
    """Wait until a started run has logged a step."""
    path = run / "metrics.jsonl"
    while not path.exists() or path.read_text().count("\n") < step:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def processes_with(text: str) -> dict[int, str]:
    """Command lines of the running processes that name `text`, by process number."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if text in line and int(folder.name) != os.getpid():
            found[int(folder.name)] = line
    return found


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]
