"""What an image processor of transformers does to a picture, as our settings.

Ours scales and crops to the model's size and no other way, so a processor that does something else
is refused: one that crops less than it scaled to, as DINOv2's, or leaves pictures as large as they
are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from multimodal import config

_INTERPOLATION = {2: "bilinear", 3: "bicubic"}
"""By Pillow's numbers, which transformers uses."""
_NAFLEX = "max_num_patches"

log = logging.getLogger(__name__)


def read_preprocess(content: Mapping[str, Any], image_size: int) -> config.Preprocess:
    """Our settings for an image processor.

    Args:
        content: its settings (`to_dict`).
        image_size: of the model.

    Raises:
        ValueError: when it does what ours cannot do; all of it is listed.
    """
    wrong = _mistakes(content)
    mode = _resize_mode(content, image_size)
    if mode is None:
        sizes = {key: content[key] for key in ("size", "crop_size") if content.get(key)}
        wrong.append(
            f"{sizes}, do_center_crop={content.get('do_center_crop', False)} do not give a square "
            f"of {image_size} from the whole picture or from its middle"
        )
    if mode is None or wrong:
        raise ValueError(f"its image processor cannot be expressed: {'; '.join(wrong)}")
    normalised = content.get("do_normalize", True)
    return config.Preprocess(
        mean=list(content["image_mean"]) if normalised else [0.0] * 3,
        std=list(content["image_std"]) if normalised else [1.0] * 3,
        interpolation=_INTERPOLATION[content["resample"]],
        resize_mode=mode,
    )


def _mistakes(content: Mapping[str, Any]) -> list[str]:
    wrong = []
    if content.get("resample") not in _INTERPOLATION:
        names = " or ".join(f"{number} ({name})" for number, name in _INTERPOLATION.items())
        wrong.append(f"resample={content.get('resample')!r} (needed {names})")
    wrong += [f"{key}=False" for key in ("do_resize", "do_rescale") if not content.get(key, True)]
    factor = content.get("rescale_factor", 1 / 255)
    if not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        wrong.append(f"rescale_factor={factor} (needed 1/255)")
    if content.get("do_pad"):
        wrong.append("do_pad=True")
    return wrong


def _resize_mode(
    content: Mapping[str, Any], image_size: int
) -> Literal["shortest", "squash"] | None:
    if content.get(_NAFLEX):
        log.warning(
            "its image processor keeps the shape of a picture, within %s patches; here pictures "
            "are squashed to a square of %d, where the features are the same",
            content[_NAFLEX],
            image_size,
        )
        return "squash"
    size, square = content.get("size") or {}, (image_size, image_size)
    crop = _sides(content.get("crop_size")) if content.get("do_center_crop") else None
    if _sides(size) == square and crop in (None, square):
        return "squash"
    if "shortest_edge" in size and not size.get("longest_edge"):
        return "shortest" if (size["shortest_edge"], crop) == (image_size, square) else None
    return None


def _sides(size: Any) -> tuple[int, int] | None:
    """Height and width that a size fixes."""
    if isinstance(size, int):
        return size, size
    if isinstance(size, Mapping) and {"height", "width"} <= size.keys():
        return size["height"], size["width"]
    return None
