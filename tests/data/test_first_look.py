"""A first look tells what opening a source would tell, and does so before torch is imported."""

import os
import subprocess
import sys

import pytest
from made_data import jpeg, pairs, write_tar
from tools import ROOT

from multimodal.config import EvaluateConfig
from multimodal.config_io import check
from multimodal.data.build import open_source
from multimodal.data.first_look import first_look, sources_in


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Pictures, a table and shards that are sound, and some that are not."""
    monkeypatch.chdir(tmp_path)
    for name in ("pictures/below", "empty/.hidden", "model"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "pictures" / "below" / "a.jpg").write_bytes(jpeg())
    (tmp_path / "empty" / ".hidden" / "a.jpg").write_bytes(jpeg())
    (tmp_path / "empty" / "again").symlink_to(tmp_path / "empty")
    (tmp_path / "t.csv").write_text("image,caption\npictures/below/a.jpg,A\n")
    (tmp_path / "semi.csv").write_text("image;caption\npictures/below/a.jpg;A\n")
    (tmp_path / "t.jsonl").write_text('{"image": "pictures/below/a.jpg", "caption": "A"}\n')
    write_tar(tmp_path / "0.tar", pairs(["a"]))
    return tmp_path


def evaluation(**data):
    tree = {"evaluate": {"a": {"kind": "retrieval", "data": data}}}
    return check(tree, EvaluateConfig)


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "folder", "path": "pictures"},
        {"kind": "table", "path": "t.csv"},
        {"kind": "table", "path": "semi.csv", "separator": ";"},
        {"kind": "table", "path": "t.jsonl"},
        {"kind": "shards", "path": "{0..1}.tar"},
        {"kind": "shards", "path": "s3://bucket"},
        {"kind": "hub", "name": "nobody/nothing"},
    ],
)
def test_sound_sources_and_those_elsewhere_have_no_problems(folder, data):
    assert first_look(evaluation(**data)) == []


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "folder", "path": "nowhere"},
        {"kind": "folder", "path": "empty"},
        {"kind": "table", "path": "nowhere.csv"},
        {"kind": "table", "path": "semi.csv"},
        {"kind": "table", "path": "t.csv", "caption_column": ["text"]},
        {"kind": "table", "path": "t.jsonl", "image_column": "file"},
        {"kind": "shards", "path": "nowhere"},
        {"kind": "shards", "path": "{1..3}.tar"},
    ],
)
def test_problems_are_those_of_opening_it_also_within_a_mixture(folder, data):
    with pytest.raises(ValueError) as opening:
        open_source(next(sources_in(evaluation(**data))))
    assert first_look(evaluation(**data)) == [str(opening.value)]
    parts = {"a": {"kind": "folder", "path": "pictures"}, "b": data}
    assert first_look(evaluation(kind="mixture", sources=parts)) == [str(opening.value)]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("train CONFIG data.train.kind=folder data.train.path=empty", 2, "no picture in this"),
        ("train CONFIG data.train.kind=table data.train.path=semi.csv", 2, "separated by ';'"),
        ("check CONFIG data.train.kind=folder data.train.path=nowhere", 9, "no such folder"),
        ("evaluate model CONFIG evaluate.a.kind=retrieval evaluate.a.data.kind=folder "
         "evaluate.a.data.path=nowhere", 2, "no such folder"),
        ("evaluate nowhere CONFIG evaluate.a.kind=retrieval evaluate.a.data.kind=folder "
         "evaluate.a.data.path=pictures", 2, "no model at"),
        ("classify nowhere pictures --labels a", 2, "no model at"),
        ("embed model semi.csv out", 2, "separated by ';'"),
        ("embed nowhere pictures out", 2, "no model at"),
        ("pack t.csv out --image-column file", 2, "no column file"),
        ("check empty", 2, "no picture in this folder"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_torch_is_imported(folder, arguments, code, message):
    (folder / "blocked").mkdir()
    (folder / "blocked" / "torch.py").write_text("raise SystemExit(9)")
    config = str(ROOT / "configs" / "model" / "tiny.yaml")
    result = subprocess.run(
        [sys.executable, "-m", "multimodal", *arguments.replace("CONFIG", config).split()],
        env=os.environ | {"PYTHONPATH": f"{folder / 'blocked'}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == code and message in result.stderr, result.stderr
