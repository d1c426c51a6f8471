"""OpenCLIP models with an image tower of timm: what OpenCLIP saves gives the same features here."""

import json

import pytest
import torch
from safetensors.torch import save_file
from timm.models.eva import _create_eva
from timm.models.vision_transformer import _create_vision_transformer
from timm.models.vision_transformer_hybrid import (
    ConvStem,
    _create_vision_transformer_hybrid,
)
from timm_models import register
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from multimodal import config
from multimodal.models.build import build_model
from multimodal.weights.load import load
from multimodal.weights.mapping import from_ours, to_ours
from multimodal.weights.openclip_timm import projection_name, timm_section, timm_table

open_clip = pytest.importorskip("open_clip")

SIGLIP = {
    "patch_size": 7, "embed_dim": 36, "depth": 2, "num_heads": 3, "mlp_ratio": 2.36,
    "class_token": False, "global_pool": "map",
}  # fmt: skip


def create_mci(name: str, **args):
    """MobileCLIP-B: a stem of three convolutions before the blocks."""
    stem = ConvStem(
        channels=(9, 9, 36), stride=(4, 2, 1), kernel_size=(4, 2, 1), padding=0,
        act_layer=torch.nn.GELU,
    )  # fmt: skip
    return _create_vision_transformer_hybrid(name, stem, {"proj": False}, **args)


EXACT = register(_create_vision_transformer, **SIGLIP)
TANH = register(_create_vision_transformer, **SIGLIP, act_layer="gelu_tanh")
UNEVEN = register(_create_vision_transformer, **SIGLIP | {"patch_size": 9})
"""Patches that do not tile the picture, as in ViT-SO400M-14-SigLIP-384."""
PLAIN = register(_create_vision_transformer, patch_size=7, embed_dim=36, depth=2, num_heads=3)
MCI = register(create_mci, embed_dim=36, depth=2, num_heads=3, no_embed_class=True)
PE = register(
    _create_eva, patch_size=7, embed_dim=36, depth=2, num_heads=3, global_pool="map",
    attn_type="rope", use_pre_transformer_norm=True, use_rot_pos_emb=True, ref_feat_shape=(4, 4),
    rope_grid_offset=1.0, rope_grid_indexing="xy", attn_pool_num_heads=4, attn_pool_mlp_ratio=2.0,
)  # fmt: skip
CONTEXT, WORDS, EOS = 13, 90, 1


def text_cfg(**changes) -> dict:
    cfg = {"context_length": CONTEXT, "width": 35, "heads": 5, "layers": 3, "mlp_ratio": 1.63}
    return cfg | changes


def siglip_text(**changes) -> dict:
    return text_cfg(
        vocab_size=97, hf_tokenizer_name="timm/ViT-B-16-SigLIP", no_causal_mask=True,
        tokenizer_kwargs={"clean": "canonicalize"}, proj_bias=True, pool_type="last",
        norm_kwargs={"eps": 1e-6}, **changes,
    )  # fmt: skip


def cfg(trunk: str, pool: str, proj: str | None, text: dict | None = None, **changes) -> dict:
    vision = {"timm_model_name": trunk, "timm_pool": pool, "timm_proj": proj, "image_size": 28}
    return {"embed_dim": 36, "vision_cfg": vision, "text_cfg": text or text_cfg()} | changes


MODELS = {
    "siglip": cfg(EXACT, "map", "none", siglip_text(), init_logit_bias=-10),
    "siglip2": cfg(
        EXACT, "map", "none", siglip_text(act_kwargs={"approximate": "tanh"}), init_logit_bias=-10
    ),
    "siglip2_tanh_image": cfg(
        TANH, "map", "none", siglip_text(act_kwargs={"approximate": "tanh"}), init_logit_bias=-10
    ),
    "siglip_without_text_projection": cfg(
        EXACT, "map", "none", siglip_text(width=36, heads=3) | {"proj_bias": False}
        | {"proj_type": "none"},
    ),
    "siglip_uneven": cfg(UNEVEN, "map", "none", siglip_text(), init_logit_bias=-10),
    "siglip_projected": cfg(EXACT, "map", "linear", siglip_text(), embed_dim=19),
    "mobileclip_b": cfg(MCI, "token", None, embed_dim=19),
    "mobileclip_bidirectional": cfg(MCI, "token", None, text_cfg(no_causal_mask=True)),
    "pe": cfg(PE, "map", None, embed_dim=19),
    "vit_linear": cfg(PLAIN, "", "linear", embed_dim=19),
    "vit_linear_bias": cfg(PLAIN, "token", "linear", embed_dim=19),
    "convnext": cfg("test_convnext", "", "linear", embed_dim=19),
    "fastvit_style_head": cfg("test_resnet", "avg", None, embed_dim=19),
    "quick_text": cfg(PLAIN, "", "linear", quick_gelu=True),
}  # fmt: skip
MODELS["vit_linear_bias"]["vision_cfg"]["timm_proj_bias"] = True
for name in ("convnext", "fastvit_style_head"):
    MODELS[name]["vision_cfg"]["image_size"] = 64
