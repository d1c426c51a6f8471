"""An image tower from transformers, behind the same face as `image.VitTower`."""

import inspect

from jaxtyping import Float
from torch import Tensor, nn

from multimodal import config
from multimodal.models.hf_model import HfTower, read_tower

_NOT_ENCODERS = ("vit_mae", "yolos")
"""Model types that drop patches at random in use too, or add tokens of detections."""


class HfImageTower(HfTower):
    """An `AutoModel` with pixel inputs: DINOv2, DINOv3, ViT and others.

    Of a two-tower model the image part is taken. A pooler head is kept for `pool=pooler` only, and
    the token of masked pictures has no gradient. Pictures of another size than the model was
    trained on are its own matter: most resample their positions at every call.

    Raises:
        ValueError: when the model is not found or incomplete, or cannot pool so.
    """

    def __init__(self, section: config.HfImage):
        super().__init__()
        self.pool = section.pool
        self.model = read_tower(
            section.name,
            side="image",
            pretrained=section.pretrained,
            pooler=section.pool == "pooler",
        )
        self.width: int = _width(self.model, section.name)
        _check_pool(self.model, section)
        arguments = inspect.signature(self.model.forward).parameters
        resamples = "interpolate_pos_encoding" in arguments
        self._options = {"interpolate_pos_encoding": True} if resamples else {}
        for name, parameter in self.model.named_parameters():
            if name.endswith("mask_token"):
                parameter.requires_grad_(False)

    def forward(self, pixels: Float[Tensor, "B C H W"]) -> Float[Tensor, "B width"]:
        """Embed normalised pictures."""
        output = self.model(pixel_values=pixels, **self._options)
        match self.pool:
            case "cls":
                return output.last_hidden_state[:, 0]
            case "mean":
                patch = self.model.config.patch_size
                patches = (pixels.shape[2] // patch) * (pixels.shape[3] // patch)
                return output.last_hidden_state[:, -patches:].mean(dim=1)
            case "pooler":
                return output.pooler_output.flatten(1)


def _width(model: nn.Module, name: str) -> int:
    if "pixel_values" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"model.image.name={name!r} is a {type(model).__name__}, which takes no pictures; "
            "choose an image model such as a DINOv2"
        )
    settings = model.config
    if hasattr(settings, "hidden_size"):
        return settings.hidden_size
    return settings.hidden_sizes[-1]


def _check_pool(model: nn.Module, section: config.HfImage) -> None:
    pool, parts = section.pool, dict(model.named_children())
    names = [name.rpartition(".")[2] for name, _ in model.named_parameters()]
    square = isinstance(getattr(model.config, "patch_size", None), int)
    problem = None
    if model.config.model_type in _NOT_ENCODERS:
        raise ValueError(
            f"model.image.name={section.name!r} is a {type(model).__name__}, whose output is not "
            "one token a patch of the whole picture; choose an encoder such as ViT or DINOv2"
        )
    if pool != "pooler" and (not square or hasattr(model.config, "depths")):
        problem = "does not end in the patches of a square grid"
    elif pool != "pooler" and ("post_layernorm" in parts or "head" in parts):
        problem = "pools in layers of its own"
    elif pool == "cls" and not {"cls_token", "class_embedding"} & set(names):
        problem = "has no class token"
    if problem is not None:
        raise ValueError(
            f"model.image.pool={pool}, but {section.name!r} ({type(model).__name__}) {problem}; "
            f"set model.image.pool={'mean' if problem.endswith('token') else 'pooler'}"
        )
