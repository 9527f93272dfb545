"""Compiled regions under a budget: their memory falls, results stay, and few compilations are made."""

import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._inductor import config as inductor_config
from torch.utils.data import DataLoader

from lightning_remat import ConfigurationError, Remat, RematStrategy
from lightning_remat.runtime.compiled import held_to
from lightning_remat.runtime.memory import measure_peak
from lightning_remat.runtime.tuning.shares import GRID

STEPS = 14
QUIET = pytest.mark.filterwarnings(
    # Of the compiler's own, which it raises itself while it compiles.
    "ignore:The .grad attribute of a Tensor:UserWarning",
    "ignore::DeprecationWarning:torch",
    "ignore::FutureWarning:torch",
)


class Net(nn.Module):
    """Wide, so that what is saved counts, with random operations in it."""

    def __init__(self, draws: str) -> None:
        super().__init__()
        self.up, self.down, self.draws = nn.Linear(8, 64), nn.Linear(64, 8), draws

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x)).sin().exp()
        if self.draws == "dropout":
            h = F.dropout(h, 0.25, True)
        elif self.draws == "multinomial":
            h = h * torch.multinomial(torch.ones(2, 64), 32)[0].sum()
        return x + self.down(h.sigmoid())


def trained(remat: Remat | None, draws: str, backend: Any = "inductor") -> tuple[list[Tensor], int]:
    """Losses, gradients and the random stream of some steps; the peak of the last one."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net(draws)
    net.compile(backend=backend)
    x = torch.randn(256, 8)
    found: list[Tensor] = []

    def step() -> None:
        if remat is None:
            loss = net(x).square().mean()
        else:
            with remat:
                loss = net(x).square().mean()
        loss.backward()
        found.append(loss.detach())

    peak = 0
    if remat is not None:
        remat.bind(net)
    for i in range(STEPS):
        if i == STEPS - 1:
            peak = measure_peak(step).peak_bytes
        else:
            step()
        found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
        net.zero_grad()
    found.append(torch.get_rng_state())
    if remat is not None:
        remat.close()
    torch._dynamo.reset()
    return found, peak


@QUIET
def test_memory_falls_and_results_stay() -> None:
    """As compiled without us, bit for bit, random numbers included; twice a share, something is compiled."""
    plain, peak = trained(None, "dropout")
    parameters = sum(p.nbytes for p in Net("dropout").parameters())
    remat = Remat(budget=parameters + int(0.95 * peak), compiled="budget")
    got, less = trained(remat, "dropout")
    assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))
    counters = remat.counters
    assert counters.activation_budget in GRID
    assert less <= 0.95 * peak
    assert counters.compilations == 8  # 1, 0.5 (fits), 0.75 (does not), 0.5, each in a traced step and in a planned one
    said = f"activation budget {counters.activation_budget:g}"
    assert said in str(remat.report())
    assert said in remat.summary


def gradients(net: nn.Module, share: float | None) -> list[Tensor]:
    """Of one step, compiled anew, held to a share of what would be saved."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    x = torch.randn(2, 64, 8)
    with held_to(share) if share is not None else nullcontext():
        loss = net(x).square().mean()
        loss.backward()
    found = [loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None), torch.get_rng_state()]
    net.zero_grad()
    torch._dynamo.reset()
    return found


class Attention(nn.Module):
    """PyTorch's own, which is one random operation for the compiler, or none."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(8, 24), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).sin().exp().unflatten(-1, (3, 1, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)


@QUIET
@pytest.mark.parametrize(
    "make",
    [partial(Net, "dropout"), partial(Net, "multinomial"), partial(Attention, 0.0)],
    ids=["dropout", "multinomial", "attention"],
)
def test_nothing_random_runs_twice(make: Any) -> None:
    """Not even at the smallest share, where the compiler would draw again what it does not save."""
    torch.manual_seed(0)
    net = make()
    net.compile()
    plain = gradients(net, None)
    for share in (0.5, min(GRID)):
        assert all(torch.equal(a, b) for a, b in zip(plain, gradients(net, share), strict=True))


@torch.library.custom_op("remat_tests::masked", mutates_args=())
def masked(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of another library, random, with two results."""
    mask = torch.rand_like(x).round()
    return x * mask, mask


