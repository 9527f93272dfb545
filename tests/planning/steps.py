"""Small training steps whose peak is mostly activations: (module, batch, step)."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

Case = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor]]
VOCABULARY = 500
SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def gpt2(attention: str = "sdpa", layers: int = 4) -> Case:
    config = hf.GPT2Config(
        n_layer=layers, n_embd=128, n_head=4, vocab_size=VOCABULARY, n_positions=128,
        attn_implementation=attention, use_cache=False, **SPECIAL,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config).train(), torch.randint(3, VOCABULARY, (4, 128)), language_step


def gpt2_eager() -> Case:
    return gpt2("eager")


def bert() -> Case:
    config = hf.BertConfig(
        num_hidden_layers=4, hidden_size=128, num_attention_heads=4, intermediate_size=512, vocab_size=VOCABULARY,
        **SPECIAL,
    )  # fmt: skip
    tokens = torch.randint(3, VOCABULARY, (4, 128))
    mask = torch.ones_like(tokens)
    mask[:, 100:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    return hf.BertForMaskedLM(config).train(), batch, lambda model, batch: model(**batch).loss


def t5() -> Case:
    config = hf.T5Config(
        num_layers=2, d_model=128, num_heads=4, d_ff=256, d_kv=32, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config).train(), torch.randint(3, VOCABULARY, (4, 128)), language_step


def language_step(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens).loss


class Residual(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(width, out, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(out)
        self.conv_2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(out)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(width, out, 1, stride, bias=False) if stride != 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_2(self.conv_2(self.act(self.norm_1(self.conv_1(x)))))
        y += self.down(x)
        return self.act(y)


class ResNet(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        shapes = [(width, width, 1), (width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1)]
        self.blocks = nn.ModuleList(Residual(*shape) for shape in shapes)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def resnet() -> Case:
    return ResNet(), (torch.randn(16, 3, 96, 96), torch.randint(10, (16,))), classification_step


def classification_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 96)
        self.rnn = nn.LSTM(96, 128, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(tokens))[0])


def lstm() -> Case:
    return Recurrent(), torch.randint(VOCABULARY, (16, 96)), token_step


def token_step(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


class Encoder(nn.Module):
    """PyTorch's own transformer: attention reached through ``F.multi_head_attention_forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens)))


def encoder() -> Case:
    return Encoder(), torch.randint(VOCABULARY, (8, 128)), token_step


CASES = {case.__name__: case for case in (gpt2, gpt2_eager, bert, t5, resnet, lstm, encoder)}
