"""A run that begins as another model: its settings are the base, and every mistake is told."""

import pytest
from test_config import TREE

from multimodal.config import Config, Model, Optim
from multimodal.config_init import load_run
from multimodal.config_io import ConfigError, check, dump_yaml, load_config

BASE = check(
    {
        "image": {"kind": "vit", "image_size": 64, "width": 96, "heads": 6, "dropout": 0.25},
        "text": {"kind": "transformer", "width": 64, "vocab_size": 777},
        "embed_dim": 80,
        "tokenizer": {"kind": "hf", "name": "theirs"},
    },
    Model,
)
DATA = "data.train={kind: shards, path: x}"
FROM_A = ("model.init=a", DATA)


def describe(name):
    assert name == "a", "only the model that is named is described"
    return BASE


def nothing(name):
    raise AssertionError(f"{name} is read")


def test_settings_of_the_other_model_need_not_be_repeated():
    model = load_run(FROM_A, describe).model
    assert model.plain() == BASE
    assert (model.init, model.init_parts) == ("a", ["image", "text", "temperature"])
    assert all(model.takes(part) for part in ("image", "text", "temperature"))


def test_own_settings_are_merged_over_them(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: {init: a, image: {image_size: 96}, logit_scale: 10.0}\n")
    model = load_run([str(path), DATA, "model.image.drop_path=0.1"], describe).model
    assert (model.image.image_size, model.image.drop_path, model.logit_scale) == (96, 0.1, 10.0)
    assert (model.image.width, model.image.dropout, model.text) == (96, 0.25, BASE.text)


def test_a_changed_kind_replaces_the_section_of_the_base_whole():
    words = ("model.image={kind: timm, name: resnet50}", "model.init_parts=[text]")
    model = load_run([*FROM_A, *words], describe).model
    assert model.image.model_dump()["kind"] == "timm" and not hasattr(model.image, "width")
    assert model.takes("text") and not model.takes("image")


@pytest.mark.parametrize("text", ["{kind: hf, name: bert}", "{kind: hf, name: other}"])
def test_another_text_tower_does_not_inherit_the_tokenizer(text):
    """Else its ids would silently be those of another vocabulary."""
    words = (f"model.text={text}", "model.init_parts=[image]")
    with pytest.raises(ConfigError, match=r"1 mistake.*\n  model\.tokenizer: missing"):
        load_run([*FROM_A, *words], describe)
    model = load_run([*FROM_A, *words, "model.tokenizer={kind: hf, name: bert}"], describe).model
    assert model.tokenizer.name == "bert"


def test_the_resolved_config_needs_no_base(tmp_path):
    config = load_run([*FROM_A, "model.init_parts=[image]", "model.embed_dim=7"], describe)
    path = tmp_path / "config.yaml"
    path.write_text(dump_yaml(config))
    assert load_config([str(path)], Config) == config
    assert load_run([str(path)], describe) == config


def test_a_run_that_has_begun_does_not_read_the_other_model(tmp_path):
    words = [*FROM_A, f"run={tmp_path}", "model.init_parts=[image]", "model.image.dropout=0.5"]
    config = load_run(words, describe)
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load_run(words, nothing) == config
    assert load_run([str(tmp_path / "config.yaml")], nothing) == config
    with pytest.raises(AssertionError, match="b is read"):
        load_run([*words, "model.init=b"], nothing)


def test_a_run_without_init_describes_nothing():
    config = check(TREE, Config)
    assert config.model.init is None and not config.model.takes("image")
    words = ["model={image: {kind: vit}, text: {kind: transformer}, tokenizer: {kind: bpe}}", DATA]
    assert load_run(words, nothing) == check(
        {**TREE, "data": {"train": {"kind": "shards", "path": "x"}}}, Config
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.init_parts=[image, eyes]"], "init_parts.1 = 'eyes'"),
        (["model.init_parts=[]"], "init_parts=[] takes nothing"),
        (["model.init=5"], "model.init = 5"),
        (["model.image.width=95"], "heads=6 does not divide width=95"),
        (["model.init_parts=[text]", "train.freeze=[image]"], "or weights of model.init"),
        (["optim.groups=[{match: '('}]"], "'(' is no regular expression"),
        (["optim.groups=[{match: a, freeze: true, lr: 2.0}]"], "freeze=true has no lr"),
        (["optim.groups=[{match: a, lr: 0}]"], "optim.groups.0.lr = 0"),
        (["optim.groups=[{match: ''}]"], "optim.groups.0.match = ''"),
        (["optim.groups=[{match: a, rate: 2}]"], "optim.groups.0.rate: unknown setting"),
        (["optim.layer_decay=1.5"], "optim.layer_decay = 1.5"),
        (["optim.layer_decay=0"], "optim.layer_decay = 0"),
    ],
)
def test_mistakes_are_told(words, message):
    with pytest.raises(ConfigError) as caught:
        load_run([*FROM_A, *words], describe)
    assert message in str(caught.value)


def test_parts_without_init_are_a_mistake():
    tree = {**TREE, "model": {**TREE["model"], "init_parts": ["image"]}}
    with pytest.raises(ConfigError, match=r"Set model\.init too"):
        check(tree, Config)


def test_a_part_of_the_other_model_may_be_frozen_with_its_projection():
    assert load_run([*FROM_A, "train.freeze=[text]"], describe).train.freeze == ["text"]


def test_groups_are_read_from_one_line():
    words = "optim.groups=[{match: '^text\\.', lr: 0.1, weight_decay: 0.0}, {match: norm}]"
    first, second = load_run([*FROM_A, words], describe).optim.groups
    assert (first.match, first.lr, first.weight_decay) == ("^text\\.", 0.1, 0.0)
    assert (second.lr, second.weight_decay, second.freeze) == (1.0, None, False)
    assert Optim().groups == [] and Optim().layer_decay == 1.0
