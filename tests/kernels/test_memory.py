"""What kernels read and write: nothing is left unwritten, nothing unseen is read, and a result is the same every time.

tests/kernels/sanitize.sh runs the C++ under sanitizers besides.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import CPU, DTYPES, evaluate, threads
from torch import Tensor

REPEATS = 30
B, HQ, HKV, LQ, LK, D, DV = 2, 4, 2, 37, 70, 17, 9
EVERY_VARIANT = pytest.mark.parametrize("backend", CPU)
EVERY_DTYPE = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
TIMES = torch.linspace(0, 9, LK).square().double()
HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal, window": {"is_causal": True, "window": 20},
    "start node": {"boundary": "node"},
    "times": {"times": TIMES, "query_times": TIMES[-LQ:] + 0.5, "is_causal": True, "boundary": "half"},
    "intervals": {"intervals": torch.tensor([[0, 0], [3, 4], [60, 70], [5, 5], [0, 17]]).repeat(8, 1)[None, :LQ]},
}
EVERY_HOW = pytest.mark.parametrize("how", HOWS)


def case(how: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The differentiable arguments and the others."""
    options: dict[str, Any] = {"enable_gqa": True, **HOWS[how]}
    leaves = {
        "query": torch.randn(B, HQ, LQ, D),
        "key": torch.randn(B, HKV, LK, D),
        "value": torch.randn(B, HKV, LK, DV),
    }
    if options.get("boundary") == "node":
        del options["boundary"]
        leaves |= {"k0": torch.randn(HKV, D), "v0": torch.randn(HKV, DV)}
    return leaves | {name: options.pop(name) for name in ("times", "query_times") if name in options}, options


@pytest.fixture
def _nan_in_new_tensors() -> Iterator[None]:
    """What torch.empty gives holds NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore[reportAttributeAccessIssue]
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, x in expected.items():
        torch.testing.assert_close(got[name], x, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.usefixtures("_nan_in_new_tensors")
@EVERY_VARIANT
@EVERY_DTYPE
@EVERY_HOW
def test_everything_is_written(how: str, dtype: str, backend: str) -> None:
    for name, x in evaluate(*case(how), backend, DTYPES[dtype]).items():
        assert not x.isnan().any(), name


SCRATCH = """
import sys
sys.path[:0] = sys.argv[1:3]
import torch
import test_memory
from backends import CPU, DTYPES
results = []
for how in test_memory.HOWS:
    for dtype in ("float32", "bfloat16", "float16"):
        for backend in CPU:
            torch.manual_seed(0)
            results.append(test_memory.evaluate(*test_memory.case(how), backend, DTYPES[dtype]))
