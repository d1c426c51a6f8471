"""The configuration of a run whose model begins as another: that one's settings are the base.

What the user's files and key=value say of `model` is merged over the settings of `model.init`, and
the result is checked as always, so a resolved configuration has every setting and needs no base. A
run that has begun keeps the base it had: `model.init` may be gone when it is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from multimodal.config import Config, Model
from multimodal.config_io import ConfigError, Tree, check, merge, read_arguments, read_yaml

_NAMES_A_TEXT = ("kind", "name")
"""Settings of a text tower to which a tokenizer belongs."""


def load_run(arguments: Sequence[str], describe: Callable[[str], Model]) -> Config:
    """Merge files and overrides over the settings of `model.init`, and check them.

    Args:
        describe: the settings of a model by its path or name.

    Raises:
        ConfigError: lists every mistake, one a line.
        ValueError: when there is no model at `model.init`.
    """
    tree = read_arguments(arguments)
    model = tree.get("model")
    if isinstance(model, dict) and isinstance(model.get("init"), str):
        init = model["init"]
        base = _of_the_run(tree, init) or describe(init).model_dump()
        tree = {**tree, "model": _over(base, model)}
    return check(tree, Config)


def _of_the_run(tree: Tree, init: str) -> Tree | None:
    """The model of the run, if it has begun with the same `init`."""
    path = Path(str(tree.get("run", Config.model_fields["run"].default)), "config.yaml")
    try:
        model = read_yaml(path).get("model") if path.is_file() else None
    except ConfigError:  # of a damaged file the run will tell
        return None
    return model if isinstance(model, dict) and model.get("init") == init else None


def _over(base: Tree, model: Tree) -> Tree:
    """The base with the user's settings; another text tower does not inherit the tokenizer."""
    old, new = base.get("text"), model.get("text")
    if isinstance(old, dict) and isinstance(new, dict):
        changed = any(new.get(name, old.get(name)) != old.get(name) for name in _NAMES_A_TEXT)
        if changed:
            base = {name: value for name, value in base.items() if name != "tokenizer"}
    return merge(base, model)
