import json
import pickle
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from multimodal.data import row_file, tables
from multimodal.data.build import source_from_path
from multimodal.data.row_file import RowFile
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
        ("t.csv", "image,captoin\na.jpg,A\n", r"no column caption; .* did you mean captoin\?"),
        (
            "t.csv",
            "image\tcaption\na.jpg\tA, b\n",
            r"separated by '\\t', not by ',': set separator",
        ),
        ("t.csv", "image;caption\na.jpg;A\n", "separated by ';', not by ','"),
        ("t.tsv", "image,caption\na.jpg,A\n", "separated by ',', .* .tsv means tabs"),
        ("t.csv", "image,caption\na.jpg,A, B\n", "must stand in double quotes"),
        ("t.csv", "image,caption\na.jpg," + "A" * 3_000_000, "longer than 1 MB.*save .* as .jsonl"),
        ("t.csv", 'image,caption\na.jpg,"A\n' + "a.jpg,B\n" * 300_000, "a quote without a partner"),
        ("t.csv", "image,caption,caption\n", r"several columns are called caption; rename"),
        ("t.tsv", "image\tcaption\tn\tn\n", r"several columns are called n; rename"),
        ("t.csv", "image,caption\na.jpg,A\n".encode("utf-16"), "is UTF-16; save .* as UTF-8"),
        ("t.jsonl", '{"image": "a"}'.encode("utf-16-be"), "is UTF-16; save .* as UTF-8"),
        ("t.csv", b"image,caption,\xe9t\xe9\n", "perhaps Latin-1; save the table as UTF-8"),
        ("t.csv", "", "t.csv: the table is empty; its first line must name the columns"),
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
        ("text is not UTF-8", "00000004"),
    ]
    assert source.read(0).captions == ("A",)


def test_text_that_is_not_utf8_spoils_its_row_only_and_is_told(folder, caplog):
    source = open_table(folder, "t.csv", b"image,caption\na.jpg,\xe9t\xe9\na.jpg,B\n")
    with pytest.raises(BadSample, match="text is not UTF-8"):
        source.read(0)
    assert source.read(1).captions == ("B",)
    assert "if they are Latin-1 or Windows-1252, save the table as UTF-8" in caplog.text
    caplog.clear()
    open_table(folder, "t.csv", "image,caption\na.jpg,\u00e9t\u00e9\na.jpg,B\n")
    assert not caplog.text


def test_columns_without_a_name_may_be_many(folder):
    source = open_table(folder, "t.csv", "image,caption,,\na.jpg,A,,\n")
    assert source.read(0).captions == ("A",)


def test_a_parquet_table_with_a_name_twice_is_refused(folder):
    columns = [pa.array(["a.jpg"]), pa.array(["A"]), pa.array(["B"])]
    table = pa.Table.from_arrays(columns, names=["image", "caption", "caption"])
    pq.write_table(table, folder / "t.parquet")
    with pytest.raises(ValueError, match="several columns are called caption"):
        TableSource(str(folder / "t.parquet"))


def test_parquet_with_paths_and_caption_lists(folder):
    table = {"image": ["a.jpg", "b c.jpg"], "caption": [["A", " "], None], "e": [[1.0], [2.0]]}
    pq.write_table(pa.table(table | {"ok": [True, False]}), folder / "t.parquet")
    source = TableSource(str(folder / "t.parquet"))
    assert captions(source) == [("A",), ()]
    assert source.read(1).image == b"b c.jpg"
    assert source.read(1).meta == {"ok": False}


def pictures_table(count: int, nested: bool = False) -> pa.Table:
    pictures = [f"picture {i}".encode() * (i % 7 + 1) for i in range(count)]
    column = [{"bytes": p, "path": "x"} for p in pictures] if nested else pictures
    columns = {"image": column, "caption": [f"text {i}" for i in range(count)]}
    kinds = pa.array([f"kind {i // 50}" for i in range(count)]).dictionary_encode()
    return pa.table(columns | {"kind": kinds, "vector": [[0.5]] * count})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "multimodal"


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_parquet_with_pictures(folder, cache, nested, limit, monkeypatch):
    monkeypatch.setattr(tables, "_IN_MEMORY", limit)
    table = pictures_table(331, nested)
    pq.write_table(table, folder / "t.parquet", row_group_size=50)
    source = TableSource(str(folder / "t.parquet"))
    assert isinstance(source._rows, RowFile) == (limit == 0)
    assert source.groups() == [331]
    for opened in (source, pickle.loads(pickle.dumps(source))):
        for i in (330, 0, 63, 64, 49, 330, 128):
            sample = opened.read(i)
            assert sample.key == f"{i:08d}"
            assert sample.image == f"picture {i}".encode() * (i % 7 + 1)
            assert sample.captions == (f"text {i}",)
            assert sample.meta == {"kind": f"kind {i // 50}"}


