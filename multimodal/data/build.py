"""From settings, or just a path, to a data source."""

from __future__ import annotations

from pathlib import Path

from multimodal import config
from multimodal.data.folder import FolderSource
from multimodal.data.hub import SAVED, HubSource
from multimodal.data.mixture import MixtureSource
from multimodal.data.remote import RemoteSource, is_remote
from multimodal.data.shards import ShardSource
from multimodal.data.source import Source
from multimodal.data.tables import ENDINGS, TableSource


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
    path: str, *, image_column: str = "image", caption_column: str = "caption"
) -> Source:
    """Open whatever data a path leads to; the columns are those of a table or a saved data set.

    Raises:
        ValueError: when it is none of the accepted kinds.
    """
    place = Path(path)
    if is_remote(path):
        return RemoteSource(path)
    if any((place / name).is_file() for name in SAVED):
        return HubSource(path, image_column=image_column, caption_column=caption_column)
    if place.is_dir():
        has_shards = any(place.glob("*.tar")) or any(place.glob("*/*.tar"))
        return ShardSource(path) if has_shards else FolderSource(path)
    if place.suffix.lower() in ENDINGS:
        return TableSource(path, image_column, caption_column)
    if place.suffix.lower() == ".tar" or path.startswith("pipe:"):
        return ShardSource(path)
    raise ValueError(
        f"{path!r} is no data source; give a folder with .tar shards, a .tar file or pattern such "
        f"as 'data/{{00000..00099}}.tar', a table ({', '.join(ENDINGS)}), or a folder of pictures"
    )
