"""The image tower: a Vision Transformer (arXiv 2010.11929).

How it differs from the paper:
- Registers (arXiv 2309.16588) and rotary positions are available. The tokens are the class token,
  the registers, then the patches row by row; only the patches, and the class token where positions
  are learned, have positions.
- Patch dropout (arXiv 2212.00794) leaves patches out before they are embedded, so that they cost
  nothing.
- Any size that the patch divides is accepted; learned positions are then resampled.

Legend: B batch, H W pixels, P patches of a picture, n patches kept, N tokens, D width.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from multimodal import config
from multimodal.layers.block import Checkpointing
from multimodal.layers.patch import PatchEmbed
from multimodal.layers.position import LearnedPosition, sinusoidal_2d
from multimodal.layers.rotary import RotaryTable, grid, table
from multimodal.models.encoder import EncoderStack, encoder_norm, map_pool


class Grid(NamedTuple):
    """Size of a picture in patches."""

    rows: int
    columns: int


class VitTower(nn.Module):
    """Pixels to one vector for each picture."""

    def __init__(self, section: config.VitImage):
        super().__init__()
        self.section = section
        self.width = section.width
        side = section.image_size // section.patch_size
        self.grid = Grid(side, side)
        self.prefix = section.class_token + section.registers
        self.patch = PatchEmbed(section.patch_size, section.width, bias=section.patch_bias)
        self.class_token = _token(section.width) if section.class_token else None
        self.registers = _token(section.registers, section.width) if section.registers else None
        self.position = (
            LearnedPosition(section.class_token + side * side, section.width)
            if section.position == "learned"
            else None
        )
        self.pre_norm = encoder_norm(section) if section.pre_norm else None
        self.encoder = EncoderStack(section)
        self.norm = encoder_norm(section)
        self.pool = map_pool(section) if section.pool == "map" else None

    def forward(self, pixels: Float[Tensor, "B C H W"]) -> Float[Tensor, "B width"]:
        """Embed pictures.

        Args:
            pixels: normalised pictures of 3 channels.

        Raises:
            ValueError: when the shape is another, or the patch does not divide H and W.
        """
        size = self._grid_of(pixels)
        keep_Bn = self._draw_patches(pixels.shape[0], size, pixels.device)
        x = self.patch(pixels, keep_Bn)
        class_position, positions_PD = self._positions(size, pixels.device)
        if positions_PD is not None:
            x = x + (positions_PD if keep_Bn is None else positions_PD[keep_Bn])
        x = torch.cat([*self._prefix_tokens(pixels.shape[0], class_position), x], dim=1)
        if self.pre_norm is not None:
            x = self.pre_norm(x)
        x = self.encoder(x, rope=self._rope(size, keep_Bn, pixels.device))
        return self._pooled(x)

    def checkpoint_activations(self, mode: Checkpointing) -> None:
        """See `layers.block.Block`."""
        self.encoder.checkpoint_activations(mode)

    def _grid_of(self, pixels: Tensor) -> Grid:
        if pixels.ndim != 4 or pixels.shape[1] != 3:
            raise ValueError(f"pictures have shape {list(pixels.shape)}; it must be [B, 3, H, W]")
        height, width = pixels.shape[2:]
        patch = self.section.patch_size
        if height % patch or width % patch or not height or not width:
            raise ValueError(
                f"pictures are {height} x {width}, which patches of {patch} x {patch} do not tile; "
                f"use multiples of {patch}, such as model.image.image_size="
                f"{self.section.image_size}"
            )
        return Grid(height // patch, width // patch)

    def _draw_patches(self, batch: int, size: Grid, device: torch.device) -> Tensor | None:
        """Indices [B, n] of the patches that training keeps; None keeps all."""
        if not self.training or self.section.patch_dropout == 0:
            return None
        patches = size.rows * size.columns
        kept = max(1, round(patches * (1 - self.section.patch_dropout)))
        return torch.rand(batch, patches, device=device).argsort(dim=1)[:, :kept]

    def _positions(self, size: Grid, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """What is added to the class token, [D], and to the patches, [P, D]."""
        if self.section.position == "sinusoidal":
            return None, sinusoidal_2d(*size, self.width).to(device)
        if self.position is None:
            return None, None
        first = int(self.section.class_token)
        weight = self.position.weight
        if size != self.grid:
            # Imported here: timm takes seconds to import, and brings W&B with it.
            from timm.layers import resample_abs_pos_embed

            weight = resample_abs_pos_embed(
                weight[None], list(size), list(self.grid), num_prefix_tokens=first
            )[0]
        return weight[0] if first else None, weight[first:]

    def _prefix_tokens(self, batch: int, class_position: Tensor | None) -> list[Tensor]:
        tokens = []
        if self.class_token is not None:
            token = (
                self.class_token if class_position is None else self.class_token + class_position
            )
            tokens.append(token.expand(batch, 1, -1))
        if self.registers is not None:
            tokens.append(self.registers.expand(batch, -1, -1))
        return tokens

    def _rope(self, size: Grid, keep_Bn: Tensor | None, device: torch.device) -> RotaryTable | None:
        if not self.section.rope:
            return None
        head_dim = self.width // self.section.heads
        rope = table(grid(*size, device), head_dim, self.section.rope_theta, prefix=self.prefix)
        if keep_Bn is None:
            return rope
        prefix = torch.arange(self.prefix, device=device).expand(len(keep_Bn), -1)
        tokens_BN = torch.cat([prefix, keep_Bn + self.prefix], dim=1)
        return RotaryTable(*(angles[tokens_BN][:, None] for angles in rope))  # [B, 1, N, pairs]

    def _pooled(self, x_BND: Tensor) -> Tensor:
        match self.section.pool:
            case "cls":
                return self.norm(x_BND[:, 0])
            case "mean":
                return self.norm(x_BND[:, self.prefix :]).mean(dim=1)
            case "map":
                return self.pool(self.norm(self._without_registers(x_BND)))[:, 0]

    def _without_registers(self, x_BND: Tensor) -> Tensor:
        if self.registers is None:
            return x_BND
        first = int(self.section.class_token)
        return torch.cat([x_BND[:, :first], x_BND[:, self.prefix :]], dim=1)


def _token(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * shape[-1] ** -0.5)
