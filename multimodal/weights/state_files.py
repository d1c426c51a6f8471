"""Weights of other programs on the disk: safetensors, or what torch.save wrote, read without code.

Both give tensors by name, in float32, without what wrappers of a training loop put before the
names.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

_WRAPPERS = ("module.", "_orig_mod.")
"""Of DistributedDataParallel and of torch.compile."""
_NESTED = "state_dict"


def read_state(path: Path) -> dict[str, Tensor]:
    """Tensors of a file by name; floating ones in float32.

    Args:
        path: `.safetensors`, or a file of torch.save with a state dict or a checkpoint that holds
            one as `state_dict`.

    Raises:
        ValueError: when it is missing, damaged, or something else.
    """
    if not path.is_file():
        raise ValueError(f"no file of weights at {str(path)!r}")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    if isinstance(content, Mapping) and isinstance(content.get(_NESTED), Mapping):
        content = content[_NESTED]
    wrong = not isinstance(content, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    )
    if wrong:
        raise ValueError(
            f"{path} holds {_describe(content)}; needed are tensors by name (a state dict), alone "
            f"or as {_NESTED!r}"
        )
    return {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in without_wrappers(content).items()
    }


def without_wrappers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names without the prefixes that all of them have, in whatever order and number."""
    state = dict(state)
    for prefix in _WRAPPERS * 2:
        if state and all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged ({error}); copy or download it again") from None


def _read_torch(path: Path) -> Any:
    if _is_torchscript(path):
        # Advice to the user about a foreign file; nothing is written or run here.
        raise ValueError(
            f"{path} is a TorchScript archive, as OpenAI published its models: a program, which is "
            "not run here. Where you trust it, write its weights once with\n"
            f"    python -c \"import torch; m = torch.jit.load('{path}', 'cpu'); "
            f"torch.save(m.state_dict(), '{path.with_suffix('')}-weights.pt')\"\n"
            "and give that file"
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{path} cannot be read without running code that is in it ({reason}), or is damaged; "
            "save the state dict alone, as safetensors or with torch.save"
        ) from None
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise ValueError(f"{path} is no file of torch.save, or damaged: {error}") from None


def _is_torchscript(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def _describe(content: Any) -> str:
    if isinstance(content, Mapping):
        names = ", ".join(map(str, list(content)[:5]))
        return f"a {type(content).__name__} with {names or 'nothing'}"
    return f"a {type(content).__name__}"
