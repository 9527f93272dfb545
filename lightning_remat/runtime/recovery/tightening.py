"""What an engine does about a step that ran out of memory, try by try."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_remat.engine.out_of_memory import bytes_asked
from lightning_remat.engine.policies import LEAN
from lightning_remat.errors import NoMemoryLeft, OffloadError
from lightning_remat.runtime.recovery.exhausted import exhausted
from lightning_remat.runtime.static import device_of, static_parts
from lightning_remat.runtime.tuning.pilot import Pilot

if TYPE_CHECKING:
    from lightning_remat.engine.policies import Policy
    from lightning_remat.runtime.binding import Binding
    from lightning_remat.runtime.session import Remat

_OFTEN = 3
"""How many steps must have been run again under a fixed policy before the lean one stays in its place."""


class Fixed:
    """A fixed policy that has been replaced by the lean one.

    Attributes:
        policy, binding: the user's, as they were.
        times: how often they had to be replaced.
    """

    def __init__(self, policy: Policy, binding: Binding) -> None:
        self.policy = policy
        self.binding = binding
        self.times = 0


class Tightening:
    """The way of one engine (:class:`~lightning_remat.runtime.recovery.retry.Way`), while a step runs.

    Under ``policy="auto"`` the pilot knows plans that need less. A fixed policy is replaced by the lean one for this
    batch; from the third time on, for good. Where nothing is leaner, the same is tried again, since by now
    the caches are empty and others may have freed memory.
    """

    def __init__(self, remat: Remat) -> None:
        self.remat = remat
        self._tried = ["as planned"]

    def tighten(self, asked: int | None) -> tuple[str, bool]:
        """See :class:`~lightning_remat.runtime.recovery.retry.Way`."""
        remat = self.remat
        remat.press()
        words = remat.pilot.tighten(asked) if remat.pilot is not None else self._leaner()
        words = words or remat.tighten_compiled()
        tighter = words is not None
        words = words or "as before, with all caches emptied"
        if self._tried[-1] != words:
            self._tried.append(words)
        remat.counters.note(f"step {remat.counters.steps + 1} ran out of memory: run again {words}")
        return words, tighter

    def run_without(self, error: OffloadError) -> tuple[str, bool]:
        """See :class:`~lightning_remat.runtime.recovery.retry.Way`."""
        remat = self.remat
        if remat.pilot is not None:
            remat.pilot.undone()
        words = remat.offloading.run_without(error) if remat.offloading is not None else "as before"
        remat.counters.note(f"step {remat.counters.steps + 1} lost what had left the device: run again {words}")
        return words, True

    def _leaner(self) -> str | None:
        remat = self.remat
        if remat.fixed is None:
            remat.fixed = Fixed(remat.policy_in_force, remat.binding)
        fixed = remat.fixed
        if remat.policy_in_force is LEAN or fixed.policy.name == "full":
            return None
        remat.put_in_force(LEAN)
        return "under policy 'full'"

    def settled(self) -> None:
        """See :class:`~lightning_remat.runtime.recovery.retry.Way`."""
        remat, fixed = self.remat, self.remat.fixed
        if fixed is None or remat.policy_in_force is not LEAN or fixed.policy is LEAN:
            return
        fixed.times += 1
        if fixed.times < _OFTEN:
            remat.put_in_force(fixed.policy, fixed.binding)
        elif fixed.times == _OFTEN:
            remat.counters.note(
                f"policy={fixed.policy.name!r} ran out of memory {fixed.times} times: policy 'full' from now on"
            )

    def give_up(self, error: BaseException, tries: int, why: str | None) -> NoMemoryLeft:
        """See :class:`~lightning_remat.runtime.recovery.retry.Way`."""
        remat = self.remat
        if why is not None:
            return NoMemoryLeft(
                f"Out of memory in a training step, which cannot be run again: {why}. {_first_line(error)} "
                "Start again from the last checkpoint with more memory to spare: a smaller budget=, a larger margin= "
                "or policy='full'. No batch was skipped: training stops at this one.",
                asked_bytes=bytes_asked(error),
                tries=self._tried,
                irreversible=why,
            )
        roots = remat.binding.roots
        device = device_of(roots)
        optimizers = remat.pilot.optimizers.of(roots) if isinstance(remat.pilot, Pilot) else ()
        known = remat.pilot.main if isinstance(remat.pilot, Pilot) else None
        smallest = known.result.smallest.peak_bytes if known is not None and known.result is not None else None
        return exhausted(
            error,
            device=device,
            static_parts=static_parts(roots, optimizers, device),
            plan_peak=smallest,
            tries=self._tried,
            batch=None,
        )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
