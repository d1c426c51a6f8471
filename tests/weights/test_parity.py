"""The comparison of a model with itself in another library."""

import math
from dataclasses import replace

import pytest
import torch
from convertible import trained_clip
from PIL import Image

from multimodal import config
from multimodal.data.decode import from_pil
from multimodal.data.transforms import ImageTransform
from multimodal.models.two_tower import normalise
from multimodal.weights import parity_inputs as inputs
from multimodal.weights.parity import Row, Theirs, compare, refuse_failed

FILTERS = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


@pytest.fixture(scope="module")
def ours():
    return trained_clip()


@pytest.fixture(scope="module")
def theirs(ours):
    """A library that is ourselves."""
    section = ours.config.preprocess

    def pixels(images):
        made = [ours.transform.apply(from_pil(image)) for image in images]
        return normalise(torch.stack(made), section.mean, section.std)

    def tokens(texts):
        found = ours.tokenizer.encode(texts)
        pairs = zip(found.tokens.tolist(), found.lengths.tolist(), strict=True)
        return [row[:length] for row, length in pairs]

    return Theirs(
        library="ourselves 1.0",
        image=ours.model.encode_image,
        text=ours.model.encode_text,
        pixels=pixels,
        tokens=tokens,
        embed_images=ours.encode_image,
        embed_texts=ours.encode_text,
        scores=lambda image, labels: ours.classify([image], labels, ["{}"])[0].tolist(),
        logit_scale=ours.logit_scale(),
        unescapes=False,
    )


def failed(rows):
    return " / ".join(row.what for row in rows if not row.passed)


def test_a_model_equals_itself_in_everything(ours, theirs):
    rows = compare(ours, theirs)
    assert not failed(rows) and all(row.equal for row in rows)
    shown = " / ".join(row.what for row in rows)
    for kind in (inputs.PICTURES, inputs.EXACT, inputs.OFF_CENTRE, inputs.UNUSUAL):
        assert f"pixels of {sum(1 for _ in _made(ours, kind))} {kind}" in shown
    for kind in inputs.texts():
        assert kind in shown
    for what in ("random pixels", "random tokens", "less padded", "logit scale", "scores"):
        assert what in shown


def _made(ours, kind):
    pictures = inputs.pictures(ours.transform.size)
    return inputs.by_kind(pictures, ours.transform.size, ours.config.preprocess)[kind]


WRONG = {
    "image": (lambda t: lambda pixels: t.image(pixels) + 1e-3, "image features of random pixels"),
    "text": (
        lambda t: lambda tokens, lengths: t.text(tokens, lengths.clamp(max=9)),
        "text features of random tokens",
    ),
    "pixels": (lambda t: lambda images: t.pixels(images).flip(-1), "pixels of"),
    "tokens": (
        lambda t: lambda texts: [[*row[:-1], 7] for row in t.tokens(texts)],
        f"token ids of {len(inputs.texts()[inputs.TEXTS])} texts",
    ),
    "embed_images": (lambda t: lambda images: t.embed_images(images).flip(0), "own pixels"),
    "embed_texts": (lambda t: lambda texts: t.embed_texts(texts).flip(0), "own tokens"),
    "scores": (lambda t: lambda image, labels: t.scores(image, labels)[::-1], "zero-shot scores"),
    "logit_scale": (lambda t: t.logit_scale * 1.001, "logit scale"),
    "logit_bias": (lambda t: -1.0, "logit bias"),
}


@pytest.mark.parametrize("part", WRONG)
def test_each_part_that_is_wrong_is_found(ours, theirs, part):
    change, what = WRONG[part]
    rows = compare(ours, replace(theirs, **{part: change(theirs)}))
    assert what in failed(rows)
    alone = {name: None for name in WRONG if name != part}
    with_nothing_else = compare(ours, replace(theirs, **{part: change(theirs)} | alone))
    assert part == "logit_bias" or what in failed(with_nothing_else)


def test_features_that_are_no_numbers_or_too_few_fail(ours, theirs):
    nothing = compare(
        ours, replace(theirs, image=lambda pixels: pixels.flatten(1)[:, :17] * math.nan)
    )
    assert "image features of random pixels" in failed(nothing)
    assert next(row for row in nothing if not row.passed).as_dict()["difference"] is None
    assert "image features" in failed(compare(ours, replace(theirs, image=lambda p: p.flatten(1))))
    assert "pixels of" in failed(compare(ours, replace(theirs, pixels=lambda i: torch.ones(1, 3))))


@pytest.mark.parametrize("change", [{"interpolation": "bilinear"}, {"resize_mode": "squash"}])
def test_another_preparation_is_found_by_the_pixels_alone(ours, theirs, change):
    transform = ImageTransform(21, ours.config.preprocess.model_copy(update=change))
    other = replace(ours, transform=transform)
    nothing = dict.fromkeys(WRONG)

    def pixels(images):
        made = torch.stack([other.transform.apply(from_pil(image)) for image in images])
        return normalise(made, [0.5] * 3, [0.5] * 3)

    rows = compare(ours, replace(theirs, **nothing | {"pixels": pixels}))
    assert f"{inputs.PICTURES}, in grey levels" in failed(rows)
    assert all(row.equal for row in rows if inputs.EXACT in row.what)


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_pixels_that_pillow_has_scaled_pass(ours, theirs, mode):
    """transformers 4 scales with Pillow."""
    preprocess = ours.config.preprocess.model_copy(update={"interpolation": mode})
    section = ours.config.model_copy(update={"preprocess": preprocess})
    own = replace(ours, config=section, transform=ImageTransform(21, preprocess))

    def pixels(images):
        scaled = [image.convert("RGB").resize((21, 21), FILTERS[mode]) for image in images]
        return normalise(torch.stack([from_pil(image) for image in scaled]), [0.5] * 3, [0.5] * 3)

    square = [image for image in inputs.pictures(21)[:-1] if image.width == image.height]
    rows = compare(own, replace(theirs, **dict.fromkeys(WRONG) | {"pixels": pixels}), square)
    assert len(rows) == 2 and not failed(rows)


