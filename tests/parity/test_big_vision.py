"""SigLIP of big_vision: a file in its layout gives the features of transformers and OpenCLIP."""

import numpy as np
import pytest
import torch
from timm.models.vision_transformer import _create_vision_transformer
from timm_models import register
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, SiglipConfig, SiglipModel

from multimodal import config
from multimodal.models.build import build_model
from multimodal.weights.big_vision import as_matrices, big_vision_section, read_npz
from multimodal.weights.hf import features_of
from multimodal.weights.load import load

CONTEXT, VOCAB, DEPTH = 13, 97, 3
IMAGE = {"hidden_size": 36, "num_attention_heads": 3, "image_size": 28, "patch_size": 7}
TEXT = {"hidden_size": 35, "num_attention_heads": 5, "vocab_size": VOCAB, "projection_size": 36}


def make(activation: str = "gelu_pytorch_tanh", eps: float = 1e-6) -> SiglipModel:
    """A small model with weights large enough for every part to matter."""
    shared = {"hidden_act": activation, "layer_norm_eps": eps, "num_hidden_layers": DEPTH}
    model = SiglipModel(
        SiglipConfig(
            text_config=TEXT | shared | {
                "intermediate_size": 57, "max_position_embeddings": CONTEXT,
                "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
            },
            vision_config=IMAGE | shared | {"intermediate_size": 71},
        )
    ).eval()  # fmt: skip
    for name, parameter in model.named_parameters():
        if "embedding" in name:  # small, so that epsilon matters
            parameter.data.normal_(std=0.003)
        elif parameter.ndim >= 2:
            parameter.data.normal_(std=parameter[0].numel() ** -0.5)
        else:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


# --- a writer of the layout, from transformers' modules ------------------------------------------


def dense(linear, *shape: int) -> dict[str, np.ndarray]:
    return {"kernel": linear.weight.T.reshape(*shape) if shape else linear.weight.T} | {
        "bias": linear.bias.reshape(shape[1:]) if len(shape) == 3 else linear.bias
    }


def norm(module) -> dict:
    return {"scale": module.weight, "bias": module.bias}


def attention(q, k, v, out, heads: int) -> dict:
    width = out.weight.shape[0]
    size = width // heads
    tree = {n: dense(x, width, heads, size) for n, x in (("query", q), ("key", k), ("value", v))}
    kernel = out.weight.T.reshape(heads, size, width)
    return tree | {"out": {"kernel": kernel, "bias": out.bias}}


def mlp(module) -> dict:
    return {"Dense_0": dense(module.fc1), "Dense_1": dense(module.fc2)}


def encoder(encoder, last, heads: int, *, scanned: bool) -> dict:
    blocks = [
        {
            "LayerNorm_0": norm(layer.layer_norm1),
            "MultiHeadDotProductAttention_0": attention(
                layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj,
                layer.self_attn.out_proj, heads,
            ),
            "LayerNorm_1": norm(layer.layer_norm2),
            "MlpBlock_0": mlp(layer.mlp),
        }
        for layer in encoder.layers
    ]  # fmt: skip
    tree = {"encoder_norm": norm(last)}
    if not scanned:
        return tree | {f"encoderblock_{i}": block for i, block in enumerate(blocks)}
    flat = [flatten(block) for block in blocks]
    return tree | {"encoderblock": {k: torch.stack([b[k] for b in flat]) for k in flat[0]}}


def map_head(head, heads: int) -> dict:
    linears = []
    parts = zip(
        head.attention.in_proj_weight.chunk(3), head.attention.in_proj_bias.chunk(3), strict=True
    )
    for weight, bias in parts:
        linear = torch.nn.Linear(*weight.shape[::-1])
        linear.weight.data, linear.bias.data = weight, bias
        linears.append(linear)
    return {
        "probe": head.probe,
        "MultiHeadDotProductAttention_0": attention(*linears, head.attention.out_proj, heads),
        "LayerNorm_0": norm(head.layernorm),
        "MlpBlock_0": mlp(head.mlp),
    }


def flatten(tree: dict, prefix: str = "") -> dict[str, Tensor]:
    flat = {}
    for name, value in tree.items():
        nested = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{name}/") if nested else {prefix + name: value}
    return flat


def arrays_of(model: SiglipModel, *, scanned: bool = False) -> dict[str, np.ndarray]:
    image, text = model.vision_model, model.text_model
    patch = image.embeddings.patch_embedding
    heads = image.config.num_attention_heads
    tree = {
        "img": {
            "embedding": {"kernel": patch.weight.permute(2, 3, 1, 0), "bias": patch.bias},
            "pos_embedding": image.embeddings.position_embedding.weight[None],
            "Transformer": encoder(image.encoder, image.post_layernorm, heads, scanned=scanned),
            "MAPHead_0": map_head(image.head, heads),
        },
        "txt": {
            "Embed_0": {"embedding": text.embeddings.token_embedding.weight},
            "pos_embedding": text.embeddings.position_embedding.weight[None],
            "Encoder_0": encoder(
                text.encoder, text.final_layer_norm, text.config.num_attention_heads,
                scanned=scanned,
            ),
            "head": dense(text.head),
        },
        "t": model.logit_scale,
        "b": model.logit_bias,
    }  # fmt: skip
    return {name: tensor.detach().numpy() for name, tensor in flatten(tree).items()}


