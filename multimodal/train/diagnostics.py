"""What a run tells about itself beside its loss, and when it raises its voice.

Columns of `metrics.jsonl`, all found at logged steps only and from what the step has at hand:

image_grad_norm, text_grad_norm, temperature_grad_norm
    norm of the global batch's gradient of a tower with its projection, and of the logits' scale and
    offset, before clipping; their squares add up to that of `grad_norm`. 0 for what is frozen.
alignment, image_uniformity, text_uniformity, modality_gap, image_effective_rank,
text_effective_rank
    as `losses.geometry` defines them, of up to 512 pairs spread evenly over the global batch, the
    same for any number of processes.
peak_memory_mb
    largest of all processes, in 10^6 bytes: on CUDA what tensors took at most since the row before;
    elsewhere what the process has had resident at most since it started.
mfu
    operations a second (`flops.PairFlops` a pair, so nothing computed again counts) as a share of
    what all processes' devices reached on large matrix products when the run started.
"""

from __future__ import annotations

import logging
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from multimodal.data.batch import Batch
from multimodal.distributed import (
    all_reduce_max,
    all_reduce_sum,
    gather_objects,
    gather_rows,
    gradient_norm,
    rank,
    world_size,
)
from multimodal.losses.geometry import alignment, effective_rank, modality_gap, uniformity
from multimodal.models.two_tower import Features, TwoTower
from multimodal.train.checkpoint import Checkpoint
from multimodal.train.collapse import Collapse
from multimodal.train.flops import count_flops, matmul_rate
from multimodal.train.report import Report, Row
from multimodal.train.schedule import Schedule
from multimodal.train.spikes import LossBand
from multimodal.train.step import StepResult
from multimodal.weights.pretrained import Pretrained

log = logging.getLogger(__name__)

_PAIRS = 512
"""That the geometry is taken from."""
_KEYS = 4096
"""Of a spike's batch that are listed; its positions tell all."""


class Diagnostics:
    """Looks at steps, on all ranks; made before the model is wrapped.

    Args:
        found: the checkpoint that the run resumes from; bands and highest values go on.
    """

    def __init__(
        self,
        schedule: Schedule,
        pretrained: Pretrained,
        accelerator: Accelerator,
        found: Checkpoint | None,
    ):
        self._schedule = schedule
        self._device = accelerator.device
        self._flops = count_flops(pretrained)
        dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
        own = torch.tensor(matmul_rate(self._device, dtype), dtype=torch.float64)
        self._rate = float(all_reduce_sum(own))
        state = found.state.get("diagnostics", {}) if found else {}
        self._band = LossBand(state.get("losses", ()))
        self._collapse = Collapse(state.get("collapse", {}))

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"diagnostics": {"losses": self._band.losses, "collapse": self._collapse.state()}}

    def look(self, tower: TwoTower, features: Features) -> dict[str, float]:
        """Columns of a step whose gradients are there and not clipped yet.

        Args:
            tower: the model itself, not what Accelerate has put around it.
            features: of this rank's rows.
        """
        norms = {
            f"{part}_grad_norm": float(gradient_norm(nn.ModuleList(tower.modules_of(part))))
            for part in ("image", "text", "temperature")
        }
        peak = torch.tensor(peak_memory(self._device), dtype=torch.float64)
        peak_mb = float(all_reduce_max(peak)) / 1e6
        return norms | geometry(features) | {"peak_memory_mb": peak_mb}

    def speed(self, samples_per_second: float, batch: Batch) -> Row:
        """The column `mfu`."""
        flops = self._flops.of(self._schedule.batch_size, batch.tokens.shape[1])
        return {"mfu": flops * samples_per_second / self._rate}

    def check(self, step: int, result: StepResult, batch: Batch, report: Report) -> None:
        """Note a spike of the loss, and warn when a tower's embeddings collapse."""
        if not result.finite:
            return
        band = self._band.median_and_limit()
        if band is not None and result.loss > band[1]:
            report.spike(self._spike(step, result.loss, *band, batch))
        self._band.add(result.loss)
        allowed = min(_PAIRS, self._schedule.batch_size, self._flops.embed_dim)
        warmed_up = step > self._schedule.warmup_steps
        for warning in self._collapse.look(result.metrics, allowed=allowed, warmed_up=warmed_up):
            log.warning("step %d: %s", step, warning)

    def _spike(self, step: int, loss: float, median: float, limit: float, batch: Batch) -> Row:
        first = self._schedule.samples(step - 1)
        keys = [key for own in gather_objects(batch.keys) for key in own]
        return {
            "step": step,
            "loss": loss,
            "median": median,
            "limit": limit,
            "positions": [first, first + self._schedule.batch_size - 1],
            "keys": keys[:_KEYS],
        }


def geometry(features: Features) -> dict[str, float]:
    """How some of the global batch's embeddings lie; the same on all ranks."""
    assert features.image is not None and features.text is not None
    rows = _own_share(len(features.image))
    image, text = (gather_rows(x[rows]) for x in (features.image, features.text))
    found = {
        "alignment": alignment(image, text),
        "image_uniformity": uniformity(image),
        "text_uniformity": uniformity(text),
        "modality_gap": modality_gap(image, text),
        "image_effective_rank": effective_rank(image),
        "text_effective_rank": effective_rank(text),
    }
    numbers = torch.stack([x.double() for x in found.values()]).tolist()
    return dict(zip(found, numbers, strict=True))


def _own_share(rows: int) -> Tensor:
    """Which of this rank's rows are among those spread evenly over the global batch."""
    whole = rows * world_size()
    count = min(whole, _PAIRS)
    chosen = torch.arange(count) * whole // count - rank() * rows
    return chosen[(chosen >= 0) & (chosen < rows)]


def peak_memory(device: torch.device) -> int:
    """Bytes at most since the last call on CUDA, since the process started elsewhere."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would count the parent's memory at the fork too
        return 1024 * int(status.read_text().partition("VmHWM:")[2].split()[0])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