def test_the_copy_of_a_parquet_file_is_made_once_and_anew_when_the_file_changes(
    folder, cache, monkeypatch
):
    monkeypatch.setattr(tables, "_IN_MEMORY", 0)
    path = folder / "t.parquet"

    def first_caption() -> tuple[str, ...]:
        return TableSource(str(path)).read(0).captions

    pq.write_table(pictures_table(70), path)
    assert first_caption() == ("text 0",)
    (copy,) = cache.iterdir()
    made = copy.stat().st_mtime_ns
    assert first_caption() == ("text 0",)
    assert copy.stat().st_mtime_ns == made
    pq.write_table(pictures_table(140).slice(70), path)
    assert first_caption() == ("text 70",)
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(row_file.shutil, "disk_usage", lambda folder: SimpleNamespace(free=5))
    pq.write_table(pictures_table(71), path)
    with pytest.raises(ValueError, match=r"0\.0 GB free; make room, or set XDG_CACHE_HOME"):
        first_caption()
    assert len(list(cache.iterdir())) == 1


def test_captions_of_several_columns_follow_each_other(folder):
    rows = '{"image": "a.jpg", "en": ["A", "B"], "de": " C "}\n{"image": "a.jpg", "de": "D"}'
    source = open_table(folder, "t.jsonl", rows, caption_column=["de", "en"])
    assert captions(source) == [("C", "A", "B"), ("D",)]
    assert source.read(0).meta == {}
    with pytest.raises(ValueError, match="no column fr;"):
        open_table(folder, "t.jsonl", rows, caption_column=["de", "fr"])


def test_absolute_paths_and_any_separator(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    text = f'image;caption\n{folder / "a.jpg"};"A; B"\nb c.jpg;C\n../{folder.name}/a.jpg;D\n'
    source = open_table(folder, "t.csv", text, separator=";")
    assert captions(source) == [("A; B",), ("C",), ("D",)]
    assert [source.read(i).image for i in range(3)] == [b"a.jpg", b"b c.jpg", b"a.jpg"]
    moved = open_table(elsewhere, "t.csv", text, separator=";")
    assert moved.read(0).image == b"a.jpg"
    with pytest.raises(BadSample, match="missing file"):
        moved.read(1)


def test_metadata_are_numbers_only_where_nothing_is_lost(folder):
    columns = {
        "image": ["a.jpg", "a.jpg"],
        "caption": ["007", "1"],
        "id": ["007", "12"],
        "serial": ["12345678901234567890", "1"],
        "phone": ["+49", "1"],
        "count": ["-3", "0"],
        "some": ["", "7"],
        "score": ["0.25", "3"],
        "tiny": ["1e-5", "2"],
        "ok": ["true", "false"],
        "nothing": ["", ""],
        "word": ["NA", "1"],
    }
    lines = [",".join(columns), *(",".join(row) for row in zip(*columns.values(), strict=True))]
    source = open_table(folder, "t.csv", "\n".join(lines))
    assert captions(source) == [("007",), ("1",)]
    same = {name: columns[name][0] for name in ("id", "serial", "phone", "nothing", "word")}
    numbers = {"count": -3, "some": None, "score": 0.25, "tiny": 1e-5, "ok": True}
    assert source.read(0).meta == same | numbers
    assert source.read(1).meta["score"] == 3.0


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_wrong_column_is_found_before_the_table_is_read(folder, ending, monkeypatch):
    rows = {"image": ["a.jpg"], "title": ["A"]}
    pq.write_table(pa.table(rows), folder / "t.parquet")
    (folder / "t.csv").write_text("image,title\na.jpg,A\n")
    (folder / "t.jsonl").write_text('{"image": "a.jpg", "title": "A"}')
    for reader in ("_read_csv", "_JsonRows", "_open_parquet"):
        monkeypatch.setattr(tables, reader, None)
    with pytest.raises(ValueError, match="no column caption"):
        TableSource(str(folder / f"t.{ending}"))


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_the_fingerprint_sees_a_change_that_keeps_the_size(folder, ending):
    def written(place: str, text: str) -> str:
        (folder / place).mkdir(exist_ok=True)
        path = folder / place / f"t.{ending}"
        if ending == "parquet":
            pq.write_table(pa.table({"image": ["a.jpg"] * 3, "caption": ["A", text, "C"]}), path)
        elif ending == "csv":
            path.write_text(f"image,caption\na.jpg,{text}\n")
        else:
            path.write_text(json.dumps({"image": "a.jpg", "caption": text}))
        return TableSource(str(path)).fingerprint()

    assert written("x", "one") == written("y", "one") != written("x", "two")


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


def test_rows_that_a_lone_quote_joins_are_told(tmp_path, caplog):
    path = tmp_path / "t.csv"
    path.write_text('image,caption\n0.jpg,"two\nlines"\n1.jpg,one\n')
    assert len(TableSource(str(path))) == 2 and not caplog.text
    path.write_text('image,caption\n0.jpg,"no end\n1.jpg,one\n2.jpg,two\n')
    assert len(TableSource(str(path))) == 1
    assert "1 texts hold a line break and then ','" in caplog.text
