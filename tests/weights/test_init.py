"""The parts that a new model takes from another: exactly those, strictly, and never none."""

from dataclasses import replace

import pytest
import torch
from tiny import WORDS, picture, tiny_pretrained, tiny_section

from multimodal import config
from multimodal.config_io import check, merge
from multimodal.data.transforms import ImageTransform
from multimodal.models.build import build_model
from multimodal.weights.describe import describe
from multimodal.weights.init import check_init, start_from, tokenizer_of
from multimodal.weights.load import load
from multimodal.weights.pretrained import Pretrained
from multimodal.weights.save import save_model

PARTS = ("image", "text", "temperature")


def saved(folder, seed=4, **changes):
    """A model folder whose temperature is not the one its settings began with."""
    pretrained = tiny_pretrained(tiny_section(**changes), seed=seed)
    torch.nn.init.constant_(pretrained.model.temperature.logit_scale, 1.25)
    save_model(
        folder,
        model=pretrained.model,
        section=pretrained.config,
        tokenizer=pretrained.tokenizer,
    )
    return load(folder)


def run_model(theirs, *, parts=PARTS, **changes):
    tree = merge(theirs.config.model_dump(), changes)
    return check({**tree, "init": "other", "init_parts": list(parts)}, config.RunModel)


def started(theirs, run):
    """A new model of the run, in use."""
    torch.manual_seed(11)
    section = run.plain()
    model = start_from(theirs, run, section)
    transform = ImageTransform(section.image.image_size, section.preprocess)
    tokenizer = tokenizer_of(theirs, section)
    return Pretrained(model=model, transform=transform, tokenizer=tokenizer, config=section)


def features(pretrained):
    images = pretrained.encode_image([picture(n) for n in range(3)])
    return images, pretrained.encode_text(WORDS), pretrained.model.temperature()[0].detach()


def which_are_equal(a, b):
    return [x.shape == y.shape and x.equal(y) for x, y in zip(a, b, strict=True)]


@pytest.mark.parametrize("parts", [PARTS, ("image",), ("text",), ("temperature",), PARTS[:2]])
def test_a_part_is_taken_bit_for_bit_or_new(tmp_path, parts, caplog):
    caplog.set_level("INFO")
    theirs = saved(tmp_path)
    expected = features(theirs)
    ours = started(saved(tmp_path), run_model(theirs, parts=parts))
    assert which_are_equal(features(ours), expected) == [part in parts for part in PARTS]
    for part in PARTS:
        [line] = [record.message for record in caplog.records if record.message.startswith(part)]
        assert line.endswith("from other" if part in parts else "new")


def test_settings_of_training_may_differ(tmp_path):
    theirs = saved(tmp_path)
    own = {"dropout": 0.5, "drop_path": 0.25, "kernel": "reference"}
    run = run_model(theirs, image=own | {"patch_dropout": 0.5}, text=own)
    ours = started(theirs, run)
    assert ours.model.image.section.patch_dropout == 0.5
    assert ours.model.text.encoder.blocks[1 - 1].attn.dropout.p == 0.5
    for a, b in zip(features(ours), features(theirs), strict=True):
        torch.testing.assert_close(a, b)


def test_all_settings_that_differ_are_named():
    theirs = tiny_section()
    tree = merge(
        theirs.model_dump(),
        {
            "image": {"width": 44, "activation": "quick_gelu"},
            "text": {"depth": 2},
            "embed_dim": 9,
            "logit_scale": 20.0,
            "tokenizer": {"clean": []},
            "preprocess": {"mean": [0.1, 0.1, 0.1], "resize_mode": "squash"},
        },
    )
    with pytest.raises(ValueError) as caught:
        check_init(check({**tree, "init": "a/b"}, config.RunModel), theirs)
    text = str(caught.value)
    for part in (
        "model.init='a/b'",
        "its image part has model.image.width=22, not 44",
        "model.image.activation='gelu', not 'quick_gelu'",
        "its text part has model.text.depth=1, not 2",
        "model.embed_dim=17, not 9",
        "model.tokenizer={'kind': 'bpe', 'clean': ['whitespace', 'lower']}, not",
        "its temperature part has model.logit_scale=14.28",
        "model.preprocess.mean",
        "leave the part out of model.init_parts",
    ):
        assert part in text, text
    assert "resize_mode" not in text


