import random
from collections import Counter

import numpy as np
import pytest
import torch
from made_data import encode, jpeg, photo
from PIL import Image
from pixels import distance, opened, pixels_of, psnr
from torchvision.transforms import InterpolationMode
from torchvision.transforms import v2 as torchvision
from torchvision.transforms.v2 import functional as TF

from multimodal.config import Augment, Preprocess
from multimodal.data import transforms
from multimodal.data.decode import decode
from multimodal.data.transforms import ImageTransform, change_colors, random_box

# --- preprocessing -------------------------------------------------------------------------------

SIZES = [(64, 64), (80, 120), (200, 96), (51, 37), (33, 32), (17, 40)]


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_preprocessing_is_torchvision_pixel_for_pixel(width, height, interpolation):
    filter_ = InterpolationMode(interpolation)
    pixels = decode(encode(photo(width, height), "PNG"))
    shortest = torchvision.Compose([torchvision.Resize(32, filter_), torchvision.CenterCrop(32)])
    transform = ImageTransform(32, Preprocess(interpolation=interpolation))
    assert torch.equal(transform.apply(pixels), shortest(pixels))
    squash = ImageTransform(32, Preprocess(interpolation=interpolation, resize_mode="squash"))
    assert torch.equal(squash.apply(pixels), torchvision.Resize((32, 32), filter_)(pixels))


FAMILIES = {
    "shortest-bicubic": ("bicubic", "shortest"),
    "shortest-bilinear": ("bilinear", "shortest"),
    "squash-bicubic": ("bicubic", "squash"),
    "squash-bilinear": ("bilinear", "squash"),
}
"""The geometry of every family: CLIP; MobileCLIP; SigLIP; PE and CLIPA."""
PHOTOS = [(500, 375), (333, 500), (640, 427), (224, 224), (512, 256), (180, 240), (100, 90)]


