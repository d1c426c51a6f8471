"""ONNX: one graph for each tower, for programs without torch.

    onnx/vision_model.onnx   pixel_values float32 [batch, 3, S, S]    -> image_embeds [batch, D]
    onnx/text_model.onnx     input_ids    int64   [batch, sequence]   -> text_embeds  [batch, D]

Names of files, inputs and outputs are those of transformers.js; vectors have unit length. The batch
is free, and so is the sequence up to the context length, unless texts have a fixed length. A graph
is told no lengths: a text ends at its first end token, whatever pads it.

Beside them lie preprocessor_config.json and the files of the tokenizer, as transformers reads them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoImageProcessor, AutoTokenizer

from multimodal.models.two_tower import TwoTower, unit_length
from multimodal.weights.hf_folder import known_of, pixels_of, preprocessor, tokens_of
from multimodal.weights.parity import TOLERANCE, Theirs
from multimodal.weights.pretrained import Pretrained, inference
from multimodal.weights.quiet import quiet
from multimodal.weights.tokenizer_files import write_tokenizer

USAGE = 'onnxruntime.InferenceSession("{out}/onnx/vision_model.onnx"), text_model.onnx beside it'
INT8_USAGE = USAGE.replace(".onnx", "_int8.onnx")
Numbers = Literal["float32", "int8"]
Tower = Literal["vision", "text"]
OPSET = 18
"""Read by onnxruntime 1.14 and later."""
INT8_TOLERANCE = 0.2
"""Largest distance of two unit vectors, a cosine of 0.98: int8 weights and activations."""
_SINGLE_FILE = 1_800_000_000
"""Bytes of weights from which they lie in `NAME.onnx.data`: an ONNX file ends at 2 GiB."""
_FOLDER = "onnx"
_SUFFIX: dict[Numbers, str] = {"float32": "", "int8": "_int8"}


class _Graph(NamedTuple):
    """What is exported of a tower."""

    module: nn.Module
    example: Tensor
    input: str
    output: str
    free: dict[int, torch.export.Dim]
    """Axes of the input that may have any size."""


class ImageGraph(nn.Module):
    """Normalised pixels to unit vectors."""

    def __init__(self, model: TwoTower):
        super().__init__()
        self.tower = model.image
        self.projection = model.image_projection

    def forward(self, pixel_values: Tensor) -> Tensor:
        """[B, 3, S, S] to [B, D]."""
        return unit_length(self.projection(self.tower(pixel_values)))


class TextGraph(nn.Module):
    """Token ids to unit vectors; a text goes up to its first end token, or to the last column."""

    def __init__(self, model: TwoTower, eos_id: int):
        super().__init__()
        self.tower = model.text
        self.projection = model.text_projection
        self.eos_id = eos_id

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [B, L] to [B, D]."""
        is_end = input_ids == self.eos_id
        first = is_end.int().argmax(dim=1) + 1
        lengths = torch.where(is_end.any(dim=1), first, input_ids.shape[1])
        return unit_length(self.projection(self.tower(input_ids, lengths)))


def write(pretrained: Pretrained, folder: Path, *, numbers: Numbers = "float32") -> None:
    """Write the graphs of both towers, and the files of the tokenizer and the preprocessing.

    Args:
        pretrained: the model, on the CPU.
        folder: where to.
        numbers: `int8` holds the matrices as 8-bit integers and computes with them.

    Raises:
        ValueError: when a package that writes ONNX is missing.
    """
    quantiser = ("onnxruntime",) if numbers == "int8" else ()
    if missing := _missing("onnx", "onnxscript", *quantiser):
        raise ValueError(f"--to onnx: {missing}")
    (folder / _FOLDER).mkdir()
    with inference(pretrained.model):
        for tower, graph in _graphs(pretrained).items():
            _write_graph(graph, _path(folder, tower, numbers), numbers)
    write_tokenizer(pretrained.tokenizer, folder, masks_padding=False)
    content = json.dumps(preprocessor(pretrained, "CLIP"), indent=2) + "\n"
    (folder / "preprocessor_config.json").write_text(content, encoding="utf-8")


def reopen(folder: Path, *, numbers: Numbers = "float32") -> Theirs:
    """The graphs as onnxruntime runs them, and the files beside them as transformers reads them.

    Raises:
        ImportError: when onnxruntime is not installed.
    """
    if missing := _missing("onnxruntime"):
        raise ImportError(missing)
    text = _runner(_path(folder, "text", numbers))
    image_processor = AutoImageProcessor.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Theirs(
        library=f"onnxruntime {version('onnxruntime')}",
        image=_runner(_path(folder, "vision", numbers)),
        text=lambda tokens, lengths: text(tokens),
        pixels=lambda images: pixels_of(image_processor, images),
        tokens=lambda texts: tokens_of(tokenizer, texts),
        tolerance=TOLERANCE if numbers == "float32" else INT8_TOLERANCE,
        unescapes=False,
        known=known_of(tokenizer),
    )


def _path(folder: Path, tower: Tower, numbers: Numbers) -> Path:
    return folder / _FOLDER / f"{tower}_model{_SUFFIX[numbers]}.onnx"


def _graphs(pretrained: Pretrained) -> dict[Tower, _Graph]:
    """Modules that hold one tower each, so that neither file carries the other."""
    model, tokenizer, size = pretrained.model, pretrained.tokenizer, pretrained.transform.size
    pixels = torch.zeros(2, 3, size, size)
    tokens, _ = tokenizer.encode(["a", "two dogs running over the sand"])
    batch = torch.export.Dim("batch")
    sequence = torch.export.Dim("sequence", max=tokenizer.context_length)
    free = {0: batch} if tokenizer.fixed_length else {0: batch, 1: sequence}
    text = TextGraph(model, tokenizer.eos_id)
    return {
        "vision": _Graph(ImageGraph(model), pixels, "pixel_values", "image_embeds", {0: batch}),
        "text": _Graph(text, tokens, "input_ids", "text_embeds", free),
    }


def _write_graph(graph: _Graph, path: Path, numbers: Numbers) -> None:
    size = sum(p.numel() * p.element_size() for p in graph.module.parameters())
    beside = size > _SINGLE_FILE
    if numbers == "float32":
        _export(graph, path, beside)
        return
    with TemporaryDirectory(dir=path.parent) as place:
        whole = Path(place, path.name)
        _export(graph, whole, beside)
        _quantise(whole, path, beside)


def _export(graph: _Graph, path: Path, weights_beside: bool) -> None:
    with quiet(logging.WARNING):
        torch.onnx.export(
            graph.module.eval(),
            (graph.example,),
            path,
            dynamo=True,
            opset_version=OPSET,
            input_names=[graph.input],
            output_names=[graph.output],
            dynamic_shapes={graph.input: graph.free},
            external_data=weights_beside,
            verbose=False,
        )


def _quantise(whole: Path, path: Path, weights_beside: bool) -> None:
    """Write a graph whose matrix products run in 8 bits; scales of inputs are made at each call.

    Weights take 7 of the bits: without VNNI, x86 adds pairs of products in 16 bits.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with quiet(logging.WARNING):
        quantize_dynamic(
            whole,
            path,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            reduce_range=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=weights_beside,
        )


def _runner(path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def _missing(*packages: str) -> str:
    """What to install, or nothing."""
    missing = [name for name in packages if find_spec(name) is None]
    return f"{', '.join(missing)} not installed: pip install 'multimodal[onnx]'" if missing else ""
