"""Gradients before a step, without a copy of them.

A failed try has added to some gradients and not to others, and what a gradient was before cannot be had again by
subtraction. But the next try adds the same, bit for bit: so where it was added already, the gradient is put aside, the
next try accumulates into nothing, and a hook throws that away and puts the gradient back.

What counts as added is watched by hooks on those parameters that have a gradient when backward begins: one before each
accumulation, which sees changes by anybody else, and one after. A gradient that was set to None in the try, or zeroed,
need not be put back: the next try does the same.

Known weakness: code that reads a gradient of earlier batches before it adds to it or zeroes it (to log its norm, say)
reads something else in the next try.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor

from lightning_remat.engine.plain import guard_backward
from lightning_remat.runtime.recovery.snapshot_parts.tensors import place_of, version_of

_UNTOUCHED, _ADDED, _LET_GO, _ZEROED, _UNKNOWN = range(5)


class Gradients:
    """The gradients of parameters at one time, and what becomes of them.

    Args:
        name_of: gives the name of a parameter, for errors.
        told: :meth:`backward_begins` is called before every backward by somebody. Otherwise that is seen to here.

    Hooks are only needed where there is still a gradient when backward begins, and putting them there at every step
    costs more than everything else.
    """

    def __init__(self, name_of: Callable[[Tensor], str], *, told: bool) -> None:
        self._name_of = name_of
        self._told = told
        self._parameters: Sequence[Tensor] = ()
        self._present: list[tuple[int, int] | None] = []
        self._tracks: dict[int, Track] = {}
        self._gone: set[int] = set()
        self._any = False
        self._unguard: Callable[[], None] = _nothing

    def take(self, parameters: Sequence[Tensor]) -> None:
        """Note which parameters have gradients, and in which state."""
        self.release()
        self._parameters = parameters
        self._note()
        if self._any and not self._told:
            # Not a bound method: the list of guards is global and must not keep us alive.
            me = weakref(self)

            def begins(roots: Sequence[Any], create_graph: bool) -> None:
                gradients = me()
                if gradients is not None:
                    gradients.backward_begins()

            self._unguard = guard_backward(begins)

    def backward_begins(self) -> None:
        """Watch what is added to gradients that are there."""
        if not self._any:
            return
        for p, before in zip(self._parameters, self._present, strict=True):
            if before is None or id(p) in self._gone or id(p) in self._tracks:
                continue
            if p.grad is None:
                self._gone.add(id(p))
            elif p.requires_grad:
                self._tracks[id(p)] = Track(p, before)

    def before_step(self, parameters: Iterable[Tensor]) -> None:
        """Copy the gradients of earlier batches that an optimizer, inside the step, is about to use."""
        if not self._any:
            return
        index = {id(p): i for i, p in enumerate(self._parameters)}
        for p in parameters:
            i = index.get(id(p))
            if i is None or (before := self._present[i]) is None or p.grad is None or id(p) in self._gone:
                continue
            track = self._tracks.get(id(p))
            if track is None:
                track = self._tracks[id(p)] = Track(p, before)
            track.save()

    def why_not(self) -> str | None:
        """Why a gradient cannot be put back, or None."""
        for p, before in zip(self._parameters, self._present, strict=True):
            if before is None or id(p) in self._gone:
                continue
            track = self._tracks.get(id(p))
            became = _what_became(p, before) if track is None else track.what_became()
            reason = _reason(p) if became == _UNKNOWN else track.cannot_put_aside() if track is not None else None
            if reason is not None:
                return f"the gradient of {self._name_of(p)} is from an earlier batch and {reason}"
        return None

    def restore(self) -> None:
        """Put gradients back, or aside for the next try to put back."""
        for p, before in zip(self._parameters, self._present, strict=True):
            track = self._tracks.get(id(p))
            if before is None or id(p) in self._gone:
                p.grad = None
            elif track is not None:
                track.restore()
            elif p.grad is not None and _what_became(p, before) == _LET_GO:
                p.grad = None
        for i in [i for i, track in self._tracks.items() if not track.has_gradient]:
            self._tracks.pop(i).remove()
        self._gone = set()
        self._note(self._tracks)

    def release(self) -> None:
        """Remove the hooks and forget."""
        self._unguard()
        self._unguard = _nothing
        for track in self._tracks.values():
            track.remove()
        self._tracks, self._gone = {}, set()
        self._parameters, self._present, self._any = (), [], False

    def _note(self, aside: Container[int] = ()) -> None:
        old = self._present
        gradients = [p.grad for p in self._parameters]
        if all(g is None for g in gradients) and not old:
            self._present, self._any = [None] * len(gradients), False
            return
        self._present = [
            (version_of(g), place_of(g)) if (g := p.grad) is not None else old[i] if id(p) in aside else None
            for i, p in enumerate(self._parameters)
        ]
        self._any = any(present is not None for present in self._present)


def _nothing() -> None:
    """There is no guard."""


def _what_became(p: Tensor, before: tuple[int, int]) -> int:
    """Of a gradient that no hook watched."""
    g = p.grad
    if g is None:
        return _LET_GO
    if (version_of(g), place_of(g)) == before:
        return _UNTOUCHED
    return _ZEROED if place_of(g) == before[1] and _is_zero(g) else _UNKNOWN


def _is_zero(g: Tensor) -> bool:
    return not bool(g.detach().any()) if g.layout is torch.strided else False


def _reason(p: Tensor) -> str:
    if p.grad is not None and p.grad._is_view():
        return "is a view of a bucket (gradient_as_bucket_view=True), whose changes cannot be told apart"
    return (
        "was changed in the step otherwise than by backward adding to it (clipped, unscaled, replaced; or zeroed in "
        "place, for which zero_grad(set_to_none=True) is the way)"
    )


class Track:
    """What happens to one gradient of earlier batches in this step."""

    def __init__(self, parameter: Tensor, before: tuple[int, int]) -> None:
        g = parameter.grad
        assert g is not None
        self._p = parameter
        self._now = weakref(g)
        self._version = before[0]
        self._count = 0
        self._state = _UNTOUCHED if place_of(g) == before[1] else _UNKNOWN
        self._zeros: list[Tensor] = []
        self._aside: Tensor | None = None
        self._todo = 0
        self._saved: tuple[Tensor, int] | None = None
        self._handles: list[Any] = []
        if parameter.requires_grad:
            # Hooks that do not keep us alive: parameters outlive snapshots.
            me = weakref(self)

            def before_adding(grad: Tensor) -> None:
                if (track := me()) is not None:
                    track._settle()

            def after_adding(p: Tensor) -> None:
                if (track := me()) is not None:
                    track._added()

            self._handles.append(parameter.register_hook(before_adding))  # type: ignore[no-untyped-call]  # torch's
            handle = parameter.register_post_accumulate_grad_hook(after_adding)  # type: ignore[no-untyped-call]  # torch's
            self._handles.append(handle)

    @property
    def has_gradient(self) -> bool:
        """Whether there is one, if only put aside."""
        return self._aside is not None or self._p.grad is not None

    def remove(self) -> None:
        """Take the hooks away; a gradient that is still aside is put back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._aside is not None and self._p.grad is None:
            self._p.grad = self._aside
        self._aside = None

    def save(self) -> None:
        """Copy the gradient to host memory before an optimizer uses it; the first copy counts."""
        self._settle()
        if self._saved is None and self._state in (_UNTOUCHED, _ADDED) and self._p.grad is not None:
            if self._zeros:  # it was zeroed before; nothing of earlier batches is in it
                return
            self._saved = (self._p.grad.detach().to("cpu", copy=True), self._count)

    def what_became(self) -> int:
        """Of the gradient, by now."""
        if self._todo:
            return _ADDED
        if self._saved is not None:
            return _ADDED if self._saved[1] else _UNTOUCHED
        self._settle()
        if self._state in (_UNTOUCHED, _ADDED, _ZEROED) and self._zeros:
            if not all(bool(z) for z in self._zeros):
                return _UNKNOWN
            return _ZEROED
        return self._state

    def cannot_put_aside(self) -> str | None:
        """Why this gradient cannot be carried over into the next try, or None."""
        g = self._p.grad
        if self._count and self._saved is None and g is not None and g.requires_grad:
            return "was made with create_graph=True, so that it belongs to a graph of the failed try"
        return None

    def restore(self) -> None:
        """Put the gradient back, or aside if the next try will add what is in it already."""
        became = self.what_became()
        if self._todo:  # a try failed before it had come as far as the one before
            self._p.grad = None
        elif self._saved is not None:
            host, self._count = self._saved
            self._state = _ADDED if self._count else _UNTOUCHED
            g = self._p.grad if self._p.grad is self._now() else None
            if g is None:
                g = torch.empty_like(host, device=self._p.device)
            with torch.no_grad():
                g.copy_(host)
            self._p.grad = g
        elif became == _LET_GO:
            self._p.grad = None
        self._zeros = []
        g = self._p.grad
        if g is not None:
            self._follow(g)
            if self._state == _ZEROED or became == _ZEROED:
                self._state, self._count = _UNTOUCHED, 0
            if self._count:
                self._aside, self._p.grad = g, None
        if self._aside is not None:
            self._todo = self._count

    def _settle(self) -> None:
        """See what others did to the gradient since we last looked."""
        if self._todo or self._state in (_LET_GO, _UNKNOWN):
            return
        g = self._p.grad
        if g is None:
            self._state = _LET_GO
        elif g is not self._now():
            self._state = _UNKNOWN
        elif version_of(g) != self._version:
            # Zeroed in place, or else we cannot have it back. Whether it is, is not asked now: that would wait for the
            # device.
            if g.layout is not torch.strided:
                self._state = _UNKNOWN
                return
            with torch.no_grad():
                self._zeros.append(g.detach().any().logical_not())
            self._version = version_of(g)
            self._count = 0

    def _added(self) -> None:
        g = self._p.grad
        if self._todo:
            self._todo -= 1
            # What was added is in what is aside already; the memory goes at once.
            self._p.grad = None if self._todo else self._aside
            if not self._todo and self._aside is not None:
                self._follow(self._aside)
                self._aside = None
        elif g is not None and self._state in (_UNTOUCHED, _ADDED):
            self._state = _ADDED
            self._count += 1
            self._follow(g)

    def _follow(self, g: Tensor) -> None:
        self._now = weakref(g)
        self._version = version_of(g)
