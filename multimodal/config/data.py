"""Data sources, and how a run reads them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from multimodal.config.base import Fraction, Probability, Section


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


class StreamSource(Section):
    """Tar shards in the WebDataset layout that are read from front to back only."""

    kind: Literal["stream"]
    """To train on only. Order depends on ranks and workers; a resumed run is not bit-identical."""
    path: str
    """As of `shards`; web servers need no ranges, and nothing is kept on this machine."""
    samples: PositiveInt
    """Samples of an epoch: how many all shards hold, which should be filled evenly."""
    shuffle_buffer: PositiveInt = 5000
    """Samples, as stored, that each worker holds in memory and draws from."""


def _is_no_stream(value: object) -> object:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    if kind == "stream":
        raise ValueError(
            "kind=stream can only be read in sequence, so it can only be trained on, as data.train "
            "itself; use kind=shards here"
        )
    return value


Part = Annotated[
    Annotated[ShardsSource | TableSource | FolderSource | HubSource, Field(discriminator="kind")],
    BeforeValidator(_is_no_stream),
]
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
    Annotated[
        ShardsSource | TableSource | FolderSource | HubSource | MixtureSource,
        Field(discriminator="kind"),
    ],
    BeforeValidator(_is_no_stream),
]
"""Samples that can be read by number."""
TrainSource = Annotated[
    ShardsSource | TableSource | FolderSource | HubSource | MixtureSource | StreamSource,
    Field(discriminator="kind"),
]
"""What can be trained on."""


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

    train: TrainSource
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
    """Loader processes of each rank; only of a stream does the order of samples depend on it."""
    max_skipped: Fraction = 0.01
    """Share of unreadable samples above which the run stops."""

    @model_validator(mode="after")
    def _templates_hold_a_caption(self):
        for template in self.templates:
            if template.count("{}") != 1:
                raise ValueError(f"templates: {template!r} must contain {{}} once")
        return self
