import io
import random
import struct
import time
import zlib

import numpy as np
import pytest
import torch
from made_data import encode, jpeg, photo
from PIL import Image, ImageOps
from torchvision.transforms import InterpolationMode
from torchvision.transforms import v2 as transforms
from torchvision.transforms.v2 import functional as TF

from multimodal.config import Augment, Preprocess
from multimodal.data import images
from multimodal.data.images import ImageTransform, change_colors, decode, from_pil, random_box
from multimodal.data.source import BadSample


def pixels_of(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


def distance(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.int() - b.int()).abs().max())


def is_channel_last(pixels: torch.Tensor) -> bool:
    return pixels[None].is_contiguous(memory_format=torch.channels_last)


# --- decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("subsampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_is_what_pillow_makes_of_it(subsampling, progressive):
    data = encode(photo(61, 43), quality=88, subsampling=subsampling, progressive=progressive)
    pixels = decode(data)
    assert pixels.dtype == torch.uint8
    assert pixels.shape == (3, 43, 61)
    assert is_channel_last(pixels)
    # Zero here; the two libraries may be built with versions of libjpeg-turbo that round apart.
    assert distance(pixels, pixels_of(opened(data))) <= 2


def test_gray_jpeg_has_three_equal_channels():
    pixels = decode(encode(photo().convert("L")))
    assert torch.equal(pixels[0], pixels[1])
    assert torch.equal(pixels[0], pixels[2])


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF"])
def test_lossless_formats_keep_every_pixel(kind):
    image = photo()
    options = {"lossless": True} if kind == "WEBP" else {}
    pixels = decode(encode(image, kind, **options))
    assert torch.equal(pixels, pixels_of(image))
    assert is_channel_last(pixels)


def without_segment(data: bytes, marker: int) -> bytes:
    start = data.index(bytes([0xFF, marker]))
    (length,) = struct.unpack(">H", data[start + 2 : start + 4])
    return data[:start] + data[start + 2 + length :]


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


def png_chunk(name: bytes, body: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(name + body))
    return struct.pack(">I", len(body)) + name + body + check