def test_two_pieces_that_changed_places_are_found_wherever_they_stand(ours, theirs):
    texts = inputs.vocabulary_texts(ours.tokenizer)
    assert max(ours.tokenizer.count(texts)) <= ours.tokenizer.context_length
    used = sorted({i for row in theirs.tokens(texts) for i in row})
    assert len(used) > 26
    for first, second in zip(used[2:-2:5], used[3:-1:5], strict=False):
        swap = {first: second, second: first}
        swapped = replace(
            theirs,
            tokens=lambda texts, swap=swap: [
                [swap.get(i, i) for i in row] for row in theirs.tokens(texts)
            ],
        )
        assert "texts of all pieces" in failed(compare(ours, swapped))


def test_a_known_difference_excuses_its_kind_of_input_only(ours, theirs):
    def tokens(texts):
        return [
            [*row[:-1], 7] if "&" in t else row for t, row in zip(texts, right(texts), strict=True)
        ]

    right = theirs.tokens
    known = {inputs.ENTITIES: "they unescape", inputs.MISREAD: "they mend"}
    rows = compare(ours, replace(theirs, tokens=tokens, known=known, unescapes=True))
    assert failed(rows).startswith("token ids of") and "HTML" not in failed(rows)
    excused = next(row for row in rows if row.reason == "they unescape" and not row.equal)
    assert excused.as_dict()["known_difference"] == "they unescape" and "known" in excused.line()
    assert "known_difference" not in next(r for r in rows if r.reason == "they mend").as_dict()
    same = compare(ours, replace(theirs, tokens=tokens, known=known, unescapes=False))
    assert "HTML" in failed(same), "both leave them as they are, so nothing is to differ"


def test_what_a_library_lacks_is_not_compared(ours, theirs):
    image_only = Theirs(library="pictures 1", image=theirs.image)
    rows = compare(ours, image_only)
    assert rows and all("image features" in row.what for row in rows)
    assert not compare(ours, Theirs(library="nothing 1"))


def test_texts_are_padded_for_a_library_that_wants_the_whole_context(ours, theirs):
    widths = []

    def text(tokens, lengths):
        widths.append(tokens.shape[1])
        return theirs.text(tokens, lengths)

    assert not failed(compare(ours, replace(theirs, text=text, any_length=False)))
    assert set(widths) == {ours.tokenizer.context_length}


def test_given_pictures_take_the_place_of_made_ones(ours, theirs):
    seen = []
    picture = Image.new("RGB", (50, 30), "red")
    rows = compare(
        ours, replace(theirs, pixels=lambda i: seen.extend(i) or theirs.pixels(i)), [picture]
    )
    assert not failed(rows) and picture in seen
    assert {image.size for image in seen} == {(50, 30), (21, 21)}


def test_no_module_is_left_in_another_mode(ours, theirs):
    ours.model.image.train()
    compare(ours, theirs)
    assert ours.model.image.training and not ours.model.text.training
    ours.model.eval()


def test_random_texts_have_one_end_token_and_padding_behind_only():
    tokens, lengths = inputs.random_texts(context_length=9, vocab_size=11, eos_id=6, pad_id=3)
    assert lengths.tolist() == [9, 4, 1]
    for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True):
        assert row.index(6) == length - 1 and row.count(6) == 1
        assert 3 not in row[:length] and set(row[length:]) <= {3}
    with pytest.raises(ValueError, match="eos_token_id=11 is outside the 11 tokens"):
        inputs.random_texts(context_length=9, vocab_size=11, eos_id=11, pad_id=3)


@pytest.mark.parametrize("mode", ["shortest", "squash"])
def test_pictures_are_sorted_by_what_libraries_do_differently(mode):
    pictures = {
        inputs.EXACT: Image.new("RGB", (20, 20)),
        inputs.PICTURES: Image.new("L", (60, 40)),
        inputs.OFF_CENTRE: Image.new("RGB", (23, 20)),
    }
    unusual = [Image.new("RGBA", (20, 20)), Image.new("I;16", (20, 20)), Image.new("RGB", (99, 9))]
    turned = Image.new("RGB", (40, 20))
    turned.getexif()[274] = 6
    kinds = inputs.by_kind(
        [*pictures.values(), *unusual, turned], 20, config.Preprocess(resize_mode=mode)
    )
    assert kinds[inputs.UNUSUAL] == [*unusual, turned]
    assert kinds[inputs.EXACT] == [pictures[inputs.EXACT]]
    off_centre = inputs.OFF_CENTRE if mode == "shortest" else inputs.PICTURES
    assert pictures[inputs.OFF_CENTRE] in kinds[off_centre]


def test_failed_rows_are_told_together():
    rows = [Row("a", 1.0, 1e-5), Row("b", 0.0, 0.0), Row("c", math.nan, 1e-5), Row("d", 1, 0, "so")]
    with pytest.raises(ValueError, match=r"it: a are 1\.0e\+00 away.*c are nan away.*activation"):
        refuse_failed(rows, "it")
    refuse_failed(rows[1:2], "it")
