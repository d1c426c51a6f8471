"""Folders of transformers: `CLIPModel` and `SiglipModel` with tokenizer and preprocessing.

    config.json                architecture
    model.safetensors          weights, float32
    preprocessor_config.json   preprocessing, with the keys of old and new versions
    tokenizer files            see `tokenizer_files`
    modules.json               CLIP only: what sentence-transformers below 6 asks for

transformers 5 itself writes a layout that versions below do not read; this one is read by 4.40 to
5. There must be no processor_config.json: 4.40 fails on it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors.torch import save_file
from tokenizers.models import Unigram
from torch import Tensor
from transformers import AutoModel, AutoProcessor, PretrainedConfig, PreTrainedModel, pipeline

from multimodal.files import write_atomically
from multimodal.models.build import build_model
from multimodal.weights import hf, parity_inputs
from multimodal.weights.clip import export_clip
from multimodal.weights.parity import Theirs
from multimodal.weights.pretrained import Pretrained
from multimodal.weights.siglip import export_siglip
from multimodal.weights.tokenizer_files import write_tokenizer

CLIP_USAGE = (
    "transformers.CLIPModel.from_pretrained({out!r}), AutoProcessor.from_pretrained({out!r})"
)
SIGLIP_USAGE = CLIP_USAGE.replace("CLIPModel", "AutoModel")
_RESAMPLE = {"bilinear": 2, "bicubic": 3}
"""Pillow's numbers."""
_MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.CLIPModel"},
]
_KNOWN = {
    parity_inputs.ENTITIES: "HTML entities are read by our own code, which no file can hold",
    parity_inputs.OFF_CENTRE: "transformers rounds the offset of the crop down",
    parity_inputs.UNUSUAL: "transformers drops orientation and cuts 16-bit values; 4 also alpha",
}
_PIECES = {parity_inputs.SPELLED: "a Unigram vocabulary has the names as pieces"}
_DROPPED = {"logit bias": "left out as asked; it is the same for all pairs"}


def write_clip(pretrained: Pretrained, folder: Path, *, drop_logit_bias: bool = False) -> None:
    """Write a `CLIPModel`, on demand without the offset of the logits, which it does not have.

    Raises:
        ValueError: when it cannot be such a model; all settings at fault are listed.
    """
    if drop_logit_bias:
        pretrained = _without_bias(pretrained)
    model = export_clip(pretrained.model, pretrained.config, **_ids(pretrained))
    _write_model(model, folder)
    _write_json(folder / "preprocessor_config.json", preprocessor(pretrained, "CLIP"))
    _write_json(folder / "modules.json", _MODULES)
    write_tokenizer(pretrained.tokenizer, folder, masks_padding=True)


def write_siglip(pretrained: Pretrained, folder: Path) -> None:
    """Write a `SiglipModel`.

    Raises:
        ValueError: when it cannot be such a model; all settings at fault are listed.
    """
    model = export_siglip(pretrained.model, pretrained.config, **_ids(pretrained))
    _write_model(model, folder)
    _write_json(folder / "preprocessor_config.json", preprocessor(pretrained, "Siglip"))
    write_tokenizer(pretrained.tokenizer, folder, masks_padding=False)


def reopen(folder: Path, *, drop_logit_bias: bool = False) -> Theirs:
    """The model as transformers reads it, with its pipeline for zero-shot classification."""
    with hf.quiet():
        model = AutoModel.from_pretrained(folder).eval()
        processor = AutoProcessor.from_pretrained(folder)
        classify = pipeline("zero-shot-image-classification", model=str(folder), device="cpu")

    def scores(image: Image.Image, texts: list[str]) -> list[float]:
        found = classify(image, candidate_labels=texts, hypothesis_template="{}")
        by_label = {row["label"]: row["score"] for row in found}
        return [by_label[text] for text in texts]

    padding = "max_length" if model.config.model_type == "siglip" else True

    def embed_texts(texts: list[str]) -> Tensor:
        inputs = processor(text=texts, padding=padding, truncation=True, return_tensors="pt")
        return hf.features_of(model.get_text_features(**inputs))

    return hf.as_theirs(
        model,
        pixels=lambda images: pixels_of(processor.image_processor, images),
        tokens=lambda texts: tokens_of(processor.tokenizer, texts),
        embed_texts=embed_texts,
        scores=scores if _fits_pipeline(model) else None,
        unescapes=False,
        known=known_of(processor.tokenizer) | (_DROPPED if drop_logit_bias else {}),
    )


