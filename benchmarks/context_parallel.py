"""Context parallelism: time and bytes per step of attention spread over ranks, and the plan for many GPUs.

    python benchmarks/context_parallel.py [--ranks 2 3 4] [--length L] [--heads H] [--key-heads H] [--repeats R]
    torchrun --nproc-per-node N benchmarks/context_parallel.py [the same options]
    python benchmarks/context_parallel.py --plan

A step is forward and backward of `context_parallel_attention` in float32. Every rank computes on one thread, and a step
of one process, on one thread too, is measured in turn with it: `speed-up` is the median of the quotients of neighbours.
The clock suffers from whoever else wants the cores; the seconds that the processor spent don't, or less: `work` is
those of all ranks over those of the one process, `busiest` those of the busiest rank over the mean. Bytes are
those that all ranks send in one step, counted where they are handed to torch.distributed; the ideal is every node that
a rank's queries see, and another rank has, sent there once forward and once backward, and its gradient, in float32,
sent back. Started by torchrun, the table is for torchrun's ranks, on NCCL where they have a GPU each (then the single
process runs on the first GPU).

`--plan` prints the tables of docs/scale.md, from the assumptions in `Machine`: nothing of it was measured.

Shape legend: B batch (1 here), Hq query heads, Hkv key/value heads, L length of the whole sequence, D head dim.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from continuous_attention import context_parallel_attention, continuous_attention, shard_sequence
from continuous_attention.context_parallel import PLACEMENTS, SCHEDULES
from continuous_attention.ranks import Team

# ---- What is measured


@dataclass
class Count:
    """Bytes that this rank sends."""

    total: int = 0


@contextmanager
def counting() -> Iterator[Count]:
    """Count what is sent inside the with block; a collective counts as if every rank sent its part to every other."""
    count = Count()
    before = {name: getattr(dist, name) for name in ("batch_isend_irecv", "all_gather", "all_reduce")}

    def exchange(messages: list[dist.P2POp]) -> Any:
        count.total += sum(message.tensor.nbytes for message in messages if message.op is dist.isend)
        return before["batch_isend_irecv"](messages)

    def collect(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            sent = args[1] if name == "all_gather" else args[0]
            count.total += sent.nbytes * (dist.get_world_size() - 1)
            return before[name](*args, **kwargs)

        return run

    replaced = {"batch_isend_irecv": exchange, **{name: collect(name) for name in ("all_gather", "all_reduce")}}
    for name, function in replaced.items():
        setattr(dist, name, function)
    try:
        yield count
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


def ideal_bytes(numbers: list[Tensor], is_causal: bool, per_node: int) -> int:
    """The bytes of a step if every rank got just the nodes that it sees; `per_node` is of a key and a value."""
    length = sum(map(len, numbers))
    seen = [int(own.max()) + 1 if is_causal else length for own in numbers]
    return 3 * per_node * sum(count - int((own < count).sum()) for count, own in zip(seen, numbers, strict=True))


def step(attend: Callable[[], Any], leaves: list[Tensor]) -> tuple[float, float]:
    """The seconds of forward and backward, by the clock and of the processor."""
    for x in leaves:
        x.grad = None
    begin, spent = time.perf_counter(), time.process_time()
    attend().sum().backward()
    if leaves[0].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin, time.process_time() - spent


def measure(arguments: argparse.Namespace) -> None:
    """The rows of one table, printed by the first rank of a group that is there already."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, arguments.heads, arguments.length, arguments.dim)
    query, key, value = (
        torch.randn((1, heads, *shape[2:]), generator=generator, device=device)
        for heads in (arguments.heads, arguments.key_heads, arguments.key_heads)
    )
    per_node = 2 * arguments.key_heads * arguments.dim * query.element_size()
    team = Team(None)
    begin = time.perf_counter()
    for _ in range(100):
        team.agree({}, [0, 0], None)
        team.highest([0] * size, None)
    agreement = (time.perf_counter() - begin) / 100
    for is_causal, placement, schedule in product((True, False), PLACEMENTS, SCHEDULES):
        if placement == "zigzag" and not is_causal:
            continue
        whole = [x.detach().requires_grad_() for x in (query, key, value)]
        parts = [shard_sequence(x, 2, placement=placement).detach().requires_grad_() for x in whole]
        own = shard_sequence(torch.arange(arguments.length), 0, placement=placement)
        numbers: list[Any] = [None] * size
        dist.all_gather_object(numbers, own)

        def alone(whole: list[Tensor] = whole, is_causal: bool = is_causal) -> Any:
            return continuous_attention(*whole, is_causal=is_causal, enable_gqa=True)  # pyright: ignore[reportArgumentType]

        def together(
            parts: list[Tensor] = parts, is_causal: bool = is_causal, how: tuple[str, str] = (schedule, placement)
        ) -> Any:
            query, key, value = parts
            given: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": True}
            return context_parallel_attention(query, key, value, schedule=how[0], placement=how[1], **given)

        rows, total = [], 0
        for _ in range(arguments.repeats + 1):
            alone_took, alone_spent = step(alone, whole) if rank == 0 else (0.0, 0.0)
            dist.barrier()
            with counting() as count:
                took, spent = step(together, parts)
            row = torch.tensor([took, spent, count.total], device=device, dtype=torch.float64)
            of_all = [torch.empty_like(row) for _ in range(size)]
            dist.all_gather(of_all, row)
            clock, spent, sent = torch.stack(of_all).unbind(1)
            all_spent, most = float(spent.sum()), float(spent.max())
            total = int(sent.sum())
            rows.append((float(clock.max()), alone_took, all_spent / max(alone_spent, 1e-9), most / all_spent * size))
        if rank == 0:
            ideal = ideal_bytes(numbers, is_causal, per_node)
            clocks, alone_clocks, work_done, busiest = zip(*rows[1:], strict=True)  # the first one warms up
            ratios = [one / clock for clock, one in zip(clocks, alone_clocks, strict=True)]
            print(
                f"| {size} | {'causal' if is_causal else 'full'} | {placement} | {schedule} | "
                f"{1000 * median(clocks):.0f} ms | {median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f}) | "
                f"{median(work_done):.2f} | {median(busiest):.2f} | "
                f"{total / 1e6:.2f} MB | {ideal / 1e6:.2f} MB | {total / ideal:.2f} |",
                flush=True,
            )
    if rank == 0:
        print(f"| {size} | | | agreement | {1000 * agreement:.2f} ms | | | | | | |", flush=True)


