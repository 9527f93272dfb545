"""A small byte-level GPT and the text it trains on. The other examples import this file; nothing here knows of remat.

The text is the source of Python's own standard library: real, on every machine, and nothing to download.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

BYTES = 256


class Block(nn.Module):
    """A pre-norm transformer block: ``(B, T, width)`` to ``(B, T, width)``."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        # No dropout on the attention weights themselves: with it a CPU has no fused kernel.
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.proj(attended.transpose(1, 2).reshape(batch, time, width)))
        return x + self.drop(self.mlp(self.norm_2(x)))


class ByteGPT(nn.Module):
    """Next-byte prediction; the head shares its weight with the embedding."""

    def __init__(self, *, blocks: int, width: int, heads: int, context: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.drop = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits ``(B, T, 256)`` for tokens ``(B, T)`` in 0..255, T at most the context."""
        x = self.drop(self.embed(tokens) + self.position[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte over windows ``(B, T + 1)``."""
        logits = self(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


class LitByteGPT(L.LightningModule):
    """`ByteGPT` as a LightningModule."""

    def __init__(self, *, learning_rate: float = 1e-3, **shape: int) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.gpt = ByteGPT(**shape)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.gpt.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class Windows(Dataset[Tensor]):
    """A text cut into windows of ``context + 1`` bytes, each an int64 tensor."""

    def __init__(self, text: bytes, context: int) -> None:
        self.length = context + 1
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.bytes) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.bytes[start : start + self.length].long()


def stdlib_source(limit: int = 4_000_000) -> bytes:
    """The first ``limit`` bytes of the standard library's top-level ``*.py`` files, sorted by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b""
    for path in sorted(folder.glob("*.py")):
        if len(text) >= limit:
            break
        text += path.read_bytes()
    if not text:
        raise FileNotFoundError(f"No *.py file in {folder}: this Python comes without the sources of its library.")
    return text[:limit]


def stdlib_batches(*, context: int, batch: int) -> DataLoader[Tensor]:
    """Shuffled batches ``(batch, context + 1)`` of that text; the order follows torch's global seed."""
    return DataLoader(Windows(stdlib_source(), context), batch_size=batch, shuffle=True, drop_last=True)