def assert_one_gray_level(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Equal to one grey level, but for one value in 10,000 that may be two away.

    Both round to uint8 between the two passes. PyTorch always scales the width first, Pillow 13
    whatever it finds cheaper, and after another order two roundings may add up.
    """
    gap = (ours.int() - theirs.int()).abs()
    assert gap.max() <= 2
    assert (gap > 1).float().mean() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("width", "height"), PHOTOS)
def test_preprocessing_is_torchvision_on_pillow_to_one_gray_level(family, width, height):
    interpolation, mode = FAMILIES[family]
    image, filter_ = photo(width, height), InterpolationMode(interpolation)
    shortest = [torchvision.Resize(224, filter_), torchvision.CenterCrop(224)]
    squash = [torchvision.Resize((224, 224), filter_)]
    theirs = torchvision.Compose(shortest if mode == "shortest" else squash)
    ours = ImageTransform(224, Preprocess(interpolation=interpolation, resize_mode=mode))
    assert_one_gray_level(ours(encode(image, "PNG")), pixels_of(theirs(image)))


@pytest.mark.parametrize("backend", ["", "Pil"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("width", "height"), [(500, 375), (333, 500), (180, 240)])
def test_preprocessing_is_that_of_transformers_to_one_gray_level(backend, family, width, height):
    import transformers

    interpolation, mode = FAMILIES[family]
    image = photo(width, height)
    clip = {"size": {"shortest_edge": 224}, "crop_size": 224}
    siglip = {"size": {"height": 224, "width": 224}}
    name = ("CLIP" if mode == "shortest" else "Siglip") + f"ImageProcessor{backend}"
    if not hasattr(transformers, name):
        pytest.skip(f"no {name} before transformers 5")
    processor = getattr(transformers, name)(
        **(clip if mode == "shortest" else siglip),
        resample={"bilinear": 2, "bicubic": 3}[interpolation],
        do_rescale=False,
        do_normalize=False,
    )
    expected = processor(image, return_tensors="pt")["pixel_values"][0]
    ours = ImageTransform(224, Preprocess(interpolation=interpolation, resize_mode=mode))
    assert_one_gray_level(ours(encode(image, "PNG")), expected)


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


def crops_of_both(height, width, augment, draws):
    """The crops that ours and torchvision's draw, each as (top, left, height, width)."""
    theirs = torchvision.RandomResizedCrop(32, scale=augment.scale, ratio=augment.ratio)
    picture = torch.empty(3, height, width)
    found = [theirs.make_params([picture]) for _ in range(draws)]
    expected = [(box["top"], box["left"], box["height"], box["width"]) for box in found]
    rng = random.Random(0)
    return [tuple(random_box(height, width, augment, rng)) for _ in range(draws)], expected


@pytest.mark.parametrize("scale", [[0.9, 1.0], [0.08, 1.0]])
@pytest.mark.parametrize(("height", "width"), [(211, 211), (120, 331)])
def test_crops_are_distributed_as_those_of_torchvision(scale, height, width):
    """Two-sample Kolmogorov-Smirnov, of areas, aspect ratios and places.

    With 2 x 1500 draws the distance is below 0.071 in 99.9 % of cases where the two agree.
    """
    ours, theirs = crops_of_both(height, width, Augment(scale=scale), draws=1500)
    views = {
        "area": lambda top, left, height, width: height * width,
        "ratio": lambda top, left, height, width: width / height,
        "top": lambda top, left, height, width: top,
        "left": lambda top, left, height, width: left,
    }
    for name, view in views.items():
        a, b = (np.sort([view(*box) for box in boxes]) for boxes in (ours, theirs))
        grid = np.concatenate([a, b])
        gap = np.abs(
            np.searchsorted(a, grid, "right") / len(a) - np.searchsorted(b, grid, "right") / len(b)
        )
        assert gap.max() < 0.071, name


@pytest.mark.parametrize(("height", "width"), [(1, 5000), (5000, 1), (10, 100), (97, 13)])
@pytest.mark.parametrize("ratio", [[0.75, 4 / 3], [0.5, 0.8], [1.25, 2.0]])
def test_a_picture_too_long_for_any_crop_is_cut_as_torchvision_cuts_it(height, width, ratio):
    ours, theirs = crops_of_both(height, width, Augment(scale=[1.0, 1.0], ratio=ratio), draws=3)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == other


def test_flips_are_off_until_asked_for_and_then_as_frequent_as_asked():
    assert Augment().flip == Augment().color_jitter == Augment().grayscale == 0
    pixels = decode(jpeg())
    augment = Augment(scale=[1.0, 1.0], ratio=[53 / 41, 53 / 41], flip=0.3, grayscale=0.2)
    transform = ImageTransform(8, Preprocess(), augment)
    plain = ImageTransform(8, Preprocess(resize_mode="squash")).apply(pixels)
    seen = Counter()
    for seed in range(400):
        changed = transform.apply(pixels, seed)
        gray = torch.equal(changed[0], changed[2])
        straight = changed if not gray else changed[:1].expand(3, -1, -1)
        to_gray = TF.rgb_to_grayscale(plain, 3) if gray else plain
        seen["flip"] += distance(straight, to_gray) > 5
        seen["gray"] += gray
    # Within four standard deviations of a binomial.
    assert abs(seen["flip"] - 120) < 37 and abs(seen["gray"] - 80) < 32


@pytest.mark.parametrize("strength", [0.2, 1.5])
def test_colour_factors_have_the_range_of_torchvision(strength):
    """ColorJitter draws each factor from [max(0, 1 - s), 1 + s], and the hue from [-h, h]."""
    theirs = torchvision.ColorJitter(strength, strength, strength, min(0.5, strength / 4))
    drawn = Recorder()
    change_colors(decode(jpeg()), strength, drawn, gray=False)
    expected = [theirs.brightness, theirs.contrast, theirs.saturation, theirs.hue]
    assert drawn.ranges == [pytest.approx(each) for each in expected]


class Recorder(random.Random):
    """Remembers what it was asked."""

    def __init__(self):
        super().__init__(0)
        self.ranges = []

    def uniform(self, low, high):
        self.ranges.append((low, high))
        return super().uniform(low, high)


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


# --- decoding at a part of the size --------------------------------------------------------------


def crop_by_pillow(data: bytes, box, part: int, size: int) -> torch.Tensor:
    """The crop, given in pixels of a picture 1 / `part` as large, resized by Pillow from the whole.

    Pillow 13's resize of the crop alone is the reference that OpenCLIP's loader computes.
    """
    top, left, height, width = (side * part for side in box)
    image = opened(data).convert("RGB").crop((left, top, left + width, top + height))
    return pixels_of(image.resize((size, size), Image.Resampling.BICUBIC))


def test_scaled_decoding_is_plain_pillow_to_50_db_and_unscaled_to_65():
    """Of the largest part of a grey level squared; the pictures are drawn, with grain and edges."""
    augment = Augment()
    for (width, height), part, least in (((500, 375), 1, 65), ((1600, 1200), 2, 50)):
        transform = ImageTransform(224, Preprocess(), augment)
        ours, theirs = [], []
        for seed in range(3):
            data = encode(photo(width, height, seed), quality=90)
            box = random_box(height // part, width // part, augment, random.Random(seed))
            ours.append(transform(data, seed))
            theirs.append(crop_by_pillow(data, box, part, 224))
        assert psnr(torch.stack(ours), torch.stack(theirs)) > least


@pytest.mark.parametrize("augment", [Augment(), Augment(scale=[0.2, 0.5], ratio=[0.5, 1.5])])
@pytest.mark.parametrize("size", [(400, 300), (300, 400), (512, 128), (131, 129)])
def test_a_crop_is_never_decoded_below_twice_the_result(augment, size, monkeypatch):
    decoded, boxes = [], []
    monkeypatch.setattr(
        transforms, "decode", lambda *a, **k: decoded.append(decode(*a, **k)) or decoded[-1]
    )
    monkeypatch.setattr(
        transforms, "random_box", lambda *a: boxes.append(random_box(*a)) or boxes[-1]
    )
    transform = ImageTransform(16, Preprocess(), augment)
    data = encode(photo(*size))
    for seed in range(40):
        transform(data, seed)
    assert len(boxes) == 40
    for pixels, box in zip(decoded, boxes, strict=True):
        scaled = pixels.shape[1] < size[1]
        assert not scaled or min(box.height, box.width) >= 32
    assert any(pixels.shape[1] < size[1] for pixels in decoded) or augment.scale[0] < 0.9


def test_preprocessing_never_shrinks_while_decoding(monkeypatch):
    """Evaluation must not depend on the kind of file: it is exact, training need not be."""
    shapes = []

    def watched(data, **options):
        shapes.append(tuple(decode(data, **options).shape))
        return decode(data, **options)

    monkeypatch.setattr(transforms, "decode", watched)
    data = encode(photo(640, 480))
    for augment in (None, Augment()):
        ImageTransform(32, Preprocess(), augment)(data, seed=0)
    assert shapes == [(3, 480, 640), (3, 120, 160)]
