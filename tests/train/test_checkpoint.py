"""Checkpoints: committed whole, verified, retired only after a newer one, and free of code."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tools import TINY

import multimodal.train.checkpoint as module
from multimodal.config import Model, Optim
from multimodal.config_io import check
from multimodal.data.text import build_tokenizer
from multimodal.data.transforms import ImageTransform
from multimodal.models.build import build_model
from multimodal.train.checkpoint import Checkpoints
from multimodal.train.optim import build_optimizer, named_parameters
from multimodal.train.snapshot import load_optimizer, take_snapshot
from multimodal.weights.load import load
from multimodal.weights.pretrained import Pretrained

SECTION = check(TINY["model"], Model)
FILES = (
    "model/model.safetensors",
    "model/config.json",
    "model/tokenizer.json",
    "optimizer.safetensors",
    "state.json",
)


@pytest.fixture(scope="module")
def parts():
    torch.manual_seed(5)
    model = build_model(SECTION)
    optimizer = build_optimizer(model, Optim())
    for _ in range(2):
        images, tokens = torch.rand(3, 3, 16, 16), torch.randint(0, 9, (3, 5))
        features = model(images, tokens, torch.full((3,), 5))
        (features.image * features.text * features.logit_scale).sum().backward()
        optimizer.step()
    tokenizer = build_tokenizer(
        SECTION.tokenizer, context_length=16, fixed_length=False, vocab_size=300, captions=["a b"]
    )
    transform = ImageTransform(SECTION.image.image_size, SECTION.preprocess)
    return {
        "pretrained": Pretrained(model, transform, tokenizer, SECTION),
        "optimizer": optimizer,
    }


def snapshot(parts, step, **state):
    return take_snapshot({"step": step, **state}, **parts)


@pytest.fixture
def saved(tmp_path, parts):
    """Checkpoints of steps 4, 8 and 12 in `tmp_path`."""
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (4, 8, 12):
        checkpoints.save(snapshot(parts, step, skipped=0))
    return tmp_path


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def newest(run):
    return run / "checkpoints/step-00000012"


def test_everything_comes_back(saved, parts):
    found = Checkpoints(saved, keep=3).find_resume()
    assert (found.step, found.state["skipped"]) == (12, 0)
    assert found.state["versions"]["torch"] in torch.__version__
    model = load(found.model).model
    for name, tensor in parts["pretrained"].model.state_dict().items():
        assert model.state_dict()[name].equal(tensor)
    optimizer = build_optimizer(model, Optim())
    load_optimizer(found.path, optimizer)
    originals = named_parameters(parts["optimizer"])
    for name, parameter in named_parameters(optimizer).items():
        restored = optimizer.state[parameter]
        for slot, tensor in parts["optimizer"].state[originals[name]].items():
            assert restored[slot].equal(tensor) and restored[slot].dtype == tensor.dtype


def test_a_restored_optimizer_goes_on_like_the_first(saved, parts):
    twins = []
    for _ in range(2):
        model = load(newest(saved)).model
        optimizer = build_optimizer(model, Optim(lr=0.1))
        load_optimizer(newest(saved), optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.3)
        optimizer.step()
        twins.append(model.state_dict())
    assert all(twins[0][name].equal(twins[1][name]) for name in twins[0])
    fresh = build_model(SECTION)
    assert any(not fresh.state_dict()[name].equal(twins[0][name]) for name in twins[0])


def test_a_parameter_without_gradient_is_saved_as_untouched(tmp_path, parts):
    optimizer = build_optimizer(parts["pretrained"].model, Optim())
    Checkpoints(tmp_path, keep=1).save(snapshot({**parts, "optimizer": optimizer}, 1))
    flat = load_file(tmp_path / "checkpoints/step-00000001/optimizer.safetensors")
    assert len(flat) == 3 * len(named_parameters(optimizer))
    assert not any(tensor.any() for tensor in flat.values())


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_named_and_the_one_before_is_used(saved, name, caplog):
    file = newest(saved) / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert Checkpoints(saved, keep=3).find_resume().step == 8
    assert "step-00000012" in caplog.text and f"{name} has changed" in caplog.text


def truncate(folder):
    file = folder / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


DAMAGES = {
    "bytes instead of": truncate,
    "state.json has 0 bytes": lambda folder: (folder / "state.json").write_bytes(b""),
    "model/model.safetensors is missing": lambda f: (f / "model/model.safetensors").unlink(),
    "manifest.json is missing": lambda folder: (folder / "manifest.json").unlink(),
    "manifest.json is unreadable": lambda folder: (folder / "manifest.json").write_text("[1, {"),
    "does not list state.json": lambda f: (f / "manifest.json").write_text('{"files": {}}'),
}


@pytest.mark.parametrize("message", DAMAGES)
def test_an_incomplete_one_is_named_and_the_one_before_is_used(saved, message, caplog):
    DAMAGES[message](newest(saved))
    assert Checkpoints(saved, keep=3).find_resume().step == 8
    assert message in caplog.text


def test_none_sound_is_an_error_and_never_a_fresh_start(saved):
    for path in (saved / "checkpoints").iterdir():
        truncate(path)
    with pytest.raises(ValueError, match=r"no checkpoint .* is sound:(\n  step-0.*){3}"):
        Checkpoints(saved, keep=3).find_resume()


def test_a_new_run_has_none(tmp_path):
    assert Checkpoints(tmp_path, keep=1).find_resume() is None


@pytest.mark.parametrize("where", ["save_model", "save_file", "_write_json", "move_folder"])
def test_a_save_that_stops_midway_changes_nothing(saved, parts, where, monkeypatch, caplog):
    def stop(*args, **kwargs):
        raise OSError(28, "No space left on device")

    before = names(saved)
    with monkeypatch.context() as patch:
        patch.setattr(module, where, stop)
        with pytest.raises(OSError, match="No space"):
            Checkpoints(saved, keep=1).save(snapshot(parts, 16))
    again = Checkpoints(saved, keep=3)
    assert again.find_resume().step == 12
    assert set(before) < set(names(saved))
    caplog.set_level(logging.INFO)
    again.remove_incomplete()
    assert names(saved) == before
    assert "removing the incomplete checkpoint" in caplog.text


def test_only_the_newest_sound_ones_are_kept(saved, parts):
    Checkpoints(saved, keep=2).save(snapshot(parts, 16))
    assert names(saved) == ["step-00000012", "step-00000016"]


def test_a_damaged_one_does_not_count_as_kept(saved, parts):
    """After a flipped bit in 12 the run goes on from 8, which must outlive the save of 10."""
    truncate(newest(saved))
    checkpoints = Checkpoints(saved, keep=2)
    assert checkpoints.find_resume().step == 8
    checkpoints.save(snapshot(parts, 10))
    assert names(saved) == [f"step-{step:08d}" for step in (8, 10, 12)]
    checkpoints.save(snapshot(parts, 12))
    assert names(saved) == ["step-00000010", "step-00000012"]
    assert Checkpoints(saved, keep=2).find_resume().step == 12


def test_the_last_sound_one_is_never_retired(saved, parts):
    for step in (8, 12):
        truncate(saved / f"checkpoints/step-{step:08d}")
    checkpoints = Checkpoints(saved, keep=2)
    checkpoints.save(snapshot(parts, 16))
    assert "step-00000004" in names(saved)


def test_an_old_one_is_removed_only_after_the_new_one_is_there(saved, parts, monkeypatch):
    removed = []
    real = shutil.rmtree

    def watch(path, **kwargs):
        if path.name.startswith("step-"):
            removed.append(path.name)
            assert Checkpoints(saved, keep=1).find_resume().step == 16
        real(path, **kwargs)

    monkeypatch.setattr(module.shutil, "rmtree", watch)
    Checkpoints(saved, keep=1).save(snapshot(parts, 16))
    assert len(removed) == 3


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_an_optimizer_state_that_does_not_fit_is_refused(saved, parts, change):
    path = newest(saved) / "optimizer.safetensors"
    flat = load_file(path)
    name = "exp_avg.temperature.logit_scale"
    if change == "missing":
        del flat[name]
    elif change == "unexpected":
        flat["exp_avg.other"] = torch.ones(1)
    else:
        flat[name] = torch.ones(2)
    save_file(flat, path)
    with pytest.raises(ValueError, match="logit_scale" if change != "unexpected" else "other"):
        load_optimizer(newest(saved), build_optimizer(parts["pretrained"].model, Optim()))


def test_a_planted_pickle_is_never_run(saved, tmp_path):
    """Even with a manifest made to fit: safetensors cannot hold code."""
    canary = tmp_path / "canary"
    code = f"cos\nsystem\n(S'touch {canary}'\ntR.".encode()
    path = newest(saved)
    (path / "optimizer.safetensors").write_bytes(code)
    manifest = json.loads((path / "manifest.json").read_text())
    entry = manifest["files"]["optimizer.safetensors"]
    entry["size"] = len(code)
    entry["sha256"] = module.file_hash(path / "optimizer.safetensors")
    (path / "manifest.json").write_text(json.dumps(manifest))
    found = Checkpoints(saved, keep=3).find_resume()
    assert found.step == 12
    with pytest.raises(Exception, match=r"(?i)header"):
        load_optimizer(found.path, build_optimizer(load(found.model).model, Optim()))
    assert not canary.exists()
