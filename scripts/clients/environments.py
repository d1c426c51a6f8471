"""Virtual environments with other programs, of several generations, around one torch.

Torch is not installed again: a .pth file leads to links to the torch of this Python.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

log = logging.getLogger(__name__)
_SHARED = ("torch", "torch-*", "torchgen", "functorch", "torchvision", "torchvision-*")
_SHARED += ("torchvision.libs", "nvidia*", "triton*", "cuda*")


class Environment(NamedTuple):
    """Packages, as pip takes them, and the clients among them."""

    packages: tuple[str, ...]
    clients: tuple[str, ...]


ENVIRONMENTS = {
    "oldest": Environment(
        ("transformers==4.40.2", "sentence-transformers==3.0.1", "numpy<2"),
        ("transformers", "sentence-transformers"),
    ),
    # clip-retrieval pins all of its time: NumPy 1, transformers 4, open_clip 2; and it imports
    # pkg_resources, which setuptools 81 no longer has.
    "old": Environment(
        ("clip-retrieval", "clip-benchmark", "setuptools<81"),
        ("transformers", "sentence-transformers", "open_clip", "CLIP_benchmark", "clip-retrieval"),
    ),
    # CLIP_benchmark 1.6.2 fails with NumPy 2.4 (its issue 147), and asks for no requests.
    "new": Environment(
        ("transformers>=5", "sentence-transformers>=6", "open_clip_torch>=3", "timm>=1.0.20",
         "onnxruntime>=1.20", "clip-benchmark", "requests", "numpy<2.4"),
        ("transformers", "sentence-transformers", "open_clip", "CLIP_benchmark", "timm",
         "onnxruntime"),
    ),
}  # fmt: skip


def python_of(folder: Path, name: str) -> Path:
    return folder / name / "bin" / "python"


def missing(folder: Path) -> list[str]:
    """Names of environments that are not made, or of other packages."""
    return [name for name, each in ENVIRONMENTS.items() if _made(folder / name) != each.packages]


def make(folder: Path) -> None:
    """Make what is missing.

    Raises:
        RuntimeError: when pip fails, with what it says.
    """
    for name in missing(folder):
        log.info("making the environment %s: %s", name, ", ".join(ENVIRONMENTS[name].packages))
        _run(sys.executable, "-m", "venv", "--clear", str(folder / name))
        site = next((folder / name / "lib").glob("python*/site-packages"))
        (site / "torch.pth").write_text(f"{_shared_torch(folder)}\n")
        pip = (str(python_of(folder, name)), "-m", "pip", "install", "--quiet")
        _run(*pip, "--disable-pip-version-check", *ENVIRONMENTS[name].packages)
        (folder / name / "packages.json").write_text(json.dumps(ENVIRONMENTS[name].packages))


def _made(environment: Path) -> tuple[str, ...]:
    stamp = environment / "packages.json"
    return tuple(json.loads(stamp.read_text())) if stamp.is_file() else ()


def _shared_torch(folder: Path) -> Path:
    """A folder with links to torch and what it brings, and nothing else of this environment."""
    links, site = folder.resolve() / "torch", Path(torch.__file__).parents[1]
    links.mkdir(exist_ok=True)
    for pattern in _SHARED:
        for path in site.glob(pattern):
            link = links / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path)
    return links


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
