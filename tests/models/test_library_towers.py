"""Towers from timm and transformers."""

import pytest
import torch
from transformers import AutoModel, BertConfig, T5Config

from multimodal import config
from multimodal.models.build import build_model
from multimodal.models.hf_text import HfTextTower
from multimodal.models.timm_image import TimmTower

VOCAB = 97
TRANSFORMERS = {
    "bert": BertConfig(
        hidden_size=20, intermediate_size=28, num_hidden_layers=2, num_attention_heads=5,
        vocab_size=VOCAB, max_position_embeddings=31,
    ),
    "t5": T5Config(
        d_model=20, d_ff=28, num_layers=2, num_decoder_layers=1, num_heads=5, d_kv=4,
        vocab_size=VOCAB,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A saved random model of each kind."""
    folder = tmp_path_factory.mktemp("hf")
    for name, hf_config in TRANSFORMERS.items():
        AutoModel.from_config(hf_config).save_pretrained(folder / name)
    return folder


def hf_section(folder, **fields) -> config.HfText:
    return config.HfText(**({"kind": "hf", "name": str(folder), "context_length": 17} | fields))


def timm_section(**fields) -> config.TimmImage:
    return config.TimmImage(**({"kind": "timm", "name": "test_vit", "image_size": 64} | fields))


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(VOCAB, (3, 11)), torch.tensor([11, 4, 7])


def all_have_gradients(module) -> bool:
    return all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize(("name", "size"), [("test_vit", 64), ("resnet10t", 61)])
def test_a_timm_model_gives_its_pooled_features(name, size):
    tower = TimmTower(timm_section(name=name, image_size=size, drop_path=0.1))
    features = tower(torch.randn(2, 3, size, size))
    assert features.shape == (2, tower.width)
    features.square().sum().backward()
    assert all_have_gradients(tower)


def test_timm_mistakes_are_explained():
    with pytest.raises(
        ValueError, match=r"'resnet10' is not a timm model; near names: .*resnet10t"
    ):
        TimmTower(timm_section(name="resnet10"))
    with pytest.raises(ValueError, match="drop_path"):
        TimmTower(timm_section(name="vgg11", drop_path=0.1))


def test_missing_timm_weights_say_what_to_do(monkeypatch):
    def no_network(*args, **kwargs):
        raise OSError("cannot connect")

    monkeypatch.setattr("multimodal.models.timm_image.timm.create_model", no_network)
    with pytest.raises(ValueError, match=r"cannot connect.*model.image.pretrained=false"):
        TimmTower(timm_section(pretrained=True))


@pytest.mark.parametrize("name", TRANSFORMERS)
@pytest.mark.parametrize("pool", ["cls", "mean", "eot"])
def test_a_transformers_model_hides_padding_and_uses_all_weights(folders, name, pool):
    tower = HfTextTower(hf_section(folders / name, pool=pool)).eval()
    tokens, lengths = texts()
    features = tower(tokens, lengths)
    assert features.shape == (3, tower.width) == (3, 20)
    for row, length in enumerate(lengths.tolist()):
        alone = tower(tokens[row : row + 1, :length], lengths[row : row + 1])
        assert (alone - features[row]).abs().max() < 2e-6
    features.square().sum().backward()
    assert all_have_gradients(tower)


def test_pools_read_the_places_they_are_named_after(folders):
    tokens, lengths = texts()
    towers = {
        p: HfTextTower(hf_section(folders / "bert", pool=p)).eval() for p in ("cls", "mean", "eot")
    }
    outputs = towers["cls"].model(tokens[1:2, :4]).last_hidden_state[0]
    for pool, by_hand in (("cls", outputs[0]), ("mean", outputs.mean(0)), ("eot", outputs[3])):
        torch.testing.assert_close(towers[pool](tokens, lengths)[1], by_hand, atol=1e-5, rtol=1e-5)


def test_pretrained_decides_between_weights_and_architecture(folders):
    saved = AutoModel.from_pretrained(folders / "bert").embeddings.word_embeddings.weight
    first = HfTextTower(hf_section(folders / "bert"))
    assert torch.equal(first.model.embeddings.word_embeddings.weight, saved)
    torch.manual_seed(1)
    fresh = HfTextTower(hf_section(folders / "bert", pretrained=False))
    assert not torch.equal(fresh.model.embeddings.word_embeddings.weight, saved)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_tower_is_rebuilt_from_its_saved_architecture(folders, name, tmp_path):
    tower = HfTextTower(hf_section(folders / name)).eval()
    tower.save_architecture(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    again = HfTextTower(hf_section(tmp_path, pretrained=False)).eval()
    again.load_state_dict(tower.state_dict())
    tokens, lengths = texts()
    assert torch.equal(tower(tokens, lengths), again(tokens, lengths))


def test_transformers_mistakes_are_explained(folders):
    with pytest.raises(
        ValueError, match=r"no/such-model.*local folder.*`hf download no/such-model"
    ):
        HfTextTower(hf_section("no/such-model"))
    with pytest.raises(ValueError, match="context_length=32 is more than the 31 positions"):
        HfTextTower(hf_section(folders / "bert", context_length=32))


def test_library_towers_make_a_model(folders):
    model = build_model(
        config.Model(
            image=timm_section(),
            text=hf_section(folders / "bert"),
            embed_dim=7,
            tokenizer=config.BpeTokenizer(kind="bpe"),
        )
    )
    features = model(torch.zeros(3, 3, 64, 64, dtype=torch.uint8), *texts())
    (features.logit_scale * features.image @ features.text.T).logsumexp(1).sum().backward()
    assert all_have_gradients(model)


def test_a_timm_model_that_cannot_checkpoint_says_so():
    with pytest.raises(ValueError, match="checkpoint_activations=full, but timm's VGG cannot"):
        TimmTower(timm_section(name="vgg11")).checkpoint_activations("full")


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", ["test_vit", "bert", "t5"])
def test_checkpointing_stores_less_and_changes_no_gradient(folders, name, mode):
    is_image = name == "test_vit"

    def backward(mode):
        torch.manual_seed(3)
        tower = TimmTower(timm_section()) if is_image else HfTextTower(hf_section(folders / name))
        tower.train().checkpoint_activations(mode)
        kept: dict[int, int] = {}

        def keep(x):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        torch.manual_seed(4)
        inputs = (torch.randn(2, 3, 64, 64),) if is_image else texts()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            features = tower(*inputs)
        torch.manual_seed(5)
        features.square().sum().backward()
        return sum(kept.values()), [p.grad for p in tower.parameters() if p.grad is not None]

    (plain, expected), (less, found) = backward("none"), backward(mode)
    assert less < plain
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
