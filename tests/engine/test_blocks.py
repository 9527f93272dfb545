"""Finding blocks, and naming them."""

import pytest
import torch
from torch import nn

from lightning_remat import ConfigurationError, Remat
from lightning_remat.engine.blocks import find_blocks, find_units


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))


class Layer(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.norm1, self.attn, self.norm2 = nn.LayerNorm(4), Attention(), nn.LayerNorm(4)
        mlp = [nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)) for _ in range(max(1, experts))]
        self.mlp = nn.ModuleList(mlp) if experts else mlp[0]


class Stage(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[Layer() for _ in range(depth)])
        self.downsample = nn.Linear(4, 4)


def names(found: list[tuple[str, nn.Module]]) -> list[str]:
    return [name for name, _ in found]


def test_layers_of_a_list() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 4), "layers": nn.ModuleList([Layer(), Layer()])})
    assert names(find_blocks(model)) == ["layers.0", "layers.1"]


def test_layers_under_an_encoder_and_a_decoder() -> None:
    model = nn.ModuleDict({"encoder": nn.ModuleList([Layer(), Layer()]), "decoder": nn.ModuleList([Layer(), Layer()])})
    assert names(find_blocks(model)) == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


def test_stages_are_opened() -> None:
    """ResNet, Swin: the repeated modules inside the stages, not the stages."""
    model = nn.Sequential(nn.Linear(4, 4), Stage(2), Stage(3))
    assert names(find_blocks(model)) == [f"1.blocks.{i}" for i in range(2)] + [f"2.blocks.{i}" for i in range(3)]


def test_experts_are_not_blocks() -> None:
    """A mixture's experts repeat more often than its layers; they lie side by side."""
    model = nn.ModuleList([Layer(experts=4), Layer(experts=4)])
    assert names(find_blocks(model)) == ["0", "1"]


def test_siblings_by_name() -> None:
    model = nn.Module()
    model.first, model.second, model.head = Layer(), Layer(), nn.Linear(4, 4)
    assert names(find_blocks(model)) == ["first", "second"]


def test_a_shared_layer_counts_once() -> None:
    layer = Layer()
    assert names(find_blocks(nn.ModuleList([layer, layer, Layer()]))) == ["0", "2"]


def test_nothing_repeats() -> None:
    """Then the topmost parts stand in, under policies that need blocks."""
    model = nn.ModuleDict({"generator": Layer(), "critic": nn.Sequential(nn.Linear(4, 4), nn.ReLU())})
    assert names(find_blocks(model)) == []
    assert names(find_units(model)) == ["generator", "critic"]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (Layer, ["layers.0", "layers.1"]),
        ("layers.*", ["layers.0", "layers.1"]),
        ("*.attn", ["layers.0.attn", "layers.1.attn"]),
        ([Attention, "head"], ["layers.0.attn", "layers.1.attn", "head"]),
    ],
    ids=str,
)
def test_naming_blocks(blocks: object, expected: list[str]) -> None:
    """By class, pattern, or a list; what lies inside another match is left out."""
    model = nn.ModuleDict({"layers": nn.ModuleList([Layer(), Layer()]), "head": nn.Sequential(nn.Linear(4, 4))})
    remat = Remat(policy="full", blocks=blocks)
    remat.bind(model)
    assert remat.blocks == expected


def test_naming_a_module_itself() -> None:
    model = nn.ModuleList([Layer(), Layer()])
    remat = Remat(policy="full", blocks=model[1])
    remat.bind(model)
    assert remat.blocks == ["1"]


@pytest.mark.parametrize("blocks", [[], 3, "", [nn.Linear, 5], int])
def test_blocks_that_could_name_nothing_are_refused(blocks: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^blocks="):
        Remat(policy="full", blocks=blocks)


@pytest.mark.parametrize("blocks", [nn.Conv2d, "layer.*", [Layer, "nothing"]], ids=str)
def test_blocks_that_match_nothing_are_refused(blocks: object) -> None:
    """With what exists."""
    with pytest.raises(ConfigurationError, match=r"matches no submodule.*0\.attn"):
        Remat(policy="full", blocks=blocks).bind(nn.ModuleList([Layer(), Layer()]))


@pytest.mark.parametrize("policy", ["full", "every:2", "sqrt"])
def test_no_blocks_under_a_policy_that_needs_them(policy: str) -> None:
    """An error that says what to do; selective needs none."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])
    with pytest.raises(ConfigurationError, match=r"blocks=.*selective"):
        Remat(policy=policy).bind(model)
    Remat(policy="selective").bind(model)


def test_compiled_and_scripted_modules_are_left_alone() -> None:
    """Hooks do not belong into what is compiled."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    blocks[0].compile(backend="eager")
    with pytest.warns(DeprecationWarning, match="script"):
        scripted = torch.jit.script(blocks[1])
    model = nn.ModuleList([blocks[0], scripted, blocks[2], blocks[3]])
    assert names(find_blocks(model)) == ["2", "3"]


def test_layers_without_parts_of_their_own() -> None:
    """A row of the user's own leaf class is a row of blocks; a row of torch's is not."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    assert names(find_blocks(nn.Sequential(Own(), Own(), nn.Linear(4, 4), nn.Linear(4, 4)))) == ["0", "1"]
