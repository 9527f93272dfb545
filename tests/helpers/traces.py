"""Traces made by hand: a step of a transformer as bytes, seconds and events, without a tensor or a device.

Sizes, what autograd saves, and when, are those of PyTorch; durations follow from counted arithmetic and traffic. What
comes out is exact, the same on every machine, and made in milliseconds for hundreds of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lightning_remat.planning.plan import Candidate, PlanResult, judged
from lightning_remat.planning.trace import FREE, NEED, NEVER, OTHER, RELEASE, RUN, SAVE, Trace, TraceOp


@dataclass
class TraceBuilder:
    """Writes a trace op by op, as a forward pass would run, and then its backward.

    Attributes:
        flops_per_second: arithmetic of the device that is pretended.
        bytes_per_second: its memory traffic.
        launch_seconds: what starting any op costs.
        gradients_stay: parameters have gradients from the step before, so that new ones are added to them and freed;
            otherwise each parameter's gradient is a new allocation that outlives the step.
    """

    flops_per_second: float = 1e14
    bytes_per_second: float = 1e12
    launch_seconds: float = 5e-6
    gradients_stay: bool = True
    trace: Trace = field(default_factory=lambda: Trace(device="cuda"))
    _nodes: list[_Node] = field(default_factory=list)

    def op(
        self,
        name: str,
        module: str,
        kind: str,
        inputs: Iterable[int],
        sizes: Iterable[int],
        *,
        flops: float = 0.0,
        save: Iterable[int] = (),
        save_outputs: Iterable[int] = (),
        weight_bytes: int = 0,
        scratch: int = 0,
        state: int = 0,
        droppable: bool = True,
        writes: int = -1,
    ) -> tuple[int, ...]:
        """Run one op.

        Args:
            name: overload.
            module: qualified name.
            kind: as in :class:`TraceOp`.
            inputs: values it reads.
            sizes: bytes of each output.
            flops: arithmetic; what is less than the traffic takes no time of its own.
            save: values that autograd saves before the op runs, one slot each.
            save_outputs: positions of outputs that it saves afterwards.
            weight_bytes: size of the parameters it uses, and so of the gradient that its backward makes.
            scratch: bytes of workspace while it runs.
            state: bytes that a record of it holds.
            droppable: the tape can run it again.
            writes: the value it overwrites.

        Returns:
            The values it makes.
        """
        trace, inputs, sizes = self.trace, tuple(inputs), tuple(sizes)
        outputs = tuple(range(len(trace.nbytes), len(trace.nbytes) + len(sizes)))
        traffic = sum(trace.nbytes[v] for v in inputs) + sum(sizes) + weight_bytes
        seconds = self.launch_seconds + max(flops / self.flops_per_second, traffic / self.bytes_per_second)
        index = len(trace.ops)
        trace.nbytes += sizes
        trace.makers += [index] * len(sizes)
        trace.ops.append(
            TraceOp(name, module, kind, inputs, outputs, writes, droppable, seconds, scratch, state, sum(sizes))
        )
        node = _Node(index, weight_bytes)
        for value in save:
            self._save(node, value)
        trace.events.append((RUN, index, 0))
        if scratch:
            trace.events.append((OTHER, scratch, 0))
        for position in save_outputs:
            self._save(node, outputs[position])
        self._nodes.append(node)
        trace.forward_seconds += seconds
        return outputs

    def free(self, *values: int) -> None:
        """The program lets go of values."""
        self.trace.events += [(FREE, value, 0) for value in values]

    def border(self) -> None:
        """A block begins or ends here."""
        self.trace.borders.append(len(self.trace.ops))

    def backward(self, shared: Callable[[TraceOp], bool] = lambda op: op.name.startswith("aten.add.")) -> Trace:
        """Every op's node in reverse order: what it needs, its gradients, what it lets go of. Takes twice forward.

        A value's gradient comes with the first node that reads the value, a second one is added to it, and it goes when
        the value's own node has run. The nodes of ``shared`` ops pass their gradient on as it is.
        """
        trace = self.trace
        sizes: list[int] = []  # of each gradient tensor ever made
        gradient: dict[int, int] = {}  # value -> its gradient tensor
        level = staying = 0
        for node in reversed(self._nodes):
            op = trace.ops[node.op]
            trace.events += [(NEED, slot, 0) for slot in node.slots]
            mine = next((gradient[v] for v in op.outputs if v in gradient), None)
            top = level
            for value in op.inputs:
                if mine is not None and value not in gradient and shared(op):
                    gradient[value] = mine
                    continue
                top += trace.nbytes[value] * (2 if value in gradient else 1)  # the new one, and the sum with the old
                gradient[value] = len(sizes)
                sizes.append(trace.nbytes[value])
            for value in op.outputs:
                gradient.pop(value, None)
            top += node.weight_bytes
            staying += 0 if self.gradients_stay else node.weight_bytes
            after = staying + sum(sizes[tensor] for tensor in set(gradient.values()))
            trace.events.append((OTHER, top - level if top > level else NEVER, after - level))
            level = after
            trace.events += [(RELEASE, slot, 0) for slot in node.slots]
            trace.backward_seconds += 2 * op.seconds
        return trace

    def _save(self, node: _Node, value: int) -> None:
        self.trace.events.append((SAVE, self.trace.slots, value))
        self.trace.savers.append(node.op)
        node.slots.append(self.trace.slots)
        self.trace.slots += 1


@dataclass
class _Node:
    op: int
    weight_bytes: int
    slots: list[int] = field(default_factory=list)


def transformer_trace(
    blocks: int,
    *,
    tokens: int = 4096,
    width: int = 512,
    vocabulary: int = 2048,
    itemsize: int = 2,
    dropout: bool = False,
    name: str = "layers.{}",
    builder: TraceBuilder | None = None,
) -> Trace:
    """One step of a decoder: embedding, ``blocks`` pre-norm blocks, norm, head and cross entropy, then backward.

    A block is norm1, qkv, attention, proj, add, norm2, up, gelu, down, add; with ``dropout``, one more op before each
    add, which holds a generator's state when it is recorded.

    Args:
        blocks: how many.
        tokens: rows, which is batch times sequence.
        width: of the residual stream; the inner width is four times that.
        vocabulary: columns of the logits.
        itemsize: bytes of one element.
        dropout: random ops on both branches.
        name: block's qualified name, ``{}`` is its number.
        builder: a device other than the default one's; a fresh one for each trace.

    Returns:
        A trace with ``borders`` before, between and after the blocks. The residual stream at a border is the last
        output of the op before it.
    """
    b = builder or TraceBuilder()
    row = tokens * itemsize
    stream, statistic = row * width, tokens * 4

    def norm(module: str, x: int) -> int:
        found = b.op("aten.native_layer_norm.default", module, "cheap", [x], [stream, statistic, statistic],
                     save=[x], save_outputs=[1, 2], weight_bytes=2 * width * itemsize)  # fmt: skip
        b.free(*found[1:])
        return found[0]

    def linear(module: str, x: int, columns_in: int, columns: int) -> int:
        weight = columns_in * columns
        return b.op("aten.addmm.default", module, "expensive", [x], [row * columns],
                    flops=2 * tokens * weight, save=[x], weight_bytes=(weight + columns) * itemsize)[0]  # fmt: skip

    def joined(module: str, x: int, branch: int) -> int:
        if dropout:
            out, mask = b.op("aten.native_dropout.default", f"{module}.drop", "random", [branch],
                             [stream, tokens * width], save_outputs=[1], state=16)  # fmt: skip
            b.free(branch, mask)
            branch = out
        (out,) = b.op("aten.add.Tensor", module, "cheap", [x, branch], [stream])
        b.free(x, branch)
        return out

    (x,) = b.op(
        "aten.embedding.default", "embedding", "cheap", [], [stream], weight_bytes=vocabulary * width * itemsize
    )
    for number in range(blocks):
        b.border()
        block = name.format(number)
        h = norm(f"{block}.norm1", x)
        qkv = linear(f"{block}.attention.qkv", h, width, 3 * width)
        b.free(h)
        a, lse = b.op("aten._scaled_dot_product_flash_attention.default", f"{block}.attention", "expensive", [qkv],
                      [stream, statistic], flops=4 * tokens * 1024 * width, save=[qkv, qkv, qkv], save_outputs=[0, 1],
                      scratch=stream // 4)  # fmt: skip
        b.free(qkv, lse)
        out = linear(f"{block}.attention.proj", a, width, width)
        b.free(a)
        x = joined(block, x, out)
        h = norm(f"{block}.norm2", x)
        up = linear(f"{block}.mlp.up", h, width, 4 * width)
        b.free(h)
        (g,) = b.op("aten.gelu.default", f"{block}.mlp", "cheap", [up], [4 * stream], save=[up])
        b.free(up)
        out = linear(f"{block}.mlp.down", g, 4 * width, width)
        b.free(g)
        x = joined(block, x, out)
    b.border()
    h = norm("norm", x)
    b.free(x)
    logits = linear("head", h, width, vocabulary)
    b.free(h)
    (p,) = b.op("aten._log_softmax.default", "", "cheap", [logits], [tokens * vocabulary * itemsize], save_outputs=[0])
    b.free(logits)
    loss, total = b.op("aten.nll_loss_forward.default", "", "cheap", [p], [4, 4], save=[p], save_outputs=[1])
    b.free(p, total)
    trace = b.backward()
    b.free(loss)
    return trace


def drop_where(trace: Trace, wanted: Callable[[int, TraceOp], bool]) -> tuple[bool, ...]:
    """A plan: for each op, whether it is droppable and ``wanted(index, op)``."""
    return tuple(op.droppable and wanted(index, op) for index, op in enumerate(trace.ops))


def block_of(trace: Trace, index: int) -> int:
    """How many borders stand before an op or at it: 0 before the blocks, 1 for the first block, ..."""
    return sum(border <= index for border in trace.borders)


def front_by_hand(trace: Trace) -> tuple[Candidate, ...]:
    """A front as a sensible person would make it, by rising peak.

    Nothing dropped; cheap ops dropped in the first 1, 2, ... blocks; then all but block borders in the first 1, 2, ...
    """
    count = len(trace.borders)
    at_border = {border - 1 for border in trace.borders}
    where = [block_of(trace, index) for index in range(len(trace.ops))]

    def plan(full: int, selective: int) -> tuple[bool, ...]:
        def wanted(index: int, op: TraceOp) -> bool:
            if index in at_border or not 0 < where[index] < count:
                return False
            return where[index] <= full or (where[index] <= selective and op.kind == "cheap")

        return drop_where(trace, wanted)

    plans = [plan(0, k) for k in range(max(count, 1))] + [plan(k, count) for k in range(1, count)]
    front: list[Candidate] = []
    for found in sorted((judged(trace, p) for p in plans), key=lambda c: (c.peak_bytes, c.extra_seconds)):
        if not front or found.extra_seconds < front[-1].extra_seconds:
            front.append(found)
    return tuple(front)


def plan_by_hand(trace: Trace, *, budget_bytes: int = 2**62, static_bytes: int = 0) -> PlanResult:
    """The fastest plan of :func:`front_by_hand` within the budget; the smallest one if none fits."""
    front = front_by_hand(trace)
    fits = [c for c in front if static_bytes + c.peak_bytes <= budget_bytes]
    return PlanResult(
        trace=trace,
        static_bytes=static_bytes,
        budget_bytes=budget_bytes,
        chosen=fits[-1] if fits else front[0],
        front=front,
        plain=judged(trace, [False] * len(trace.ops)),
    )
