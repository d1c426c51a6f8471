"""From a config section to a loss. A new loss is a file, a section and a line here."""

from __future__ import annotations

from multimodal.config import ContrastiveSection, Loss, SigmoidSection
from multimodal.losses.contrastive import ContrastiveLoss
from multimodal.losses.pairs import PairLoss
from multimodal.losses.sigmoid import SigmoidLoss


def build_loss(section: Loss) -> PairLoss:
    """The loss that a config section describes."""
    match section:
        case ContrastiveSection():
            return ContrastiveLoss(
                label_smoothing=section.label_smoothing, duplicates=section.duplicates
            )
        case SigmoidSection():
            return SigmoidLoss(duplicates=section.duplicates)
