"""Random ops: replayed from the generator's recorded state, while the user's stream goes on undisturbed."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_remat import Remat
from tests.helpers.exact import assert_exact, recompute_all

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Net(nn.Module):
    """Two linear layers; what happens in between is the test's."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)


RANDOM = {
    "dropout": lambda h: F.dropout(h, 0.4),
    "dropout2d": lambda h: F.dropout2d(h[None, None], 0.4)[0, 0],
    "alpha": lambda h: F.alpha_dropout(h, 0.4, True),
    "feature_alpha": lambda h: F.feature_alpha_dropout(h[None, None], 0.4, True)[0, 0],
    "rrelu": lambda h: F.rrelu(h, training=True),
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "bernoulli_": lambda h: h * torch.empty_like(h).bernoulli_(0.5),
    "normal_": lambda h: h * torch.empty(4, 8).normal_(),
    "uniform_into_view": lambda h: h * torch.empty(4, 16)[:, ::2].uniform_(),
    "randn": lambda h: h + torch.randn(4, 8) * h,
    "rand_like": lambda h: h * torch.rand_like(h),
    "randperm": lambda h: h[torch.randperm(4)] * h,
    "multinomial": lambda h: h[torch.multinomial(torch.ones(4), 4)] * h,
    "gumbel": lambda h: F.gumbel_softmax(h, hard=True),
    "sdpa": lambda h: F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.3)[0],
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_ops_are_replayed(name: str) -> None:
    """Every way to draw: the same draw again in backward, and the user's stream goes on undisturbed."""

    def step(net: Net) -> torch.Tensor:
        h = RANDOM[name](net.a(X) * 1.5)
        return (net.b(h.sin()) * torch.rand(())).sum()

    assert_exact(Net(), step)


@pytest.mark.parametrize("name", ["dropout", "bernoulli", "randn", "rand_like", "alpha"])
def test_masks_are_not_kept(name: str) -> None:
    """Replay is the rule: nothing the size of the activation is saved as it is."""
    net = Net()
    saved: list[bool] = []

    class Watch:
        def recorded(self, *args: object) -> None: ...
        def kept(self, *args: object) -> None: ...
        def packed(self, tensor: torch.Tensor, packed: tuple[object, ...]) -> None:
            if tensor.shape == (4, 8) and tensor.data_ptr() != X.data_ptr():
                saved.append(not isinstance(packed[0], torch.Tensor))

    remat = Remat(policy=recompute_all)
    remat._tape.observers.append(Watch())
    with remat:  # the first step keeps the ledger, on a tape of its own
        net.a(X).sum().backward()
    with remat:
        loss = RANDOM[name](net.a(X) * 1.5).sin().sum()
    assert saved
    assert all(saved)
    loss.backward()


def test_own_generator() -> None:
    """A module's own torch.Generator is rewound for the replay, and goes on afterwards."""
    generator = torch.Generator()

    def step(net: Net) -> torch.Tensor:
        if step.calls % 2 == 0:
            generator.manual_seed(7)
        step.calls += 1
        mask = torch.bernoulli(torch.full((4, 8), 0.6), generator=generator)
        return (net.b(net.a(X).sin() * mask).sin() * torch.rand((), generator=generator)).sum()

    step.calls = 0
    assert_exact(Net(), step)
