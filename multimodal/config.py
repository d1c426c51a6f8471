"""Every setting of the program, in sections. No torch, no files, no derived values.

A section states its limits and its documentation; validators refuse, they never rewrite. Variants
are classes with a `kind`, joined in tagged unions. A value has one home; code that builds
something receives its own section, never the whole `Config`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

Fraction = Annotated[float, Field(ge=0, lt=1)]
Probability = Annotated[float, Field(ge=0, le=1)]
ThreeFloats = Annotated[list[float], Field(min_length=3, max_length=3)]
ThreePositiveFloats = Annotated[list[PositiveFloat], Field(min_length=3, max_length=3)]


Unit = Literal["steps", "epochs", "samples", "percent", "minutes"]


class Duration(NamedTuple):
    """An amount of training: `value` in `unit` (steps, epochs, samples, percent or minutes)."""

    value: float
    unit: Unit


_UNITS: dict[str, Unit] = {
    "step": "steps",
    "steps": "steps",
    "epoch": "epochs",
    "epochs": "epochs",
    "sample": "samples",
    "samples": "samples",
    "%": "percent",
    "min": "minutes",
    "minutes": "minutes",
}
_DURATION = re.compile(r"\s*([0-9.]+(?:[eE][+-]?[0-9]+)?)\s*([a-z%]+)\s*")


def parse_duration(text: str) -> Duration:
    """Read `"1000 steps"`, `"3 epochs"`, `"2e6 samples"`, `"5%"` or `"10 min"`.

    Raises:
        ValueError: when the text is none of these.
    """
    match = _DURATION.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(
            f'{text!r} is not a duration; write "1000 steps", "3 epochs", "2e6 samples" or "5%"'
        )
    try:
        return Duration(float(match[1]), _UNITS[match[2]])
    except ValueError:
        raise ValueError(f"{match[1]!r} in {text!r} is not a number") from None


def _check_duration(text: str) -> str:
    if parse_duration(text).unit == "minutes":
        raise ValueError(f"{text!r}: minutes are allowed only in `every`, since a run must repeat")
    return text


def _check_every(text: str) -> str:
    if parse_duration(text).value <= 0:
        raise ValueError(f"{text!r}: the interval must be above 0")
    return text


DurationText = Annotated[str, AfterValidator(_check_duration)]
"""`"1000 steps"`, `"3 epochs"`, `"2e6 samples"` or `"5%"` (of the run)."""
EveryText = Annotated[str, AfterValidator(_check_every)]
"""As a duration, and also `"10 min"`."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are read only and not converted."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


# --- model ---------------------------------------------------------------------------------------


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
    """Name in timm, such as `vit_small_patch16_224` or `resnet50`."""
    image_size: PositiveInt = 224
    """Height and width of the input picture in pixels."""
    pretrained: bool = False
    """Fetch timm's pretrained weights at the start of a new run (needs a network or a cache)."""
    drop_path: Fraction = 0.0
    """Stochastic depth rate, for models that have it."""


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
    """Hub name or local folder."""
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
    """Hub name or local folder."""
    clean: list[Cleaning] = []
    """As for `bpe`, before its own rules. SigLIP: all but `unescape`; SigLIP 2: `lower`."""


ImageTower = Annotated[VitImage | TimmImage, Field(discriminator="kind")]
TextTower = Annotated[TransformerText | HfText, Field(discriminator="kind")]
TokenizerSection = Annotated[BpeTokenizer | HfTokenizer, Field(discriminator="kind")]


class Model(Section):
    """Two towers, their projections, the temperature, and what turns files into their inputs."""

    image: ImageTower
    """The image tower."""
    text: TextTower
    """The text tower."""
    embed_dim: PositiveInt = 512
    """Size of the shared embedding."""
    image_projection: Literal["linear", "none"] = "linear"
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


# --- data ----------------------------------------------------------------------------------------


