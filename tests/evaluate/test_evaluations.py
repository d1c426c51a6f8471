"""Whole evaluations of a random model, against the same figures computed the long way."""

import json

import pytest
import torch
from tiny import damage, picture, tiny_pretrained, write_pictures
from tools import on_ranks

from multimodal import config
from multimodal.evaluate.retrieval import RECALL_AT
from multimodal.evaluate.run import evaluate, evaluate_all
from multimodal.evaluate.zero_shot import class_row

CAPTIONS = [[f"red {i}", f"a {i} dot", "shared"][: 1 + i % 3] for i in range(13)]
CLASSES = ["red", "green", "blue", "grey", "warm sun"]


def folder_section(path):
    return config.FolderSource(kind="folder", path=str(path))


def retrieval(path, *more):
    more = [folder_section(other) for other in more]
    return config.Retrieval(kind="retrieval", data=folder_section(path), more_captions=more)


def zero_shot(path, **changes):
    options = {"classes": CLASSES, "templates": ["a {}", "{c}"], **changes}
    return config.ZeroShot(kind="zero_shot", data=folder_section(path), **options)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """13 pictures, of which number 5 is damaged and number 7 has no caption."""
    labels = [CLASSES[i % 4] if i % 2 else i % 4 for i in range(13)]
    captions = [texts if i != 7 else [] for i, texts in enumerate(CAPTIONS)]
    metas = [{"cls": label, "group": "odd", "last": "red"} for label in labels]
    metas[-1]["last"] = "warm sun"
    folder = write_pictures(tmp_path_factory.mktemp("pictures"), captions, metas)
    damage(folder, 5)
    return folder


def long_way(pretrained, numbers, captions, more):
    """Recall by sorting scores, where no two are equal but those of equal texts."""
    images = pretrained.encode_image([picture(i) for i in numbers])
    own = [text for texts in captions for text in texts]
    texts = pretrained.encode_text(own + more)
    found = {}
    for k in RECALL_AT:
        order = (images @ texts.T).argsort(dim=1, descending=True)[:, :k].tolist()
        hits = [
            any((own + more)[j] in mine for j in row)
            for row, mine in zip(order, captions, strict=True)
        ]
        found[f"text_retrieval_recall@{k}"] = sum(hits) / len(hits)
        order = (texts[: len(own)] @ images.T).argsort(dim=1, descending=True)[:, :k].tolist()
        hits = [any(text in captions[i] for i in row) for row, text in zip(order, own, strict=True)]
        found[f"image_retrieval_recall@{k}"] = sum(hits) / len(hits)
    return found


def test_retrieval_equals_the_long_way_and_counts_every_sample(pictures, tmp_path):
    pretrained = tiny_pretrained()
    more_texts = [["red 3", "other words"], ["yellow"]]
    more = write_pictures(tmp_path, more_texts)
    found = evaluate(pretrained, retrieval(pictures, more), batch_size=4)
    numbers = [i for i in range(13) if i not in (5, 7)]
    captions = [CAPTIONS[i] for i in numbers]
    expected = long_way(pretrained, numbers, captions, [*more_texts[0], *more_texts[1]])
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    own = sum(map(len, captions))
    counts = {"images": 11, "captions": own, "text_candidates": own + 3, "skipped": 2}
    assert {name: found[name] for name in counts} == counts
    chances = {f"{name}_chance" for name in expected}
    assert set(found) == set(expected) | chances | set(counts)
    assert found["image_retrieval_recall@10"] < 1
    # One of 11 pictures drawn for each caption: right with as many as have that caption.
    right = [sum(text in texts for texts in captions) for t in captions for text in t]
    by_hand = sum(r / 11 for r in right) / len(right)
    assert found["image_retrieval_recall@1_chance"] == pytest.approx(by_hand)
    # And for each picture one of all texts: a longer list of its own texts makes it easier.
    texts = [text for mine in captions for text in mine] + [*more_texts[0], *more_texts[1]]
    right = [sum(text in mine for text in texts) for mine in captions]
    by_hand = sum(r / len(texts) for r in right) / len(right)
    assert found["text_retrieval_recall@1_chance"] == pytest.approx(by_hand)


