"""A model that is built in milliseconds, and pictures for it."""

import json
from pathlib import Path

import torch
from PIL import Image

from multimodal import config
from multimodal.data.text import build_tokenizer
from multimodal.data.transforms import ImageTransform
from multimodal.models.build import build_model
from multimodal.weights.pretrained import Pretrained

EMBED_DIM = 17
WORDS = ["red square", "a green dot", "blue sky over the old harbour", "grey", "yellow sun, warm"]


def tiny_section(**changes) -> config.Model:
    """Settings of a small CLIP."""
    image = {"kind": "vit", "image_size": 14, "patch_size": 7, "width": 22, "depth": 1, "heads": 2}
    text = {"kind": "transformer", "vocab_size": 283, "context_length": 19, "width": 26, "depth": 1}
    tree = {
        "image": image,
        "text": text | {"heads": 2},
        "embed_dim": EMBED_DIM,
        "tokenizer": {"kind": "bpe"},
    }
    return config.Model.model_validate(tree | changes)


def tiny_pretrained(section: config.Model | None = None, seed: int = 0) -> Pretrained:
    """A model with random weights."""
    section = section or tiny_section()
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(
        section.tokenizer,
        context_length=section.text.context_length,
        fixed_length=getattr(section.text, "fixed_length", False),
        vocab_size=getattr(section.text, "vocab_size", None),
        captions=WORDS,
    )
    return Pretrained(
        model=build_model(section),
        transform=ImageTransform(section.image.image_size, section.preprocess),
        tokenizer=tokenizer,
        config=section,
    )


def picture(number: int, size: tuple[int, int] = (23, 19)) -> Image.Image:
    """A picture that differs from those of other numbers."""
    generator = torch.Generator().manual_seed(number)
    pixels = torch.randint(0, 256, (3, 2, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.permute(1, 2, 0).numpy()).resize(size)


def write_pictures(
    folder: Path, captions: list[list[str]], metas: list[dict] | None = None
) -> Path:
    """A folder of numbered PNGs, each with its captions and metadata in a JSON file beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    metas = metas or [{} for _ in captions]
    for number, (texts, meta) in enumerate(zip(captions, metas, strict=True)):
        picture(number).save(folder / f"{number:03d}.png")
        record = json.dumps({"captions": texts, **meta})
        (folder / f"{number:03d}.json").write_text(record)
    return folder


def damage(folder: Path, number: int) -> None:
    """Cut a picture of `write_pictures` short."""
    path = folder / f"{number:03d}.png"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