NATIVE = ("siglip", "siglip2", "siglip2_tanh_image", "siglip_without_text_projection")


def make(model_cfg: dict):
    """A model of OpenCLIP with weights large enough for every part to matter."""
    given = json.loads(json.dumps(model_cfg))
    model = open_clip.model.CustomTextCLIP(**given).eval()
    for key, parameter in model.named_parameters():
        if "embed" in key:  # small, so that epsilon matters
            parameter.data.normal_(std=0.003 if "siglip" in str(given) else 0.3)
        elif parameter.ndim >= 2 and "latent" not in key:
            parameter.data.normal_(std=parameter[0].numel() ** -0.5)
        elif parameter.numel() > 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
        else:
            parameter.data += 0.3
    for key, buffer in model.named_buffers():
        if "running" in key:
            buffer.copy_(torch.rand_like(buffer) + 0.5)
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {"<pad>": 0, "</s>": EOS, "<unk>": 2} | {f"w{i}": 3 + i for i in range(WORDS)}
    backend = Tokenizer(models.WordLevel(vocab, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", EOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


PREPROCESS = {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "squash"}


def write(folder, theirs, model_cfg):
    """As OpenCLIP lays out a folder."""
    save_file(theirs.state_dict(), folder / "open_clip_model.safetensors")
    content = {"model_cfg": model_cfg, "preprocess_cfg": PREPROCESS}
    (folder / "open_clip_config.json").write_text(json.dumps(content))
    if "hf_tokenizer_name" in model_cfg["text_cfg"]:
        tokenizer().save_pretrained(folder)
    return folder


def texts(model_cfg: dict) -> tuple[Tensor, Tensor]:
    """Full, padded and shortest texts; the end of a text is its largest id, or is seen by all."""
    vocab = model_cfg["text_cfg"].get("vocab_size", 49_408)
    lengths = torch.tensor([CONTEXT, 5, 2, 9])
    tokens = torch.randint(2, vocab - 1, (4, CONTEXT))
    end = vocab - 1 if vocab == 49_408 else EOS
    for row, length in enumerate(lengths.tolist()):
        tokens[row, length - 1] = end
        tokens[row, length:] = 0
    return tokens, lengths


@torch.no_grad()
def difference(ours, theirs, model_cfg: dict) -> tuple[float, float]:
    """Largest difference of the image and of the text features' elements, before unit length."""
    size = model_cfg["vision_cfg"]["image_size"]
    pixels, (tokens, lengths) = torch.randn(3, 3, size, size), texts(model_cfg)
    image = ours.image_projection(ours.image(pixels))
    text = ours.text_projection(ours.text(tokens, lengths))
    return (
        (image - theirs.encode_image(pixels)).abs().max().item(),
        (text - theirs.encode_text(tokens)).abs().max().item(),
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_of_open_clip_gives_its_features(name, tmp_path):
    model_cfg = MODELS[name]
    theirs = make(model_cfg)
    ours = load(f"open_clip:{write(tmp_path, theirs, model_cfg)}")
    assert max(difference(ours.model, theirs, model_cfg)) < 1e-5
    assert ours.logit_scale() == pytest.approx(theirs.logit_scale.exp().item())
    bias = theirs.logit_bias
    assert ours.logit_bias() == (None if bias is None else pytest.approx(bias.item()))
    assert ours.config.image.kind == ("vit" if name in (*NATIVE, "siglip_projected") else "timm")
    assert ours.config.preprocess.resize_mode == "squash"
    assert ours.config.preprocess.mean == [0.5] * 3


def test_cut_texts_of_a_causal_tower_agree(tmp_path):
    theirs = make(MODELS["mobileclip_b"])
    ours = load(f"open_clip:{write(tmp_path, theirs, MODELS['mobileclip_b'])}").model
    tokens, lengths = texts(MODELS["mobileclip_b"])
    with torch.no_grad():
        cut = ours.text_projection(ours.text(tokens[1:3, :5], lengths[1:3]))
        assert (cut - theirs.encode_text(tokens)[1:3]).abs().max() < 1e-5


def section_of(model_cfg: dict) -> config.Model:
    return timm_section(
        model_cfg,
        tokenizer=config.HfTokenizer(kind="hf", name="none"),
        preprocess=config.Preprocess(),
    )


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_bit_equal(name):
    model_cfg = MODELS[name]
    state = make(model_cfg).state_dict()
    section = section_of(model_cfg)
    table = timm_table(section, projection=projection_name(model_cfg))
    ours = to_ours(table, state, build_model(section).state_dict())
    again = from_ours(table, ours, state)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[key], state[key]) for key in state)


# What a wrong setting does to the features, so that the tests above prove something.
WRONG = {
    "image activation": ("siglip2_tanh_image", "image", {"activation": "gelu"}),
    "image epsilon": ("siglip", "image", {"norm_eps": 1e-5}),
    "image heads": ("siglip", "image", {"heads": 4}),
    "image pool": ("siglip", "image", {"pool": "mean"}),
    "text activation": ("siglip2", "text", {"activation": "gelu"}),
    "text epsilon": ("siglip", "text", {"norm_eps": 1e-5}),
    "text order": ("siglip", "text", {"causal": True}),
    "text padding": ("siglip", "text", {"mask_padding": True}),
    "text pool": ("siglip", "text", {"pool": "eot"}),
    "causal text": ("mobileclip_b", "text", {"causal": False, "fixed_length": True}),
    "bidirectional text": ("mobileclip_bidirectional", "text", {"causal": True}),
    "masked bidirectional text": ("mobileclip_bidirectional", "text", {"mask_padding": True}),
    "quick text": ("quick_text", "text", {"activation": "gelu"}),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_setting_is_noticed(what, tmp_path):
    name, side, update = WRONG[what]
    theirs = make(MODELS[name])
    right = load(f"open_clip:{write(tmp_path, theirs, MODELS[name])}")
    tower = getattr(right.config, side).model_copy(update=update)
    wrong = build_model(right.config.model_copy(update={side: tower})).eval()
    wrong.load_state_dict(right.model.state_dict(), strict=update != {"pool": "mean"})
    image, text = difference(wrong, theirs, MODELS[name])
    assert (image if side == "image" else text) > 5e-5


def test_positions_in_another_layout_are_noticed(tmp_path):
    """Columns before rows have the same shape."""
    theirs = make(MODELS["siglip"])
    ours = load(f"open_clip:{write(tmp_path, theirs, MODELS['siglip'])}").model
    theirs.visual.trunk.pos_embed.data.normal_()
    turned = theirs.visual.trunk.pos_embed[0].unflatten(0, (4, 4)).transpose(0, 1).flatten(0, 1)
    ours.image.position.weight.data.copy_(turned)
    assert difference(ours, theirs, MODELS["siglip"])[0] > 1e-2


def test_what_cannot_be_expressed_is_refused_with_all_reasons():
    model_cfg = cfg(PLAIN, "abs_attn", "mlp", siglip_text() | {"embed_cls": True}, other=1)
    with pytest.raises(ValueError) as error:
        section_of(model_cfg)
    for part in (
        "model_cfg.other is not known",
        "vision_cfg.timm_pool='abs_attn' is a pool of OpenCLIP's own",
        "vision_cfg.timm_proj='mlp' (needed 'linear', 'none' or null)",
        "text_cfg.embed_cls=True (needed False)",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"timm_pool='avg', but here '\w+' has its own, 'token'"):
        section_of(cfg(PLAIN, "avg", "linear"))
    with pytest.raises(ValueError, match=r"timm_model_name='vit_gone' is not known to timm"):
        section_of(cfg("vit_gone", "", "linear"))


@pytest.mark.parametrize("name", ["siglip", "pe", "convnext"])
def test_weights_that_do_not_fit_are_named(name, tmp_path):
    theirs = make(MODELS[name])
    write(tmp_path, theirs, MODELS[name])
    state = theirs.state_dict()
    key = next(k for k in state if "visual" in k and k.endswith("bias"))
    for change, match in (
        ({key: None}, f"missing: {key}"),
        ({"visual.trunk.extra": torch.zeros(2)}, r"not expected: visual.trunk.extra"),
        ({key: torch.zeros(3)}, rf"{key} has shape \[3\]"),
    ):
        changed = {k: v for k, v in (state | change).items() if v is not None}
        save_file(changed, tmp_path / "open_clip_model.safetensors")
        with pytest.raises(ValueError, match=match):
            load(f"open_clip:{tmp_path}")
