"""Tables and sheets for people."""

import io

import pytest
from matplotlib.figure import Figure
from rich.console import Console
from tiny import damage, tiny_pretrained, write_pictures

from multimodal.data.build import source_from_path
from multimodal.evaluate.report import draw_predictions, print_results


def test_figures_stand_beside_chance():
    retrieval = {
        "image_retrieval_recall@1": 0.25,
        "image_retrieval_recall@1_chance": 0.125,
        "images": 8,
        "skipped": 0,
    }
    zero_shot = {"acc1": 0.5, "acc5": None, "chance": 1 / 3, "majority": 0.4, "images": 7}
    file = io.StringIO()
    print_results({"pairs": retrieval, "kinds": zero_shot}, Console(file=file, width=80))
    lines = [line.replace("│", " ").split() for line in file.getvalue().splitlines()]
    for row in (
        ["pairs"],
        ["image_retrieval_recall@1", "25.0%", "12.5%"],
        ["acc1", "50.0%", "33.3%"],
        ["acc5", "-", "-"],
        ["majority", "40.0%", "-"],
    ):
        assert row in lines
    assert "8 images, 0 skipped" in file.getvalue()


@pytest.mark.parametrize("count", [1, 6, 50])
def test_a_sheet_has_a_cell_for_each_readable_picture(tmp_path, count):
    captions = [[f"price $1 {i}_{{x}} ^"] if i else [] for i in range(11)]
    folder = write_pictures(tmp_path / "pictures", captions)
    damage(folder, 9)
    names = [texts[0] for texts in captions if texts]
    source = source_from_path(str(folder))
    figure = Figure()
    draw_predictions(tiny_pretrained(), source, names, figure, count=count)
    figure.savefig(tmp_path / "a.png")
    assert len(figure.axes) == {1: 1, 6: 5, 50: 10}[count]


def test_a_sheet_without_a_readable_picture_is_refused(tmp_path):
    folder = write_pictures(tmp_path / "pictures", [["a"]])
    damage(folder, 0)
    source = source_from_path(str(folder))
    with pytest.raises(ValueError, match="none of 1 pictures"):
        draw_predictions(tiny_pretrained(), source, ["a", "b"], Figure())
