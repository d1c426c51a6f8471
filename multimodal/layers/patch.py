"""Patches of a picture as tokens."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class PatchEmbed(nn.Module):
    """A Linear on each patch: a convolution with stride = kernel, without convolution kernels.

    `proj.weight` is [width, in_channels * patch * patch], the convolution's weight flattened. A
    Linear avoids cuDNN's slow paths, and patches that are left out cost nothing.
    """

    def __init__(self, patch: int, width: int, *, in_channels: int = 3, bias: bool = True):
        super().__init__()
        self.patch = patch
        self.proj = nn.Linear(in_channels * patch * patch, width, bias=bias)

    def forward(
        self,
        images: Float[Tensor, "B C H W"],
        keep: Int[Tensor, "B n"] | None = None,
    ) -> Float[Tensor, "B n width"]:
        """Embed all patches row by row, or those at the indices `keep` in their order.

        Raises:
            TypeError: when the images are not floating.
            ValueError: when the patch does not divide height and width.
        """
        if not images.is_floating_point():
            raise TypeError(f"images have dtype {images.dtype}; normalise them to floats first")
        height, width, p = images.shape[2], images.shape[3], self.patch
        if height % p or width % p:
            raise ValueError(f"a picture of {height} x {width} is no grid of {p} x {p} patches")
        rows, columns = height // p, width // p
        grid = images.unflatten(3, (columns, p)).unflatten(2, (rows, p))  # B C rows p columns p
        grid = grid.permute(0, 2, 4, 1, 3, 5)
        if keep is None:
            return self.proj(grid.flatten(3).flatten(1, 2))
        batch = torch.arange(len(images), device=images.device)[:, None]
        return self.proj(grid[batch, keep // columns, keep % columns].flatten(2))
