"""The fused kernels as torch operators: opcheck, compilation, transforms, strides, threads, and what they refuse.

Their numbers are held elsewhere; here the reference in the same dtype is near enough to notice a wrong tensor.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from continuous_attention import continuous_attention, ops
from continuous_attention.kernels import cpu

pytestmark = [
    pytest.mark.skipif(cpu.module is None, reason=cpu.reason),
    # What torch itself deprecates inside of its transforms isn't ours to mend.
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
]

B, HQ, HKV, L, D, DV = 2, 4, 2, 9, 8, 6
TIMES = torch.linspace(0.0, 3.0, L).square()
HOWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"is_causal": True, "window": 3},
    "no start": {"boundary": "none"},
    "held": {"boundary": "half", "is_causal": True},
    "times": {"is_causal": True, "times": TIMES, "query_times": TIMES + 0.5, "time_window": 2.0},
}
EVERY_HOW = pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)


def inputs(dtype: torch.dtype = torch.float32, *, grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (B, HQ, L, D), (B, HKV, L, D), (B, HKV, L, DV)
    query, key, value = (torch.randn(shape).to(dtype).requires_grad_(grad) for shape in shapes)
    return query, key, value


def attend(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    how = {"enable_gqa": True, "backend": "cpu", **how}
    out, lse = continuous_attention(query, key, value, return_lse=True, **how)
    return out, lse


def reference(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    return attend(query, key, value, backend="reference", **how)


def gradients(f: Callable[..., tuple[Tensor, Tensor]], *leaves: Tensor) -> tuple[Tensor, ...]:
    """Out, lse, and the gradients of both together."""
    leaves = tuple(x.detach().requires_grad_() for x in leaves)
    out, lse = f(*leaves)
    loss = out.float().square().sum() + lse.masked_fill(lse.isinf(), 0.0).square().sum()
    loss.backward()
    return out.detach(), lse.detach(), *(x.new_zeros(()) if x.grad is None else x.grad for x in leaves)


def assert_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y)


# The operators


def operator_inputs(*, everything: bool) -> tuple[Any, ...]:
    intervals = torch.randint(0, L + 1, (B if everything else 1, L, 2), dtype=torch.int32).sort(-1).values
    others = None, None, None, None
    if everything:
        shapes = (1, L), (HKV, D), (HKV, DV), (B, L)
        others = tuple(torch.rand(shape).requires_grad_() for shape in shapes)
    dtype = torch.bfloat16 if everything else torch.float32
    return *inputs(dtype), intervals, *others, 0.3, 1.0, 0.5, "cpu", True


@pytest.mark.parametrize("everything", [False, True], ids=["least", "everything"])
def test_opcheck_of_both_operators(everything: bool) -> None:
    given = operator_inputs(everything=everything)
    torch.library.opcheck(torch.ops.continuous_attention.forward.default, given)
    given = tuple(x.detach() if isinstance(x, Tensor) else x for x in given)
    *given, keep = given
    out, lse, rest, normalizer = torch.ops.continuous_attention.forward(*given, keep)
    saved = out, rest, normalizer, *given
    for arriving, lengths in (((torch.randn_like(out), None), False), ((None, torch.randn_like(lse)), everything)):
        wanted = [everything, lengths, lengths]
        torch.library.opcheck(torch.ops.continuous_attention.backward.default, (*arriving, *saved, wanted))


def test_the_dispatcher_and_the_shorter_way_agree() -> None:
    query, key, value, *prepared, keep = operator_inputs(everything=True)
    leaves = [query, key, value, *(x for x in prepared[1:5])]
    results = []
    for out, lse, *_ in (
        ops.attention_of_plain(query, key, value, tuple(prepared)),
        torch.ops.continuous_attention.forward(query, key, value, *prepared, keep),
    ):
        loss = out.square().sum() + lse.masked_fill(lse.isinf(), 0.0).sum()
        results.append((out, lse, *torch.autograd.grad(loss, leaves)))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_fake_and_meta_tensors() -> None:
    query, key, value = inputs(torch.bfloat16)
    expected = attend(query, key, value)
    with FakeTensorMode() as mode:
        fake = attend(mode.from_tensor(query), mode.from_tensor(key), mode.from_tensor(value))
    meta = attend(query.to("meta"), key.to("meta"), value.to("meta"))
    for got in (fake, meta):
        for x, y in zip(got, expected, strict=True):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())


# Transforms


@pytest.mark.parametrize("how", [HOWS["plain"], HOWS["times"]], ids=["plain", "times"])
def test_compile_traces_the_whole_graph_for_all_sizes(how: dict[str, Any]) -> None:
    def f(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return attend(query, key, value, **how)

    torch.compiler.reset()
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    leaves = inputs()
    assert_same(gradients(compiled, *leaves), gradients(f, *leaves))
    if "times" not in how:
        shorter = [x.detach()[:, :, :5] for x in leaves]
        assert_same(gradients(compiled, *shorter), gradients(f, *shorter))


@pytest.mark.slow
@EVERY_HOW
def test_compile_with_inductor(how: dict[str, Any]) -> None:
    def f(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = attend(query * 2, key.transpose(1, 2).contiguous().transpose(1, 2), value, **how)
        return out + 1, lse

    torch.compiler.reset()
    leaves = inputs()
    assert_same(gradients(torch.compile(f, fullgraph=True, dynamic=True), *leaves), gradients(f, *leaves))


@pytest.mark.parametrize("reentrant", [False, True])
@EVERY_HOW
def test_checkpointing_changes_nothing(how: dict[str, Any], reentrant: bool) -> None:
    def f(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return attend(query, key, value, **how)

    def checkpointed(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = checkpoint(f, *leaves, use_reentrant=reentrant)  # pyright: ignore[reportGeneralTypeIssues]
        return out, lse

    leaves = inputs()
    for x, y in zip(gradients(checkpointed, *leaves), gradients(f, *leaves), strict=True):
        assert torch.equal(x, y)


def test_autocast_runs_in_half_precision() -> None:
    query, key, value = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(attend, query, key, value)
    halves = (x.detach().bfloat16() for x in (query, key, value))
    expected = gradients(attend, *halves)
    assert [x.dtype for x in got] == [torch.bfloat16, torch.float32, torch.float32, torch.float32, torch.float32]
    for x, y in zip(got, expected, strict=True):
        assert torch.equal(x, y.to(x.dtype))


def test_a_second_derivative_is_refused_and_the_first_isnt() -> None:
    query, key, value = inputs()
    out, _ = attend(query, key, value)
    (first,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    assert torch.equal(first, torch.autograd.grad(attend(query, key, value)[0].square().sum(), query)[0])
    with pytest.raises(NotImplementedError, match='backend="reference"'):
        first.sum().backward()


def test_torch_func_takes_the_reference() -> None:
    query, key, value = inputs(grad=False)

    def loss(query: Tensor, backend: str | None = None) -> Tensor:
        return attend(query, key, value, backend=backend)[0].square().sum()

    leaf = query.clone().requires_grad_()
    loss(leaf, "reference").backward()
    torch.testing.assert_close(torch.func.grad(loss)(query), leaf.grad)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        torch.func.grad(loss)(query, "cpu")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_remembered_between_calls_serves_every_mode(mode: Callable[[], Any]) -> None:
    # A length that no other test has, so that the first call is made in this mode.
    length = 23 if mode is torch.no_grad else 29
    x = torch.randn(1, 2, length, D, requires_grad=True)
    with mode():
        silent, _ = attend(x, x, x)
    out, _ = attend(x, x, x)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(out, silent)


# Strides, gradients that are wanted, sizes


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed heads": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "transposed dims": lambda x: x.mT.contiguous().mT,
    "every second column": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "every second row": lambda x: x.repeat_interleave(2, dim=2)[:, :, ::2],
    "batch expanded": lambda x: x[:1].expand_as(x),
    "heads expanded": lambda x: x[:, :1].expand_as(x),
    "rows expanded": lambda x: x[:, :, :1].expand_as(x),
    "all expanded": lambda x: x[:1, :1, :1, :1].expand_as(x),
    "offset": lambda x: torch.cat([x.new_zeros(3), x.flatten()])[3:].view_as(x),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_nothing(layout: str) -> None:
    lay = LAYOUTS[layout]
    strided = [lay(x) for x in inputs(grad=False)]
    dense = [x.contiguous() for x in strided]
    ways = torch.randn(B, HQ, L, DV), torch.randn(B, HQ, L)
    results = []
    for leaves, (out_gradient, lse_gradient) in (
        (strided, [lay(ways[0]), ways[1].mT.contiguous().mT]),
        (dense, [lay(ways[0]).contiguous(), ways[1]]),
    ):
        query, key, value = leaves = [x.detach().requires_grad_() for x in leaves]
        outputs = attend(query, key, value, is_causal=True)
        results.append((*outputs, *torch.autograd.grad(outputs, leaves, [out_gradient, lse_gradient])))
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("wanted", range(7))
def test_each_gradient_alone(wanted: int) -> None:
    start = torch.randn(HKV, D), torch.randn(HKV, DV)
    tensors = [*inputs(grad=False), *start, TIMES.clone(), TIMES + 0.5]

    def call(tensors: list[Tensor], backend: str) -> Tensor:
        query, key, value, k0, v0, times, query_times = tensors
        how: dict[str, Any] = {"boundary": (k0, v0), "times": times, "query_times": query_times, "is_causal": True}
        out, lse = attend(query, key, value, backend=backend, **how)
        return out.square().sum() + lse.sum()

    alone = [x.clone().requires_grad_(i == wanted) for i, x in enumerate(tensors)]
    call(alone, "cpu").backward()
    together = [x.clone().requires_grad_() for x in tensors]
    call(together, "reference").backward()
    assert [x.grad is not None for x in alone] == [i == wanted for i in range(7)]
    torch.testing.assert_close(alone[wanted].grad, together[wanted].grad, rtol=1e-4, atol=1e-4)


def test_one_gradient_arrives_without_the_other() -> None:
    leaves = inputs()
    for output in (0, 1):
        got = torch.autograd.grad(attend(*leaves)[output].sum(), leaves, allow_unused=True)
        expected = torch.autograd.grad(reference(*leaves)[output].sum(), leaves, allow_unused=True)
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(torch.zeros(()) if x is None else x, torch.zeros_like(x) if y is None else y)


@pytest.mark.parametrize("sizes", [(0, L, L), (B, 0, L), (B, L, 0), (B, 0, 0)], ids=str)
def test_empty_inputs(sizes: tuple[int, int, int]) -> None:
    batch, lq, lk = sizes
    shapes = (batch, HQ, lq, D), (batch, HKV, lk, D), (batch, HKV, lk, DV)
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    assert_same(gradients(attend, *leaves), gradients(reference, *leaves))


@pytest.mark.parametrize("start_length", [0.0, 1e-60])
def test_a_start_node_without_length_gets_no_gradient(start_length: float) -> None:
    start = torch.randn(HKV, D, requires_grad=True), torch.randn(HKV, DV, requires_grad=True)
    leaves = inputs()
    out, lse = attend(*leaves, boundary=start, start_length=start_length)
    assert_same((out, lse), attend(*leaves, boundary="none"))
    out.sum().backward()
    assert all(x.grad is None or not x.grad.any() for x in start)


def test_a_mask_expanded_over_heads_is_an_interval() -> None:
    mask = (torch.arange(L) < 5).expand(B, HQ, L, L)
    leaves = inputs()
    assert_same(attend(*leaves, attn_mask=mask), reference(*leaves, attn_mask=mask))


# Threads


def test_several_python_threads_at_once() -> None:
    """Each result is bitwise that of a call alone."""
    cases = [(inputs(), how) for how in HOWS.values() for _ in range(4)]

    def run(case: tuple[tuple[Tensor, ...], dict[str, Any]]) -> tuple[Tensor, ...]:
        leaves, how = case
        return gradients(partial(attend, **how), *leaves)

    alone = [run(case) for case in cases]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, cases))
    for results in zip(alone, together, strict=True):
        for x, y in zip(*results, strict=True):
            assert torch.equal(x, y)


def test_the_number_of_threads_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    module = cpu.module

    class Spy:
        @staticmethod
        def forward(problem: tuple[Any, ...], *addresses: int) -> None:
            given.append(problem[-1])
            assert module is not None
            module.forward(problem, *addresses)

    monkeypatch.setattr(cpu, "module", Spy)
    before = torch.get_num_threads()
    try:
        for count in (2, 3, 1):
            torch.set_num_threads(count)
            attend(*inputs(grad=False))
    finally:
        torch.set_num_threads(before)
    assert given == [2, 3, 1]


def test_views_whose_memory_is_not_what_they_stand_for() -> None:
    query, key, value = (x.detach() for x in inputs(torch.float32))
    run = partial(continuous_attention, enable_gqa=True, backend="cpu")
    negative, wanted = (
        run(torch.ops.aten._neg_view(query), key, torch.ops.aten._neg_view(value)),
        run(-query, key, -value),
    )
    torch.testing.assert_close(negative, wanted, rtol=0, atol=0)
    query.requires_grad_()
    out = run(query, key, value)
    assert isinstance(out, Tensor)
    gradient = torch.randn_like(out)
    plus, minus, none = (
        torch.autograd.grad(out, query, x, retain_graph=True)[0]
        for x in (
            gradient,
            torch.ops.aten._neg_view(gradient),
            torch.ops.aten._efficientzerotensor(out.shape),
        )
    )
    assert torch.equal(plus, -minus)
    assert not none.any()


@pytest.mark.parametrize("nodes", [3, 300])
def test_an_infinite_score_is_not_a_number(nodes: int) -> None:
    query, key, value = torch.ones(1, 1, 1, D), torch.randn(1, 1, nodes, D), torch.randn(1, 1, nodes, DV)
    key[0, 0, 1, 0] = float("inf")
    out = continuous_attention(query, key, value, backend="cpu")
    assert isinstance(out, Tensor)
    assert out.isnan().all()


def test_more_nodes_than_the_kernels_count() -> None:
    query, node = torch.randn(1, 1, 1, D), torch.randn(1, 1, 1, D).expand(1, 1, 2**31, D)
    with pytest.raises(NotImplementedError, match="counts nodes up to"):
        continuous_attention(query, node, node, is_causal=True, window=3, backend="cpu")