def _fits_pipeline(model: PreTrainedModel) -> bool:
    """Whether the pipeline can be used: it pads the texts of SigLIP to 64 tokens, always."""
    config = model.config
    return config.model_type == "clip" or config.text_config.max_position_embeddings == 64


def _without_bias(pretrained: Pretrained) -> Pretrained:
    """The same model without the offset of its logits."""
    section = pretrained.config.model_copy(update={"logit_bias": None})
    model = build_model(section)
    state = pretrained.model.state_dict()
    state.pop("temperature.logit_bias", None)
    model.load_state_dict(state)
    return replace(pretrained, model=model, config=section)


def known_of(tokenizer: Any) -> dict[str, str]:
    """Inputs of which transformers makes something else by design."""
    unigram = isinstance(tokenizer.backend_tokenizer.model, Unigram)
    return _KNOWN | (_PIECES if unigram else {})


def pixels_of(image_processor: Any, images: list[Image.Image]) -> Tensor:
    """Normalised pixels [B, 3, S, S]."""
    return image_processor(images=images, return_tensors="pt")["pixel_values"]


def tokens_of(tokenizer: Any, texts: list[str]) -> list[list[int]]:
    """Each text's ids up to and with its end token, cut to the context."""
    rows = tokenizer(texts, truncation=True)["input_ids"]
    return [cut_behind(row, tokenizer.eos_token_id) for row in rows]


def cut_behind(row: list[int], end: int) -> list[int]:
    """A text's ids up to and with its first end token; all of it where there is none."""
    return row[: row.index(end) + 1] if end in row else row


def _ids(pretrained: Pretrained) -> dict[str, Any]:
    tokenizer = pretrained.tokenizer
    return {
        "bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id, "pad_id": tokenizer.pad_id
    }  # fmt: skip


def _write_model(model: PreTrainedModel, folder: Path) -> None:
    _write_json(folder / "config.json", _config(model.config, type(model).__name__))
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    # transformers 4 refuses a file without this mark.
    mark = {"format": "pt"}
    write_atomically(folder / "model.safetensors", lambda path: save_file(state, path, mark))


def _config(section: PretrainedConfig, architecture: str) -> dict[str, Any]:
    """All settings, not only those that differ from one version's defaults."""
    content = _plain(section.to_dict())
    return {"architectures": [architecture], "torch_dtype": "float32", **content}


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    unneeded = {"id2label", "label2id", "_name_or_path", "transformers_version", "dtype"}
    return {
        name: _plain(value) if isinstance(value, dict) else value
        for name, value in content.items()
        # An id that is null is one that the tokenizer does not have; left out, it has a default.
        if name not in unneeded and (value is not None or name.endswith("_token_id"))
    }


def preprocessor(pretrained: Pretrained, family: str) -> dict[str, Any]:
    """Content of preprocessor_config.json; the family is CLIP or Siglip."""
    size, section = pretrained.transform.size, pretrained.config.preprocess
    square = {"height": size, "width": size}
    crop = section.resize_mode == "shortest"
    return {
        "image_processor_type": f"{family}ImageProcessor",
        "feature_extractor_type": f"{family}FeatureExtractor",
        "processor_class": f"{family}Processor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": size} if crop else square,
        "resample": _RESAMPLE[section.interpolation],
        "do_center_crop": crop,
        "crop_size": square,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": section.mean,
        "image_std": section.std,
    }


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
