"""Export models, write shards, and note what the models give, for `check.py`.

    python prepare.py FOLDER RUN DATA

RUN is a trained model and DATA are the shards of OpenMoji it is compared on. A clip-b-32 with fresh
weights and OpenAI's tokenizer is made besides: it has OpenCLIP's and timm's own architecture.

    FOLDER/MODEL/hf, open_clip, onnx, timm    exports
    FOLDER/MODEL/data/TASK                    shards in the layout of CLIP_benchmark
    FOLDER/MODEL/pictures                     some of their pictures
    FOLDER/MODEL/expected.*                   features, scores, and the figures of evaluations
"""

from __future__ import annotations

import io
import json
import logging
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

import multimodal
from multimodal import config
from multimodal.config_io import merge, read_yaml
from multimodal.data.build import open_source
from multimodal.data.text import build_tokenizer
from multimodal.evaluate.run import evaluate_all
from multimodal.models.build import build_model
from multimodal.weights.convert import Target, convert
from multimodal.weights.pretrained import Pretrained
from multimodal.weights.save import save_model

log = logging.getLogger(__name__)
CONFIGS = Path(__file__).parents[2] / "configs"
FORMATS: tuple[Target, ...] = ("hf", "open_clip", "onnx", "timm")
TEMPLATE = "a photo of {}."
COMPARED = 12
"""Pictures and texts whose features are compared one by one."""
SHARDS = 2


class Sample(NamedTuple):
    key: str
    png: bytes
    captions: tuple[str, ...]
    label: int


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder, run, data = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    prepare(folder / "quickstart", multimodal.load(run), data, most=1000, built_in=False)
    # On two CPU cores a picture takes 0.2 s, in each of five clients.
    fresh = fresh_clip(folder / "model-clip-b-32")
    prepare(folder / "clip-b-32", fresh, data, most=48, built_in=True)


def fresh_clip(folder: Path) -> Pretrained:
    """A `clip-b-32` with GELU, as LAION's, and fresh weights."""
    towers = {"image": {"activation": "gelu"}, "text": {"activation": "gelu"}}
    tree = merge(read_yaml(CONFIGS / "model" / "clip-b-32.yaml")["model"], towers)
    section = config.Model.model_validate(merge(tree, {"tokenizer": {"kind": "openai"}}))
    torch.manual_seed(0)
    tokenizer = build_tokenizer(
        section.tokenizer, context_length=77, fixed_length=False, vocab_size=49_408, captions=()
    )
    save_model(folder, model=build_model(section), section=section, tokenizer=tokenizer)
    return multimodal.load(folder)


def prepare(folder: Path, pretrained: Pretrained, data: str, *, most: int, built_in: bool) -> None:
    """All that the checks of one model read.

    Args:
        folder: where to.
        pretrained: the model.
        data: shards with captions and, as `group`, a class of configs/data/openmoji.yaml.
        most: samples used.
        built_in: whether the other libraries have this very architecture.
    """
    groups = read_yaml(CONFIGS / "data" / "openmoji.yaml")["evaluate"]["groups"]
    samples = list(_samples(data, pretrained.transform.size, groups["classes"], most))
    sections = write_shards(folder / "data", samples, groups["classes"])
    compared = samples[:COMPARED]
    (folder / "pictures").mkdir()
    for sample in compared:
        (folder / "pictures" / f"{sample.key}.png").write_bytes(sample.png)
    texts = [sample.captions[0] for sample in compared]
    pictures = [sample.png for sample in compared]
    np.savez(
        folder / "expected.npz",
        image=pretrained.encode_image(pictures).numpy(),
        text=pretrained.encode_text(texts).numpy(),
    )
    scores = pretrained.classify(pictures[:1], texts, templates=[TEMPLATE])[0]
    expected = {
        "keys": [sample.key for sample in compared],
        "texts": texts,
        "labels": texts,
        "template": TEMPLATE,
        "scores": scores.tolist(),
        "metrics": _metrics(pretrained, sections),
        "built_in": built_in,
        "openai_tokens": isinstance(pretrained.config.tokenizer, config.OpenAiTokenizer),
    }
    for to in FORMATS:
        done = convert(pretrained, folder / to, to)
        log.info("%s: %s, read back by %s", folder.name, to, done.report.library)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1))


def _samples(data: str, size: int, classes: list[str], most: int) -> Iterator[Sample]:
    """Samples whose pictures have the model's size and whose captions stand in no other.

    Of equal captions CLIP_benchmark counts one as right for a picture, and ours all.
    """
    source = open_source(config.ShardsSource(kind="shards", path=data))
    seen: set[str] = set()
    for index in range(min(most, len(source))):
        sample = source.read(index)
        if not seen.isdisjoint(sample.captions):
            continue
        seen |= set(sample.captions)
        picture, png = Image.open(io.BytesIO(sample.image)).convert("RGB"), io.BytesIO()
        picture.resize((size, size), Image.Resampling.BICUBIC).save(png, "PNG")
        label = classes.index(str(sample.meta["group"]))
        yield Sample(sample.key, png.getvalue(), sample.captions, label)


def write_shards(folder: Path, samples: list[Sample], classes: list[str]) -> dict[str, Any]:
    """Shards for classification and retrieval, and our settings for an evaluation on them."""
    for task in ("classification", "retrieval"):
        place = folder / task / "test"
        place.mkdir(parents=True)
        for number in range(SHARDS):
            with tarfile.open(place / f"{number}.tar", "w") as tar:
                for sample in samples[number::SHARDS]:
                    for ending, content in _members(sample, task).items():
                        member = tarfile.TarInfo(f"{sample.key}.{ending}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
        (place / "nshards.txt").write_text(f"{SHARDS}\n")
    named = folder / "classification"
    (named / "classnames.txt").write_text("\n".join(classes))
    (named / "zeroshot_classification_templates.txt").write_text(TEMPLATE.replace("{}", "{c}"))
    (folder / "retrieval" / "dataset_type.txt").write_text("retrieval")
    shards = {
        task: {"kind": "shards", "path": str(folder / task / "test")}
        for task in ("classification", "retrieval")
    }
    return {
        "classification": {
            "kind": "zero_shot", "data": shards["classification"], "label": "cls",
            "classes": classes, "templates": [TEMPLATE],
        },
        "retrieval": {"kind": "retrieval", "data": shards["retrieval"]},
    }  # fmt: skip


def _members(sample: Sample, task: str) -> dict[str, bytes]:
    """CLIP_benchmark reads a caption a line; ours all from the record, which clip-retrieval needs
    to be there."""
    record = json.dumps({"captions": sample.captions}).encode()
    members = {"png": sample.png, "json": record}
    if task == "retrieval":
        return members | {"txt": "\n".join(sample.captions).encode()}
    return members | {"txt": sample.captions[0].encode(), "cls": str(sample.label).encode()}


def _metrics(pretrained: Pretrained, sections: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The figures that CLIP_benchmark has too."""
    known = ("acc1", "acc5", "mean_per_class_recall", "_recall@1", "_recall@5", "_recall@10")
    found = config.EvaluateConfig.model_validate({"evaluate": sections}).evaluate
    return {
        task: {name: value for name, value in metrics.items() if name.endswith(known)}
        for task, metrics in evaluate_all(pretrained, found).items()
    }


if __name__ == "__main__":
    main()
