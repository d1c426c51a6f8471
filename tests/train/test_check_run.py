"""A run is tried before it starts: every problem at once, and nothing written."""

import json
from dataclasses import replace

from tools import finish, make_shards, retrieval, start, tiny_config, tiny_tree, write_config

from multimodal.config import Config
from multimodal.config_io import check
from multimodal.data.build import open_source
from multimodal.data.check import check_data
from multimodal.models.build import build_model
from multimodal.train.check import check_run, data_problems, data_warnings
from multimodal.train.loop import train


def files(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


def test_a_sound_run_gives_its_facts_and_leaves_nothing(tmp_path):
    shards = make_shards(tmp_path / "data", 29)
    config = tiny_config(tmp_path / "run", shards)
    train(config.model_copy(update={"run": str(tmp_path / "first")}))  # leaves the index
    before = files(tmp_path)
    report = check_run(config)
    assert report.problems == [] and files(tmp_path) == before
    facts = report.facts
    assert facts["steps"] == 12 and facts["epochs"] == round(12 * 8 / 29, 2)
    assert facts["parameters"] == sum(p.numel() for p in build_model(config.model).parameters())
    slower = min(facts["data_per_second"], facts["compute_per_second"])
    assert facts["limit"] == ("data" if slower == facts["data_per_second"] else "compute")


def test_all_problems_are_found_at_once(tmp_path):
    shards = make_shards(tmp_path / "data", 29)
    tree = tiny_tree(tmp_path / "run", shards, "train.micro_batch_size=auto")
    tree["evaluate"] = {"later": retrieval(tmp_path / "nowhere")}
    tree["model"]["text"]["vocab_size"] = 20
    report = check_run(check(tree, Config))
    for part in ("micro_batch_size=auto", "evaluate.later", "vocab_size=20 is too small"):
        assert sum(part in problem for problem in report.problems) == 1, report.problems
    assert "data_per_second" not in report.facts


def test_a_folder_that_holds_another_run_is_a_problem(tmp_path):
    shards = make_shards(tmp_path / "data", 29)
    train(tiny_config(tmp_path / "run", shards, "train.duration=2 steps"))
    before = files(tmp_path)
    report = check_run(tiny_config(tmp_path / "run", shards, "seed=77"))
    assert len(report.problems) == 1 and "seed: 3 -> 77" in report.problems[0]
    assert check_run(tiny_config(tmp_path / "run", shards)).problems == []
    assert files(tmp_path) == before


def test_what_the_data_hold_against_the_settings_is_a_problem_too(tmp_path):
    shards = make_shards(tmp_path / "data", 29, broken=(4,))
    config = tiny_config(tmp_path / "run", shards)
    report = check_data(open_source(config.data.train))
    (problem,) = data_problems(config, report)
    assert "1 of 29 samples looked at are broken, more than data.max_skipped=0.01" in problem
    enough = tiny_config(tmp_path / "run", shards, "data.max_skipped=0.1")
    assert data_problems(enough, report) == []
    many = replace(report, repeated_captions=20, cut=7, context_length=16)
    repeats, cut = data_warnings(config, many)
    assert "20 captions repeat others" in repeats and "loss.duplicates=positive" in repeats
    assert "7 captions are longer than model.text.context_length=16" in cut
    apart = tiny_config(tmp_path / "run", shards, "loss.duplicates=ignore")
    assert data_warnings(apart, replace(many, cut=2)) == []


def test_the_command_says_so_by_its_exit_code(tmp_path):
    tree = tiny_tree(tmp_path / "run", make_shards(tmp_path / "data", 29))
    path = write_config(tmp_path / "run.yaml", tree)
    found = finish(start("-m", "multimodal", "check", str(path), "--json"))
    assert json.JSONDecoder().raw_decode(found[found.index("{") :])[0]["problems"] == []
    missing = f"data.train.path={tmp_path / 'nowhere'}"
    told = finish(start("-m", "multimodal", "check", str(path), missing), code=2)
    assert "problem: " in told and "nowhere" in told
