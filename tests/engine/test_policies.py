"""What users write as policy=."""

import pytest
import torch
from torch import nn

from lightning_remat import ConfigurationError, OpInfo, Remat
from lightning_remat.engine.policies import parse_policy
from lightning_remat.engine.rules import rule_for
from tests.helpers.exact import assert_exact

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Block(nn.Module):
    """A small MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    """Blocks and a head."""

    def __init__(self, blocks: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("selectiv", "did you mean 'selective'"),
        ("ful", "did you mean 'full'"),
        ("zzz", "There are: auto, none, full, sqrt, selective, offload_only, every:k"),
        ("every:0", "1 or more"),
        ("every:-1", "1 or more"),
        ("every:", "1 or more"),
        ("every:two", "1 or more"),
        ("", "is unknown"),
        ({}, "names no module"),
        ({"a": {"b": "full"}}, "mapping inside a mapping"),
        ({"": "full"}, "non-empty strings"),
        ({"a": "ful"}, "did you mean 'full'"),
        (3, "is not a policy"),
        (None, "is not a policy"),
        (["full"], "is not a policy"),
    ],
    ids=str,
)
def test_a_policy_that_cannot_work_is_refused(policy: object, message: str) -> None:
    """With the setting, the value, and the nearest names or what there is."""
    with pytest.raises(ConfigurationError, match=message) as caught:
        Remat(policy=policy)
    assert str(caught.value).startswith("policy")


def test_an_answer_that_is_no_verdict_is_refused() -> None:
    """A function over ops must say one of two words."""
    with pytest.raises(ConfigurationError, match="returned 'drop' for aten"), Remat(policy=lambda op: "drop"):
        Model()(X)


def test_what_a_function_over_ops_sees() -> None:
    """Names, modules, blocks in order of execution, bytes and kinds."""
    seen: list[OpInfo] = []

    def policy(op: OpInfo) -> str:
        seen.append(op)
        return "recompute"

    model = Model(2)
    with Remat(policy=policy):
        model(X).sum().backward()
    up = [op for op in seen if op.module.endswith("up")]
    assert [(op.name, op.module, op.block, op.bytes, op.kind) for op in up] == [
        ("aten.addmm.default", "blocks.0.up", 0, 4 * 16 * 4, "expensive"),
        ("aten.addmm.default", "blocks.1.up", 1, 4 * 16 * 4, "expensive"),
    ]
    assert [op.kind for op in seen if op.name == "aten.gelu.default"] == ["cheap", "cheap"]
    assert [op.block for op in seen if op.module == "head"] == [None]


def kept(remat: Remat) -> set[str]:
    """Modules whose results the last first step kept."""
    assert remat.ledger is not None
    return {line.module for line in remat.ledger.lines.values() if line.kept_bytes}


def test_policies_keep_what_they_say() -> None:
    """none: the tape is off; full: borders; every:k and sqrt: fewer borders; selective: products as well."""
    model = Model(6)
    engines = {}
    for policy in ("none", "full", "every:3", "sqrt", "selective"):
        remat = engines[policy] = Remat(policy=policy)
        for _ in range(2):
            with remat:
                loss = model(X).sum()
            loss.backward()
    assert engines["none"].stats.recorded_ops == 0
    assert engines["none"].blocks == []
    borders = {f"blocks.{i}" for i in range(6)}
    assert kept(engines["full"]) == borders
    assert kept(engines["every:3"]) == {"blocks.2", "blocks.5"}
    assert kept(engines["sqrt"]) == {"blocks.1", "blocks.3", "blocks.5"}
    ups = {f"blocks.{i}.up" for i in range(6)}
    assert kept(engines["selective"]) == borders | ups
    assert engines["full"].stats.replayed_ops > engines["selective"].stats.replayed_ops > 0


def test_a_mapping_governs_modules_by_name() -> None:
    """First match wins; what matches nothing is kept."""
    model = Model(3)
    remat = Remat(policy={"blocks.0": "full", "blocks.*.act": lambda op: "recompute"})
    remat.bind(model)
    assert remat.blocks == ["blocks.0", "blocks.0.act", "blocks.1.act", "blocks.2.act"]
    with remat:
        loss = model(X).sum()
    loss.backward()
    assert remat.ledger is not None
    dropped = {line.module for line in remat.ledger.lines.values() if line.dropped_bytes}
    assert dropped == {"blocks.0", "blocks.0.up", "blocks.0.act", "blocks.0.down", "blocks.1.act", "blocks.2.act"} - {
        "blocks.0"  # its result is a border
    }
    assert_exact(model, lambda m: m(X).square().sum(), {"*.blocks.0": "full", "*.blocks.*.act": "selective"})


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    """With what exists."""
    with pytest.raises(ConfigurationError, match=r"'layers\.\*' matches no submodule of Model.*blocks\.0"):
        Remat(policy={"layers.*": "full"}).bind(Model())


def test_borders_under_a_function_come_with_named_blocks() -> None:
    """Without blocks= a function decides about everything; with it, what crosses a block's border is kept."""
    model = Model(3)
    for blocks, expected in ((None, set()), (Block, {"blocks.0", "blocks.1", "blocks.2"})):
        remat = Remat(policy=lambda op: "recompute", blocks=blocks)
        with remat:
            loss = model(X).sum()
        loss.backward()
        assert kept(remat) == expected


def test_kinds_of_ops() -> None:
    """A sample of verdicts, read from schemas."""
    aten = torch.ops.aten
    kinds = {
        aten.addmm.default: ("pure", "expensive"),
        aten.convolution.default: ("pure", "expensive"),
        aten.linalg_svd.default: ("pure", "expensive"),
        aten.gelu.default: ("pure", "cheap"),
        aten.native_layer_norm.default: ("pure", "cheap"),
        aten.native_dropout.default: ("pure", "random"),
        aten.bernoulli_.float: ("write", "random"),
        aten.relu_.default: ("write", "cheap"),
        aten.add.out: ("write", "fixed"),
        aten.view.default: ("view", "cheap"),
        aten._unsafe_view.default: ("view", "cheap"),
        aten.empty_like.default: ("blank", "cheap"),
        aten.zeros_like.default: ("pure", "factory"),
        aten.quantize_per_tensor.default: ("pure", "fixed"),
    }
    for func, expected in kinds.items():
        rule = rule_for(func)
        assert (rule.form, rule.kind) == expected, rule.name


def test_a_parsed_policy_is_taken_as_it_is() -> None:
    policy = parse_policy("every:4")
    assert parse_policy(policy) is policy
    assert policy.blocks_per_segment(12) == 4
    assert parse_policy("sqrt").blocks_per_segment(16) == 4
    assert parse_policy("sqrt").blocks_per_segment(0) == 1