@pytest.mark.parametrize("name", ["norm_eps", "rope_theta", "bias", "qk_norm", "mlp_ratio"])
def test_every_setting_of_an_encoder_counts_unless_it_is_known_to_be_harmless(name):
    theirs = tiny_section()
    value = getattr(theirs.image, name)
    other = not value if isinstance(value, bool) else 2 * value
    tree = merge(theirs.model_dump(), {"image": {name: other}})
    with pytest.raises(ValueError, match=f"model.image.{name}="):
        check_init(check({**tree, "init": "a"}, config.RunModel), theirs)


def test_another_kind_of_tower_is_named_as_that():
    theirs = tiny_section()
    tree = merge(theirs.model_dump(), {"image": {"kind": "timm", "name": "test_vit"}})
    with pytest.raises(ValueError, match=r"image part has model\.image\.kind='vit', not 'timm'"):
        check_init(check({**tree, "init": "a"}, config.RunModel), theirs)
    check_init(check({**tree, "init": "a", "init_parts": ["text"]}, config.RunModel), theirs)


def test_positions_are_resampled_for_another_size_of_pictures(tmp_path):
    """The tower itself resamples at every call, which is the second implementation."""
    theirs = saved(tmp_path)
    pixels = torch.randn(2, 3, 28, 28)
    expected = theirs.model.image(pixels)
    ours = started(theirs, run_model(theirs, image={"image_size": 28}))
    assert len(ours.model.image.position.weight) == 1 + 16
    torch.testing.assert_close(ours.model.image(pixels), expected)


def test_texts_may_become_shorter_and_not_longer(tmp_path):
    theirs = saved(tmp_path)
    ours = started(theirs, run_model(theirs, text={"context_length": 12}))
    assert ours.tokenizer.encode(WORDS).lengths.max() <= 12
    short = WORDS[:2]
    torch.testing.assert_close(ours.encode_text(short), theirs.encode_text(short))
    with pytest.raises(ValueError, match=r"model\.text\.context_length=19, not 20"):
        started(theirs, run_model(theirs, text={"context_length": 20}))


def test_a_new_text_tower_stands_beside_a_kept_image_tower(tmp_path):
    theirs = saved(tmp_path)
    text = {"width": 10, "heads": 2, "depth": 3, "vocab_size": 300}
    ours = started(theirs, run_model(theirs, parts=["image", "temperature"], text=text))
    found, expected = features(ours), features(theirs)
    assert which_are_equal(found, expected) == [True, False, True]
    assert found[1].shape == expected[1].shape


def test_an_offset_of_the_logits_may_be_new_but_not_another(tmp_path):
    theirs = saved(tmp_path / "a")
    ours = started(theirs, run_model(theirs, logit_bias=-5.0))
    scale, bias = ours.model.temperature()
    assert (scale.log().item(), bias.item()) == (pytest.approx(1.25), -5)
    check_init(run_model(theirs, logit_bias="auto"), theirs.config)
    biased = saved(tmp_path / "b", logit_bias=-7.0)
    with pytest.raises(ValueError, match=r"model\.logit_bias=-7\.0, not -5\.0"):
        started(biased, run_model(biased, logit_bias=-5.0))
    assert started(biased, run_model(biased)).model.temperature()[1].item() == -7


def test_weights_that_do_not_fit_never_load_in_part(tmp_path):
    theirs = saved(tmp_path)
    other = build_model(tiny_section(image=theirs.config.image.model_dump() | {"depth": 2}))
    wrong = replace(theirs, model=other)  # as if the settings did not tell the truth
    run = run_model(theirs, image={"dropout": 0.1})
    with pytest.raises(ValueError, match=r"unexpected image\.encoder\.blocks\.1\."):
        started(wrong, run)
    other.image = torch.nn.Identity()
    other.image_projection = torch.nn.Identity()
    with pytest.raises(ValueError, match=r"missing image\."):
        started(wrong, run)


def test_the_description_is_that_of_the_loaded_model(tmp_path):
    theirs = saved(tmp_path / "m", logit_bias=-2.0)
    assert describe(str(tmp_path / "m")) == theirs.config
    with pytest.raises(ValueError, match="no model at"):
        describe(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="no model at"):
        describe(str(tmp_path))
