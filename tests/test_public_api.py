"""The public names and their options. A change here is a change for users: it belongs into the changelog."""

import inspect

import lightning_remat
from lightning_remat import Offload, OpInfo, Remat, RematCallback, RematStrategy


def test_public_names() -> None:
    """What `import lightning_remat` offers."""
    assert lightning_remat.__all__ == [
        "ConfigurationError",
        "NoMemoryLeft",
        "Offload",
        "OffloadError",
        "OpInfo",
        "Remat",
        "RematCallback",
        "RematError",
        "RematStrategy",
        "ReplayError",
        "StepStats",
        "print_kept",
    ]
    assert all(getattr(lightning_remat, name).__doc__ for name in lightning_remat.__all__)


def test_options() -> None:
    """The three ways in take the same options."""
    options = {
        "policy": "auto",
        "budget": None,
        "blocks": None,
        "offload": None,
        "verify": False,
        "margin": "5%",
        "retries": 3,
        "verify_every_n_steps": None,
        "compiled": "leave",
    }
    parameters = inspect.signature(Remat).parameters
    assert {name: p.default for name, p in parameters.items()} == options
    strategy = inspect.signature(RematStrategy.__init__).parameters
    assert {name: strategy[name].default for name in options} == options
    assert strategy["base"].default == "auto"
    assert strategy["share_plan"].default is False
    assert RematCallback(**options, share_plan=False).remat.policy == "auto"


def test_options_of_offload() -> None:
    """Where to, and the rest by name."""
    defaults = {"host_budget": None, "disk_budget": None, "min_bytes": "64KiB", "in_flight": None, "checksum": True}
    parameters = inspect.signature(Offload).parameters
    assert {name: p.default for name, p in parameters.items() if name != "to"} == defaults
    assert next(iter(parameters)) == "to"
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "to")


def test_what_a_function_over_ops_is_told() -> None:
    """The fields of OpInfo."""
    assert list(OpInfo.__dataclass_fields__) == ["name", "module", "block", "bytes", "kind"]
