"""OpenCLIP's own towers against ours, with random weights, from their files and into them."""

import copy
import json

import open_clip
import pytest
import torch
from open_clip.model import CLIP, CustomTextCLIP
from openclip_models import CFG, EOS, make, save, texts, with_changes
from tiny import tiny_pretrained, tiny_section

from multimodal import config
from multimodal.data.text import build_tokenizer
from multimodal.errors import RunStopped
from multimodal.models.build import build_model
from multimodal.weights import mapping, openclip, openclip_folder
from multimodal.weights.convert import convert
from multimodal.weights.load import load
from multimodal.weights.mapping import to_ours
from multimodal.weights.openclip_config import openclip_config
from multimodal.weights.openclip_names import infer_config
from multimodal.weights.openclip_settings import openclip_section

TOKENIZER = config.OpenAiTokenizer(kind="openai")
OPENAI = {"vocab_size": 49_408, "hf_tokenizer_name": None}
NORM = {"norm_kwargs": {"eps": 1e-6}}
TANH = {"act_kwargs": {"approximate": "tanh"}}
FAMILIES = {
    "plain": with_changes(),
    "quick gelu": with_changes(quick_gelu=True),
    "tanh gelu": with_changes(image=TANH, text=TANH),
    "epsilon": with_changes(image=NORM, text=NORM),
    "text under its own name": with_changes(custom_text=True),
    "siglip's text": with_changes(
        text={"no_causal_mask": True, "pool_type": "last", "proj_bias": True},
        init_logit_bias=-9.0,
        custom_text=True,
    ),
    "seen padding": with_changes(text={"no_causal_mask": True}),
    "last position": with_changes(text={"pool_type": "last"}),
    "end by its id": with_changes(text={"pool_type": "eos", "eos_id": EOS}),
    "no projection": with_changes(text={"proj_type": "none", "width": 19, "heads": 1}),
    "layer scale": with_changes(image={"ls_init_value": 0.3}, text={"ls_init_value": 0.2}),
    "mean": with_changes(image={"pool_type": "avg"}),
    "no first norm": with_changes(image={"no_ln_pre": True, "final_ln_after_pool": True}),
    "fixed positions": with_changes(
        image={"pos_embed_type": "sin_cos_2d", "width": 44, "block_type": "custom"}
    ),
    "vectors of 1": with_changes(init_logit_bias=-3.0, nonscalar_logit_scale=True),
}


def difference(ours, theirs) -> tuple[float, float]:
    """Largest difference of the image and of the text features' elements, before unit length."""
    pixels, (tokens, lengths) = torch.randn(3, 3, 21, 21), texts()
    model = ours.model
    with torch.no_grad():
        image = model.image_projection(model.image(pixels)) - theirs.encode_image(pixels)
        expected = theirs.encode_text(tokens)
        text = [model.text_projection(model.text(tokens, lengths)) - expected]
        if not ours.tokenizer.fixed_length:  # a batch of short texts is not padded further
            found = model.text_projection(model.text(tokens[2:, :6], lengths[2:]))
            text.append(found - expected[2:])
    return image.abs().max().item(), max(x.abs().max().item() for x in text)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_agree(family, tmp_path):
    theirs = make(FAMILIES[family])
    ours = load(save(theirs, FAMILIES[family], tmp_path))
    assert max(difference(ours, theirs)) < 1e-5
    assert ours.logit_scale() == pytest.approx(theirs.logit_scale.exp().item())
    assert (ours.logit_bias() or 0) == (0 if theirs.logit_bias is None else theirs.logit_bias)
    assert ours.config.preprocess.mean == [0.4, 0.5, 0.6]
    assert ours.config.preprocess.interpolation == "bilinear"


@torch.no_grad()
@pytest.mark.parametrize("text", [{}, OPENAI], ids=["its own tokenizer", "OpenAI's"])
def test_real_texts_give_the_same_features(tmp_path, text):
    cfg = with_changes(text=text)
    theirs = make(cfg)
    ours = load(save(theirs, cfg, tmp_path))
    sentences = ["a photo of a cat", "black &amp; white", "long " * 30, "", "\u732b, na\u00efve!"]
    tokens = open_clip.get_tokenizer(f"local-dir:{tmp_path}")(sentences)
    expected = theirs.encode_text(tokens, normalize=True)
    assert (ours.encode_text(sentences) - expected).abs().max() < 1e-5


