import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from multimodal.data import tables
from multimodal.data.build import source_from_path
from multimodal.data.source import BadSample
from multimodal.data.tables import TableSource


@pytest.fixture
def folder(tmp_path):
    for name in ("a.jpg", "b c.jpg"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def open_table(folder, name: str, content: str | bytes, **columns) -> TableSource:
    data = content.encode() if isinstance(content, str) else content
    (folder / name).write_bytes(data)
    return TableSource(str(folder / name), **columns)


def captions(source) -> list[tuple[str, ...]]:
    return [source.read(i).captions for i in range(len(source))]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", "image,caption,n\na.jpg,A,1\nb c.jpg,B,2\n"),
        ("t.csv", "\ufeffimage,caption,n\r\na.jpg,A,1\r\nb c.jpg,B,2"),
        ("t.TSV", "n\timage\tcaption\n1\ta.jpg\tA\n2\tb c.jpg\tB\n"),
        ("t.jsonl", '{"image":"a.jpg","caption":"A","n":1}\n\n'
         '{"n":2,"image":"b c.jpg","caption":"B"}'),
        ("t.jsonl", '\ufeff{"image":"a.jpg","caption":["A"],"n":1,"x":{}}\n'
         '{"image":"b c.jpg","caption":"B","n":2}\n'),
    ],
)  # fmt: skip
def test_text_tables(folder, name, content):
    source = open_table(folder, name, content)
    samples = [source.read(i) for i in range(len(source))]
    assert [s.key for s in samples] == ["a.jpg", "b c.jpg"]
    assert [s.image for s in samples] == [b"a.jpg", b"b c.jpg"]
    assert [s.captions for s in samples] == [("A",), ("B",)]
    assert [s.meta for s in samples] == [{"n": 1}, {"n": 2}]
    assert source.groups() == [2]


def test_captions_stay_text(folder):
    texts = ["None", "NA", "null", "123", "1e5", "true", '"a ""quote"" "', '"two\nlines, here"']
    rows = "".join(f"a.jpg,{text}\n" for text in texts)
    source = open_table(folder, "t.csv", "image,caption\n" + rows)
    expected = [*texts[:6], 'a "quote"', "two\nlines, here"]
    assert captions(source) == [(text,) for text in expected]


def test_line_breaks_in_captions_of_a_large_table(folder):
    """Larger than the megabyte that the reader takes at a time, which may end in a caption."""
    rows = [f'a.jpg,"{i}\n{"x" * 997}"\n' for i in range(2503)]
    source = open_table(folder, "t.csv", "image,caption\n" + "".join(rows))
    assert len(source) == 2503
    assert all(source.read(i).captions[0].startswith(f"{i}\nx") for i in range(0, 2503, 7))


def test_an_empty_caption_is_none(folder):
    source = open_table(folder, "t.csv", 'image,caption\na.jpg,\na.jpg," "\n')
    assert captions(source) == [(), ()]


def test_columns_by_name(folder):
    columns = {"image_column": "filepath", "caption_column": "title"}
    source = open_table(folder, "t.tsv", "filepath\ttitle\na.jpg\tA\n", **columns)
    assert captions(source) == [("A",)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "filepath,title\na.jpg,A\n", r"no column image, caption; it has \['filepath'"),
        ("t.csv", "image,title\na.jpg,A\n", r"no column caption; .* set image_column"),
        ("t.csv", "image\tcaption\na.jpg\tA\n", "separator seems wrong: .csv means commas"),
        ("t.tsv", "image,caption\na.jpg,A\n", "separator seems wrong"),
        ("t.csv", "image,caption\na.jpg,A, B\n", "must stand in double quotes"),
        ("t.csv", "", "t.csv: not a sound .csv table"),
        ("t.csv", "image,caption\n", "no rows"),
        ("t.csv", "image,caption\nhttps://x.org/a.jpg,A\n", "img2dataset"),
        ("t.jsonl", "image,caption\n", "first line is not a JSON object"),
        ("t.jsonl", '["image"]\n', "first line is not a JSON object"),
        ("t.jsonl", '{"img": "a.jpg"}\n', "no column image, caption"),
        ("t.jsonl", "", "no rows"),
        ("t.parquet", "no parquet", "not a sound .parquet table"),
        ("t.txt", "image,caption", "unknown kind of table"),
    ],
)
def test_errors_name_the_file_the_columns_and_the_fix(folder, name, content, message):
    with pytest.raises(ValueError, match=message) as caught:
        open_table(folder, name, content)
    assert str(folder / name) in str(caught.value)


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"x\.csv: there is no such table"):
        TableSource(str(tmp_path / "x.csv"))


