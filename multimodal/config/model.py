"""Towers, their projections, and what turns files into their inputs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from multimodal.config.base import Fraction, Section, ThreeFloats, ThreePositiveFloats


class Encoder(Section):
    """The Transformer stack that the image and the text tower share."""

    width: PositiveInt = 768
    """Size of a token's vector."""
    depth: PositiveInt = 12
    """Number of blocks."""
    heads: PositiveInt = 12
    """Attention heads; must divide the width."""
    mlp_ratio: PositiveFloat = 4.0
    """Hidden size of the MLP as a multiple of the width."""
    activation: Literal["quick_gelu", "gelu", "gelu_tanh", "swiglu"] = "gelu"
    """Non-linearity of the MLP. OpenAI weights use `quick_gelu`, SigLIP `gelu_tanh`."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Normalisation layer."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of the normalisation: 1e-5 for CLIP, 1e-6 for SigLIP."""
    bias: bool = True
    """Whether the Linears of attention and MLP have a bias."""
    qk_norm: bool = False
    """RMS-normalise queries and keys per head (arXiv 2302.05442)."""
    gated_attention: bool = False
    """Multiply each head's output by a sigmoid gate of its input (arXiv 2505.06708)."""
    layer_scale: PositiveFloat | None = None
    """Initial LayerScale of each residual branch (arXiv 2103.17239); null leaves it out."""
    drop_path: Fraction = 0.0
    """Stochastic depth rate of the last block; it grows linearly from 0 at the first."""
    dropout: Fraction = 0.0
    """Dropout on the outputs of attention and MLP."""
    position: Literal["learned", "sinusoidal", "none"] = "learned"
    """Absolute position embedding added to the tokens."""
    rope: bool = False
    """Rotary positions in attention: 2-D for images, 1-D for text (arXiv 2104.09864)."""
    rope_theta: PositiveFloat = 10_000.0
    """Base of the rotary frequencies. Used with `rope`."""
    kernel: Literal["auto", "reference", "sdpa"] = "auto"
    """Attention arithmetic. `auto` takes `sdpa`, and plain matmuls for 16-bit training on CPU."""

    @model_validator(mode="after")
    def _heads_divide_width(self):
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads} does not divide width={self.width}")
        if self.rope and self.width // self.heads % 4:
            raise ValueError(
                f"rope needs a head size that 4 divides; width/heads is {self.width // self.heads}"
            )
        return self


class VitImage(Encoder):
    """Vision Transformer (arXiv 2010.11929)."""

    kind: Literal["vit"]
    """A Vision Transformer built from the project's own blocks."""
    image_size: PositiveInt = 224
    """Height and width of the input picture in pixels."""
    patch_size: PositiveInt = 16
    """Height and width of a patch in pixels; must divide the image size."""
    patch_bias: bool = False
    """Whether the patch embedding has a bias: false for CLIP, true for SigLIP."""
    class_token: bool = True
    """Prepend a learned class token."""
    registers: NonNegativeInt = 0
    """Learned register tokens (arXiv 2309.16588)."""
    pre_norm: bool = True
    """Normalise the tokens before the first block (`ln_pre` of CLIP)."""
    pool: Literal["cls", "mean", "map"] = "cls"
    """Class token, mean of the patches, or attention pooling by one learned query (MAP)."""
    patch_dropout: Fraction = 0.0
    """Share of the patches left out in training, before they are embedded (arXiv 2212.00794)."""

    @model_validator(mode="after")
    def _patches_fit(self):
        if self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size={self.patch_size} does not divide image_size={self.image_size}"
            )
        if self.pool == "cls" and not self.class_token:
            raise ValueError("pool=cls needs class_token=true")
        return self


class TimmImage(Section):
    """An image tower from timm."""

    kind: Literal["timm"]
    """A model of the timm library."""
    name: str
    """Name in timm, such as `vit_small_patch16_224`, `hf-hub:ORG/NAME` or `local-dir:FOLDER`."""
    image_size: PositiveInt = 224
    """Height and width of the input picture in pixels."""
    pretrained: bool | str = False
    """At the start of a new run, take timm's weights (from a network or a cache), or a file's."""
    drop_path: Fraction = 0.0
    """Stochastic depth rate, for models that have it."""


class HfImage(Section):
    """An image tower from transformers."""

    kind: Literal["hf"]
    """A model of the transformers library (DINOv2, DINOv3, ViT: any AutoModel of pictures)."""
    name: str
    """Hub name or local folder."""
    image_size: PositiveInt = 224
    """Height and width of the input picture in pixels."""
    pretrained: bool = True
    """Start from its weights (needs a network or a cache). False takes the architecture only."""
    pool: Literal["cls", "mean", "pooler"] = "cls"
    """Class token, mean over the patches without class and register tokens, or the model's own."""


class TransformerText(Encoder):
    """Text Transformer."""

    kind: Literal["transformer"]
    """A text Transformer built from the project's own blocks."""
    width: PositiveInt = 512
    """Size of a token's vector."""
    heads: PositiveInt = 8
    """Attention heads; must divide the width."""
    vocab_size: PositiveInt = 49_408
    """Rows of the token embedding; a tokenizer trained by the run gets at most this many tokens."""
    context_length: Annotated[int, Field(ge=3)] = 77
    """Longest text in tokens, start and end token included; longer texts are cut."""
    fixed_length: bool = False
    """Pad every text to `context_length` (SigLIP). Otherwise a batch is as long as its longest."""
    causal: bool = True
    """Each token sees only itself and earlier ones."""
    mask_padding: bool = False
    """Hide padding from attention. Needed when not causal, except by SigLIP, which sees it."""
    pool: Literal["eot", "last", "mean", "map"] = "eot"
    """End-of-text token, last position, mean over the text, or attention pooling (MAP)."""

    @model_validator(mode="after")
    def _padding_cannot_leak(self):
        exact = self.fixed_length or self.mask_padding or (self.causal and self.pool == "eot")
        if not exact:
            raise ValueError(
                "a text's feature would depend on the other texts of its batch: set "
                "mask_padding=true, or fixed_length=true, or causal=true with pool=eot"
            )
        if self.pool == "last" and not self.fixed_length:
            raise ValueError("pool=last reads the last position and needs fixed_length=true")
        return self


