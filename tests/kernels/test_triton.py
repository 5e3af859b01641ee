"""The GPU kernels in Triton's interpreter, which runs them on the CPU, against the reference.

It takes a millisecond for what a GPU does in a nanosecond, so there are few calls here, each with many borders: tiles
of 16 columns, which are 12 segments, blocks of 32 queries, and random intervals, because kernels know nothing else.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backends import DTYPES, assert_within_budget, evaluate
from oracle import BOUNDARY_NAMES
from torch import Tensor

from continuous_attention import continuous_attention, continuous_attention_varlen
from continuous_attention.kernels import triton

pytestmark = pytest.mark.skipif(bool(triton.reason), reason=triton.reason)
interpreter = pytest.importorskip("triton.runtime.interpreter")

EVERY_WAY = pytest.mark.parametrize(
    ("dtype", "fixed_order"),
    [("float32", False), ("float16", True)],
    ids=["float32, one kernel", "float16, two kernels"],
    indirect=["fixed_order"],
)
GQA = {"enable_gqa": True}


@pytest.fixture(autouse=True)
def _prepared_once_per_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter patches Triton's modules anew for each function that a kernel calls, half of the time in all."""
    slowly = interpreter.InterpretedFunction.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.fn.__module__.startswith("continuous_attention."):
            return function.rewrite()(*args, **kwargs)
        return slowly(function, *args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


@pytest.fixture
def fixed_order(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether gradients of queries are added up in a fixed order."""
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(False)


def tensors(
    lq: int, lk: int, dim: int = 8, value_dim: int = 6, *, group: int = 1, batch: int = 1, key_heads: int = 1
) -> dict[str, Tensor]:
    """Query, key and value."""
    shapes = {"query": (batch, key_heads * group, lq, dim), "key": (batch, key_heads, lk, dim)}
    return {name: torch.randn(shape) for name, shape in (shapes | {"value": (batch, key_heads, lk, value_dim)}).items()}


def with_boundary(leaves: dict[str, Tensor], boundary: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The leaves and the other arguments; "node" is a start node."""
    if boundary != "node":
        return leaves, {**GQA, "boundary": boundary}
    heads, dim, value_dim = leaves["key"].shape[1], leaves["key"].shape[3], leaves["value"].shape[3]
    return leaves | {"k0": torch.randn(heads, dim), "v0": torch.randn(heads, value_dim)}, dict(GQA)


def random_intervals(batch: int, lq: int, lk: int) -> Tensor:
    """Half of them begin at the first node; empty ones, single nodes, short runs, and such that end anywhere."""
    lo = torch.randint(0, lk, (batch, lq)) * (torch.rand(batch, lq) < 0.5)
    hi = torch.minimum(lo + torch.tensor([0, 1, 2, 5, lk])[torch.randint(0, 5, (batch, lq))], torch.tensor(lk))
    return torch.stack([lo, torch.maximum(hi - torch.randint(0, 4, (batch, lq)), lo)], dim=-1)


def eighths(*shape: int) -> Tensor:
    """Times whose differences are exact; some nodes share one."""
    return (torch.randint(0, 12, shape) * (torch.rand(shape) < 0.7)).cumsum(-1).double() / 8


# Results and gradients


@EVERY_WAY
@pytest.mark.parametrize("boundary", BOUNDARY_NAMES)
def test_any_intervals(boundary: str, dtype: str, fixed_order: bool) -> None:
    leaves, how = with_boundary(tensors(lq=37, lk=30), boundary)
    how |= {"intervals": random_intervals(1, 37, 30), "start_length": 0.75}
    assert_within_budget(leaves, how, "triton", DTYPES[dtype])


@EVERY_WAY
@pytest.mark.parametrize("boundary", BOUNDARY_NAMES)
def test_times_and_query_times(boundary: str, dtype: str, fixed_order: bool) -> None:
    leaves, how = with_boundary(tensors(lq=20, lk=30, batch=2), boundary)
    leaves |= {"times": eighths(2, 30), "query_times": torch.randint(-4, 150, (2, 20)).double() / 8}
    how |= {"is_causal": True, "time_window": 9.0}
    assert_within_budget(leaves, how, "triton", DTYPES[dtype])


@pytest.mark.parametrize("unit", [1e-9, 1e9], ids="{:g}".format)
def test_times_in_any_unit(unit: float) -> None:
    """Weights in half precision hold no more than 65504."""
    leaves = tensors(lq=9, lk=20) | {"times": eighths(20) * unit}
    how = {**GQA, "start_length": unit, "boundary": "half"}
    assert_within_budget(leaves, how, "triton", torch.float16)


@pytest.mark.parametrize("boundary", ["zero", "repeat", "none"])
def test_a_path_without_segments_of_length(boundary: str) -> None:
    leaves = tensors(3, 4) | {"times": torch.zeros(4).double(), "query_times": torch.tensor([0.0, 7.0, 10.0]).double()}
    how = {**GQA, "boundary": boundary, "start_length": 5.0, "is_causal": True}
    assert_within_budget(leaves, how, "triton", torch.float32)


@pytest.mark.parametrize("gap", [1e5, 1e8], ids="{:g}".format)
def test_a_gap_that_some_do_not_see(gap: float) -> None:
    """Weights in half precision of what is as short as nothing beside it."""
    leaves = tensors(6, 6) | {"times": torch.tensor([0.0, 1, 2, 3, 4, 4 + gap]).double()}
    for boundary in ("none", "zero"):
        assert_within_budget(leaves, {**GQA, "is_causal": True, "boundary": boundary}, "triton", torch.float16)


@pytest.mark.parametrize("start_length", [1e-8, 1e5], ids="{:g}".format)
def test_a_start_of_any_length(start_length: float) -> None:
    leaves = tensors(3, 14, dim=4)
    leaves["query"][:], leaves["key"][:] = 1.0, -4.0
    assert_within_budget(leaves, {**GQA, "start_length": start_length}, "triton", torch.float16)


def test_gradients_of_any_size() -> None:
    """A gradient of float16 may be below its smallest number while it is summed up, and a score large."""
    query, key, value = (torch.randn(1, 1, n, 8, dtype=torch.float16) for n in (6, 40, 40))
    results = []
    for backend, dtype in (("triton", torch.float16), ("reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (query, key, value)]
        out = continuous_attention(leaves[0], leaves[1], leaves[2], backend=backend)
        assert isinstance(out, Tensor)
        results.append(torch.autograd.grad(out, leaves, torch.full_like(out, 1e-4)))
    for got, wanted in zip(*results, strict=True):
        step = torch.finfo(torch.float16).eps * wanted.abs().max() + torch.finfo(torch.float16).smallest_normal / 1024
        assert (got - wanted).abs().max() <= 4 * step
    leaves = tensors(6, 9, dim=4)
    assert_within_budget(leaves, {**GQA, "scale": 2000.0}, "triton", torch.float32)


@pytest.mark.parametrize("sizes", [(0, 5, 1), (5, 0, 1), (3, 5, 0)], ids=str)
def test_every_gradient_of_nothing(sizes: tuple[int, int, int]) -> None:
    lq, lk, batch = sizes
    leaves, how = with_boundary(tensors(lq, lk, batch=batch), "node")
    leaves |= {"times": torch.arange(lk).double(), "query_times": torch.arange(lq).double()}
    assert_within_budget(leaves, {**how, "is_causal": True}, "triton", torch.float32)


def test_what_arrives_at_rows_without_lse_is_ignored() -> None:
    query, key, value = (torch.randn(1, 1, 3, 8, requires_grad=True) for _ in range(3))
    intervals = torch.tensor([[[0, 0], [0, 3], [1, 2]]])
    how: dict[str, Any] = {"intervals": intervals, "boundary": "none", "return_lse": True, "backend": "triton"}
    out, lse = continuous_attention(query, key, value, **how)
    arriving = torch.ones_like(out), torch.tensor([[[torch.nan, 1.0, -torch.inf]]])
    assert all(x.isfinite().all() for x in torch.autograd.grad((out, lse), (query, key, value), arriving))


def test_results_that_are_slices_of_others() -> None:
    """The backward pass of sequences that are spread over ranks is given such."""
    query, key, value = (torch.randn(1, 2, n, 8) for n in (7, 9, 9))
    intervals = torch.tensor([[[0, 9]] * 7], dtype=torch.int32)
    others = intervals, None, None, None, None, 0.3, 1.0, 0.0, "triton"
    out, _, rest, normalizer = torch.ops.continuous_attention.forward(query, key, value, *others, True)
    sliced = torch.stack([out, out], dim=3)[:, :, :, 1]
    gradient = torch.randn_like(out)
    results = [
        torch.ops.continuous_attention.backward(
            gradient, None, x, rest, normalizer, query, key, value, *others, [False, False, False]
        )
        for x in (out, sliced)
    ]
    for got, wanted in zip(*results, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("kernel", "config"),
    [("nodes", (16, 16, 4, 1)), ("nodes", (64, 32, 4, 1)), ("rows", (64, 16, 4, 1)), ("forward", (64, 64, 4, 1))],
    ids=str,
)
def test_other_blocks(kernel: str, config: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = triton.load().tuning
    monkeypatch.setattr(tuning, "pinned", {tuning.Key(kernel, 16, "float32", "short"): tuning.Config(*config)})
    assert_within_budget(tensors(48, 20), {**GQA, "is_causal": True}, "triton", torch.float32)


@pytest.mark.usefixtures("_splits")
def test_blocks_of_decode_that_hold_no_segment_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = triton.load().tuning
    monkeypatch.setattr(tuning, "pinned", {tuning.Key("split", 16, "float32", "short"): tuning.Config(16, 16, 8, 1)})
    assert_within_budget(tensors(1, 61), dict(GQA), "triton", torch.float32, gradients=False)


HOWS: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "causal, window 7": {"is_causal": True, "window": 7, "boundary": "half"},
    "window (3, 2)": {"window": (3, 2), "boundary": "none"},
    "negative scale": {"scale": -0.7},
    "scale 0": {"scale": 0.0, "boundary": "repeat"},
}


@EVERY_WAY
@pytest.mark.parametrize("how", HOWS)
def test_what_is_asked_for_in_words(how: str, dtype: str, fixed_order: bool) -> None:
    assert_within_budget(tensors(lq=34, lk=34), {**GQA, **HOWS[how]}, "triton", DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("border", [12, 24, 32])
def test_intervals_that_begin_and_end_at_a_border(border: int, dtype: str) -> None:
    """Every pair of offsets, of one path that begins there and one that ends there."""
    edges = torch.arange(border - 1, border + 2)
    lo, hi = torch.cartesian_prod(edges, edges).T
    intervals = torch.stack([torch.cat([lo, lo * 0]), torch.cat([hi + 2, hi])], dim=-1)
    assert_within_budget(
        tensors(len(intervals), border + 5), {**GQA, "intervals": intervals[None]}, "triton", DTYPES[dtype]
    )


@pytest.mark.parametrize(
    "lengths", [(1, 1), (2, 13), (32, 12), (33, 1), (64, 2), (0, 5), (5, 0)], ids="{0[0]}, {0[1]}".format
)
def test_lengths(lengths: tuple[int, int]) -> None:
    assert_within_budget(tensors(*lengths), {**GQA, "is_causal": True}, "triton", torch.float32)


@pytest.mark.parametrize(("group", "key_heads", "batch"), [(3, 1, 1), (2, 2, 2), (1, 3, 1)])
def test_groups(group: int, key_heads: int, batch: int) -> None:
    leaves, how = with_boundary(tensors(13, 14, group=group, key_heads=key_heads, batch=batch), "node")
    leaves["times"] = eighths(14)
    assert_within_budget(leaves, how, "triton", torch.float32)


@pytest.mark.parametrize("dims", [(1, 3), (16, 16), (33, 20), (20, 100)], ids="{0[0]}, {0[1]}".format)
def test_head_dims(dims: tuple[int, int]) -> None:
    for dtype in (torch.float32, torch.float16):
        assert_within_budget(tensors(5, 14, *dims), {**GQA, "is_causal": True}, "triton", dtype)


@EVERY_WAY
@pytest.mark.parametrize("steepness", [1e-3, 30.0], ids="steepness {:g}".format)
def test_every_steepness(steepness: float, dtype: str, fixed_order: bool) -> None:
    leaves = tensors(9, 27)
    leaves["query"] = leaves["query"] * steepness
    assert_within_budget(leaves, {**GQA, "is_causal": True, "window": 20}, "triton", DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("growth", [-1.0, 1.0], ids=["falling", "rising"])
def test_scores_that_outgrow_the_first_tile(growth: float, dtype: str) -> None:
    """The reference of a row is from its first nodes; the others are far above it, or far below."""
    leaves = tensors(7, 45, dim=4)
    leaves["query"][..., 0] = 6.0
    leaves["key"][..., 20:, 0] += growth * torch.linspace(1, 30, 25)
    assert_within_budget(leaves, dict(GQA), "triton", DTYPES[dtype])
    assert_within_budget(leaves, {**GQA, "is_causal": True, "boundary": "none"}, "triton", DTYPES[dtype])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_documents(causal: bool) -> None:
    lengths_q, lengths_k = [11, 1, 0, 25], [15, 1, 3, 20]
    ends = {
        f"cu_seqlens_{name}": torch.tensor([0, *lengths]).cumsum(0).int()
        for name, lengths in (("q", lengths_q), ("k", lengths_k))
    }
    leaves = tensors(sum(lengths_q), sum(lengths_k))
    leaves = {name[0]: x[0].transpose(0, 1) for name, x in leaves.items()}
    assert_within_budget(leaves, {"is_causal": causal, **ends}, "triton", torch.float32, continuous_attention_varlen)


# Few queries, many nodes


@pytest.fixture
def _splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the nodes over programs from 24 nodes on."""
    monkeypatch.setattr(triton.load(), "NODES_PER_SPLIT", 24)


DECODES: dict[str, dict[str, Any]] = {
    "one query": {"lq": 1, "lk": 61, "group": 4},
    "three queries": {"lq": 3, "lk": 70},
    "two heads and samples": {"lq": 1, "lk": 50, "batch": 2, "key_heads": 2},
}


@pytest.mark.usefixtures("_splits")
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("sizes", DECODES)
def test_decode(sizes: str, dtype: str) -> None:
    lq, lk = DECODES[sizes]["lq"], DECODES[sizes]["lk"]
    for boundary in ("zero", "half") if dtype == "float32" else ("none", "repeat"):
        leaves, how = with_boundary(tensors(**DECODES[sizes]), boundary)
        assert_forward_within_budget(leaves, {**how, "is_causal": True}, dtype)
    leaves, how = with_boundary(tensors(**DECODES[sizes]), "node")
    leaves |= {"times": eighths(lk), "query_times": torch.randint(-4, 300, (1, lq)).double()[0] / 8}
    assert_forward_within_budget(leaves, {**how, "is_causal": True, "time_window": 20.0}, dtype)
    assert_forward_within_budget(leaves, {**how, "intervals": random_intervals(1, lq, lk)}, dtype)


@pytest.mark.usefixtures("_splits")
def test_gradients_of_decode() -> None:
    leaves, how = with_boundary(tensors(2, 41), "node")
    assert_within_budget(leaves, {**how, "is_causal": True}, "triton", torch.float32)


def assert_forward_within_budget(leaves: dict[str, Tensor], how: dict[str, Any], dtype: str) -> None:
    """The same without the backward pass, which is that of any length."""
    assert_within_budget(leaves, how, "triton", DTYPES[dtype], gradients=False)


# Rows and nodes that aren't seen, memory, order


INTERVALS = torch.tensor([[0, 5], [3, 4], [20, 30], [9, 9], [22, 24]]).repeat(4, 1)[None]


@pytest.mark.parametrize("fixed_order", [False, True], ids=["one kernel", "two kernels"], indirect=True)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_unseen_nodes_have_no_effect(poison: float, fixed_order: bool) -> None:
    """Nodes 5 to 19 lie between what the queries of a block see."""
    leaves, how = tensors(20, 31, group=1), {**GQA, "intervals": INTERVALS}
    expected = evaluate(leaves, how, "triton", torch.float32)
    for name in ("key", "value"):
        leaves[name] = leaves[name].clone()
        leaves[name][:, :, 5:20] = leaves[name][:, :, 30:] = poison
    for name, x in evaluate(leaves, how, "triton", torch.float32).items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("how", [{}, {"times": eighths(20)}], ids=["unit steps", "times"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_bad_query_stays_in_its_row(poison: float, how: dict[str, Any]) -> None:
    leaves = tensors(9, 20, group=1)
    expected = evaluate(leaves, {**GQA, **how}, "triton", torch.float32)
    leaves["query"] = leaves["query"].clone()
    leaves["query"][0, 0, 4, 1] = poison
    got = evaluate(leaves, {**GQA, **how}, "triton", torch.float32)
    others = torch.arange(9) != 4
    for name in ("out", "lse", "query"):
        # A row that isn't a number makes its block run with another reference.
        torch.testing.assert_close(got[name][:, :, others], expected[name][:, :, others], rtol=1e-5, atol=1e-5)
    assert got["out"][:, :, 4].isnan().all()


@pytest.mark.parametrize("fixed_order", [False, True], ids=["one kernel", "two kernels"], indirect=True)
def test_everything_is_written(fixed_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """New tensors hold NaN, or a whole number that would be no index of anything."""

    def poisoned(x: Tensor, size: Any, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        dtype = dtype or x.dtype
        size = (size,) if isinstance(size, int) else tuple(size)
        return torch.full(size, torch.nan if dtype.is_floating_point else -(2**30), dtype=dtype)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    leaves, how = with_boundary(tensors(20, 31), "node")
    leaves |= {"times": eighths(31), "query_times": eighths(20)}
    how |= {"is_causal": True}
    for name, x in evaluate(leaves, how, "triton", torch.float32).items():
        assert not x.isnan().any(), name


@pytest.mark.parametrize("layout", ["heads behind length", "sliced rows", "reversed dims"])
def test_strides(layout: str) -> None:
    def lay(x: Tensor) -> Tensor:
        b, h, n, d = x.shape
        return {
            "heads behind length": lambda: x.transpose(1, 2).contiguous().transpose(1, 2),
            "sliced rows": lambda: x.new_full((b, h, 3 * n, d), torch.nan).index_copy_(2, torch.arange(n) * 3, x)[
                :, :, ::3
            ],
            "reversed dims": lambda: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        }[layout]()

    leaves = {name: lay(x) for name, x in tensors(14, 17, group=2).items()}
    assert_within_budget(leaves, {**GQA, "is_causal": True}, "triton", torch.float32)


def test_offsets_beyond_32_bits_take_a_kernel_of_their_own() -> None:
    launch = triton.load()
    x = torch.empty_strided((1, 1, 4096, 8), (1, 1, 8, 1), device="meta")
    config = launch.tuning.Config(16, 16, 4, 1)
    assert not launch.shape_of(x, x, x, config).wide
    far = torch.empty_strided((1, 1, 2**21, 8), (1, 1, 1024, 1), device="meta")
    assert launch.shape_of(x, far, x, config).wide


def test_numbers_of_queries_and_nodes_are_no_part_of_what_is_compiled() -> None:
    """So a length that changes by one compiles nothing."""
    launch = triton.load()
    shapes = []
    for length in (1000, 1001, 1024, 1100):
        x = torch.empty(1, 2, length, 64)
        key = launch.tuning.key_of("forward", 64, 64, x.dtype, length)
        shapes.append((key, launch.shape_of(x, x, x, launch.tuning.default(key, (9, 0)))))
    assert len(set(shapes)) == 1
    for kernel in (launch.forward_kernel, launch.nodes_kernel, launch.queries_kernel, launch.rows_kernel):
        by_length = {"LQ", "LK", "LQ_PAD", "tiles", "intervals_b", "lengths_b", "ends_b"}
        assert by_length & set(kernel.arg_names) <= set(kernel.kwargs["do_not_specialize"])


# As an operator


def test_compile_traces_the_whole_graph() -> None:
    def f(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = continuous_attention(query, key, value, is_causal=True, backend="triton")
        assert isinstance(out, Tensor)
        return out

    torch.compiler.reset()
    leaves = [torch.randn(1, 1, 5, 8, requires_grad=True) for _ in range(3)]
    results = []
    for run in (torch.compile(f, backend="aot_eager", fullgraph=True), f):
        out = run(*leaves)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_opcheck() -> None:
    query, key, value = (torch.randn(1, 1, 5, 8) for _ in range(3))
    intervals = torch.tensor([[[0, 5]] * 5], dtype=torch.int32)
    others = None, torch.randn(1, 8), torch.randn(1, 8), None, 0.3, 1.0, 0.0, "triton"
    torch.library.opcheck(torch.ops.continuous_attention.forward.default, (query, key, value, intervals, *others, True))


def test_a_second_derivative_is_refused() -> None:
    x = torch.randn(1, 1, 5, 8, requires_grad=True)
    out = continuous_attention(x, x, x, backend="triton")
    assert isinstance(out, Tensor)
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match='backend="reference"'):
        first.sum().backward()


def test_bfloat16_is_refused_in_the_interpreter() -> None:
    x = torch.randn(1, 1, 5, 8).bfloat16()
    with pytest.raises(NotImplementedError, match=r"backend='triton' .*bfloat16.*interpreter"):
        continuous_attention(x, x, x, backend="triton")


def test_tensors_on_the_cpu_are_refused_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "interpreted", False)
    x = torch.randn(1, 1, 23, 8)  # sizes that no other test has, because what runs them is remembered
    with pytest.raises(NotImplementedError, match=r"backend='triton' needs tensors on a GPU, got them on the CPU"):
        continuous_attention(x, x, x, backend="triton")


def test_triton_need_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "reason", "Triton isn't installed; pip install triton")
    x = torch.randn(1, 1, 29, 8)
    with pytest.raises(NotImplementedError, match=r"backend='triton' isn't there: Triton isn't installed"):
        continuous_attention(x, x, x, backend="triton")
    continuous_attention(x, x, x)
