import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from multimodal.config import EvaluateConfig
from multimodal.config_io import load_config, read_yaml
from multimodal.data import demo, openmoji
from multimodal.data.openmoji import Item

ROOT = Path(__file__).parents[2]
HELD_OUT = ("variants", "concepts", "concepts-toned")
SLICES = ("validation", "validation-concepts", "validation-concepts-toned")


@pytest.fixture(scope="module")
def items():
    pytest.importorskip("emoji")
    return openmoji.read_items()


@pytest.fixture(scope="module")
def splits(items):
    return openmoji.split(openmoji.drop_shared_aliases(items))


def make(emoji="x", name="a name", aliases=()):
    return Item(emoji, name, aliases, base=name, concept=name, tone="none", group="")


def captions(members):
    return {text.casefold() for item in members for text in (item.name, *item.aliases)}


def digests(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def read_tar(path):
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


@pytest.mark.parametrize(
    "emoji, name, base, concept, tone, group",
    [
        (
            "\U0001f469\U0001f3fe\u200d\U0001f692",
            "woman firefighter with medium-dark skin",
            "woman firefighter",
            "firefighter",
            "medium-dark",
            "a person or body part",
        ),
        (
            "\U0001f468\U0001f3ff\u200d\u2764\ufe0f\u200d\U0001f468\U0001f3fb",
            "couple with heart man man with dark and light skin",
            "couple with heart man man",
            "couple with heart",
            "dark and light",
            "a person or body part",
        ),
        (
            "\U0001f468\U0001f3fd\u200d\U0001f9b2",
            "man bald with medium skin",
            "man bald",
            "bald",
            "medium",
            "a person or body part",
        ),
        (
            "\U0001f1ec\U0001f1e6",
            "flag of Gabon",
            "flag of Gabon",
            "flag of Gabon",
            "none",
            "a flag",
        ),
        ("\U0001f469", "woman", "woman", "person", "none", "a person or body part"),
        (
            "\U0001f452",
            "woman\u2019s hat",
            "woman\u2019s hat",
            "woman\u2019s hat",
            "none",
            "an object",
        ),
        (
            "\U0001f7e0",
            "orange circle",
            "orange circle",
            "orange circle",
            "none",
            "a symbol or sign",
        ),
    ],
)
def test_names_say_tone_gender_and_flag(items, emoji, name, base, concept, tone, group):
    (item,) = (item for item in items if item.emoji == emoji)
    found = (item.name, item.base, item.concept, item.tone, item.group)
    assert found == (name, base, concept, tone, group)


def test_every_drawn_emoji_has_one_of_nine_groups(items):
    drawings = demo._find_drawings()
    drawn = [item for item in items if (drawings / f"{item.key}.svg").exists()]
    assert len(drawn) > 3000
    assert {item.group for item in drawn} == set(openmoji.GROUPS.values())


def test_names_are_unique(items):
    assert len({item.name.casefold() for item in items}) == len(items)


def test_aliases_that_say_nothing_or_fit_two_items_are_dropped():
    tiger = make("a", "tiger", ("Tiger", "big cat", "Big Cat"))
    face = make("b", "tiger face", ("tiger", "stripes", "cub"))
    lion = make("c", "lion", ("CUB",))
    kept = openmoji.drop_shared_aliases([tiger, face, lion])
    assert [item.aliases for item in kept] == [("big cat",), ("stripes",), ()]


def test_of_equal_pictures_the_shortest_name_stays_and_order_is_kept():
    long, short, other = make("a", "man artist"), make("b", "artist"), make("c", "cat")
    pictures = {long: b"1", other: b"2", short: b"1"}
    assert list(openmoji.drop_repeats(pictures)) == [other, short]


@pytest.mark.parametrize(
    "whole, parts",
    [(None, ("train", *HELD_OUT)), ("train", ("train-tune", *SLICES))],
)
def test_splits_are_disjoint_and_complete(items, splits, whole, parts):
    members = [item.emoji for name in parts for item in splits[name]]
    expected = items if whole is None else splits[whole]
    assert sorted(members) == sorted(item.emoji for item in expected)


@pytest.mark.parametrize(
    "train, variants, concepts, toned",
    [("train", *HELD_OUT), ("train-tune", *SLICES)],
)
def test_held_out_items_are_new_in_the_way_they_claim(splits, train, variants, concepts, toned):
    known = {item.base for item in splits[train]}
    tones = {item.tone for item in splits[train]}
    assert all(item.base in known and item.tone in tones for item in splits[variants])
    assert all(item.tone != "none" for item in (*splits[variants], *splits[toned]))
    assert all(item.tone == "none" for item in splits[concepts])
    held = {item.concept for name in (concepts, toned) for item in splits[name]}
    assert held.isdisjoint(item.concept for item in (*splits[train], *splits[variants]))
    for name in (variants, concepts, toned):
        assert captions(splits[name]).isdisjoint(captions(splits[train]))


def test_a_split_depends_on_the_item_and_not_on_its_neighbours(items, splits):
    alone = openmoji.split(items[: len(items) // 2])
    assert {i.emoji for i in alone["concepts"]} <= {i.emoji for i in splits["concepts"]}


def test_a_variant_is_held_out_only_if_its_base_name_stays():
    lonely = [
        Item(f"{n}", f"{n} with dark skin", (), base=f"{n}", concept=f"{n}", tone="dark", group="")
        for n in range(97)
    ]
    cut = openmoji.split(lonely)
    assert cut["variants"] == [] and len(cut["train"]) + len(cut["concepts-toned"]) == 97


@pytest.fixture
def few(items, monkeypatch):
    """Packing of a small part of the emoji, with two that have no drawing or the same one."""
    pytest.importorskip("resvg_py")
    demo._find_drawings()
    names = {"flag of France", "flag of St. Martin", "flag of Clipperton Island"}
    chosen = [item for item in items if item.name in names] + items[500::101]
    chosen.append(make("\U0010fffd", "not drawn"))
    monkeypatch.setattr(demo, "read_items", lambda: chosen)
    return chosen


def test_packing_writes_pictures_names_and_card(few, tmp_path):
    seen = []
    counts = demo.pack_openmoji(tmp_path / "out", size=29, progress=seen.append)
    assert sum(seen) == len(few)
    assert set(counts) == set(openmoji.SPLITS)
    assert sum(counts[name] for name in ("train", *HELD_OUT)) == len(few) - 3
    files = read_tar(tmp_path / "out" / "train" / "00000.tar")
    assert len(files) == 3 * counts["train"]
    name, png = next((name, data) for name, data in files.items() if name.endswith(".png"))
    record = json.loads(files[name.replace(".png", ".json")])
    assert "-".join(f"{ord(point):04X}" for point in record["emoji"]) == name[:-4]
    assert record["captions"][0] == files[name.replace(".png", ".txt")].decode()
    assert record["license"] == "CC BY-SA 4.0" and "OpenMoji" in record["attribution"]
    assert record["group"] in openmoji.GROUPS.values()
    with Image.open(io.BytesIO(png)) as image:
        assert (image.mode, image.size) == ("RGB", (29, 29))
        assert image.getpixel((0, 0)) == (255, 255, 255), "the background is white"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "* 1 emoji that OpenMoji does not draw" in card and "* 2 drawings with the same" in card
    assert "designed by OpenMoji" in card and "CC BY-SA 4.0" in card


def test_packing_twice_gives_equal_bytes(few, tmp_path):
    for name in ("a", "b"):
        demo.pack_openmoji(tmp_path / name, size=17)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    with tarfile.open(tmp_path / "a" / "train" / "00000.tar") as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.mode) for m in tar} == {(0, 0, 0, "", 0o644)}


def test_a_complete_data_set_is_left_alone(few, tmp_path, monkeypatch):
    counts = demo.pack_openmoji(tmp_path, size=17)
    monkeypatch.setattr(demo, "_find_drawings", lambda: pytest.fail("it was made again"))
    assert demo.pack_openmoji(tmp_path, size=17) == counts


@pytest.mark.parametrize("damage", ["cut a tar", "no tar", "no manifest", "other size"])
def test_an_incomplete_data_set_is_made_again(few, tmp_path, damage):
    out = tmp_path / "out"
    demo.pack_openmoji(out, size=13 if damage == "other size" else 17)
    tar = out / "train" / "00000.tar"
    if damage == "cut a tar":
        tar.write_bytes(tar.read_bytes()[:-1000])
    elif damage == "no tar":
        tar.unlink()
    elif damage == "no manifest":
        (out / "manifest.json").unlink()
    demo.pack_openmoji(out, size=17)
    demo.pack_openmoji(tmp_path / "fresh", size=17)
    assert digests(out) == digests(tmp_path / "fresh")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out"], "nothing is left"


def test_a_failed_packing_leaves_nothing_that_looks_complete(few, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_card", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        demo.pack_openmoji(tmp_path / "out", size=13)
    assert list(tmp_path.iterdir()) == []


def test_foreign_files_are_not_overwritten(few, tmp_path):
    (tmp_path / "thesis.txt").write_text("do not lose me")
    with pytest.raises(ValueError, match=r"'thesis\.txt'.*name another folder"):
        demo.pack_openmoji(tmp_path, size=17)
    assert (tmp_path / "thesis.txt").read_text() == "do not lose me"


def test_a_missing_package_is_named_with_the_cure(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "_PACKAGES", {"resvg-py": "resvg_py_that_is_not_there"})
    with pytest.raises(ValueError, match=r'resvg-py.*pip install "multimodal\[demo\]"'):
        demo.pack_openmoji(tmp_path / "out")


def test_the_configuration_names_splits_and_groups_that_exist():
    path = ROOT / "configs" / "data" / "openmoji.yaml"
    section = load_config([str(path)], EvaluateConfig, only=True)
    assert section.evaluate["groups"].classes == list(openmoji.GROUPS.values())
    sources = [read_yaml(path)["data"]["train"]["path"]]
    for evaluation in section.evaluate.values():
        sources.append(evaluation.data.path)
        sources += [source.path for source in getattr(evaluation, "more_captions", [])]
    assert set(sources) == {f"data/openmoji/{name}" for name in ("train", *HELD_OUT)}


@pytest.mark.slow
def test_the_whole_of_openmoji(tmp_path):
    for package in ("emoji", "resvg_py"):
        pytest.importorskip(package)
    counts = demo.pack_openmoji(tmp_path)
    assert sum(counts[name] for name in ("train", *HELD_OUT)) >= 3700
    assert counts["train"] >= 3000 and counts["variants"] >= 340
    assert counts["concepts"] >= 180 and counts["concepts-toned"] >= 150
    records, pictures = {}, set()
    for name in ("train", *HELD_OUT):
        files = read_tar(tmp_path / name / "00000.tar")
        records[name] = [json.loads(v) for k, v in files.items() if k.endswith(".json")]
        pictures |= {v for k, v in files.items() if k.endswith(".png")}
    assert len(pictures) == sum(map(len, records.values())), "no two pictures are equal"
    every = [text.casefold() for rows in records.values() for r in rows for text in r["captions"]]
    assert len(every) == len(set(every)), "no caption is right for two pictures"
    trained = {row["base"] for row in records["train"]}
    assert all(row["base"] in trained for row in records["variants"])
    assert {row["tone"] for row in records["concepts"]} == {"none"}
    assert {row["group"] for row in records["concepts"]} == set(openmoji.GROUPS.values())
