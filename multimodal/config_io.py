"""YAML files and `key=value` texts to a checked section, and back. No torch.

Files merge left to right, then the overrides. `include: [other.yaml]` at the top of a file merges
those first, by paths relative to it. A text that begins with `~/` is a path in the home folder. A
section whose `kind` changes is replaced whole, since the
settings of the old kind would be mistakes in the new one.
"""

from __future__ import annotations

import copy
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, RootModel, ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from multimodal.config import Config
from multimodal.config.foreign import BEFORE_PATH

Schema = TypeVar("Schema", bound=BaseModel)
Tree = dict[str, Any]


_WHOLE = Config.model_fields


class ConfigError(ValueError):
    """Mistakes in a configuration, all of them, one a line."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 scalars (`5e-4` is a number, `no` is text) and no duplicate keys."""

    yaml_implicit_resolvers = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise ConfigError(f"{key_node.start_mark.name}: {key!r} is no name of a setting")
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ConfigError(f"{key_node.start_mark.name}:{line}: key {key!r} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


for _tag, _pattern, _first in (
    ("bool", r"true|false|True|False", "tfTF"),
    ("int", r"[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("null", r"null|~|", ["n", "~", ""]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first)
    )
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
_Loader.add_constructor("tag:yaml.org,2002:str", lambda loader, node: expand_home(node.value))


def expand_home(text: str) -> str:
    """Put the home folder for the `~` at the start of a path: `~/a`, `~user/a`, `hf:~/a`."""
    start, path = "", text
    if prefix := re.match(rf"{BEFORE_PATH}|--[a-z-]+=", text):
        start, path = prefix[0], text[prefix.end() :]
    return start + os.path.expanduser(path) if re.match(r"~[\w.-]*/", path) else text


def _parse(text: str, name: str) -> Any:
    loader = _Loader(text)
    loader.name = name
    try:
        return loader.get_single_data()
    except yaml.YAMLError as error:
        raise ConfigError(f"{name} is not valid YAML: {error}") from None
    finally:
        loader.dispose()


def read_yaml(path: str | Path, _above: tuple[Path, ...] = ()) -> Tree:
    """Read one file with its includes.

    Raises:
        ConfigError: when it is missing, is not a mapping, has a key twice or includes itself.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(
            f"{path}: no such file; an argument is a YAML file or key=value (optim.lr=1e-3)"
        )
    tree = _parse(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the top of a config file is a mapping, not {tree!r}")
    names = tree.pop("include", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path}: include is a list of files, such as [base.yaml], not {names!r}")
    if path.resolve() in _above:
        raise ConfigError(f"{path}: includes itself")
    merged: Tree = {}
    for name in names:
        merged = merge(merged, read_yaml(path.parent / name, (*_above, path.resolve())))
    return merge(merged, tree)


def merge(base: Tree, over: Tree) -> Tree:
    """Return `base` with the values of `over`.

    A mapping whose `kind` differs is replaced whole, and an empty mapping empties.
    """
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and value:
            same_kind = value.get("kind", old.get("kind")) == old.get("kind")
            value = merge(old, value) if same_kind else value
        merged[key] = value
    return merged


def parse_override(text: str) -> Tree:
    """Turn `a.b=value` into `{"a": {"b": value}}`; the value is read as YAML."""
    dotted, _, value = text.partition("=")
    tree: Any = _parse(value, text)
    for name in reversed(dotted.split(".")):
        tree = {name: tree}
    return tree


def is_override(text: str) -> bool:
    """Whether an argument is `key=value` rather than a file."""
    return re.match(r"[A-Za-z_][\w.-]*=", text) is not None


def is_yaml(text: str) -> bool:
    """Whether an argument names a YAML file."""
    return Path(text).suffix in (".yaml", ".yml")


def load_config(arguments: Sequence[str], schema: type[Schema], *, only: bool = False) -> Schema:
    """Merge files and overrides and check them against `schema`.

    Args:
        only: leave out the top-level keys of a whole config that `schema` does not have.

    Raises:
        ConfigError: lists every mistake, one a line.
    """
    tree = read_arguments(arguments)
    if only:
        tree = {k: v for k, v in tree.items() if k in schema.model_fields or k not in _WHOLE}
    return check(tree, schema)


def read_arguments(arguments: Sequence[str]) -> Tree:
    """Merge files and overrides.

    Raises:
        ConfigError: when a file is missing or is none.
    """
    tree: Tree = {}
    for path in (a for a in arguments if not is_override(a)):
        tree = merge(tree, read_yaml(path))
    over: Tree = {}
    overrides = [a for a in arguments if is_override(a)]
    # A kind replaces its whole section, so it comes before what is said of that section.
    for text in sorted(overrides, key=lambda text: not text.partition("=")[0].endswith(".kind")):
        over = merge(over, parse_override(text))
    return merge(tree, over)


def check(tree: Tree, schema: type[Schema]) -> Schema:
    """Validate a merged tree.

    Raises:
        ConfigError: lists every mistake, one a line.
    """
    tree = _with_default_kinds(tree, schema)
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        lines = _mistakes(error, tree, schema)
        count = f"{len(lines)} mistake{'s' if len(lines) > 1 else ''} in the configuration"
        raise ConfigError("\n  ".join([f"{count}:", *lines])) from None


def _mistakes(error: ValidationError, tree: Tree, schema: type[BaseModel]) -> list[str]:
    """Lines for all mistakes.

    pydantic checks settings against each other only where each of them is right by itself. So the
    others are taken out, one round after the other, for as long as that brings up more.
    """
    types = {setting.name: setting.type for setting in fields(schema)}
    lines: dict[str, None] = {}
    wrong: set[str] = set()
    rest = copy.deepcopy(tree)
    while True:
        found = [(e, _dotted(e["loc"], rest)) for e in error.errors()]
        new = [(e, path) for e, path in found if path not in wrong and not _follows(e, wrong)]
        lines |= dict.fromkeys(_describe_mistake(e, rest, types) for e, _ in new)
        wrong |= {path for _, path in new}
        if not any([_take_out(rest, path) for _, path in new]):
            return list(lines)
        try:
            schema.model_validate(rest)
            return list(lines)
        except ValidationError as again:
            error = again


def _follows(error: ErrorDetails, wrong: Iterable[str]) -> bool:
    """Whether a mistake may be there only since a setting that it speaks of was taken out."""
    words = set(re.findall(r"\w+", error["msg"]))
    return error["type"] == "value_error" and any(p.rpartition(".")[2] in words for p in wrong)


def _take_out(tree: Tree, path: str) -> bool:
    """Remove a setting, of a list the whole; whether it was there."""
    *above, last = path.split(".")
    for name in above:
        if not isinstance(tree.get(name), dict):
            last = name
            break
        tree = tree[name]
    return tree.pop(last, tree) is not tree


def _with_default_kinds(tree: Tree, schema: type[BaseModel]) -> Tree:
    """A section with variants is of its default's kind unless it says otherwise."""
    kinds = {name: getattr(f.default, "kind", None) for name, f in schema.model_fields.items()}
    return {
        name: {"kind": kinds[name], **value}
        if isinstance(value, dict) and value and kinds.get(name)
        else value
        for name, value in tree.items()
    }


def _dotted(location: Sequence[int | str], tree: Any) -> str:
    """Join a pydantic location without the tags and types of unions, which are no keys."""
    names: list[str] = []
    for part in location:
        if not isinstance(tree, dict | list):
            break
        if isinstance(tree, dict) and part not in tree and part == tree.get("kind"):
            continue
        names.append(str(part))
        if isinstance(tree, dict):
            tree = tree.get(part)
        elif isinstance(tree, list) and isinstance(part, int):
            tree = tree[part]
    return ".".join(names)


def _describe_mistake(error: ErrorDetails, tree: Tree, types: Mapping[str, str]) -> str:
    path = _dotted(error["loc"], tree)
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        if path in types:
            return f"{path}: not a setting of this {_below(path.rpartition('.')[0], 'kind')}"
        return f"{path}: unknown setting{_suggest(path, list(types))}"
    if kind == "missing":
        return f"{path}: missing"
    if kind == "union_tag_not_found":
        name = _below(path, "kind")
        return f"{path or name}: give {name}, which chooses the variant"
    if kind == "union_tag_invalid":
        return (
            f"{_below(path, 'kind')} = {context['tag']!r}: allowed are {context['expected_tags']}"
        )
    message = error["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if isinstance(error["input"], dict):
        return f"{path}: {message}" if path else message
    if kind == "list_type":
        return f"{path} = {error['input']!r}: give a list, such as [{error['input']}]"
    if _is_choice(types.get(path, "")) and not kind.startswith("string_too_"):
        return f"{path} = {error['input']!r}: allowed are {types[path]}"
    return f"{path} = {error['input']!r}: {message}"


def _is_choice(type_name: str) -> bool:
    """Whether a setting can be of several types, each with an error of its own; null is none."""
    return len([name for name in type_name.split(" | ") if name != "null"]) > 1


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _suggest(path: str, names: Sequence[str]) -> str:
    """The nearest existing name: first by the last part of the path, then by the whole of it."""
    leaf = path.rpartition(".")[2]
    same_leaf = [name for name in names if name.rpartition(".")[2] == leaf]
    near = difflib.get_close_matches(
        path, same_leaf or names, n=1, cutoff=0.0 if same_leaf else 0.6
    )
    return f"; did you mean {near[0]}?" if near else ""


# --- help ----------------------------------------------------------------------------------------


def _variants(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field's type can hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated, dict):
        return [v for a in get_args(annotation) for v in _variants(a)]
    return []


class Setting(NamedTuple):
    """What `--help` says of one setting."""

    name: str
    """Dotted."""
    variant: str
    """The `kind` of its section, where the section has several kinds; else empty."""
    type: str
    default: str
    documentation: str


def fields(schema: type[BaseModel], prefix: str = "", variant: str = "") -> Iterator[Setting]:
    """Yield every setting below `schema`; variants of a union follow each other."""
    for name, field in schema.model_fields.items():
        path = prefix + ("" if issubclass(schema, RootModel) else name)
        sections = _variants(field.annotation)
        if not sections:
            default = "required" if field.default is PydanticUndefined else repr(field.default)
            kind = _type_name(field.annotation) + _limits(field.metadata)
            yield Setting(path, variant, kind, default, field.description or "")
        if get_origin(field.annotation) is dict:
            path += ".NAME"
        for section in sections:
            kinds = get_args(section.model_fields["kind"].annotation) if len(sections) > 1 else ()
            yield from fields(section, _below(path, ""), "".join(kinds))


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0]) + _limits(annotation.__metadata__).replace(",", "")
    if origin in (Union, UnionType):
        return " | ".join(_type_name(a) for a in arguments)
    if origin is Literal:
        return " | ".join(arguments)
    if origin is list:
        return f"list of {_type_name(arguments[0])}"
    return "null" if annotation is type(None) else annotation.__name__


def _limits(metadata: Sequence[Any]) -> str:
    """The limits of a field, such as `> 0`, from its `annotated_types` metadata."""
    signs = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))
    return "".join(
        f", {sign} {getattr(limit, name)}"
        for limit in metadata
        for name, sign in signs
        if hasattr(limit, name)
    )


def help_text(schema: type[BaseModel]) -> str:
    """One block for each setting: name, type, default, documentation."""
    lines, variant = [], ""
    for setting in fields(schema):
        if setting.variant not in ("", variant):
            section = setting.name.rpartition(".")[0]
            lines.append(f"-- with {section}.kind={setting.variant}:")
        variant = setting.variant
        lines.append(f"{setting.name} : {setting.type} = {setting.default}")
        lines.append(f"    {setting.documentation}")
    return "\n".join(lines)


def dump_yaml(section: BaseModel) -> str:
    """The resolved section as YAML that `read_yaml` and `check` turn into an equal one."""
    return yaml.safe_dump(section.model_dump(), sort_keys=False, allow_unicode=True, width=100)
