"""The model card, read back from the folder of a small run with averaged weights."""

import json
import re
import shutil

import pytest
import yaml
from safetensors.torch import load_file
from tools import make_shards, picture, retrieval, tiny_config, tiny_tree

from multimodal.config import Card, Config, FolderSource, Optim
from multimodal.config_io import check
from multimodal.data.build import open_source
from multimodal.train.card import data_terms, model_card
from multimodal.train.loop import train

CARD = {"license": "CC-BY-SA-4.0", "attribution": "Drawn by A | B", "description": "Of shapes."}
TERMS = {"license": "CC0", "attribution": "nobody"}


def config_in(run, shards, **card):
    tree = tiny_tree(run, shards, "train.ema=0.5", "data.max_skipped=0.2")
    zero_shot = {"kind": "zero_shot", "classes": ["disc", "bar", "frame"], "templates": ["a {}."]}
    tree["evaluate"] = {
        "val": retrieval(shards),
        "shapes": zero_shot | {"data": {"kind": "shards", "path": str(shards)}},
    }
    return check(tree | {"card": card}, Config)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a finished run and its shards, of which one picture is broken."""
    folder = tmp_path_factory.mktemp("card")
    shards = make_shards(folder / "data", 37, broken=(4,))
    train(config_in(folder / "run", shards, **CARD))
    return folder / "run", shards


def parts(text):
    """Front matter, and the sections by heading."""
    _, front, body = text.split("---\n", 2)
    first, *sections = re.split(r"^## (.+)\n", body, flags=re.MULTILINE)
    return yaml.safe_load(front), {
        "": first,
        **dict(zip(sections[::2], sections[1::2], strict=True)),
    }


def table(section):
    """Rows of the table in a section, without its head."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def read(path):
    return json.loads(path.read_text())


def test_the_hub_can_read_its_front_matter(finished):
    front, _ = parts((finished[0] / "model/README.md").read_text())
    assert front == {
        "license": "cc-by-sa-4.0",
        "library_name": "multimodal",
        "pipeline_tag": "zero-shot-image-classification",
        "tags": ["multimodal", "clip", "image-text-retrieval"],
    }


def test_it_says_what_the_runs_files_say(finished):
    run, _ = finished
    state = read(run / "checkpoints/step-00000012/state.json")
    _, sections = parts((run / "model/README.md").read_text())
    assert all(text.strip() for text in sections.values())
    assert "Of shapes." in sections[""] and "Attribution: Drawn by A | B" in sections[""]
    assert dict(table(sections["Training data"])) == {k: str(v) for k, v in state["data"].items()}
    told = dict(table(sections["Training"]))
    for name, value in {
        "steps": state["step"],
        "epochs": state["epoch"],
        "samples seen": state["samples"],
        "batch size": 8,
        "peak learning rate": 1e-3,
        "seed": 3,
        "processes": state["processes"],
        "precision": "float32",
        "average of the weights": "decay 0.5",
        "packages": ", ".join(f"{k} {v}" for k, v in state["versions"].items()),
    }.items():
        assert told[name] == str(value), name
    assert state["skipped"] > 0 and f"In training {state['skipped']} samples" in sections["Limits"]


def test_its_figures_are_those_of_the_weights_in_the_folder(finished):
    run, _ = finished
    results = read(run / "results.json")
    _, sections = parts((run / "model/README.md").read_text())
    rows = table(sections["Evaluation"])
    assert {name for name, *_ in rows} == {"val@ema", "shapes@ema"}
    for name, figure, value, chance in rows:
        own = results[name]
        alone = figure in ("acc1", "mean_per_class_recall")
        expected = own["chance"] if alone else own.get(f"{figure}_chance")
        for told, number in ((value, own[figure]), (chance, expected)):
            assert told == "-" if number is None else float(told) == pytest.approx(number, abs=5e-5)
    told = {(name, figure) for name, figure, *_ in rows}
    rates = {
        (n, k)
        for n in ("val@ema", "shapes@ema")
        for k, v in results[n].items()
        if not isinstance(v, int) and not k.endswith("chance")
    }
    assert told == rates
    assert f"{results['val@ema']['images']}" in sections["Evaluation"]
    assert "templates ['a {}.']" in sections["Evaluation"]


def test_its_architecture_is_that_of_the_folder(finished):
    run, _ = finished
    section = read(run / "model/config.json")["model"]
    _, sections = parts((run / "model/README.md").read_text())
    rows = {name: values for name, *values in table(sections["Architecture"])}
    for name, values in rows.items():
        for side, value in zip(("image", "text"), values, strict=True):
            match name:
                case "projection":
                    expected = section[f"{side}_projection"]
                case "parameters":
                    state = load_file(run / "model/model.safetensors")
                    expected = sum(v.numel() for k, v in state.items() if k.startswith(side))
                case _:
                    expected = section[side].get(name, "-")
            assert value == str(expected), (name, side)
    assert {"activation", "norm_eps", "pool", "image_size", "context_length"} <= rows.keys()


