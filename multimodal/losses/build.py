"""From a config section to a loss. A new loss is a file, a section and a line here."""

from __future__ import annotations

from torch import nn

from multimodal.config import ContrastiveSection, Loss, SigmoidSection
from multimodal.losses.contrastive import ContrastiveLoss
from multimodal.losses.sigmoid import SigmoidLoss


def build_loss(section: Loss) -> nn.Module:
    """The module whose `forward(image_features, text_features, logit_scale, logit_bias)` is it."""
    match section:
        case ContrastiveSection():
            return ContrastiveLoss(
                label_smoothing=section.label_smoothing, duplicates=section.duplicates
            )
        case SigmoidSection():
            return SigmoidLoss(duplicates=section.duplicates)
