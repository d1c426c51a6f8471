"""Configuration: values are read as written, and every mistake is named in one go."""

import subprocess
import sys

import pytest

from multimodal.config import Config, parse_duration
from multimodal.config_io import (
    ConfigError,
    check,
    dump_yaml,
    expand_home,
    fields,
    load_config,
    merge,
    parse_override,
    read_yaml,
)

TREE = {
    "model": {
        "image": {"kind": "vit"},
        "text": {"kind": "transformer"},
        "tokenizer": {"kind": "bpe"},
    },
    "data": {"train": {"kind": "shards", "path": "x"}},
}


@pytest.fixture
def base(tmp_path):
    path = tmp_path / "base.yaml"
    path.write_text(dump_yaml(check(TREE, Config)))
    return str(path)


def mistakes(base, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config([base, *overrides], Config)
    return str(caught.value)


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", ".001", "+1e-3"])
def test_numbers_are_numbers_from_files_and_overrides(base, tmp_path, text):
    extra = tmp_path / "lr.yaml"
    extra.write_text(f"optim:\n  lr: {text}\n")
    assert load_config([base, str(extra)], Config).optim.lr == 1e-3
    assert load_config([base, f"optim.lr={text}"], Config).optim.lr == 1e-3


def test_yaml_1_1_surprises_are_gone(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: no\nb: 010\nc: on\nd: 1:30\ne: true\nf: null\n")
    assert read_yaml(path) == {"a": "no", "b": 10, "c": "on", "d": "1:30", "e": True, "f": None}


def test_a_tilde_at_the_start_of_a_path_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    path = tmp_path / "a.yaml"
    path.write_text("a: ~/x\nb: '~/x y'\nc: [~/x, a ~/x]\nd: ~\ne: '~'\nf: '~~/x'\n")
    assert read_yaml(path) == {
        **{"a": "/home/me/x", "b": "/home/me/x y", "c": ["/home/me/x", "a ~/x"]},
        **{"d": None, "e": "~", "f": "~~/x"},
    }
    assert parse_override("run=~/runs/a") == {"run": "/home/me/runs/a"}
    for text in ("~/x", "hf:~/x", "open_clip:~/x", "open_clip:ViT-B-32:~/x", "--out=~/x"):
        assert expand_home(text) == text.replace("~", "/home/me")
    for text in ("a~/x", "~", "x=~/x", "~nobody-of-this-name/x", "a\n~/x"):
        assert expand_home(text) == text


def test_duplicate_keys_are_refused_with_the_line(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("optim:\n  lr: 1\n  lr: 2\n")
    with pytest.raises(ConfigError, match=r"twice\.yaml:3: key 'lr' is given twice"):
        read_yaml(path)


def test_all_mistakes_are_listed_at_once_with_the_nearest_name(base):
    text = mistakes(
        base, "optim.lrr=1", "lr=3", "train.batch_size=-3", "model.text.contxt_length=3"
    )
    assert "4 mistakes" in text
    assert "optim.lrr: unknown setting; did you mean optim.lr?" in text
    assert "  lr: unknown setting; did you mean optim.lr?" in text
    assert "train.batch_size = -3: input should be greater than 0" in text
    assert "did you mean model.text.context_length?" in text


def test_settings_that_do_not_fit_each_other_are_told_in_the_same_round(base):
    text = mistakes(
        base,
        *("optim.lr=fast", "data.augment.scale=[0.9, 0.1]", "train.batch_size=0"),
        *("loss.kind=sigmoid", "train.freeze=[image, text]", "optim.betas=[0.9, 2.0]"),
    )
    assert "6 mistakes" in text, text
    for part in ("optim.lr = 'fast'", "train.batch_size = 0", "scale=[0.9, 0.1] must rise"):
        assert part in text
    assert "loss.kind=sigmoid needs model.logit_bias" in text
    assert "leaves no tower to train" in text
    assert "optim.betas.1 = 2.0" in text


@pytest.mark.parametrize(
    "overrides",
    [
        ["model.text.width=wide", "model.text.heads=7"],
        ["loss.kind=sigmoid", "model.logit_bias=auot"],
        ["data.augment.scale=[0.9, much]"],
    ],
)
def test_what_only_follows_from_a_mistake_is_not_told(base, overrides):
    assert "1 mistake in" in mistakes(base, *overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.image.kind=foo", "model.image.kind = 'foo': allowed are 'vit', 'timm'"),
        ("optim.lr=fast", "optim.lr = 'fast': input should be a valid number"),
        ("model.text.bias=1", "model.text.bias = 1: input should be a valid boolean"),
        ("model.text.heads=7", "heads=7 does not divide width=512"),
        ("train.duration=5 days", "'5 days' is not a duration"),
        ("train.duration=5 min", "minutes are allowed only in `every`"),
        ("checkpoint.every=0 steps", "must be above 0"),
        ("train.timeout=1 h", 'for what a clock decides "10 min"'),
        ("train.timeout=5 steps", 'such as "10 min"'),
        ("train.ema=1.5", "train.ema = 1.5: input should be less than 1"),
        ("loss.kind=sigmoid", "loss.kind=sigmoid needs model.logit_bias"),
        ("loss.duplicates=maybe", "loss.duplicates = 'maybe': allowed are negative"),
        ("train.micro_batch_size=0", "1 mistake in"),
        ("train.micro_batch_size=0", "micro_batch_size = 0: allowed are int > 0 | auto | null"),
        ("model.logit_bias=auot", "model.logit_bias = 'auot': allowed are float"),
        ("train.freeze=image", "train.freeze = 'image': give a list, such as [image]"),
        ("train.freeze=[image]", "train.freeze=['image'] would keep random weights"),
        ("train.freeze=[image, text]", "leaves no tower to train"),
        ("data.templates=[a photo]", "must contain {} once"),
        ("optim.betas=[0.9, 1.5]", "optim.betas.1 = 1.5: input should be less than 1"),
        ("optim.lr=1e400", "finite number"),
        ("model.preprocess.std=[0.0, 1.0, 1.0]", "should be greater than 0"),
        ("seed=9223372036854775808", "should be less than"),
        ("model.text.causal=false", "mask_padding=true"),
        ("nowhere.yaml", "no such file"),
    ],
)
def test_a_mistake_says_where_what_and_what_is_allowed(base, override, message):
    assert message in mistakes(base, override)


def test_a_setting_of_another_kind_is_said_to_be_one(base):
    text = mistakes(base, "loss.kind=sigmoid", "loss.label_smoothing=0.1", "model.logit_bias=auto")
    assert "loss.label_smoothing: not a setting of this loss.kind" in text


def test_a_section_without_a_kind_is_of_the_default_kind():
    tree = {name: section for name, section in TREE.items() if name != "loss"}
    config = check(merge(tree, parse_override("loss.duplicates=ignore")), Config)
    assert (config.loss.kind, config.loss.duplicates) == ("contrastive", "ignore")


def test_a_changed_kind_replaces_the_section_whole():
    over = parse_override("image.kind=timm")
    assert merge({"image": {"kind": "vit", "width": 3}}, over) == {"image": {"kind": "timm"}}
    same = parse_override("image.width=5")
    assert merge({"image": {"kind": "vit", "width": 3}}, same) == {
        "image": {"kind": "vit", "width": 5}
    }


def test_the_order_of_a_kind_and_its_settings_does_not_matter(base):
    words = ["data.train.path=pairs.csv", "data.train.kind=table", "data.train.separator=;"]
    first = load_config([base, *words], Config)
    assert first == load_config([base, *reversed(words)], Config)
    assert (first.data.train.kind, first.data.train.path) == ("table", "pairs.csv")


def test_includes_are_merged_first_and_relative_to_the_file(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.yaml").write_text("optim: {lr: 1, eps: 2}\n")
    (tmp_path / "sub" / "b.yaml").write_text("include: [../a.yaml]\noptim: {lr: 3}\n")
    assert read_yaml(tmp_path / "sub" / "b.yaml") == {"optim": {"lr": 3, "eps": 2}}


def test_a_file_that_includes_itself_is_refused(tmp_path):
    (tmp_path / "a.yaml").write_text("include: [b.yaml]\n")
    (tmp_path / "b.yaml").write_text("include: [a.yaml]\n")
    with pytest.raises(ConfigError, match="includes itself"):
        read_yaml(tmp_path / "a.yaml")


@pytest.mark.parametrize("include", ["base.yaml", "", "[1]"])
def test_include_must_be_a_list_of_files(tmp_path, include):
    (tmp_path / "a.yaml").write_text(f"include: {include}\n")
    with pytest.raises(ConfigError, match="include is a list of files"):
        read_yaml(tmp_path / "a.yaml")


def test_an_empty_mapping_empties(base):
    arguments = [base, "evaluate.a={kind: retrieval, data: {kind: folder, path: x}}"]
    assert load_config(arguments, Config).evaluate
    assert not load_config([*arguments, "evaluate={}"], Config).evaluate
    assert merge({"evaluate": {"a": 1}}, {"evaluate": {}}) == {"evaluate": {}}


def test_an_evaluation_cannot_have_the_name_of_one_of_averaged_weights():
    evaluation = {"kind": "retrieval", "data": {"kind": "folder", "path": "x"}}
    with pytest.raises(ConfigError, match=r"evaluate\.val@ema: names that end in @ema are those"):
        check(merge(TREE, {"evaluate": {"val": evaluation, "val@ema": evaluation}}), Config)


def test_the_resolved_config_rebuilds_itself(base):
    config = load_config([base, "optim.lr=1e-5", "evaluate.a.kind=retrieval",
                          "evaluate.a.data={kind: folder, path: 'no'}"], Config)  # fmt: skip
    assert config.evaluate["a"].data.path == "no"
    path = base.replace("base", "again")
    with open(path, "w") as file:
        file.write(dump_yaml(config))
    assert load_config([path], Config) == config


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("1000 steps", 1000, "steps"),
        ("3 epochs", 3, "epochs"),
        ("2e6 samples", 2e6, "samples"),
        ("5%", 5, "percent"),
        ("10 min", 10, "minutes"),
    ],
)
def test_durations(text, value, unit):
    assert parse_duration(text) == (value, unit)


def run(*arguments, cwd=None):
    command = [sys.executable, "-m", "multimodal", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60)


def test_train_print_shows_the_resolved_config(base):
    result = run("train", base, "optim.lr=2e-3", "--print")
    assert result.returncode == 0, result.stderr
    assert "lr: 0.002" in result.stdout


def test_mistakes_exit_with_2_before_anything_is_made(base, tmp_path):
    folder = tmp_path / "run"
    result = run("train", base, f"run={folder}", "optim.lrr=1")
    assert result.returncode == 2
    assert "did you mean optim.lr?" in result.stderr
    assert "Traceback" not in result.stderr
    assert not folder.exists()


def test_help_lists_every_setting_with_type_default_and_documentation():
    text = run("train", "--help").stdout
    for setting in fields(Config):
        assert f"{setting.name} : {setting.type} = {setting.default}" in text
        assert setting.documentation in text
    assert "-- with model.image.kind=timm:" in text
