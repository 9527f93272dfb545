"""``with Remat(...):`` in a Fabric loop, for one device and for two processes; what Fabric is not to be given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn

from lightning_remat import ConfigurationError, Remat, RematStrategy
from tests.helpers.bits import difference_in_bits, random_streams
from tests.helpers.exact import EVERYTHING, recompute_all
from tests.helpers.forks import run_ranks
from tests.helpers.names import named
from tests.helpers.seed import seed_everything
from tests.helpers.training import Net
from tests.integrations import fabric_worker
from tests.integrations.fabric_loop import SETTINGS, Loop, batches

# Asked for on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:policy='auto'. budget=1 B is not feasible")


def half() -> dict[str, Any]:
    """Float16 on the CPU, for which Fabric itself takes bfloat16; gradients overflow at first."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}


LOOPS = {
    "as usual": Loop(bind=True),
    "accumulated and clipped": Loop(accumulate=2, clip=0.1),
    "16-mixed": Loop(settings=half, clip=0.5),
    "bf16-mixed": Loop(settings=lambda: {"precision": "bf16-mixed"}, accumulate=2),
    "bf16-true": Loop(settings=lambda: {"precision": "bf16-true"}, bind=True),
    "64-true": Loop(settings=lambda: {"precision": "64-true"}),
}

WAYS: dict[str, Callable[[], Remat]] = {
    "auto": lambda: Remat(),
    "full": lambda: Remat(policy="full"),
    "selective": lambda: Remat(policy="selective"),
    "recompute all": lambda: Remat(policy=recompute_all),
    "budget": lambda: Remat(budget=1),
    "offload": lambda: Remat(policy="full", offload=EVERYTHING),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_gives_every_bit_of_the_plain_one(name: str) -> None:
    """Losses, gradients, weights, buffers, optimizer state, the scaler and random streams."""
    data = batches()
    plain = LOOPS[name].run(None, data)
    for way, make in WAYS.items():
        ours = LOOPS[name].run(make(), data)
        assert ours.difference(plain) == [], way
        assert way == "auto" or ours.replayed > 0 or way == "offload", way
        ours.remat.close()  # type: ignore[union-attr]  # given


def test_names_of_a_bound_model_are_the_users() -> None:
    """What Fabric wraps around it is in no name."""
    remat = Remat(policy={"layers.*": "full"})
    ours = Loop(bind=True).run(remat, batches(2))
    assert ours.replayed > 0
    assert remat.blocks == ["layers.0", "layers.1", "layers.2"]


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(1, 1), nn.GELU()) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("policy", ["auto", "full", recompute_all], ids=named)
def test_two_models_in_turn(policy: Any) -> None:
    """Two wrapped modules and two optimizers, each with a step of its own."""

    def run(remat: Remat) -> Any:
        seed_everything(3)
        fabric = Fabric(**SETTINGS, precision="bf16-mixed")
        net, judge = Net(), Judge()
        maker, opt_maker = fabric.setup(net, torch.optim.Adam(net.parameters(), lr=1e-2))
        critic, opt_critic = fabric.setup(judge, torch.optim.SGD(judge.parameters(), lr=1e-2))
        seen = []
        for x, y in batches():
            with remat:
                loss = critic(maker(x)).mean() + (maker(x) - y).square().mean()
            fabric.backward(loss)
            opt_maker.step()
            opt_maker.zero_grad()
            opt_critic.zero_grad()
            with remat:
                verdict = critic(maker(x).detach()).square().mean() - critic(y).mean()
            fabric.backward(verdict)
            opt_critic.step()
            opt_critic.zero_grad()
            seen.append((loss.detach(), verdict.detach()))
        return seen, net.state_dict(), judge.state_dict(), random_streams()

    assert difference_in_bits(run(Remat(policy="none")), run(Remat(policy=policy))) == []


