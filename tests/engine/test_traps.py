"""Traps of an op-level tape, one test each: running statistics, views, dtypes, autograd's own corners."""

import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_remat import Remat
from tests.helpers.exact import assert_exact, outcome, recompute_all

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Net(nn.Module):
    """Two linear layers; what happens in between is the test's."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)


class Normed(nn.Module):
    """A small CNN with one normalisation layer."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.c1, self.norm, self.c2 = nn.Conv2d(3, 4, 3), norm, nn.Conv2d(4, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c2(F.relu(self.norm(self.c1(x)), inplace=True))


IMAGE = torch.linspace(-2, 2, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm2d(4),
        nn.BatchNorm2d(4, momentum=None),
        nn.BatchNorm2d(4, track_running_stats=False),
        nn.BatchNorm2d(4, affine=False),
        nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        nn.GroupNorm(2, 4),
        nn.LocalResponseNorm(2),
    ],
    ids=str,
)
def test_running_statistics_count_once(norm: nn.Module) -> None:
    """Replay works on copies of running statistics; num_batches_tracked counts once."""
    assert_exact(Normed(norm), lambda net: net(IMAGE).square().mean())


def test_batch_norm_in_eval_mode_inside_a_training_step() -> None:
    """A frozen norm reads its statistics, which a later call in the same step may change."""

    def step(net: Normed) -> torch.Tensor:
        net.norm.eval()
        first = net(IMAGE)
        net.norm.train()
        return (first * net(IMAGE * 2)).mean()

    assert_exact(Normed(nn.BatchNorm2d(4)), step)


def test_channels_last() -> None:
    """The memory format of what is replayed is that of the first time."""
    net = Normed(nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    strides: list[object] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            strides.append(ctx.saved_tensors[0].stride())
            return g

    def step(net: Normed) -> torch.Tensor:
        return Probe.apply(net(IMAGE.to(memory_format=torch.channels_last)) * 1.5).sin().mean()

    assert_exact(net, step, recompute_all)
    assert len(set(strides)) == 1


def test_complex_values_and_lazy_bits() -> None:
    """view_as_real, conj, imag and negative bits survive dropping."""

    def step(net: Net) -> torch.Tensor:
        z = torch.view_as_complex((net.a(X) * 1.5).reshape(4, 4, 2).contiguous())
        w = (z * z.conj() + z.conj().sin()) @ z.conj().transpose(-2, -1)
        return (
            net.b(torch.view_as_real(w.conj().resolve_conj() * 1j).reshape(4, 8)).sin().sum()
            + (z.conj().imag * 2).sin().sum()
        )

    assert_exact(Net(), step)


def test_dtype_views() -> None:
    """view(dtype) of a dropped value."""

    def step(net: Net) -> torch.Tensor:
        h = net.a(X) * 1.5
        bits = (h.detach().view(torch.int32) & 0xFF).float()
        return net.b(h.sin() * bits).sin().sum()

    assert_exact(Net(), step)


def test_several_outputs_none_outputs_and_tuples_of_views() -> None:
    """split, chunk, topk, layer_norm without affine, var_mean, max with indices, unbind, cat and stack."""

    def step(net: Net) -> torch.Tensor:
        h = net.a(X) * 1.5
        a, b = h.split(4, 1)
        c, d = (h * 2).chunk(2, 0)
        value, index = h.topk(3, 1)
        variance, mean = torch.var_mean(h, 1)
        biggest = h.max(1)
        parts = torch.cat([a.sin(), b, c.t()[:4].contiguous(), d.t()[4:].contiguous().expand(4, 2)], 1)
        out = F.layer_norm(parts, (12,)).sum() + torch.stack(h.unbind(0)).sin().sum()
        return net.b(h).sum() + out + (value * index).sin().sum() + (variance * mean).sum() + biggest.values.sin().sum()

    assert_exact(Net(), step)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda k: k.__name__)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_recurrent_kernels(kind: type[nn.Module], dropout: float) -> None:
    """Kernels with several outputs in their own layouts."""
    net = nn.Module()
    net.rnn = kind(8, 8, num_layers=2, batch_first=True, dropout=dropout, bidirectional=True)

    def step(net: nn.Module) -> torch.Tensor:
        out, state = net.rnn((X * 2).reshape(2, 2, 8))
        state = state if isinstance(state, tuple) else (state,)
        return out.sin().sum() + sum(s.square().sum() for s in state)

    assert_exact(net, step, recompute_all, "selective")


def test_expanded_tensors_are_not_written_out() -> None:
    """A stride of zero is kept and comes back as one."""
    shapes: list[tuple[int, ...]] = []

    def step(net: Net) -> torch.Tensor:
        h = net.a(X) * 1.5
        wide = h[:, :1].expand(4, 8)
        out = torch.where(X > 0, wide, h) * wide
        shapes.append(wide.stride())
        return net.b(out).sin().sum()

    assert_exact(Net(), step)
    assert set(shapes) == {(8, 0)}


