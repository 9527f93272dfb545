"""What can not work is refused before the first step, by setting and value, and nothing has been changed."""

from typing import Any

import lightning.pytorch as lp
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_remat import ConfigurationError, Remat, RematCallback, RematStrategy
from lightning_remat.integrations.deepspeed import check_deepspeed
from tests.helpers.names import named
from tests.helpers.training import Lit, Net, regression, regression_data, trainer_for


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("ddpp", "'ddpp' is not a registered strategy"),
        ("remat", "a remat strategy already"),
        (nn.Linear, "is not supported"),
        (DDPStrategy(), "not an instance"),
        (None, "give a strategy's name or class"),
    ],
    ids=named,
)
def test_a_base_that_does_not_work_is_refused(base: Any, message: str) -> None:
    """With the setting, the value it got, and what to use."""
    with pytest.raises(ConfigurationError, match=message) as caught:
        RematStrategy(base=base)
    assert str(caught.value).startswith("base=")
    assert "ddp" in str(caught.value) or "RematStrategy" in str(caught.value)


def test_the_error_for_an_unknown_base_lists_what_works() -> None:
    with pytest.raises(ConfigurationError) as caught:
        RematStrategy(base="ddpp")
    assert "auto, fsdp2, ModelParallelStrategy, ddp, " in str(caught.value)
    assert "remat" not in str(caught.value).replace("base='ddpp'", "")
    assert "deepspeed_stage_2" in str(caught.value)
    assert "deepspeed_stage_3" not in str(caught.value)
    assert "offload" not in str(caught.value)


@pytest.mark.parametrize(
    ("base", "options", "message"),
    [
        ("deepspeed_stage_3", {}, "stage=3 .*deepspeed_stage_2"),
        ("deepspeed", {"stage": 3}, "stage=3 "),
        (lp.strategies.DeepSpeedStrategy, {"stage": 3}, "stage=3 "),
        ("deepspeed_stage_2_offload", {}, "offload_optimizer=True"),
    ],
    ids=named,
)
def test_settings_of_deepspeed_that_were_never_run_are_refused(
    base: Any, options: dict[str, Any], message: str
) -> None:
    """Before DeepSpeed is asked for, which need not be installed."""
    with pytest.raises(ConfigurationError, match=message):
        RematStrategy(base=base, **options)


