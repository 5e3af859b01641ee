"""`continuous-attention bench`: torch's softmax attention against continuous attention, on this machine's CPU.

Both run in the same process, call by call in turn, and the order alternates. A ratio is the time of
F.scaled_dot_product_attention over the time of continuous_attention(backend="cpu"), the median of the repeats, with
the lowest and the highest beside it; above 1 means faster than softmax. docs/performance.md says how to read it.

Shape legend: B batch, Hq query heads, Hkv key/value heads, Lq queries, Lk nodes, D head dim.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, ClassVar, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

import continuous_attention as ca
from continuous_attention.experiments import report
from continuous_attention.experiments.report import UserError
from continuous_attention.kernels import cpu

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOO_SLOW = 60.0  # seconds: a softmax call that is estimated to take longer is left out
SHORTEST = 0.01  # seconds: what takes less is called several times per repeat
BACKWARD = 2.5  # multiply-adds of the backward, over those of the forward

Call = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of the repeats."""

    median: float
    low: float
    high: float


# ---- What is measured


@dataclass(frozen=True)
class Cell:
    """One call: shapes, dtype, mask, and whether gradients are taken."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    nodes: int
    dim: int
    dtype: str
    causal: bool = False
    backward: bool = False
    times: str = ""
    """"grids": each batch element has irregular times of its own; "queries": its queries have others than the nodes."""

    @property
    def shape(self) -> str:
        """(B, Hq:Hkv, Lq→Lk, D), one number where two are equal."""
        heads = f"{self.heads}" if self.heads == self.key_heads else f"{self.heads}:{self.key_heads}"
        length = f"{self.nodes}" if self.queries == self.nodes else f"{self.queries}→{self.nodes}"
        return f"({self.batch}, {heads}, {length}, {self.dim})"

    @property
    def mask(self) -> str:
        """What is seen, in a word."""
        return "causal" if self.causal else "full"

    @property
    def name(self) -> str:
        """All of it, in a line."""
        times = f", irregular {self.times}" if self.times else ""
        return f"{'forward+backward' if self.backward else 'forward'} {self.dtype} {self.shape} {self.mask}{times}"

    @property
    def scores(self) -> int:
        """How many there are, hidden ones included."""
        return self.batch * self.heads * self.queries * self.nodes

    @property
    def operations(self) -> float:
        """Floating point operations of the matrix products: the softmax's share is left out, for both sides."""
        return 4 * self.scores * self.dim * (0.5 if self.causal else 1) * (1 + BACKWARD if self.backward else 1)

    @property
    def bytes_read(self) -> int:
        """Of keys and values."""
        return 2 * self.batch * self.key_heads * self.nodes * self.dim * DTYPES[self.dtype].itemsize

    def calls(self) -> tuple[Call, Call]:
        """Continuous attention and softmax attention of the same random numbers; softmax knows no times."""
        generator = torch.Generator().manual_seed(0)

        def numbers(heads: int, length: int) -> Tensor:
            shape = (self.batch, heads, length, self.dim)
            return torch.randn(shape, dtype=DTYPES[self.dtype], generator=generator)

        query, gradient = numbers(self.heads, self.queries), numbers(self.heads, self.queries)
        key, value = numbers(self.key_heads, self.nodes), numbers(self.key_heads, self.nodes)
        inputs = query, key, value
        how: dict[str, Any] = {"is_causal": self.causal, "enable_gqa": self.heads != self.key_heads}
        grids: dict[str, Any] = {}
        if self.times:
            grids["times"] = torch.rand(self.batch, self.nodes, generator=generator).cumsum(-1)
        if self.times == "queries":
            asked = torch.rand(self.batch, self.queries, generator=generator).sort(-1).values
            grids["query_times"] = self.nodes / 2 * asked
        wanted = *inputs, *grids.values()
        if self.backward:
            for x in wanted:
                x.requires_grad_()

        def ours() -> object:
            out = ca.continuous_attention(*inputs, **how, **grids, backend="cpu")
            assert isinstance(out, Tensor)
            return torch.autograd.grad(out, wanted, gradient) if self.backward else out

        def softmax() -> object:
            out = F.scaled_dot_product_attention(*inputs, **how)
            return torch.autograd.grad(out, inputs, gradient) if self.backward else out

        return ours, softmax


SHAPES = ((1, 8, 2048, 64), (1, 8, 4096, 64), (1, 8, 4096, 128), (4, 8, 512, 64))