class HfText(Section):
    """A text tower from transformers."""

    kind: Literal["hf"]
    """A model of the transformers library (any AutoModel with token inputs)."""
    name: str
    """Hub name, local folder, or `package:NAME/FOLDER` in an installed Python package."""
    context_length: Annotated[int, Field(ge=3)] = 77
    """Longest text in tokens, start and end token included; longer texts are cut."""
    pretrained: bool = True
    """Start from its weights (needs a network or a cache). False takes the architecture only."""
    pool: Literal["cls", "mean", "eot"] = "mean"
    """First token, mean over the text, or its last token."""


class Preprocess(Section):
    """How a picture becomes the image tower's input. Part of the model: it travels with weights."""

    mean: ThreeFloats = [0.48145466, 0.4578275, 0.40821073]
    """Mean of the red, green and blue channel, on a scale of 0 to 1. The default is CLIP's."""
    std: ThreePositiveFloats = [0.26862954, 0.26130258, 0.27577711]
    """Standard deviation of the channels, on a scale of 0 to 1. The default is CLIP's."""
    interpolation: Literal["bicubic", "bilinear"] = "bicubic"
    """Resampling filter, antialiased."""
    resize_mode: Literal["shortest", "squash"] = "shortest"
    """Scale the shorter side and crop the centre, or squash to a square."""


Cleaning = Literal["unescape", "punctuation", "whitespace", "lower"]


class BpeTokenizer(Section):
    """Byte-level BPE, trained on the run's own captions."""

    kind: Literal["bpe"]
    """Train a byte-level BPE on the training captions."""
    clean: list[Cleaning] = ["whitespace", "lower"]
    """Any of: `unescape` HTML, drop `punctuation`, join runs of `whitespace`, `lower` the case."""


class HfTokenizer(Section):
    """A tokenizer from transformers."""

    kind: Literal["hf"]
    """A fast tokenizer of the transformers library."""
    name: str
    """Hub name, local folder, or `package:NAME/FOLDER`, as for `model.text`."""
    clean: list[Cleaning] = []
    """As for `bpe`, before its own rules. SigLIP: all but `unescape`; SigLIP 2: `lower`."""


class OpenAiTokenizer(Section):
    """The BPE of 49,408 ids of OpenAI's CLIP, as OpenCLIP applies it to texts."""

    kind: Literal["openai"]
    """The BPE of OpenAI's CLIP, with the ids that OpenCLIP gives (but for its use of ftfy)."""
    vocabulary: str | None = None
    """tokenizer.json, merges.txt, or a folder with one; null looks into open_clip, then the hub."""
    clean: list[Cleaning] = ["unescape"]
    """As for `bpe`. White space is joined and case lowered in any case."""


ImageTower = Annotated[VitImage | TimmImage | HfImage, Field(discriminator="kind")]
TextTower = Annotated[TransformerText | HfText, Field(discriminator="kind")]
TokenizerSection = Annotated[
    BpeTokenizer | HfTokenizer | OpenAiTokenizer, Field(discriminator="kind")
]


PartName = Literal["image", "text", "temperature"]
"""A tower with its projection, or the scale and offset of the logits."""


class Model(Section):
    """Two towers, their projections, the temperature, and what turns files into their inputs."""

    image: ImageTower
    """The image tower."""
    text: TextTower
    """The text tower."""
    embed_dim: PositiveInt = 512
    """Size of the shared embedding."""
    image_projection: Literal["linear", "linear_bias", "none"] = "linear"
    """Map from the image tower to the embedding; `none` needs a tower as wide as the embedding."""
    text_projection: Literal["linear", "linear_bias", "none"] = "linear"
    """Map from the text tower to the embedding."""
    logit_scale: Annotated[float, Field(ge=1, le=100)] = 1 / 0.07
    """Initial factor on the cosine similarities (inverse temperature); learned, at most 100."""
    logit_bias: float | Literal["auto"] | None = None
    """Initial learned offset of the logits, for the sigmoid loss; `auto`: -log(batch_size - 1)."""
    preprocess: Preprocess = Preprocess()
    """Picture to input."""
    tokenizer: TokenizerSection
    """Text to input."""


class RunModel(Model):
    """The model of a run: new, or begun with the weights of another."""

    init: str | None = None
    """Model to start from, as for `multimodal classify`: its settings are the base of these."""
    init_parts: list[PartName] = ["image", "text", "temperature"]
    """Parts that take its weights: a tower with its projection, the temperature. Others are new."""

    @model_validator(mode="after")
    def _parts_have_a_source(self):
        if not self.init_parts:
            raise ValueError("init_parts=[] takes nothing of init; name a part, or leave init out")
        if self.init is None and set(self.init_parts) != {"image", "text", "temperature"}:
            raise ValueError(f"init_parts={self.init_parts} are parts of what? Set model.init too")
        return self

    def takes(self, part: PartName) -> bool:
        """Whether a part takes the weights of `init`."""
        return self.init is not None and part in self.init_parts

    def plain(self) -> Model:
        """What the model is, wherever its weights began."""
        return Model.model_validate(self.model_dump(exclude={"init", "init_parts"}))