def write(folder, arrays: dict[str, np.ndarray]):
    """The file with a tokenizer beside it."""
    vocab = {"<pad>": 0, "</s>": 1, "<unk>": 2} | {f"w{i}": 3 + i for i in range(VOCAB - 3)}
    backend = Tokenizer(models.WordLevel(vocab, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(folder)
    np.savez(folder / "siglip.npz", **arrays)
    return folder / "siglip.npz"


# --- tests ---------------------------------------------------------------------------------------


def texts() -> tuple[Tensor, Tensor]:
    """Full and padded texts; the padding is seen."""
    lengths = torch.tensor([CONTEXT, 5, 2, 9])
    tokens = torch.randint(2, VOCAB, (4, CONTEXT))
    tokens[torch.arange(CONTEXT) >= lengths[:, None]] = 0
    return tokens, lengths


@torch.no_grad()
def difference(ours, image_features, text_features) -> tuple[float, float]:
    """Largest difference of the features' elements, before unit length."""
    pixels, (tokens, lengths) = torch.randn(3, 3, 28, 28), texts()
    image = ours.image_projection(ours.image(pixels))
    text = ours.text_projection(ours.text(tokens, lengths))
    return (
        (image - features_of(image_features(pixels))).abs().max().item(),
        (text - features_of(text_features(tokens))).abs().max().item(),
    )


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("prefix", ["", "params/"])
def test_features_are_those_of_transformers(tmp_path, scanned, prefix):
    theirs = make()
    arrays = {prefix + k: v for k, v in arrays_of(theirs, scanned=scanned).items()}
    if prefix:
        arrays["opt/0/mu"] = np.zeros(3)  # what a checkpoint of a run has besides
    ours = load(f"big_vision:{write(tmp_path, arrays)}")
    found = difference(ours.model, theirs.get_image_features, theirs.get_text_features)
    assert max(found) < 1e-5
    assert ours.logit_scale() == pytest.approx(theirs.logit_scale.exp().item())
    assert ours.logit_bias() == theirs.logit_bias.item()
    assert ours.config.image.image_size == 28
    assert ours.config.preprocess.resize_mode == "squash"
    assert ours.tokenizer.encode(["w3 W4"]).tokens[0, :4].tolist() == [6, 7, 1, 0]


def test_open_clip_reads_the_same_features_from_the_same_file(tmp_path):
    open_clip = pytest.importorskip("open_clip")
    from open_clip.convert import load_big_vision_weights

    trunk = register(
        _create_vision_transformer, patch_size=7, embed_dim=36, depth=DEPTH, num_heads=3,
        mlp_ratio=71 / 36, class_token=False, global_pool="map", act_layer="gelu_tanh",
    )  # fmt: skip
    model = open_clip.model.CustomTextCLIP(
        embed_dim=36, init_logit_bias=-10,
        vision_cfg={
            "timm_model_name": trunk, "timm_pool": "map", "timm_proj": "none", "image_size": 28,
        },
        text_cfg={
            "context_length": CONTEXT, "vocab_size": VOCAB, "width": 35, "heads": 5,
            "layers": DEPTH, "mlp_ratio": 57.1 / 35, "no_causal_mask": True, "proj_bias": True,
            "pool_type": "last", "norm_kwargs": {"eps": 1e-6},
            "act_kwargs": {"approximate": "tanh"},
        },
    ).eval()  # fmt: skip
    path = write(tmp_path, arrays_of(make()))
    load_big_vision_weights(model, str(path))
    ours = load(f"big_vision:{path}").model
    assert max(difference(ours, model.encode_image, model.encode_text)) < 1e-5


def test_bfloat16_is_read_which_numpy_stores_as_bytes(tmp_path):
    arrays = arrays_of(make())
    whole = arrays["img/Transformer/encoder_norm/scale"]
    short = torch.from_numpy(whole).bfloat16()
    arrays["img/Transformer/encoder_norm/scale"] = short.view(torch.int16).numpy().view("V2")
    found = read_npz(write(tmp_path, arrays))["img/Transformer/encoder_norm/scale"]
    assert torch.equal(found, short.float())


WRONG = {
    "activation": ("both", {"activation": "gelu"}),
    "epsilon": ("both", {"norm_eps": 1e-5}),
    "heads": ("image", {"heads": 4}),
    "image pool": ("image", {"pool": "mean"}),
    "text pool": ("text", {"pool": "eot"}),
    "order": ("text", {"causal": True}),
    "mask": ("text", {"mask_padding": True}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_noticed(name, tmp_path):
    towers, update = WRONG[name]
    parts = ("image", "text") if towers == "both" else (towers,)
    theirs = make()
    right = load(f"big_vision:{write(tmp_path, arrays_of(theirs))}")
    changed = {p: getattr(right.config, p).model_copy(update=update) for p in parts}
    wrong = build_model(right.config.model_copy(update=changed)).eval()
    wrong.load_state_dict(right.model.state_dict(), strict=update != {"pool": "mean"})
    image, text = difference(wrong, theirs.get_image_features, theirs.get_text_features)
    assert image > 1e-4 or "image" not in parts
    assert text > 1e-4 or "text" not in parts


LAYOUTS = {
    "rows and columns of a patch": ("img/embedding/kernel", (1, 0, 2, 3)),
    "rows and columns of the positions": ("img/pos_embedding", None),
    "heads and their width": ("img/Transformer/encoderblock_0/{}/query/kernel", None),
}


@pytest.mark.parametrize("what", LAYOUTS)
def test_another_layout_of_an_array_is_noticed(what, tmp_path):
    theirs = make()
    theirs.vision_model.embeddings.position_embedding.weight.data.normal_()
    theirs.vision_model.embeddings.patch_embedding.weight.data.normal_()
    arrays, (name, order) = arrays_of(theirs), LAYOUTS[what]
    name = name.format("MultiHeadDotProductAttention_0")
    array = arrays[name]
    if order is not None:
        array = array.transpose(order)
    elif "pos" in name:
        array = array.reshape(1, 4, 4, 36).transpose(0, 2, 1, 3).reshape(1, 16, 36)
    else:
        array = array.reshape(36, 12, 3).transpose(0, 2, 1)
    ours = load(f"big_vision:{write(tmp_path, arrays | {name: array})}").model
    found = difference(ours, theirs.get_image_features, theirs.get_text_features)
    assert found[0] > 1e-2


def test_a_projection_of_the_image_and_a_text_without_one_are_read():
    arrays = {name: torch.from_numpy(x) for name, x in arrays_of(make()).items()}
    arrays["img/head/kernel"], arrays["img/head/bias"] = torch.zeros(36, 35), torch.zeros(35)
    del arrays["txt/head/kernel"], arrays["txt/head/bias"], arrays["b"]
    section = big_vision_section(arrays, tokenizer=config.HfTokenizer(kind="hf", name="none"))
    assert (section.image_projection, section.text_projection) == ("linear_bias", "none")
    assert (section.embed_dim, section.logit_bias) == (35, None)
    assert as_matrices(arrays)["img/embedding/kernel"].shape == (3 * 49, 36)


@pytest.mark.parametrize(
    ("vocab", "name", "clean"),
    [
        (32_000, "timm/ViT-B-16-SigLIP", ["punctuation", "whitespace", "lower"]),
        (256_000, "google/siglip2-base-patch16-224", ["lower"]),
    ],
)
def test_the_hubs_tokenizer_is_named_by_the_size_of_the_vocabulary(
    tmp_path, monkeypatch, vocab, name, clean
):
    arrays = arrays_of(make()) | {"txt/Embed_0/embedding": np.zeros((vocab, 35), np.float32)}
    np.savez(tmp_path / "a.npz", **arrays)
    asked = []
    monkeypatch.setattr(
        "multimodal.weights.big_vision.build_tokenizer", lambda section, **_: asked.append(section)
    )
    from multimodal.weights.big_vision import load_big_vision

    load_big_vision(str(tmp_path / "a.npz"))
    assert asked == [config.HfTokenizer(kind="hf", name=name, clean=clean)]


def test_what_does_not_fit_is_named(tmp_path):
    arrays = arrays_of(make())
    name = "txt/Encoder_0/encoderblock_1/MlpBlock_0/Dense_1/bias"

    def refused(match: str, changed: dict) -> None:
        with pytest.raises(ValueError, match=match):
            load(f"big_vision:{write(tmp_path, changed)}")

    refused(f"missing: {name}", {k: v for k, v in arrays.items() if k != name})
    refused(r"not expected: img/cls", arrays | {"img/cls": np.zeros((1, 1, 36), np.float32)})
    refused(rf"{name} has shape \[3\]", arrays | {name: np.zeros(3, np.float32)})
    refused(r"txt/Embed_0/embedding is missing; found a/b", {"a/b": np.zeros(2)})
    refused(r"allow_pickle=False", arrays | {"t": np.array([{"code": 1}], dtype=object)})
    with pytest.raises(ValueError, match=r"no file at '/nowhere.npz'"):
        load("big_vision:/nowhere.npz")
    (tmp_path / "tokenizer.json").unlink()
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(ValueError, match=r"vocabulary of 97 is none of 32000.*beside the .npz"):
        load(f"big_vision:{tmp_path / 'a.npz'}")
    (tmp_path / "b.npz").write_bytes(b"PK no archive")
    with pytest.raises(ValueError, match=r"b.npz is not an .npz of plain arrays"):
        load(f"big_vision:{tmp_path / 'b.npz'}")
