# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false, reportOperatorIssue=false
# (Triton is a language of its own)
"""What the compiler makes of the GPU kernels: registers, spills and instructions per score, on a machine without a GPU.

    python benchmarks/gpu_code.py [--target 90] [--only forward]

Each kernel is launched as in real use, on small tensors; the launch is caught and compiled for a device that needn't be
there. Then the machine code of the main loop, where all time goes, is counted, and divided by the scores that a program
computes in a turn of it. A plain softmax kernel, written in the same way, stands beside. Needs Triton.
"""

import argparse
import collections
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from continuous_attention import ops
from continuous_attention.kernels.triton import launch, tuning
from continuous_attention.kernels.triton.segment import INTERPRETED, LOG2E, exp2

DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
LENGTH = 256
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
# Instructions worth a column of their own: special functions, shared memory, other lanes, spilled registers.
COLUMNS = ("MUFU", "LDS", "STS", "SHFL", "LDL", "STL")


class Count(NamedTuple):
    """What was found in a kernel."""

    name: str
    registers: int
    stack: int  # bytes of spilled registers
    shared: int  # bytes
    total: float  # instructions per score in the main loop
    of: dict[str, float]  # the same for some kinds
    conversions: int  # changes of layout in the main loop


# Plain softmax attention, without edges: lengths are whole numbers of blocks.


