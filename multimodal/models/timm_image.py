"""An image tower from timm, behind the same face as `image.VitTower`."""

import difflib
import json
from pathlib import Path
from typing import Any

import timm
from jaxtyping import Float
from timm.models import group_parameters
from torch import Tensor, nn

from multimodal import config
from multimodal.layers.block import Checkpointing
from multimodal.models.timm_weights import LOCAL, from_file, weights_file


class TimmTower(nn.Module):
    """A timm model without its classifier: pixels to pooled features.

    Raises:
        ValueError: when timm does not know the name, cannot build it so, or cannot fetch weights;
            or when a file of weights is missing, or lacks or has too many tensors.
    """

    def __init__(self, section: config.TimmImage):
        super().__init__()
        self.model = _create(section)
        self._source = _source_config(section.name)
        self.width: int = getattr(self.model, "head_hidden_size", None) or self.model.num_features

    def forward(self, pixels: Float[Tensor, "B C H W"]) -> Float[Tensor, "B width"]:
        """Embed normalised pictures."""
        return self.model(pixels)

    def save_architecture(self, folder: Path | str) -> None:
        """Write timm's `config.json` of a model that is not in timm's own list.

        `local-dir:FOLDER` and `pretrained: false` then rebuild the tower.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "config.json").write_text(json.dumps(self._source, indent=2), encoding="utf-8")

    def parameter_layers(self) -> dict[str, int]:
        """See `depth.parameter_layers`; the layers are timm's own."""
        layers = group_parameters(self.model, self.model.group_matcher(coarse=False), reverse=True)
        return {f"model.{name}": layer for name, layer in layers.items()}

    def checkpoint_activations(self, mode: Checkpointing) -> None:
        """timm knows whole blocks only, so `selective` is `full` here.

        Raises:
            ValueError: when the model cannot.
        """
        if mode == "none":
            return
        try:
            self.model.set_grad_checkpointing(True)
        except (AttributeError, AssertionError) as error:
            raise ValueError(
                f"train.checkpoint_activations={mode}, but timm's "
                f"{type(self.model).__name__} cannot checkpoint activations; use none"
            ) from error


def _create(section: config.TimmImage) -> nn.Module:
    if ":" not in section.name and "/" not in section.name and not timm.is_model(section.name):
        near = difflib.get_close_matches(section.name, timm.list_models(), n=3)
        raise ValueError(
            f"model.image.name={section.name!r} is not a timm model; "
            f"near names: {', '.join(near) or 'none'}; timm.list_models() lists all"
        )
    options: dict[str, Any] = {"num_classes": 0, "pretrained": section.pretrained is True}
    if section.drop_path:
        options["drop_path_rate"] = section.drop_path
    file = weights_file(section)
    if file is not None:
        options |= from_file(section, file)
    try:
        return _create_at_size(section, options)
    except TypeError as error:
        raise ValueError(
            f"timm cannot build {section.name!r} from model.image={section!r}: {error}"
        ) from error
    except OSError as error:
        raise ValueError(
            f"timm's weights of {section.name!r} are neither cached nor to be fetched ({error}); "
            "run once where there is a network, or set model.image.pretrained=false"
        ) from error
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"timm cannot build {section.name!r} with the weights of {file or 'the hub'}: {reason}"
        ) from error


def _create_at_size(section: config.TimmImage, options: dict) -> nn.Module:
    """Models with a fixed grid need the size when built; others take any and refuse `img_size`."""
    try:
        return timm.create_model(section.name, img_size=section.image_size, **options)
    except TypeError as error:
        if "img_size" not in str(error):
            raise
        return timm.create_model(section.name, **options)


def _source_config(name: str) -> dict[str, Any] | None:
    """What timm knows of a model by a folder or the hub; None for a model of its own list."""
    if name.startswith(LOCAL):
        path = Path(name.removeprefix(LOCAL), "config.json")
        return json.loads(path.read_text(encoding="utf-8"))
    if ":" not in name:
        return None
    found, architecture, args = timm.models.load_model_config_from_hf(name.partition(":")[2])
    return {"architecture": architecture, "model_args": args, "pretrained_cfg": found}
