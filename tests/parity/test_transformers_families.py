"""SigLIP 2 (NaFlex at its square), MetaCLIP and MetaCLIP 2 of transformers, from saved folders."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import (
    CLIPConfig,
    CLIPImageProcessor,
    CLIPModel,
    MetaClip2Config,
    MetaClip2Model,
    PreTrainedTokenizerFast,
    Siglip2Config,
    Siglip2ImageProcessor,
    Siglip2Model,
    SiglipImageProcessor,
)

from multimodal.models.build import build_model
from multimodal.weights import hub
from multimodal.weights.clip import clip_table
from multimodal.weights.hf import features_of
from multimodal.weights.load import load
from multimodal.weights.mapping import from_ours
from multimodal.weights.siglip2 import siglip2_from_ours, siglip2_to_ours

CONTEXT, VOCAB, BOS, EOS, SIZE = 13, 97, 0, 2, 28
TEXT = {
    "hidden_size": 35, "intermediate_size": 57, "num_hidden_layers": 3, "num_attention_heads": 5,
    "vocab_size": VOCAB + 4, "max_position_embeddings": CONTEXT,
    "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 1,
}  # fmt: skip
IMAGE = {
    "hidden_size": 36, "intermediate_size": 71, "num_hidden_layers": 2, "num_attention_heads": 3,
    "patch_size": 7,
}  # fmt: skip


def make(kind: str, eos: int = EOS):
    """A small model with weights large enough for every part to matter."""
    text = TEXT | {"eos_token_id": eos}
    if kind == "siglip2":
        image = IMAGE | {"num_patches": 16}
        settings = Siglip2Config(text_config=text | {"projection_size": 36}, vision_config=image)
        model = Siglip2Model(settings)
    else:
        families = {"metaclip": (CLIPConfig, CLIPModel)}
        config_class, model_class = families.get(kind, (MetaClip2Config, MetaClip2Model))
        image = IMAGE | {"image_size": SIZE}
        quick = {"hidden_act": "quick_gelu"}
        model = model_class(
            config_class(text_config=text | quick, vision_config=image | quick, projection_dim=19)
        )
    for name, parameter in model.eval().named_parameters():
        if "embedding" in name or "probe" in name:  # small, so that epsilon matters
            parameter.data.normal_(std=0.003 if kind == "siglip2" else 0.02)
        elif parameter.ndim >= 2:
            parameter.data.normal_(std=parameter[0].numel() ** -0.5)
        elif parameter.numel() > 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def tokenizer(eos: int = EOS) -> PreTrainedTokenizerFast:
    vocab = {f"w{i}": i for i in range(VOCAB)} | {"<s>": BOS, "<pad>": 1}
    vocab = {word: i for word, i in vocab.items() if i != eos} | {"</s>": eos}
    vocab = {word: i for word, i in vocab.items() if word not in ("w0", "w1")} | {"<unk>": 3}
    vocab.pop("w3", None)
    backend = Tokenizer(models.WordLevel(vocab, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", eos)]
    )
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def processor(kind: str):
    if kind == "siglip2":
        return Siglip2ImageProcessor(patch_size=7, max_num_patches=16)
    square = {"height": SIZE, "width": SIZE}
    return CLIPImageProcessor(size={"shortest_edge": SIZE}, crop_size=square)


def write(folder, model, kind: str, eos: int = EOS):
    model.save_pretrained(folder)
    tokenizer(eos).save_pretrained(folder)
    processor(kind).save_pretrained(folder)
    return f"hf:{folder}"


def texts(eos: int = EOS) -> tuple[Tensor, Tensor]:
    """Full, padded and shortest texts."""
    lengths = torch.tensor([CONTEXT, 5, 2, 9])
    tokens = torch.randint(4, VOCAB - 1, (4, CONTEXT))
    for row, length in enumerate(lengths.tolist()):
        tokens[row, length - 1] = eos
        tokens[row, length:] = 1
    return tokens, lengths


def naflex(model: Siglip2Model, pixels: Tensor) -> Tensor:
    """Patches one by one, each row by row with the channel last, and a mask that hides none."""
    corners = [(row, column) for row in range(0, SIZE, 7) for column in range(0, SIZE, 7)]
    squares = [pixels[:, :, r : r + 7, c : c + 7].movedim(1, -1).flatten(1) for r, c in corners]
    patches = torch.stack(squares, dim=1)
    output = model.get_image_features(
        pixel_values=patches,
        pixel_attention_mask=torch.ones(patches.shape[:2], dtype=torch.int64),
        spatial_shapes=torch.tensor([[4, 4]] * len(pixels)),
    )
    return features_of(output)


@torch.no_grad()
def difference(ours, theirs, kind: str, eos: int = EOS) -> tuple[float, float]:
    """Largest difference of the image and of the text features' elements, before unit length."""
    pixels, (tokens, lengths) = torch.randn(3, 3, SIZE, SIZE), texts(eos)
    if kind == "siglip2":
        expected = naflex(theirs, pixels)
    else:
        expected = features_of(theirs.get_image_features(pixels))
    image = ours.image_projection(ours.image(pixels))
    text = ours.text_projection(ours.text(tokens, lengths))
    return (
        (image - expected).abs().max().item(),
        (text - features_of(theirs.get_text_features(tokens))).abs().max().item(),
    )