class ShardsSource(Section):
    """Tar shards in the WebDataset layout: KEY.jpg|png|webp|..., KEY.txt, KEY.json."""

    kind: Literal["shards"]
    """Tar shards, read by random access through an index."""
    path: str
    """A folder, a .tar file, a pattern such as `data/{00000..00099}.tar`, or a URL of these."""
    cache_dir: str | None = None
    """Where shards of a URL are kept while they are used; null: below `~/.cache/multimodal`."""
    cache_size: PositiveFloat = 50.0
    """Largest size of that cache in GB; it must hold two of `data.shuffle_window`."""


class TableSource(Section):
    """A CSV, TSV, JSONL or Parquet table with one picture a row."""

    kind: Literal["table"]
    """A table of paths and captions."""
    path: str
    """The table; its ending names the format."""
    image_column: str = "image"
    """Column with the picture's path, relative to the table or absolute, or its bytes (Parquet)."""
    caption_column: str | Annotated[list[str], Field(min_length=1)] = "caption"
    """Column with the caption or a list of captions (JSONL, Parquet); or several such columns."""
    separator: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    """Character between columns; null takes a comma for .csv and a tab for .tsv."""


class FolderSource(Section):
    """A folder of pictures with captions beside them, or one sub-folder for each class."""

    kind: Literal["folder"]
    """Pictures with a .txt or .json of the same name; else the sub-folder's name is the caption."""
    path: str
    """The folder; sub-folders are read too."""


class HubSource(Section):
    """A data set of the Hugging Face library `datasets` (extra `hub`)."""

    kind: Literal["hub"]
    """A saved data set, a folder that `datasets` understands, or one from its cache or the hub."""
    name: str
    """The folder, or the name on the hub."""
    subset: str | None = None
    """Configuration of the data set, where it has several."""
    split: str = "train"
    """Part of the data set."""
    image_column: str = "image"
    """Column with the picture."""
    caption_column: str | Annotated[list[str], Field(min_length=1)] | None = "caption"
    """Column or columns with captions; null makes the name of the class the caption."""
    label_column: str | None = None
    """Column with the class, whose name becomes `cls`."""

    @model_validator(mode="after")
    def _has_a_text(self):
        if self.caption_column is None and self.label_column is None:
            raise ValueError("caption_column=null needs a label_column to take captions from")
        return self


Part = Annotated[ShardsSource | TableSource | FolderSource | HubSource, Field(discriminator="kind")]
PartName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]


class MixtureSource(Section):
    """Several sources as one. Their samples are called `NAME/KEY`."""

    kind: Literal["mixture"]
    """Several named sources, of which every block of samples holds fixed numbers."""
    sources: Annotated[dict[PartName, Part], Field(min_length=1)]
    """The sources by name; none of them may be a mixture itself."""
    weights: dict[PartName, PositiveFloat] | None = None
    """Shares of the samples by name, in any unit; null takes each sample once in every epoch."""

    @model_validator(mode="after")
    def _each_source_has_a_weight(self):
        if self.weights is not None and set(self.weights) != set(self.sources):
            raise ValueError(
                f"weights are given for {', '.join(sorted(self.weights))}, sources for "
                f"{', '.join(sorted(self.sources))}; give each source a weight, or none"
            )
        return self


Source = Annotated[
    ShardsSource | TableSource | FolderSource | HubSource | MixtureSource,
    Field(discriminator="kind"),
]


class Augment(Section):
    """Random changes to training pictures, seeded by sample position."""

    scale: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.9, 1.0]
    """Smallest and largest share of the picture's area that a crop keeps."""
    ratio: Annotated[list[float], Field(min_length=2, max_length=2)] = [0.75, 4 / 3]
    """Smallest and largest aspect ratio of a crop."""
    flip: Probability = 0.0
    """Chance of a horizontal flip. Off: captions say left and right."""
    color_jitter: Probability = 0.0
    """Chance of a random change of brightness, contrast, saturation and hue."""
    color_strength: NonNegativeFloat = 0.2
    """Strength of that change; the hue moves by a quarter of it."""
    grayscale: Probability = 0.0
    """Chance of a grey picture."""

    @model_validator(mode="after")
    def _ranges_are_ordered(self):
        if not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale={self.scale} must rise and lie in (0, 1]")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio={self.ratio} must rise and be above 0")
        return self