def test_what_was_learned_is_saved_with_the_rest(tmp_path: Path) -> None:
    """``fabric.save`` and ``load`` take the engine like a model; training goes on with its plan, in the same bits."""
    path = tmp_path / "state.ckpt"

    def run(remat: Remat, resumed: Remat) -> Any:
        losses = []
        for engine, data in ((remat, batches(4)), (resumed, batches(8)[4:])):
            seed_everything(3)
            fabric = Fabric(**SETTINGS, precision="bf16-mixed")
            net = Net()
            model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
            engine.bind(model.module)
            state = {"model": model, "optimizer": optimizer, "remat": engine}
            if engine is resumed:
                fabric.load(path, state)
            for x, y in data:
                with engine:
                    loss = (model(x) - y).square().mean()
                fabric.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            if engine is remat:
                fabric.save(path, state)
        return losses, net.state_dict(), optimizer.state_dict()

    expected = run(Remat(policy="none"), Remat(policy="none"))
    resumed = Remat(budget=1)
    assert difference_in_bits(run(Remat(budget=1), resumed), expected) == []
    assert resumed.plan is not None
    assert resumed.counters.steps == 8
    assert difference_in_bits(run(Remat(policy="full"), Remat(policy="selective")), expected) == []


def test_a_step_that_is_run_again_has_the_scale_that_it_had() -> None:
    """Forward, backward, the scaler's step and its update in one attempt, and memory runs out behind any of them."""

    def run(fails: int | None) -> Any:
        seed_everything(3)
        fabric = Fabric(**SETTINGS, **half())
        net, judge = Net(), Judge()
        model, first = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        critic, second = fabric.setup(judge, torch.optim.SGD(judge.parameters(), lr=1e-2))
        scaler = fabric._precision.scaler
        remat = Remat(policy="full")
        failing = {fails}
        seed_everything(4)
        losses = []

        def trip(place: int) -> None:
            if place in failing:
                failing.clear()
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. (This is made up.)")

        def step(x: Tensor, y: Tensor) -> Tensor:
            with remat:
                loss = (model(x) - y).square().mean()
                trip(0)
            fabric.backward(loss)
            trip(1)
            first.step()
            trip(2)
            with remat:
                verdict = critic(model(x).detach()).square().mean()
            fabric.backward(verdict)
            trip(3)
            second.step()
            first.zero_grad()
            second.zero_grad()
            return loss.detach()

        for number, (x, y) in enumerate(batches()):
            failing.update({fails} if number in (1, 3) else ())
            losses.append(remat.attempt(lambda x=x, y=y: step(x, y), model, critic, first, second, scaler))
        retries = remat.counters.retries
        assert retries == (0 if fails is None else 3)
        return losses, net.state_dict(), judge.state_dict(), first.state_dict(), scaler.state_dict(), random_streams()

    expected = run(None)
    for fails in range(4):
        assert difference_in_bits(run(fails), expected) == [], fails


@pytest.mark.parametrize(
    "strategy",
    [
        "remat",
        "remat_ddp",
        lambda: RematStrategy(policy="full"),
        lambda: RematStrategy(base="ddp"),
        lambda: RematStrategy(base=L.pytorch.strategies.DDPStrategy),
    ],
    ids=["remat", "remat_ddp", "auto", "ddp", "class"],
)
def test_the_trainers_strategies_are_refused_with_what_to_do_instead(strategy: Any) -> None:
    with pytest.raises(ConfigurationError, match="with remat:") as caught:
        Fabric(accelerator="cpu", devices=1, strategy=strategy() if callable(strategy) else strategy)
    assert str(caught.value).startswith("Fabric(strategy=")


# ---------------------------------------------------------------------- two processes


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks has found, by loop and way."""
    return run_ranks("tests.integrations.fabric_worker", tmp_path_factory.mktemp("fabric"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", fabric_worker.LOOPS)
def test_each_rank_gives_what_its_plain_loop_gives(ranks: list[dict[str, Any]], name: str, rank: int) -> None:
    for way in fabric_worker.WAYS:
        found = ranks[rank][name][way]
        assert found["difference"] == [], way
        assert found["replayed"] > 0, way


def test_one_replica_does_not_run_its_step_again(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["attempt"].startswith("attempt(step, _FabricModule): the model is a replica")
