"""A text tower from transformers, behind the same face as `text.TextTower`."""

from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from multimodal import config
from multimodal.layers.block import Checkpointing


class HfTextTower(nn.Module):
    """An `AutoModel` with token inputs; padding is hidden by an attention mask.

    Of an encoder-decoder the encoder is taken, of a model with a text part that part. A pooler head
    is dropped: it reads one token through weights that our pooling would leave without a gradient.

    Raises:
        ValueError: when the model is not found, or is too short for `section.context_length`.
    """

    def __init__(self, section: config.HfText):
        super().__init__()
        self.pool = section.pool
        self.model = _text_part(_read(section), section.name)
        self.width: int = self.model.config.hidden_size
        self.vocab_size: int = self.model.get_input_embeddings().num_embeddings
        _check_context(section, self.model)

    def save_architecture(self, folder: Path | str) -> None:
        """Write transformers' `config.json`, from which `pretrained: false` rebuilds the tower."""
        self.model.config.save_pretrained(folder)

    def checkpoint_activations(self, mode: Checkpointing) -> None:
        """transformers knows whole blocks only, so `selective` is `full` here.

        Raises:
            ValueError: when the model cannot.
        """
        if mode == "none":
            return
        # The older name is deprecated in transformers 5 and the only one before.
        enable = getattr(self.model, "activation_checkpointing_enable", None)
        enable = enable or self.model.gradient_checkpointing_enable
        enable({"use_reentrant": False})

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
                return x_BLW[torch.arange(len(lengths), device=lengths.device), lengths - 1]
            case "mean":
                return (x_BLW * valid_BL[..., None]).sum(dim=1) / lengths[:, None]


def _read(section: config.HfText) -> PreTrainedModel:
    name = section.name
    try:
        if section.pretrained:
            return AutoModel.from_pretrained(name, dtype=torch.float32)
        return AutoModel.from_config(AutoConfig.from_pretrained(name), dtype=torch.float32)
    except OSError as error:
        raise ValueError(
            f"model.text.name={name!r} is neither a folder with a transformers model nor in the "
            "Hugging Face cache, and it could not be fetched. Give a local folder, or run "
            f"`hf download {name}` once where there is a network, and check the spelling. "
            f"transformers says: {error}"
        ) from error


def _text_part(model: PreTrainedModel, name: str) -> PreTrainedModel:
    if model.config.is_encoder_decoder:
        model = model.get_encoder()
    if hasattr(model, "text_model"):
        model = model.text_model
    if not hasattr(model.config, "hidden_size"):
        raise ValueError(
            f"model.text.name={name!r} is a {type(model).__name__}, which has no hidden_size; "
            "choose a text model such as a BERT"
        )
    if "siglip" in model.config.model_type:
        raise ValueError(
            f"model.text.name={name!r} is a SigLIP text tower, whose padding must be seen and "
            "never cut; use configs/model/siglip2-b-16.yaml, or load the whole model as hf:NAME"
        )
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    return model


def _check_context(section: config.HfText, model: PreTrainedModel) -> None:
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest is not None and "roberta" in model.config.model_type:
        longest -= model.config.pad_token_id + 1  # its positions start after the padding's
    if longest is not None and section.context_length > longest:
        raise ValueError(
            f"model.text.context_length={section.context_length} is more than the {longest} "
            f"positions of {section.name!r}; lower it"
        )
