"""Reads what W&B logs offline, without asking W&B."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    content, position, parts = path.read_bytes(), 7, []
    while position < len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        parts.append(content[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def history(folder: Path) -> list[dict[str, Any]]:
    """Rows in the one offline log below a folder, without W&B's own columns."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.rglob("run-*.wandb")
    found = []
    for content in records(path):
        record = Record()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            items = {i.key or i.nested_key[0]: i.value_json for i in record.history.item}
            found.append({k: json.loads(v) for k, v in items.items() if not k.startswith("_")})
    return found
