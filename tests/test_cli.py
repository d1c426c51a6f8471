"""The command line: what it prints, its exit codes, and one clear sentence for each mistake."""

import contextlib
import io
import json
import sys
import tarfile

import pytest
from PIL import Image
from tiny import picture, tiny_pretrained, tiny_section, write_pictures

from multimodal import cli
from multimodal.weights.save import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in `model/`, pictures in `pictures/`, and one file that is no picture."""
    folder = tmp_path_factory.mktemp("cli")
    pretrained = tiny_pretrained()
    save_model(
        folder / "model",
        model=pretrained.model,
        section=tiny_section(),
        tokenizer=pretrained.tokenizer,
    )
    write_pictures(folder / "pictures", [["red"], ["green"], ["blue"]])
    (folder / "broken.png").write_bytes(b"no picture")
    return folder


@pytest.fixture
def run(folder, monkeypatch, capsys):
    def call(*arguments, cwd=folder):
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(sys, "argv", ["multimodal", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        shown = capsys.readouterr()
        return end.value.code or 0, shown.out, shown.err

    return call


def test_classify_gives_labels_by_probability(run):
    code, out, _ = run("classify", "model", "pictures", "--labels", "red, green", "--json")
    rows = json.loads(out)
    assert code == 0 and len(rows) == 3
    for row in rows:
        assert sorted(row["labels"]) == ["green", "red"]
        assert row["probabilities"][0] >= row["probabilities"][1]
        assert sum(row["probabilities"]) == pytest.approx(1, abs=1e-5)


def test_classify_names_a_broken_picture_and_goes_on(run):
    code, out, error = run("classify", "model", "broken.png", "pictures", "--labels", "a,b")
    assert code == 1 and len(out.splitlines()) == 3
    assert "broken.png: left out: not an image" in error


def test_labels_may_be_a_file_or_a_long_text(run, folder):
    (folder / "labels.txt").write_text("red\n\n green, dark \n")
    _, out, _ = run("classify", "model", "pictures", "--labels", "labels.txt", "--json")
    assert sorted(json.loads(out)[0]["labels"]) == ["green, dark", "red"]
    many = ",".join(f"label {i}" for i in range(99))
    assert run("classify", "model", "pictures", "--labels", many)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["classify", "model", "pictures", "--labels", "no.txt"], "there is no such file"),
        (["classify", "model", "pictures", "--labels", "broken.bin"], "not a text file"),
        (["classify", "model", "gone.png", "--labels", "a,b"], "no such picture or folder"),
        (["classify", "model", "broken.png", "--labels", "a,b"], "broken.png: not an image"),
        (["classify", "nowhere", "pictures", "--labels", "a,b"], "no model at"),
        (["classify", "model", "pictures", "--labels", "a,b", "--device", "banana"], "is not here"),
        (["search", "embedded", "gone.png"], "no such picture"),
        (["search", "embedded", " "], "no such picture"),
        (["evaluate", "model"], "is not a run with evaluations of its own"),
        (["pack", "nowhere", "out"], "nowhere"),
        (["pack", "pictures", "out", "--splits", "train=0.1"], "other than 'train'"),
        (["pack", "table.csv", "out"], "no column image"),
        (["pack", "table.csv", "out", "--separator", "::"], "at most 1 character"),
        (["check", "hub.yaml", "--separator", ";"], "a file of settings names columns"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(run, folder, arguments, message):
    (folder / "broken.bin").write_bytes(b"\xff\xfe\xfd")
    (folder / "table.csv").write_text("file,text\nbroken.png,a\n")
    (folder / "hub.yaml").write_text("kind: hub\nname: somewhere\n")
    code, _, error = run(*arguments)
    assert code == 2 and message in error
    assert len(error.replace(":\n", ": ").splitlines()) == 1 and "Traceback" not in error


def test_embedded_pictures_are_found_from_another_folder(run, folder, tmp_path):
    assert run("embed", "model", "pictures", "embedded")[0] == 0
    picture(1).save(tmp_path / "query.png")
    code, out, _ = run("search", folder / "embedded", "query.png", "--json", cwd=tmp_path)
    rows = json.loads(out)
    assert code == 0 and rows[0]["score"] == pytest.approx(1, abs=1e-2)
    assert "001" in json.dumps(rows[0])


def test_search_prints_score_caption_key_and_url(run, folder):
    metas = [{"url": "http://x.org/0"}, {}]
    write_pictures(folder / "linked", [["red"], ["green"]], metas)
    assert run("embed", "model", "linked", "linked embedded")[0] == 0
    _, out, _ = run("search", "linked embedded", "a text")
    shown = sorted(line[6:].strip() for line in out.splitlines())
    assert shown == ["green  (001.png)", "red  (000.png, http://x.org/0)"]


def test_pack_says_what_it_wrote(run):
    code, out, _ = run("pack", "pictures", "shards")
    assert code == 0 and "3 samples in 1 shard(s); train on it with" in out
    code, out, _ = run("pack", "pictures", "no rest", "--splits", "val=0.999999")
    assert code == 0 and out == "no rest: 3 samples in 1 shard(s)\n"


def test_pack_and_embed_take_the_columns_of_a_table(run, folder):
    pictures = sorted((folder / "pictures").glob("*.*g"))
    lines = [f"{path},text {i}" for i, path in enumerate(pictures)]
    (folder / "named.csv").write_text("\n".join(["file,text", *lines]))
    columns = ("--image-column", "file", "--caption-column", "text")
    encode = ("--short-side", 8, "--format", "webp", "--quality", 80, "--workers", 2)
    code, out, _ = run("pack", "named.csv", "named", *columns, *encode, "--splits", "val=1e-9")
    assert code == 0 and "data.train.path=named/train" in out
    with contextlib.ExitStack() as stack:
        shards = [stack.enter_context(tarfile.open(p)) for p in (folder / "named").rglob("*.tar")]
        stored = [t.extractfile(n).read() for t in shards for n in t.getnames() if "webp" in n]
    assert [min(Image.open(io.BytesIO(data)).size) for data in stored] == [8] * 3
    assert run("embed", "model", "named.csv", "embedded named", *columns)[0] == 0


def test_any_source_is_named_by_a_file_of_its_settings(run, folder):
    pictures = sorted((folder / "pictures").glob("*.*g"))
    lines = [f"{path};text {i}" for i, path in enumerate(pictures)]
    (folder / "semi.csv").write_text("\n".join(["image;caption", *lines]))
    assert run("embed", "model", "semi.csv", "embedded semi", "--separator", ";")[0] == 0
    (folder / "both.yaml").write_text(
        "kind: mixture\nsources:\n  a: {kind: folder, path: pictures}\n"
        '  b: {kind: table, path: semi.csv, separator: ";"}\n'
    )
    code, out, _ = run("check", "both.yaml", "--json")
    assert code == 0 and json.loads(out)["data"]["samples"] == 6
    assert "6 samples" in run("pack", "both.yaml", "both")[1]


@pytest.mark.parametrize("command", [["check"], ["pack"], ["embed", "model"]])
def test_mistakes_in_such_a_file_are_told_like_those_of_a_config(run, folder, command):
    text = "kind: table\npath: semi.csv\nimage_colum: file\nsplit: train\n"
    (folder / "wrong.yaml").write_text(text)
    out = [] if command == ["check"] else ["out"]
    code, _, error = run(*command, "wrong.yaml", *out)
    assert code == 2 and "2 mistakes" in error
    assert "  image_colum: unknown setting; did you mean image_column?" in error
    assert "  split: not a setting of this kind" in error
    (folder / "wrong.yaml").write_text("kind: tables\npath: semi.csv\n")
    assert "  kind = 'tables': allowed are 'shards'" in run(*command, "wrong.yaml", *out)[2]


def test_a_tilde_in_an_argument_is_the_home_folder(run, folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(folder))
    code, _, _ = run("pack", "~/pictures", "~/packed home", cwd=tmp_path)
    assert code == 0 and (folder / "packed home" / "00000.tar").is_file()
    assert run("check", "~/pictures", "--html=~/home.html", cwd=tmp_path)[0] == 0
    assert (folder / "home.html").is_file()


def test_of_several_processes_one_tells_a_mistake(run, monkeypatch):
    waits = []
    monkeypatch.setattr(cli.time, "sleep", waits.append)
    for rank in "012":
        monkeypatch.setenv("LOCAL_RANK", rank)
        code, _, error = run("train", "gone.yaml")
        assert code == 2 and ("no such file" in error) == (rank == "0")
    assert len(waits) == 2, "they wait, since a launcher kills the one that tells"


@pytest.mark.parametrize(("kind", "code"), [(ValueError, 2), (RuntimeError, 1)])
def test_what_rank_0_has_told_is_not_told_again(monkeypatch, capsys, kind, code):
    waits = []

    def fail(arguments):
        error = kind("told")
        error.told_elsewhere = True
        raise error

    monkeypatch.setattr(cli.time, "sleep", waits.append)
    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == code and capsys.readouterr().err == "" and len(waits) == 1


@pytest.mark.parametrize(
    ("subject", "code"), [("nowhere&co", 2), ("gone.yaml", 2), ("config.yaml", 2), ("pictures", 0)]
)
def test_check_writes_its_page_whatever_is_wrong(run, folder, subject, code):
    tree = {"model": tiny_section().model_dump(), "run": "never"}
    tree |= {"data": {"train": {"kind": "folder", "path": "nowhere&co"}}}
    (folder / "config.yaml").write_text(json.dumps(tree))
    (folder / "page.html").unlink(missing_ok=True)
    assert run("check", subject, "--html", "page.html")[0] == code
    page = (folder / "page.html").read_text()
    assert ("<h2>Problems</h2>" in page) == (code > 0)
    assert ("<h2>Samples</h2>" in page) == (code == 0)
    if subject != "pictures":
        assert f"{'gone.yaml' if 'gone' in subject else 'nowhere&amp;co'}" in page
