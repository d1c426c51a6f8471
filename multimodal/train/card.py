"""The model card: `README.md` of the model folder, which says what a run knows about its model.

Its front matter is what the hub of Hugging Face reads. There are no dates and no durations in it,
so that a resumed run has the card of an uninterrupted one.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from multimodal import config
from multimodal.config import EMA_SUFFIX, Config
from multimodal.config.foreign import split_name
from multimodal.data.mixture import MixtureSource
from multimodal.data.source import BadSample
from multimodal.data.stream import StreamSource, TrainingSource
from multimodal.evaluate.report import chance_of
from multimodal.evaluate.run import Metrics

_TOWER = (
    *("kind", "name", "pretrained", "width", "depth", "heads", "mlp_ratio", "activation", "norm"),
    *("norm_eps", "position", "rope", "pool", "image_size", "patch_size", "context_length"),
    "vocab_size",
)
"""Settings of a tower that the card shows."""
_LONG = 8
_LOOKED_AT = 16
"""Samples of a source whose terms are read, evenly spread over it."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def data_terms(source: TrainingSource) -> list[str]:
    """License and attribution that samples carry in their metadata.

    Some samples are read, of each part of a mixture; each is one line without markup.
    """
    terms: dict[str, None] = {}
    for part in source.sources if isinstance(source, MixtureSource) else [source]:
        if not isinstance(part, StreamSource):
            for index in range(0, len(part), max(1, len(part) // _LOOKED_AT)):
                with suppress(BadSample, OSError):
                    terms.update(_terms_of(part.read(index).meta))
    return list(terms)


def _terms_of(meta: Mapping[str, Any]) -> dict[str, None]:
    found = [str(meta[name]) for name in ("license", "attribution") if meta.get(name)]
    return {html.escape(" ".join(": ".join(found).split()), quote=False): None} if found else {}


def model_card(
    whole: Config,
    *,
    state: Mapping[str, Any],
    results: Mapping[str, Metrics],
    parameters: Mapping[str, int],
    terms: Iterable[str] = (),
) -> str:
    """Write the card.

    Args:
        whole: the settings of the run.
        state: what its last checkpoint says about itself.
        results: figures of the evaluations of the weights that the model has, by name.
        parameters: how many each part of the model has.
        terms: under which the training data may be used, see `data_terms`.
    """
    model, card = whole.model, whole.card
    lines = [
        f"---\n{yaml.safe_dump(_front_matter(whole), sort_keys=False, allow_unicode=True)}---",
        f"# {Path(whole.run).name}",
        card.description or "Two towers that embed pictures and texts in one space.",
        f"License: {card.license or 'not stated'}."
        + (f" Attribution: {card.attribution}" if card.attribution else ""),
        "## Use",
        _USE,
        "## Architecture",
        _architecture(model, parameters),
        "## Training data",
        _table(("what", "value"), state["data"].items()),
        "Terms: " + ("; ".join(terms) or "not stated") + ".",
        "## Training",
        _table(("what", "value"), _training(whole, state).items()),
        "## Evaluation",
        *(_evaluation(whole, results) if results else ["The run has made no evaluation."]),
        "## Limits",
        _limits(whole, state),
    ]
    return "\n\n".join(lines) + "\n"


_USE = """\
```bash
multimodal classify FOLDER picture.jpg --labels "a cat,a dog"
multimodal evaluate FOLDER evaluation.yaml
```

```python
import multimodal

model = multimodal.load("FOLDER")
pictures = model.encode_image(["picture.jpg"])
texts = model.encode_text(["a cat", "a dog"])
print(pictures @ texts.T)
```

FOLDER is the folder of this file; `model.safetensors`, `config.json` and `tokenizer.json` in it are
all that is needed."""


def _front_matter(whole: Config) -> dict[str, Any]:
    family = "siglip" if whole.loss.kind == "sigmoid" else "clip"
    files = {getattr(whole.model.image, "pretrained", None)}
    if whole.model.init and split_name(whole.model.init).library is None:
        files.add(whole.model.init)
    front = {
        "license": (whole.card.license or "unknown").lower(),
        "library_name": "multimodal",
        "pipeline_tag": "zero-shot-image-classification",
        "tags": ["multimodal", family, "image-text-retrieval"],
        "base_model": _on_the_hub(n for n in _starts(whole.model).values() if n not in files),
        "datasets": _on_the_hub(s.name for s in _hub_sources(whole)),
    }
    return {name: value for name, value in front.items() if value}


def _starts(model: config.RunModel) -> dict[str, str]:
    """Whose weights the run started from, by part."""
    starts: dict[str, str] = {}
    if model.init is not None:
        starts |= dict.fromkeys(model.init_parts, model.init)
    for side in ("image", "text"):
        tower = getattr(model, side)
        weights = getattr(tower, "pretrained", False)
        if isinstance(weights, str):
            starts.setdefault(side, weights)
        elif weights:
            own = "timm/" if tower.kind == "timm" and ":" not in tower.name else ""
            starts.setdefault(side, own + tower.name)
    return starts


def _hub_sources(whole: Config) -> list[config.HubSource]:
    train = whole.data.train
    parts = train.sources.values() if isinstance(train, config.MixtureSource) else [train]
    return [part for part in parts if isinstance(part, config.HubSource)]


def _on_the_hub(names: Iterable[str]) -> list[str]:
    """Those that are ORGANISATION/NAME, after what says how to get them, and no folder here."""
    bare = dict.fromkeys(re.sub("^(hf|open_clip|hf-hub):(hf-hub:)?", "", name) for name in names)
    return [name for name in bare if _HUB_NAME.fullmatch(name) and not Path(name).exists()]


def _architecture(model: config.Model, parameters: Mapping[str, int]) -> str:
    image, text = model.image.model_dump(), model.text.model_dump()
    rows = [(name, image.get(name), text.get(name)) for name in _TOWER if name in image | text]
    rows.append(("projection", model.image_projection, model.text_projection))
    rows.append(("parameters", parameters["image"], parameters["text"]))
    pre = model.preprocess
    return (
        _table(("setting", "image tower", "text tower"), rows)
        + f"\n\n{sum(parameters.values())} parameters; embeddings of {model.embed_dim} numbers. "
        f"Pictures: {pre.resize_mode}, {pre.interpolation}, mean {pre.mean}, std {pre.std}. "
        f"Texts: tokenizer {model.tokenizer.kind}, cleaned by {model.tokenizer.clean}."
    )


def _training(whole: Config, state: Mapping[str, Any]) -> dict[str, Any]:
    optim, train = whole.optim, whole.train
    rows = {
        "started from": ", ".join(f"{part}: {name}" for part, name in _starts(whole.model).items()),
        "steps": state["step"],
        "epochs": state["epoch"],
        "samples seen": state["samples"],
        "batch size": train.batch_size,
        "loss": whole.loss.kind,
        "optimiser": f"AdamW, betas {optim.betas}, eps {optim.eps}, decay {optim.weight_decay}",
        "peak learning rate": optim.lr,
        "warm-up": optim.warmup,
        "layer-wise decay of the rate": None if optim.layer_decay == 1 else optim.layer_decay,
        "frozen": ", ".join([*train.freeze, *(g.match for g in optim.groups if g.freeze)]),
        "other groups": ", ".join(g.match for g in optim.groups if not g.freeze),
        "average of the weights": None if train.ema is None else f"decay {train.ema}",
        "seed": whole.seed,
        "precision": {"no": "float32"}.get(p := state.get("precision", ""), p),
        "processes": state["processes"],
        "packages": ", ".join(f"{n} {v}" for n, v in state["versions"].items()),
    }
    return {name: value for name, value in rows.items() if value not in (None, "")}


def _evaluation(whole: Config, results: Mapping[str, Metrics]) -> list[str]:
    rows, recipes = [], []
    for name, metrics in results.items():
        section = whole.evaluate[name.removesuffix(EMA_SUFFIX)]
        counts = {k: v for k, v in metrics.items() if isinstance(v, int)}
        figures = [k for k in metrics if k not in counts and not k.endswith("chance")]
        rows += [(name, k, _four(metrics[k]), _four(chance_of(k, metrics))) for k in figures]
        recipes.append(f"- {name}: {_recipe(section)}; of {_listed(counts)}.")
    return [_table(("evaluation", "figure", "value", "chance"), rows), "\n".join(recipes)]


def _recipe(section: config.Evaluation) -> str:
    settings = _listed(section.model_dump(exclude={"kind", "data", "every"}))
    data = _listed(section.data.model_dump(exclude_defaults=True, exclude={"kind"}))
    return f"{section.kind} on {section.data.kind}, {data}" + (settings and f"; {settings}")


def _listed(values: Mapping[str, Any]) -> str:
    """Long lists by their length."""
    shown = {k: v for k, v in values.items() if v not in (None, [], {})}
    long = {k for k, v in shown.items() if isinstance(v, list) and len(v) > _LONG}
    return ", ".join(f"{len(v)} {k}" if k in long else f"{k} {v}" for k, v in shown.items())


def _limits(whole: Config, state: Mapping[str, Any]) -> str:
    text, size = whole.model.text, whole.model.image.image_size
    nonfinite = state["nonfinite"]["total"]
    return "\n".join(
        (
            f"- Pictures are scaled to {size} x {size} pixels; texts are cut to "
            f"{text.context_length} tokens.",
            f"- In training {state['skipped']} samples were unreadable, and {nonfinite} steps were "
            "left out since loss or gradient was not finite.",
            "- Beyond the evaluations above nothing was measured: other kinds of pictures, other "
            "languages, and what the training data may have taught of unfair or private things.",
        )
    )


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    head = list(head)
    cells = [head, ["---"] * len(head), *([_cell(x) for x in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def _cell(value: Any) -> str:
    return "-" if value is None else " ".join(str(value).split()).replace("|", "\\|")


def _four(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"
