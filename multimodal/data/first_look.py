"""What can be seen of data sources at once: whether something is there, and has its columns.

It needs no torch and reads no source through, so a mistake is told before seconds of imports.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from multimodal import config
from multimodal.data.folder import FolderSource, has_pictures
from multimodal.data.remote import is_remote
from multimodal.data.shards import ShardSource, find_shards
from multimodal.data.tables import check_table

Part = (
    config.ShardsSource
    | config.TableSource
    | config.FolderSource
    | config.HubSource
    | config.StreamSource
)


def sources_in(settings: object) -> Iterator[Part]:
    """All sources that settings name, however deep; of a mixture its parts."""
    if isinstance(settings, Part):
        yield settings
    elif isinstance(settings, BaseModel):
        yield from sources_in(vars(settings))
    elif isinstance(settings, list | tuple | dict):
        for part in settings.values() if isinstance(settings, dict) else settings:
            yield from sources_in(part)


def first_look(settings: object) -> list[str]:
    """What is wrong with the sources that settings name, as far as it shows at once."""
    problems: dict[str, None] = {}
    for section in sources_in(settings):
        try:
            _look(section)
        except (ValueError, FileNotFoundError) as error:
            problems[str(error)] = None
    return list(problems)


def _look(section: Part) -> None:
    """Raise what opening the source would raise, where that takes no time."""
    match section:
        case config.TableSource():
            columns = section.caption_column
            columns = [columns] if isinstance(columns, str) else columns
            check_table(section.path, [section.image_column, *columns], section.separator)
        case config.FolderSource():
            if not has_pictures(section.path):
                FolderSource(section.path)
        case config.ShardsSource() | config.StreamSource() if not is_remote(section.path):
            if not any(shard.exists() for shard in find_shards(section.path)):
                ShardSource(section.path)
