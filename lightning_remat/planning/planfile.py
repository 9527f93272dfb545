"""Plan files: a plan as JSON, with what is needed to see whether it fits the model that it is used with."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from lightning_remat.errors import PlanFileError
from lightning_remat.planning.plan import PlanResult

VERSION = 2
"""Of files in which something moves; the others are of version 1, so that earlier releases can read them."""

_FORMAT = "lightning-remat plan"
_FLAGS = ("drop", "lean", "move", "lean_move")
_OF_MOVES = ("move", "lean_move", "window_bytes", "ahead_bytes", "min_bytes")


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """What a plan file holds.

    Attributes:
        sequence: fingerprint of the traced step's ops; see :class:`~lightning_remat.planning.trace.Trace`.
        sizes: fingerprint of its sizes.
        names: overload of each op.
        modules: qualified name of the module that ran it.
        elements: size of its first output, in elements; -1: unknown.
        drop: whether its outputs are dropped.
        lean: the same for the plan with the smallest peak, for shapes that are larger than the traced one.
        budget_bytes: what was asked for.
        static_bytes: what was there between steps.
        peak_bytes: the peak that was predicted.
        extra_seconds: predicted time of replay.
        device: type of the device that was traced.
        move: whether its outputs leave the device; empty: none do.
        lean_move: the same for the plan with the smallest peak.
        window_bytes: what the plan takes for granted where something moves; see
            :class:`~lightning_remat.planning.transfer.Transfer`.
        ahead_bytes: likewise.
        min_bytes: likewise.
    """

    sequence: str
    sizes: str
    names: tuple[str, ...]
    modules: tuple[str, ...]
    elements: tuple[int, ...]
    drop: tuple[bool, ...]
    lean: tuple[bool, ...]
    budget_bytes: int
    static_bytes: int
    peak_bytes: int
    extra_seconds: float
    device: str
    move: tuple[bool, ...] = ()
    lean_move: tuple[bool, ...] = ()
    window_bytes: int = 0
    ahead_bytes: int = 0
    min_bytes: int = 0

    @property
    def moves(self) -> bool:
        """Whether anything leaves the device, under either plan."""
        return any(self.move) or any(self.lean_move)

    @classmethod
    def of(cls, result: PlanResult) -> PlanFile:
        """The file for a plan."""
        trace, transfer = result.trace, result.chosen.transfer or result.smallest.transfer or result.transfer
        moves = transfer is not None and (result.chosen.moves or result.smallest.moves)
        return cls(
            sequence=trace.sequence,
            sizes=trace.sizes,
            names=tuple(op.name for op in trace.ops),
            modules=tuple(op.module for op in trace.ops),
            elements=tuple(op.size for op in trace.ops),
            drop=result.chosen.drop,
            lean=result.smallest.drop,
            budget_bytes=result.budget_bytes,
            static_bytes=result.static_bytes,
            peak_bytes=result.peak_bytes,
            extra_seconds=result.chosen.extra_seconds,
            device=trace.device,
            move=result.chosen.move if moves else (),
            lean_move=result.smallest.move if moves else (),
            window_bytes=transfer.window_bytes if transfer is not None and moves else 0,
            ahead_bytes=transfer.ahead_bytes if transfer is not None and moves else 0,
            min_bytes=transfer.min_bytes if transfer is not None and moves else 0,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it; a file that is there is replaced only once the new one is whole.

        Raises:
            PlanFileError: it cannot be written; a file that is there stays as it is.
        """
        content: dict[str, Any] = {"format": _FORMAT, "version": VERSION if self.moves else 1}
        content |= {name: getattr(self, name) for name in self.__dataclass_fields__}
        for name in _FLAGS:
            content[name] = _bits(content[name])
        if not self.moves:
            for name in _OF_MOVES:
                del content[name]
        path = Path(path)
        # Not by tempfile, whose files nobody else may read.
        part = path.with_name(f".{path.name}.{uuid4().hex}")
        try:
            part.write_text(json.dumps(content, separators=(",", ":")), encoding="utf-8")
            os.replace(part, path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise PlanFileError(
                f"save_plan({str(path)!r}): the plan cannot be written there: {error.strerror}. Give a path in a "
                "folder that exists and may be written to."
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PlanFile:
        """Read it.

        Raises:
            PlanFileError: there is no such file, or it is not whole, not a plan, or from a later version.
        """
        again = "Make it anew with policy='auto' and a budget, then save_plan()."
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanFileError(
                f"policy={str(path)!r}: the plan file cannot be read: {error.strerror}. {again}"
            ) from error
        except UnicodeDecodeError as error:
            raise PlanFileError(f"policy={str(path)!r}: the plan file is not text. {again}") from error
        except ValueError as error:
            raise PlanFileError(f"policy={str(path)!r} is no path: {error}. {again}") from error
        try:
            content = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanFileError(
                f"policy={str(path)!r}: the plan file is damaged or cut short ({error}). {again}"
            ) from error
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise PlanFileError(f"policy={str(path)!r} is JSON, but not a plan of lightning-remat. {again}")
        version = content.pop("version", None)
        if isinstance(version, bool) or version not in (1, VERSION):
            raise PlanFileError(
                f"policy={str(path)!r}: the plan file has version {version!r}, and this release reads 1 to {VERSION}. "
                f"Use the release that wrote it, or make it anew: policy='auto' and a budget, then save_plan()."
            )
        try:
            of_moves = [name for name in _OF_MOVES if name in content]
            if version == 1 and of_moves:
                raise ValueError(f"{of_moves[0]} does not belong into version 1")
            for name in _FLAGS[:2] if version == 1 else _FLAGS:
                content[name] = _from_bits(content[name])
            for name in ("names", "modules", "elements"):
                if not isinstance(content[name], list):
                    raise ValueError(f"{name} must be a list")
                content[name] = tuple(content[name])
            plan = cls(**content)
            plan._check()
        except (KeyError, TypeError, ValueError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise PlanFileError(f"policy={str(path)!r}: the plan file is damaged ({what}). {again}") from error
        return plan

    def _check(self) -> None:
        count = len(self.names)
        for name in ("modules", "elements", "drop", "lean"):
            if len(getattr(self, name)) != count:
                raise ValueError(f"{name} has {len(getattr(self, name))} entries for {count} ops")
        for name, drop in (("move", self.drop), ("lean_move", self.lean)):
            move = getattr(self, name)
            if move and len(move) != count:
                raise ValueError(f"{name} has {len(move)} entries for {count} ops")
            if any(d and m for d, m in zip(drop, move, strict=False)):
                raise ValueError(f"{name} says that something moves that is dropped")
        if not all(isinstance(n, str) for n in (*self.names, *self.modules)):
            raise ValueError("names of ops and modules must be strings")
        if not all(isinstance(n, str) for n in (self.sequence, self.sizes, self.device)):
            raise ValueError("fingerprints and the device must be strings")
        counts: tuple[object, ...] = (*self.elements, self.budget_bytes, self.static_bytes, self.peak_bytes)
        # Numbers below -1 would mean something else to the tape.
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= -1 for n in counts):
            raise ValueError("sizes must be whole numbers, -1 or more")
        limits: tuple[object, ...] = (self.window_bytes, self.ahead_bytes, self.min_bytes)
        if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in limits):
            raise ValueError("limits of moves must be whole numbers, 0 or more")
        if not isinstance(self.extra_seconds, (int, float)):
            raise ValueError("extra_seconds must be a number")


def plan_path(policy: object) -> str | None:
    """The path, if what a user gave as a policy names a plan file: it ends in ``.json``."""
    if isinstance(policy, (str, os.PathLike)) and str(policy).lower().endswith(".json"):
        return str(policy)
    return None


def _bits(flags: tuple[bool, ...]) -> str:
    return "".join("1" if f else "0" for f in flags)


def _from_bits(text: object) -> tuple[bool, ...]:
    if not isinstance(text, str) or set(text) - {"0", "1"}:
        raise ValueError("a plan consists of 0 and 1")
    return tuple(c == "1" for c in text)
