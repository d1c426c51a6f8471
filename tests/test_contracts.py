"""Promises about the whole package: who imports whom, what starts fast, what is documented."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from multimodal.config import Config, EvaluateConfig, Model
from multimodal.config_init import load_run
from multimodal.config_io import check, fields, load_config, read_yaml

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "multimodal"
QUICKSTART = ROOT / "configs" / "model" / "quickstart.yaml"
NEEDED = {"finetune_clip": ["model.init=a", "data.train={kind: folder, path: photos}"]}
"""What recipes leave to those who run them."""

CONFIG = {"config", "config_io", "config_init"}
LOW = {"distributed", "errors", "files", "launcher"} | CONFIG
MODELS = {"models", "layers"} | LOW
DATA = {"data"} | LOW
WEIGHTS = {"weights"} | MODELS | DATA
ALLOWED = {
    "config": {"config"},
    "config_io": CONFIG,
    "config_init": CONFIG,
    "distributed": {"errors"},
    "errors": set(),
    "files": set(),
    "launcher": set(),
    "layers": {"layers"},
    "models": MODELS,
    "losses": {"losses"} | LOW,
    "data": DATA,
    "weights": WEIGHTS,
    "evaluate": {"evaluate"} | WEIGHTS,
    "embed": {"embed"} | WEIGHTS,
    "train": {"train", "evaluate", "losses"} | WEIGHTS,
    "cli_options": WEIGHTS,
    "cli_data": {"cli_options", "train"} | DATA,
    "cli_convert": {"cli_options"} | WEIGHTS,
    "cli": {"cli_options", "cli_data", "cli_convert", "train", "evaluate", "embed"} | WEIGHTS,
    "__main__": {"cli"},
    "__init__": {"weights"} | CONFIG,
}
"""What each part of the package may import from it: only what lies below."""


def imports(path: Path) -> set[str]:
    """Modules named by the import statements of a file, those inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            names.add(node.module or "")
    return names


def part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_imports_point_down(path):
    for name in imports(path):
        if name.startswith("multimodal."):
            target = name.split(".")[1]
            assert target in ALLOWED[part(path)], f"{path} imports {name}"


def test_tests_are_found_from_any_folder():
    for path in (ROOT / "tests").rglob("*.py"):
        wrong = [name for name in imports(path) if name.split(".")[0] == "tests"]
        assert not wrong, f"{path} imports {wrong}, which is found from the project's folder only"


def test_accelerate_is_used_by_the_engine_only():
    users = {part(p) for p in PACKAGE.rglob("*.py") if any("accelerate" in n for n in imports(p))}
    assert users == {"train"}


def test_collectives_are_in_one_file():
    users = {p.name for p in PACKAGE.rglob("*.py") if "torch.distributed" in p.read_text()}
    assert users == {"distributed.py"}


@pytest.mark.parametrize("module", ["multimodal", "multimodal.config", "multimodal.cli"])
def test_the_command_line_starts_without_torch(module):
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda p: p.stem)
def test_every_config_file_loads(path):
    tree = read_yaml(path)
    if path.parent.name == "recipes":
        needed = NEEDED.get(path.stem, [])
        load_run([str(path), *needed], lambda init: check(read_yaml(QUICKSTART)["model"], Model))
    if "model" in tree:
        check(tree["model"], Model)
    if "evaluate" in tree:
        load_config([str(path)], EvaluateConfig, only=True)
    assert set(tree) <= set(Config.model_fields)
    assert path.read_text().startswith("#"), "says at its top what it is"


def test_every_recipe_is_in_the_readme():
    text = (ROOT / "configs" / "README.md").read_text()
    for path in (ROOT / "configs" / "recipes").glob("*.yaml"):
        assert path.name in text


def test_every_setting_is_documented_and_read_somewhere():
    code = {
        node.attr
        for path in PACKAGE.rglob("*.py")
        if path.stem != "config"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    for setting in fields(Config):
        leaf = setting.name.rpartition(".")[2]
        assert setting.documentation, f"{setting.name} has no documentation"
        assert leaf in code or leaf == "kind", f"{setting.name} is read nowhere"


def test_settings_tables_stay_small():
    names = {name for name, *_ in fields(Config)}
    same_as_data_train = ("evaluate.NAME.data.", "data.train.sources.NAME.")
    assert len([name for name in names if not name.startswith(same_as_data_train)]) <= 140


def test_test_files_have_unique_names():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))


def test_ci_runs_the_one_test_command():
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "bash scripts/test.sh --slow"