torch.save(results, sys.argv[3])
"""


def test_no_scratch_memory_is_read_before_it_is_written(tmp_path: Path) -> None:
    """The C library fills what malloc gives: with small numbers, then with such that no sum of two is finite."""
    here = os.path.dirname(__file__)
    results = []
    for complement in (0x55, 0x80):  # of the byte: floats of −3e−13 and 3.4e38
        path = tmp_path / f"{complement}.pt"
        subprocess.run(
            [sys.executable, "-c", SCRATCH, here, os.path.dirname(here), path],
            env={**os.environ, "GLIBC_TUNABLES": f"glibc.malloc.perturb={complement}:glibc.malloc.tcache_count=0"},
            check=True,
        )
        results.append(torch.load(path))
    for first, second in zip(*results, strict=True):
        assert_equal(second, first)
        assert all(not x.isnan().any() for x in first.values())


@EVERY_VARIANT
@EVERY_HOW
@pytest.mark.parametrize("count", [1, 3, 16], ids="{} threads".format)
def test_repeats_are_bitwise_the_same(count: int, how: str, backend: str) -> None:
    """16 threads are more than there are pairs of batch element and key head, so several share one."""
    leaves, options = case(how)
    assert_repeats(leaves, options, count, backend)


@EVERY_VARIANT
@pytest.mark.parametrize("lq", [1, 40])
def test_repeats_of_paths_in_pieces_are_bitwise_the_same(lq: int, backend: str) -> None:
    leaves = {name: torch.randn(1, 1, n, 16) for name, n in (("query", lq), ("key", 1500), ("value", 1500))}
    assert_repeats(leaves, {}, 4, backend)


def assert_repeats(leaves: dict[str, Tensor], options: dict[str, Any], count: int, backend: str) -> None:
    with threads(count):
        expected = evaluate(leaves, options, backend, torch.float32)
        for _ in range(REPEATS - 1):
            assert_equal(evaluate(leaves, options, backend, torch.float32), expected)


# Rows and nodes that aren't seen


POISONS = pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])


@EVERY_VARIANT
@EVERY_DTYPE
@POISONS
@pytest.mark.parametrize("with_times", [False, True], ids=["unit steps", "times"])
def test_unseen_nodes_have_no_effect(with_times: bool, poison: float, dtype: str, backend: str) -> None:
    """Bitwise, in a padded batch whose unseen nodes lie inside of tiles, at their borders, and fill whole ones."""
    intervals = torch.stack([torch.tensor([16, 20]), torch.tensor([40, 41])])[:, None].repeat(1, LQ, 1)
    intervals[0, ::3], intervals[1, 5:9], intervals[1, 20] = torch.tensor([3, 9]), 7, torch.tensor([64, 70])
    seen = torch.zeros(B, LK, dtype=torch.bool)
    for b, j in torch.cartesian_prod(torch.arange(B), torch.arange(LQ)):
        seen[b, intervals[b, j, 0] : intervals[b, j, 1]] = True
    leaves, options = case("plain")
    options["intervals"] = intervals
    if with_times:
        leaves["times"] = TIMES.expand(B, LK).clone()
    expected = evaluate(leaves, options, backend, DTYPES[dtype])
    for name in ("key", "value"):
        leaves[name] = leaves[name].masked_fill(~seen[:, None, :, None], poison)
    if with_times:
        leaves["times"] = leaves["times"].masked_fill(~seen, poison)
    assert_equal(evaluate(leaves, options, backend, DTYPES[dtype]), expected)


@EVERY_VARIANT
@EVERY_DTYPE
@EVERY_HOW
@POISONS
def test_a_bad_query_stays_in_its_row(poison: float, how: str, dtype: str, backend: str) -> None:
    leaves, options = case(how)
    expected = evaluate(leaves, options, backend, DTYPES[dtype])
    leaves["query"][0, 1, 1, 0] = poison
    got = evaluate(leaves, options, backend, DTYPES[dtype])
    assert got["out"][0, 1, 1].isnan().all()
    assert got["lse"][0, 1, 1].isnan()
    for results in (got, expected):
        for name in ("out", "lse", "query"):
            results[name][0, 1, 1] = 0.0
        # Shared by the row with others: the gradients of its key head, of times and of the start node's key head.
        for name in ("key", "value"):
            results[name][0, 0] = 0.0
        for name in ("k0", "v0"):
            results.get(name, torch.zeros(1))[0] = 0.0
        results.pop("times", None)
        results.get("query_times", torch.zeros(2))[1] = 0.0
    assert_equal(got, expected)


@EVERY_VARIANT
@EVERY_DTYPE
def test_what_arrives_at_a_row_that_sees_nothing_has_no_effect(
    dtype: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves, options = case("intervals")
    empty = options["intervals"][0, :, 0] >= options["intervals"][0, :, 1]
    expected = evaluate(leaves, options, backend, DTYPES[dtype])
    backward: Callable[..., None] = torch.autograd.backward

    def poisoned(outputs: Any, gradients: list[Tensor]) -> None:
        gradients[0][:, :, empty] = torch.nan
        backward(outputs, gradients)

    monkeypatch.setattr(torch.autograd, "backward", poisoned)
    assert_equal(evaluate(leaves, options, backend, DTYPES[dtype]), expected)