def test_a_bad_row_spoils_itself_only(folder):
    rows = b'{"image":"a.jpg","caption":"A"}\n{"image":\n{"caption":"x"}\n{"image":"no.jpg"}\n\xff'
    source = open_table(folder, "t.jsonl", rows)
    reasons = []
    for i in range(1, 5):
        with pytest.raises(BadSample) as caught:
            source.read(i)
        reasons.append((caught.value.reason, caught.value.key))
    assert reasons == [
        ("damaged row", "00000001"),
        ("no image", "00000002"),
        ("missing file", "no.jpg"),
        ("damaged row", "00000004"),
    ]
    assert source.read(0).captions == ("A",)


def test_text_that_is_not_utf8_spoils_its_row_only(folder):
    source = open_table(folder, "t.csv", b"image,caption\na.jpg,\xff\xfe\na.jpg,B\n")
    with pytest.raises(BadSample, match="damaged row"):
        source.read(0)
    assert source.read(1).captions == ("B",)


def test_parquet_with_paths_and_caption_lists(folder):
    table = {"image": ["a.jpg", "b c.jpg"], "caption": [["A", " "], None], "e": [[1.0], [2.0]]}
    pq.write_table(pa.table(table | {"ok": [True, False]}), folder / "t.parquet")
    source = TableSource(str(folder / "t.parquet"))
    assert captions(source) == [("A",), ()]
    assert source.read(1).image == b"b c.jpg"
    assert source.read(1).meta == {"ok": False}


@pytest.mark.parametrize("nested", [False, True])
def test_parquet_with_pictures(folder, nested, monkeypatch):
    monkeypatch.setattr(tables, "_KEPT_ROW_GROUPS", 2)
    pictures = [f"picture {i}".encode() for i in range(11)]
    column = [{"bytes": p, "path": "x"} for p in pictures] if nested else pictures
    table = pa.table({"image": column, "caption": [f"text {i}" for i in range(11)]})
    pq.write_table(table, folder / "t.parquet", row_group_size=3)
    source = TableSource(str(folder / "t.parquet"))
    assert source.groups() == [3, 3, 3, 2]
    for opened in (source, pickle.loads(pickle.dumps(source))):
        for i in (10, 0, 5, 10, 3):
            sample = opened.read(i)
            assert (sample.key, sample.image) == (f"{i:08d}", pictures[i])
            assert sample.captions == (f"text {i}",)


def test_fingerprint_and_place(folder):
    first = open_table(folder, "t.jsonl", json.dumps({"image": "a.jpg", "caption": "A"}))
    before = first.fingerprint()
    assert before == first.fingerprint()
    assert first.place(0) == "t.jsonl"
    second = open_table(folder, "t.jsonl", json.dumps({"image": "a.jpg", "caption": "other"}))
    assert second.fingerprint() != before
    with pytest.raises(IndexError):
        second.read(1)


def test_dates_and_categories_are_metadata_too(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"a")
    (tmp_path / "t.csv").write_text("image,caption,day\na.jpg,one,2024-02-03\n")
    table = pa.table({"image": ["a.jpg"], "caption": ["one"]})
    table = table.append_column("kind", pa.array(["cat"]).dictionary_encode())
    pq.write_table(table, tmp_path / "t.parquet")
    assert source_from_path(str(tmp_path / "t.csv")).read(0).meta == {"day": "2024-02-03"}
    assert source_from_path(str(tmp_path / "t.parquet")).read(0).meta == {"kind": "cat"}