@pytest.mark.parametrize("kind", ["siglip2", "metaclip", "metaclip_2"])
def test_a_saved_folder_gives_the_same_features(kind, tmp_path):
    eos = VOCAB - 1 if kind == "metaclip" else EOS
    theirs = make(kind, eos)
    ours = load(write(tmp_path, theirs, kind, eos))
    assert max(difference(ours.model, theirs, kind, eos)) < 1e-5
    assert ours.logit_scale() == pytest.approx(theirs.logit_scale.exp().item())
    assert ours.config.image.image_size == SIZE
    activation = "gelu_tanh" if kind == "siglip2" else "quick_gelu"
    assert ours.config.text.activation == ours.config.image.activation == activation
    squashed = ours.config.preprocess.resize_mode == "squash"
    assert squashed == (kind == "siglip2")
    if kind == "metaclip_2":
        tokens, lengths = texts(eos)
        with torch.no_grad():
            cut = ours.model.text_projection(ours.model.text(tokens[1:3, :5], lengths[1:3]))
            expected = features_of(theirs.get_text_features(tokens))
        assert (cut - expected[1:3]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["siglip2", "metaclip_2"])
def test_there_and_back_is_bit_equal(kind, tmp_path):
    theirs = make(kind).state_dict()
    ours = load(write(tmp_path, make(kind), kind))
    section, like = ours.config, ours.model.state_dict()
    if kind == "siglip2":
        again = siglip2_from_ours(section, siglip2_to_ours(section, theirs, like), theirs)
    else:
        theirs = load_file(tmp_path / "model.safetensors")
        again = from_ours(clip_table(section), like, theirs)
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[name], theirs[name]) for name in theirs)


