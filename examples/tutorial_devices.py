"""Two processes on the CPU, with DDP and with FSDP2: each follows a plan of its own, and all bits are the plain ones.

python examples/tutorial_devices.py

Lightning starts the second process by running this script once more; both run everything here.
"""

import hashlib
import logging
import os
import shutil
import tempfile
import textwrap
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from byte_gpt import LitByteGPT, stdlib_batches
from figures import save_figures
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard

from lightning_remat import ConfigurationError, NoMemoryLeft, RematStrategy

LENGTHS = {0: 128, 1: 256}  # tokens in a sequence, by process
BUDGET = 28 * 2**20
STEPS = 6


class Model(LitByteGPT):
    """A GPT whose forward runs out of memory in one process, once in a while: by an error that is made up.

    Args:
        fails: (process, number of the batch, where), where is "forward" or "backward".
    """

    def __init__(self, *fails: tuple[int, int, str]) -> None:
        super().__init__(blocks=4, width=128, heads=4, context=256)
        self.fails = fails
        self.losses: list[float] = []
        self.gpt.blocks[1].register_forward_hook(lambda *_: self.maybe_fail("forward"))
        self.gpt.blocks[1].register_full_backward_hook(lambda *_: self.maybe_fail("backward"))

    def maybe_fail(self, where: str) -> None:
        failure = (self.global_rank, self.batch, where)
        if failure in self.fails and failure not in FAILED:
            FAILED.append(failure)  # not in the module, whose attributes are put back when a step is undone
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.batch = batch_idx
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss


# --8<-- [start:sharded]
class Sharded(LitByteGPT):
    """The same GPT, sharded: each block is gathered by itself, and so is the rest."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.gpt.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.gpt, mesh=mesh)
        # --8<-- [end:sharded]


def train(
    strategy: str | Strategy, *fails: tuple[int, int, str], sharded: bool = False, **options: Any
) -> tuple[str, L.Trainer]:
    """Train from a fixed seed; returns a digest of the weights, or shards of them, that this process has."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.manual_seed(0)
    batches = iter(stdlib_batches(context=LENGTHS[rank], batch=4))
    data = torch.utils.data.DataLoader([next(batches) for _ in range(STEPS)], batch_size=None)  # type: ignore[arg-type] - a list
    torch.manual_seed(1)
    model: LitByteGPT = Sharded(blocks=4, width=128, heads=4, context=256) if sharded else Model(*fails)
    # --8<-- [start:trainer]
    trainer = L.Trainer(
        strategy=strategy,  # "ddp", or RematStrategy(base="ddp", ...)
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        use_distributed_sampler=False,  # each process has its own batches already
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model, data)
    # --8<-- [end:trainer]
    parts = [getattr(p, "_local_tensor", p) for p in model.parameters()]  # of a sharded parameter: what is here
    bits = b"".join(part.detach().numpy().tobytes() for part in parts)
    return hashlib.sha256(bits).hexdigest()[:16], trainer


def of_all(found: Any) -> list[Any]:
    """What each process has found."""
    everything: list[Any] = [None, None]
    distributed.all_gather_object(everything, found)
    return everything


