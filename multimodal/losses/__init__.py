"""Training objectives on unit-length embeddings, exact over any number of ranks."""

from multimodal.losses.contrastive import ContrastiveLoss
from multimodal.losses.sigmoid import SigmoidLoss

__all__ = ["ContrastiveLoss", "SigmoidLoss"]
