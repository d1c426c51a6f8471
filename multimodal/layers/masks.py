"""What attention may see: one value, `Mask`, for causal order, padding and any boolean pattern.

Unlike `torch.nn.MultiheadAttention`, True always means "may attend", there are no additive masks,
and a query that may see nothing gives zeros instead of NaN (see `kernels`).
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Mask:
    """The keys that each query may attend to: those that all given parts allow.

    `mask_a & mask_b` allows what both allow.

    Raises:
        TypeError: when a part is not boolean, such as an additive mask of 0 and -inf.
        ValueError: when a part has the wrong number of axes.
    """

    causal: bool = False
    """Query i of Q sees the keys up to i + K - Q: the last query is aligned with the last key."""
    key_valid: Bool[Tensor, "B K"] | None = None
    """False hides a key, such as padding, from all queries of its sample."""
    allowed: Bool[Tensor, "Q K"] | Bool[Tensor, "b h q k"] | None = None
    """Any pattern: [Q, K], or four axes that broadcast to [B, H, Q, K]."""

    def __post_init__(self):
        if not isinstance(self.causal, bool):
            raise TypeError(f"causal must be True or False, not a {type(self.causal).__name__}")
        if self.key_valid is not None:
            _require_bool("key_valid", self.key_valid)
            if self.key_valid.ndim != 2:
                raise ValueError(
                    f"key_valid has shape {_shape(self.key_valid)}; it must be [batch, keys]"
                )
        if self.allowed is not None:
            _require_bool("allowed", self.allowed)
            if self.allowed.ndim not in (2, 4):
                # Three axes would be ambiguous: [B, Q, K] broadcasts as [H, Q, K].
                raise ValueError(
                    f"allowed has shape {_shape(self.allowed)}; it must be [queries, keys] or "
                    "broadcast to [batch, heads, queries, keys]; add the missing axis by [:, None]"
                )

    def __and__(self, other: "Mask") -> "Mask":
        if not isinstance(other, Mask):
            return NotImplemented
        return Mask(
            causal=self.causal or other.causal,
            key_valid=_both(self.key_valid, other.key_valid),
            allowed=_both(self.allowed, other.allowed),
        )

    @property
    def causal_only(self) -> bool:
        """Whether the causal order is all that is hidden, so that no mask tensor is needed."""
        return self.causal and self.key_valid is None and self.allowed is None

    def check(self, batch: int, heads: int, q_len: int, k_len: int) -> None:
        """Refuse a mask that was made for another shape of queries and keys.

        Raises:
            ValueError: naming the shape given and the shape needed.
        """
        if self.key_valid is not None and tuple(self.key_valid.shape) != (batch, k_len):
            raise ValueError(
                f"key_valid has shape {_shape(self.key_valid)}; these keys need "
                f"[{batch}, {k_len}] (batch, keys)"
            )
        if self.allowed is not None:
            needed = (batch, heads, q_len, k_len)[-self.allowed.ndim :]
            pairs = zip(self.allowed.shape, needed, strict=True)
            if any(size not in (1, want) for size, want in pairs):
                raise ValueError(
                    f"allowed has shape {_shape(self.allowed)}; it does not broadcast to "
                    f"{list(needed)} (the last of batch, heads, queries, keys)"
                )

    def dense(
        self, q_len: int, k_len: int, device: torch.device | str | None = None
    ) -> Bool[Tensor, "..."] | None:
        """The mask as one tensor that broadcasts to [B, H, Q, K]; None when nothing is hidden."""
        dense = self.allowed
        if self.key_valid is not None:
            dense = _both(dense, self.key_valid[:, None, None, :])
        if self.causal:
            everything = torch.ones(q_len, k_len, dtype=torch.bool, device=device)
            dense = _both(dense, everything.tril(k_len - q_len))
        return dense


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b


def _require_bool(name: str, part: Tensor) -> None:
    if not isinstance(part, Tensor):
        raise TypeError(f"{name} must be a boolean tensor, not a {type(part).__name__}")
    if part.dtype != torch.bool:
        raise TypeError(
            f"{name} has dtype {part.dtype} and shape {_shape(part)}; it must be boolean, True "
            "where a query may attend. An additive mask becomes one by `mask == 0`"
        )


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)