def test_sparse_nested_and_quantised_tensors_are_kept() -> None:
    """Kinds of tensor that the tape does not describe pass through."""

    def step(net: Net) -> torch.Tensor:
        h = net.a(X) * 1.5
        sparse = torch.eye(4).to_sparse()
        out = torch.sparse.mm(sparse, h).sin()
        nested = torch.nested.nested_tensor([X[:2], X[2:]])
        out = out + nested.to_padded_tensor(0.0).reshape(4, 8)
        quantised = torch.quantize_per_tensor(X, 0.1, 0, torch.quint8)
        return net.b(out * quantised.dequantize()).sin().sum()

    with warnings.catch_warnings():
        # PyTorch's notices on nested (a prototype) and quantised tensors (to go).
        warnings.simplefilter("ignore")
        assert_exact(Net(), step)


def test_tensor_subclasses() -> None:
    """With and without __torch_dispatch__ of their own."""

    class Plain(torch.Tensor):
        pass

    def step(net: Net) -> torch.Tensor:
        h = (net.a(X) * 1.5).as_subclass(Plain)
        return net.b((h.sin() * h).as_subclass(torch.Tensor)).sin().sum()

    assert_exact(Net(), step)


def test_memory_that_unseen_code_writes() -> None:
    """NumPy (or Triton, or a C extension) fills what a factory function made: that is a leaf, not replayed as empty."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            out = torch.empty_like(x)
            np.multiply(x.detach().numpy(), 2, out=out.numpy())
            zeros = torch.zeros_like(x)
            np.copyto(zeros.numpy(), out.numpy())
            return zeros

        @staticmethod
        def backward(ctx, g):
            return g * 2 * ctx.saved_tensors[0].sign().abs()

    assert_exact(Net(), lambda net: net.b(Twice.apply(net.a(X) * 1.5).sin()).sin().sum())


def test_custom_ops_are_kept() -> None:
    """An op registered with torch.library may have effects: it is not run a second time."""
    calls = []

    @torch.library.custom_op("remat_tests::counted_sin", mutates_args=())
    def counted_sin(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin()

    counted_sin.register_autograd(
        lambda ctx, g: g * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )

    def step(net: Net) -> torch.Tensor:
        return (net.b(counted_sin(net.a(X) * 1.5)) * 2).sin().sum()

    outcome(Net(), step, None)
    plain = len(calls)
    outcome(Net(), step, Remat(policy=recompute_all))
    assert len(calls) == 2 * plain
    assert_exact(Net(), step)


@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile")  # uncompiled on purpose
def test_higher_order_ops_are_kept() -> None:
    """flex_attention: a function goes into it, and what comes out stays."""
    from torch.nn.attention.flex_attention import flex_attention

    def step(net: Net) -> torch.Tensor:
        h = (net.a(X) * 1.5).reshape(1, 1, 4, 8)
        q = h.detach()  # on the CPU it has no backward
        out = flex_attention(q, q.sin(), q, score_mod=lambda score, b, h, q, k: score + (q - k))
        return net.b(out * h).sin().sum()

    assert_exact(Net(), step)


def test_default_dtype_set_around_forward() -> None:
    """A constant that took its dtype from a global default comes back in that dtype."""

    def step(net: Net) -> torch.Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            h = net.a(X.double()) * torch.linspace(0, 1, 8)
            counts = torch.arange(8) / 3
            return net.b(h.sin() * counts).sin().sum()
        finally:
            torch.set_default_dtype(torch.float32)

    assert_exact(Net().double(), step)


def test_autocast() -> None:
    """What autocast chose in forward is what is replayed, outside of autocast."""

    def step(net: Net) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = net.a(X).sin()
            with torch.autocast("cpu", enabled=False):
                h = F.layer_norm(h.float(), (8,))
            return net.b(h).float().sin().sum()

    assert_exact(Net(), step)


def test_double_backward() -> None:
    """A gradient penalty, forces, MAML: create_graph=True, inside the context and outside."""

    def step(net: Net) -> torch.Tensor:
        x = X.clone().requires_grad_()
        energy = net.b(torch.tanh(net.a(x) * 1.5)).sin().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + force.square().sum()

    assert_exact(Net(), step)

    def outside(remat: Remat | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net, x = Net(), X.clone().requires_grad_()
        if remat is None:
            energy = net.b(torch.tanh(net.a(x) * 1.5)).sin().sum()
        else:
            with remat:
                energy = net.b(torch.tanh(net.a(x) * 1.5)).sin().sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        force.square().sum().backward()
        return [p.grad for p in net.parameters() if p.grad is not None]

    for a, b in zip(outside(None), outside(Remat(policy=recompute_all)), strict=True):
        assert torch.equal(a, b)


def test_retain_graph_and_several_losses() -> None:
    """Two backwards through one graph."""

    def step(net: Net) -> torch.Tensor:
        out = net.b(F.dropout(net.a(X) * 1.5, 0.3)).sin()
        out.sum().backward(retain_graph=True)
        out.square().sum().backward(retain_graph=True)
        out.exp().sum().backward()
        return out.detach().sum()

    assert_exact(Net(), step)


def test_gradients_asked_for_inside_the_step() -> None:
    """torch.autograd.grad with respect to inputs, and backward(inputs=...)."""

    def step(net: Net) -> torch.Tensor:
        x = X.clone().requires_grad_()
        out = net.b(net.a(x).sin() * 1.5).sin().sum()
        (g,) = torch.autograd.grad(out, x, retain_graph=True)
        out.backward(inputs=[net.a.weight])
        return g.sum().detach()

    assert_exact(Net(), step)


def test_torch_func_inside_the_step() -> None:
    """Transforms refuse saved-tensor hooks: that part runs plainly, with one warning."""

    def step(net: Net) -> torch.Tensor:
        h = net.a(X) * 1.5
        jacobian = torch.func.jacrev(lambda x: (x * x).sin())(X[0])
        per_row = torch.func.vmap(lambda row: row.sin().sum())(h)
        return net.b(h @ jacobian).sin().sum() + per_row.sum()

    from lightning_remat.engine import transforms

    transforms._warned = False
    with pytest.warns(UserWarning, match=r"torch\.func transforms"):
        outcome(Net(), step, Remat(policy=recompute_all))
    assert_exact(Net(), step)


def test_users_own_hooks_and_modes() -> None:
    """Saved-tensor hooks and dispatch modes of the user's work inside and outside of ours."""

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def step(net: Net) -> torch.Tensor:
        h = net.a(X) * 1.5
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            h = h.sin() * h
        with Count():
            h = h.cos() * h
        return net.b(h).sin().sum()

    assert_exact(Net(), step)
    with Count():
        assert_exact(Net(), step)


