"""The options of :class:`~lightning_remat.Remat`, checked, and what they come to."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

from lightning_remat.engine.actions import ActionTable
from lightning_remat.engine.blocks import check_blocks_option
from lightning_remat.engine.policies import KEEP_ALL, LEAN, OFFLOAD_ONLY, Policy, parse_policy
from lightning_remat.engine.rules import Rule
from lightning_remat.errors import ConfigurationError
from lightning_remat.offload_option import Offload, offload_from
from lightning_remat.planning.planfile import PlanFile, plan_path
from lightning_remat.sizes import parse_budget


@dataclass(frozen=True)
class Settings:
    """What the options come to.

    Attributes:
        policy: the one in force; under a budget or with a plan file, what a step runs under that no plan is there for.
        auto: plans are made: under ``"auto"``, and under ``"offload_only"`` with a budget.
        recompute: whether a plan may compute anything again.
        budget: bytes, a share of the device's memory, or None.
        plan_path: the plan file, or None.
        plan: what it holds.
        margin: what the default budget leaves free: bytes, or a share of the device.
        retries: how often a batch is run again after out-of-memory.
        verify_every_n_steps: how often replay is held against the truth; None: never.
        offload: where what is kept may go; None: it stays.
        compiled: ``"budget"`` or ``"leave"``: whether the activation budget of compiled regions is chosen.
    """

    policy: Policy
    auto: bool
    budget: int | float | None
    plan_path: str | None
    plan: PlanFile | None
    margin: int | str
    retries: int
    verify_every_n_steps: int | None
    recompute: bool = True
    offload: Offload | None = None
    compiled: str = "leave"


def checked(
    policy: Any,
    budget: Any,
    blocks: Any,
    offload: Any,
    verify: Any,
    margin: Any = "5%",
    retries: Any = 3,
    verify_every_n_steps: Any = None,
    compiled: Any = "leave",
) -> Settings:
    """Settings from options as users give them.

    Raises:
        ConfigurationError: an option that cannot work.
        PlanFileError: a plan file that cannot be read.
    """
    size = parse_budget(budget)
    place = offload_from(offload)
    if blocks is not None:
        check_blocks_option(blocks)
    if not isinstance(verify, bool):
        raise ConfigurationError(f"verify={verify!r} is not a switch; give True or False.")
    _check_count("retries", retries, least=0, otherwise="0 lets out-of-memory errors through")
    if verify_every_n_steps is not None:
        _check_count("verify_every_n_steps", verify_every_n_steps, least=1, otherwise="None for never")
    auto = isinstance(policy, str) and policy == "auto"
    _check_compiled(compiled, policy, auto)
    offload_only = isinstance(policy, str) and policy == OFFLOAD_ONLY.name
    if budget is not None and not (auto or offload_only):
        raise ConfigurationError(
            f"budget={budget!r} and policy={policy!r} contradict each other: a budget chooses the policy. "
            "Give a budget with policy='auto', or a policy without a budget."
        )
    path = plan_path(policy)
    parsed = LEAN if auto or path is not None else parse_policy(policy)
    _check_place(policy, parsed, offload)
    if parsed.parts and blocks is not None:
        raise ConfigurationError(
            f"blocks={blocks!r} and a mapping as policy= contradict each other: the mapping's patterns are the "
            "blocks. Leave blocks= out, or give one policy for the blocks that you name."
        )
    if parsed.ask is not None and blocks is not None:
        # Naming blocks asks for their borders; without them a function over ops decides about everything.
        parsed = replace(parsed, segment=1)
    plan = PlanFile.load(path) if path is not None else None
    if plan is not None and any(plan.move) and place is None:
        raise ConfigurationError(
            f"policy={path!r}: this plan moves activations off the device, and nothing says where to: give offload= as "
            "in the run that made it, or make a plan without."
        )
    planned = auto or (offload_only and size is not None)
    return Settings(
        parsed, planned, size, path, plan, margin, retries, verify_every_n_steps, not offload_only, place, compiled
    )


def _check_place(policy: Any, parsed: Policy, offload: Any) -> None:
    """Refuse a policy and ``offload=`` that contradict each other."""
    if parsed.off and offload is not None:
        raise ConfigurationError(
            f"policy={policy!r} and offload={offload!r} contradict each other: 'none' leaves everything where it is. "
            "policy='offload_only' recomputes nothing and moves what is kept; or leave offload= out."
        )
    if parsed.needs_offload and offload is None:
        raise ConfigurationError(
            f"policy={policy!r} moves what is kept, and nothing says where to: give offload='cpu' (host memory) or "
            "offload='disk', or take policy='none', which keeps everything on the device."
        )


def _check_compiled(compiled: Any, policy: Any, auto: bool) -> None:
    """Refuse what is no way of treating compiled regions, or one that nothing would come of."""
    if compiled not in ("leave", "budget"):
        raise ConfigurationError(
            f"compiled={compiled!r} is unknown; give 'leave' (what compiled regions save is left to their compiler) or "
            "'budget' (it is held to the budget, by compiling them again with another activation budget)."
        )
    if compiled == "budget" and not auto:
        raise ConfigurationError(
            f"compiled='budget' and policy={policy!r} contradict each other: what compiled regions save is chosen from "
            "a budget. Use policy='auto' (with budget=, or for what the device has), or compiled='leave'."
        )


def _check_count(name: str, value: Any, least: int, otherwise: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigurationError(f"{name}={value!r}: give a whole number, {least} or more ({otherwise}).")


def table_for(kept: Set[str], policy: Policy) -> ActionTable:
    """The action table of a policy, in which ops named in ``kept`` are never dropped."""

    def action(rule: Rule) -> int:
        return KEEP_ALL.action(rule) if rule.name in kept else policy.action(rule)

    return ActionTable(action)