class Data(Section):
    """What is trained on."""

    train: Source
    """The training pairs."""
    augment: Augment = Augment()
    """Random changes to the pictures."""
    caption: Literal["first", "random", "all"] = "random"
    """Of several captions the first, a seeded draw, or in turn: n epochs see `all` n once each."""
    templates: Annotated[list[str], Field(min_length=1)] = ["{}"]
    """Texts around the caption, one drawn for each sample, such as `a photo of {}`."""
    shuffle_window: PositiveInt = 1_000_000
    """Samples shuffled together after the shards are shuffled. Larger mixes better, reads wider."""
    workers: NonNegativeInt = 2
    """Loader processes of each rank; the order of samples does not depend on it."""
    max_skipped: Fraction = 0.01
    """Share of unreadable samples above which the run stops."""

    @model_validator(mode="after")
    def _templates_hold_a_caption(self):
        for template in self.templates:
            if template.count("{}") != 1:
                raise ValueError(f"templates: {template!r} must contain {{}} once")
        return self


# --- objective, optimisation, run ----------------------------------------------------------------


DuplicatesMode = Literal["negative", "ignore", "positive"]


class ContrastiveSection(Section):
    """InfoNCE over the global batch in both directions (arXiv 2103.00020)."""

    kind: Literal["contrastive"]
    """Softmax cross-entropy of each picture over all texts, and of each text over all pictures."""
    label_smoothing: Fraction = 0.0
    """Share of each target that is spread evenly over all candidates."""
    duplicates: DuplicatesMode = "negative"
    """Pairs with one picture or one caption: left out (`ignore`), or sharing the target."""


class SigmoidSection(Section):
    """Pairwise sigmoid loss over the global batch (arXiv 2303.15343)."""

    kind: Literal["sigmoid"]
    """Binary cross-entropy of every picture-text pair."""
    duplicates: DuplicatesMode = "negative"
    """Pairs with one picture or one caption: left out (`ignore`), or labelled like own pairs."""


Loss = Annotated[ContrastiveSection | SigmoidSection, Field(discriminator="kind")]


class Optim(Section):
    """AdamW with warm-up and cosine decay."""

    lr: PositiveFloat = 5e-4
    """Peak learning rate."""
    betas: Annotated[list[Fraction], Field(min_length=2, max_length=2)] = [0.9, 0.98]
    """Decay rates of the gradient's first and second moment."""
    eps: PositiveFloat = 1e-6
    """Added to the root of the second moment."""
    weight_decay: NonNegativeFloat = 0.2
    """Decay of matrices; norms, biases, positions, class token and temperature have none."""
    warmup: DurationText = "5%"
    """Linear rise of the learning rate from 0: `5%` of the run, `2000 steps`, ..."""
    final_lr: Probability = 0.0
    """Learning rate at the end as a share of the peak."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """Largest gradient norm over all parameters; null leaves gradients as they are."""


class Train(Section):
    """How much is trained."""

    batch_size: PositiveInt = 256
    """Pairs in a step over all processes; every pair is a negative of every other."""
    micro_batch_size: PositiveInt | Literal["auto"] | None = None
    """Pairs that fit on a device at once; more work, the same gradient. `auto` (CUDA) tries."""
    checkpoint_activations: Literal["none", "selective", "full"] = "none"
    """Save memory by computing again: the MLPs' hidden layers (`selective`) or whole blocks."""
    compile: bool = False
    """Compile the model (torch.compile): a slow first step, then faster ones, above all on GPUs."""
    freeze: list[Literal["image", "text", "temperature"]] = []
    """Parts that keep their weights: a tower with its projection, or the logits' temperature."""
    duration: DurationText = "32 epochs"
    """Length of the run: `32 epochs`, `1000 steps` or `2e6 samples`."""
    max_nonfinite: PositiveInt = 10
    """Steps in a row, left out since loss or gradient was not finite, that stop the run."""

    @model_validator(mode="after")
    def _something_learns(self):
        if {"image", "text"} <= set(self.freeze):
            raise ValueError(f"freeze={self.freeze} leaves no tower to train; keep one out")
        return self


