"""Five models in miniature, as traces: bytes and times in the proportions of real ones, with few ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lightning_remat.planning.trace import Trace
from tests.planning.small_traces import Writer, check

MiB = 2**20


@dataclass
class _Layer:
    """An op with its backward."""

    name: str
    inputs: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: float
    saves: tuple[int, ...]
    writes: int
    droppable: bool
    state: int
    scratch: int
    weights: int
    shared: bool
    outputs: tuple[int, ...] = ()
    slots: list[int] = field(default_factory=list)


class Net:
    """A model as a list of ops on numbered values; a value is let go of after its last use in forward.

    Times are those of a device that does 200 TFLOP/s and moves 1.5 TB/s, 4 microseconds for an op at least.
    """

    def __init__(self) -> None:
        self._layers: list[_Layer] = []
        self._sizes: list[int] = []

    def op(
        self,
        name: str,
        inputs: Sequence[int],
        *sizes: int,
        flops: float = 0.0,
        saves: Iterable[int] | None = None,
        saves_out: Iterable[int] = (),
        writes: int = -1,
        droppable: bool = True,
        state: int = 0,
        scratch: int = 0,
        weights: int = 0,
        shared: bool = False,
    ) -> int:
        """Add an op; returns its first output.

        Args:
            name: what it is called.
            inputs: values it reads.
            sizes: bytes of each output.
            flops: its arithmetic.
            saves: inputs that autograd saves; all by default.
            saves_out: outputs that autograd saves, by position.
            writes: the value that it overwrites.
            droppable: the tape can run it again.
            state: bytes of a recorded generator state.
            scratch: workspace in forward and backward.
            weights: bytes of its parameters.
            shared: their gradient was there before, from another step of a chain.
        """
        if writes >= 0:
            sizes = (self._sizes[writes],)
        first = len(self._sizes)
        self._sizes += sizes
        moved = sum(sizes) + sum(self._sizes[v] for v in inputs) + weights
        seconds = max(4e-6, flops / 200e12, moved / 1.5e12)
        kept = (*(inputs if saves is None else saves), *(first + i for i in saves_out))
        outputs = tuple(range(first, len(self._sizes)))
        self._layers.append(
            _Layer(
                name, tuple(inputs), sizes, seconds, kept, writes, droppable, state, scratch, weights, shared, outputs
            )
        )
        return first

    def trace(self) -> Trace:
        """The step: forward, then backward node by node in reverse order."""
        out = Writer()
        last = {v: i for i, layer in enumerate(self._layers) for v in (*layer.outputs, *layer.inputs)}
        gone = {layer.writes for layer in self._layers}
        for i, layer in enumerate(self._layers):
            made = out.run(
                layer.name,
                layer.inputs,
                layer.sizes,
                seconds=layer.seconds,
                writes=layer.writes,
                droppable=layer.droppable,
                state=layer.state,
                scratch=layer.scratch,
                kind="expensive" if layer.weights else "cheap",
            )
            assert made == layer.outputs
            if layer.scratch:
                out.other(layer.scratch, 0)
            layer.slots = [out.save(v) for v in layer.saves]
            for v in dict.fromkeys((*layer.inputs, *layer.outputs)):
                if last[v] == i and v not in gone:
                    out.free(v)
        self._backward(out)
        check(out.trace)
        return out.trace

    def _backward(self, out: Writer) -> None:
        with_gradient = set(self._layers[-1].outputs[:1])
        for layer in reversed(self._layers):
            for slot in layer.slots:
                out.need(slot)
            made = 0
            added = 0  # a second gradient of one value: made, added to the first, gone
            for v in layer.inputs:
                if v in with_gradient:
                    added += self._sizes[v]
                else:
                    made += self._sizes[v]
                    with_gradient.add(v)
            gone = sum(self._sizes[v] for v in layer.outputs if v in with_gradient)
            if layer.shared:
                added += layer.weights
            else:
                made += layer.weights
            out.other(made + added + layer.scratch, made - gone)
            for slot in layer.slots:
                out.release(slot)


def _dropout(net: Net, x: int, size: int) -> int:
    out = net.op("dropout", [x], size, size // 2, saves=(), saves_out=[1], state=16)  # a mask of bytes for bf16
    return out


def _linear(net: Net, x: int, rows: int, d_in: int, d_out: int, shared: bool = False) -> int:
    flops = 2.0 * rows * d_in * d_out
    return net.op("linear", [x], 2 * rows * d_out, flops=flops, weights=2 * d_in * d_out, shared=shared)


def _attention(net: Net, inputs: list[int], rows: int, d: int, context: int) -> int:
    return net.op("attention", inputs, 2 * rows * d, flops=4.0 * rows * context * d, saves_out=[0])


def _mlp(net: Net, x: int, rows: int, d: int, dropout: bool) -> int:
    h = net.op("layer_norm", [x], 2 * rows * d)
    h = net.op("gelu", [_linear(net, h, rows, d, 4 * d)], 8 * rows * d)
    h = _linear(net, h, rows, 4 * d, d)
    if dropout:
        h = _dropout(net, h, 2 * rows * d)
    return net.op("add", [x, h], 2 * rows * d, saves=())


def _self_attention(net: Net, x: int, rows: int, d: int, context: int, dropout: bool) -> int:
    h = net.op("layer_norm", [x], 2 * rows * d)
    h = _attention(net, [_linear(net, h, rows, d, 3 * d)], rows, d, context)
    h = _linear(net, h, rows, d, d)
    if dropout:
        h = _dropout(net, h, 2 * rows * d)
    return net.op("add", [x, h], 2 * rows * d, saves=())


def transformer(blocks: int = 3, batch: int = 16, context: int = 512, d: int = 1024) -> Trace:
    """GPT blocks with fused attention and dropout: 12 ops each."""
    net = Net()
    rows = batch * context
    x = net.op("embedding", [], 2 * rows * d, droppable=False)
    for _ in range(blocks):
        x = _self_attention(net, x, rows, d, context, dropout=True)
        x = _mlp(net, x, rows, d, dropout=True)
    net.op("layer_norm", [x], 2 * rows * d)
    return net.trace()


def cnn(blocks: int = 4, batch: int = 32, side: int = 56, channels: int = 64) -> Trace:
    """A residual net: convolution, norm, ReLU in place, with skip connections; every second block halves the image."""
    net = Net()

    def conv_norm(x: int, pixels: int, c_in: int, c_out: int, k: int) -> int:
        flops = 2.0 * pixels * c_in * c_out * k * k
        x = net.op("conv", [x], 2 * pixels * c_out, flops=flops, scratch=4 * MiB, weights=2 * c_in * c_out * k * k)
        return net.op("batch_norm", [x], 2 * pixels * c_out)

    pixels = batch * side * side
    x = net.op("image", [], 2 * pixels * channels, droppable=False)
    for block in range(blocks):
        skip, c_in = x, channels
        if block % 2:
            pixels, channels = pixels // 4, channels * 2
            skip = conv_norm(x, pixels, c_in, channels, 1)
        h = conv_norm(x, pixels, c_in, channels, 3)
        h = net.op("relu_", [h], saves=(), saves_out=[0], writes=h)
        h = conv_norm(h, pixels, channels, channels, 3)
        h = net.op("add_", [h, skip], saves=(), writes=h)
        x = net.op("relu_", [h], saves=(), saves_out=[0], writes=h)
    net.op("mean", [x], 2 * batch * channels, saves=())
    return net.trace()


def unet(batch: int = 8, side: int = 128, channels: int = 32, levels: int = 2) -> Trace:
    """Down and up again, with a skip connection at each level."""
    net = Net()

    def double(x: int, pixels: int, c_in: int, c: int) -> int:
        for c_from in (c_in, c):
            flops = 18.0 * pixels * c_from * c
            x = net.op("conv", [x], 2 * pixels * c, flops=flops, scratch=2 * MiB, weights=18 * c_from * c)
            x = net.op("relu", [x], 2 * pixels * c, saves=(), saves_out=[0])
        return x

    pixels, c = batch * side * side, channels
    x = net.op("image", [], 2 * pixels * c, droppable=False)
    skips = []
    c_in = c
    for _ in range(levels):
        x = double(x, pixels, c_in, c)
        skips.append((x, pixels, c))
        x = net.op("max_pool", [x], pixels // 4 * 2 * c, pixels // 4 * c, saves_out=[1])
        pixels, c_in, c = pixels // 4, c, c * 2
    x = double(x, pixels, c_in, c)
    for skip, pixels, c in reversed(skips):
        x = net.op("upsample", [x], 2 * pixels * 2 * c, saves=())
        x = net.op("cat", [skip, x], 2 * pixels * 3 * c, saves=())
        x = double(x, pixels, 3 * c, c)
    net.op("conv", [x], 2 * pixels, flops=2.0 * pixels * c, weights=2 * c)
    return net.trace()


def encoder_decoder(batch: int = 16, source: int = 512, target: int = 256, d: int = 512) -> Trace:
    """An encoder block, and two decoder blocks that both read what it gives."""
    net = Net()
    rows = batch * source
    memory = net.op("embedding", [], 2 * rows * d, droppable=False)
    memory = _self_attention(net, memory, rows, d, source, dropout=False)
    memory = _mlp(net, memory, rows, d, dropout=False)
    wide, rows = rows, batch * target
    x = net.op("embedding", [], 2 * rows * d, droppable=False)
    for _ in range(2):
        x = _self_attention(net, x, rows, d, target, dropout=False)
        q = _linear(net, net.op("layer_norm", [x], 2 * rows * d), rows, d, d)
        kv = _linear(net, memory, wide, d, 2 * d)
        h = _linear(net, _attention(net, [q, kv], rows, d, source), rows, d, d)
        x = net.op("add", [x, h], 2 * rows * d, saves=())
        x = _mlp(net, x, rows, d, dropout=False)
    return net.trace()


def lstm(steps: int = 10, batch: int = 512, d: int = 512) -> Trace:
    """A recurrent chain: two matrix products and a fused cell with three outputs (h, c, workspace) at each step."""
    net = Net()
    h = net.op("zeros", [], 2 * batch * d, droppable=False)
    c = net.op("zeros", [], 2 * batch * d, droppable=False)
    hidden = []
    for step in range(steps):
        shared = step < steps - 1  # backward comes to the last one first
        x = net.op("batch", [], 2 * batch * d, droppable=False)
        fresh = _linear(net, x, batch, d, 4 * d, shared)
        old = _linear(net, h, batch, d, 4 * d, shared)
        size = 2 * batch * d
        h = net.op("lstm_cell", [fresh, old, c], size, size, 4 * size, saves=[c], saves_out=[1, 2])
        c = h + 1
        hidden.append(h)
    net.op("stack", hidden, steps * 2 * batch * d, saves=())
    return net.trace()


MODELS: dict[str, Callable[[], Trace]] = {
    "transformer": transformer,
    "cnn": cnn,
    "unet": unet,
    "encoder-decoder": encoder_decoder,
    "lstm": lstm,
}
"""Each makes a trace with 12 to 45 ops that can be dropped."""
