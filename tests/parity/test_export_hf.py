"""Folders that convert writes for transformers, as transformers itself reads them."""

import json
import shutil

import pytest
import torch
from convertible import (
    clip_section,
    family_tokenizer,
    openai_clip,
    pretrained_of,
    siglip,
    siglip_section,
    trained_clip,
)
from safetensors.torch import load_file, save_file
from tiny import tiny_pretrained
from tiny_tokenizers import CAPTIONS, LITERALS, MAKERS
from tokenizers import Tokenizer as Backend
from transformers import AutoProcessor, AutoTokenizer, CLIPModel, CLIPProcessor, SiglipModel
from transformers import pipeline as make_pipeline

from multimodal.config import Model
from multimodal.config_io import check, read_yaml
from multimodal.weights import hf_folder
from multimodal.weights.convert import convert
from multimodal.weights.load import load
from multimodal.weights.parity import compare
from multimodal.weights.parity_inputs import EXACT, SPELLED, by_kind, pictures, texts

WEIGHTS, TOKENIZER, SETTINGS = "model.safetensors", "tokenizer.json", "tokenizer_config.json"
PREPROCESSOR, NAMES = "preprocessor_config.json", "special_tokens_map.json"
PLAIN = [text for kind, group in texts().items() if kind != SPELLED for text in group] + CAPTIONS
HARD = PLAIN + texts()[SPELLED] + LITERALS


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Each kind of model with the folder that was written of it."""
    root = tmp_path_factory.mktemp("exported")
    made = {
        "trained": (trained_clip(), "hf"),
        "openai": (openai_clip(root / "bpe"), "hf"),
        "siglip": (siglip(root / "gemma"), "siglip"),
    }
    for name, (pretrained, to) in made.items():
        convert(pretrained, root / name, to)
    return {name: (pretrained, root / name) for name, (pretrained, _) in made.items()}


@pytest.mark.parametrize("name", ["trained", "openai", "siglip"])
def test_transformers_gives_our_features_ids_and_scores(exported, name):
    _, folder = exported[name]
    report = json.loads((folder / "parity.json").read_text())
    assert report["passed"] and report["library"].startswith("transformers ")
    rows = {row["what"]: row for row in report["rows"]}
    features = [
        r["difference"] for what, r in rows.items() if "features" in what and "own" not in what
    ]
    assert len(features) >= 10 and max(features) <= 1e-5
    for what in ("token ids", "pixels of", "logits", "logit scale", "zero-shot scores"):
        assert any(what in key for key in rows)


@pytest.mark.parametrize("name", ["trained", "openai"])
@pytest.mark.parametrize("reader", [AutoProcessor, CLIPProcessor])
def test_ids_of_each_processor_are_ours(exported, name, reader):
    pretrained, folder = exported[name]
    processor = reader.from_pretrained(folder)
    ours = pretrained.tokenizer.encode(HARD)
    inputs = processor(text=HARD, padding=True, truncation=True, return_tensors="pt")
    for row, length, found, mask in zip(
        ours.tokens.tolist(), ours.lengths.tolist(),
        inputs["input_ids"].tolist(), inputs["attention_mask"].tolist(), strict=True,
    ):  # fmt: skip
        assert found[: sum(mask)] == row[:length]
        assert set(found[length:]) <= {processor.tokenizer.pad_token_id}
    assert max(map(len, ours.tokens.tolist())) == pretrained.tokenizer.context_length


def test_the_pipeline_gives_the_probabilities_of_classify(exported):
    pretrained, folder = exported["trained"]
    labels = ["a red house", "cat", "the roof"]
    size = pretrained.transform.size
    image = by_kind(pictures(size), size, pretrained.config.preprocess)[EXACT][0]
    classify = make_pipeline("zero-shot-image-classification", model=str(folder))
    found = classify(image, candidate_labels=labels, hypothesis_template="a photo of {}.")
    expected = dict(zip(labels, pretrained.classify([image], labels)[0].tolist(), strict=True))
    assert {row["label"]: row["score"] for row in found} == pytest.approx(expected, abs=1e-5)


def test_folders_have_the_files_of_the_layout_readable_by_all(exported):
    common = {"config.json", WEIGHTS, PREPROCESSOR, TOKENIZER, SETTINGS}
    common |= {"special_tokens_map.json", "parity.json"}
    more = {
        "trained": {"modules.json"},
        "openai": {"modules.json", "vocab.json", "merges.txt"},
        "siglip": set(),
    }
    for name, (_, folder) in exported.items():
        assert {path.name for path in folder.iterdir()} == common | more[name]
        assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o644"}
        assert all(t.dtype == torch.float32 for t in load_file(folder / WEIGHTS).values())


def test_old_readers_find_what_they_need(exported):
    """transformers 4 reads a CLIP folder's tokenizer with its CLIP class, `tokenizers` 0.19 merges
    as text, and safetensors files only with the mark of their maker."""
    for name, (_, folder) in exported.items():
        content = json.loads((folder / TOKENIZER).read_text())
        assert content["pre_tokenizer"]["type"] == "Sequence"
        assert all(isinstance(merge, str) for merge in content["model"].get("merges", []))
        settings = json.loads((folder / SETTINGS).read_text())
        assert settings["model_max_length"] == exported[name][0].tokenizer.context_length
        own = settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert own == (name != "openai")
        header = (folder / WEIGHTS).read_bytes()[:200]
        assert b'"__metadata__":{"format":"pt"}' in header
        architecture = json.loads((folder / "config.json").read_text())
        for part in ("text_config", "vision_config"):
            assert {"hidden_act", "layer_norm_eps", "num_attention_heads"} <= set(
                architecture[part]
            )
        assert not (folder / "processor_config.json").exists()


@pytest.mark.parametrize("name", ["trained", "openai", "siglip"])
def test_there_and_back_is_bit_equal(exported, name):
    pretrained, folder = exported[name]
    again = load(f"hf:{folder}")
    assert again.fingerprint() == pretrained.fingerprint()
    ours, theirs = pretrained.tokenizer.encode(HARD), again.tokenizer.encode(HARD)
    assert torch.equal(ours.lengths, theirs.lengths)
    for row, other, length in zip(ours.tokens, theirs.tokens, ours.lengths, strict=True):
        assert torch.equal(row[:length], other[:length])
    assert again.config.preprocess == pretrained.config.preprocess
    for part in ("image", "text"):
        assert getattr(again.config, part) == getattr(pretrained.config, part)


@pytest.mark.parametrize("family", [name for name in MAKERS if name not in ("xlm_roberta", "nllb")])
@pytest.mark.parametrize("clean", [[], ["punctuation", "whitespace", "lower"]])
def test_ids_of_every_family_of_tokenizers_are_ours(tmp_path, family, clean):
    tokenizer = family_tokenizer(tmp_path / "source", family, clean=clean)
    hf_folder.write_tokenizer(tokenizer, tmp_path, masks_padding=True)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    some = PLAIN if family in ("siglip", "t5", "unigram") else HARD  # names are pieces of Unigram
    for text, found in zip(some, theirs(some, truncation=True)["input_ids"], strict=True):
        batch = tokenizer.encode([text])
        assert found == batch.tokens[0, : batch.lengths[0]].tolist(), text


@pytest.mark.parametrize("family", MAKERS)
def test_siglip_pads_as_it_was_trained(tmp_path, family):
    pretrained = siglip(tmp_path / "source", family, context=13)
    convert(pretrained, tmp_path / "out", "siglip")
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    inputs = processor(text=PLAIN, padding="max_length", truncation=True, return_tensors="pt")
    assert set(inputs) == {"input_ids"}, "a mask would hide padding that the model has seen"
    assert torch.equal(inputs["input_ids"], pretrained.tokenizer.encode(PLAIN).tokens)


def test_padding_that_is_a_piece_of_texts_becomes_the_end_token(tmp_path):
    """OpenCLIP pads with 0, which is `!`."""
    tokenizer = family_tokenizer(tmp_path / "source", "clip")
    tokenizer.pad_id = 0
    convert(pretrained_of(clip_section(tokenizer), tokenizer), tmp_path / "out", "hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.pad_token_id == tokenizer.eos_id
    added = Backend.from_file(str(tmp_path / "out" / TOKENIZER)).get_added_tokens_decoder()
    assert set(added) == {tokenizer.bos_id, tokenizer.eos_id}


@pytest.mark.parametrize("preprocess", [{"resize_mode": "squash"}, {"interpolation": "bilinear"}])
def test_other_preparations_of_pictures_are_written(tmp_path, preprocess):
    tokenizer = trained_clip().tokenizer
    section = clip_section(tokenizer, preprocess=preprocess)
    pretrained = pretrained_of(section, tokenizer)
    convert(pretrained, tmp_path / "out", "hf")
    assert load(f"hf:{tmp_path / 'out'}").config.preprocess == pretrained.config.preprocess


def test_an_offset_of_the_logits_is_left_out_on_demand_only(tmp_path):
    tokenizer = trained_clip().tokenizer
    pretrained = pretrained_of(clip_section(tokenizer, logit_bias=-10.0), tokenizer)
    with pytest.raises(ValueError, match=r"model\.logit_bias=-10\.0 \(needed None\)"):
        convert(pretrained, tmp_path / "out", "hf")
    report = convert(pretrained, tmp_path / "out", "hf", drop_logit_bias=True).report
    rows = {row.what: row for row in report.rows}
    assert rows["logit bias"].difference == 10 and rows["logit bias"].reason
    assert rows["zero-shot scores of a picture"].equal
    assert CLIPModel.from_pretrained(tmp_path / "out").logit_scale is not None


@pytest.mark.parametrize("target", ["hf", "siglip"])
@pytest.mark.parametrize("preset", ["tiny", "modern-s-16"])
def test_what_a_format_cannot_hold_is_listed_whole(tmp_path, pytestconfig, preset, target):
    path = pytestconfig.rootpath / "configs" / "model" / f"{preset}.yaml"
    section = check(read_yaml(path)["model"], Model)
    small = {"width": 24, "heads": 2, "depth": 1}
    towers = {name: getattr(section, name).model_copy(update=small) for name in ("image", "text")}
    with pytest.raises(ValueError) as error:
        convert(tiny_pretrained(section.model_copy(update=towers)), tmp_path / "out", target)
    for part in ("model.image.rope=True (needed False)", "model.image.activation='swiglu'"):
        assert part in str(error.value)
    assert "model.text.norm='rmsnorm'" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_the_end_token_that_means_something_else_there_is_listed_with_the_rest(tmp_path):
    tokenizer = family_tokenizer(tmp_path / "source", "xlm_roberta")
    section = clip_section(tokenizer, logit_bias=-1.0)
    with pytest.raises(
        ValueError, match=r"logit_bias=-1\.0.*; the tokenizer's eos_id=2 .*largest id"
    ):
        convert(pretrained_of(section, tokenizer), tmp_path / "out", "hf")


# --- files that are wrong are found ---------------------------------------------------------------


def settings(file, change):
    def mutate(folder):
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))

    return mutate


def architecture(part, **values):
    return settings("config.json", lambda content: content[part].update(values))


def preprocessing(**values):
    return settings(PREPROCESSOR, lambda content: content.update(values))


def weights(change):
    def mutate(folder):
        state = load_file(folder / WEIGHTS)
        change(state)
        save_file(state, folder / WEIGHTS, {"format": "pt"})

    return mutate


def swap_ids(content):
    vocab = content["model"]["vocab"]
    a, b = list(vocab)[65:67]
    vocab[a], vocab[b] = vocab[b], vocab[a]


def scaled(state):
    state["logit_scale"] += 0.01


def turned(state):
    name = "vision_model.embeddings.position_embedding.weight"
    state[name] = state[name].flip(0).contiguous()


def exchanged(state):
    layer = "text_model.encoder.layers.0.self_attn"
    names = [f"{layer}.{name}.weight" for name in ("q_proj", "k_proj", "v_proj")]
    state[names[0]], state[names[2]] = state[names[2]], state[names[0]]


CLIP_WRONG = {
    "text activation": architecture("text_config", hidden_act="quick_gelu"),
    "image activation": architecture("vision_config", hidden_act="quick_gelu"),
    "tanh": architecture("vision_config", hidden_act="gelu_pytorch_tanh"),
    "text epsilon": architecture("text_config", layer_norm_eps=1e-6),
    "image epsilon": architecture("vision_config", layer_norm_eps=1e-6),
    "end token": architecture("text_config", eos_token_id=5),
    "image heads": architecture("vision_config", num_attention_heads=1),
    "text heads": architecture("text_config", num_attention_heads=7),
    "mean": preprocessing(image_mean=[0.48145466, 0.4578275, 0.40821073]),
    "deviation": preprocessing(image_std=[0.26862954, 0.26130258, 0.27577711]),
    "resample": preprocessing(resample=2),
    "squash": preprocessing(size={"height": 21, "width": 21}, do_center_crop=False),
    "scale of pixels": preprocessing(do_rescale=False),
    "permuted vocabulary": settings(TOKENIZER, swap_ids),
    "lost merge": settings(TOKENIZER, lambda content: content["model"]["merges"].pop()),
    "no lower case": settings(TOKENIZER, lambda c: c["normalizer"]["normalizers"].pop()),
    "no start": settings(TOKENIZER, lambda c: c["post_processor"]["single"].pop(0)),
    "no end": settings(TOKENIZER, lambda c: c["post_processor"]["single"].pop()),
    "shorter context": settings(SETTINGS, lambda c: c.update(model_max_length=31)),
    "logit scale": weights(scaled),
    "position layout": weights(turned),
    "query for value": weights(exchanged),
}  # fmt: skip
SIGLIP_WRONG = {
    "text activation": architecture("text_config", hidden_act="gelu"),
    "image activation": architecture("vision_config", hidden_act="gelu"),
    "text epsilon": architecture("text_config", layer_norm_eps=1e-5),
    "image epsilon": architecture("vision_config", layer_norm_eps=1e-5),
    "mean": preprocessing(image_mean=[0.48145466, 0.4578275, 0.40821073]),
    "resample": preprocessing(resample=2),
    "crop": preprocessing(size={"height": 24, "width": 24}, do_center_crop=True),
    "permuted vocabulary": settings(TOKENIZER, swap_ids),
    "padding": settings(NAMES, lambda content: content.update(pad_token="<unk>")),
    "logit scale": weights(scaled),
    "logit bias": weights(lambda state: state["logit_bias"].add_(0.1)),
    "position layout": weights(turned),
}


def failures(pretrained, folder):
    try:
        rows = compare(pretrained, hf_folder.reopen(folder))
    except (ValueError, RuntimeError, IndexError) as error:
        return [str(error)]
    return [row.what for row in rows if not row.passed]


@pytest.mark.parametrize(
    ("name", "wrong", "mutate"),
    [("trained", wrong, mutate) for wrong, mutate in CLIP_WRONG.items()]
    + [("siglip", wrong, mutate) for wrong, mutate in SIGLIP_WRONG.items()],
)
def test_whatever_is_wrong_in_the_files_is_found(exported, tmp_path, name, wrong, mutate):
    pretrained, folder = exported[name]
    shutil.copytree(folder, tmp_path / "copy")
    mutate(tmp_path / "copy")
    assert failures(pretrained, tmp_path / "copy")


def test_siglip_is_read_as_such(exported):
    _, folder = exported["siglip"]
    assert isinstance(SiglipModel.from_pretrained(folder), SiglipModel)
    # Left out, it would have a default: the id of CLIP.
    assert json.loads((folder / "config.json").read_text())["text_config"]["bos_token_id"] is None
    assert siglip_section(exported["siglip"][0].tokenizer).text.fixed_length
