"""OpenMoji pictures with the emoji's English names: items, drawings, splits.

Splits are decided by SHA-256 of the emoji or of its concept, so they never change:

* `concepts`, `concepts-toned`: a tenth of the concepts; every gender and skin tone of a concept
  leaves together. `concepts` holds the pictures without a skin tone.
* `variants`: a fifth of the other pictures with a skin tone. Each base name and each tone stays in
  training; only the combination is new.
* `train`: the rest. `train-tune`, `validation`, `validation-concepts` and
  `validation-concepts-toned` are the same cut made once more inside `train`, to choose settings by.
"""

import hashlib
import io
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

GROUPS = {
    "smileys-emotion": "a smiley or an emotion",
    "people-body": "a person or body part",
    "animals-nature": "an animal or plant",
    "food-drink": "food or drink",
    "travel-places": "travel, a place or the weather",
    "activities": "an activity, a sport or a game",
    "objects": "an object",
    "symbols": "a symbol or sign",
    "flags": "a flag",
}
"""Group of Unicode's emoji list -> the phrase that stands for it as a class."""
SPLITS = {
    "train": "all that is not held out",
    "variants": "held-out combinations of a base name and a skin tone; both parts are in train",
    "concepts": "held-out concepts, pictures without a skin tone",
    "concepts-toned": "held-out concepts, pictures with a skin tone",
    "train-tune": "train without the three slices below",
    "validation": "slice of train, cut like variants",
    "validation-concepts": "slice of train, cut like concepts",
    "validation-concepts-toned": "slice of train, cut like concepts-toned",
}
"""Name of each split -> what it holds. The first four are disjoint and hold every picture."""

_TONES = re.compile("[\U0001f3fb-\U0001f3ff]")
_TONE_NAMES = re.compile(r" (light|medium-light|medium|medium-dark|dark) skin tone")
_GENDER = re.compile(r"(?<!\S)(man|woman|men|women|person|people)(?!\S)")
_FLAG = re.compile("[\U0001f1e6-\U0001f1ff]{2}|\U0001f3f4[\U000e0020-\U000e007f]+")
_SELECTOR = "\ufe0f"


@dataclass(frozen=True)
class Item:
    """One emoji with its names.

    Attributes:
        emoji: Fully qualified sequence of code points.
        name: Its English name, such as "woman firefighter with medium-dark skin".
        aliases: Further names.
        base: The name without the skin tone: "woman firefighter".
        concept: The base without the gender: "firefighter".
        tone: "dark", "medium and dark", ..., or "none".
        group: One of the phrases in `GROUPS`; empty for emoji newer than the table.
    """

    emoji: str
    name: str
    aliases: tuple[str, ...]
    base: str
    concept: str
    tone: str
    group: str

    @property
    def key(self) -> str:
        return "-".join(f"{ord(point):04X}" for point in self.emoji)


def read_items() -> list[Item]:
    """Names and groups of all fully qualified emoji, in the order of their code points."""
    import emoji

    groups = _read_groups()
    qualified = emoji.STATUS["fully_qualified"]
    return [
        _item(sequence, entry, groups)
        for sequence, entry in sorted(emoji.EMOJI_DATA.items())
        if entry["status"] == qualified
    ]


def _item(sequence: str, entry: dict, groups: dict[str, str]) -> Item:
    words = _words(entry["en"])
    tones = _TONE_NAMES.findall(words)
    base = _TONE_NAMES.sub("", words)
    if _FLAG.fullmatch(sequence):
        base = f"flag of {base}"
    concept = " ".join(_GENDER.sub("", base).split()) or "person"
    group = groups.get(_TONES.sub("", sequence).replace(_SELECTOR, ""), "")
    tone = " and ".join(tones)
    return Item(
        emoji=sequence,
        name=f"{base} with {tone} skin" if tone else base,
        aliases=tuple(_words(alias) for alias in entry.get("alias", ())),
        base=base,
        concept=concept,
        tone=tone or "none",
        group=GROUPS.get(group, ""),
    )