@masked.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


masked.register_autograd(
    lambda ctx, grad, _: grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


class Masked(nn.Module):
    """A net with it in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(masked(F.gelu(self.up(x)))[0].sin())


@QUIET
@pytest.mark.parametrize(
    ("make", "fallback"),
    [(Masked, False), (partial(Net, "dropout"), True)],
    ids=["of-another-library", "dropout-of-eager-mode"],
)
def test_what_has_several_results_does_not_run_twice(make: Any, fallback: bool) -> None:
    """The partitioner cannot be told to save those, so that their graphs are left alone."""
    with inductor_config.patch(fallback_random=fallback):
        torch.manual_seed(0)
        net = make()
        net.compile()
        plain = gradients(net, None)
        for share in GRID:
            assert all(torch.equal(a, b) for a, b in zip(plain, gradients(net, share), strict=True))


@QUIET
def test_last_bits_may_differ() -> None:
    """Why nobody gets it without asking: Inductor fuses what it makes again otherwise.

    No bit is asked for here, since the difference is the compiler's own. Another draw of what is dropped would differ
    by a tenth and more, this is one of the last bits of a float32.
    """
    torch.manual_seed(0)
    net = Attention(0.2)
    net.compile()
    plain = gradients(net, None)
    for share in (0.5, min(GRID)):
        for a, b in zip(plain, gradients(net, share), strict=True):
            assert (a.double() - b.double()).abs().max() <= 1e-6 * a.double().abs().max()


class Broken(nn.Module):
    """A graph that breaks in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net("nothing")

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        torch._dynamo.graph_break()
        return self.net(x.cos())


@QUIET
def test_graph_breaks_and_shapes_are_not_compiled_for_ever() -> None:
    """What is left alone elsewhere stays compiled, and once a share is settled for, nothing is compiled any more."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Broken()
    model.compile()
    counter = CompileCounter()
    elsewhere = torch.compile(lambda x: x.sin() + 1, backend=counter)
    elsewhere(torch.ones(3))
    remat = Remat(budget="1KiB", compiled="budget")
    remat.bind(model)
    compiled: list[int] = []
    with warnings.catch_warnings():
        # A budget that nothing fits, on purpose.
        warnings.filterwarnings("ignore", message=".*no plan was measured to fit|.*budget=")
        for i in range(30):
            with remat:
                loss = model(torch.randn(64 + 8 * (i % 3), 8)).square().mean()
            loss.backward()
            elsewhere(torch.ones(3))
            compiled.append(remat.counters.compilations)
    remat.close()
    torch._dynamo.reset()
    shares = remat._compiled.shares
    assert shares is not None
    assert shares.settled
    assert len(shares.found) > 1
    assert compiled[-1] == compiled[-10]
    assert counter.frame_count == 1


@QUIET
@pytest.mark.filterwarnings("ignore:.*no plan was measured to fit|.*budget=")  # on purpose
def test_out_of_memory_and_a_run_that_is_resumed() -> None:
    """Regions are held to less once plans can do no more; the next run begins there and compiles for that only."""

    def run(remat: Remat | None, steps: int, room: bool, state: Any = None) -> tuple[list[Tensor], Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        net = nn.Sequential(Net("dropout"), Net("dropout"))
        net[1].compile()
        found: list[Tensor] = []
        if remat is not None:
            if state is not None:
                remat.load_state_dict(state)
            remat.bind(net)
        x = torch.randn(256, 8)

        def step() -> Tensor:
            with remat or nullcontext():
                loss = net(x).square().mean()
            share = None if remat is None else remat.counters.activation_budget
            if not room and share is not None and share > 0.5:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB. (This is made up.)")
            loss.backward()
            return loss.detach()

        for _ in range(steps):
            found.append(step() if remat is None else remat.attempt(step, net))
            found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
            net.zero_grad()
        left = None if remat is None else remat.state_dict()
        if remat is not None:
            remat.close()
        torch._dynamo.reset()
        return [*found, torch.get_rng_state()], left

    def same(a: list[Tensor], b: list[Tensor]) -> bool:
        return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))

    plain, _ = run(None, 12, room=True)
    remat = Remat(budget="60KiB", compiled="budget", retries=3)
    got, state = run(remat, 12, room=False)
    assert same(plain, got)
    assert remat.counters.retried_batches >= 1
    share = remat.counters.activation_budget
    assert share is not None
    assert share <= 0.5
    assert any("compiled regions held to an activation budget" in note for note in remat.counters.notes)
    assert state["compiled"] == {"share": share, "budget": 60 * 1024}

    resumed = Remat(budget="60KiB", compiled="budget")
    got, _ = run(resumed, 12, room=True, state=state)
    assert same(plain, got)
    assert resumed.counters.activation_budget == share
    assert resumed.counters.compilations - remat.counters.compilations <= 2  # of a traced and of a planned step
    other = Remat(budget="10MiB", compiled="budget")  # begins as without the state
    got, _ = run(other, 3, room=True, state=state)
    assert same(plain[: len(got) - 1], got[:-1])
    assert other.counters.activation_budget == 1.0


class Lit(LightningModule):
    """Blocks of which one is compiled; what is between them is the tape's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Net("dropout") for _ in range(3)))
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        loss = self.blocks(batch).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(strategy: Any) -> Lit:
    """Ten steps by Lightning, with a validation before them, which compiles first."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    lit = Lit()
    lit.blocks[1].compile()
    with torch.no_grad():
        lit.blocks(torch.randn(256, 8))
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", max_steps=14, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(lit, DataLoader(torch.randn(14, 256, 8), batch_size=None))
    torch._dynamo.reset()
    return lit


@QUIET
@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # in a test it needs none
def test_lightning_with_a_compiled_block() -> None:
    """Eager blocks are planned, the compiled one is compiled with less; weights are the same in every bit."""
    plain = fitted("auto")
    strategy = RematStrategy(budget="200KiB", compiled="budget")
    with warnings.catch_warnings():
        # A budget that nothing fits, on purpose.
        warnings.filterwarnings("ignore", message=".*no plan was measured to fit|.*budget=")
        got = fitted(strategy)
    for a, b in zip([*plain.losses, *plain.parameters()], [*got.losses, *got.parameters()], strict=True):
        assert torch.equal(a, b)
    counters = strategy.remat.counters
    assert counters.activation_budget in GRID
    assert 2 <= counters.compilations <= 2 * (1 + len(GRID)) + 2
    assert any("run again" in note and not note.startswith("0 of") for note in counters.notes)


@QUIET
def test_other_backends_are_left_alone() -> None:
    """Where the compiler would draw new random numbers, nothing is compiled again, and it is said that none fits."""
    plain, peak = trained(None, "dropout", "aot_eager")
    remat = Remat(budget=int(0.8 * peak), compiled="budget")
    with pytest.warns(UserWarning, match="no plan was measured to fit a budget of .* left as they are"):
        got, _ = trained(remat, "dropout", "aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(plain, got, strict=True))
    assert remat.counters.activation_budget == 1.0
    assert any("Inductor has compiled none" in note for note in remat.counters.notes)


def test_what_contradicts_itself_is_refused() -> None:
    """Before the first step, with the ways out."""
    with pytest.raises(ConfigurationError, match="compiled='maybe' is unknown; give 'leave'"):
        Remat(compiled="maybe")
    with pytest.raises(ConfigurationError, match="compiled='budget' and policy='full' contradict"):
        Remat(policy="full", compiled="budget")
