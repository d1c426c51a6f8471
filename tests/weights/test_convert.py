"""Converting a model: what is written where, and what is told when it cannot be."""

import json
import shutil
import sys
from dataclasses import replace

import pytest
import torch
import yaml
from convertible import trained_clip
from tiny import write_pictures

from multimodal import cli
from multimodal.errors import RunStopped
from multimodal.files import Lock
from multimodal.weights import convert as module
from multimodal.weights.convert import Writer, convert
from multimodal.weights.parity import Theirs
from multimodal.weights.save import save_model


@pytest.fixture(scope="module")
def pretrained():
    return trained_clip()


@pytest.fixture
def writer(monkeypatch, pretrained):
    """A format that is one file; what reads it is ourselves."""

    def write(pretrained, folder):
        (folder / "model.bin").write_bytes(b"weights")

    theirs = Theirs(library="ourselves 1.0", image=pretrained.model.encode_image)
    state = {"writer": Writer(write, lambda folder: theirs, "ourselves.read({out!r})")}
    monkeypatch.setattr(module, "_writer", lambda to, **options: state["writer"])

    def change(**parts):
        state["writer"] = state["writer"]._replace(**parts)

    change.theirs = theirs
    return change


@pytest.fixture(scope="module")
def folder(pretrained, tmp_path_factory):
    """A model in `model/` and pictures in `pictures/`."""
    folder = tmp_path_factory.mktemp("convert")
    save_model(
        folder / "model",
        model=pretrained.model,
        section=pretrained.config,
        tokenizer=pretrained.tokenizer,
    )
    write_pictures(folder / "pictures", [["red"], ["green"]])
    return folder


