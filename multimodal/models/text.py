"""The text tower: a Transformer over tokens.

Two families that both come out of the settings:
- CLIP: causal, and the end-of-text token is the text. Padding comes after it, so the causal order
  hides it, no mask tensor is needed, and a batch can be cut to its longest text.
- SigLIP: every token sees every other, padding included, and the last position is the text. Such
  texts have a fixed length and are never cut.

Legend: B batch, L tokens, D width.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from multimodal import config
from multimodal.layers.block import Checkpointing
from multimodal.layers.masks import Mask
from multimodal.layers.position import LearnedPosition, sinusoidal_1d
from multimodal.layers.rotary import RotaryTable, table
from multimodal.models.encoder import EncoderStack, encoder_norm, map_pool


class TextTower(nn.Module):
    """Tokens to one vector for each text."""

    def __init__(self, section: config.TransformerText):
        super().__init__()
        self.section = section
        self.width = section.width
        self.vocab_size = section.vocab_size
        self.token_embedding = nn.Embedding(section.vocab_size, section.width)
        self.position = (
            LearnedPosition(section.context_length, section.width)
            if section.position == "learned"
            else None
        )
        self.encoder = EncoderStack(section)
        self.norm = encoder_norm(section)
        self.pool = map_pool(section) if section.pool == "map" else None

    def forward(
        self, tokens: Int[Tensor, "B L"], lengths: Int[Tensor, "B"]
    ) -> Float[Tensor, "B width"]:
        """Embed texts.

        Args:
            tokens: int64, padded on the right.
            lengths: int64, tokens of each text, in 1..L; the last of them ends the text.

        Raises:
            ValueError: when the shapes do not fit, or (on the CPU, where looking costs nothing) a
                token or a length is out of range.
        """
        self._check(tokens, lengths)
        x = self.token_embedding(tokens)
        if self.position is not None:
            x = self.position(x)
        elif self.section.position == "sinusoidal":
            x = x + sinusoidal_1d(tokens.shape[1], self.width).to(x.device)
        valid_BL = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        x = self.encoder(x, mask=self._mask(valid_BL), rope=self._rope(tokens))
        return self._pooled(x, lengths, valid_BL)

    def checkpoint_activations(self, mode: Checkpointing) -> None:
        """See `layers.block.Block`."""
        self.encoder.checkpoint_activations(mode)

    def _mask(self, valid_BL: Tensor) -> Mask | None:
        """The causal order hides padding from a text's tokens; only its last position sees it."""
        causal = self.section.causal
        hides = self.section.mask_padding and (not causal or self.section.pool == "last")
        if not causal and not hides:
            return None
        return Mask(causal=causal, key_valid=valid_BL if hides else None)

    def _rope(self, tokens: Tensor) -> RotaryTable | None:
        if not self.section.rope:
            return None
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return table(places, self.width // self.section.heads, self.section.rope_theta)

    def _pooled(self, x_BLD: Tensor, lengths: Tensor, valid_BL: Tensor) -> Tensor:
        match self.section.pool:
            case "eot":
                rows = torch.arange(lengths.shape[0], device=lengths.device)
                return self.norm(x_BLD[rows, lengths - 1])
            case "last":
                return self.norm(x_BLD[:, -1])
            case "mean":
                return (self.norm(x_BLD) * valid_BL[..., None]).sum(dim=1) / lengths[:, None]
            case "map":
                return self.pool(self.norm(x_BLD), Mask(key_valid=valid_BL))[:, 0]

    def _check(self, tokens: Tensor, lengths: Tensor) -> None:
        if tokens.ndim != 2 or lengths.shape != tokens.shape[:1]:
            raise ValueError(
                f"tokens have shape {list(tokens.shape)} and lengths {list(lengths.shape)}; "
                "they must be [B, L] and [B]"
            )
        longest = self.section.context_length
        if self.section.fixed_length and tokens.shape[1] != longest:
            raise ValueError(
                f"texts are {tokens.shape[1]} tokens long; with fixed_length=true every text is "
                f"padded to context_length={longest}"
            )
        if tokens.shape[1] > longest:
            raise ValueError(
                f"texts are {tokens.shape[1]} tokens long, more than context_length={longest}; "
                "cut them, as the tokenizer does, or raise model.text.context_length"
            )
        if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
            self._check_values(tokens, lengths)

    def _check_values(self, tokens: Tensor, lengths: Tensor) -> None:
        low, high = (int(x) for x in tokens.aminmax())
        if low < 0 or high >= self.section.vocab_size:
            raise ValueError(
                f"token id {low if low < 0 else high} is outside 0..{self.section.vocab_size - 1}; "
                "the tokenizer does not belong to this model, or model.text.vocab_size is too small"
            )
        short, long = (int(x) for x in lengths.aminmax())
        if short < 1 or long > tokens.shape[1]:
            raise ValueError(
                f"lengths go from {short} to {long}; they must lie in 1..{tokens.shape[1]}, "
                "the number of tokens"
            )
