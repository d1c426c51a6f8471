"""One client reads our exports and compares what it computes with what `prepare.py` has written.

    python check.py CLIENT FOLDER RESULTS.json

It runs in the environment of the client, which has nothing of ours, and uses the client's own
unmodified API or command line. Each comparison is a row; a client that raises is a failed row.
"""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

FEATURES = 1e-4
"""Largest distance of two unit vectors. Pictures have the model's size, so nothing is scaled."""
HALF = 2e-3
"""The same for a client that stores float16."""
SCORES = 1e-3
METRIC = 5e-5
"""Equal to four digits."""
LAION = "ViT-B-32"
"""OpenCLIP's name of the architecture that has one."""


class Row(NamedTuple):
    what: str
    difference: float
    allowed: float


class Case:
    """One model: its exports, and what they must give."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.name = folder.name
        expected: dict[str, Any] = json.loads((folder / "expected.json").read_text())
        features = np.load(folder / "expected.npz")
        self.texts: list[str] = expected["texts"]
        self.keys: list[str] = expected["keys"]
        self.labels: list[str] = expected["labels"]
        self.template: str = expected["template"]
        self.scores: list[float] = expected["scores"]
        self.metrics: dict[str, dict[str, float]] = expected["metrics"]
        self.built_in: bool = expected["built_in"]
        self.openai_tokens: bool = expected["openai_tokens"]
        self.image_features, self.text_features = features["image"], features["text"]
        self.images = [Image.open(folder / "pictures" / f"{key}.png") for key in self.keys]

    def images_row(self, found: Any, what: str = "image features") -> Row:
        return Row(what, _distance(found, self.image_features), FEATURES)

    def texts_row(self, found: Any, what: str = "text features") -> Row:
        return Row(what, _distance(found, self.text_features), FEATURES)


def _distance(found: Any, expected: np.ndarray) -> float:
    """Largest distance of two rows at unit length; infinite when one is nearer to another row."""
    found = np.asarray(found, dtype=np.float64)
    if found.shape != expected.shape:
        return float("inf")
    found = found / np.linalg.norm(found, axis=1, keepdims=True)
    pairwise = np.linalg.norm(found[:, None] - expected[None], axis=2)
    own = np.diag(pairwise)
    return float(own.max() if (own <= pairwise.min(axis=1)).all() else "inf")


# --- Python interfaces ---------------------------------------------------------------------------


def check_transformers(case: Case) -> Iterator[Row]:
    """CLIPModel, AutoProcessor, and the pipeline for zero-shot classification."""
    import torch
    from transformers import AutoProcessor, CLIPModel, pipeline

    folder = str(case.folder / "hf")
    model = CLIPModel.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    with torch.no_grad():
        pixels = processor(images=case.images, return_tensors="pt")
        tokens = processor(text=case.texts, padding=True, truncation=True, return_tensors="pt")
        image, text = model.get_image_features(**pixels), model.get_text_features(**tokens)
    # transformers 5 wraps the features.
    yield case.images_row(image if torch.is_tensor(image) else image.pooler_output)
    yield case.texts_row(text if torch.is_tensor(text) else text.pooler_output)
    classify = pipeline("zero-shot-image-classification", model=folder, device="cpu")
    found = classify(
        case.images[0], candidate_labels=case.labels, hypothesis_template=case.template
    )
    by_label = {row["label"]: row["score"] for row in found}
    wrong = max(abs(by_label[n] - s) for n, s in zip(case.labels, case.scores, strict=True))
    yield Row("scores of the zero-shot pipeline", wrong, SCORES)


def check_sentence_transformers(case: Case) -> Iterator[Row]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(case.folder / "hf"), device="cpu")
    yield case.images_row(model.encode(case.images))
    yield case.texts_row(model.encode(case.texts))


def check_open_clip(case: Case) -> Iterator[Row]:
    """A folder from version 3 on; a file of weights for an architecture that it knows."""
    import open_clip

    folder = case.folder / "open_clip"
    if int(version("open_clip_torch").split(".")[0]) >= 3:
        name = f"local-dir:{folder}"
        model, _, transform = open_clip.create_model_and_transforms(name)
        yield from _open_clip_rows(case, model, transform, open_clip.get_tokenizer(name), "folder")
    if case.built_in:
        weights = str(folder / "open_clip_model.safetensors")
        model, _, transform = open_clip.create_model_and_transforms(LAION, pretrained=weights)
        yield from _open_clip_rows(case, model, transform, open_clip.get_tokenizer(LAION), "file")


def _open_clip_rows(
    case: Case, model: Any, transform: Callable, tokenize: Callable, source: str
) -> Iterator[Row]:
    import torch

    model.eval()
    with torch.no_grad():
        image = model.encode_image(torch.stack([transform(image) for image in case.images]))
        text = model.encode_text(tokenize(case.texts))
    yield case.images_row(image, f"image features, {source}")
    yield case.texts_row(text, f"text features, {source}")


def check_timm(case: Case) -> Iterator[Row]:
    """A folder; and weights of timm's or OpenCLIP's names for an architecture that it knows."""
    folder = case.folder / "timm"
    yield _timm_row(case, "folder", f"local-dir:{folder}")
    if case.built_in:
        files = {"file": folder, "OpenCLIP's file": case.folder / "open_clip"}
        classes = case.image_features.shape[1]
        for source, place in files.items():
            for file in sorted(place.glob("*model.safetensors")):
                overlay = {"file": str(file), "num_classes": classes, "crop_pct": 1.0}
                yield _timm_row(
                    case, source, "vit_base_patch32_clip_224.openai",
                    num_classes=classes, pretrained_cfg_overlay=overlay,
                )  # fmt: skip


def _timm_row(case: Case, source: str, name: str, **options: Any) -> Row:
    import timm
    import torch

    model = timm.create_model(name, pretrained=True, **options).eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    pixels = torch.stack([transform(image.convert("RGB")) for image in case.images])
    with torch.no_grad():
        return case.images_row(model(pixels), f"image features, {source}")


def check_onnxruntime(case: Case) -> Iterator[Row]:
    """With NumPy and the package tokenizers only, at several batch sizes and lengths of text."""
    import onnxruntime
    from tokenizers import Tokenizer

    folder = case.folder / "onnx"
    sessions = {
        tower: onnxruntime.InferenceSession(folder / "onnx" / f"{tower}_model.onnx")
        for tower in ("vision", "text")
    }
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    mean, std = (np.float32(settings[f"image_{name}"]) for name in ("mean", "std"))
    pixels = np.stack([np.asarray(image.convert("RGB"), dtype=np.float32) for image in case.images])
    pixels = ((pixels / 255 - mean) / std).transpose(0, 3, 1, 2)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    names = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer.enable_truncation(names["model_max_length"])
    tokenizer.enable_padding(
        pad_id=tokenizer.token_to_id(names["pad_token"]), pad_token=names["pad_token"]
    )
    for batch in (1, 5):
        parts = range(0, len(pixels), batch)
        image = [_run(sessions["vision"], pixels[i : i + batch]) for i in parts]
        yield case.images_row(np.concatenate(image), f"image features, batches of {batch}")
        text = []
        for start in range(0, len(case.texts), batch):
            encoded = tokenizer.encode_batch(case.texts[start : start + batch])
            text.append(_run(sessions["text"], np.array([each.ids for each in encoded])))
        yield case.texts_row(np.concatenate(text), f"text features, batches of {batch}")


def _run(session: Any, values: np.ndarray) -> np.ndarray:
    return session.run(None, {session.get_inputs()[0].name: values})[0]


# --- command lines -------------------------------------------------------------------------------


def check_clip_benchmark(case: Case) -> Iterator[Row]:
    """Its figures for the shards on which ours were computed."""
    folder = case.folder / "open_clip"
    new = int(version("open_clip_torch").split(".")[0]) >= 3
    if not new and not case.built_in:
        return
    weights = str(folder / "open_clip_model.safetensors")
    model = (f"local-dir:{folder}", "") if new else (LAION, weights)
    for task, metrics in case.metrics.items():
        out = case.folder / f"clip_benchmark-{version('open_clip_torch')}-{task}.json"
        _run_python(
            _script("clip_benchmark"), "eval", "--model", model[0], "--pretrained", model[1],
            "--dataset", f"wds/{task}", "--dataset_root", str(case.folder / "data" / task),
            "--split", "test", "--task", f"zeroshot_{task}", "--recall_k", "1", "5", "10",
            "--output", str(out), "--no_amp", "--num_workers", "0", "--batch_size", "16",
        )  # fmt: skip
        found = json.loads(out.read_text())["metrics"]
        for name, value in metrics.items():
            yield Row(f"{name} of {task} ({value:.4f})", abs(found[name] - value), METRIC)


def check_clip_retrieval(case: Case) -> Iterator[Row]:
    """`clip-retrieval inference` on shards.

    It reads texts by OpenAI's BPE at 77 tokens, whatever the model, and warms up with one. Of a
    model with another tokenizer it can embed pictures, once the warm-up is left out.
    """
    weights = case.folder / "open_clip" / "open_clip_model.safetensors"
    names = {"hf_clip": f"hf_clip:{case.folder / 'hf'}"}
    if case.built_in:
        names["open_clip"] = f"open_clip:{LAION}/{weights}"
    for source, name in names.items():
        out = case.folder / f"clip-retrieval-{source}"
        command = ["-c", _NO_WARM_UP] if not case.openai_tokens else [_script("clip-retrieval")]
        _run_python(
            *command, "inference", "--clip_model", name, "--use_jit", "False",
            "--input_dataset", str(case.folder / "data/classification/test/{0..1}.tar"),
            "--input_format", "webdataset", "--wds_image_key", "png", "--output_folder", str(out),
            "--enable_text", str(case.openai_tokens), "--enable_metadata", "True",
            "--batch_size", "16", "--num_prepro_workers", "1", "--enable_wandb", "False",
        )  # fmt: skip
        yield from _embeddings(case, out, source)


_NO_WARM_UP = """
import all_clip.main, clip_retrieval.cli
all_clip.main.warmup = lambda *_: None
clip_retrieval.cli.main()
"""


def _embeddings(case: Case, out: Path, source: str) -> Iterator[Row]:
    import pandas

    found = pandas.read_parquet(out / "metadata" / "metadata_0.parquet")
    places = [list(found["image_path"]).index(key) for key in case.keys]
    features = {"img_emb": case.image_features}
    if case.openai_tokens:
        features["text_emb"] = case.text_features
    for kind, expected in features.items():
        rows = np.load(out / kind / f"{kind}_0.npy")[places]
        yield Row(f"{kind}, {source}", _distance(rows, expected), HALF)


def _script(name: str) -> str:
    """A console script of this environment."""
    return str(Path(sys.executable).parent / name)


def _run_python(*arguments: str) -> None:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")


# --- rows ----------------------------------------------------------------------------------------

CLIENTS: dict[str, tuple[Callable[[Case], Iterator[Row]], str]] = {
    "transformers": (check_transformers, "transformers"),
    "sentence-transformers": (check_sentence_transformers, "sentence-transformers"),
    "open_clip": (check_open_clip, "open_clip_torch"),
    "CLIP_benchmark": (check_clip_benchmark, "clip-benchmark"),
    "clip-retrieval": (check_clip_retrieval, "clip-retrieval"),
    "timm": (check_timm, "timm"),
    "onnxruntime": (check_onnxruntime, "onnxruntime"),
}
"""A client to its check and its distribution."""


def main() -> None:
    client, folder, results = sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3])
    check, distribution = CLIENTS[client]
    rows = []
    for place in sorted(folder.glob("*/expected.json")):
        case = Case(place.parent)
        about = {"client": client, "version": version(distribution), "model": case.name}
        try:
            rows += [about | row._asdict() for row in check(case)]
        except Exception as error:
            traceback.print_exc()
            text = str(error).strip().splitlines() or [""]
            what = f"{type(error).__name__}: {text[-1]}"
            rows.append(about | Row(what, float("inf"), 0.0)._asdict())
    results.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