def work(rank: int, size: int, store: str, arguments: argparse.Namespace) -> None:
    """One of the processes that this script starts by itself."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    measure(arguments)
    dist.barrier()
    dist.destroy_process_group()


def print_head(arguments: argparse.Namespace) -> None:
    """What the table is about."""
    heads = f"{arguments.heads}:{arguments.key_heads}"
    print(f"float32, B = 1, Hq:Hkv = {heads}, L = {arguments.length}, D = {arguments.dim}, torch {torch.__version__}")
    print(f"{os.cpu_count()} CPU cores, 1 thread per rank, load average before: {os.getloadavg()[0]:.2f}\n")
    print(
        "| ranks | mask | placement | schedule | step | speed-up (min – max) | work | busiest | sent | ideal "
        "| sent / ideal |"
    )
    print("|---:|---|---|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)


# ---- The plan on paper


@dataclass(frozen=True)
class Machine:
    """What the plan assumes of a GPU and its links. Estimates and data sheets, nothing measured with this library."""

    forward: float = 0.70 * 600e12  # FLOP/s: softmax on an H100 in bfloat16 (published), times the estimated share
    backward: float = 0.73 * 500e12
    link: float = 50e9  # bytes/s from one GPU to another node: 400 Gb/s InfiniBand per GPU
    node: int = 8  # GPUs of a node, each with such a link
    latency: float = 30e-6  # seconds per message, launch of a kernel included


@dataclass(frozen=True)
class Layer:
    """The attention of one layer of a model, causal, in bfloat16, B = 1."""

    length: int
    heads: int = 32
    key_heads: int = 8
    dim: int = 128

    def flops(self, backward: bool) -> float:
        """Of the matrix products, of half of the scores; backward has five products in place of two."""
        return (2.5 if backward else 1.0) * 2 * self.heads * self.dim * self.length**2

    def bytes(self, backward: bool) -> float:
        """That a rank sends: all keys and values but its own; backward their gradients as well, in float32."""
        return (3 if backward else 1) * 4 * self.key_heads * self.dim * self.length


def times(layer: Layer, ranks: int, machine: Machine, backward: bool) -> tuple[float, float, float]:
    """Seconds of computing, of the ring and of the all-gather, of one layer, zigzag.

    A ring hides the messages of a step behind its work, or its work behind them; its slowest link is the one between
    two nodes. An all-gather comes through all links of a node at once, and only the rank's own block is worked on
    meanwhile; backward, its gradients go home one by one, each hidden behind the next block's work.
    """
    compute = layer.flops(backward) / (machine.backward if backward else machine.forward) / ranks
    others = (ranks - 1) / ranks * layer.bytes(backward)
    ring = compute / ranks + (ranks - 1) * max(compute / ranks, machine.latency + others / (ranks - 1) / machine.link)
    links = min(ranks, machine.node) * machine.link
    gathered = others / (3 if backward else 1)
    gather = machine.latency * math.log2(ranks) + gathered / links
    returned = max(0.0, (others - gathered) / machine.link - compute)
    return compute, ring, compute + max(0.0, gather - compute / ranks) + returned


def crossover(layer: Layer, machine: Machine, backward: bool) -> float:
    """The number of ranks from which on a ring waits for its messages: work per step = bytes per step / link."""
    flops = machine.backward if backward else machine.forward
    return layer.flops(backward) / flops * machine.link / layer.bytes(backward)


def takeover(layer: Layer, machine: Machine, backward: bool) -> int | None:
    """The number of ranks, in whole nodes, from which on the all-gather is faster."""
    counts = range(machine.node, 2**15, machine.node)
    return next((n for n in counts if (x := times(layer, n, machine, backward))[2] < 0.98 * x[1]), None)


def memory(layer: Layer, ranks: int, gathers: bool) -> float:
    """Bytes of a rank in the backward pass of one layer.

    Of its queries q, out and dO, and dq in float32; of its nodes k and v, their block, the visiting block and the next
    one (or all blocks), and in float32 the gradients of its own block and three more.
    """
    queries = layer.length / ranks * layer.heads * layer.dim * (3 * 2 + 4)
    block = layer.length / ranks * layer.key_heads * 2 * layer.dim
    return queries + block * (2 + 2 + 2 * (ranks if gathers else 2) + 4 * 4)


def print_plan() -> None:
    """The tables of docs/scale.md."""
    machine = Machine()
    print("| L | n | nodes per rank | pass | compute | sent per rank | ring | all-gather | the faster one |")
    print("|---:|---:|---:|---|---:|---:|---:|---:|---|")
    for length, ranks, backward in product((2**20, 10 * 2**20), (8, 32, 128, 256, 512, 1024), (False, True)):
        layer = Layer(length)
        compute, ring, gathered = times(layer, ranks, machine, backward)
        sent = (ranks - 1) / ranks * layer.bytes(backward)
        near = abs(ring - gathered) < 0.02 * min(ring, gathered)
        faster = "equal" if near else "ring" if ring < gathered else "all-gather"
        print(
            f"| {length // 2**20}M | {ranks} | {length // ranks:,} | {'backward' if backward else 'forward'} | "
            f"{seconds(compute)} | {sent / 1e9:.1f} GB | {seconds(ring)} | {seconds(gathered)} | {faster} |"
        )
    print("\n| L | pass | a ring waits for its messages from | nodes per rank there | all-gather is faster from |")
    print("|---:|---|---:|---:|---:|")
    for length, backward in product((2**20, 10 * 2**20), (False, True)):
        ranks, faster = (x(Layer(length), machine, backward) for x in (crossover, takeover))
        assert ranks is not None
        name = "backward" if backward else "forward"
        print(f"| {length // 2**20}M | {name} | {ranks:,.0f} ranks | {length / ranks:,.0f} | {faster:,} ranks |")
    print("\n| L | n | memory per layer, ring | all-gather |")
    print("|---:|---:|---:|---:|")
    for length, ranks in product((2**20, 10 * 2**20), (8, 32, 128, 1024)):
        sizes = [memory(Layer(length), ranks, gathers) / 1e9 for gathers in (False, True)]
        print(f"| {length // 2**20}M | {ranks} | {sizes[0]:.2f} GB | {sizes[1]:.2f} GB |")


def seconds(x: float) -> str:
    """A time with three digits."""
    return f"{x:.3g} s" if x >= 1 else f"{1000 * x:.3g} ms"


def main() -> None:
    """Measure, or print the plan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--plan", action="store_true", help="print the plan for many GPUs, and measure nothing")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--key-heads", type=int, default=2)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.plan:
        print_plan()
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local = int(os.environ["LOCAL_RANK"])
        has_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        if has_gpus:
            torch.cuda.set_device(local)
        torch.set_num_threads(1)
        dist.init_process_group("nccl" if has_gpus else "gloo")
        if dist.get_rank() == 0:
            print_head(arguments)
        measure(arguments)
        dist.destroy_process_group()
        return
    print_head(arguments)
    for size in arguments.ranks:
        with TemporaryDirectory() as folder:
            given = (size, str(Path(folder) / "store"), arguments)
            spawn(work, given, nprocs=size)


if __name__ == "__main__":
    main()
