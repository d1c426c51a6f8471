import builtins
import json
import pickle

import pytest
from made_data import encode, jpeg, photo

from multimodal import config
from multimodal.config import Data, Preprocess
from multimodal.config_io import ConfigError, check
from multimodal.data.build import open_source, source_from_path
from multimodal.data.hub import HubSource
from multimodal.data.loader import eval_loader
from multimodal.data.source import BadSample
from multimodal.data.transforms import ImageTransform

datasets = pytest.importorskip("datasets")
PICTURES = [jpeg(i, 19, 17) for i in range(6)] + [encode(photo(19, 17), "PNG")]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def made(captions: list | None = None) -> "datasets.Dataset":
    """Seven rows with pictures, two columns of captions, a class and metadata."""
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "caption": datasets.Value("string"),
            "more": datasets.List(datasets.Value("string")),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "id": datasets.Value("string"),
            "vector": datasets.List(datasets.Value("float32")),
        }
    )
    columns = {
        "image": [{"bytes": data, "path": None} for data in PICTURES],
        "caption": captions or [f" text {i}" for i in range(7)],
        "more": [[f"{i} a", f"{i} b"] for i in range(7)],
        "label": [i % 2 for i in range(6)] + [-1],
        "id": [f"00{i}" for i in range(7)],
        "vector": [[0.5]] * 7,
    }
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture
def saved(tmp_path) -> str:
    made().save_to_disk(tmp_path / "saved")
    return str(tmp_path / "saved")


def test_a_saved_data_set_gives_stored_bytes_captions_classes_and_metadata(saved):
    source = HubSource(saved, caption_column=["more", "caption"], label_column="label")
    assert (len(source), source.groups(), source.problems) == (7, [7], {})
    for opened in (source, pickle.loads(pickle.dumps(source))):
        for i in (6, 0, 3):
            sample = opened.read(i)
            assert sample.image == PICTURES[i]
            assert sample.key == f"{i:08d}"
            assert sample.captions == (f"{i} a", f"{i} b", f"text {i}")
            classes = {0: {"cls": "cat"}, 3: {"cls": "dog"}, 6: {}}
            assert sample.meta == {"id": f"00{i}"} | classes[i]
    with pytest.raises(IndexError):
        source.read(7)


def test_loader_processes_read_it(saved):
    transform = ImageTransform(13, Preprocess())
    batches = eval_loader(
        HubSource(saved), indices=range(7), transform=transform, batch_size=2, workers=2
    )
    captions = [caption for batch in batches for caption in batch.captions]
    assert captions == [(f"text {i}",) for i in range(7)]


def test_the_class_is_the_caption_where_there_is_no_other(saved):
    source = HubSource(saved, caption_column=None, label_column="label")
    assert [source.read(i).captions for i in (0, 1, 6)] == [("cat",), ("dog",), ()]


def test_one_split_of_several(tmp_path):
    both = {"train": made(), "val": made().select(range(3))}
    datasets.DatasetDict(both).save_to_disk(tmp_path / "d")
    assert len(HubSource(str(tmp_path / "d"), split="val")) == 3
    assert len(source_from_path(str(tmp_path / "d"))) == 7
    with pytest.raises(ValueError, match="no split 'test'; it has train, val"):
        HubSource(str(tmp_path / "d"), split="test")


def test_a_folder_of_parquet_files(tmp_path):
    root = tmp_path / "parts"
    root.mkdir()
    for i, part in enumerate((made().select(range(4)), made().select(range(4, 7)))):
        part.to_parquet(root / f"train-{i}.parquet")
    made().select([6]).to_parquet(root / "test.parquet")
    source = HubSource(str(root))
    assert [source.read(i).image for i in range(7)] == PICTURES
    assert source.read(5).captions == ("text 5",)
    assert HubSource(str(root), split="test").read(0).captions == ("text 6",)
    with pytest.raises(ValueError, match=r"cannot be opened as a data set: .*val.*train.*test"):
        HubSource(str(root), split="val")


def test_an_image_folder_with_a_table_of_captions(tmp_path):
    root = tmp_path / "train"
    root.mkdir()
    lines = []
    for i in range(3):
        (root / f"{i}.jpg").write_bytes(PICTURES[i])
        lines.append(json.dumps({"file_name": f"{i}.jpg", "caption": f"text {i}"}))
    (root / "metadata.jsonl").write_text("\n".join(lines))
    source = HubSource(str(tmp_path))
    samples = {source.read(i).captions: source.read(i).image for i in range(3)}
    assert samples == {(f"text {i}",): PICTURES[i] for i in range(3)}
    (root / "1.jpg").unlink()
    with pytest.raises(BadSample, match="missing file"):
        source.read(1)


def test_a_row_without_a_picture_is_a_bad_sample(tmp_path):
    rows = made().to_dict() | {"image": [None] * 7}
    datasets.Dataset.from_dict(rows, features=made().features).save_to_disk(tmp_path / "d")
    with pytest.raises(BadSample, match="00000002: no image"):
        HubSource(str(tmp_path / "d")).read(2)


def test_mistakes_are_one_sentence(saved, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no column capton; .* did you mean caption\?"):
        HubSource(saved, caption_column="capton")
    with pytest.raises(ValueError, match="is not in the cache, and the hub cannot be reached"):
        HubSource("nobody/nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: cannot be opened as a data set"):
        HubSource(str(tmp_path / "empty"))
    imported = builtins.__import__

    def without_datasets(name, *rest):
        if name == "datasets":
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(ValueError, match=r"pip install 'multimodal\[hub\]'"):
        HubSource(saved)


def test_the_fingerprint_is_that_of_the_content(saved, tmp_path):
    made().save_to_disk(tmp_path / "copy")
    made([f" text {i}" for i in (0, 1, 2, 3, 4, 6, 5)]).save_to_disk(tmp_path / "other")
    prints = [HubSource(str(tmp_path / n)).fingerprint() for n in ("saved", "copy", "other")]
    assert prints[0] == prints[1] != prints[2]


def test_a_section_leads_to_it(saved):
    section = config.HubSource(
        kind="hub", name=saved, caption_column="more", label_column="label", split="train"
    )
    sample = open_source(section).read(1)
    assert (sample.captions, sample.meta["cls"]) == (("1 a", "1 b"), "dog")
    with pytest.raises(ConfigError, match="needs a label_column"):
        check({"train": {"kind": "hub", "name": "x", "caption_column": None}}, Data)
