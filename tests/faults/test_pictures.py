"""Faults F35 to F39: pictures that are broken, huge, thin, oddly coloured or lie on their side."""

import io
import multiprocessing
import resource
import struct
from collections import Counter

import numpy as np
import pytest
import torch
from made_data import encode, jpeg, photo
from PIL import Image, ImageOps
from pixels import distance, is_channel_last, opened, pixels_of, png

from multimodal.config import Augment, BpeTokenizer, Data, FolderSource, Preprocess
from multimodal.data import decode as decoding
from multimodal.data import transforms
from multimodal.data.decode import decode, from_pil
from multimodal.data.loader import train_loader
from multimodal.data.source import BadSample, Sample
from multimodal.data.text import build_tokenizer
from multimodal.data.transforms import ImageTransform

# --- F35: empty, not a picture, damaged, cut short -----------------------------------------------


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty image"),
        (b"this is text, named .jpg", "not an image"),
        (b"<html><body>not found</body></html>", "not an image"),
        (jpeg()[: len(jpeg()) // 2], "image cut short"),
        (jpeg()[:20], "not an image"),
        (encode(photo(), "JPEG", progressive=True)[:900], "image cut short"),
        (encode(photo(), "PNG")[:500], "image cut short"),
        (encode(photo(), "WEBP")[:500], "damaged image"),
        (encode(photo(), "GIF")[:-300], "image cut short"),
        (encode(photo(), "BMP")[:-300], "image cut short"),
    ],
)
def test_damaged_pictures_are_bad_samples(data, reason):
    with pytest.raises(BadSample) as caught:
        decode(data)
    assert caught.value.reason == reason


@pytest.mark.parametrize("least", [None, 16])
@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_blocks": 2}])
def test_a_jpeg_cut_anywhere_is_whole_or_nothing(options, least):
    """The policy for pictures cut short: never one that is filled up with grey."""
    data = encode(photo(67, 59), quality=80, **options)
    whole = decode(data, least=least)
    lost = Counter()
    for end in range(0, len(data), 17):
        try:
            assert torch.equal(decode(data[:end], least=least), whole)
        except BadSample as error:
            lost[error.reason] += 1
    assert lost["image cut short"] > 0.5 * len(data) / 17
    assert set(lost) <= {"empty image", "not an image", "image cut short", "damaged image"}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"])
def test_random_damage_gives_pixels_or_a_bad_sample(kind):
    rng = np.random.default_rng(1)
    sound = encode(photo(37, 29), kind)
    for _ in range(60):
        data = bytearray(sound)
        for _ in range(rng.integers(1, 6)):
            data[rng.integers(len(data))] = rng.integers(256)
        try:
            pixels = decode(bytes(data), max_pixels=100_000)
        except BadSample:
            continue
        assert pixels.dtype == torch.uint8
        assert pixels.shape[0] == 3


BROKEN = {3: b"", 8: b"a text", 20: jpeg()[:700], 21: jpeg()[:20]}
REASONS = {"empty image": 1, "not an image": 2, "image cut short": 1}


class Album:
    """41 pictures, of which some are broken; no two are the same."""

    description, problems = "album", {}

    def __len__(self):
        return 41

    def groups(self):
        return [41]

    def read(self, index):
        return Sample(f"k{index}", BROKEN.get(index, jpeg(index, 24, 18)), (f"no. {index}",), {})

    def place(self, index):
        return "album"

    def fingerprint(self):
        return "album"


def test_broken_pictures_are_counted_and_replaced_alike_on_all_ranks():
    """One epoch, from two ranks: equal step counts, and what is lost is what was broken."""
    tokenizer = build_tokenizer(
        BpeTokenizer(kind="bpe"),
        context_length=8,
        fixed_length=False,
        vocab_size=300,
        captions=["no. 12"],
    )
    ranks = [
        list(
            train_loader(
                Album(),
                data=Data(train=FolderSource(kind="folder", path="."), workers=0),
                transform=ImageTransform(16, Preprocess(), Augment()),
                tokenizer=tokenizer,
                batch_size=2,
                start_step=0,
                end_step=21,
                rank=rank,
                world_size=2,
                seed=0,
            )
        )
        for rank in range(2)
    ]
    batches = [batch for rank in ranks for batch in rank]
    assert [len(batch.keys) for batch in batches] == [1] * 42
    skips = {skip.position: skip for batch in batches for skip in batch.skipped}
    epoch = [skip for position, skip in skips.items() if position < 41]
    assert Counter(skip.reason for skip in epoch) == REASONS
    assert {skip.key for skip in epoch} == {f"k{index}" for index in BROKEN}
    seen = {key for batch in batches for key in batch.keys}
    assert seen == {f"k{index}" for index in range(41) if index not in BROKEN}


# --- F36: huge -----------------------------------------------------------------------------------