def test_a_config_of_deepspeed_is_looked_into() -> None:
    """As Lightning hands it to DeepSpeed."""
    check_deepspeed({"zero_optimization": {"stage": 2, "offload_optimizer": None}, "activation_checkpointing": {}})
    check_deepspeed({})
    check_deepspeed({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}})
    for config, message in (
        ({"zero_optimization": {"stage": 3}}, "stage=3"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer=.*cpu"),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "cpu_offload=True"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activation_checkpointing=.*recomputes already"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            check_deepspeed(config)


def test_parameters_that_deepspeed_looks_after() -> None:
    """Partitioned ones are refused; with others a step is not run again."""
    net = nn.Linear(2, 2)
    net.weight._hp_mapping = None
    with pytest.raises(ConfigurationError, match="DeepSpeed trains the model"):
        Remat().attempt(lambda: None, net)
    net.weight.ds_status = "partitioned"
    with pytest.raises(ConfigurationError, match="weight is partitioned by DeepSpeed's stage 3"):
        Remat(policy="selective").bind(net)


def test_single_device_and_several_devices_contradict_each_other() -> None:
    with pytest.raises(ConfigurationError, match="devices=1"):
        trainer_for(RematStrategy(base="single_device"), devices=2)


def test_an_option_that_the_base_does_not_take_is_named() -> None:
    """Also where the base is known only once the trainer has chosen its devices."""
    with pytest.raises(ConfigurationError, match="find_unused"):
        trainer_for(RematStrategy(find_unused_parameters=True), devices=1)
    with pytest.raises(ConfigurationError, match="polcy"):
        RematStrategy(base=SingleDeviceStrategy, polcy="full")
    with pytest.raises(ConfigurationError, match="polcy"):
        RematStrategy(polcy="full")


OPTION_ERRORS: dict[str, dict[str, Any]] = {
    "unknown policy": {"policy": "fulll"},
    "every:0": {"policy": "every:0"},
    "offload to nothing": {"offload": ""},
    "offload to a place that is not there": {"offload": "dsik"},
    "offload and a policy that keeps": {"offload": "disk", "policy": "none"},
    "nowhere to offload to": {"policy": "offload_only"},
    "a budget that is not a size": {"budget": "much"},
    "a budget beside a policy": {"budget": "1GiB", "policy": "full"},
    "empty mapping": {"policy": {}},
    "blocks that name nothing": {"blocks": []},
    "verify is not a switch": {"verify": "yes"},
    "a number in other digits": {"policy": "every:٣"},
    "auto inside a mapping": {"policy": {"layers.*": "auto"}},
    "a budget beyond counting": {"budget": "9" * 400 + "GB"},
    "blocks beside a mapping": {"blocks": "layers.*", "policy": {"layers.*": "full"}},
}


@pytest.mark.parametrize("name", OPTION_ERRORS)
@pytest.mark.parametrize("where", [RematStrategy, RematCallback])
def test_an_option_that_can_not_work_is_refused_at_once(where: Any, name: str) -> None:
    with pytest.raises(ConfigurationError):
        where(**OPTION_ERRORS[name])


class Flat(Lit):
    """A module without blocks: all it has are leaves."""

    def __init__(self, net: nn.Module, loss: Any) -> None:
        super().__init__(nn.Linear(8, 1), loss)


class Checkpointed(Net):
    """A model that recomputes already, as those of several libraries say."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = True


class Wrapped(Net):
    """A model with one of its layers under torch's wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = checkpoint_wrapper(self.layers[1])


MODEL_ERRORS: dict[str, tuple[type[nn.Module], dict[str, Any], str]] = {
    "a pattern that matches nothing": (
        Net,
        {"policy": {"*.layer.*": "full"}},
        r"'\*\.layer\.\*' matches no.*net\.layers",
    ),
    "blocks that match nothing": (Net, {"blocks": "layer.*"}, r"blocks='layer\.\*' matches no.*net\.layers"),
    "no blocks": (Net, {"policy": "full"}, "none were found"),
    "gradient_checkpointing": (Checkpointed, {"policy": "full"}, "net already recomputes.*gradient_checkpointing"),
    "checkpoint_wrapper": (Wrapped, {"policy": "selective"}, r"net\.layers\.1 already recomputes"),
}


def everything_about(module: nn.Module) -> dict[str, Any]:
    """The names and identities of all that hangs on a module and its submodules, but for the root's trainer."""
    found: dict[str, Any] = {"keys": list(module.state_dict())}
    for name, m in module.named_modules():
        for key, value in vars(m).items():
            if key not in ("_trainer", "_current_fx_name", "_hparams"):
                inside = {k: id(v) for k, v in value.items()} if isinstance(value, dict) else None
                itself = value if isinstance(value, torch.device) else id(value)  # Lightning sets the device anew
                found[f"{name}.{key}"] = (itself, inside, list(value) if isinstance(value, (list, set)) else None)
    return found


@pytest.mark.parametrize("name", MODEL_ERRORS)
@pytest.mark.parametrize("where", ["strategy", "callback"])
def test_a_model_that_does_not_fit_the_options_is_refused_unchanged(where: str, name: str) -> None:
    """Before the first step, with the setting and the way out; parameters, hooks and attributes are as they were, and
    without lightning-remat the model trains."""
    build, options, message = MODEL_ERRORS[name]
    module = (Flat if name == "no blocks" else Lit)(build(), regression)
    weights = {key: t.clone() for key, t in module.state_dict().items()}
    before = everything_about(module)
    trainer = (
        trainer_for(RematStrategy(**options))
        if where == "strategy"
        else trainer_for("auto", [RematCallback(**options)])
    )
    with pytest.raises(ConfigurationError, match=message):
        trainer.fit(module, regression_data())
    assert everything_about(module) == before
    assert all(torch.equal(weights[key], t) for key, t in module.state_dict().items())
    assert module.steps_run == 0
    trainer_for().fit(module, regression_data())
    assert module.steps_run == 3


def test_hugging_face_checkpointing_is_refused_with_its_switch() -> None:
    from transformers import GPT2Config, GPT2Model

    model = GPT2Model(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=2, n_head=2))
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    with pytest.raises(ConfigurationError, match=r"net already recomputes.*gradient_checkpointing_disable\(\)"):
        trainer_for("remat").fit(Lit(model, regression), regression_data())


class Compiled(Lit):
    """All its blocks are compiled."""

    def __init__(self) -> None:
        super().__init__(nn.Identity(), regression)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(8, 1)
        for block in self.blocks:
            block.compile(backend="aot_eager")

    def training_step(self, batch: Any, index: int) -> Any:
        x, y = batch
        for block in self.blocks:
            x = block(x)
        return (self.head(x) - y).square().mean()


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # Dynamo looks at .grad of what it wraps
def test_blocks_that_are_compiled() -> None:
    """None are found, and the reason is given; where they are named, it is said that nothing was dropped."""
    with pytest.raises(
        ConfigurationError, match=r"none were found in Compiled: what is compiled \(blocks\.0, .*budget'"
    ):
        trainer_for(RematStrategy(policy="full")).fit(Compiled(), regression_data())
    with pytest.warns(UserWarning, match="ran none that could be watched"):
        trainer_for(RematStrategy(policy="full", blocks="blocks.*")).fit(Compiled(), regression_data())