def _square(dtype: str, *, backward: bool) -> list[Cell]:
    return [Cell(b, h, h, n, n, d, dtype, causal, backward) for b, h, n, d in SHAPES for causal in (False, True)]


def _decode(dtype: str) -> list[Cell]:
    return [
        Cell(batch, 8, key_heads, 1, nodes, 64, dtype)
        for batch in (1, 8)
        for key_heads in (8, 2)
        for nodes in (4096, 32768)
    ]


def _gqa(dtype: str) -> list[Cell]:
    return [
        Cell(1, 16, 4, 2048, 2048, 64, dtype, causal, backward)
        for backward in (False, True)
        for causal in (False, True)
    ]


COMPARED: dict[str, Callable[[str], list[Cell]]] = {
    "forward": lambda dtype: _square(dtype, backward=False),
    "backward": lambda dtype: _square(dtype, backward=True),
    "decode": _decode,
    "gqa": _gqa,
}
MODES = (*COMPARED, "scaling", "irregular")
GROWTH_LENGTH = 4096
LONG = Cell(1, 8, 8, 16384, 16384, 64, "", backward=True)
SHORT = Cell(1, 1, 1, 16, 16, 16, "")
IRREGULAR = Cell(16, 4, 4, 2048, 2048, 64, "")

_STATUS = Path("/proc/self/status")


# ---- Measuring