def huge_jpeg() -> bytes:
    data = bytearray(jpeg())
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", 60_000, 60_000)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (png(30_000, 30_000, 8, 2), "900000000"),
        (png(13_000, 13_000, 1, 0), "13000 x 13000"),
        (png(1, 100_000, 8, 2), "1 x 100000"),
        (huge_jpeg(), "60000 x 60000"),
    ],
    ids=["png", "bilevel", "long", "jpeg"],
)
def test_huge_pictures_are_refused_from_their_header(data, size, monkeypatch):
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr(decoding, "decode_jpeg", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(BadSample) as caught:
        decode(data)
    assert caught.value.reason == "image too large"
    assert size in caught.value.detail


def memory_taken(data: bytes, box) -> None:
    """Put the reason, and by how many bytes this process has grown at most, into a box."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        decode(data)
        reason = "none"
    except BadSample as error:
        reason = error.reason
    box.put((reason, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)))


def test_a_bomb_takes_no_memory():
    """20 KB that are 13,000 x 13,000 pixels, and 507 MB as RGB."""
    bomb = png(13_000, 13_000, 1, 0, bytes(13_000 * (1 + 13_000 // 8)))
    assert len(bomb) < 30_000
    context = multiprocessing.get_context("fork")
    box = context.SimpleQueue()
    process = context.Process(target=memory_taken, args=(bomb, box))
    process.start()
    reason, grown = box.get()
    process.join()
    assert reason == "image too large"
    assert grown < 30e6


def test_the_pixel_budget_is_inclusive():
    data = encode(Image.new("RGB", (20, 10)), "PNG")
    assert decode(data, max_pixels=200).shape == (3, 10, 20)
    with pytest.raises(BadSample, match="20 x 10 pixels; at most 199"):
        decode(data, max_pixels=199)


# --- F37: thin -----------------------------------------------------------------------------------


@pytest.mark.parametrize("augment", [None, Augment(flip=0.5, color_jitter=1.0, grayscale=0.5)])
@pytest.mark.parametrize("mode", ["shortest", "squash"])
@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (3, 60_000), (60_000, 3), (2, 2)])
def test_thin_pictures_make_no_large_ones_on_the_way(size, mode, augment, monkeypatch):
    """The width is scaled first: between the two passes lie rows of the old height, new width."""
    data = encode(Image.new("RGB", size, (10, 200, 30)), "PNG")
    resize, largest = torch.nn.functional.interpolate, []

    def watched(pixels, to, **options):
        largest.append(max(pixels.shape[2], to[0]) * to[1])
        return resize(pixels, to, **options)

    monkeypatch.setattr(transforms.F, "interpolate", watched)
    pixels = ImageTransform(224, Preprocess(resize_mode=mode), augment)(data, seed=3)
    assert pixels.shape == (3, 224, 224)
    assert max(largest) <= max(224 * 224 * 8, size[0] * size[1])
    if augment is None:
        assert pixels.flatten(1).unique(dim=1).flatten().tolist() == [10, 200, 30]


@pytest.mark.parametrize(("width", "height"), [(5, 3000), (31, 2500), (3000, 5)])
def test_a_thin_picture_is_squashed_as_pillow_does(width, height):
    image = photo(width, height)
    expected = pixels_of(image.resize((224, 224), Image.Resampling.BICUBIC))
    gap = ImageTransform(224, Preprocess(resize_mode="squash"))(encode(image, "PNG")).int()
    gap = (gap - expected.int()).abs()
    assert gap.max() <= 2 and (gap > 1).float().mean() < 1e-3


# --- F38: colours --------------------------------------------------------------------------------


def test_cmyk_jpeg_keeps_its_colours():
    """Adobe stores CMYK inverted and says so in a marker; without it the values are inverted too.

    Red is no ink of cyan and all of magenta and yellow.
    """
    red = Image.new("CMYK", (32, 24), (0, 255, 255, 0))
    pixels = decode(encode(red, quality=95))
    assert distance(pixels, torch.tensor([255, 0, 0]).view(3, 1, 1).expand(3, 24, 32)) <= 4
    data = encode(photo().convert("CMYK"), quality=95)
    assert b"Adobe" in data
    assert distance(decode(data), pixels_of(opened(data))) <= 2


@pytest.mark.parametrize("transform", [0, 2])
def test_cmyk_and_ycck_jpegs_are_what_pillow_makes_of_them(transform):
    data = bytearray(encode(photo().convert("CMYK"), quality=95))
    data[data.index(b"Adobe") + 11] = transform  # 2: the inks are stored as YCCK
    assert distance(decode(bytes(data)), pixels_of(opened(bytes(data)))) <= 2


def test_16_bit_gray_is_scaled_and_not_cut():
    ramp = np.linspace(0, 65535, 256 * 8).astype(np.uint16).reshape(8, 256)
    image = Image.fromarray(ramp)
    for kind in ("PNG", "TIFF"):
        pixels = decode(encode(image, kind))
        assert len(pixels.unique()) == 256
        expected = torch.from_numpy(np.round(ramp / 257).astype(np.uint8))
        assert torch.equal(pixels[0], expected)
        assert torch.equal(pixels[1], expected)


def test_16_bit_colour_png_is_scaled():
    values = np.linspace(0, 65535, 256).astype(">u2")
    rows = b"\0" + np.stack([values, values[::-1], values], axis=1).tobytes()
    pixels = decode(png(256, 1, 16, 2, rows))
    assert len(pixels[0].unique()) >= 250
    assert distance(pixels[0, 0], torch.from_numpy((values / 257).astype(np.uint8))) <= 1
    assert distance(pixels[1, 0], pixels[0, 0].flip(0)) <= 1


def test_transparent_pixels_lie_on_white():
    rgba = Image.new("RGBA", (3, 1))
    rgba.putdata([(255, 0, 0, 255), (0, 0, 0, 0), (0, 0, 0, 128)])
    expected = torch.tensor([[255, 255, 127], [0, 255, 127], [0, 255, 127]], dtype=torch.uint8)
    assert torch.equal(decode(encode(rgba, "PNG"))[:, 0], expected)
    lossless = encode(rgba, "WEBP", lossless=True, exact=True)
    assert torch.equal(decode(lossless)[:, 0], expected)

    gray_alpha = Image.new("LA", (2, 1))
    gray_alpha.putdata([(100, 255), (100, 0)])
    assert decode(encode(gray_alpha, "PNG"))[:, 0].tolist() == [[100, 255]] * 3

    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 0, 0, 0])
    palette.putdata([0, 1])
    assert decode(encode(palette, "PNG", transparency=1))[:, 0].tolist() == [
        [10, 255],
        [20, 255],
        [30, 255],
    ]
    assert decode(encode(palette, "GIF", transparency=1))[:, 0].tolist() == [
        [10, 255],
        [20, 255],
        [30, 255],
    ]


def test_the_transparent_value_of_a_16_bit_png_is_white():
    image = Image.fromarray(np.array([[0, 300, 65535]], np.uint16))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", transparency=0)
    assert decode(buffer.getvalue())[0].tolist() == [[255, 1, 255]]


def test_bilevel_picture():
    bilevel = Image.new("1", (2, 1))
    bilevel.putdata([0, 1])
    assert decode(encode(bilevel, "PNG"))[:, 0].tolist() == [[0, 255]] * 3


def test_values_without_a_fixed_range_are_refused():
    for array in (np.ones((3, 4), np.float32), np.full((3, 4), 70_000, np.int32)):
        with pytest.raises(BadSample, match="without a fixed range"):
            decode(encode(Image.fromarray(array), "TIFF"))


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_taken(kind):
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert opened(data).n_frames == 3
    assert decode(data)[:, 0, 0].tolist() == [255, 0, 0]


# --- F39: EXIF -----------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(1, 9))
def test_training_evaluation_and_files_in_memory_are_turned_alike(orientation):
    """Each way to a picture; where the red corner lies is known from EXIF's own table."""
    corner = [(0, 0), (0, 1), (1, 1), (1, 0)][(orientation - 1) % 4]
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.new("RGB", (256, 256), "white")
    image.paste((255, 0, 0), (0, 0, 128, 128))
    data = encode(image, quality=95, exif=exif)
    whole = Augment(scale=[1.0, 1.0], ratio=[1.0, 1.0])
    evaluated = ImageTransform(32, Preprocess())
    pictures = {
        "train": ImageTransform(100, Preprocess(), whole)(data, seed=0),
        "train, decoded at a part": ImageTransform(32, Preprocess(), whole)(data, seed=0),
        "evaluation": evaluated(data),
        "in memory": evaluated.apply(from_pil(opened(data))),
    }
    for name, pixels in pictures.items():
        rows, columns = (torch.tensor([side // 4, side * 3 // 4]) for side in pixels.shape[1:])
        red = pixels[1][rows][:, columns] < 100
        assert red.sum() == 1 and red[corner], name


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(photo(23, 17), kind, exif=exif)
    upright = ImageOps.exif_transpose(opened(data))
    pixels = decode(data)
    assert distance(pixels, pixels_of(upright)) <= 2
    assert is_channel_last(pixels)
    assert torch.equal(from_pil(opened(data)), pixels_of(upright))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_broken_exif_is_ignored(kind):
    rng = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    sound = exif.tobytes()
    for _ in range(20):
        broken = bytearray(sound)
        for _ in range(4):
            broken[rng.integers(6, len(broken))] = rng.integers(256)
        broken = bytes(broken[: rng.integers(6, len(broken) + 1)])
        assert sorted(decode(encode(photo(23, 17), kind, exif=broken)).shape[1:]) == [17, 23]
    for junk in (b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"junk" * 50):
        assert decode(encode(photo(23, 17), kind, exif=junk)).shape == (3, 17, 23)
