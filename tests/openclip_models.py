"""Small OpenCLIP models with weights that make every part matter, and their files."""

import copy
import json
from pathlib import Path

import torch
from open_clip.model import CLIP, CustomTextCLIP
from safetensors.torch import save_file
from tiny_tokenizers import make_clip
from torch import Tensor, nn

CONTEXT, VOCAB, EOS = 13, 516, 515
CFG = {
    "embed_dim": 19,
    "vision_cfg": {
        **{"image_size": 21, "patch_size": 7, "width": 33, "head_width": 11, "layers": 2},
        "mlp_ratio": 2.2,
    },
    "text_cfg": {
        **{"context_length": CONTEXT, "vocab_size": VOCAB, "width": 35, "heads": 5, "layers": 3},
        "mlp_ratio": 1.7,
        "hf_tokenizer_name": "a-small-one",
    },
}
"""Ratios that give no whole numbers: OpenCLIP cuts 72.6 and 59.5."""
PREPROCESS = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.25], "interpolation": "bilinear"}


def with_changes(image: dict | None = None, text: dict | None = None, **whole) -> dict:
    """A copy of `CFG` with other settings."""
    cfg = copy.deepcopy(CFG) | whole
    cfg["vision_cfg"] |= image or {}
    cfg["text_cfg"] |= text or {}
    return cfg


def make(cfg: dict) -> nn.Module:
    """OpenCLIP's model; linears keep the scale of their input, embeddings are small."""
    cfg = copy.deepcopy(cfg)
    kind = CustomTextCLIP if cfg.pop("custom_text", False) else CLIP
    model = kind(**cfg).eval()
    for name, parameter in model.named_parameters():
        if "embedding" in name:
            parameter.data.normal_(std=0.01)
        elif parameter.ndim >= 2:
            fan = parameter.shape[0] if name.endswith("proj") else parameter[0].numel()
            parameter.data.normal_(std=fan**-0.5)
        elif parameter.numel() > 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def save(model: nn.Module, cfg: dict, folder: Path, **preprocess) -> str:
    """A folder as OpenCLIP pushes it to the hub; returns its name for `load`."""
    folder.mkdir(exist_ok=True)
    content = {"model_cfg": cfg, "preprocess_cfg": PREPROCESS | preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    if cfg["text_cfg"].get("hf_tokenizer_name"):
        make_clip(folder)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "open_clip_model.safetensors")
    return f"open_clip:{folder}"


def texts() -> tuple[Tensor, Tensor]:
    """A full, a cut, a padded and a shortest text; padding is 0, which no other token is."""
    lengths = torch.tensor([CONTEXT, CONTEXT, 5, 2])
    tokens = torch.randint(1, 500, (4, CONTEXT))
    tokens[torch.arange(4), lengths - 1] = EOS
    tokens[torch.arange(CONTEXT) >= lengths[:, None]] = 0
    return tokens, lengths
