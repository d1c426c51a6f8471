"""A text tower from transformers, behind the same face as `text.TextTower`."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from multimodal import config
from multimodal.models.hf_model import HfTower, read_tower


class HfTextTower(HfTower):
    """An `AutoModel` with token inputs; padding is hidden by an attention mask.

    Of an encoder-decoder the encoder is taken, of a model with a text part that part. A pooler head
    is dropped: it reads one token through weights that our pooling would leave without a gradient.

    Raises:
        ValueError: when the model is not found or incomplete, or is too short for
            `section.context_length`.
    """

    def __init__(self, section: config.HfText):
        super().__init__()
        self.pool = section.pool
        self.model = read_tower(
            section.name, side="text", pretrained=section.pretrained, pooler=False
        )
        _check_kind(self.model, section.name)
        self.width: int = self.model.config.hidden_size
        self.vocab_size: int = _token_embedding(self.model).num_embeddings
        _check_context(section, self.model)

    def forward(
        self, tokens: Int[Tensor, "B L"], lengths: Int[Tensor, "B"]
    ) -> Float[Tensor, "B width"]:
        """Embed texts.

        Args:
            tokens: int64, padded on the right.
            lengths: int64, tokens of each text, in 1..L.
        """
        valid_BL = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        output = self.model(input_ids=tokens, attention_mask=valid_BL.long())
        x_BLW = output.last_hidden_state
        match self.pool:
            case "cls":
                return x_BLW[:, 0]
            case "eot":
                return x_BLW[torch.arange(lengths.shape[0], device=lengths.device), lengths - 1]
            case "mean":
                return (x_BLW * valid_BL[..., None]).sum(dim=1) / lengths[:, None]


def _check_kind(model: nn.Module, name: str) -> None:
    if not hasattr(model.config, "hidden_size") or _token_embedding(model) is None:
        raise ValueError(
            f"model.text.name={name!r} is a {type(model).__name__}, which has no hidden_size or no "
            "token embedding; choose a text model such as a BERT"
        )
    if "siglip" in model.config.model_type:
        raise ValueError(
            f"model.text.name={name!r} is a SigLIP text tower, whose padding must be seen and "
            "never cut; use configs/model/siglip2-b-16.yaml, or load the whole model as hf:NAME"
        )


def _token_embedding(model: nn.Module) -> nn.Embedding | None:
    """Also of a part of a two-tower model of transformers 4, which cannot be asked."""
    if hasattr(model, "get_input_embeddings"):
        found = model.get_input_embeddings()
    else:
        found = getattr(getattr(model, "embeddings", None), "token_embedding", None)
    return found if isinstance(found, nn.Embedding) else None


def _check_context(section: config.HfText, model: nn.Module) -> None:
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None:
        longest -= _reserved_positions(model)
    if longest is not None and section.context_length > longest:
        raise ValueError(
            f"model.text.context_length={section.context_length} is more than the {longest} "
            f"positions of {section.name!r}; lower it"
        )


def _reserved_positions(model: nn.Module) -> int:
    """Positions before a text's first: RoBERTa and its kin count from the padding's id."""
    for name, module in model.named_modules():
        if (
            name.endswith("position_embeddings")
            and getattr(module, "padding_idx", None) is not None
        ):
            return module.padding_idx + 1
    return 0