WRONG = {
    "activation": ("both", {"activation": "quick_gelu"}),
    "tanh": ("both", {"activation": "gelu_tanh"}),
    "epsilon": ("both", {"norm_eps": 1e-6}),
    "text pool": ("text", {"pool": "last", "fixed_length": True}),
    "mask": ("text", {"causal": False, "fixed_length": True}),
    "heads of images": ("image", {"heads": 11}),
    "heads of texts": ("text", {"heads": 7}),
    "image pool": ("image", {"pool": "mean"}),
    "first norm": ("image", {"pre_norm": False}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_is_noticed(name, tmp_path):
    """Otherwise the tests above would prove little."""
    towers, update = WRONG[name]
    theirs = make(CFG)
    right = load(save(theirs, CFG, tmp_path))
    parts = ("image", "text") if towers == "both" else (towers,)
    section = right.config
    wrong = build_model(
        section.model_copy(
            update={part: getattr(section, part).model_copy(update=update) for part in parts}
        )
    ).eval()
    wrong.load_state_dict(right.model.state_dict(), strict=name != "first norm")
    right.model.image, right.model.text = wrong.image, wrong.text
    right.tokenizer.fixed_length = wrong.text.section.fixed_length
    image, text = difference(right, theirs)
    assert image > 3e-5 or "image" not in parts
    assert text > 3e-5 or "text" not in parts


# --- out -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_bit_equal(family, tmp_path):
    theirs = make(FAMILIES[family])
    first = load(save(theirs, FAMILIES[family], tmp_path / "theirs"))
    report = convert(first, tmp_path / "ours", "open_clip").report
    assert report.rows and not report.failed and report.library.startswith("open_clip 3")
    second = load(f"open_clip:{tmp_path / 'ours'}")
    ours, again = first.model.state_dict(), second.model.state_dict()
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[name], again[name]) for name in ours)
    assert second.config.image == first.config.image
    assert second.config.text == first.config.text
    written = openclip_folder.openclip_state(first.model, first.config)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(written[name.removeprefix("text.")], tensor.reshape(
            written[name.removeprefix("text.")].shape
        )), name  # fmt: skip


def test_openai_s_tokenizer_is_open_clip_s_own(tmp_path):
    cfg = with_changes(text=OPENAI)
    first = load(save(make(cfg), cfg, tmp_path / "theirs"))
    assert not convert(first, tmp_path / "ours", "open_clip").report.failed
    content = json.loads((tmp_path / "ours" / "open_clip_config.json").read_text())
    assert "hf_tokenizer_name" not in content["model_cfg"]["text_cfg"]
    second = load(f"open_clip:{tmp_path / 'ours'}")
    assert second.config.tokenizer.vocabulary == str(tmp_path / "ours")
    assert second.tokenizer.settings() == first.tokenizer.settings()


def square():
    """A model in which every matrix could be transposed unnoticed."""
    cfg = with_changes(image={"width": 22}, text={"width": 22, "heads": 2}, embed_dim=22)
    return cfg, make(cfg)


def permuted_qkv(patch):
    patch.setattr(openclip, "_QKV", ("k_proj", "q_proj", "v_proj"))


def not_transposed(patch):
    def same(theirs, ours, *, reshape=False, transpose=False):
        return mapping.same(theirs, ours, reshape=reshape)

    patch.setattr(openclip, "same", same)


def in_file(change):
    """Change the settings that are written, as a wrong table of settings would."""

    def apply(patch):
        right = openclip_folder.openclip_config

        def wrong(section, tokenizer):
            cfg = right(section, tokenizer)
            change(cfg)
            return cfg

        patch.setattr(openclip_folder, "openclip_config", wrong)

    return apply


def in_weights(name, change):
    def apply(patch):
        right = openclip_folder.openclip_state

        def wrong(model, section):
            state = right(model, section)
            return state | {name: change(state[name]).contiguous()}

        patch.setattr(openclip_folder, "openclip_state", wrong)

    return apply