WRONG = {
    "activation": ("metaclip_2", "both", {"activation": "gelu"}),
    "epsilon": ("metaclip_2", "both", {"norm_eps": 1e-6}),
    "pool": ("metaclip_2", "text", {"pool": "mean", "mask_padding": True}),
    "mask": ("metaclip_2", "text", {"causal": False, "mask_padding": True}),
    "siglip activation": ("siglip2", "both", {"activation": "gelu"}),
    "siglip epsilon": ("siglip2", "both", {"norm_eps": 1e-5}),
    "siglip pool": ("siglip2", "text", {"pool": "eot"}),
    "siglip mask": ("siglip2", "text", {"mask_padding": True}),
    "siglip image pool": ("siglip2", "image", {"pool": "mean"}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_noticed(name, tmp_path):
    kind, towers, update = WRONG[name]
    parts = ("image", "text") if towers == "both" else (towers,)
    theirs = make(kind)
    right = load(write(tmp_path, theirs, kind))
    changed = {p: getattr(right.config, p).model_copy(update=update) for p in parts}
    wrong = build_model(right.config.model_copy(update=changed)).eval()
    wrong.load_state_dict(right.model.state_dict(), strict="image pool" not in name)
    image, text = difference(wrong, theirs, kind)
    assert image > 1e-4 or "image" not in parts
    assert text > 1e-4 or "text" not in parts


def test_patches_with_the_channel_first_are_noticed(tmp_path):
    """The weight of a Linear has the same shape in either order."""
    theirs = make("siglip2")
    theirs.vision_model.embeddings.patch_embedding.weight.data.normal_()
    ours = load(write(tmp_path, theirs, "siglip2")).model
    ours.image.patch.proj.weight.data = theirs.vision_model.embeddings.patch_embedding.weight
    assert difference(ours, theirs, "siglip2")[0] > 1e-2


def test_metaclip_2_pools_at_id_2_and_not_at_the_largest_id(tmp_path):
    """In a `CLIPModel`, 2 means the largest id."""
    theirs = make("metaclip_2")
    ours = load(write(tmp_path, theirs, "metaclip_2")).model
    tokens, lengths = texts()
    tokens[:, 1] = VOCAB - 1
    lengths[2], tokens[2, 2] = 3, EOS
    with torch.no_grad():
        text = ours.text_projection(ours.text(tokens, lengths))
        expected = features_of(theirs.get_text_features(tokens))
    assert (text - expected).abs().max() < 1e-5


def test_a_tokenizer_that_ends_texts_with_another_id_is_refused(tmp_path):
    theirs = make("metaclip_2", eos=5)
    with pytest.raises(ValueError, match=r"pools a text at the id 5, but its tokenizer .* with 2"):
        load(write(tmp_path, theirs, "metaclip_2"))


def test_weights_that_do_not_fit_are_named(tmp_path):
    name = write(tmp_path, make("metaclip_2"), "metaclip_2")
    path = tmp_path / "model.safetensors"
    state = load_file(path)
    key = "text_model.encoder.layers.1.mlp.fc1.bias"

    def refused(match, changed):
        save_file(changed, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=match):
            load(name)

    refused(f"missing {key}", {k: v for k, v in state.items() if k != key})
    refused("unexpected extra.bias", state | {"extra.bias": torch.zeros(2)})
    refused(rf"{key} (is \[2\] instead of \[57\]|of another shape)", state | {key: torch.zeros(2)})
    refused("missing", {"a": torch.zeros(2)})


def test_naflex_without_a_square_or_a_head_is_refused(tmp_path):
    name = write(tmp_path, make("siglip2"), "siglip2")
    content = json.loads((tmp_path / "config.json").read_text())
    content["vision_config"]["vision_use_head"] = False
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"unexpected vision_model.head"):
        load(name)


def test_a_class_that_this_version_lacks_is_named(tmp_path, monkeypatch):
    name = write(tmp_path, make("metaclip_2"), "metaclip_2")
    monkeypatch.setitem(hub._KINDS, "metaclip_2", ("LaterModel", hub.import_clip))
    with pytest.raises(ValueError, match=r"transformers \S+ has no LaterModel"):
        load(name)


SQUARE = {"height": SIZE, "width": SIZE}
PROCESSORS = {
    "another size": (CLIPImageProcessor(), "do not give a square of 28"),
    "a square of another size": (SiglipImageProcessor(), "do not give a square of 28"),
    "a margin": (
        CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=SQUARE),
        "do not give a square of 28",
    ),
    "no crop": (
        CLIPImageProcessor(size={"shortest_edge": SIZE}, do_center_crop=False),
        "do_center_crop=False do not give a square of 28",
    ),
    "no scaling": (SiglipImageProcessor(size=SQUARE, do_resize=False), "do_resize=False"),
    "another range": (
        SiglipImageProcessor(size=SQUARE, rescale_factor=1 / 127.5), "rescale_factor=0.0078",
    ),
    "another filter": (SiglipImageProcessor(size=SQUARE, resample=1), r"resample=1"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_that_does_something_else_is_refused(name, tmp_path):
    images, message = PROCESSORS[name]
    write(tmp_path, make("metaclip_2"), "metaclip_2")
    images.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"image processor cannot be expressed: .*{message}"):
        load(f"hf:{tmp_path}")


def test_a_processor_that_does_not_normalise_leaves_pixels_in_0_to_1(tmp_path):
    write(tmp_path, make("metaclip_2"), "metaclip_2")
    SiglipImageProcessor(size=SQUARE, do_normalize=False).save_pretrained(tmp_path)
    found = load(f"hf:{tmp_path}").config.preprocess
    assert (found.mean, found.std, found.resize_mode) == ([0.0] * 3, [1.0] * 3, "squash")