class Checkpoint(Section):
    """When the state of a run is saved."""

    every: EveryText = "1 epochs"
    """Interval between checkpoints, as a duration or `10 min`; the end always saves one."""
    keep: PositiveInt = 2
    """Complete checkpoints to keep; an older one is removed only after a newer one is complete."""


class Wandb(Section):
    """Weights & Biases. `metrics.jsonl` is written in any case; this is a copy of it."""

    mode: Literal["offline", "online", "disabled"] = "disabled"
    """`offline` needs no network and no account; `wandb sync` sends it later."""
    project: str = "multimodal"
    """Name of the project there."""


class Log(Section):
    """What a run reports."""

    every: EveryText = "10 steps"
    """Interval between rows of metrics, as a duration or `10 min`."""
    wandb: Wandb = Wandb()
    """Weights & Biases."""


class Retrieval(Section):
    """Image-text retrieval: recall at 1, 5 and 10 in both directions."""

    kind: Literal["retrieval"]
    """Rank all captions for each picture and all pictures for each caption."""
    data: Source
    """Pictures with captions."""
    more_captions: list[Source] = []
    """Further sources whose captions join the candidates of each picture."""
    every: EveryText | None = None
    """Interval in training; null evaluates at the end only."""


class ZeroShot(Section):
    """Zero-shot classification by the similarity of a picture to each class's prompts."""

    kind: Literal["zero_shot"]
    """Classify pictures by class names."""
    data: Source
    """Pictures with a class."""
    label: str = "cls"
    """Metadata field that holds the class: its name, or its row in `classes`."""
    classes: Annotated[list[str], Field(min_length=2)]
    """Class names."""
    templates: Annotated[list[str], Field(min_length=1)] = ["a photo of {}."]
    """Prompts around a class name; their embeddings are averaged."""
    every: EveryText | None = None
    """Interval in training; null evaluates at the end only."""


Evaluation = Annotated[Retrieval | ZeroShot, Field(discriminator="kind")]


class EvaluateConfig(Section):
    """What `multimodal evaluate` reads."""

    evaluate: dict[str, Evaluation]
    """Evaluations by name."""

    @model_validator(mode="after")
    def _something_to_evaluate(self):
        if not self.evaluate:
            raise ValueError(
                "there is no evaluation; add one, such as evaluate.val.kind=retrieval "
                "evaluate.val.data.kind=table evaluate.val.data.path=val.csv"
            )
        return self


class Config(Section):
    """One training run."""

    run: str = "runs/default"
    """Run folder. Running the same command again resumes the run in it."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of weights, order, augmentation and dropout."""
    model: Model
    """What is trained."""
    loss: Loss = ContrastiveSection(kind="contrastive")
    """Training objective."""
    data: Data
    """What it is trained on."""
    train: Train = Train()
    """How much is trained."""
    optim: Optim = Optim()
    """How the weights move."""
    evaluate: dict[str, Evaluation] = {}
    """Evaluations by name."""
    checkpoint: Checkpoint = Checkpoint()
    """When the state is saved."""
    log: Log = Log()
    """What is reported."""

    @model_validator(mode="after")
    def _frozen_towers_are_trained(self):
        for side in ("image", "text"):
            tower = getattr(self.model, side)
            trained = getattr(tower, "pretrained", False)
            projected = getattr(self.model, f"{side}_projection") != "none"
            if side in self.train.freeze and (projected or not trained):
                raise ValueError(
                    f"train.freeze={self.train.freeze} would keep random weights: a frozen {side} "
                    f"side needs model.{side}.pretrained=true (kind timm or hf) and "
                    f"model.{side}_projection=none"
                )
        return self

    @model_validator(mode="after")
    def _sigmoid_has_a_bias(self):
        if self.loss.kind == "sigmoid" and self.model.logit_bias is None:
            raise ValueError(
                "loss.kind=sigmoid needs model.logit_bias; set auto, or a number (SigLIP: -10)"
            )
        return self
