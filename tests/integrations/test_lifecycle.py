"""What surrounds a fit: evaluation, checkpoints, copies, exceptions, and the same trainer or strategy again."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_remat import RematCallback, RematStrategy
from lightning_remat.engine.tape import Tape
from tests.helpers import seed_everything
from tests.helpers.bits import difference_in_bits
from tests.helpers.exact import recompute_all
from tests.helpers.training import Lit, Net, regression, regression_data, train, trainer_for


def is_recorded() -> bool:
    """Whether a tape, or hooks for saved tensors, are in force here."""
    tape = any(isinstance(mode, Tape) for mode in _get_current_dispatch_mode_stack())
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    assert tape == hooks
    return tape


class Noting(Lit):
    """A module that notes for each of its methods whether it ran on the tape. Saves its one argument."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(Net(width), regression)
        self.save_hyperparameters()
        self.seen: dict[str, set[bool]] = {}
        self.hooked: dict[str, set[bool]] = {}

    def note(self, method: str) -> None:
        self.seen.setdefault(method, set()).add(is_recorded())
        self.hooked.setdefault(method, set()).add(any(m._forward_hooks or m._forward_pre_hooks for m in self.modules()))

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.note("training_step")
        return super().training_step(batch, index)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("on_before_optimizer_step")

    def on_after_backward(self) -> None:
        self.note("on_after_backward")

    def on_train_batch_end(self, *args: Any) -> None:
        self.note("on_train_batch_end")


class Complete(Noting):
    """The same with steps for evaluation."""

    def validation_step(self, batch: Any, index: int) -> None:
        self.note("validation_step")
        self.log("val_loss", regression(self.net, batch))

    def test_step(self, batch: Any, index: int) -> None:
        self.note("test_step")
        # Evaluation with gradients, for an attribution map say: no tape there, either.
        with torch.inference_mode(False), torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            self.net(x).sum().backward()
            self.note("test_step with gradients")

    def predict_step(self, batch: Any, index: int) -> Tensor:
        self.note("predict_step")
        return self.net(batch[0])


WAYS = pytest.mark.parametrize("way", ["strategy", "callback"])


def trainer_with(way: str, policy: Any = "full", callbacks: tuple[Callback, ...] = (), **options: Any) -> Any:
    if way == "strategy":
        return trainer_for(RematStrategy(policy=policy), callbacks, **options)
    return trainer_for("auto", [*callbacks, RematCallback(policy=policy)], **options)


@WAYS
def test_only_the_training_step_is_recorded(way: str) -> None:
    """Validation, the sanity check before it, test, predict and every hook run without a tape, without hooks for saved
    tensors, and without hooks on modules."""
    module, data = Complete(), regression_data()
    trainer = trainer_with(way, num_sanity_val_steps=2)
    trainer.fit(module, data, regression_data(1))
    trainer.validate(module, data, verbose=False)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data)
    for seen in (module.seen, module.hooked):
        assert seen.pop("training_step") == {True}
        assert set(seen) >= {"validation_step", "test_step", "predict_step", "on_after_backward"}
        assert set(map(frozenset, seen.values())) == {frozenset({False})}


@WAYS
def test_evaluation_needs_no_model_that_fits_the_options(way: str) -> None:
    """Options are about training: with a pattern that matches nothing, a trainer still validates."""
    trainer = trainer_with(way, policy={"nothing.*": "full"})
    trainer.validate(Complete(), regression_data(), verbose=False)


@WAYS
def test_names_in_the_state_and_classes_are_untouched(way: str) -> None:
    module = Noting()
    keys, classes = list(module.state_dict()), [type(m) for m in module.modules()]
    attributes = {name: set(vars(m)) for name, m in module.named_modules() if name}
    trainer_with(way).fit(module, regression_data())
    assert list(module.state_dict()) == keys
    assert [type(m) for m in module.modules()] == classes
    assert {name: set(vars(m)) for name, m in module.named_modules() if name} == attributes
    assert "training_step" not in vars(module)
    for hooked in module.modules():
        tables = [table for name, table in vars(hooked).items() if name.startswith(("_forward", "_backward"))]
        assert all(not table for table in tables if table is not None)


@WAYS
def test_a_checkpoint_is_that_of_plain_training(way: str, tmp_path: Path) -> None:
    """The same bits, and one entry more, loadable where lightning-remat is unknown: by `weights_only` loading."""
    paths = {}
    for name in ("plain", way):
        seed_everything(1)
        checkpoint = ModelCheckpoint(dirpath=tmp_path / name, filename="last", monitor="loss")
        options = {"enable_checkpointing": True}
        trainer = trainer_for("auto", [checkpoint], **options) if name == "plain" else None
        trainer = trainer or trainer_with(way, callbacks=(checkpoint,), **options)
        module = Noting()
        seed_everything(2)
        trainer.fit(module, regression_data())
        paths[name] = checkpoint.best_model_path
    plain, ours = (torch.load(path, weights_only=True) for path in paths.values())
    for key in ("state_dict", "optimizer_states", "hyper_parameters", "epoch", "global_step", "lr_schedulers"):
        assert difference_in_bits(plain[key], ours[key], key) == []
    assert set(ours) == set(plain) | {"lightning_remat"}
    loaded = Noting.load_from_checkpoint(paths[way], weights_only=True)
    assert difference_in_bits(loaded.state_dict(), ours["state_dict"]) == []
    assert loaded.hparams.width == 16


