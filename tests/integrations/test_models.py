"""Real architectures, three steps under Lightning: every policy gives what plain training gives, in every bit."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_remat import RematStrategy
from tests.helpers.exact import recompute_all
from tests.helpers.training import Lit, Result, train

hf.logging.set_verbosity_error()

VOCABULARY, LENGTH, STEPS = 64, 10, 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One architecture: how to build it, what a batch is, where its blocks are, and a mapping that suits its names."""

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict[str, Tensor]]
    blocks: list[str]
    mapping: dict[str, Any] = field(default_factory=dict)


def words(generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, LENGTH - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def pictures(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, 3, 20, 20, generator=generator), "labels": torch.tensor([1, 2, 0])}


class Recurrent(nn.Module):
    """A language model of residual LSTM blocks, one of them of two stacked layers with dropout between."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([RecurrentBlock(width, depth) for depth in (1, 2, 1, 1)])
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask)
        loss = nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return hf.modeling_outputs.CausalLMOutput(loss=loss)


class RecurrentBlock(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rnn = nn.LSTM(width, width, num_layers=depth, batch_first=True, dropout=0.2 if depth > 1 else 0.0)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out, (last, _) = self.rnn(self.norm(x))
        return x + self.drop(out * mask[..., None] + last[-1][:, None])


def gpt2() -> nn.Module:
    size = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    size = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**size, **heads, attention_dropout=0.1))


def bert() -> nn.Module:
    size = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    config = hf.BertConfig(**size, num_attention_heads=2, max_position_embeddings=16, attn_implementation="eager")
    return hf.BertForMaskedLM(config)


def t5() -> nn.Module:
    size = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2}
    return hf.T5ForConditionalGeneration(hf.T5Config(**size, decoder_start_token_id=0))


def mixtral() -> nn.Module:
    size = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.1}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    # Jitter draws a random factor for what the router sees: a replay that drew another would choose other experts.
    return hf.MixtralForCausalLM(hf.MixtralConfig(**size, **heads, **experts, router_jitter_noise=0.1))


def mixtral_eager() -> nn.Module:
    """One matrix product per expert over the tokens it was given, found by `nonzero`: shapes depend on the data."""
    model = mixtral()
    model.config._experts_implementation = "eager"
    return model


def resnet() -> nn.Module:
    size = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "num_labels": 4}
    return hf.ResNetForImageClassification(hf.ResNetConfig(**size, layer_type="bottleneck"))


def mamba() -> nn.Module:
    return hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=3, use_cache=False)
    )


def rows(prefix: str, count: int) -> list[str]:
    return [f"{prefix}.{i}" for i in range(count)]


CASES = {
    "gpt2": Case(
        build=gpt2,
        batch=words,
        blocks=rows("net.transformer.h", 4),
        mapping={"*.mlp*": "full", "*.h.1.attn": recompute_all, "*.attn": "selective"},
    ),
    "llama": Case(build=llama, batch=words, blocks=rows("net.model.layers", 4), mapping={"*.mlp*": "full"}),
    "bert": Case(build=bert, batch=words, blocks=rows("net.bert.encoder.layer", 4), mapping={"*.attention": "full"}),
    "t5": Case(
        build=t5,
        batch=words,
        blocks=rows("net.encoder.block", 3) + rows("net.decoder.block", 3),
        mapping={"*.encoder.*": "every:2", "*.decoder.block.*": "selective"},
    ),
    "mixtral": Case(build=mixtral, batch=words, blocks=rows("net.model.layers", 3), mapping={"*.mlp": "full"}),
    "mixtral-eager": Case(
        build=mixtral_eager, batch=words, blocks=rows("net.model.layers", 3), mapping={"*.experts": "full"}
    ),
    "resnet": Case(
        build=resnet,
        batch=pictures,
        blocks=rows("net.resnet.encoder.stages.0.layers", 2) + rows("net.resnet.encoder.stages.1.layers", 2),
        mapping={"*.stages.0": "full", "*.normalization": "selective"},
    ),
    "mamba": Case(build=mamba, batch=words, blocks=rows("net.backbone.layers", 3), mapping={"*.mixer": "full"}),
    "lstm": Case(build=Recurrent, batch=words, blocks=rows("net.layers", 4), mapping={"*.rnn": "full"}),
}

POLICIES: dict[str, Any] = {
    "full": "full",
    "every:2": "every:2",
    "sqrt": "sqrt",
    "selective": "selective",
    "recompute all": recompute_all,
    "by module": None,  # each case has its own
}


def loss_of(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return net(**batch).loss


def run(name: str, strategy: RematStrategy | None) -> Result:
    generator = torch.Generator().manual_seed(11)
    data = DataLoader([CASES[name].batch(generator) for _ in range(STEPS)], batch_size=None)
    return train(lambda: Lit(CASES[name].build().train(), loss_of), data, strategy=strategy or "auto")


@cache
def plain(name: str) -> Result:
    return run(name, None)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_in_every_bit(name: str, policy: str) -> None:
    """Losses, gradients of each step, parameters, buffers, optimizer state and random streams are those of plain
    training, the step's own code ran once per step, and something was recomputed."""
    expected = plain(name)
    result = run(name, RematStrategy(policy=POLICIES[policy] or CASES[name].mapping))
    assert result.difference(expected) == []
    assert result.steps_run == STEPS
    assert len(result.gradients) == STEPS
    assert result.replayed_ops > 0


@pytest.mark.parametrize("name", CASES)
def test_verification_finds_nothing_and_changes_nothing(name: str) -> None:
    """`verify=True` computes values again while the true ones are there: none differs, which would be a warning and
    thus an error here, and the training is still that of plain PyTorch."""
    strategy = RematStrategy(policy=recompute_all, verify=True)
    result = run(name, strategy)
    assert result.difference(plain(name)) == []
    verifier = strategy.remat.verifier
    assert verifier is not None
    assert verifier.different == set()
    assert verifier.values > 0


@pytest.mark.parametrize("name", CASES)
def test_blocks_found_are_the_layers(name: str) -> None:
    """The repeated layers are found by themselves: not the stages around them, and not the parts inside."""
    strategy = RematStrategy(policy="full")
    strategy.remat.bind(Lit(CASES[name].build(), loss_of))
    assert strategy.remat.blocks == CASES[name].blocks