def png(width: int, height: int, depth: int, colour: int, rows: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


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


def test_bilevel_picture():
    bilevel = Image.new("1", (2, 1))
    bilevel.putdata([0, 1])
    assert decode(encode(bilevel, "PNG"))[:, 0].tolist() == [[0, 255]] * 3


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_taken(kind):
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert opened(data).n_frames == 3
    assert decode(data)[:, 0, 0].tolist() == [255, 0, 0]


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


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty image"),
        (b"this is text, named .jpg", "not an image"),
        (b"<html><body>not found</body></html>", "not an image"),
        (jpeg()[: len(jpeg()) // 2], "damaged image"),
        (jpeg()[:20], "not an image"),
        (encode(photo(), "JPEG", progressive=True)[:900], "damaged image"),
        (encode(photo(), "PNG")[:500], "damaged image"),
        (encode(photo(), "WEBP")[:500], "damaged image"),
        (encode(photo(), "GIF")[:-300], "damaged image"),
    ],
)
def test_damaged_pictures_are_bad_samples(data, reason):
    with pytest.raises(BadSample) as caught:
        decode(data)
    assert caught.value.reason == reason


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
        (huge_jpeg(), "60000 x 60000"),
    ],
)
def test_huge_pictures_are_refused_from_their_header(data, size, monkeypatch):
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("decoded"))
    monkeypatch.setattr(images, "decode_jpeg", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(BadSample) as caught:
        decode(data)
    assert caught.value.reason == "image too large"
    assert size in caught.value.detail


def test_the_pixel_budget_is_inclusive():
    data = encode(Image.new("RGB", (20, 10)), "PNG")
    assert decode(data, max_pixels=200).shape == (3, 10, 20)
    with pytest.raises(BadSample, match="20 x 10 pixels; at most 199"):
        decode(data, max_pixels=199)


def test_values_without_a_fixed_range_are_refused():
    for array in (np.ones((3, 4), np.float32), np.full((3, 4), 70_000, np.int32)):
        with pytest.raises(BadSample, match="without a fixed range"):
            decode(encode(Image.fromarray(array), "TIFF"))


# --- preprocessing -------------------------------------------------------------------------------

SIZES = [(64, 64), (80, 120), (200, 96), (51, 37), (33, 32), (17, 40)]


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_preprocessing_is_torchvision_pixel_for_pixel(width, height, interpolation):
    filter_ = InterpolationMode(interpolation)
    pixels = decode(encode(photo(width, height), "PNG"))
    shortest = transforms.Compose([transforms.Resize(32, filter_), transforms.CenterCrop(32)])
    transform = ImageTransform(32, Preprocess(interpolation=interpolation))
    assert torch.equal(transform.apply(pixels), shortest(pixels))
    squash = ImageTransform(32, Preprocess(interpolation=interpolation, resize_mode="squash"))
    assert torch.equal(squash.apply(pixels), transforms.Resize((32, 32), filter_)(pixels))


@pytest.mark.parametrize("size", [(64, 64), (80, 120), (200, 96)])
def test_preprocessing_is_pillow_to_one_gray_level(size):
    """Both resize in two passes of rounded uint8; they round the filter's weights differently."""
    image = photo(*size)
    transform = ImageTransform(32, Preprocess())
    short = min(size)
    scaled = image.resize([32 * side // short for side in size], Image.Resampling.BICUBIC)
    left, top = (scaled.width - 32) // 2, (scaled.height - 32) // 2
    expected = pixels_of(scaled.crop((left, top, left + 32, top + 32)))
    assert distance(transform(encode(image, "PNG")), expected) <= 1


def test_preprocessing_is_that_of_transformers():
    from transformers import CLIPImageProcessor

    image = photo(80, 120)
    processor = CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size=32, do_rescale=False, do_normalize=False
    )
    expected = processor(image, return_tensors="pt")["pixel_values"][0]
    assert distance(ImageTransform(32, Preprocess())(encode(image, "PNG")), expected) <= 1


@pytest.mark.parametrize("augment", [None, Augment(flip=0.5, color_jitter=1.0, grayscale=0.5)])
@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (3, 9000), (2, 2)])
def test_extreme_shapes_stay_cheap(size, augment, monkeypatch):
    data = encode(Image.new("RGB", size, (10, 200, 30)), "PNG")
    resize, largest = torch.nn.functional.interpolate, []

    def watched(pixels, to, **options):
        largest.append(to[0] * to[1])
        return resize(pixels, to, **options)

    monkeypatch.setattr(images.F, "interpolate", watched)
    for mode in ("shortest", "squash"):
        transform = ImageTransform(224, Preprocess(resize_mode=mode), augment)
        start = time.perf_counter()
        pixels = transform(data, seed=3)
        assert time.perf_counter() - start < 0.2
        assert pixels.shape == (3, 224, 224)
    assert max(largest) <= 224 * 224 * 8
    if augment is None:
        assert pixels.flatten(1).unique(dim=1).flatten().tolist() == [10, 200, 30]


def test_a_long_picture_keeps_its_middle():
    """Cutting it first must not move the part that the centre crop takes."""
    image = Image.new("RGB", (31 * 12, 31), "white")
    image.paste((0, 0, 255), (31 * 5, 0, 31 * 7, 31))
    pixels = ImageTransform(31, Preprocess()).apply(pixels_of(image))
    assert torch.equal(pixels, pixels_of(Image.new("RGB", (31, 31), (0, 0, 255))))


# --- random changes ------------------------------------------------------------------------------

STRONG = Augment(
    scale=[0.3, 0.9], flip=0.5, color_jitter=0.7, color_strength=0.4, grayscale=0.3
)  # fmt: skip


def test_a_seed_decides_and_no_global_state_is_touched():
    transform = ImageTransform(29, Preprocess(), STRONG)
    data = jpeg()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    first = transform(data, seed=5)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    torch.manual_seed(2), random.seed(2)
    assert torch.equal(transform(data, seed=5), first)
    assert len({transform(data, seed=seed).numpy().tobytes() for seed in range(30)}) == 30


def test_augmenting_without_a_seed_is_refused():
    with pytest.raises(ValueError, match="needs a seed"):
        ImageTransform(29, Preprocess(), STRONG)(jpeg())


