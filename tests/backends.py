"""The back ends that the tests of the reference run again with, and how near to the integral each has to come.

The truth is the reference in float64, which test_reference.py holds against the integral itself. The budget is twice
the error of the plain reference in the same dtype, three times for gradients (`FACTORS`), and where that error is
small by luck, what rounding alone explains (`_rounding`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from continuous_attention import continuous_attention
from continuous_attention.kernels import cpu

CPU = tuple(f"cpu-{variant}" for variant in cpu.runnable)
DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
# Every dtype on the best variant, float32 on the others: the rest of what they do is the same source.
CPU_IN_DTYPES = [
    (backend, dtype)
    for backend in CPU
    for dtype in ("float32", "bfloat16", "float16")
    if backend == CPU[0] or dtype == "float32"
]
# Those in Triton multiply weights in the dtype of the inputs, as all kernels on matrix cores do, and compute them to
# fewer digits where it is a half: docs/math.md §13.
WEIGHTS_IN_TRITON = {torch.float16: torch.finfo(torch.float16).eps / 2 + 6e-4, torch.float32: 2e-6}
FACTORS = {"out": 2.0, "lse": 2.0}
FACTOR_OF_GRADIENTS = 3.0


@contextmanager
def running(backend: str | None) -> Iterator[str | None]:
    """The argument `backend` for a name such as "cpu-avx2", whose variant is used inside the with block."""
    if backend is None or not backend.startswith("cpu-"):
        yield backend
        return
    with cpu.use_variant(backend.removeprefix("cpu-")):
        yield "cpu"


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute on that many threads inside the with block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def evaluate(
    leaves: dict[str, Tensor],
    how: dict[str, Any],
    backend: str | None,
    dtype: torch.dtype,
    function: Callable[..., Any] = continuous_attention,
    *,
    gradients: bool = True,
) -> dict[str, Tensor]:
    """out, lse and, if `gradients`, those of random products with both, by name and in float64.

    `leaves` are the differentiable arguments; "k0" and "v0" are the start node, and all but times are cast to `dtype`.
    """
    leaves = {name: x.detach().to(x.dtype if "times" in name else dtype).requires_grad_() for name, x in leaves.items()}
    arguments: dict[str, Any] = how | leaves
    if "k0" in leaves:
        arguments["boundary"] = arguments.pop("k0"), arguments.pop("v0")
    with running(backend) as arguments["backend"]:
        out, lse = function(**arguments, return_lse=True)
        if gradients:
            generator = torch.Generator().manual_seed(1)
            arriving = [torch.randn(x.shape, generator=generator).to(dtype).to(x.dtype) for x in (out, lse)]
            torch.autograd.backward((out, lse), [arriving[0], arriving[1].where(lse.isfinite(), 0.0)])
    grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items() if gradients}
    return {name: x.detach().double() for name, x in {"out": out, "lse": lse, **grads}.items()}


def assert_within_budget(
    leaves: dict[str, Tensor],
    how: dict[str, Any],
    backend: str,
    dtype: torch.dtype,
    function: Callable[..., Any] = continuous_attention,
    *,
    gradients: bool = True,
) -> None:
    """Hold a back end against float64, on inputs that `dtype` represents."""
    leaves = represented(leaves, dtype)
    actual = evaluate(leaves, how, backend, dtype, function, gradients=gradients)
    assert_near(
        actual, leaves, how, dtype, function, of_weights=WEIGHTS_IN_TRITON[dtype] if backend == "triton" else 0.0
    )


def represented(leaves: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The leaves in float64, rounded to what `dtype` represents; times stay as they are."""
    return {name: x if "times" in name else x.detach().to(dtype).double() for name, x in leaves.items()}


def assert_near(
    actual: dict[str, Tensor],
    leaves: dict[str, Tensor],
    how: dict[str, Any],
    dtype: torch.dtype,
    function: Callable[..., Any] = continuous_attention,
    *,
    of_weights: float = 0.0,
) -> None:
    """Hold what something computed in `dtype` from represented leaves, as `evaluate` gives it, against float64.

    `of_weights` is what the weights may be off besides rounding.
    """
    gradients = len(actual) > 2
    exact = evaluate(leaves, how, "reference", torch.float64, function, gradients=gradients)
    plain = evaluate(leaves, how, "reference", dtype, function, gradients=gradients)
    for name, wanted in exact.items():
        got, limit = actual[name], FACTORS.get(name, FACTOR_OF_GRADIENTS) * _error(plain[name], wanted)
        limit += _rounding(name, exact, leaves, how, torch.finfo(dtype).eps, of_weights)
        error = _error(got, wanted)
        assert error <= limit, (
            f"{name}: error {error:.3g}, allowed {limit:.3g}, of numbers up to {_largest(wanted):.3g}"
        )


def _rounding(
    name: str,
    exact: dict[str, Tensor],
    leaves: dict[str, Tensor],
    how: dict[str, Any],
    eps: float,
    of_weights: float,
) -> float:
    """What rounding explains: of a score in units of its size, of a weight four times, and once of the result.

    `of_weights` is what the weights are off besides.

    Gradients are sums over rows whose terms may cancel: rounding is in units of the terms, and adds up at random. A
    term is a weight (1 or less) times dO, or times the gain dO·v − dO·o + dlse, itself a sum of Dv terms; all that
    arrives is normal, 3 at most. The result's own rounding includes gradients that are float32 while the inputs are
    halves (times, a start node in float32): they are made of dO·o, and a half-precision `out` is kept in two halves.
    """
    query, key, value = list(leaves.values())[:3]
    if not query.numel() or not value.numel():
        return 0.0
    scale = abs(how.get("scale") or query.shape[-1] ** -0.5)
    scores = scale * float(query.abs().sum(-1).max() * key.abs().max())
    of_weights += torch.finfo(torch.float32).eps * (4 + scores)
    if name == "lse":
        return of_weights
    rows = query[..., 0].numel() ** 0.5
    gain = 3 * (1 + value.shape[-1] ** 0.5 * _largest(value))
    terms = {
        "out": _largest(value) if of_weights > eps / 4 else 0.0,
        "query": scale * gain * _largest(key),
        **dict.fromkeys(("key", "k0"), scale * gain * _largest(query) * rows),
        **dict.fromkeys(("value", "v0"), 3 * rows),
        **dict.fromkeys(("times", "query_times"), gain * rows),
    }
    name = {"q": "query", "k": "key", "v": "value"}.get(name, name)
    return (of_weights + eps / 2) * _largest(exact[name if name in exact else name[0]]) + of_weights * terms[name]


def _largest(x: Tensor) -> float:
    return float(x.masked_fill(x.isinf(), 0.0).abs().max()) if x.numel() else 0.0


def _error(actual: Tensor, exact: Tensor) -> float:
    """The largest difference; infinite where one of them isn't finite and the other isn't the same."""
    difference = (actual - exact).abs().masked_fill(actual == exact, 0.0)
    return float(difference.nan_to_num(nan=torch.inf).max()) if difference.numel() else 0.0
