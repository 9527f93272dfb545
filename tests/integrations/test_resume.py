"""Training that was interrupted and goes on from a checkpoint: plans are in force from the first step on."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from lightning_remat import RematCallback, RematStrategy
from lightning_remat.integrations.checkpoints import KEY
from lightning_remat.runtime.tracer import Tracer
from lightning_remat.runtime.tuning import pilot as pilot_module
from lightning_remat.runtime.tuning.pilot import Pilot
from tests.helpers import seed_everything
from tests.helpers.bits import difference_in_bits, random_streams
from tests.helpers.training import Lit, Net, regression, trainer_for

SCARCE = 95_000
PLENTY = "1GiB"
STEPS = 8

pytestmark = [
    pytest.mark.filterwarnings("ignore:policy='auto'. budget=.* is not feasible"),  # asked for on purpose
    # A resumed run writes beside the first.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class Batches:
    """An iterable that can be resumed: Lightning asks for two methods, and `Place` does it."""

    def __init__(self, *rows: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self.items = [(torch.randn(n, 8, generator=generator), torch.randn(n, 1, generator=generator)) for n in rows]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        start, self.at = self.at, 0
        yield from self.items[start:]


class Place(Callback):
    """What Lightning leaves out: random streams, gradients between micro-batches, and which batch comes next."""

    def __init__(self, batches: Batches, fail_at: int = -1) -> None:
        self.batches = batches
        self.fail_at = fail_at
        self.seen = 0
        self.loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        numpy = np.random.get_state()
        return {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": [str(numpy[0]), numpy[1].tolist(), *numpy[2:]],
            "seen": self.seen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state
        self.seen = state["seen"]
        self.batches.at = self.seen % len(self.batches)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self.loaded is not None:
            state, self.loaded = self.loaded, None
            torch.set_rng_state(state["torch"])
            random.setstate(state["python"])
            name, keys, *rest = state["numpy"]
            np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        if self.seen == self.fail_at:
            raise RuntimeError("the machine goes down")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.seen += 1


class Run:
    """One process of a training: until it ends, or fails at a step.

    Attributes:
        remat: the engine; None in plain training.
        traced: which steps of the whole training were traced here.
    """

    def __init__(
        self,
        folder: Path,
        way: str,
        rows: tuple[int, ...],
        *,
        budget: Any = SCARCE,
        fail_at: int = -1,
        resume: str | None = None,
        net: Callable[[], Any] = Net,
        **options: Any,
    ) -> None:
        seed_everything(3)
        module = Lit(net(), regression)
        batches = Batches(*rows)
        self.place = Place(batches, fail_at)
        # Lightning calls it last, and so after the place has counted.
        self.saving = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks: list[Callback] = [self.place, self.saving]
        strategy: Any = "auto"
        self.remat = None
        if way == "strategy":
            strategy = RematStrategy(budget=budget)
            self.remat = strategy.remat
        elif way == "callback":
            strategy = SingleDeviceStrategy("cpu")
            callbacks.append(RematCallback(budget=budget))
            self.remat = callbacks[-1].remat
        self.trainer = trainer_for(strategy, callbacks, enable_checkpointing=True, **options)
        self.module = module
        seed_everything(4)
        fit = {"ckpt_path": resume, "weights_only": True} if resume else {}
        self.traced: list[int] = []
        with (
            self._noting_what_is_traced(),
            pytest.raises(RuntimeError, match="down") if fail_at >= 0 else nullcontext(),
        ):
            self.trainer.fit(module, batches, **fit)
        self.streams = random_streams()

    @contextmanager
    def _noting_what_is_traced(self) -> Iterator[None]:
        def tracer(*args: Any, **kwargs: Any) -> Tracer:
            self.traced.append(self.place.seen)
            return Tracer(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pilot_module, "Tracer", tracer)
            yield

    @property
    def pilot(self) -> Pilot:
        assert self.remat is not None
        assert isinstance(self.remat._pilot, Pilot)
        return self.remat._pilot

    def difference(self, other: "Run") -> list[str]:
        """In weights, buffers, optimizer state and random streams."""
        return [
            *difference_in_bits(self.module.state_dict(), other.module.state_dict(), "state"),
            *difference_in_bits(
                [o.state_dict() for o in self.trainer.optimizers], [o.state_dict() for o in other.trainer.optimizers]
            ),
            *difference_in_bits(self.streams, other.streams, "streams"),
            *difference_in_bits(self.trainer.global_step, other.trainer.global_step, "steps"),
        ]


SCENARIOS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "as usual": ((32,) * STEPS, {}),
    "two shapes": ((32, 32, 48, 32, 48, 32, 48, 32), {}),
    "two epochs": ((32,) * (STEPS // 2), {"max_epochs": 2}),
}


@pytest.mark.parametrize("way", ["strategy", "callback"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_resumed_is_uninterrupted(name: str, way: str, tmp_path: Path) -> None:
    """Before there is a plan (1), while it is measured (2), and later; bit for bit, and nothing is traced again."""
    rows, options = SCENARIOS[name]
    plain = Run(tmp_path / "plain", "plain", rows, **options)
    whole = Run(tmp_path / "whole", way, rows, **options)
    assert whole.difference(plain) == []
    # The first step of a further epoch is of a third kind (Lightning's sums begin anew), which is looked for in vain.
    assert whole.traced == ([0, 1, 5, 6, 7] if name == "two epochs" else [0, 1])
    assert whole.trainer.global_step == STEPS
    for at in (1, 2, 6):
        folder = tmp_path / f"at {at}"
        first = Run(folder, way, rows, fail_at=at, **options)
        before = first.pilot.result
        second = Run(folder, way, rows, resume=first.saving.best_model_path, **options)
        assert second.difference(whole) == []
        # The first step of a process has no gradients when it begins, others have: two kinds, each traced once.
        assert first.traced + second.traced == ([0, 2] if at == 1 else [0, 1]) + whole.traced[2:]
        assert second.pilot.result is not None
        assert any(second.pilot.result.chosen.drop)
        if before is not None and name == "as usual":
            assert second.pilot.result.chosen.drop == before.chosen.drop


def test_accumulation_goes_on(tmp_path: Path) -> None:
    """Both kinds of micro-batch, the first of an optimizer step and the others, have their plans at once."""
    rows, options = (32,) * STEPS, {"accumulate_grad_batches": 2}
    whole = Run(tmp_path / "whole", "strategy", rows, **options)
    first = Run(tmp_path / "first", "strategy", rows, fail_at=6, **options)
    second = Run(tmp_path / "first", "strategy", rows, resume=first.saving.best_model_path, **options)
    assert second.traced == []
    assert second.difference(whole) == []
    assert second.difference(Run(tmp_path / "plain", "plain", rows, **options)) == []
    assert set(second.pilot.known.roots) == {False, True}


@pytest.mark.parametrize("budget", [PLENTY, 85_000, 1])
def test_another_budget(budget: Any, tmp_path: Path) -> None:
    """Plans are made anew, with room for the optimizer's state from the first step on; traces serve on."""
    rows = (32,) * STEPS
    plain = Run(tmp_path / "plain", "plain", rows)
    first = Run(tmp_path / "first", "strategy", rows, fail_at=4)
    second = Run(tmp_path / "first", "strategy", rows, budget=budget, resume=first.saving.best_model_path)
    assert second.traced == []
    assert second.difference(plain) == []
    assert second.pilot.result is not None
    assert any(second.pilot.result.chosen.drop) == (budget != PLENTY)


