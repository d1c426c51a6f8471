"""Small models that timm knows by a name, as it knows its own."""

from collections.abc import Callable

import timm
from torch import nn

_CFG = {
    "num_classes": 1000,
    "pool_size": None,
    "fixed_input_size": True,
    "classifier": "head",
    "input_size": (3, 28, 28),
}
_names: list[str] = []


def register(create: Callable[..., nn.Module], **args) -> str:
    """Make a model known to timm.

    Args:
        create: one of timm's own `_create_...`, which takes a name.
        args: of the model, which takes pictures of 28 pixels.

    Returns:
        Its name.
    """
    name = f"small_{create.__name__.strip('_')}_{len(_names)}"

    def entry(pretrained: bool = False, **kwargs):
        return create(name, pretrained=pretrained, **(args | kwargs | {"pretrained_cfg": _CFG}))

    entry.__name__ = entry.__qualname__ = name
    entry.__module__ = "timm.models.vision_transformer"
    timm.models.register_model(entry)
    _names.append(name)
    return name
