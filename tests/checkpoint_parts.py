"""What checkpoints are made of, without a run."""

import torch
from tools import TINY

from multimodal.config import Model, Optim
from multimodal.config_io import check
from multimodal.data.text import build_tokenizer
from multimodal.data.transforms import ImageTransform
from multimodal.models.build import build_model
from multimodal.train.checkpoint import Checkpoints
from multimodal.train.optim import build_optimizer
from multimodal.train.snapshot import take_snapshot
from multimodal.weights.pretrained import Pretrained

SECTION = check(TINY["model"], Model)
STATE = {
    "epoch": 0.5,
    "samples": 7,
    "processes": 1,
    "data": {},
    "config": {},
    "skipped": 0,
    "nonfinite": {"total": 0, "in_a_row": 0},
    "micro_batch_size": 8,
}
FILES = (
    "model/model.safetensors",
    "model/config.json",
    "model/tokenizer.json",
    "optimizer.safetensors",
    "state.json",
)


def make_parts():
    """A model and an optimizer that has made two steps."""
    torch.manual_seed(5)
    model = build_model(SECTION)
    optimizer = build_optimizer(model, Optim())
    for _ in range(2):
        images, tokens = torch.rand(3, 3, 16, 16), torch.randint(0, 9, (3, 5))
        features = model(images, tokens, torch.full((3,), 5))
        (features.image * features.text * features.logit_scale).sum().backward()
        optimizer.step()
    tokenizer = build_tokenizer(
        SECTION.tokenizer, context_length=16, fixed_length=False, vocab_size=300, captions=["a b"]
    )
    transform = ImageTransform(SECTION.image.image_size, SECTION.preprocess)
    return {
        "pretrained": Pretrained(model, transform, tokenizer, SECTION),
        "optimizer": optimizer,
    }


def snapshot(parts, step):
    return take_snapshot({"step": step, **STATE}, **parts)


def save_three(run, parts):
    """Checkpoints of steps 4, 8 and 12."""
    checkpoints = Checkpoints(run, keep=3)
    for step in (4, 8, 12):
        checkpoints.save(snapshot(parts, step))
    return run


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def newest(run):
    return run / "checkpoints/step-00000012"
