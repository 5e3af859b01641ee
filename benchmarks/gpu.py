"""The GPU kernels on a real GPU: are they right, how fast beside softmax, and how much memory they take.

    python benchmarks/gpu.py [--minutes 8] [--json FILE] [--tune]
    TRITON_INTERPRET=1 python benchmarks/gpu.py --dry-run     # without a GPU: the same steps, in miniature

First every path is held against float64, then timed against torch's F.scaled_dot_product_attention with its flash and
its cuDNN back end, of which the faster one counts and is named. A ratio is softmax's time over ours: above 1 is faster
than softmax. Calls alternate, the median of the repeats counts, with the lowest and the highest ratio beside it.
TFLOP/s are 4·B·H·L²·D over the time, half of it if causal, 2.5 times for a backward pass alone. What doesn't fit into
the minutes is left out and said so.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from continuous_attention import continuous_attention, continuous_attention_varlen
from continuous_attention.kernels import triton

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
TARGETS = {"forward, D 64": 0.45, "forward, D 128": 0.65, "backward": 0.70, "decode": 0.90}

Call = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """What is run: on a GPU, or in miniature."""

    device: str
    dtypes: tuple[torch.dtype, ...]
    dims: tuple[int, ...]
    tokens: int  # of a batch, at any length
    width: int  # of all heads together
    lengths: tuple[int, ...]
    decode: tuple[int, ...]  # nodes
    checked: tuple[int, int]  # queries and nodes of the checks
    memory: tuple[int, ...]
    repeats: int
    product: int  # rows of the matrices whose product is the ceiling


ON_GPU = Sizes(
    device="cuda",
    dtypes=(torch.bfloat16, torch.float16),
    dims=(64, 128, 256),
    tokens=16384,
    width=2048,
    lengths=(1024, 2048, 4096, 8192, 16384),
    decode=(8192, 32768, 131072),
    checked=(300, 517),
    memory=(16384, 32768, 65536),
    repeats=9,
    product=8192,
)
IN_MINIATURE = Sizes(
    device="cpu",
    dtypes=(torch.float16,),
    dims=(16,),
    tokens=32,
    width=16,
    lengths=(32,),
    decode=(40,),
    checked=(17, 29),
    memory=(32,),
    repeats=1,
    product=64,
)


# Right


class Job(NamedTuple):
    """One path through the kernels."""

    name: str
    dtype: torch.dtype
    dim: int
    fixed_order: bool = False

    def __str__(self) -> str:
        order = ", fixed order" if self.fixed_order else ""
        return f"{self.name}, {str(self.dtype).removeprefix('torch.')}, D {self.dim}{order}"


NAMES = (
    "full",
    "causal",
    "held at both ends",
    "start node",
    "repeated first node",
    "window",
    "intervals",
    "times",
    "times and query times",
    "one query",
    "outgrown reference",
)


def jobs(sizes: Sizes) -> list[Job]:
    """Every path in one dtype and head dim, and the most different ones in the others."""
    common, other = (128 if 128 in sizes.dims else sizes.dims[0]), sizes.dtypes[-1]
    found = [Job(name, sizes.dtypes[0], common) for name in NAMES]
    if sizes.device == "cpu":
        return [*found[:3], *found[7:], Job("times", sizes.dtypes[0], common, fixed_order=True)]
    found += [Job(name, sizes.dtypes[0], common, fixed_order=True) for name in ("causal", "start node", "times")]
    found += [Job(name, sizes.dtypes[0], dim) for dim in (*sizes.dims, 16, 80) for name in ("causal", "times")]
    found += [Job(name, other, common) for name in ("full", "times", "one query", "outgrown reference")]
    found += [Job(name, torch.float32, 64) for name in ("start node", "times", "one query", "outgrown reference")]
    return list(dict.fromkeys(found))


def check(job: Job, sizes: Sizes) -> float:
    """The largest error of results and gradients, over that of the reference in the same dtype; 1 is as good.

    Differences below what rounding explains count as none: a hundred thousandth of the largest number in float32, and
    two units of the last place in half precision, where weights are rounded before they meet the values.
    """
    torch.manual_seed(0)
    (lq, lk), device = sizes.checked, sizes.device
    lq = 1 if job.name == "one query" else lq
    shapes = {"query": (2, 4, lq, job.dim), "key": (2, 2, lk, job.dim), "value": (2, 2, lk, job.dim)}
    leaves = {name: torch.randn(shape, device=device).to(job.dtype) for name, shape in shapes.items()}
    times = (torch.randint(0, 12, (lk,)) / 8).cumsum(0).double().to(device)
    node = tuple(torch.randn(2, job.dim, device=device) for _ in range(2))
    hows: dict[str, dict[str, Any]] = {
        "causal": {"is_causal": True},
        "held at both ends": {"is_causal": True, "boundary": "half"},
        "start node": {"boundary": node, "is_causal": True},
        "repeated first node": {"boundary": "repeat", "is_causal": True},
        "window": {"is_causal": True, "window": lq // 3, "boundary": "none"},
        "intervals": {"intervals": torch.randint(0, lk + 1, (1, lq, 2), device=device).sort(-1).values},
        "times": {"times": times, "is_causal": True, "boundary": node},
        "times and query times": {"times": times, "query_times": torch.rand(lq).double().to(device) * times[-1]},
    }
    how = hows.get(job.name, {})
    if "query_times" in how:
        how["is_causal"] = True
    if job.name == "outgrown reference":
        leaves["query"][..., 0] = 3
        leaves["key"][:, :, lk // 2 :, 0] += torch.linspace(1, 60, lk - lk // 2, device=device).to(job.dtype)
    exact, plain, ours = (
        evaluate(leaves, how, backend, dtype, job.fixed_order)
        for backend, dtype in (("reference", torch.float64), ("reference", job.dtype), ("triton", job.dtype))
    )
    worst = 0.0
    for wanted, comparable, got in zip(exact, plain, ours, strict=True):
        if not torch.equal(got.isfinite(), wanted.isfinite()):
            return float("inf")
        finite = wanted.isfinite()
        largest = float(wanted[finite].abs().max()) if finite.any() else 0.0
        rounding = largest * (1e-5 if job.dtype == torch.float32 else 2 * torch.finfo(job.dtype).eps)
        error, allowed = (float((x - wanted)[finite].abs().max()) for x in (got, comparable))
        worst = max(worst, error / max(allowed, rounding, 1e-30))
    return worst


def evaluate(
    leaves: dict[str, Tensor], how: dict[str, Any], backend: str, dtype: torch.dtype, fixed_order: bool
) -> list[Tensor]:
    """out, lse, and the gradients of random products with them."""
    inputs = {name: x.to(dtype).requires_grad_() for name, x in leaves.items()}
    wanted = list(inputs.values())
    if "times" in how:
        how = {**how, "times": how["times"].clone().requires_grad_()}
        wanted.append(how["times"])
    arguments: dict[str, Any] = {**inputs, **how}
    out, lse = continuous_attention(**arguments, enable_gqa=True, return_lse=True, backend=backend)
    generator = torch.Generator(out.device).manual_seed(0)
    arriving = [torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype) for x in (out, lse)]
    arriving[1] = arriving[1].where(lse.isfinite(), 0)
    torch.use_deterministic_algorithms(fixed_order and backend == "triton")
    gradients = torch.autograd.grad((out, lse), wanted, arriving)
    torch.use_deterministic_algorithms(False)
    return [x.detach().double() for x in (out, lse, *gradients)]


def check_documents(sizes: Sizes) -> float:
    """Packed documents equal each document alone."""
    lengths, device = (5, 1, sizes.checked[0] // 2), sizes.device
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    q, k, v = (torch.randn(int(ends[-1]), 2, 16, device=device, dtype=sizes.dtypes[0]) for _ in range(3))
    packed = continuous_attention_varlen(q, k, v, ends, ends, is_causal=True, backend="triton")
    assert isinstance(packed, Tensor)
    alone = [
        ours([x[a:b].transpose(0, 1)[None].double() for x in (q, k, v)], backend="reference")
        for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)
    ]
    exact = torch.cat([x[0].transpose(0, 1) for x in alone])
    return float((packed.double() - exact).abs().max() / exact.abs().max() / torch.finfo(q.dtype).eps)


def ours(inputs: list[Tensor], backend: str = "triton") -> Tensor:
    """Causal continuous attention."""
    query, key, value = inputs
    out = continuous_attention(query, key, value, is_causal=True, backend=backend)
    assert isinstance(out, Tensor)
    return out


# Fast


@dataclass
class Row:
    """A line of a table of times."""

    name: str
    milliseconds: float
    softmax: str | None  # which back end, if one can do it
    ratios: tuple[float, float, float] | None  # median, lowest and highest
    rate: float
    unit: str


def seconds(call: Call, device: str) -> float:
    """One call."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def compare(name: str, ours: Call, softmax: dict[str, Call], amount: float, unit: str, sizes: Sizes) -> Row:
    """Time ours and each softmax in turn; `amount` is what one call does, in units of `unit` times a second."""
    calls = {"ours": ours, **softmax}
    for call in calls.values():
        seconds(call, sizes.device)
        seconds(call, sizes.device)
    taken: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(sizes.repeats):
        for who, call in calls.items():
            taken[who].append(seconds(call, sizes.device))
    fastest = min(softmax, key=lambda who: statistics.median(taken[who]), default=None)
    ratios = sorted(b / a for a, b in zip(taken["ours"], taken[fastest], strict=True)) if fastest else []
    spread = (statistics.median(ratios), ratios[0], ratios[-1]) if ratios else None
    ours_takes = statistics.median(taken["ours"])
    return Row(name, ours_takes * 1e3, fastest, spread, amount / ours_takes, unit)


