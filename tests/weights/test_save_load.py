"""A saved model comes back as it was, and a folder that is not whole or sound never loads."""

import json
import shutil
import stat
import tomllib
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import WORDS, picture, tiny_pretrained, tiny_section
from transformers import BertConfig

import multimodal
from multimodal.weights.load import find_model, load
from multimodal.weights.save import save_model


def save(pretrained, folder):
    save_model(
        folder,
        model=pretrained.model,
        section=pretrained.config,
        tokenizer=pretrained.tokenizer,
    )
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tiny_pretrained(), tmp_path_factory.mktemp("saved") / "model")


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "model"))


def assert_same_features(one, other):
    images = [picture(i) for i in range(3)]
    assert torch.equal(one.encode_image(images), other.encode_image(images))
    assert torch.equal(one.encode_text(WORDS), other.encode_text(WORDS))
    assert one.fingerprint() == other.fingerprint()


def test_features_are_bit_equal_after_save_and_load(saved):
    pretrained = tiny_pretrained()
    loaded = multimodal.load(saved)
    assert_same_features(pretrained, loaded)
    assert loaded.config == pretrained.config
    assert not loaded.model.training


def test_the_files_are_readable_by_all_and_nothing_else_is_left(saved):
    files = {path.name: path for path in saved.iterdir()}
    assert set(files) == {"model.safetensors", "config.json", "tokenizer.json"}
    assert stat.S_IMODE(files["model.safetensors"].stat().st_mode) == 0o644


def test_saving_again_gives_the_same_bytes(saved, tmp_path):
    again = save(load(saved), tmp_path / "again")
    for path in saved.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()


def test_a_model_of_other_libraries_towers_needs_no_network(tmp_path):
    BertConfig(
        vocab_size=299, hidden_size=20, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=13, max_position_embeddings=31,
    ).save_pretrained(tmp_path / "bert")  # fmt: skip
    text = {"kind": "hf", "name": str(tmp_path / "bert"), "context_length": 11, "pretrained": False}
    image = {"kind": "timm", "name": "test_vit", "image_size": 32}
    section = tiny_section(image=image, text=text)
    # The tokenizer is of no matter here, and a BPE cannot be trained for an unknown vocabulary.
    plain = tiny_section(text=tiny_section().text.model_dump() | {"context_length": 11})
    pretrained = tiny_pretrained(plain)
    built = multimodal.models.build.build_model(section)
    save_model(tmp_path / "m", model=built, section=section, tokenizer=pretrained.tokenizer)
    shutil.rmtree(tmp_path / "bert")
    pretrained_sections = {
        "image": image | {"pretrained": True},
        "text": text | {"pretrained": True},
    }
    rewrite(tmp_path / "m", lambda content: content["model"]["text"].update(pretrained=True))
    rewrite(tmp_path / "m", lambda content: content["model"]["image"].update(pretrained=True))
    loaded = load(tmp_path / "m")
    assert loaded.config == tiny_section(**pretrained_sections)
    tokens = pretrained.tokenizer.encode(WORDS)
    built.eval()
    assert torch.equal(built(None, *tokens).text, loaded.model(None, *tokens).text)


def rewrite(folder, change):
    path = folder / "config.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"has no {name}"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("image.norm.weight"), "missing image.norm.weight"),
        (lambda s: s.update(extra=torch.zeros(2)), "unexpected extra"),
        (
            lambda s: s.update({"image.norm.weight": torch.zeros(23)}),
            r"image.norm.weight is \[23\] instead of \[22\]",
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(folder, change, message):
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("versions"), "lacks the field versions"),
        (lambda c: c.update(more=1), "unknown field more"),
        (lambda c: c["model"]["image"].pop("norm_eps"), r"lacks the field model\.image\.norm_eps"),
        (lambda c: c["model"]["image"].update(gate=1), r"model\.image.*gate"),
        (
            lambda c: c["model"]["preprocess"].pop("mean"),
            r"lacks the field model\.preprocess\.mean",
        ),
        (lambda c: c["model"].update(embed_dim=-1), r"model\.embed_dim"),
        (lambda c: c.update(format="other"), '"format": "multimodal"'),
        (lambda c: c.update(version=2), "version 2"),
        (lambda c: c["tokenizer"].pop("eos_id"), "eos_id"),
        (lambda c: c["tokenizer"].update(context_length=20), "context_length=20 for 19"),
        (lambda c: c["tokenizer"].update(fixed_length=True), "fixed_length=True for False"),
        (lambda c: c["model"]["text"].update(vocab_size=260), "vocab_size=.* for 260"),
    ],
)
def test_a_wrong_config_is_named(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_damaged_files_are_named(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        load(folder)


def test_no_model_says_what_is_accepted(tmp_path):
    with pytest.raises(ValueError, match="give a model folder"):
        load(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no model of transformers that"):
        load(f"hf:{tmp_path}")


def make_checkpoint(run, step, source):
    path = run / "checkpoints" / f"step-{step:08d}"
    shutil.copytree(source, path / "model")
    (path / "state.json").write_text("{}")
    digests = {
        file.relative_to(path).as_posix(): {
            "size": file.stat().st_size,
            "sha256": sha256(file.read_bytes()).hexdigest(),
        }
        for file in path.rglob("*.*")
    }
    (path / "manifest.json").write_text(json.dumps({"files": digests}))
    return path


def test_a_run_gives_its_model_or_its_newest_sound_checkpoint(saved, tmp_path):
    first, second, third = (make_checkpoint(tmp_path, step, saved) for step in (9, 10, 200))
    shutil.copytree(saved, tmp_path / "checkpoints" / ".step-00000300" / "model")
    assert find_model(tmp_path) == third / "model"
    assert find_model(second) == second / "model"
    weights = third / "model" / "model.safetensors"
    flipped = bytearray(weights.read_bytes())
    flipped[-1] ^= 1
    weights.write_bytes(flipped)
    assert find_model(tmp_path) == second / "model"
    with pytest.raises(ValueError, match=r"step-00000200 is damaged: model/model.safetensors has"):
        find_model(third)
    (second / "manifest.json").unlink()
    assert find_model(tmp_path) == first / "model"
    shutil.copytree(saved, tmp_path / "model")
    assert find_model(tmp_path) == tmp_path / "model"
    (tmp_path / "model" / "config.json").unlink()
    assert find_model(tmp_path) == first / "model"


def test_a_save_that_stops_half_way_leaves_no_mixture(folder, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("multimodal.weights.save.save_file", fail)
    with pytest.raises(OSError):
        save(tiny_pretrained(seed=1), folder)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load(folder)


def test_the_version_has_one_value():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert multimodal.__version__ == project["project"]["version"]


def test_a_folder_of_transformers_is_told_how_to_be_named(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(ValueError, match=f"so write hf:{folder}"):
        load(folder)


def test_a_folder_with_another_manifest_is_no_damaged_checkpoint(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match="no model at"):
        load(tmp_path)
