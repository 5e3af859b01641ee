import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from continuous_attention import bench, cli
from continuous_attention.bench import Cell, Check, Comparison, Spread, Table
from continuous_attention.kernels import cpu

needs_kernels = pytest.mark.skipif(cpu.chosen is None, reason="the kernels aren't built")

TINY = Cell(1, 2, 2, 8, 8, 4, "float32")
PEAKS = {"float32": 100.0, "bfloat16": 10.0, "memory": 20.0}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mode with tiny shapes, one short call per repeat, and peaks that take no time to find."""
    monkeypatch.setattr(bench, "SHAPES", ((1, 2, 16, 4),))
    monkeypatch.setattr(bench, "COMPARED", {**bench.COMPARED, "decode": lambda dtype: [Cell(1, 4, 2, 1, 32, 4, dtype)]})
    monkeypatch.setattr(bench, "GROWTH_LENGTH", 16)
    monkeypatch.setattr(bench, "IRREGULAR", Cell(2, 2, 2, 16, 16, 4, ""))
    monkeypatch.setattr(bench, "memory", lambda cell: Check("extra memory", Spread(1, 1, 1), " MB", 0, 64))
    monkeypatch.setattr(bench, "SHORTEST", 0.0)
    monkeypatch.setattr(bench, "product_rate", lambda dtype: 100.0)
    monkeypatch.setattr(bench, "read_rate", lambda: 20.0)


def comparison(**changes: Any) -> Comparison:
    figures: dict[str, Any] = {
        "cell": Cell(1, 8, 2, 1, 4096, 64, "bfloat16"),
        "seconds": 0.0005,
        "softmax_seconds": 0.001,
        "softmax_runs": 7,
        "softmax_estimate": 0.001,
        "ratio": Spread(2.0, 1.5, 2.5),
        "rate": 10.0,
        "unit": "GB/s",
        "peak": 20.0,
    }
    return Comparison(**{**figures, **changes})


# ---- The cells


def test_counts_of_a_cell() -> None:
    full = Cell(2, 8, 4, 100, 100, 64, "bfloat16")
    assert full.operations == 4 * 2 * 8 * 100 * 100 * 64
    assert Cell(2, 8, 4, 100, 100, 64, "bfloat16", causal=True, backward=True).operations == full.operations / 2 * 3.5
    assert full.bytes_read == 2 * (2 * 4 * 100 * 64) * 2
    assert full.name == "forward bfloat16 (2, 8:4, 100, 64) full"


@pytest.mark.parametrize(("mode", "count"), [("forward", 8), ("backward", 8), ("decode", 8), ("gqa", 4)])
def test_the_cells_of_a_mode(mode: str, count: int) -> None:
    cells = bench.COMPARED[mode]("float32")
    assert len(set(cells)) == count
    assert {cell.queries == 1 for cell in cells} == {mode == "decode"}
    assert {cell.backward for cell in cells} == {"backward": {True}, "gqa": {False, True}}.get(mode, {False})


@needs_kernels
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_calls_attend_to_the_same(dtype: str, backward: bool) -> None:
    cell = Cell(2, 4, 2, 8, 8, 4, dtype, causal=True, backward=backward)
    ours, softmax = (call() for call in cell.calls())
    ours, softmax = (x if isinstance(x, tuple) else (x,) for x in (ours, softmax))
    assert [(x.shape, x.dtype) for x in ours] == [(x.shape, x.dtype) for x in softmax]
    assert len(ours) == (3 if backward else 1)


# ---- Measuring


def test_calls_alternate() -> None:
    calls: list[str] = []
    pairs = bench._interleave(lambda: calls.append("a"), lambda: calls.append("b"), 3)
    assert len(pairs) == 3
    assert calls[:10] == list("ababbaabba")
    assert calls.count("a") == calls.count("b")


@needs_kernels
def test_a_comparison() -> None:
    row = bench.compare(TINY, 3, 5.0, PEAKS)
    assert row.ratio is not None
    assert row.ratio.low <= row.ratio.median <= row.ratio.high
    assert row.softmax_runs == 3
    assert row.rate == pytest.approx(TINY.operations / row.seconds / 1e9)
    assert (row.unit, row.peak) == ("GFLOP/s", 100.0)


@needs_kernels
def test_half_precision_is_read_beside_the_faster_product() -> None:
    assert bench.compare(Cell(1, 2, 2, 8, 8, 4, "bfloat16"), 1, 5.0, PEAKS).peak == 100.0


@needs_kernels
def test_decoding_is_read_beside_the_memory() -> None:
    cell = Cell(1, 2, 1, 1, 32, 4, "float32")
    row = bench.compare(cell, 1, 5.0, PEAKS)
    assert row.rate == pytest.approx(cell.bytes_read / row.seconds / 1e9)
    assert (row.unit, row.peak) == ("GB/s", 20.0)


@needs_kernels
def test_a_slow_softmax_runs_once() -> None:
    row = bench.compare(TINY, 3, 1e-12, PEAKS)
    assert row.softmax_runs == 1
    assert row.softmax_seconds is not None
    assert row.ratio is not None
    assert "(1 run)" in row.texts()[3]


@needs_kernels
def test_a_softmax_that_is_too_slow_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "TOO_SLOW", 1e-12)
    row = bench.compare(TINY, 3, 1e-12, PEAKS)
    assert (row.softmax_runs, row.softmax_seconds, row.ratio) == (0, None, None)
    assert row.seconds > 0
    assert row.softmax_estimate > 0
    assert Table("forward", "float32", [row]).mean is None


@needs_kernels
def test_extra_memory_is_measured_in_a_fresh_process() -> None:
    check = bench.memory(Cell(1, 2, 2, 256, 256, 64, "float32", backward=True))
    if check is None:
        pytest.skip("there is no /proc")
    assert check.held
    assert check.measured.median < 16  # megabytes; the real one may have 64


def test_peaks_of_the_machine() -> None:
    assert 0.01 < bench.product_rate(torch.float32) < 1e6


# ---- Tables


def test_table_of_comparisons() -> None:
    slow = comparison(softmax_seconds=None, softmax_runs=0, softmax_estimate=115.2, ratio=None)
    table = Table("decode", "bfloat16", [comparison(), comparison(ratio=Spread(8.0, 8, 8), softmax_runs=1), slow])
    lines = table.text().splitlines()
    assert lines[:2] == ["## decode, bfloat16", ""]
    assert [[text.strip() for text in line[1:-1].split("|")] for line in (lines[2], *lines[4:7])] == [
        list(Comparison.HEADER),
        ["(1, 8:2, 1→4096, 64)", "full", "fwd", "1 ms", "500 µs", "2.00", "1.50 – 2.50", "10.0 GB/s", "50%"],
        ["(1, 8:2, 1→4096, 64)", "full", "fwd", "1 ms (1 run)", "500 µs", "8.00", "8.00 – 8.00", "10.0 GB/s", "50%"],
        [slow.cell.shape, "full", "fwd", "too slow to measure (estimated 115 s)", "500 µs", "", "", "10.0 GB/s", "50%"],
    ]
    assert len({len(line) for line in lines[2:7]}) == 1
    assert lines[7:] == ["", "Geometric mean of 2: 4.00"]


@pytest.mark.parametrize(
    ("value", "low", "high", "wanted", "held"),
    [(4.0, 3.6, 4.4, "3.6 – 4.4×", "yes"), (4.5, 3.6, 4.4, "3.6 – 4.4×", "NO"), (3.5, 0, 3, "≤ 3×", "NO")],
)
def test_row_of_a_check(value: float, low: float, high: float, wanted: str, held: str) -> None:
    row = Check("it", Spread(value, value - 0.5, value + 0.5), "×", low, high)
    assert row.texts() == ["it", f"{value:.2f}×", f"{value - 0.5:.2f} – {value + 0.5:.2f}", wanted, held]


@pytest.mark.parametrize(("seconds", "text"), [(1.5, "1.5 s"), (0.9999, "1 s"), (0.0123, "12.3 ms"), (2e-5, "20 µs")])
def test_durations(seconds: float, text: str) -> None:
    assert bench._duration(seconds) == text


# ---- The command


@needs_kernels
def test_every_mode(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bench.json"
    threads = torch.get_num_threads()
    arguments = ["bench", "forward", "backward", "decode", "scaling", "irregular", "--repeats", "2", "--threads", "1"]
    assert cli.main([*arguments, "--variant", "portable", "--json", str(file)]) == 0
    assert torch.get_num_threads() == threads
    out, err = capsys.readouterr()
    assert "variant portable" in out
    assert "1 threads" in out
    assert "peaks      float32 100 GFLOP/s matrix product, bfloat16 100 GFLOP/s matrix product, memory 20 GB/s" in out
    assert out.count("\n## ") == 10
    assert "time of forward+backward float32 (2, 2, 16, 4) causal, irregular queries, over regular" in out
    assert out.count("Geometric mean") == 6
    assert "forward: forward float32 (1, 2, 16, 4) causal …" in err

    content = json.loads(file.read_text())
    assert (content["variant"], content["threads"], content["repeats"]) == ("portable", 1, 2)
    assert {"processor", "torch", "torch_cpu_capability", "cores", "load_average", "peaks"} <= content.keys()
    modes = ("forward", "backward", "decode", "scaling", "irregular")
    assert [(table["mode"], table["dtype"]) for table in content["tables"]] == [
        (mode, dtype) for mode in modes for dtype in ("float32", "bfloat16")
    ]
    row = content["tables"][0]["rows"][1]
    assert row["cell"]["causal"] is True
    assert row["ratio"].keys() == {"median", "low", "high"}
    assert content["tables"][0]["geometric_mean"] == pytest.approx(
        math.exp(sum(math.log(row["ratio"]["median"]) for row in content["tables"][0]["rows"]) / 2)
    )
    assert {row["held"] for row in content["tables"][6]["rows"]} <= {True, False}
    assert list(tmp_path.iterdir()) == [file]


@needs_kernels
def test_an_interrupt_leaves_what_was_measured(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare(cell: Cell, *others: Any) -> Comparison:
        if cell.causal:
            raise KeyboardInterrupt
        return comparison(cell=cell)

    monkeypatch.setattr(bench, "compare", compare)
    file = tmp_path / "bench.json"
    file.write_text("{}")
    assert cli.main(["bench", "forward", "--json", str(file)]) == 130
    out, err = capsys.readouterr()
    assert "| (1, 2, 16, 4) | full |" in out
    assert err.endswith(f"continuous-attention: interrupted; {file} was left as it was\n")
    assert file.read_text() == "{}"


@needs_kernels
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["sideways"],
            "the mode must be one of forward, backward, decode, gqa, scaling, irregular, all, got 'sideways'",
        ),
        (["--repeats", "0"], "argument --repeats: must be a whole number from 1 on, got '0'"),
        (["--threads", "two"], "argument --threads: must be a whole number from 1 on, got 'two'"),
        (["--limit", "-1"], "argument --limit: must be a number above 0, got '-1'"),
        (["--limit", "nan"], "argument --limit: must be a number above 0, got 'nan'"),
        (["--dtype", "float64"], "argument --dtype: invalid choice: 'float64'"),
        (["--variant", "sse"], "argument --variant: invalid choice: 'sse'"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"continuous-attention: {message}")
    assert len(err.splitlines()) == 1


@needs_kernels
@pytest.mark.parametrize("name", ["missing/bench.json", "."])
def test_a_file_that_cannot_be_written_is_refused_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "product_rate", None)  # whoever measures fails
    assert cli.main(["bench", "--json", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.startswith(f"continuous-attention: cannot write {tmp_path / name}: ")
    assert list(tmp_path.iterdir()) == []


def test_without_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cpu, "chosen", None)
    monkeypatch.setattr(cpu, "reason", "no compiler")
    assert cli.main(["bench"]) == 2
    assert capsys.readouterr().err.startswith(
        "continuous-attention: there are no kernels to measure: no compiler; install a C++ compiler"
    )


@needs_kernels
@pytest.mark.parametrize(("built", "why"), [((), "it isn't built"), (("amx",), "this machine can't run it")])
def test_a_variant_that_does_not_run(
    built: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "built", built)
    monkeypatch.setattr(cpu, "runnable", ("portable",))
    assert cli.main(["bench", "--variant", "amx"]) == 2
    assert capsys.readouterr().err == f"continuous-attention: no variant amx: {why}; there are portable\n"


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["bench", "--help"])
    assert exit.value.code == 0
    assert "usage: continuous-attention bench" in capsys.readouterr().out
