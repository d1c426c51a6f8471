"""The two-tower model: images and texts to unit vectors of one space, and a temperature.

Legend: B pictures, T texts, E embed_dim, L tokens, H W pixels.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from multimodal import config
from multimodal.layers.block import Checkpointing

MAX_LOGIT_SCALE = 100.0
"""Largest factor on the similarities (arXiv 2103.00020, section 2.5)."""
_NORM_EPS = 1e-6

Part = Literal["image", "text", "temperature"]
"""A tower with its projection, or the scale and offset of the logits."""
Images = UInt8[Tensor, "B 3 H W"] | Float[Tensor, "B 3 H W"]


class Features(NamedTuple):
    """What a forward pass gives. An input that was left out has no features."""

    image: Float[Tensor, "B E"] | None
    """float32, unit length."""
    text: Float[Tensor, "T E"] | None
    """float32, unit length."""
    logit_scale: Float[Tensor, ""]
    """float32: the factor itself, not its logarithm."""
    logit_bias: Float[Tensor, ""] | None
    """float32."""


class Temperature(nn.Module):
    """The learned scale and offset of the logits, both float32 scalars.

    A module of its own, since tools that freeze or decay by module miss bare parameters. The scale
    is held as its logarithm.
    """

    def __init__(self, logit_scale: float, logit_bias: float | None):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(logit_scale)))
        bias = None if logit_bias is None else nn.Parameter(torch.tensor(float(logit_bias)))
        self.register_parameter("logit_bias", bias)

    def forward(self) -> tuple[Float[Tensor, ""], Float[Tensor, ""] | None]:
        """The scale (exponentiated) and the bias."""
        return self.logit_scale.exp(), self.logit_bias

    @torch.no_grad()
    def clamp_(self) -> None:
        """Keep the scale in [1, 100]; call it after an optimiser step."""
        self.logit_scale.clamp_(0, math.log(MAX_LOGIT_SCALE))


class TwoTower(nn.Module):
    """Image tower, text tower, their projections and the temperature.

    `build.build_model` makes one; the parts come in ready.

    Args:
        image: maps floating pixels [B, 3, H, W] to [B, image.width].
        text: maps tokens [B, L] and lengths [B] to [B, text.width].
        section: sizes, projections, temperature and pixel statistics.

    Raises:
        ValueError: when a projection is `none` and the tower is not `embed_dim` wide, or the offset
            of the logits is left to a batch size.
    """

    def __init__(self, image: nn.Module, text: nn.Module, section: config.Model):
        super().__init__()
        self.image = image
        self.text = text
        self.image_projection = _projection("image", image, section)
        self.text_projection = _projection("text", text, section)
        if section.logit_bias == "auto":
            raise ValueError("model.logit_bias=auto is for training; give a number or null")
        self.temperature = Temperature(section.logit_scale, section.logit_bias)
        self.embed_dim = section.embed_dim
        self._still: tuple[nn.Module, ...] = ()
        self._mean = tuple(section.preprocess.mean)
        self._std = tuple(section.preprocess.std)

    def learns(self, part: Part) -> bool:
        """Whether a part has a parameter that is not frozen."""
        return any(p.requires_grad for p in self._parameters_of(part))

    def parameter_names(self, part: Part) -> list[str]:
        """Names of a part's parameters."""
        own = {id(parameter) for parameter in self._parameters_of(part)}
        return [name for name, parameter in self.named_parameters() if id(parameter) in own]

    def freeze(self, names: Iterable[str]) -> None:
        """Let parameters keep their values in training too.

        A module that has no other parameters then acts as in evaluation: without dropout, with the
        statistics that it has.
        """
        frozen = set(names)
        for name, parameter in self.named_parameters():
            if name in frozen:
                parameter.requires_grad_(False)
        self._still = tuple(_frozen_modules(self))
        self.train(self.training)

    def train(self, mode: bool = True) -> "TwoTower":
        super().train(mode)
        for module in self._still:
            module.eval()
        return self

    def modules_of(self, part: Part) -> Sequence[nn.Module]:
        """The modules that hold a part's parameters."""
        match part:
            case "image":
                return self.image, self.image_projection
            case "text":
                return self.text, self.text_projection
            case "temperature":
                return (self.temperature,)

    def parameter_counts(self) -> dict[str, int]:
        """How many numbers each part learns or keeps."""
        return {part: sum(p.numel() for p in self._parameters_of(part)) for part in get_args(Part)}

    def _parameters_of(self, part: Part) -> Iterator[nn.Parameter]:
        return chain.from_iterable(module.parameters() for module in self.modules_of(part))

    def checkpoint_activations(self, mode: Checkpointing) -> None:
        """Choose what the backward pass computes again instead of storing it."""
        self.image.checkpoint_activations(mode)
        self.text.checkpoint_activations(mode)

    def encode_image(self, images: Images) -> Float[Tensor, "B E"]:
        """Embed pictures.

        Args:
            images: uint8, normalised here with the model's statistics; or floating, taken as
                normalised already.

        Returns:
            float32, unit length.

        Raises:
            TypeError: when the images are neither.
        """
        if images.dtype == torch.uint8:
            images = normalise(images, self._mean, self._std)
        elif not images.is_floating_point():
            raise TypeError(
                f"images are {images.dtype}; give uint8 pixels, or floating ones that are "
                "normalised already"
            )
        return unit_length(self.image_projection(self.image(images)))

    def encode_text(
        self, tokens: Int[Tensor, "T L"], lengths: Int[Tensor, "T"]
    ) -> Float[Tensor, "T E"]:
        """Embed texts: int64 tokens, padded on the right, to float32 vectors of unit length."""
        return unit_length(self.text_projection(self.text(tokens, lengths)))

    def forward(
        self,
        images: Images | None = None,
        tokens: Int[Tensor, "T L"] | None = None,
        lengths: Int[Tensor, "T"] | None = None,
    ) -> Features:
        """Embed pictures, texts or both; see `encode_image` and `encode_text`.

        Raises:
            ValueError: when tokens come without lengths, or lengths without tokens.
        """
        if (tokens is None) != (lengths is None):
            raise ValueError("tokens and lengths belong together; give both or neither")
        scale, bias = self.temperature()
        return Features(
            image=None if images is None else self.encode_image(images),
            text=None if tokens is None else self.encode_text(tokens, lengths),
            logit_scale=scale,
            logit_bias=bias,
        )


