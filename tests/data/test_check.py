"""The data doctor: facts that can be counted by hand, and a page that shows them."""

import io
import re

import numpy as np
import pytest
from made_data import jpeg, write_tar
from PIL import Image
from typer.testing import CliRunner

from multimodal.cli import app
from multimodal.config import BpeTokenizer
from multimodal.data.check import check_data
from multimodal.data.check_page import html_page
from multimodal.data.folder import FolderSource
from multimodal.data.shards import ShardSource
from multimodal.data.text import build_tokenizer

SIZES = [(7, 5), (40, 10), (11, 11), (11, 11), (13, 26)]
CAPTIONS = ["a <b>bold</b> cat", "the other cat", "кот и кошка", "кот и кошка", "a cat " * 20]


def encoded(size, kind, seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five good pictures, the fourth equal to the third; a cut one and one without a caption."""
    place = tmp_path_factory.mktemp("photos")
    for number, (size, caption) in enumerate(zip(SIZES, CAPTIONS, strict=True)):
        kind = "PNG" if number < 4 else "JPEG"
        (place / f"{number}.{kind.lower()}").write_bytes(encoded(size, kind, min(number, 2)))
        (place / f"{number}.txt").write_text(caption, encoding="utf-8")
    whole = encoded((64, 64), "JPEG", 9)
    (place / "5.jpg").write_bytes(whole[: len(whole) // 3])
    (place / "5.txt").write_text("a broken one")
    return place


def tokenizer_of(context_length):
    return build_tokenizer(
        BpeTokenizer(kind="bpe"),
        context_length=context_length,
        fixed_length=False,
        vocab_size=300,
        captions=CAPTIONS,
    )


def test_the_facts_are_those_of_the_files(folder):
    seen = []
    source = FolderSource(str(folder))
    report = check_data(source, tokenizer=tokenizer_of(16), threads=3, progress=seen.append)
    assert sum(seen) == report.samples == report.looked_at == 6
    assert report.formats == {"PNG": 4, "JPEG": 1}
    assert list(report.broken.values()) == [1] and len(report.broken_samples) == 1
    assert report.broken_samples[0]["key"] == "5.jpg"
    assert (report.repeated_images, report.repeated_captions) == (1, 1)
    assert report.scripts == {"latin": 3, "cyrillic": 2}
    widths = sorted(width for width, _ in SIZES)
    assert [report.spreads["width"][q] for q in ("least", "median", "most")] == [
        widths[0],
        widths[2],
        widths[-1],
    ]
    assert report.spreads["aspect"]["most"] == 4 and report.spreads["aspect"]["least"] == 1
    assert report.spreads["characters"]["most"] == len(CAPTIONS[-1].strip())
    # A text that is cut has the length of the context, and so may one that just fits.
    lengths = tokenizer_of(999).encode([caption.strip() for caption in CAPTIONS]).lengths
    assert report.cut == int((lengths > 16).sum()) >= 1
    assert report.spreads["tokens"]["most"] == int(lengths.max())


def test_members_of_shards_that_are_left_out_are_named(tmp_path):
    pair = [("a.jpg", jpeg(1)), ("a.txt", b"a text")]
    write_tar(tmp_path / "0.tar", [*pair, ("lonely.txt", b"no picture")])
    write_tar(tmp_path / "1.tar", pair)
    report = check_data(ShardSource(str(tmp_path)))
    assert report.left_out == {"no image": 1} and report.repeated_keys == 1
    assert report.left_out_named == {"no image": ["0.tar: lonely"]}
    assert "0.tar: lonely: no image" in html_page(report)


def test_a_large_source_is_looked_at_evenly(folder):
    source = FolderSource(str(folder))
    read = []
    real = source.read
    source.read = lambda index: read.append(index) or real(index)
    assert check_data(source, most=3).looked_at == 3
    assert read == [0, 2, 4]


def test_the_page_needs_no_other_file_and_shows_captions_as_text(folder):
    report = check_data(FolderSource(str(folder)))
    page = html_page(report)
    assert "a &lt;b&gt;bold&lt;/b&gt; cat" in page and "<b>bold" not in page
    assert page.count('src="data:image/jpeg;base64,') == 5 == len(report.shown)
    assert not re.search(r'(src|href)="(?!data:)', page)


def test_the_command_tells_programs_and_people_the_same(folder, tmp_path):
    page = tmp_path / "page.html"
    people = CliRunner().invoke(app, ["check", str(folder), "--html", str(page)])
    assert people.exit_code == 0 and page.read_text().startswith("<!doctype html>")
    assert "4 x PNG, 1 x JPEG" in people.output and "broken: " in people.output
    programs = CliRunner().invoke(app, ["check", str(folder), "--json"])
    assert '"PNG": 4' in programs.output and '"problems"' not in programs.output
