import pytest
import torch
from made_data import encode, jpeg, photo
from PIL import Image
from pixels import distance, is_channel_last, opened, pixels_of, psnr

from multimodal.data import decode as decoding
from multimodal.data.decode import decode, from_pil
from multimodal.data.source import BadSample


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


# --- decoding at a part of the size --------------------------------------------------------------


@pytest.mark.parametrize(
    ("least", "part"),
    [(None, 1), (151, 1), (150, 2), (76, 2), (75, 4), (38, 4), (37, 8), (1, 8)],
)
def test_a_jpeg_is_shrunk_only_as_far_as_its_shorter_side_allows(least, part):
    data = encode(photo(400, 301), quality=90)
    pixels = decode(data, least=least)
    assert pixels.shape == (3, -(-301 // part), -(-400 // part))
    assert is_channel_last(pixels)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_shrunk_jpeg_is_upright(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.new("RGB", (160, 96), "white")
    image.paste((200, 0, 0), (0, 0, 80, 48))
    data = encode(image, quality=95, exif=exif)
    small, whole = decode(data, least=40), decode(data)
    assert small.shape[1:] == (whole.shape[1] // 2, whole.shape[2] // 2)
    blocks = torch.nn.functional.avg_pool2d(whole.float(), 2)
    assert psnr(small, blocks) > 35


def test_a_shrunk_jpeg_is_the_mean_of_its_pixels():
    """libjpeg's smaller inverse DCT comes near a box filter; here against the filter itself."""
    data = encode(photo(640, 480), quality=95, subsampling=0)
    small = decode(data, least=240)
    boxed = torch.nn.functional.avg_pool2d(pixels_of(opened(data)).float(), 2)
    assert small.shape == (3, 240, 320)
    assert psnr(small, boxed) > 40


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF", "BMP"])
def test_other_formats_are_never_shrunk(kind):
    assert decode(encode(photo(), kind), least=2).shape == (3, 41, 53)


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_shrunk_gray_and_cmyk_jpegs_keep_their_colours(mode):
    image = Image.new("RGB", (64, 48), (200, 200, 200) if mode == "L" else (255, 0, 0))
    data = encode(image.convert(mode), quality=95)
    assert distance(decode(data, least=10), decode(data)[:, ::4, ::4]) <= 4


# --- libraries -----------------------------------------------------------------------------------


def test_without_the_decoder_of_torchvision_the_pixels_are_the_same(monkeypatch):
    data = [jpeg(seed) for seed in range(3)]
    before = [decode(each) for each in data]
    monkeypatch.setattr(decoding, "decode_jpeg", None)
    for each, pixels in zip(data, before, strict=True):
        assert distance(decode(each), pixels) <= 2


def test_a_format_that_starts_programs_is_not_opened(monkeypatch):
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    assert opened(eps).format == "EPS"
    with pytest.raises(BadSample, match="not an image"):
        decode(eps)


def test_a_picture_in_memory_and_its_file_are_one():
    image = photo()
    assert torch.equal(from_pil(image), decode(encode(image, "PNG")))
