"""Models of six kinds, at a size for figures and at one for tests: random weights, a batch each, a loss to train on.

They differ in what makes memory hard to foresee: fused and eager attention, dropout of all sorts, position biases that
all layers share, running statistics and in-place activations, recurrent kernels with workspaces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

hf.logging.set_verbosity_error()

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Size:
    """Rows of a batch, tokens (or pixels along an edge), width, number of layers, vocabulary (or classes)."""

    batch: int
    length: int
    width: int
    layers: int
    vocabulary: int


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and its two sizes."""

    build: Callable[[Size], nn.Module]
    batch: Callable[[Size], Batch]
    large: Size
    tiny: Size

    def make(self, *, tiny: bool = False) -> tuple[nn.Module, Batch]:
        """The model in training mode and its batch, always the same ones."""
        torch.manual_seed(0)
        size = self.tiny if tiny else self.large
        return self.build(size).train(), self.batch(size)


def words(size: Size) -> Batch:
    """Tokens of which some rows end early."""
    ids = torch.randint(3, size.vocabulary, (size.batch, size.length))
    mask = torch.ones_like(ids)
    mask[1::2, -size.length // 4 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def pictures(size: Size) -> Batch:
    """Noise."""
    labels = torch.randint(size.vocabulary, (size.batch,))
    return {"pixel_values": torch.randn(size.batch, 3, size.length, size.length), "labels": labels}


def gpt2(attention: str, dropout: float) -> Callable[[Size], nn.Module]:
    """GPT-2 with dropout, within attention as said: with some there is no fused kernel on the CPU."""

    def build(size: Size) -> nn.Module:
        config = hf.GPT2Config(
            vocab_size=size.vocabulary,
            n_positions=size.length,
            n_embd=size.width,
            n_layer=size.layers,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            attn_pdrop=dropout,
            attn_implementation=attention,
        )
        return hf.GPT2LMHeadModel(config)

    return build


def bert(size: Size) -> nn.Module:
    """BERT; dropout inside `scaled_dot_product_attention`, which then is no fused kernel on the CPU."""
    config = hf.BertConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        max_position_embeddings=size.length,
        attn_implementation="sdpa",
    )
    return hf.BertForMaskedLM(config)


def t5(size: Size) -> nn.Module:
    """T5: the encoder's output and each stack's position bias are read by all layers above."""
    config = hf.T5Config(
        vocab_size=size.vocabulary,
        d_model=size.width,
        d_kv=size.width // 4,
        d_ff=4 * size.width,
        num_layers=size.layers,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return hf.T5ForConditionalGeneration(config)


def resnet(size: Size) -> nn.Module:
    """ResNet with bottlenecks: running statistics, in-place ReLU."""
    config = hf.ResNetConfig(
        embedding_size=size.width,
        hidden_sizes=[2 * size.width, 4 * size.width],
        depths=[size.layers, size.layers],
        num_labels=size.vocabulary,
        layer_type="bottleneck",
    )
    return hf.ResNetForImageClassification(config)


class Recurrent(nn.Module):
    """A language model of residual LSTM blocks, the second of which has two layers with dropout between."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList([RecurrentBlock(size.width, 2 if i == 1 else 1) for i in range(size.layers)])
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        """The next-token loss of a batch."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask)
        loss = nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return hf.modeling_outputs.CausalLMOutput(loss=loss)


class RecurrentBlock(nn.Module):
    """Norm, LSTM, a projection with GELU, dropout."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rnn = nn.LSTM(width, width, num_layers=depth, batch_first=True, dropout=0.2 if depth > 1 else 0.0)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """``(B, T, width)`` to the same."""
        out, (last, _) = self.rnn(self.norm(x))
        x = x + self.drop(out * mask[..., None] + last[-1][:, None])
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))


_WORDS = Size(batch=8, length=128, width=128, layers=6, vocabulary=512)
_FEW = Size(batch=2, length=12, width=16, layers=3, vocabulary=32)

CASES: dict[str, Case] = {
    "gpt2": Case(build=gpt2("sdpa", 0.0), batch=words, large=_WORDS, tiny=_FEW),
    "gpt2-eager": Case(build=gpt2("eager", 0.1), batch=words, large=_WORDS, tiny=_FEW),
    "bert": Case(build=bert, batch=words, large=_WORDS, tiny=_FEW),
    "t5": Case(build=t5, batch=words, large=Size(batch=8, length=96, width=128, layers=3, vocabulary=512), tiny=_FEW),
    "resnet": Case(
        build=resnet,
        batch=pictures,
        large=Size(batch=32, length=64, width=32, layers=4, vocabulary=10),
        tiny=Size(batch=3, length=20, width=8, layers=2, vocabulary=4),
    ),
    "lstm": Case(
        build=Recurrent, batch=words, large=Size(batch=16, length=96, width=128, layers=6, vocabulary=512), tiny=_FEW
    ),
}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """What is trained on."""
    loss: Tensor = model(**batch).loss
    return loss