def test_zero_shot_equals_the_long_way(pictures):
    pretrained = tiny_pretrained()
    found = evaluate(pretrained, zero_shot(pictures), batch_size=3)
    numbers = [i for i in range(13) if i != 5]
    labels = torch.tensor([i % 4 for i in numbers])
    probabilities = pretrained.classify([picture(i) for i in numbers], CLASSES, ["a {}", "{c}"])
    hits = probabilities.argmax(dim=1) == labels
    assert found["acc1"] == pytest.approx(hits.double().mean().item())
    assert found["acc5"] == 1
    recalls = [hits[labels == c].double().mean().item() for c in range(4)]
    assert found["mean_per_class_recall"] == pytest.approx(sum(recalls) / 4)
    assert (found["chance"], found["images"], found["skipped"]) == (0.2, 12, 1)
    assert found["majority"] == pytest.approx(max(labels.bincount()).item() / 12)


def test_fewer_than_five_classes_have_no_acc5_and_the_result_is_json(pictures):
    section = zero_shot(pictures, label="group", classes=["even", "odd"])
    found = evaluate(tiny_pretrained(), section)
    assert found["acc5"] is None
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize("fill", [torch.nan, 0.0])
def test_a_model_without_a_signal_gets_at_most_chance(pictures, fill):
    pretrained = tiny_pretrained()
    with torch.no_grad():
        pretrained.model.image_projection.weight.fill_(fill)
    found = evaluate_all(pretrained, {"r": retrieval(pictures), "z": zero_shot(pictures)})
    for name in ("image_retrieval_recall@1", "text_retrieval_recall@1"):
        assert found["r"][name] == 0
    assert found["z"]["acc1"] == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": "clas"}, r"no field 'clas'.*'cls', 'group', 'last'"),
        ({"classes": ["red", "green"]}, "which is neither one of the 2 class names"),
        ({"classes": ["a", "b", "a"]}, r"classes holds \['a'\]"),
        ({"templates": ["photo"]}, "photo"),
    ],
)
def test_a_wrong_zero_shot_section_is_refused(pictures, changes, message):
    with pytest.raises(ValueError, match=message):
        evaluate(tiny_pretrained(), zero_shot(pictures, **changes))


def test_a_label_is_a_name_first_and_then_a_row():
    rows = {"7": 0, "3": 1, "cat": 2}
    values = ["7", 2, "2", "cat", 0]
    assert [class_row({"cls": v}, "cls", rows, "k") for v in values] == [0, 2, 2, 2, 0]
    for wrong in (3, -1, "dog", None, 1.5, ""):
        with pytest.raises(ValueError, match="neither"):
            class_row({"cls": wrong}, "cls", rows, "k")


def test_data_without_a_usable_sample_is_refused(tmp_path):
    folder = write_pictures(tmp_path, [["a"]], [{"cls": "red"}])
    damage(folder, 0)
    for section in (retrieval(folder), zero_shot(folder)):
        with pytest.raises(ValueError, match="none of 1 samples"):
            evaluate(tiny_pretrained(), section)


def evaluate_both(path):
    sections = {"r": retrieval(path, path), "z": zero_shot(path)}
    return evaluate_all(tiny_pretrained(), sections, batch_size=2)


def evaluate_and_fail(path):
    """On a rank: the figures, and then a label that only the last rank meets."""
    figures = evaluate_both(path)
    with pytest.raises(ValueError, match="'warm sun', which is neither"):
        evaluate(tiny_pretrained(), zero_shot(path, label="last", classes=CLASSES[:4]))
    return figures


@pytest.mark.slow
def test_two_ranks_give_the_figures_of_one_and_stop_together(pictures):
    one = evaluate_both(pictures)
    for found in on_ranks(2, evaluate_and_fail, pictures):
        for name in one:
            assert found[name] == pytest.approx(one[name])