@triton.jit
def softmax_forward_kernel(
    Q, K, V, OUT, LSE, scale, LENGTH, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The forward pass of one head."""
    row, column, dim = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    q = tl.load(Q + row[:, None] * D + dim[None, :])
    m, z = tl.full([BLOCK_M], -1e30, tl.float32), tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for i in tl.range(0, LENGTH // BLOCK_N, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        place = (i * BLOCK_N + column)[:, None] * D + dim[None, :]
        s = tl.dot(q, tl.trans(tl.load(K + place)))
        rise = tl.maximum(m, tl.max(s, 1) * scale)
        p = exp2(s * scale - rise[:, None])
        fade = exp2(m - rise)
        m, z = rise, z * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), tl.load(V + place), acc * fade[:, None])
    tl.store(OUT + row[:, None] * D + dim[None, :], (acc / z[:, None]).to(q.dtype))
    tl.store(LSE + row, m + tl.log2(z))


@triton.jit
def softmax_backward_kernel(
    Q, K, V, OUT_GRADIENT, LSE, MEAN, KEY_GRADIENT, VALUE_GRADIENT, DESCRIPTOR, scale, LENGTH, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The backward pass of one head, dQ added by all programs."""
    column, dim = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, D)
    here = column[:, None] * D + dim[None, :]
    k, v = tl.load(K + here), tl.load(V + here)
    d_k, d_v = tl.zeros([BLOCK_N, D], tl.float32), tl.zeros([BLOCK_N, D], tl.float32)
    for i in tl.range(0, LENGTH // BLOCK_M, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        row = i * BLOCK_M + tl.arange(0, BLOCK_M)
        place = row[:, None] * D + dim[None, :]
        q, d_out = tl.load(Q + place), tl.load(OUT_GRADIENT + place)
        p = exp2(tl.dot(q, tl.trans(k)) * scale - tl.load(LSE + row)[:, None])
        d_s = (p * (tl.dot(d_out, tl.trans(v)) - tl.load(MEAN + row)[:, None])).to(q.dtype)
        d_v = tl.dot(tl.trans(p.to(q.dtype)), d_out, d_v)
        d_k = tl.dot(tl.trans(d_s), q, d_k)
        d_q = tl.dot(d_s, k)
        if DESCRIPTOR is not None:
            DESCRIPTOR.atomic_add([i * BLOCK_M, 0], d_q)
        else:
            tl.atomic_add(KEY_GRADIENT + place, d_q, sem="relaxed")
    tl.store(KEY_GRADIENT + here, d_k)
    tl.store(VALUE_GRADIENT + here, d_v)


def softmax(dim: int, dtype: torch.dtype, *, backward: bool) -> None:
    """Launch a plain softmax kernel with the blocks of ours."""
    config = tuning.default(
        tuning.key_of("nodes" if backward else "forward", dim, dim, dtype, LENGTH),
        tuning.capability(torch.device("cpu")),
    )
    q, row = torch.empty(LENGTH, dim, dtype=dtype), torch.empty(LENGTH)
    sizes = {"D": dim, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "STAGES": config.stages}
    options = {"num_warps": config.warps, "num_stages": config.stages, **launch.FUSION}
    if backward:
        total = torch.empty(1, 1, LENGTH, dim)
        descriptor = launch.add_by_tiles(total, config.block_m, dim) if launch.adds_tiles(total) else None
        softmax_backward_kernel[(1,)](
            q, q, q, q, row, row, total, total, descriptor, LOG2E.value, LENGTH, **sizes, **options
        )
    else:
        softmax_forward_kernel[(1,)](q, q, q, q, row, LOG2E.value, LENGTH, **sizes, **options)


# Ours


def ours(
    dim: int,
    dtype: torch.dtype,
    *,
    queries: int = LENGTH,
    nodes: int = LENGTH,
    backward: bool = False,
    with_times: bool = False,
    deterministic: bool = False,
) -> None:
    """Launch what runs for one call of the operator with the default boundary."""
    query, key = torch.zeros(1, 1, queries, dim, dtype=dtype), torch.zeros(1, 1, nodes, dim, dtype=dtype)
    prepared = ops.prepare(
        queries,
        nodes,
        torch.tensor([[[0, nodes]]]),
        scale=1.0,
        lengths=torch.ones(1, nodes) if with_times else None,
        start_node=(torch.zeros(1, dim), torch.zeros(1, dim)),
        start_length=1.0,
    )[:-1]
    out, lse = torch.zeros_like(query), torch.zeros(1, 1, queries)
    rest, normalizer = torch.zeros_like(query), torch.ones(1, 1, queries, 2)
    rest = rest if dtype != torch.float32 else None
    if not backward:
        launch.forward(query, key, key, *prepared, out, lse, rest, normalizer)
        return
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    launch.backward(out, None, out, rest, normalizer, query, key, key, *prepared, [False, with_times, False])
    torch.use_deterministic_algorithms(before)


CASES: dict[str, tuple[str, Callable[[], None]]] = {}
for _dim in (64, 128, 256):
    CASES |= {
        f"softmax forward, D {_dim}": (
            "softmax_forward_kernel",
            partial(softmax, _dim, torch.bfloat16, backward=False),
        ),
        f"forward, D {_dim}": ("forward_kernel", partial(ours, _dim, torch.bfloat16)),
        f"softmax backward, D {_dim}": (
            "softmax_backward_kernel",
            partial(softmax, _dim, torch.bfloat16, backward=True),
        ),
        f"backward, D {_dim}": ("nodes_kernel", partial(ours, _dim, torch.bfloat16, backward=True)),
        f"deterministic backward dK dV, D {_dim}": (
            "nodes_kernel",
            partial(ours, _dim, torch.bfloat16, backward=True, deterministic=True),
        ),
        f"deterministic backward dQ, D {_dim}": (
            "queries_kernel",
            partial(ours, _dim, torch.bfloat16, backward=True, deterministic=True),
        ),
        f"decode, D {_dim}": ("split_kernel", partial(ours, _dim, torch.bfloat16, queries=1, nodes=4096)),
    }
CASES |= {
    "forward with times, D 128": ("forward_kernel", partial(ours, 128, torch.bfloat16, with_times=True)),
    "backward with times, D 128": ("nodes_kernel", partial(ours, 128, torch.bfloat16, backward=True, with_times=True)),
    "forward, fp16, D 128": ("forward_kernel", partial(ours, 128, torch.float16)),
    "forward, fp32, D 64": ("forward_kernel", partial(ours, 64, torch.float32)),
    "backward, fp32, D 64": ("nodes_kernel", partial(ours, 64, torch.float32, backward=True)),
    "decode, merge, D 128": ("merge_kernel", partial(ours, 128, torch.bfloat16, queries=1, nodes=4096)),
    "backward, rows, D 128": ("rows_kernel", partial(ours, 128, torch.bfloat16, backward=True)),
    "backward, schedule": ("schedule_kernel", partial(ours, 128, torch.bfloat16, backward=True)),
}


# Compiling without a device


def compile_for(target: int, kernel_name: str, call: Callable[[], None]) -> tuple[Any, float]:
    """What the compiler makes of a kernel that `call` launches, and how many scores a program computes in a turn."""
    caught: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def catch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if kernel.fn.__name__ == kernel_name:
            caught.append((kernel, args, kwargs))

    with (
        mock.patch.object(triton.JITFunction, "run", catch),
        mock.patch.object(tuning, "capability", return_value=(target // 10, target % 10)),
        mock.patch.object(launch, "processors", return_value=132),
    ):
        call()
    kernel, args, kwargs = caught[0]
    given = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in kernel.arg_names}
    options = {k: v for k, v in kwargs.items() if k not in kernel.arg_names}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, parameter in enumerate(kernel.params):
        name, x = parameter.name, given[parameter.name]
        if parameter.is_constexpr or x is None:
            signature[name], constants[name] = "constexpr", x
            continue
        signature[name] = _type_of(x)
        aligned = isinstance(x, torch.Tensor) or (isinstance(x, int) and x % 16 == 0)
        if aligned and not parameter.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    shape = constants.get("S")
    sizes = (
        (shape.block_m, shape.block_n - shape.chains) if shape else (constants["BLOCK_M"], constants.get("BLOCK_N", 1))
    )
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options), math.prod(sizes)


def _type_of(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"*{DTYPES[x.dtype]}"
    if isinstance(x, int):
        return "i32" if -(2**31) <= x < 2**31 else "i64"
    if isinstance(x, float):
        return "fp32"
    block = ",".join(map(str, x.block_shape))
    return f"tensordesc<{DTYPES[x.base.dtype]}[{block}]>"


def count(target: int, name: str) -> Count:
    """Compile one of CASES and count."""
    kernel, scores = compile_for(target, *CASES[name])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(kernel.asm["cubin"])
        code, usage = (
            subprocess.run([DISASSEMBLER, option, path], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "-res-usage")
        )
    resources = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert resources is not None, usage
    loop = _main_loop(code)
    per_score = 32 * kernel.metadata.num_warps / scores
    kinds = collections.Counter(operation.split(".")[0] for operation in loop)
    return Count(
        name=name,
        registers=int(resources[1]),
        stack=int(resources[2]),
        shared=kernel.metadata.shared,
        total=len(loop) * per_score,
        of={kind: kinds[kind] * per_score for kind in COLUMNS},
        conversions=_conversions(kernel.asm["ttgir"]),
    )


def _main_loop(code: str) -> list[str]:
    """The operations of the shortest loop that multiplies matrices; in fp32, of the longest full of products."""
    lines = [(int(a, 16), text) for a, text in re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", code, re.MULTILINE)]
    lines = [(address, re.sub(r"^@!?U?P\d+\s+", "", text)) for address, text in lines]
    loops = []
    for address, text in lines:
        jump = re.match(r"BRA\S* .*?0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < address:
            loops.append([text.split()[0] for at, text in lines if int(jump[1], 16) <= at <= address])
    multiplying = [loop for loop in loops if any(x.startswith(("HGMMA", "HMMA", "UTCHMMA", "UTCMMA")) for x in loop)]
    if multiplying:
        return min(multiplying, key=len)
    summing = [loop for loop in loops if sum(x.startswith("FFMA") for x in loop) > len(loop) / 3]
    return max(summing, key=len, default=[])


def _conversions(layouts: str) -> int:
    """How often the first loop that multiplies matrices, which is the main one, moves numbers to another layout."""
    lines = layouts.splitlines()
    for i, line in enumerate(lines):
        if " scf.for " in line:
            indent = len(line) - len(line.lstrip())
            end = next(j for j in range(i + 1, len(lines)) if lines[j].startswith(" " * indent + "}"))
            body = lines[i:end]
            if any(re.search(r"= (tt|ttng)\.\w*dot|tc_gen5_mma", x) for x in body):
                return sum("convert_layout" in x for x in body)
    return 0


def table(counts: list[Count]) -> str:
    """As Markdown."""
    head = ["kernel", "registers", "stack", "shared", "instructions", *COLUMNS, "conversions"]
    rows = [
        [x.name, str(x.registers), str(x.stack), f"{x.shared // 1024} KB", f"{x.total:.1f}" if x.total else "no loop"]
        + [f"{x.of[kind]:.2f}" if x.of[kind] else "0" for kind in COLUMNS]
        + [str(x.conversions)]
        for x in counts
    ]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print a table for each target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=int, action="append", choices=(80, 90, 100), help="default: all three")
    parser.add_argument("--only", default="", help="kernels whose name has this in it")
    options = parser.parse_args()
    if INTERPRETED:
        parser.error("TRITON_INTERPRET is set, which compiles nothing; unset it")
    names = [name for name in CASES if options.only in name]
    if not names:
        parser.error(f"no kernel has {options.only!r} in its name; there are: {'; '.join(CASES)}")
    print(
        f"Triton {triton.__version__}, torch {torch.__version__}. Instructions of the main loop, per score; among them"
    )
    print("MUFU: 2^x and 1/x, LDS, STS: shared memory, SHFL: other lanes, LDL, STL: spilled registers.")
    print("stack: bytes spilled anywhere, mostly at edges; conversions: changes of layout in the main loop.")
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for target in options.target or (80, 90, 100):
            counts = list(pool.map(partial(count, target), names))
            print(f"\nsm_{target}\n\n{table(counts)}", flush=True)


if __name__ == "__main__":
    main()