def _frozen_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules that have parameters and none that learns."""
    learning = [parameter.requires_grad for parameter in module.parameters()]
    if learning and not any(learning):
        yield module
    else:
        for child in module.children():
            yield from _frozen_modules(child)


def normalise(
    images: UInt8[Tensor, "B 3 H W"], mean: Sequence[float], std: Sequence[float]
) -> Float[Tensor, "B 3 H W"]:
    """Pixels to zero mean and unit deviation.

    The statistics stay Python numbers: as buffers they would lose digits when a model is cast to
    bfloat16, and they already live in the config.

    Args:
        images: red, green and blue.
        mean: of each channel, on a scale of 0 to 1.
        std: of each channel, on a scale of 0 to 1.
    """
    channels = zip(images.float().unbind(1), mean, std, strict=True)
    return torch.stack([(x - 255 * m) / (255 * s) for x, m, s in channels], dim=1)


def unit_length(features: Float[Tensor, "B E"]) -> Float[Tensor, "B E"]:
    """Rows of length 1 in float32 (float64 stays); a zero row stays so and its gradient finite."""
    wide = features if features.dtype == torch.float64 else features.float()
    return F.normalize(wide, dim=-1, eps=_NORM_EPS)


def _projection(name: str, tower: nn.Module, section: config.Model) -> nn.Module:
    kind = section.image_projection if name == "image" else section.text_projection
    if kind != "none":
        return nn.Linear(tower.width, section.embed_dim, bias=kind == "linear_bias")
    if tower.width != section.embed_dim:
        raise ValueError(
            f"model.{name}_projection=none needs a tower as wide as the embedding, but the {name} "
            f"tower is {tower.width} wide and model.embed_dim={section.embed_dim}; "
            f"make them equal or set model.{name}_projection=linear"
        )
    return nn.Identity()
