"""From settings, or just a path, to a data source."""

from __future__ import annotations

from pathlib import Path

from pydantic import RootModel

from multimodal import config
from multimodal.config_io import check, is_yaml, load_config
from multimodal.data.folder import FolderSource
from multimodal.data.hub import SAVED, HubSource
from multimodal.data.mixture import MixtureSource
from multimodal.data.remote import RemoteSource, is_remote
from multimodal.data.shards import ShardSource
from multimodal.data.source import Source
from multimodal.data.stream import StreamSource, TrainingSource
from multimodal.data.tables import ENDINGS, TableSource

IMAGE_COLUMN, CAPTION_COLUMN = "image", "caption"
"""Columns of a table, if nothing else is said."""

SourceFile = RootModel[config.Source]
"""The settings of one source, without anything around them."""


def open_training(section: config.TrainSource) -> TrainingSource:
    """Open what is trained on, which need not be readable by number.

    Raises:
        ValueError: when there is nothing usable at its path.
    """
    if isinstance(section, config.StreamSource):
        return StreamSource(section.path, section.samples, section.shuffle_buffer)
    return open_source(section)


def open_source(section: config.Source) -> Source:
    """Open the source that a config section describes.

    Raises:
        ValueError: when there is nothing usable at its path.
    """
    match section:
        case config.ShardsSource():
            if is_remote(section.path):
                return RemoteSource(section.path, section.cache_dir, section.cache_size)
            return ShardSource(section.path)
        case config.TableSource():
            return TableSource(
                section.path, section.image_column, section.caption_column, section.separator
            )
        case config.FolderSource():
            return FolderSource(section.path)
        case config.HubSource():
            return HubSource(
                section.name,
                subset=section.subset,
                split=section.split,
                image_column=section.image_column,
                caption_column=section.caption_column,
                label_column=section.label_column,
            )
        case config.MixtureSource():
            return MixtureSource(
                {name: open_source(part) for name, part in section.sources.items()},
                section.weights,
            )


def source_from_path(
    path: str,
    *,
    image_column: str = IMAGE_COLUMN,
    caption_column: str = CAPTION_COLUMN,
    separator: str | None = None,
) -> Source:
    """Open whatever data a path leads to, as `section_from_path` finds it.

    Raises:
        ValueError: when it is none of the accepted kinds, or there is nothing usable in it.
    """
    return open_source(section_from_path(path, image_column, caption_column, separator))


def section_from_path(
    path: str,
    image_column: str = IMAGE_COLUMN,
    caption_column: str = CAPTION_COLUMN,
    separator: str | None = None,
) -> config.Source:
    """The settings of the data that a path leads to.

    Args:
        path: Data, or a YAML file with the settings of one source, which then has all of them.
        image_column: Column of a table or a saved data set.
        caption_column: Another.
        separator: Character between the columns of a CSV or TSV table.

    Raises:
        ValueError: when it is none of the accepted kinds.
    """
    columns = {"image_column": image_column, "caption_column": caption_column}
    place = Path(path)
    if is_yaml(path):
        if (image_column, caption_column, separator) != (IMAGE_COLUMN, CAPTION_COLUMN, None):
            raise ValueError(f"{path}: a file of settings names columns and separator itself")
        return read_section(path)
    if is_remote(path):
        return _section(kind="shards", path=path)
    if any((place / name).is_file() for name in SAVED):
        return _section(kind="hub", name=path, **columns)
    if place.is_dir():
        has_shards = any(place.glob("*.tar")) or any(place.glob("*/*.tar"))
        return _section(kind="shards" if has_shards else "folder", path=path)
    if place.suffix.lower() in ENDINGS:
        return _section(kind="table", path=path, separator=separator, **columns)
    if place.suffix.lower() == ".tar" or path.startswith("pipe:"):
        return _section(kind="shards", path=path)
    if not place.exists():
        raise ValueError(f"{path!r}: there is no such file or folder")
    raise ValueError(
        f"{path!r} is no data source; give a folder with .tar shards, a .tar file or pattern such "
        f"as 'data/{{00000..00099}}.tar', a table ({', '.join(ENDINGS)}), a folder of pictures, or "
        "a YAML file with the settings of a source (kind: hub, ...)"
    )


def read_section(path: str) -> config.Source:
    """The source whose settings a YAML file holds.

    Raises:
        ConfigError: lists every mistake in it.
    """
    return load_config([path], SourceFile).root


def _section(**settings: str | None) -> config.Source:
    return check(settings, SourceFile).root