@WAYS
@pytest.mark.parametrize(("first", "second"), [("ours", "ours"), ("ours", "plain"), ("plain", "ours")])
def test_training_is_resumed_in_every_bit(way: str, first: str, second: str, tmp_path: Path) -> None:
    """Two epochs with a stop in between are two epochs, whichever half is recomputed."""

    def half(ours: bool, epochs: int, path: str | None = None) -> Any:
        options = {"max_epochs": epochs, "default_root_dir": tmp_path}
        seed_everything(1)
        module = Noting()
        trainer = trainer_with(way, recompute_all, **options) if ours else trainer_for(**options)
        seed_everything(epochs)
        trainer.fit(module, regression_data(), ckpt_path=path, weights_only=False if path else None)
        return trainer

    whole = {}
    for ours in (False, True):
        path = str(tmp_path / f"{ours}.ckpt")
        half(ours and first == "ours", 1).save_checkpoint(path)
        whole[ours] = half(ours and second == "ours", 2, path)
        assert whole[ours].global_step == 6
    plain, ours = whole[False], whole[True]
    assert difference_in_bits(plain.model.state_dict(), ours.model.state_dict()) == []
    assert difference_in_bits(plain.optimizers[0].state_dict(), ours.optimizers[0].state_dict()) == []


@WAYS
def test_copies_and_pickles_after_fit_are_of_the_module_alone(way: str) -> None:
    """Both give the same bits as the original and train plainly."""
    module = Noting()
    trainer_with(way).fit(module, regression_data())
    module.trainer = None
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert difference_in_bits(made.state_dict(), module.state_dict()) == []
        trainer_for().fit(made, regression_data())
        assert made.seen["training_step"] == {True, False}


def test_fit_twice_with_one_trainer_goes_on_as_plain_training_does() -> None:
    """The second fit continues where the first ended, and its report is about its own first step."""

    def twice(policy: Any) -> Any:
        result = train(lambda: Lit(Net(), regression), regression_data(), policy)
        result.trainer.fit_loop.max_epochs = 2
        seed_everything(9)
        result.trainer.fit(result.module, regression_data())
        return result

    plain, ours = twice(None), twice(recompute_all)
    assert ours.module.steps_run == 6
    assert difference_in_bits(plain.module.state_dict(), ours.module.state_dict()) == []
    assert difference_in_bits(plain.module.losses, ours.module.losses) == []


def test_one_strategy_for_another_model_finds_that_ones_blocks() -> None:
    strategy = RematStrategy(policy="full")
    trainer_for(strategy).fit(Lit(Net(depth=2), regression), regression_data())
    assert strategy.remat.blocks == ["net.layers.0", "net.layers.1"]
    first = strategy.remat.ledger
    deep = Lit(Net(depth=4), regression)
    trainer = trainer_for(strategy, accelerator="auto")
    trainer.fit(deep, regression_data())
    assert len(strategy.remat.blocks) == 4
    assert strategy.remat.stats.replayed_ops > 0
    assert strategy.remat.ledger is not first
    assert {line.module for line in strategy.remat.ledger.lines.values()} >= {"net.layers.3.down"}


class Fails(Noting):
    """Raises once, at step 1, where it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where: str | None = where

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if self.where == "forward" and index == 1:
            self.where = None
            raise ArithmeticError("forward fails")
        if self.where == "backward" and index == 1:
            self.where = None
            loss.register_hook(self.fail)
        return loss

    @staticmethod
    def fail(gradient: Tensor) -> Tensor:
        raise ArithmeticError("backward fails")


@WAYS
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_all_is_unwound_and_training_works(way: str, where: str) -> None:
    """No mode and no hook stays (the fixtures look, too), and what follows is what follows in plain training."""
    after = {}
    for ours in (False, True):
        seed_everything(1)
        module = Fails(where)
        trainer = trainer_with(way, recompute_all) if ours else trainer_for()
        with pytest.raises(ArithmeticError):
            trainer.fit(module, regression_data())
        assert not is_recorded()
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in module.modules())
        assert "training_step" not in vars(trainer.strategy)
        module.zero_grad()
        seed_everything(2)
        trainer = trainer_with(way, recompute_all) if ours else trainer_for()
        trainer.fit(module, regression_data())
        after[ours] = (module.state_dict(), module.losses)
    assert difference_in_bits(after[False], after[True]) == []