def test_its_code_runs(finished, tmp_path, monkeypatch, capsys):
    run, _ = finished
    (tmp_path / "picture.jpg").write_bytes(picture("red", "bar"))
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.+?)```", (run / "model/README.md").read_text(), re.DOTALL)
    exec(code[1].replace("FOLDER", str(run / "model")), {})
    assert re.match(r"tensor\(\[\[.+\]\]\)", capsys.readouterr().out)


def test_a_resumed_run_has_the_same_card(finished, tmp_path):
    twin, shards = finished
    run = tmp_path / "run"
    shutil.copytree(twin, run)
    for name in ("checkpoints/step-00000012", "model"):
        shutil.rmtree(run / name)
    config = config_in(run, shards, **CARD)
    train(config)
    assert (run / "model/README.md").read_bytes() == (twin / "model/README.md").read_bytes()


def test_a_finished_run_leaves_its_card_to_people(finished, tmp_path):
    twin, shards = finished
    shutil.copytree(twin, tmp_path / "run")
    path, config = tmp_path / "run/model/README.md", config_in(tmp_path / "run", shards)
    path.write_text("edited")
    train(config)
    assert path.read_text() == "edited"
    path.unlink()
    train(config)
    front, sections = parts(path.read_text())
    assert front["license"] == "unknown" and "License: not stated." in sections[""]


# --- what a card is told -------------------------------------------------------------------------

STATE = {
    **{"step": 1, "epoch": 0.5, "samples": 8, "processes": 1, "skipped": 0},
    "nonfinite": {"total": 0, "in_a_row": 0},
    "versions": {"torch": "2"},
    "data": {"description": "shards x", "samples": 16, "fingerprint": "ab"},
}
PARAMETERS = {"image": 1, "text": 2, "temperature": 1}


def card_of(config, **more):
    return parts(model_card(config, state=STATE, results={}, parameters=PARAMETERS, **more))


def test_a_run_without_evaluations_says_so(tmp_path):
    _, sections = card_of(tiny_config(tmp_path, tmp_path))
    assert sections["Evaluation"].strip() == "The run has made no evaluation."
    assert "Terms: not stated." in sections["Training data"]


def test_what_is_on_the_hub_is_linked(tmp_path):
    tree = tiny_tree(tmp_path, tmp_path, "model.tokenizer={kind: hf, name: org/text}")
    tree["data"]["train"] = {"kind": "hub", "name": "org/pictures"}
    tree["model"]["image"] = {"kind": "timm", "name": "resnet18", "pretrained": True}
    tree["model"]["text"] = {"kind": "hf", "name": "org/text"}
    front, sections = card_of(check(tree, Config))
    assert front["datasets"] == ["org/pictures"]
    assert front["base_model"] == ["timm/resnet18", "org/text"]
    assert "image: timm/resnet18, text: org/text" in sections["Training"]


@pytest.mark.parametrize(
    ("init", "linked"),
    [
        ("hf:org/clip", ["org/clip"]),
        ("open_clip:hf-hub:org/clip", ["org/clip"]),
        ("runs/other", None),
        ("open_clip:ViT-B-32:b32.safetensors", None),
    ],
)
def test_what_a_run_began_as_is_named_and_linked_if_it_is_on_the_hub(
    tmp_path, monkeypatch, init, linked
):
    (tmp_path / "runs/other").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    tree = tiny_tree(tmp_path, tmp_path)
    tree["model"] |= {"init": init, "init_parts": ["image"]}
    front, sections = card_of(check(tree, Config))
    assert front.get("base_model") == linked
    assert dict(table(sections["Training"]))["started from"] == f"image: {init}"


@pytest.mark.parametrize("license", ["CC BY 4.0", "", "-", "MIT\nx: y"])
def test_a_license_is_one_identifier(license):
    with pytest.raises(ValueError, match="license"):
        Card(license=license)


def test_terms_come_from_the_samples(tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "a.png").write_bytes(picture("red", "bar"))
    (pictures / "a.json").write_text(json.dumps({"captions": ["a red bar"], **TERMS}))
    source = open_source(FolderSource(kind="folder", path=str(pictures)))
    assert data_terms(source) == ["CC0: nobody"]
    (pictures / "b.png").write_bytes(picture("red", "bar"))
    other = {"captions": ["a red bar"], "license": "mine\n# Evaluation\n<script>"}
    (pictures / "b.json").write_text(json.dumps(other))
    both = data_terms(open_source(FolderSource(kind="folder", path=str(pictures))))
    assert both == ["CC0: nobody", "mine # Evaluation &lt;script&gt;"]
    _, sections = card_of(tiny_config(tmp_path, tmp_path), terms=data_terms(source))
    assert "Terms: CC0: nobody." in sections["Training data"]


def test_what_moves_by_groups_and_depth_is_stated(tmp_path):
    groups = {"layer_decay": 0.5, "groups": [{"match": "^text", "freeze": True}, {"match": "bias"}]}
    whole = tiny_config(tmp_path, tmp_path)
    whole = whole.model_copy(update={"optim": Optim.model_validate(groups)})
    _, sections = card_of(whole)
    training = sections["Training"]
    assert "| layer-wise decay of the rate | 0.5 |" in training
    assert "| frozen | ^text |" in training
    assert "| other groups | bias |" in training


def test_a_run_on_this_machine_is_no_model_of_the_hub(tmp_path):
    whole = tiny_config(tmp_path, tmp_path)
    model = whole.model.model_copy(update={"init": "runs/seed0"})
    front, _ = card_of(whole.model_copy(update={"model": model}))
    assert "base_model" not in front
