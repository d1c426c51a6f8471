"""Why there are several heads: one pattern of attention cannot keep two positions apart."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from multimodal.layers.attention import MultiHeadAttention

TOKENS, LENGTH, DIM = 11, 5, 32


class OneLayer(nn.Module):
    """Embeddings, one attention, a linear read-out of two tokens for each position."""

    def __init__(self, heads: int):
        super().__init__()
        self.token = nn.Embedding(TOKENS, DIM)
        self.position = nn.Parameter(torch.randn(LENGTH, DIM))
        self.attention = MultiHeadAttention(DIM, heads)
        self.read = nn.Linear(DIM, 2 * TOKENS)

    def forward(self, tokens):
        y = self.attention(self.token(tokens) + self.position)
        return self.read(y).unflatten(-1, (2, TOKENS))


def neighbours(tokens):
    return torch.stack([tokens.roll(1, dims=1), tokens.roll(-1, dims=1)], dim=-1)


def accuracy_after_training(heads: int) -> float:
    model = OneLayer(heads)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        tokens = torch.randint(TOKENS, (64, LENGTH))
        loss = F.cross_entropy(model(tokens).flatten(0, 2), neighbours(tokens).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tokens = torch.randint(TOKENS, (512, LENGTH))
    right = model(tokens).argmax(dim=-1) == neighbours(tokens)
    return right.all(dim=-1).float().mean().item()


@pytest.mark.parametrize("seed", [0, 1])
def test_two_heads_copy_the_left_and_the_right_neighbour_in_order_and_one_cannot(seed):
    # Measured over 8 seeds: two heads 1.00 each, one head 0.09 to 0.21.
    torch.manual_seed(seed)
    assert accuracy_after_training(heads=2) >= 0.99
    assert accuracy_after_training(heads=1) <= 0.3
