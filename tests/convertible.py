"""Small models that other formats can hold, and folders of them."""

import torch
from tiny import tiny_section
from tiny_tokenizers import MAKERS, from_hf, train

from multimodal import config
from multimodal.data.text import Tokenizer
from multimodal.data.transforms import ImageTransform
from multimodal.models.build import build_model
from multimodal.weights.pretrained import Pretrained

HALF = {"mean": [0.5] * 3, "std": [0.5] * 3}


def clip_section(tokenizer: Tokenizer, image_size: int = 21, **changes) -> config.Model:
    """CLIP as transformers has it, with odd sizes."""
    image = {"kind": "vit", "image_size": image_size, "patch_size": 7, "width": 33, "heads": 3}
    text = {"kind": "transformer", "context_length": tokenizer.context_length, "width": 35}
    text |= {"heads": 5, "vocab_size": tokenizer.vocab_size + 2}
    return tiny_section(image=image | {"depth": 2}, text=text | {"depth": 3}, **changes)


def siglip_section(tokenizer: Tokenizer, **changes) -> config.Model:
    """SigLIP 2 as transformers has it, with odd sizes."""
    shared = {"activation": "gelu_tanh", "norm_eps": 1e-6}
    image = {"kind": "vit", "image_size": 21, "patch_size": 7, "width": 33, "heads": 3, "depth": 2}
    image |= {"patch_bias": True, "class_token": False, "pre_norm": False, "pool": "map"}
    text = {"kind": "transformer", "context_length": tokenizer.context_length, "width": 35}
    text |= {"heads": 5, "depth": 3, "vocab_size": tokenizer.vocab_size + 2}
    text |= {"fixed_length": True, "causal": False, "pool": "last"}
    rest = {"image_projection": "none", "text_projection": "linear_bias", "embed_dim": 33}
    rest |= {"logit_scale": 10.0, "logit_bias": -10.0}
    preprocess = HALF | {"resize_mode": "squash"}
    return tiny_section(
        image=image | shared, text=text | shared, **rest, **{"preprocess": preprocess} | changes
    )


def pretrained_of(section: config.Model, tokenizer: Tokenizer) -> Pretrained:
    """A model whose weights are large enough for every part and setting to matter."""
    torch.manual_seed(0)
    model = build_model(section)
    for name, parameter in model.named_parameters():
        if "embedding" in name or "position" in name or "latent" in name:
            parameter.data.normal_(std=0.02)  # small, so that epsilon matters
        elif parameter.ndim >= 2:
            parameter.data.normal_(std=parameter[0].numel() ** -0.5)
        elif parameter.numel() > 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    transform = ImageTransform(section.image.image_size, section.preprocess)
    return Pretrained(model=model.eval(), transform=transform, tokenizer=tokenizer, config=section)


def trained_clip(context: int = 32, image_size: int = 21) -> Pretrained:
    """Like the quickstart's: CLIP with a tokenizer that it trained itself."""
    tokenizer = train(vocab_size=340, context=context)
    return pretrained_of(clip_section(tokenizer, image_size, preprocess=HALF), tokenizer)


def family_tokenizer(folder, family: str, *, context: int = 13, fixed: bool = False, **options):
    """A tokenizer of one of `MAKERS`, read from a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    MAKERS[family](folder)
    return from_hf(folder, context=context, fixed=fixed, **options)


def openai_clip(folder, context: int = 13) -> Pretrained:
    """Like clip-b-32: CLIP with a byte-level BPE of OpenAI's kind."""
    tokenizer = family_tokenizer(folder, "clip", context=context)
    changes = {"activation": "quick_gelu"}
    section = clip_section(tokenizer)
    towers = {name: getattr(section, name).model_copy(update=changes) for name in ("image", "text")}
    return pretrained_of(section.model_copy(update=towers), tokenizer)


def siglip(folder, family: str = "gemma", *, context: int = 64, **options) -> Pretrained:
    """SigLIP with a tokenizer of the family; 64 is what transformers' pipeline wants."""
    tokenizer = family_tokenizer(folder, family, context=context, fixed=True, **options)
    return pretrained_of(siglip_section(tokenizer), tokenizer)