def say(*words: object) -> None:
    """Print, in the first process only."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(*words, flush=True)


def wrapped(text: str) -> str:
    """For a terminal."""
    lines = (textwrap.fill(line, 100, subsequent_indent="  ", break_on_hyphens=False) for line in text.splitlines())
    return "\n".join(lines)


def the_same_bits() -> str:
    say("== Plain and ours")
    plain, _ = train("ddp")
    # --8<-- [start:ddp]
    full, trainer = train(RematStrategy(base="ddp", policy="full"))
    # --8<-- [end:ddp]
    everything = of_all((plain, full, trainer.strategy.remat.stats.replayed_ops))
    for rank, (plainly, ours, ops) in enumerate(everything):
        say(f"process {rank}: weights {plainly} under DDP, {ours} with recomputation of {ops} ops a step")
    say("the same in every bit:", all(one[0] == one[1] == plain for one in everything))
    return plain


def own_plans(plain: str) -> list[dict[str, int]]:
    say("\n== Own plans")
    # --8<-- [start:budget]
    lean, trainer = train(RematStrategy(base="ddp", budget=BUDGET))
    remat = trainer.strategy.remat
    # --8<-- [end:budget]
    plan = remat.plan
    found = {
        "tokens": LENGTHS[trainer.global_rank],
        "plain": plan.static_bytes + plan.plain.peak_bytes,
        "predicted": plan.peak_bytes,
        "measured": remat.measured_peak_bytes,
        "again": sum(plan.chosen.drop),
        "ops": len(plan.chosen.drop),
    }
    everything = of_all((lean, found))
    for rank, (_, row) in enumerate(everything):
        say(
            f"process {rank}: {row['tokens']} tokens; plainly {row['plain'] / 2**20:.1f} MiB, planned "
            f"{row['predicted'] / 2**20:.1f} MiB, measured {row['measured'] / 2**20:.1f} MiB; "
            f"{row['again']} of {row['ops']} ops run again"
        )
    say("the same in every bit:", all(weights == plain for weights, _ in everything))
    say(wrapped(in_report(trainer)))
    return [row for _, row in everything]


def in_report(trainer: L.Trainer) -> str:
    """What the report of a plan says of the processes."""
    lines = str(trainer.strategy.remat.report()).splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("ranks"))
    end = next(i for i, line in enumerate(lines) if i > begin and not line.startswith(" "))
    return "report: " + " ".join(" ".join(lines[begin:end]).removeprefix("ranks").split())


def one_plan(plain: str) -> list[int]:
    say("\n== One plan")
    # --8<-- [start:share-plan]
    lean, trainer = train(RematStrategy(base="ddp", budget=BUDGET, share_plan=True))
    # --8<-- [end:share-plan]
    plan = trainer.strategy.remat.plan
    everything = of_all((lean, plan.peak_bytes, sum(plan.chosen.drop)))
    for rank, (_, peak, again) in enumerate(everything):
        say(f"process {rank}: planned {peak / 2**20:.1f} MiB; {again} ops run again")
    say("the same in every bit:", all(weights == plain for weights, _, _ in everything))
    return [again for _, _, again in everything]


def sharded() -> None:
    say("\n== Sharded parameters")
    # --8<-- [start:fsdp2]
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    plain, _ = train(ModelParallelStrategy(**sizes), sharded=True)
    strategy = RematStrategy(base="ModelParallelStrategy", policy="full", **sizes)
    ours, trainer = train(strategy, sharded=True)
    # --8<-- [end:fsdp2]
    everything = of_all((plain, ours, trainer.strategy.remat.stats.replayed_ops))
    for rank, (plainly, recomputed, ops) in enumerate(everything):
        say(f"process {rank}: shards {plainly} under FSDP2, {recomputed} with recomputation of {ops} ops a step")
    say("the same in every bit:", all(one[0] == one[1] for one in everything))


def out_of_memory(plain: str) -> list[int]:
    say("\n== One process runs out of memory")
    # --8<-- [start:fails]
    weights, trainer = train(RematStrategy(base="ddp"), (1, 2, "forward"), (1, 4, "forward"))
    # --8<-- [end:fails]
    everything = of_all((weights, trainer.strategy.remat.counters.retries, SAID[:]))
    for rank, (_, retries, said) in enumerate(everything):
        say(f"process {rank}: batches run again: {retries}")
        for text in said:
            say(wrapped(f"  log: {text}"))
    say("the same in every bit:", all(one[0] == plain for one in everything))
    return [one[1] for one in everything]


def refused() -> None:
    say("\n== Refused")
    try:
        RematStrategy(base="deepspeed_stage_3")
    except ConfigurationError as error:
        say(wrapped(str(error)))
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    try:
        train(RematStrategy(base="ModelParallelStrategy", policy="full", offload="disk", **sizes), sharded=True)
    except ConfigurationError as error:
        say(wrapped(str(error)))


def too_late(folder: Path) -> None:
    """Out of memory after something was sent: both processes end. Must come last."""
    say("\n== Too late")
    # --8<-- [start:too-late]
    strategy, fails = RematStrategy(base="ddp"), (1, 2, "backward")  # in the second block of four
    # --8<-- [end:too-late]
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    word = folder / "word.txt"
    try:
        train(strategy, fails, default_root_dir=str(folder))
    except RuntimeError as error:
        text = "\n".join([f"{type(error).__name__}: {error}", *error.__notes__]).replace(str(folder), "FOLDER")
        if isinstance(error, NoMemoryLeft):
            word.write_text(text)
        else:
            while not word.exists():  # the other one is about to write it
                time.sleep(0.1)
            say(wrapped("process 1: " + word.read_text()))
            notes = [note for note in error.__notes__ if note.startswith("lightning-remat")]
            cause = "Connection closed by peer" if "closed by peer" in text else text
            say(wrapped(f"process 0: {type(error).__name__}: {cause}\n" + "\n".join(notes)))
    if rank != 0:
        os._exit(0)  # as after an error, without waiting for the other


FAILED: list[tuple[int, int, str]] = []
SAID: list[str] = []


def quiet() -> None:
    """Keep what lightning-remat logs; leave out what Lightning says of devices and workers."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: SAID.append(record.getMessage())  # type: ignore[method-assign] - the shortest handler
    logging.getLogger("lightning_remat").addHandler(handler)
    logging.getLogger("lightning_remat").propagate = False
    warnings.simplefilter("ignore")


def main() -> None:
    """Everything that the tutorial shows."""
    quiet()
    torch.set_num_threads(1)
    if "TUTORIAL_FOLDER" not in os.environ:  # the second process is started by the first, and takes the same folder
        os.environ["TUTORIAL_FOLDER"] = tempfile.mkdtemp()
    folder = Path(os.environ["TUTORIAL_FOLDER"])
    plain = the_same_bits()
    rows = own_plans(plain)
    shared = one_plan(plain)
    retries = out_of_memory(plain)
    sharded()
    refused()
    figures = {f"{name}_{rank}": value for rank, row in enumerate(rows) for name, value in row.items()}
    figures["again_shared"] = shared[0]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        save_figures(**figures, retries_0=retries[0], retries_1=retries[1], steps=STEPS, budget=BUDGET)
    too_late(folder)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