def _seconds(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _interleave(first: Call, second: Call, repeats: int) -> list[tuple[float, float]]:
    """Seconds per call of both, for each repeat; calls alternate, and so does which of them comes first."""
    shorter = min(_seconds(first), _seconds(second))  # which also warms up
    calls = max(1, math.ceil(SHORTEST / max(shorter, 1e-6)))
    pairs: list[tuple[float, float]] = []
    for _ in range(repeats):
        of_first = of_second = 0.0
        for i in range(calls):
            if (len(pairs) + i) % 2:
                of_second += _seconds(second)
                of_first += _seconds(first)
            else:
                of_first += _seconds(first)
                of_second += _seconds(second)
        pairs.append((of_first / calls, of_second / calls))
    return pairs


def _spread(values: list[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def _estimate(cell: Cell) -> float:
    """Seconds of a softmax call, from one with an eighth of the length."""
    small = replace(cell, queries=max(1, cell.queries // 8), nodes=max(1, cell.nodes // 8))
    _, softmax = small.calls()
    return min(_seconds(softmax), _seconds(softmax)) * cell.scores / small.scores


@dataclass(frozen=True)
class Comparison:
    """A row of the tables that compare with softmax."""

    HEADER: ClassVar = ("B, H, L, D", "mask", "pass", "softmax", "continuous", "ratio", "min – max", "rate", "of peak")

    cell: Cell
    seconds: float  # of ours, the median
    softmax_seconds: float | None
    softmax_runs: int  # 0: too slow to measure
    softmax_estimate: float
    ratio: Spread | None
    rate: float  # of ours, in `unit`
    unit: str
    peak: float  # what this machine reached, in `unit`

    def texts(self) -> list[str]:
        """The row as it is printed."""
        if self.softmax_seconds is None:
            softmax = f"too slow to measure (estimated {self.softmax_estimate:.0f} s)"
        else:
            softmax = _duration(self.softmax_seconds) + (" (1 run)" if self.softmax_runs == 1 else "")
        return [
            self.cell.shape,
            self.cell.mask,
            "fwd+bwd" if self.cell.backward else "fwd",
            softmax,
            _duration(self.seconds),
            *(["", ""] if self.ratio is None else [f"{self.ratio.median:.2f}", _range(self.ratio)]),
            f"{self.rate:.1f} {self.unit}",
            f"{self.rate / self.peak:.0%}",
        ]


def compare(cell: Cell, repeats: int, limit: float, peaks: dict[str, float]) -> Comparison:
    """Measure one cell; `limit` is the longest softmax call, in seconds, that is repeated."""
    estimate = _estimate(cell)
    ours, softmax = cell.calls()
    # An estimate may be too high; what it forbids to repeat is tried once, and repeated after all if it was fast.
    once, runs = math.nan, repeats
    if estimate > limit:
        runs = int(estimate <= max(TOO_SLOW, limit))
        once = _seconds(softmax) if runs else math.nan
        runs = repeats if once <= limit else runs
    if runs > 1 or estimate <= limit:
        pairs = _interleave(ours, softmax, repeats)
    else:
        ours()
        pairs = [(_seconds(ours), once) for _ in range(repeats)]
    seconds = median(a for a, _ in pairs)
    if cell.queries == 1:
        rate, unit, peak = cell.bytes_read / seconds / 1e9, "GB/s", peaks["memory"]
    else:
        rate, unit = cell.operations / seconds / 1e9, "GFLOP/s"
        peak = max(peaks["float32"], peaks[cell.dtype])
    return Comparison(
        cell=cell,
        seconds=seconds,
        softmax_seconds=median(b for _, b in pairs) if runs else None,
        softmax_runs=runs,
        softmax_estimate=estimate,
        ratio=_spread([b / a for a, b in pairs]) if runs else None,
        rate=rate,
        unit=unit,
        peak=peak,
    )


@dataclass(frozen=True)
class Check:
    """A row of the table of scaling: a figure that has to stay within limits."""

    HEADER: ClassVar = ("what", "measured", "min – max", "wanted", "held")

    what: str
    measured: Spread
    unit: str
    low: float
    high: float

    @property
    def held(self) -> bool:
        """Whether it stays within them."""
        return self.low <= self.measured.median <= self.high

    def texts(self) -> list[str]:
        """The row as it is printed."""
        wanted = f"{self.low:g} – {self.high:g}" if self.low > 0 else f"≤ {self.high:g}"
        spread = self.measured.low != self.measured.high
        return [
            self.what,
            f"{self.measured.median:.2f}{self.unit}",
            _range(self.measured) if spread else "",
            wanted + self.unit,
            "yes" if self.held else "NO",
        ]


def growth(cell: Cell, repeats: int) -> Check:
    """How much longer twice the length takes."""
    one, _ = cell.calls()
    two, _ = replace(cell, queries=2 * cell.queries, nodes=2 * cell.nodes).calls()
    ratios = [b / a for a, b in _interleave(one, two, repeats)]
    return Check(f"time of {cell.name}, twice the length", _spread(ratios), "×", 3.6, 4.4)


def slowdown(cell: Cell, repeats: int) -> Check:
    """What irregular times cost, gradients of them included, over the same call without times."""
    regular, _ = replace(cell, times="").calls()
    irregular, _ = cell.calls()
    ratios = [b / a for a, b in _interleave(regular, irregular, repeats)]
    return Check(f"time of {cell.name}, over regular", _spread(ratios), "×", 0, 1.15)


def overhead(cell: Cell, repeats: int) -> Check:
    """What a small call costs, over softmax's."""
    ratios = [a / b for a, b in _interleave(*cell.calls(), repeats)]
    return Check(f"time of {cell.name}, over softmax's", _spread(ratios), "×", 0, 3)


def memory(cell: Cell) -> Check | None:
    """What a call takes at its peak, beyond inputs, output and gradients; None where there is no /proc to tell it."""
    if not _STATUS.exists():
        return None
    variant, threads = cpu.chosen, torch.get_num_threads()
    code = f"from continuous_attention import bench; print(bench.extra_bytes(bench.{cell!r}, {variant!r}, {threads}))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if child.returncode:
        raise UserError(f"measuring memory failed: {child.stderr.strip() or f'signal {-child.returncode}'}")
    megabytes = int(child.stdout) / 1e6
    return Check(f"extra memory of {cell.name}", Spread(megabytes, megabytes, megabytes), " MB", 0, 64)


def extra_bytes(cell: Cell, variant: str, threads: int) -> int:
    """Growth of this process's peak over one call, less output and gradients; for a fresh process on Linux."""
    with _threads(threads), cpu.use_variant(variant):
        warm_up, _ = replace(cell, queries=64, nodes=64).calls()
        warm_up()
        ours, _ = cell.calls()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # forgets the peak; without it the figure may be too high
        before = _resident("VmRSS")
        ours()
        after = _resident("VmHWM")
    rows = cell.batch * cell.dim * DTYPES[cell.dtype].itemsize
    of_queries, of_nodes = rows * cell.heads * cell.queries, rows * cell.key_heads * cell.nodes
    return after - before - of_queries - (of_queries + 2 * of_nodes if cell.backward else 0)


def _resident(name: str) -> int:
    """Bytes of memory that this process has now (VmRSS), or has had at most (VmHWM)."""
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _scaling(dtype: str, repeats: int) -> Iterator[tuple[str, Callable[[], Check | None]]]:
    for backward in (False, True):
        for causal in (False, True):
            cell = Cell(1, 8, 8, GROWTH_LENGTH, GROWTH_LENGTH, 64, dtype, causal, backward)
            yield f"growth of {cell.name}", lambda cell=cell: growth(cell, repeats)
    long, short = replace(LONG, dtype=dtype), replace(SHORT, dtype=dtype)
    yield f"memory of {long.name}", lambda: memory(long)
    yield short.name, lambda: overhead(short, repeats)


def _irregular(dtype: str, repeats: int) -> Iterator[tuple[str, Callable[[], Check]]]:
    for backward in (False, True):
        for causal, times in ((False, "grids"), (True, "grids"), (True, "queries")):
            cell = replace(IRREGULAR, dtype=dtype, causal=causal, backward=backward, times=times)
            yield cell.name, lambda cell=cell: slowdown(cell, repeats)


def product_rate(dtype: torch.dtype) -> float:
    """GFLOP/s of torch's matrix product, the best of several: what this machine can do at most."""
    size = 256
    while True:
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        best = min(_seconds(lambda a=a, b=b: a @ b) for _ in range(5))
        if size >= 2048 or best > 0.1:
            return 2 * size**3 / best / 1e9
        size *= 2


def read_rate() -> float:
    """GB/s at which torch sums up memory that no cache holds, the best of several."""
    x = torch.ones(2**26)
    return 4 * x.numel() / min(_seconds(x.sum) for _ in range(5)) / 1e9


# ---- Tables


@dataclass
class Table:
    """The rows of one mode and dtype."""

    mode: str
    dtype: str
    rows: list[Comparison] | list[Check] = field(default_factory=list)

    @property
    def mean(self) -> float | None:
        """The geometric mean of the ratios that were measured."""
        ratios = [row.ratio.median for row in self.rows if isinstance(row, Comparison) and row.ratio]
        return geometric_mean(ratios) if ratios else None

    def text(self) -> str:
        """The table as Markdown, which reads well in a terminal and in docs/performance.md."""
        lines = [report.markdown_table(self.rows[0].HEADER, [row.texts() for row in self.rows])]
        if self.mean is not None:
            count = sum(isinstance(row, Comparison) and row.ratio is not None for row in self.rows)
            lines += ["", f"Geometric mean of {count}: {self.mean:.2f}"]
        return "\n".join([f"## {self.mode}, {self.dtype}", "", *lines, ""])

    def json(self) -> dict[str, Any]:
        """Every figure, times in seconds."""
        rows = [{**asdict(row), **({"held": row.held} if isinstance(row, Check) else {})} for row in self.rows]
        return {"mode": self.mode, "dtype": self.dtype, "rows": rows, "geometric_mean": self.mean}


def _duration(seconds: float) -> str:
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 0.9995:  # is written as 1
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _range(spread: Spread) -> str:
    return f"{spread.low:.2f} – {spread.high:.2f}"


# ---- The command


def main(arguments: list[str]) -> None:
    """Measure what was asked for: the progress goes to stderr, the tables to stdout."""
    options = _parse(arguments)
    with _threads(options.threads), _variant(options.variant):
        machine = _describe(options)
        _print_header(machine)
        tables: list[Table] = []
        try:
            _measure(options, machine["peaks"], tables)
        except KeyboardInterrupt:
            left_out = f"; {options.json} was left as it was" if options.json else ""
            raise KeyboardInterrupt(f"interrupted{left_out}") from None
    if options.json:
        _write(options.json, {**machine, "tables": [table.json() for table in tables]})


def _measure(options: argparse.Namespace, peaks: dict[str, float], tables: list[Table]) -> None:
    for mode in options.modes:
        for dtype in options.dtype:
            table = Table(mode, dtype)
            tables.append(table)
            try:
                for name, measure in _plan(mode, dtype, options, peaks):
                    print(f"{mode}: {name} …", file=sys.stderr, flush=True)
                    if (row := measure()) is not None:
                        table.rows.append(row)
            finally:
                if table.rows:
                    print(table.text(), flush=True)


def _plan(
    mode: str, dtype: str, options: argparse.Namespace, peaks: dict[str, float]
) -> Iterator[tuple[str, Callable[[], Any]]]:
    if mode in ("scaling", "irregular"):
        yield from {"scaling": _scaling, "irregular": _irregular}[mode](dtype, options.repeats)
        return
    for cell in COMPARED[mode](dtype):
        yield cell.name, lambda cell=cell: compare(cell, options.repeats, options.limit, peaks)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see: continuous-attention bench --help")


def _parse(arguments: list[str]) -> argparse.Namespace:
    summary = (__doc__ or "").split("\n\n")
    parser = _Parser("continuous-attention bench", description=summary[0] + "\n\n" + summary[1])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("modes", nargs="*", metavar="mode", help=f"{', '.join(MODES)}, or all, which is the default")
    parser.add_argument(
        "--dtype", action="append", choices=DTYPES, help="may be given again (default float32 and bfloat16)"
    )
    parser.add_argument("--repeats", type=_whole, default=7, metavar="N", help="per cell (default 7)")
    parser.add_argument(
        "--threads", type=_whole, metavar="N", help="of torch and of the kernels (default torch's own choice)"
    )
    parser.add_argument("--variant", choices=cpu.VARIANTS, help="of the kernels (default the best that runs here)")
    parser.add_argument(
        "--limit",
        type=_positive,
        default=5.0,
        metavar="SECONDS",
        help=f"run softmax just once where a call takes longer (default 5), and not at all beyond {TOO_SLOW:.0f} s",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to this file, too")
    options = parser.parse_args(arguments)
    unknown = [mode for mode in options.modes if mode not in (*MODES, "all")]
    if unknown:
        parser.error(f"the mode must be one of {', '.join(MODES)}, all, got {unknown[0]!r}")
    options.modes = MODES if not options.modes or "all" in options.modes else tuple(dict.fromkeys(options.modes))
    options.dtype = tuple(dict.fromkeys(options.dtype or ("float32", "bfloat16")))
    if cpu.chosen is None:
        raise UserError(f"there are no kernels to measure: {cpu.reason}; {cpu.REINSTALL}")
    if options.variant and options.variant not in cpu.runnable:
        missing = "this machine can't run it" if options.variant in cpu.built else "it isn't built"
        raise UserError(f"no variant {options.variant}: {missing}; there are {', '.join(cpu.runnable)}")
    if options.json:
        _check_writable(options.json)
    return options


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, got {text!r}")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def _check_writable(path: Path) -> None:
    draft = path.with_name(path.name + ".part")
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        draft.touch()
        draft.unlink()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write {path}: {getattr(error, 'strerror', error)}") from None


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        report.replace(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _variant(name: str | None) -> Any:
    return cpu.use_variant(name) if name else nullcontext()


def _describe(options: argparse.Namespace) -> dict[str, Any]:
    """The machine and what it reaches: every figure is to be read beside these."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    print("the peaks of this machine …", file=sys.stderr, flush=True)
    peaks = {name: product_rate(DTYPES[name]) for name in dict.fromkeys(("float32", *options.dtype))}
    if "decode" in options.modes:
        peaks["memory"] = read_rate()
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": report.processor(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": load,
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "ATEN_CPU_CAPABILITY": os.environ.get("ATEN_CPU_CAPABILITY"),
        "continuous_attention": ca.__version__,
        "variant": cpu.chosen,
        "repeats": options.repeats,
        "limit": options.limit,
        "peaks": peaks,
    }


def _print_header(machine: dict[str, Any]) -> None:
    asked = machine["ATEN_CPU_CAPABILITY"]
    capability = f"{machine['torch_cpu_capability']}{f' (ATEN_CPU_CAPABILITY={asked})' if asked else ''}"
    units = {name: "GB/s read" if name == "memory" else "GFLOP/s matrix product" for name in machine["peaks"]}
    print(f"processor  {machine['processor']}, {machine['cores']} cores, {machine['threads']} threads")
    print(f"softmax    torch {machine['torch']}, {capability}")
    print(f"continuous {machine['continuous_attention']}, variant {machine['variant']}")
    print(f"peaks      {', '.join(f'{name} {x:.0f} {units[name]}' for name, x in machine['peaks'].items())}")
    print(f"figures    median of {machine['repeats']}; ratio = softmax / continuous, above 1 = faster than softmax")
    if (machine["load_average"] or 0) > 0.5:
        print(f"warning    load average {machine['load_average']:.1f} before the start: if others use the cores, wait")
    print(flush=True)
