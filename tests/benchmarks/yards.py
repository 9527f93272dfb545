"""Models that ways of saving memory are compared on, each with its blocks, its batch and sizes for a short CPU step.

Weights are random and the batch is fixed: neither matters for memory, time or equality of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from models import GPT, Shape, tokens_for
from torch import nn

Level = Mapping[str, tuple[str, ...]]
VOCABULARY = 512


@dataclass(frozen=True, kw_only=True)
class Yard:
    """A model with all that a comparison needs to know about it."""

    model: nn.Module
    """Called with the batch, it returns the loss."""
    batch: Any
    blocks: list[nn.Module]
    """A chain: each takes the output of the one before as its first argument and returns one tensor."""
    regions: Level
    """By name of a level: methods within a block (dotted, ``a.b`` for the forward of that submodule) whose saved
    tensors are kept when the block is annotated by hand."""
    shape: Shape

    @property
    def switch(self) -> nn.Module | None:
        """The Hugging Face model in it, if that offers gradient checkpointing."""
        inner = getattr(self.model, "inner", None)
        return inner if inner is not None and inner.supports_gradient_checkpointing else None


class WithLoss(nn.Module):
    """A Hugging Face model as a function from its inputs to its loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.inner(**batch).loss


def gpt(shape: Shape) -> Yard:
    """The project's own GPT: fused attention, dropout around it."""
    model = GPT(shape)
    regions = {
        "attention op": ("fused",),
        "attention": ("qkv", "fused", "out"),
        "all linears and attention": ("qkv", "fused", "out", "up", "down"),
    }
    return Yard(model=model, batch=tokens_for(shape), blocks=list(model.blocks), regions=regions, shape=shape)


def llama(shape: Shape) -> Yard:
    """Hugging Face's Llama: RMS norms, rotary embedding, gated MLP, no biases, no dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    inner = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=shape.width,
            # A multiple of 32 near 8/3, as in the published sizes.
            intermediate_size=max(32, shape.width * 8 // 3 // 32 * 32),
            num_hidden_layers=shape.blocks,
            num_attention_heads=shape.heads,
            num_key_value_heads=max(1, shape.heads // 2),
            max_position_embeddings=shape.context,
        )
    )
    regions = {
        "attention": ("self_attn",),
        "all linears and attention": ("self_attn", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    }
    return Yard(
        model=WithLoss(inner), batch=_text(shape), blocks=list(inner.model.layers), regions=regions, shape=shape
    )


def gpt2(shape: Shape) -> Yard:
    """Hugging Face's GPT-2 with dropout, that of the attention weights included."""
    from transformers import GPT2Config, GPT2LMHeadModel

    inner = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=shape.context,
            n_embd=shape.width,
            n_layer=shape.blocks,
            n_head=shape.heads,
            resid_pdrop=shape.dropout,
            embd_pdrop=shape.dropout,
            attn_pdrop=shape.dropout,
            # Ids outside of the vocabulary would draw a warning for each model.
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    # Attention with dropout has no fused kernel on a CPU, so that to save it is to save several T x T tensors a head.
    regions = {
        "attention's linears": ("attn.c_attn", "attn.c_proj"),
        "all linears": ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
        "all linears and attention": ("attn", "mlp.c_fc", "mlp.c_proj"),
    }
    return Yard(
        model=WithLoss(inner), batch=_text(shape), blocks=list(inner.transformer.h), regions=regions, shape=shape
    )


def resnet(shape: Shape) -> Yard:
    """Hugging Face's ResNet-50 at a fraction of its width: ``width`` channels in the stem, images of ``context``²."""
    from transformers import ResNetConfig, ResNetForImageClassification

    share = [3, 4, 6, 3]
    depths = [max(1, round(part * shape.blocks / sum(share))) for part in share]
    inner = ResNetForImageClassification(
        ResNetConfig(
            embedding_size=shape.width,
            hidden_sizes=[shape.width * factor for factor in (4, 8, 16, 32)],
            depths=depths,
            num_labels=10,
        )
    )
    batch = {
        "pixel_values": torch.randn(shape.batch, 3, shape.context, shape.context),
        "labels": torch.randint(10, (shape.batch,)),
    }
    blocks = [layer for stage in inner.resnet.encoder.stages for layer in stage.layers]
    regions = {"first convolution": ("layer.0",), "two convolutions": ("layer.0", "layer.1")}
    return Yard(model=WithLoss(inner), batch=batch, blocks=blocks, regions=regions, shape=shape)


def _text(shape: Shape) -> dict[str, Any]:
    ids = torch.randint(VOCABULARY, (shape.batch, shape.context))
    return {"input_ids": ids, "labels": ids, "use_cache": False}


YARDS: dict[str, tuple[Callable[[Shape], Yard], Shape]] = {
    "gpt": (gpt, Shape(blocks=8, width=256, context=256, batch=4)),
    "llama": (llama, Shape(blocks=8, width=256, context=256, batch=4, dropout=0)),
    "gpt2": (gpt2, Shape(blocks=8, width=256, context=256, batch=3)),
    "resnet": (resnet, Shape(blocks=16, width=32, context=128, batch=8, dropout=0)),
}
"""By name: how to build it, and sizes at which a plain step takes a few tenths of a second on one core."""


def build(name: str, **sizes: int | None) -> Yard:
    """A model in training mode, with its default sizes where ``sizes`` has None."""
    make, shape = YARDS[name]
    torch.manual_seed(0)
    yard = make(replace(shape, **{key: size for key, size in sizes.items() if size is not None}))
    yard.model.train()
    return yard