def test_backward_on_another_thread() -> None:
    """An accelerator's backward runs on a thread of its own."""
    grads = []
    for remat in (None, Remat(policy=recompute_all)):
        torch.manual_seed(0)
        net = Net()
        if remat is None:
            loss = net.b(net.a(X).sin() * 1.5).sin().sum()
        else:
            with remat:
                loss = net.b(net.a(X).sin() * 1.5).sin().sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        grads.append([p.grad for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_backward_inside_the_step_runs_outside_of_the_tape() -> None:
    """Neither mode nor hooks are in force there: what backward starts there (a collective) would carry them off."""
    seen = []

    def look(grad: torch.Tensor) -> None:
        stack = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        seen.append((list(stack), torch._C._autograd._top_saved_tensors_default_hooks(False)))

    net = Net()
    with Remat(policy=recompute_all):
        h = net.a(X) * 1.5
        h.register_hook(look)
        net.b(h.sin()).sum().backward()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        with Remat(policy="selective"):  # another engine inside
            h = net.a(X) * 1.5
            h.register_hook(look)
            net.b(h.sin()).sum().backward()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    assert seen == [([], None)] * 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_mid_step(where: str) -> None:
    """Modes and hooks are unwound, and the next step works."""

    class Boom(torch.autograd.Function):
        armed = True

        @staticmethod
        def forward(ctx, x):
            if Boom.armed and where == "forward":
                raise ValueError("boom")
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            if Boom.armed:
                raise ValueError("boom")
            return g

    def step(net: Net) -> torch.Tensor:
        return net.b(Boom.apply((net.a(X) * 1.5).sin())).sin().sum()

    remat = Remat(policy=recompute_all)
    with pytest.raises(ValueError, match="boom"):
        outcome(Net(), step, remat)
    Boom.armed = False
    torch.manual_seed(3)
    net = Net()
    plain = outcome(net, step, None)
    from tests.helpers.exact import assert_same

    assert_same(plain, outcome(net, step, remat))


def test_nothing_happens_without_gradients() -> None:
    """no_grad and inference_mode: nothing is recorded, inside or around the context."""
    net = Net()
    remat = Remat(policy=recompute_all)
    with torch.no_grad(), remat:
        net.a(X).sin()
    with torch.inference_mode(), remat:
        net.a(X).sin()
    assert remat.stats.recorded_ops == 0
    with remat:
        with torch.no_grad():
            net.a(X).sin()
        with torch.inference_mode():
            net.a(X).sin()
    assert remat.stats.recorded_ops == 0


def test_steps_may_overlap() -> None:
    """Forward, forward, backward of the first, backward of the second: values belong to their step."""

    def run(remat: Remat | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Net()
        losses = []
        for scale in (1.0, 2.0):
            if remat is None:
                losses.append(net.b(F.dropout(net.a(X * scale) * 1.5)).sin().sum())
            else:
                with remat:
                    losses.append(net.b(F.dropout(net.a(X * scale) * 1.5)).sin().sum())
        for loss in losses:
            loss.backward()
        return [p.grad for p in net.parameters()]

    for a, b in zip(run(None), run(Remat(policy=recompute_all)), strict=True):
        assert torch.equal(a, b)


def test_the_same_engine_nested() -> None:
    """Entering again inside the step changes nothing."""
    remat = Remat(policy=recompute_all)

    def step(net: Net) -> torch.Tensor:
        with remat:
            h = net.a(X) * 1.5
        return net.b(h.sin()).sin().sum()

    net = Net()
    plain = outcome(net, lambda n: n.b((n.a(X) * 1.5).sin()).sin().sum(), None)
    from tests.helpers.exact import assert_same

    assert_same(plain, outcome(net, step, remat))