class Doubled(Net):
    """The same parameters and other ops."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sin())


def test_another_model(tmp_path: Path) -> None:
    """Met in the first step, and traced; as exact as ever."""
    rows = (32,) * STEPS
    first = Run(tmp_path / "first", "strategy", rows, fail_at=2)
    path = first.saving.best_model_path
    plain = Run(tmp_path / "first", "plain", rows, resume=path, net=Doubled)
    second = Run(tmp_path / "first", "strategy", rows, resume=path, net=Doubled)
    assert second.difference(plain) == []
    assert second.pilot.known.sequences == 2


@pytest.mark.parametrize(("first", "second"), [("strategy", "callback"), ("callback", "strategy")])
def test_with_the_other_way_in(first: str, second: str, tmp_path: Path) -> None:
    rows = (32,) * STEPS
    whole = Run(tmp_path / "whole", "plain", rows)
    begun = Run(tmp_path / "first", first, rows, fail_at=4)
    ended = Run(tmp_path / "first", second, rows, resume=begun.saving.best_model_path)
    assert ended.traced == []
    assert ended.difference(whole) == []


@pytest.mark.parametrize("way", ["strategy", "callback"])
def test_with_and_without(way: str, tmp_path: Path) -> None:
    """What was recomputed is resumed plainly, without a word, and the other way round."""
    rows = (32,) * STEPS
    whole = Run(tmp_path / "whole", "plain", rows)
    for first, second in ((way, "plain"), ("plain", way)):
        folder = tmp_path / first
        begun = Run(folder, first, rows, fail_at=4)
        assert Run(folder, second, rows, resume=begun.saving.best_model_path).difference(whole) == []


@pytest.mark.parametrize("way", ["strategy", "callback"])
def test_what_lies_in_which_checkpoint(way: str, tmp_path: Path) -> None:
    """The state is plain data; one of weights only has none; a module loads from it; evaluation leaves it alone."""
    run = Run(tmp_path / "run", way, (32,) * 3)
    path = str(tmp_path / "whole.ckpt")
    run.trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint[KEY]["version"] == 1
    assert len(checkpoint[KEY]["budget"]["steps"]) == 2  # steps that begin with gradients, and the first
    weights = str(tmp_path / "weights.ckpt")
    run.trainer.save_checkpoint(weights, weights_only=True)
    assert KEY not in torch.load(weights, weights_only=True)
    loaded = Validated.load_from_checkpoint(path, net=Net(), loss=regression, weights_only=True)
    assert difference_in_bits(loaded.state_dict(), checkpoint["state_dict"]) == []
    strategy = RematStrategy(budget=SCARCE)
    with pytest.warns(UserWarning, match="callbacks used to create the checkpoint") as said:
        trainer_for(strategy).validate(loaded, Batches(8), ckpt_path=path, verbose=False, weights_only=True)
    assert "Remat" not in str(said[0].message)  # the others are missed
    assert strategy.remat.plan is None


class Validated(Lit):
    def validation_step(self, batch: Any, index: int) -> None:
        regression(self.net, batch)


@pytest.mark.parametrize("damage", [{}, 3, {"version": 99}, {"version": 1, "kept_ops": None}], ids=str)
def test_a_damaged_state_is_no_reason_to_stop(damage: Any, tmp_path: Path) -> None:
    rows = (32,) * STEPS
    whole = Run(tmp_path / "whole", "plain", rows)
    begun = Run(tmp_path / "first", "strategy", rows, fail_at=4)
    path = begun.saving.best_model_path
    checkpoint = torch.load(path, weights_only=True)
    checkpoint[KEY] = damage
    torch.save(checkpoint, path)
    with pytest.warns(UserWarning, match="state of recomputation in the checkpoint cannot be used"):
        ended = Run(tmp_path / "first", "strategy", rows, resume=path)
    assert ended.difference(whole) == []
    assert ended.pilot.result is not None


def test_saved_after_the_only_step(tmp_path: Path) -> None:
    """The step is known although no other has begun; its plan has room for the optimizer's state."""
    run = Run(tmp_path, "strategy", (32,))
    assert run.remat is not None
    assert [step["plan"] for step in run.remat.state_dict()["budget"]["steps"]] == [None]
    path = run.saving.best_model_path
    more = Run(tmp_path, "strategy", (32,), resume=path, max_epochs=2)
    assert more.traced == []
    parts = more.pilot.known.all[0].parts
    assert parts["optimizer state"] > parts["parameters"] > 0