def softmax_calls(make: Callable[[], Call], sizes: Sizes) -> dict[str, Call]:
    """The same call for each of torch's back ends that can do it."""
    backends = BACKENDS if sizes.device == "cuda" else {"math": SDPBackend.MATH}
    calls: dict[str, Call] = {}
    for name, backend in backends.items():
        with sdpa_kernel(backend):
            try:
                call = make()
                call()
            except RuntimeError:
                continue

        def run(call: Call = call, backend: SDPBackend = backend) -> Any:
            with sdpa_kernel(backend):
                return call()

        calls[name] = run
    return calls


def squares(sizes: Sizes) -> Iterator[Callable[[], Row]]:
    """Forward and backward passes at a constant number of tokens, the most important cells first."""
    order = [
        (dtype, dim, length, causal, backward)
        for dtype in sizes.dtypes
        for dim in sorted(sizes.dims, key=lambda dim: dim != 128)
        for length in sorted(sizes.lengths, key=lambda length: abs(length - 4096))
        for causal in (True, False)
        for backward in (False, True)
    ]
    for cell in order:
        yield lambda cell=cell: square(sizes, *cell)


def square(sizes: Sizes, dtype: torch.dtype, dim: int, length: int, causal: bool, backward: bool) -> Row:
    """One cell."""
    shape = (max(1, sizes.tokens // length), sizes.width // dim, length, dim)
    query, key, value = (torch.randn(shape, device=sizes.device, dtype=dtype) for _ in range(3))
    inputs = [x.requires_grad_(backward) for x in (query, key, value)]
    gradient = torch.randn_like(query)

    def make(function: Callable[..., Any], **how: Any) -> Call:
        if not backward:
            return lambda: function(*inputs, is_causal=causal, **how)
        out = function(*inputs, is_causal=causal, **how)
        return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    operations = 4 * shape[0] * shape[1] * length**2 * dim * (0.5 if causal else 1) * (2.5 if backward else 1)
    passed, mask = ("backward" if backward else "forward"), ("causal" if causal else "full")
    name = f"{passed}, {str(dtype)[6:]}, D {dim}, L {length}, {mask}"
    softmax = softmax_calls(lambda: make(F.scaled_dot_product_attention), sizes)
    return compare(name, make(continuous_attention, backend="triton"), softmax, operations / 1e12, "TFLOP/s", sizes)


def decodes(sizes: Sizes) -> Iterator[Callable[[], Row]]:
    """One query per sequence: memory binds."""
    for dtype in sizes.dtypes:
        for nodes in sizes.decode:
            for key_heads in (2, 4):
                yield lambda cell=(dtype, nodes, key_heads): decode(sizes, *cell)


def decode(sizes: Sizes, dtype: torch.dtype, nodes: int, key_heads: int) -> Row:
    """One cell: 4 query heads to a key head, or 1."""
    dim, batch = 128 if 128 in sizes.dims else sizes.dims[0], 4 if sizes.device == "cuda" else 1
    heads = 4 * key_heads if key_heads == 2 else key_heads
    query = torch.randn(batch, heads, 1, dim, device=sizes.device, dtype=dtype)
    key, value = (torch.randn(batch, key_heads, nodes, dim, device=sizes.device, dtype=dtype) for _ in range(2))

    def make(function: Callable[..., Any], **how: Any) -> Call:
        return lambda: function(query, key, value, enable_gqa=True, **how)

    read = 2 * key.numel() * key.element_size()
    name = f"decode, {str(dtype)[6:]}, D {dim}, {heads}:{key_heads} heads, {nodes} nodes"
    softmax = softmax_calls(lambda: make(F.scaled_dot_product_attention), sizes)
    return compare(name, make(continuous_attention, backend="triton"), softmax, read / 1e9, "GB/s", sizes)


def ceilings(sizes: Sizes) -> list[Row]:
    """What the device reaches in a product of matrices, and in a copy."""
    a = torch.randn(sizes.product, sizes.product, device=sizes.device, dtype=sizes.dtypes[0])
    x = torch.empty(sizes.product**2 * 4, device=sizes.device, dtype=sizes.dtypes[0])
    y = torch.empty_like(x)
    product = compare("matrix product", lambda: a @ a, {}, 2 * sizes.product**3 / 1e12, "TFLOP/s", sizes)
    copy = compare("copy", lambda: y.copy_(x), {}, 2 * x.numel() * x.element_size() / 1e9, "GB/s", sizes)
    return [product, copy]


# Memory


def memory(sizes: Sizes) -> list[tuple[int, float, float]]:
    """Nodes, and what a forward and backward pass takes beyond its inputs and results, in MB and in bytes per node."""
    rows = []
    for length in sizes.memory if sizes.device == "cuda" else ():
        inputs = [
            torch.randn(1, 16, length, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        ]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = ours(inputs)
        gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
        kept = sum(x.numel() * x.element_size() for x in (out, *gradients, out))
        extra = torch.cuda.max_memory_allocated() - before - kept
        rows.append((length, extra / 2**20, extra / length))
    return rows


# Together


def verdict(rows: list[Row]) -> list[str]:
    """For each target, the geometric mean of the cells it is for, and how many reach it."""
    lines = []
    for name, target in TARGETS.items():
        words = name.split(", ")
        ratios = [
            row.ratios[0]
            for row in rows
            if row.ratios and row.name.startswith(words[0]) and all(f"{x}," in row.name for x in words[1:])
        ]
        if ratios:
            reached = sum(ratio >= target for ratio in ratios)
            mean = statistics.geometric_mean(ratios)
            lines.append(f"{name}: mean {mean:.2f}, target {target:.2f} reached in {reached} of {len(ratios)} cells")
    return lines


def print_row(row: Row) -> None:
    """A line of the table."""
    cells = f"{row.milliseconds:9.3f} ms  {row.rate:8.1f} {row.unit:8}"
    if row.ratios:
        middle, low, high = row.ratios
        cells += f"  {middle:5.2f} ({low:.2f} – {high:.2f})  {row.softmax}"
    print(f"{row.name:52}{cells}", flush=True)


def run_all(found: list[Job], sizes: Sizes) -> dict[str, float]:
    """Check all of them; on a GPU in many processes, because compiling takes the time, and what they compile is kept.

    What the tables need is compiled along with it.
    """
    if sizes.device == "cpu":
        return {str(job): check(job, sizes) for job in found}
    to_compile = [
        (dtype, dim, 1024, True, backward) for dtype in sizes.dtypes for dim in sizes.dims for backward in (False, True)
    ]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        compiling = [pool.submit(square, sizes, *cell) for cell in to_compile]
        errors = list(pool.map(partial(check, sizes=sizes), found))
        for future in compiling:
            future.result()
    return {str(job): error for job, error in zip(found, errors, strict=True)}


def main() -> None:
    """Run all, print it, and write it down if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="what doesn't fit is left out (default 8)")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--tune", action="store_true", help="measure other block sizes first, and print the best")
    parser.add_argument("--dry-run", action="store_true", help="everything in miniature, in Triton's interpreter")
    options = parser.parse_args()
    sizes = IN_MINIATURE if options.dry_run else ON_GPU
    if options.dry_run and not triton.interpreted:
        parser.error(
            triton.reason
            or "--dry-run needs Triton's interpreter: TRITON_INTERPRET=1 python benchmarks/gpu.py --dry-run"
        )
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("there is no GPU here; TRITON_INTERPRET=1 python benchmarks/gpu.py --dry-run needs none")
    deadline = time.monotonic() + 60 * options.minutes
    torch.manual_seed(0)
    device = "the CPU, interpreted" if options.dry_run else torch.cuda.get_device_name()
    print(f"{device}; torch {torch.__version__}; triton {__import__('triton').__version__}\n")

    print("Errors over those of the reference in the same dtype (largest of results and gradients; wanted ≤ 3)")
    errors = {**run_all(jobs(sizes), sizes), "packed documents": check_documents(sizes) / 2}
    wrong = [f"{name} ({error:.3g})" for name, error in errors.items() if not error <= 3]
    print(
        f"{len(errors)} paths, largest {max(errors.values()):.2f}, {len(wrong)} wrong {', '.join(wrong)}\n", flush=True
    )

    if options.tune and not options.dry_run:
        tune(sizes)
    print(f"{'':52}{'time':>12}  {'rate':>17}  ratio (low – high)  against")
    rows = ceilings(sizes)
    for row in rows:
        print_row(row)
    left_out = 0
    for run in (*decodes(sizes), *squares(sizes)):
        if time.monotonic() > deadline - 20:
            left_out += 1
            continue
        rows.append(run())
        print_row(rows[-1])
    if left_out:
        print(f"{left_out} cells didn't fit into {options.minutes:g} minutes")
    if options.dry_run:
        print("all steps ran; speeds and ratios of an interpreter mean nothing")
    else:
        print("", *verdict(rows), "", sep="\n")
    taken = memory(sizes)
    for length, megabytes, per_node in taken:
        print(f"memory beside inputs and results, {length} nodes: {megabytes:.0f} MB, {per_node:.0f} bytes per node")
    if options.json:
        options.json.write_text(
            json.dumps(
                {"device": device, "errors": errors, "rows": [asdict(x) for x in rows], "memory": taken}, indent=1
            ),
            encoding="utf-8",
        )
    if wrong:
        raise SystemExit(f"{len(wrong)} paths are wrong: {'; '.join(wrong)}")


def tune(sizes: Sizes) -> None:
    """Pin the fastest block sizes for the head dims of the table, at 4096 nodes, and print them."""
    from continuous_attention.kernels.triton import tuning

    for dim in sizes.dims:
        shape = (sizes.tokens // 4096, sizes.width // dim, 4096, dim)
        inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

        def call(inputs: list[Tensor] = inputs) -> None:
            torch.autograd.grad(ours(inputs), inputs, torch.ones_like(inputs[0]))

        for key, config in tuning.tune(call).items():
            print(f"tuning.pin({key}, {config})", flush=True)
            for dtype in ("bfloat16", "float16"):
                for lengths in ("short", "medium", "long"):
                    tuning.pin(key._replace(dtype=dtype, lengths=lengths), config)
    print()


if __name__ == "__main__":
    main()