def _words(code: str) -> str:
    """Turn ":woman_firefighter:" into "woman firefighter"."""
    return code.strip(":").replace("_", " ")


def _read_groups() -> dict[str, str]:
    table = {}
    text = Path(__file__).with_name("openmoji_groups.tsv").read_text(encoding="utf-8")
    for line in text.splitlines():
        if not line.startswith("#"):
            group, _, members = line.split("\t")
            table.update(dict.fromkeys(members.split(" "), group))
    return table


def drop_shared_aliases(items: Sequence[Item]) -> list[Item]:
    """Leave each alias that says more than the name and belongs to one item only.

    "tiger" is the name of one picture and an alias of another ("tiger face"). With such an alias
    gone no caption is right for two pictures, and no held-out caption is in training.
    """
    owners = Counter(
        text
        for item in items
        for text in {caption.casefold() for caption in (item.name, *item.aliases)}
    )

    def own(item: Item) -> Item:
        seen = {item.name.casefold()}
        kept = []
        for alias in item.aliases:
            if alias.casefold() not in seen and owners[alias.casefold()] == 1:
                kept.append(alias)
            seen.add(alias.casefold())
        return replace(item, aliases=tuple(kept))

    return [own(item) for item in items]


def draw(item: Item, folder: Path, size: int) -> bytes | None:
    """RGB pixels [size, size, 3] on white, or None when OpenMoji has no such drawing."""
    import resvg_py
    from PIL import Image

    stems = (item.key, item.key.replace("-FE0F", ""))
    path = next((p for stem in stems if (p := folder / f"{stem}.svg").is_file()), None)
    if path is None:
        return None
    # 96 as in CSS: sizes in units other than pixels depend on it.
    png = resvg_py.svg_to_bytes(
        svg_path=str(path),
        width=size,
        height=size,
        dpi=96.0,
        background="#ffffff",
        skip_system_fonts=True,
    )
    with Image.open(io.BytesIO(png)) as image:
        assert image.size == (size, size), f"{path.name} is not square"
        return image.convert("RGB").tobytes()


def drop_repeats(pictures: dict[Item, bytes]) -> dict[Item, bytes]:
    """Of items with the same pixels keep the one with the shortest name.

    "artist" and "man artist" are one drawing, and so are the flags of France and St. Martin: asked
    which of the two names is right, nobody could tell.
    """
    groups = defaultdict(list)
    for item, pixels in pictures.items():
        groups[pixels].append(item)
    kept = {min(items, key=lambda item: (len(item.name), item.emoji)) for items in groups.values()}
    return {item: pixels for item, pixels in pictures.items() if item in kept}


def split(items: Sequence[Item]) -> dict[str, list[Item]]:
    """Items of each split in `SPLITS`; a pure function of the items and SHA-256."""
    train, variants, concepts, toned = _cut(items, salt="")
    tune, validation, validation_concepts, validation_toned = _cut(train, salt="validation ")
    parts = (train, variants, concepts, toned)
    slices = (tune, validation, validation_concepts, validation_toned)
    return dict(zip(SPLITS, parts + slices, strict=True))


def _cut(items: Sequence[Item], salt: str) -> tuple[list[Item], ...]:
    """(rest, variants, concepts without tone, concepts with tone)."""
    held = {item for item in items if _draw_lot(salt + item.concept) < 0.1}
    stay = [item for item in items if item not in held]
    drawn = {i for i in stay if i.tone != "none" and _draw_lot(salt + i.emoji) < 0.2}
    known = {item.base for item in stay if item not in drawn}
    variants = {item for item in drawn if item.base in known}
    return (
        [item for item in stay if item not in variants],
        [item for item in stay if item in variants],
        [item for item in items if item in held and item.tone == "none"],
        [item for item in items if item in held and item.tone != "none"],
    )


def _draw_lot(text: str) -> float:
    """A number in [0, 1) that depends on the text only."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) / 2**64
