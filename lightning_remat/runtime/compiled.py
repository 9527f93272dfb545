"""Regions that ``torch.compile`` has compiled: counted, and held to a budget by what their compiler may save.

What a region saves for backward is decided when it is compiled. So another activation budget takes another compilation:
what Dynamo has compiled in our steps is thrown away, once, and the next step compiles it anew. Code that was never
compiled in a step of ours stays as it is.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import CodeType
from typing import Any
from weakref import ref as weakref

from torch import nn

from lightning_remat.runtime.counters import Counters
from lightning_remat.runtime.static import device_of, static_parts
from lightning_remat.runtime.tuning.pilot import Pilot
from lightning_remat.runtime.tuning.shares import Shares
from lightning_remat.sizes import format_bytes


class CompiledRegions:
    """The compiled regions of one engine's steps.

    Args:
        counters: where compilations and decisions are written.
        governed: whether their activation budget is chosen; otherwise they are only counted.

    Attributes:
        shares: the choice of the activation budget; None before anything was compiled, and where it is left alone.
    """

    def __init__(self, counters: Counters, governed: bool) -> None:
        self.counters = counters
        self.governed = governed
        self.shares: Shares | None = None
        self._codes: dict[int, weakref[CodeType]] = {}
        self._graphs = 0
        self._inside: ExitStack | None = None

    # ------------------------------------------------------------------ around a step

    def begin(self) -> None:
        """A step begins: from here on, what is compiled is compiled for us."""
        self.end()
        self._graphs = _graphs()
        shares = self.shares
        self._inside = ExitStack()
        if self.governed:
            from torch._dynamo.convert_frame import register_bytecode_hook

            self._inside.callback(register_bytecode_hook(self._compiled).remove)
        if shares is not None and shares.now < shares.top:
            self._inside.enter_context(held_to(shares.now))

    def end(self) -> None:
        """It was left; safe to repeat."""
        inside, self._inside = self._inside, None
        if inside is None:
            return
        inside.close()
        self.counters.compilations += max(0, _graphs() - self._graphs)
        if self._codes and self.shares is None:
            self.shares = Shares(_activation_budget())
            self.counters.activation_budget = self.shares.now

    def _compiled(self, code: CodeType, new_code: CodeType) -> CodeType | None:
        """Code was compiled in this step (a hook of Dynamo's)."""
        me, number = weakref(self), id(code)

        def gone(_: Any) -> None:
            regions = me()
            if regions is not None:
                regions._codes.pop(number, None)

        self._codes[number] = weakref(code, gone)
        return None  # it stays as it is

    # ------------------------------------------------------------------ between steps

    @property
    def may_give_more(self) -> bool:
        """Whether another activation budget may still be tried where no plan fits."""
        return self.governed and self.shares is not None and not self.shares.settled

    def look_at(self, pilot: Pilot) -> bool:
        """Hold what was measured against the budget, once that is known.

        Returns:
            Whether another activation budget is in force: all that is known of steps is of no use under it.
        """
        shares, main = self.shares, pilot.main
        if not self.governed or shares is None or main is None or main.result is None or not main.tuner.settled:
            return False
        best = main.tuner.best
        if shares.settled and (best is not None or not shares.fits):
            return False
        if best is not None and not shares.found:
            shares.learn(best.measured, True)  # as it is; nothing smaller is looked for
            return False
        if not self._by_inductor():
            self.governed = False
            text = "Inductor has compiled none of the compiled regions, so that they are left as they are"
            self.counters.note(text)
            pilot.chooser.tell(
                "budget", f"no plan was measured to fit a budget of {pilot.chooser.text}, and {text}. Training goes on."
            )
            return False
        peaks = [t.measured for t in main.tuner.trials if t.measured is not None]
        peak = best.measured if best is not None else min(peaks, default=None)
        return self._learned(pilot, peak, best is not None, main.static)

    def _learned(self, pilot: Pilot, peak: int | None, fits: bool, static: int) -> bool:
        shares = self.shares
        assert shares is not None  # of regions that are governed
        tried = shares.now
        total = "memory ran out" if peak is None else f"measured peak {format_bytes(static + peak)}"
        changed = shares.learn(None if peak is None else static + peak, fits)
        self.counters.note(
            f"compiled regions, activation budget {tried:g}: {total}, {'fits' if fits else 'does not fit'}"
            + (f"; {shares.now:g} is {'chosen' if shares.settled else 'tried'}" if changed or shares.settled else "")
        )
        self.counters.activation_budget = shares.now
        if shares.settled and not shares.fits:
            tried_all = ", ".join(f"{share:g}" for share in sorted(shares.found, reverse=True))
            pilot.chooser.tell(
                "compiled",
                f"no plan was measured to fit a budget of {pilot.chooser.text}, whatever activation budget "
                f"compiled regions were given ({tried_all}). Training goes on under that with the smallest peak, "
                f"{shares.now:g}.",
            )
        if changed:
            self.compile_anew()
        return changed

    def tighten(self) -> str | None:
        """A step has run out of memory under the least that plans can do: hold its regions to less.

        Returns:
            What that is, in words; None if there is no other activation budget that may take less.
        """
        shares = self.shares
        if not self.governed or shares is None or not self._by_inductor():
            return None
        if not shares.ran_out():
            return None
        self.counters.activation_budget = shares.now
        self.compile_anew()
        return f"with compiled regions held to an activation budget of {shares.now:g}"

    def compile_anew(self) -> None:
        """Let the code that was compiled for our steps be compiled again when it runs next."""
        dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
        if dynamo is None:
            return
        from torch._C._dynamo.eval_frame import reset_code

        with dynamo.compile_lock:
            for found in list(self._codes.values()):
                code = found()
                if code is not None:
                    reset_code(code)

    def _by_inductor(self) -> bool:
        """Whether Inductor has compiled any of it: what others compile never comes by our pass."""
        from torch._dynamo.eval_frame import innermost_backend

        codes = [code for found in list(self._codes.values()) if (code := found()) is not None]
        backends = [innermost_backend(entry.backend) for code in codes for entry in _entries(code)]
        return any(getattr(backend, "compiler_name", None) == "inductor" for backend in backends)

    # ------------------------------------------------------------------ over checkpoints

    def state(self, budget: int | float | None) -> dict[str, Any] | None:
        """What a run that is resumed under the same budget begins with, as plain data; None: as without."""
        shares = self.shares
        if not self.governed or shares is None or shares.now >= shares.top:
            return None
        return {"share": shares.now, "budget": budget}

    def resume(self, state: Any, budget: int | float | None) -> None:
        """Begin with the activation budget of another run, so that nothing is compiled twice to find it.

        It is held against what is measured, like any other. What is no such state is passed over.
        """
        share = state.get("share") if isinstance(state, dict) else None
        if not self.governed or self._codes or not isinstance(share, float) or state.get("budget") != budget:
            return
        top = _activation_budget()
        if 0 < share < top:
            self.shares = Shares(top, share)
            self.counters.activation_budget = share

    @property
    def sentence(self) -> str:
        """What there is to say of them, in words; empty if nothing was compiled."""
        c = self.counters
        if not c.compilations:
            return ""
        graphs = f"{c.compilations} graph{'s' if c.compilations > 1 else ''} compiled in steps"
        return graphs if c.activation_budget is None else f"{graphs}, activation budget {c.activation_budget:g}"


def lasting(pilot: Pilot, roots: list[nn.Module]) -> dict[str, int]:
    """What is there between steps, as far as a pilot has met it: the next one need not begin without."""
    return static_parts(roots, pilot.optimizers.of(roots), device_of(roots))


def held_to(share: float) -> Any:
    """A context in which what Inductor compiles may save this share of what it would."""
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import get_custom_graph_passes

    from lightning_remat.runtime.partition import Partition

    set_by_user: Any = config.joint_custom_post_pass
    return config.patch(joint_custom_post_pass=Partition(share, get_custom_graph_passes(set_by_user)))


def _activation_budget() -> float:
    """What the user has set for all graphs."""
    from torch._functorch import config

    return float(config.activation_memory_budget)


def _graphs() -> int:
    """Graphs that were compiled in this process so far."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0


def _entries(code: CodeType) -> list[Any]:
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return _debug_get_cache_entry_list(code)
