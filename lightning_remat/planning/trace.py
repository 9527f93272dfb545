"""A trace: one training step as a list of ops, values and events, enough to foresee the same step under any plan.

It holds no tensor and no function, only numbers and names: it can be stored, sent, and made on another machine. Three
sources make one: a real step (`runtime/tracer.py`), a step on fake tensors (`planning/fake/`), and tests by hand.

Events stand in the order in which they happened, forward and backward alike:

======== ============= =====================================================================================
kind     operands      meaning
======== ============= =====================================================================================
RUN      op            an op ran in forward, and its outputs came into being
FREE     value         the program (the user's variables, not autograd) let go of a value's storage
SAVE     slot, value   autograd saved a value; a slot is one saved tensor of one node
NEED     slot          backward asks for what a slot holds
RELEASE  slot          the node let go of the slot
EXIT     none          the step was left: what nobody but the program's own tensors refers to is forgotten
OTHER    top, net      memory that is nobody's value (gradients, workspaces, user tensors): the most that was there
                       above the level before this event, in bytes (NEVER: nothing was allocated), and what remained
======== ============= =====================================================================================
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

RUN, FREE, SAVE, NEED, RELEASE, OTHER, EXIT = range(7)
"""Kinds of event."""

NEVER = -(2**62)
"""``top`` of an OTHER event in which nothing was allocated."""

Event = tuple[int, int, int]
"""(kind, first operand or 0, second operand or 0)."""


@dataclass(slots=True)
class TraceOp:
    """One op of the forward pass that the tape could see; views and ops without gradient mode are left out.

    Attributes:
        name: overload, such as ``"aten.addmm.default"``.
        module: qualified name of the module that ran it.
        kind: ``expensive``, ``cheap``, ``random``, ``factory`` or ``fixed``.
        inputs: values it reads, without those made outside of the step; each once.
        outputs: values it makes. An op that writes in place makes one new value in the old one's storage.
        writes: the value that it overwrites, or -1.
        droppable: the tape can drop its outputs, and run it again.
        seconds: what it costs to run once more.
        scratch: bytes that it needs while it runs, above its outputs.
        state: bytes that a record of it holds besides its inputs (a generator's state, or what is nobody's value).
        size: elements of its first output, to notice another shape.
    """

    name: str
    module: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    writes: int = -1
    droppable: bool = True
    seconds: float = 0.0
    scratch: int = 0
    state: int = 0
    size: int = -1


@dataclass(slots=True)
class Trace:
    """A step.

    Attributes:
        ops: in order of execution.
        nbytes: size of each value's storage; 0 where its bytes are in OTHER events.
        makers: op that makes each value.
        events: see above.
        slots: number of slots.
        savers: for each slot, the op whose node saved it; -1, or a list that is too short: not known.
        weights: for each op, bytes of the parameters whose gradients its node makes first; or a list that is too short:
            not known.
        forward_seconds: duration of the step's first part.
        backward_seconds: duration of the second, replays taken out.
        device: type of the device, such as ``"cuda"``.
        source: ``"step"``, ``"fake"`` or ``"hand"``.
        borders: ops (by index) before which a block begins or ends; only for reports and as hints.
    """

    ops: list[TraceOp] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    makers: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    slots: int = 0
    savers: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    device: str = "cpu"
    source: str = "hand"
    borders: list[int] = field(default_factory=list)

    def saver(self, slot: int, last: int) -> int:
        """The op whose node saved a slot; where that is not known, ``last``, the op that ran last before."""
        known = self.savers[slot] if slot < len(self.savers) else -1
        return known if known >= 0 else last

    @property
    def sequence(self) -> str:
        """A fingerprint of which ops ran in which order on which values, sizes aside."""
        text = "\n".join(f"{op.name} {op.inputs} {op.outputs} {op.writes} {op.droppable}" for op in self.ops)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def sizes(self) -> str:
        """A fingerprint of all sizes."""
        text = f"{self.nbytes} {[op.size for op in self.ops]}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def to_json(self) -> str:
        """The whole trace as text."""
        content = {name: getattr(self, name) for name in self.__dataclass_fields__}
        content["ops"] = [list(asdict(op).values()) for op in self.ops]
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """The reverse of :meth:`to_json`."""
        content: dict[str, Any] = json.loads(text)
        content["ops"] = [TraceOp(*_tuples(op)) for op in content["ops"]]
        content["events"] = [tuple(event) for event in content["events"]]
        return cls(**content)


def _tuples(fields: list[Any]) -> list[Any]:
    return [tuple(f) if isinstance(f, list) else f for f in fields]
