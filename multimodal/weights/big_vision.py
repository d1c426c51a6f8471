"""SigLIP as big_vision saves it: one .npz of named arrays; settings are read from their shapes.

    params/                      before all names in a checkpoint of a run, whose rest is not read
    img/, txt/                   the towers
    .../encoderblock_N/          a block; all stacked as .../encoderblock/ where JAX scanned them
    .../query/kernel             (width, heads, head size); .../out/kernel the other way round
    t, b                         logarithm of the logits' factor, their offset

What shapes do not tell is the same in all of them: flax's GELU (by tanh), epsilon 1e-6, texts of a
fixed length whose padding is seen, pooling at the last position. Pictures are prepared as in
transformers and OpenCLIP (bicubic); big_vision itself scales without antialiasing.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from multimodal import config
from multimodal.data.text import FILE as TOKENIZER_FILE
from multimodal.data.text import Tokenizer, build_tokenizer
from multimodal.models.build import build_model
from multimodal.models.two_tower import TwoTower
from multimodal.weights.mapping import Entry, Table, same, to_ours

_ROOT = "params/"
_SCANNED, _BLOCK = "/encoderblock/", "/encoderblock_{}/"
_ATTENTION, _MLP = "MultiHeadDotProductAttention_0", "MlpBlock_0"
_QKV = ("query", "key", "value")
_ENCODERS = {"img": "img/Transformer", "txt": "txt/Encoder_0"}
_EPS = 1e-6
_CANONICAL: list[config.Cleaning] = ["punctuation", "whitespace", "lower"]
_TOKENIZERS: dict[int, tuple[str, list[config.Cleaning]]] = {
    32_000: ("timm/ViT-B-16-SigLIP", _CANONICAL),
    250_000: ("timm/ViT-B-16-SigLIP-i18n-256", _CANONICAL),
    256_000: ("google/siglip2-base-patch16-224", ["lower"]),
}
"""By size of the vocabulary: name on the hub, and what is done to texts before."""


def load_big_vision(name: str) -> tuple[config.Model, TwoTower, Tokenizer]:
    """Settings, model and tokenizer of a SigLIP of big_vision.

    The tokenizer is the one beside the file, or else the hub's for this size of vocabulary.

    Args:
        name: path of the .npz.

    Raises:
        ValueError: when the file is missing, damaged or of another model, or there is no tokenizer.
    """
    path = Path(name)
    arrays = read_npz(path)
    try:
        section = big_vision_section(arrays, tokenizer=_tokenizer(arrays, path.parent))
        tokenizer = build_tokenizer(
            section.tokenizer,
            context_length=section.text.context_length,
            fixed_length=True,
            vocab_size=section.text.vocab_size,
            captions=(),
        )
        model = build_model(section)
        state = to_ours(big_vision_table(section), as_matrices(arrays), model.state_dict())
    except ValueError as error:
        raise ValueError(f"big_vision:{path}: {error}") from error
    model.load_state_dict(state)
    return section, model, tokenizer


# --- the file ------------------------------------------------------------------------------------


def read_npz(path: Path) -> dict[str, Tensor]:
    """Arrays by name, in float32; blocks apart also where they are stacked. No code is run.

    Raises:
        ValueError: when it is no such file.
    """
    if not path.is_file():
        raise ValueError(f"no file at {str(path)!r}; give big_vision:FILE.npz")
    try:
        with np.load(path, allow_pickle=False) as file:
            names = [name for name in file.files if name.startswith(_ROOT)] or file.files
            arrays = {name.removeprefix(_ROOT): _tensor(file[name]) for name in names}
    except (ValueError, TypeError, EOFError, OSError, zipfile.BadZipFile, AttributeError) as error:
        raise ValueError(f"{path} is not an .npz of plain arrays, or damaged: {error}") from error
    return dict(part for name, array in arrays.items() for part in _blocks(name, array))


def _tensor(array: np.ndarray) -> Tensor:
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:  # NumPy has no bfloat16
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float()
    return torch.from_numpy(array).float()


def _blocks(name: str, array: Tensor) -> list[tuple[str, Tensor]]:
    if _SCANNED not in name:
        return [(name, array)]
    return [(name.replace(_SCANNED, _BLOCK.format(i)), x) for i, x in enumerate(array)]


def as_matrices(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """Kernels with two axes, input first, and biases with one."""
    return {name: _as_matrix(name, array) for name, array in arrays.items()}


def _as_matrix(name: str, array: Tensor) -> Tensor:
    if name == "img/embedding/kernel" and array.ndim == 4:
        return array.permute(2, 0, 1, 3).flatten(0, 2)  # channel, row, column
    if _ATTENTION not in name:
        return array
    if name.endswith("/bias"):
        return array.flatten()
    if name.endswith("/kernel") and array.ndim == 3:
        return array.flatten(0, 1) if name.endswith("/out/kernel") else array.flatten(1)
    return array


# --- settings ------------------------------------------------------------------------------------


def big_vision_section(
    arrays: dict[str, Tensor], *, tokenizer: config.TokenizerSection
) -> config.Model:
    """Our settings for arrays of `read_npz`.

    Raises:
        ValueError: when the arrays are of another model.
    """
    patch, _, _, width = _shape(arrays, "img/embedding/kernel", 4)
    grid = _shape(arrays, "img/pos_embedding", 3)[1]
    vocab, _ = _shape(arrays, "txt/Embed_0/embedding", 2)
    side = round(grid**0.5)
    if side * side != grid:
        raise ValueError(f"img/pos_embedding has {grid} positions, which are no square")
    text_projection = "linear_bias" if "txt/head/kernel" in arrays else "none"
    image_projection = "linear_bias" if "img/head/kernel" in arrays else "none"
    return config.Model(
        image=config.VitImage(
            kind="vit",
            image_size=side * patch,
            patch_size=patch,
            patch_bias=True,
            class_token=False,
            pre_norm=False,
            pool="map",
            **_encoder(arrays, _ENCODERS["img"]),
        ),
        text=config.TransformerText(
            kind="transformer",
            vocab_size=vocab,
            context_length=_shape(arrays, "txt/pos_embedding", 3)[1],
            fixed_length=True,
            causal=False,
            pool="last",
            **_encoder(arrays, _ENCODERS["txt"]),
        ),
        embed_dim=width if image_projection == "none" else arrays["img/head/kernel"].shape[1],
        image_projection=image_projection,
        text_projection=text_projection,
        logit_scale=10.0,
        logit_bias=-10.0 if "b" in arrays else None,
        preprocess=config.Preprocess(mean=[0.5] * 3, std=[0.5] * 3, resize_mode="squash"),
        tokenizer=tokenizer,
    )


def _encoder(arrays: dict[str, Tensor], prefix: str) -> dict[str, object]:
    first = prefix + _BLOCK.format(0)
    width, heads, _ = _shape(arrays, f"{first}{_ATTENTION}/query/kernel", 3)
    hidden = _shape(arrays, f"{first}{_MLP}/Dense_0/kernel", 2)[1]
    blocks = {name.split("/")[2] for name in arrays if name.startswith(f"{prefix}/encoderblock_")}
    return {
        "width": width,
        "depth": len(blocks),
        "heads": heads,
        "mlp_ratio": hidden / width,
        "activation": "gelu_tanh",
        "norm_eps": _EPS,
    }


def _shape(arrays: dict[str, Tensor], name: str, axes: int) -> torch.Size:
    if name not in arrays:
        some = ", ".join(sorted(arrays)[:5]) or "nothing"
        raise ValueError(f"{name} is missing; found {some}")
    if arrays[name].ndim != axes:
        raise ValueError(f"{name} has shape {list(arrays[name].shape)}, needed are {axes} axes")
    return arrays[name].shape


def _tokenizer(arrays: dict[str, Tensor], folder: Path) -> config.HfTokenizer:
    vocab = _shape(arrays, "txt/Embed_0/embedding", 2)[0]
    name, clean = _TOKENIZERS.get(vocab, (None, ["lower"]))
    if (folder / TOKENIZER_FILE).is_file():
        name = str(folder)
    if name is None:
        raise ValueError(
            f"a vocabulary of {vocab} is none of {', '.join(map(str, _TOKENIZERS))}, and "
            f"{folder} has no {TOKENIZER_FILE}; put the model's own beside the .npz"
        )
    return config.HfTokenizer(kind="hf", name=name, clean=clean)


# --- names ---------------------------------------------------------------------------------------


def big_vision_table(section: config.Model) -> Table:
    """Names of arrays as `as_matrices` gives them, and ours."""
    entries = [
        same("t", "temperature.logit_scale", reshape=True),
        *_dense("img/embedding", "image.patch.proj"),
        same("img/pos_embedding", "image.position.weight", reshape=True),
        *_encoder_entries(_ENCODERS["img"], "image", section.image.depth),
        same("img/MAPHead_0/probe", "image.pool.probe"),
        *_attention(f"img/MAPHead_0/{_ATTENTION}", "image.pool.attention"),
        *_norm("img/MAPHead_0/LayerNorm_0", "image.pool.layernorm"),
        *_mlp(f"img/MAPHead_0/{_MLP}", "image.pool.mlp"),
        same("txt/Embed_0/embedding", "text.token_embedding.weight"),
        same("txt/pos_embedding", "text.position.weight", reshape=True),
        *_encoder_entries(_ENCODERS["txt"], "text", section.text.depth),
    ]
    if section.logit_bias is not None:
        entries.append(same("b", "temperature.logit_bias", reshape=True))
    if section.image_projection != "none":
        entries += _dense("img/head", "image_projection")
    if section.text_projection != "none":
        entries += _dense("txt/head", "text_projection")
    return tuple(entries)


def _encoder_entries(theirs: str, ours: str, depth: int) -> list[Entry]:
    entries = _norm(f"{theirs}/encoder_norm", f"{ours}.norm")
    for i in range(depth):
        layer, block = theirs + _BLOCK.format(i), f"{ours}.encoder.blocks.{i}"
        entries += _norm(f"{layer}LayerNorm_0", f"{block}.attn.norm")
        entries += _attention(f"{layer}{_ATTENTION}", f"{block}.attn.inner")
        entries += _norm(f"{layer}LayerNorm_1", f"{block}.mlp.norm")
        entries += _mlp(f"{layer}{_MLP}", f"{block}.mlp.inner")
    return entries


def _attention(theirs: str, ours: str) -> list[Entry]:
    entries = _dense(f"{theirs}/out", f"{ours}.out_proj")
    for name in _QKV:
        entries += _dense(f"{theirs}/{name}", f"{ours}.{name[0]}_proj")
    return entries


def _mlp(theirs: str, ours: str) -> list[Entry]:
    return [
        *_dense(f"{theirs}/Dense_0", f"{ours}.fc1"),
        *_dense(f"{theirs}/Dense_1", f"{ours}.fc2"),
    ]


def _dense(theirs: str, ours: str) -> list[Entry]:
    return [
        same(f"{theirs}/kernel", f"{ours}.weight", transpose=True),
        same(f"{theirs}/bias", f"{ours}.bias"),
    ]


def _norm(theirs: str, ours: str) -> list[Entry]:
    return [same(f"{theirs}/scale", f"{ours}.weight"), same(f"{theirs}/bias", f"{ours}.bias")]
