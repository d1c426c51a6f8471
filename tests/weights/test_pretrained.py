"""The Python face: pictures and texts to unit vectors and probabilities."""

import dataclasses
import io

import pytest
import torch
from PIL import Image
from tiny import EMBED_DIM, WORDS, damage, picture, tiny_pretrained, tiny_section, write_pictures

from multimodal.models.build import build_model
from multimodal.weights.pretrained import fill


@pytest.fixture(scope="module")
def pretrained():
    return tiny_pretrained()


def test_paths_bytes_and_pil_give_the_same_vectors_in_any_mix(pretrained, tmp_path):
    path = write_pictures(tmp_path, [["a"]]) / "000.png"
    image = picture(0)
    features = pretrained.encode_image([path, image, path.read_bytes(), str(path)], batch_size=3)
    assert features.shape == (4, EMBED_DIM) and features.dtype == torch.float32
    assert torch.allclose(features.norm(dim=1), torch.ones(4))
    assert (features - features[0]).abs().max() < 1e-6
    other = pretrained.encode_image([picture(1)])
    assert (other - features[0]).abs().max() > 1e-3


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16"])
def test_pil_images_of_all_modes_are_read(pretrained, mode):
    image = picture(0).convert("L").convert(mode) if mode == "I;16" else picture(0).convert(mode)
    assert pretrained.encode_image([image]).isfinite().all()


def test_a_turned_photo_is_put_upright(pretrained):
    image = picture(0, size=(28, 28))
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 3
    image.rotate(180).save(file, "PNG", exif=exif)
    upright, turned = pretrained.encode_image([image, file.getvalue()])
    assert (upright - turned).abs().max() < 1e-6


def test_a_wrong_picture_is_named(pretrained, tmp_path):
    folder = write_pictures(tmp_path, [["a"], ["b"]])
    damage(folder, 1)
    with pytest.raises(ValueError, match=r"image 1 \(.*001\.png\)"):
        pretrained.encode_image([folder / "000.png", folder / "001.png"])
    with pytest.raises(ValueError, match=r"image 0 \(.*missing\.png\)"):
        pretrained.encode_image([tmp_path / "missing.png"])
    with pytest.raises(ValueError, match=r"image 0 \(<bytes>\)"):
        pretrained.encode_image([b"no picture"])


def test_a_lone_input_and_a_wrong_type_are_refused(pretrained):
    with pytest.raises(TypeError, match="give a list"):
        pretrained.encode_text("a text")
    with pytest.raises(TypeError, match="give a list"):
        pretrained.encode_image(picture(0))
    with pytest.raises(TypeError, match=r"images\[0\] is a Tensor"):
        pretrained.encode_image(torch.zeros(1, 3, 14, 14))


@pytest.mark.parametrize("fixed_length", [False, True])
def test_texts_have_the_same_vectors_in_any_company(fixed_length):
    text = tiny_section().text.model_dump() | {"fixed_length": fixed_length}
    pretrained = tiny_pretrained(tiny_section(text=text))
    texts = [" ".join(WORDS[: 1 + i % 5]) + str(i) for i in range(13)]
    together = pretrained.encode_text(texts, batch_size=3)
    alone = torch.cat([pretrained.encode_text([text]) for text in texts])
    assert (together - alone).abs().max() < 1e-5  # float32 sums in another order
    assert pretrained.encode_text([]).shape == (0, EMBED_DIM)


def test_class_embeddings_average_unit_vectors_of_the_prompts(pretrained):
    templates = ["a {}.", "the {c} {d}"]
    found = pretrained.class_embeddings(["cat", "dog"], templates)
    prompts = pretrained.encode_text(["a cat.", "the cat {d}", "a dog.", "the dog {d}"])
    expected = torch.stack([prompts[:2].mean(0), prompts[2:].mean(0)])
    assert torch.allclose(found, expected / expected.norm(dim=1, keepdim=True), atol=1e-6)


def test_a_template_keeps_its_other_braces():
    assert fill("{} {x}", "cat") == "cat {x}"
    assert fill("{c}: {0}", "{}") == "{}: {0}"
    with pytest.raises(ValueError, match="no place"):
        fill("a photo", "cat")


@pytest.mark.parametrize(
    ("labels", "templates", "message"),
    [
        ([], None, "0 labels"),
        (["a", "b", "a"], None, r"labels holds \['a'\] more than once"),
        (["a"], [], "0 templates"),
        (["a"], ["photo"], "photo"),
    ],
)
def test_bad_labels_and_templates_are_refused(pretrained, labels, templates, message):
    with pytest.raises(ValueError, match=message):
        pretrained.classify([picture(0)], labels, templates)


@pytest.mark.parametrize("logit_bias", [None, -10.0])
def test_probabilities_are_the_softmax_of_scaled_cosines(logit_bias):
    pretrained = tiny_pretrained(tiny_section(logit_bias=logit_bias))
    images, labels = [picture(i) for i in range(3)], ["cat", "dog", "a red fox"]
    found = pretrained.classify(images, labels)
    cosines = (
        pretrained.encode_image(images)
        @ pretrained.encode_text([f"a photo of {label}." for label in labels]).T
    )
    assert torch.allclose(found, (cosines / 0.07).softmax(dim=1), atol=1e-5)
    assert torch.allclose(found.sum(dim=1), torch.ones(3))


def test_a_model_in_training_is_left_as_it_was():
    pretrained = tiny_pretrained()
    pretrained.model.train()
    pretrained.model.text.eval()
    before = [module.training for module in pretrained.model.modules()]
    state = torch.get_rng_state()
    features = pretrained.encode_image([picture(0)])
    pretrained.encode_text(["a"])
    assert [module.training for module in pretrained.model.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert not features.requires_grad and not features.is_inference()
    loss = pretrained.model(torch.zeros(1, 3, 14, 14)).image.sum()
    loss.backward()


def test_features_do_not_depend_on_the_mode():
    image = tiny_section().image.model_dump() | {"drop_path": 0.5, "dropout": 0.5}
    pretrained = tiny_pretrained(tiny_section(image=image))
    pretrained.model.train()
    first, again = (pretrained.encode_image([picture(0)]) for _ in range(2))
    assert torch.equal(first, again)


def test_the_fingerprint_tells_weights_apart():
    pretrained, same, other = tiny_pretrained(), tiny_pretrained(), tiny_pretrained(seed=1)
    assert pretrained.fingerprint() == same.fingerprint() != other.fingerprint()
    with torch.no_grad():
        same.model.temperature.logit_scale += 1e-6
    assert pretrained.fingerprint() != same.fingerprint()


def test_a_tokenizer_with_more_ids_than_the_tower_is_refused():
    pretrained = tiny_pretrained()
    text = tiny_section().text.model_dump()
    text["vocab_size"] = pretrained.tokenizer.vocab_size - 1
    with pytest.raises(ValueError, match="do not belong together"):
        dataclasses.replace(pretrained, model=build_model(tiny_section(text=text)))