def test_crop_boxes_have_the_asked_area_and_ratio():
    augment = Augment(scale=[0.3, 0.6], ratio=[0.5, 1.5])
    rng = random.Random(0)
    boxes = [random_box(397, 503, augment, rng) for _ in range(500)]
    for box in boxes:
        assert 0 <= box.top <= 397 - box.height
        assert 0 <= box.left <= 503 - box.width
        assert 0.295 < box.height * box.width / (397 * 503) < 0.605
        assert 0.49 < box.width / box.height < 1.53
    assert min(box.left for box in boxes) < 20
    assert max(box.left + box.width for box in boxes) > 483


@pytest.mark.parametrize(("height", "width"), [(1, 5000), (5000, 1), (10, 100)])
def test_crop_of_a_long_picture_falls_back_to_its_middle(height, width):
    box = random_box(height, width, Augment(), random.Random(0))
    assert max(box.height, box.width) <= 2 * min(height, width)
    assert abs(2 * box.left + box.width - width) <= 1
    assert abs(2 * box.top + box.height - height) <= 1


def test_without_chance_of_change_the_crop_alone_is_made():
    pixels = decode(jpeg())
    augment = Augment(scale=[1.0, 1.0], ratio=[53 / 41, 53 / 41])
    whole = ImageTransform(29, Preprocess(), augment).apply(pixels, seed=1)
    squash = ImageTransform(29, Preprocess(resize_mode="squash")).apply(pixels)
    assert torch.equal(whole, squash)
    flipped = ImageTransform(29, Preprocess(), augment.model_copy(update={"flip": 1.0}))
    assert torch.equal(flipped.apply(pixels, seed=1), whole.flip(-1))


class Fixed:
    """Stands for a random generator whose values are known."""

    def __init__(self, *values: float):
        self.values = list(values)

    def uniform(self, low: float, high: float) -> float:
        return self.values.pop(0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1.0, 1.0, 1.0, 0.0), lambda x: x),
        ((0.8, 1.0, 1.0, 0.0), lambda x: TF.adjust_brightness(x, 0.8)),
        ((1.0, 0.7, 1.0, 0.0), lambda x: TF.adjust_contrast(x, 0.7)),
        ((1.0, 1.0, 0.6, 0.0), lambda x: TF.adjust_saturation(x, 0.6)),
        (
            (0.9, 0.8, 0.7, 0.0),
            lambda x: TF.adjust_saturation(
                TF.adjust_contrast(TF.adjust_brightness(x, 0.9), 0.8), 0.7
            ),
        ),
    ],
)
def test_colour_changes_are_those_of_torchvision(values, expected):
    """To rounding: torchvision cuts fractions after each of up to three steps."""
    pixels = decode(encode(photo(), "PNG"))
    changed = change_colors(pixels, 0.4, Fixed(*values), gray=False)
    assert distance(changed, expected(pixels)) <= 3


def test_grayscale_is_that_of_torchvision():
    pixels = decode(encode(photo(), "PNG"))
    changed = change_colors(pixels, 0.0, random.Random(0), gray=True)
    assert distance(changed, TF.rgb_to_grayscale(pixels, 3)) <= 1


def test_hue_turns_colours_about_gray():
    colours = torch.tensor([[90, 90], [90, 160], [90, 120]], dtype=torch.uint8).view(3, 1, 2)
    third = change_colors(colours, 0.4, Fixed(1.0, 1.0, 1.0, 1 / 3), gray=False)
    assert third[:, 0, 0].tolist() == [90, 90, 90]
    luma = torch.tensor([0.299, 0.587, 0.114])
    assert abs(luma @ third[:, 0, 1].float() - luma @ colours[:, 0, 1].float()) < 1
    assert distance(third[:, 0, 1], colours[:, 0, 1]) > 20
    back = change_colors(third, 0.4, Fixed(1.0, 1.0, 1.0, -1 / 3), gray=False)
    assert distance(back, colours) <= 2


def test_the_transparent_value_of_a_16_bit_png_is_white():
    image = Image.fromarray(np.array([[0, 300, 65535]], np.uint16))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", transparency=0)
    assert decode(buffer.getvalue())[0].tolist() == [[255, 1, 255]]