MUTATIONS = {
    "q/k/v order": permuted_qkv,
    "transposition": not_transposed,
    "activation": in_file(lambda cfg: cfg.update(quick_gelu=True)),
    "image epsilon": in_file(lambda cfg: cfg["vision_cfg"].update(norm_kwargs={"eps": 1e-6})),
    "text epsilon": in_file(lambda cfg: cfg["text_cfg"].update(norm_kwargs={"eps": 1e-6})),
    "image pool": in_file(lambda cfg: cfg["vision_cfg"].update(pool_type="avg")),
    "text pool": in_file(lambda cfg: cfg["text_cfg"].update(pool_type="last")),
    "mask": in_file(lambda cfg: cfg["text_cfg"].update(no_causal_mask=True)),
    "image heads": in_file(lambda cfg: cfg["vision_cfg"].update(head_width=2)),
    "text heads": in_file(lambda cfg: cfg["text_cfg"].update(heads=11)),
    "class token behind the patches": in_weights(
        "visual.positional_embedding", lambda x: x.roll(-1, 0)
    ),
    "rows and columns": in_weights(
        "visual.positional_embedding",
        lambda x: torch.cat([x[:1], x[1:].unflatten(0, (3, 3)).transpose(0, 1).flatten(0, 1)]),
    ),
    "text positions": in_weights("positional_embedding", lambda x: x.flip(0)),
    "channels": in_weights("visual.conv1.weight", lambda x: x.flip(1)),
    "scale": in_weights("logit_scale", lambda x: x.exp()),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_conversion_fails(name, tmp_path, monkeypatch):
    cfg, theirs = square()
    ours = load(save(theirs, cfg, tmp_path / "theirs"))
    MUTATIONS[name](monkeypatch)
    with pytest.raises(RunStopped, match="does not give the same"):
        convert(ours, tmp_path / "out", "open_clip")
    assert (tmp_path / "out.part" / "parity.json").is_file() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("preprocess", ["mean", "resize_mode"])
def test_wrong_preprocessing_fails(preprocess, tmp_path, monkeypatch):
    ours = load(save(make(CFG), CFG, tmp_path / "theirs"))
    wrong = {"mean": [0.5] * 3, "resize_mode": "squash"}
    right = openclip_folder.openclip_preprocess
    monkeypatch.setattr(
        openclip_folder,
        "openclip_preprocess",
        lambda section: right(section) | {preprocess: wrong[preprocess]},
    )
    with pytest.raises(RunStopped, match="pixels"):
        convert(ours, tmp_path / "out", "open_clip")


def test_a_tokenizer_of_the_run_travels_along(tmp_path):
    pretrained = tiny_pretrained(tiny_section(logit_bias=-5.0))
    done = convert(pretrained, tmp_path / "out", "open_clip")
    assert not done.report.failed
    assert not any(
        "known_difference" in row.as_dict() for row in done.report.rows if " texts," in row.what
    )
    cfg = json.loads((tmp_path / "out" / "open_clip_config.json").read_text())["model_cfg"]
    assert cfg["text_cfg"]["hf_tokenizer_name"] and cfg["init_logit_bias"] == -5.0
    assert openclip_folder.builtin_name(tmp_path / "out") is None
    again = load(f"open_clip:{tmp_path / 'out'}")
    sentences = ["a red square", "", "blue sky " * 20]
    assert torch.equal(again.encode_text(sentences), pretrained.encode_text(sentences))


def test_an_end_token_that_is_not_the_largest_is_named(tmp_path):
    pretrained = tiny_pretrained()
    pretrained.tokenizer.vocab_size += 1
    convert(pretrained, tmp_path / "out", "open_clip")
    cfg = json.loads((tmp_path / "out" / "open_clip_config.json").read_text())["model_cfg"]
    assert cfg["text_cfg"]["pool_type"] == "eos"
    assert cfg["text_cfg"]["eos_id"] == pretrained.tokenizer.eos_id


def test_export_lists_all_settings_that_open_clip_does_not_have(tmp_path):
    section = tiny_section()
    image = section.image.model_copy(update={"rope": True, "activation": "swiglu", "registers": 2})
    text = section.text.model_copy(update={"causal": False, "mask_padding": True, "pool": "mean"})
    section = section.model_copy(update={"image": image, "text": text})
    with pytest.raises(ValueError) as error:
        convert(tiny_pretrained(section), tmp_path / "out", "open_clip")
    for part in (
        "an OpenCLIP model cannot be this model",
        "model.image.rope=True (needed False)",
        "model.image.activation='swiglu'",
        "model.image.registers=2",
        "model.text.pool='mean'",
        "model.text.mask_padding=True",
    ):
        assert part in str(error.value)
    assert not list(tmp_path.iterdir())


def test_the_hidden_size_survives_that_open_clip_cuts_where_we_round():
    """hidden / width * width is a little below hidden for 30, 49 and 60."""
    tokenizer = tiny_pretrained().tokenizer
    for hidden in range(20, 90):
        section = tiny_section()
        image = section.image.model_copy(update={"mlp_ratio": hidden / 22})
        cfg = openclip_config(section.model_copy(update={"image": image}), tokenizer)["vision_cfg"]
        assert int(cfg["width"] * cfg.get("mlp_ratio", 4.0)) == hidden


def test_a_model_that_is_still_in_training_mode_drops_no_patches():
    """open_clip makes its models in training mode, and not everybody calls `eval`."""
    pretrained = tiny_pretrained()
    image = pretrained.config.image.model_copy(update={"patch_dropout": 0.5})
    section = pretrained.config.model_copy(update={"image": image})
    assert "patch_dropout" not in openclip_config(section, pretrained.tokenizer)["vision_cfg"]


def test_activations_that_open_clip_has_but_not_together_are_refused(tmp_path):
    section = tiny_section()
    text = section.text.model_copy(update={"activation": "quick_gelu"})
    with pytest.raises(ValueError, match=r"'gelu' with .*'quick_gelu' .*both towers or none"):
        convert(
            tiny_pretrained(section.model_copy(update={"text": text})), tmp_path / "o", "open_clip"
        )


# --- architectures by name -----------------------------------------------------------------------


def native_configs() -> dict[str, dict]:
    """Those that OpenCLIP ships and our towers can express."""
    found = {}
    for name in open_clip.list_models():
        cfg = open_clip.get_model_config(name)
        try:
            openclip_section(cfg, tokenizer=TOKENIZER, preprocess=config.Preprocess())
        except ValueError:
            continue
        found[name] = cfg
    return found


NATIVE = native_configs()


def test_only_towers_that_are_not_ours_are_left_out():
    """If OpenCLIP ships more native models one day, they are tested below."""
    rest = set(open_clip.list_models()) - set(NATIVE)
    cfgs = {name: open_clip.get_model_config(name) for name in rest}
    assert len(NATIVE) >= 39
    for name, cfg in cfgs.items():
        assert (
            "timm_model_name" in cfg["vision_cfg"]
            or isinstance(cfg["vision_cfg"]["layers"], list)
            or "hf_model_name" in cfg["text_cfg"]
            or "multimodal_cfg" in cfg
            or "CLIPA" in name
        )


@pytest.mark.parametrize("name", NATIVE)
def test_shapes_and_name_tell_what_open_clips_own_config_says(name):
    cfg = copy.deepcopy(NATIVE[name])
    kind = CustomTextCLIP if cfg.pop("custom_text", False) else CLIP
    with torch.device("meta"):
        state = kind(**cfg).state_dict()
    settings = {"tokenizer": TOKENIZER, "preprocess": config.Preprocess()}
    section = openclip_section(NATIVE[name], **settings)
    assert openclip_section(infer_config(name, state), **settings) == section
    with torch.device("meta"):
        ours = build_model(section).state_dict()
    table = openclip.openclip_table(section, openclip.text_prefix(state))
    assert to_ours(table, state, ours).keys() == ours.keys()


@pytest.mark.parametrize(
    "name", ["ViT-S-32-alt", "ViT-B-16-quickgelu", "ViT-bigG-14", "ViT-M-16-alt"]
)
def test_an_exported_architecture_is_found_by_its_name(name, tmp_path):
    settings = {"tokenizer": TOKENIZER, "preprocess": config.Preprocess()}
    section = openclip_section(NATIVE[name], **settings)
    openai = {"context_length": 77, "fixed_length": False, "vocab_size": 49_408, "captions": ()}
    tokenizer = build_tokenizer(TOKENIZER, **openai)
    content = {
        "model_cfg": openclip_folder.openclip_config(section, tokenizer),
        "preprocess_cfg": openclip_folder.openclip_preprocess(section),
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    found = openclip_folder.builtin_name(tmp_path)
    assert found is not None and NATIVE[found] == NATIVE[name]
    content["preprocess_cfg"]["interpolation"] = "bilinear"
    (tmp_path / "open_clip_config.json").write_text(json.dumps(content))
    assert openclip_folder.builtin_name(tmp_path) is None