@pytest.fixture
def run(folder, monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["multimodal", "convert", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        shown = capsys.readouterr()
        return end.value.code or 0, shown.out, shown.err

    return call


def test_files_appear_with_the_comparison_beside_them(writer, pretrained, tmp_path):
    done = convert(pretrained, tmp_path / "deep" / "out", "hf")
    assert {p.name for p in (tmp_path / "deep").iterdir()} == {"out"}
    assert {p.name for p in (tmp_path / "deep" / "out").iterdir()} == {"model.bin", "parity.json"}
    report = json.loads((tmp_path / "deep" / "out" / "parity.json").read_text())
    assert report == done.report.as_dict() and report["passed"] is True
    assert report["library"] == "ourselves 1.0" and report["not_checked"] is None
    assert report["fingerprint"] == pretrained.fingerprint()
    assert done.usage == f"ourselves.read({str(tmp_path / 'deep' / 'out')!r})"


def test_a_difference_ends_in_an_error_and_leaves_the_files_for_a_look(
    writer, pretrained, tmp_path
):
    wrong = replace(writer.theirs, image=lambda pixels: pixels.flatten(1)[:, :17])
    writer(reopen=lambda folder: wrong)
    with pytest.raises(RunStopped, match=r"ourselves 1\.0 does not give the same(.|\n)*FAILED"):
        convert(pretrained, tmp_path / "out", "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["out.part"]
    assert json.loads((tmp_path / "out.part" / "parity.json").read_text())["passed"] is False
    (tmp_path / "out.part" / "old").mkdir()
    writer(reopen=lambda folder: writer.theirs)
    convert(pretrained, tmp_path / "out", "hf")
    assert {p.name for p in tmp_path.iterdir()} == {"out"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"model.bin", "parity.json"}


def test_files_that_the_library_cannot_read_are_no_result(writer, pretrained, tmp_path):
    def reopen(folder):
        raise KeyError("hidden_act")

    writer(reopen=reopen)
    with pytest.raises(RunStopped, match=r"out\.part cannot be used: KeyError: 'hidden_act'"):
        convert(pretrained, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


def test_without_the_library_the_files_are_written_and_called_unchecked(
    writer, pretrained, tmp_path
):
    def reopen(folder):
        raise ImportError("ourselves is not installed; pip install ourselves")

    writer(reopen=reopen)
    report = convert(pretrained, tmp_path / "out", "hf").report
    assert report.not_checked == "ourselves is not installed; pip install ourselves"
    stored = json.loads((tmp_path / "out" / "parity.json").read_text())
    assert stored["passed"] is None and stored["rows"] == [] and stored["library"] is None


def test_sentence_transformers_need_not_be_installed(pretrained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    report = convert(pretrained, tmp_path / "out", "sentence-transformers").report
    assert "sentence-transformers is not installed" in report.not_checked


def test_what_cannot_be_written_leaves_nothing(writer, pretrained, tmp_path):
    def write(pretrained, folder):
        raise ValueError("it cannot be this model")

    writer(write=write)
    with pytest.raises(ValueError, match="cannot be this model"):
        convert(pretrained, tmp_path / "out", "hf")
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_left_alone(writer, pretrained, tmp_path):
    (tmp_path / "out").mkdir()
    convert(pretrained, tmp_path / "out", "hf")
    with pytest.raises(ValueError, match="out is there already and not an empty folder"):
        convert(pretrained, tmp_path / "out", "hf")
    (tmp_path / "file").write_text("a")
    with pytest.raises(ValueError, match="file is there already"):
        convert(pretrained, tmp_path / "file", "hf")
    (tmp_path / "mine.part").mkdir()
    (tmp_path / "mine.part" / "letter").write_text("a")
    with pytest.raises(ValueError, match=r"mine\.part is in the way"):
        convert(pretrained, tmp_path / "mine", "hf")
    assert (tmp_path / "mine.part" / "letter").read_text() == "a"
    (tmp_path / "other.part").write_text("a")
    with pytest.raises(ValueError, match=r"other\.part is in the way"):
        convert(pretrained, tmp_path / "other", "hf")


def test_two_conversions_to_one_place_do_not_mix(writer, pretrained, tmp_path):
    lock = Lock(tmp_path / "out.part", "out", "another")
    with pytest.raises(ValueError, match="out is being written by"):
        convert(pretrained, tmp_path / "out", "hf")
    lock.remove()


def test_an_unknown_format_and_an_option_of_another_one_are_refused(pretrained, tmp_path):
    with pytest.raises(ValueError, match=r"'gguf' is not a format; known are hf, "):
        convert(pretrained, tmp_path / "out", "gguf")
    with pytest.raises(ValueError, match="drop_logit_bias is for hf and sentence-transformers"):
        convert(pretrained, tmp_path / "out", "siglip", drop_logit_bias=True)


def test_the_model_is_not_changed(pretrained, tmp_path):
    before = pretrained.fingerprint()
    convert(pretrained, tmp_path / "out", "hf")
    assert pretrained.fingerprint() == before and not torch.is_inference_mode_enabled()


def test_the_command_prints_the_comparison_and_how_to_read_the_result(run):
    code, out, error = run("model", "made", "--to", "hf", "--pictures", "pictures")
    assert code == 0, error
    assert "ok" in out and "token ids of" in out and "FAILED" not in out
    assert out.splitlines()[-1].startswith("made: read it with transformers.CLIPModel")
    assert "pixels of 2 pictures" in out


def test_the_command_prints_json_for_programs(run):
    code, out, _ = run("model", "made for programs", "--to", "hf", "--json")
    report = json.loads(out)
    assert code == 0 and report["passed"] and report["out"] == "made for programs"


def test_a_made_folder_is_a_model_for_every_command(run, monkeypatch):
    run("model", "a model", "--to", "hf")
    code, _, error = run("hf:a model", "again", "--to", "hf")
    assert code == 0, error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "out", "--to", "hf"], "no model at 'nowhere'"),
        (["model", "pictures", "--to", "hf"], "pictures is there already"),
        (["model", "out", "--to", "siglip"], "SiglipModel cannot be this model: model.image."),
        (["model", "out", "--to", "hf", "--pictures", "gone"], "no such picture or folder"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(run, arguments, message):
    code, _, error = run(*arguments)
    assert code == 2 and message in error
    assert len(error.splitlines()) == 1 and "Traceback" not in error


CARD = """---
license: mit
library_name: multimodal
pipeline_tag: zero-shot-image-classification
---

# A model

## Use

`multimodal classify FOLDER ...`

## Training data

Mine.
"""


@pytest.mark.parametrize(
    ("to", "library", "task"),
    [
        ("hf", "transformers", "zero-shot-image-classification"),
        ("open_clip", "open_clip", "zero-shot-image-classification"),
        ("timm", "timm", "image-feature-extraction"),
    ],
)
def test_the_card_goes_along_and_says_how_to_read_the_result(
    run, folder, writer, monkeypatch, to, library, task
):
    (folder / "with a card").mkdir(exist_ok=True)
    for path in (folder / "model").iterdir():
        shutil.copy(path, folder / "with a card")
    (folder / "with a card/README.md").write_text(CARD)
    assert run("with a card", f"carded {to}", "--to", to)[0] == 0
    text = (folder / f"carded {to}/README.md").read_text()
    _, front, body = text.split("---\n")
    assert yaml.safe_load(front) == {
        "license": "mit",
        "library_name": library,
        "pipeline_tag": task,
    }
    assert "ourselves.read('FOLDER')" in body and "multimodal classify" not in body
    assert body.endswith("## Training data\n\nMine.\n")


def test_an_unknown_target_names_those_that_there_are(run):
    code, _, error = run("model", "out", "--to", "gguf")
    assert code == 2 and "gguf" in error and "sentence-transformers" in error


def test_a_difference_is_exit_code_1(run, writer):
    writer(reopen=lambda folder: replace(writer.theirs, logit_scale=3.0))
    code, _, error = run("model", "differs", "--to", "hf")
    assert code == 1 and "does not give the same" in error and "logit scale" in error
