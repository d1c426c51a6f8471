"""Checkpoints: all comes back, and old ones go only after a newer one has come.

What must hold when files are damaged or saves fail is in tests/faults/test_checkpoints.py.
"""

import shutil

import pytest
import torch
from checkpoint_parts import SECTION, make_parts, names, newest, save_three, snapshot
from safetensors.torch import load_file, save_file

import multimodal.train.checkpoint as module
import multimodal.weights.checkpoints as reading
from multimodal.config import Optim
from multimodal.models.build import build_model
from multimodal.train.checkpoint import Checkpoints
from multimodal.train.optim import build_optimizer, named_parameters
from multimodal.train.snapshot import load_optimizer
from multimodal.weights.load import load


@pytest.fixture(scope="module")
def parts():
    return make_parts()


@pytest.fixture
def saved(tmp_path, parts):
    return save_three(tmp_path, parts)


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


def test_a_new_run_has_none(tmp_path):
    assert Checkpoints(tmp_path, keep=1).find_resume() is None


def test_only_the_newest_sound_ones_are_kept(saved, parts):
    Checkpoints(saved, keep=2).save(snapshot(parts, 16))
    assert names(saved) == ["step-00000012", "step-00000016"]


def test_an_old_one_is_removed_only_after_the_new_one_is_there(saved, parts, monkeypatch):
    removed = []
    real = shutil.rmtree

    def watch(path, **kwargs):
        if path.name.startswith(".old-step-") and path.exists():
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


def test_protected_ones_are_kept_however_old(saved, parts):
    checkpoints = Checkpoints(saved, keep=1)
    checkpoints.save(snapshot(parts, 16), protected=[4])
    assert names(saved) == ["step-00000004", "step-00000016"]
    checkpoints.retire()
    assert names(saved) == ["step-00000016"]


def test_a_damaged_one_is_not_protected(saved, parts):
    """It would hold the place of a best one that can be loaded."""
    path = saved / "checkpoints/step-00000004/optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    Checkpoints(saved, keep=1).save(snapshot(parts, 16), protected=[4, 8])
    assert names(saved) == ["step-00000008", "step-00000016"]


def test_an_old_one_that_cannot_be_removed_costs_nothing_else(saved, parts, monkeypatch, caplog):
    def refuse(path, **kwargs):
        if path.exists():
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module.shutil, "rmtree", refuse)
    assert Checkpoints(saved, keep=1).save(snapshot(parts, 16)).step == 16
    assert "could not be removed" in caplog.text
    assert [name for name in names(saved) if name.startswith("step")] == ["step-00000016"]


def test_files_of_others_among_the_checkpoints_are_left_alone(saved, parts, tmp_path_factory):
    """A network's `.nfs` file, and a checkpoint that was moved away and linked."""
    folder, elsewhere = saved / "checkpoints", tmp_path_factory.mktemp("elsewhere")
    (folder / ".nfs0001").write_text("")
    (folder / ".step-00000099").write_text("")
    shutil.move(folder / "step-00000004", elsewhere)
    (folder / "step-00000004").symlink_to(elsewhere / "step-00000004")
    checkpoints = Checkpoints(saved, keep=1)
    checkpoints.remove_incomplete()
    checkpoints.save(snapshot(parts, 16))
    assert names(saved) == [".nfs0001", "step-00000016"]
    assert (elsewhere / "step-00000004" / "manifest.json").exists()


def test_what_cannot_be_read_is_damage(saved, monkeypatch):
    real = reading.file_hash

    def broken(path):
        if path == newest(saved) / "optimizer.safetensors":
            raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(reading, "file_hash", broken)
    assert "unreadable" in reading.find_damage(newest(saved))
    assert Checkpoints(saved, keep=3).find_resume().step == 8
