"""What must hold for any path: refinement, additivity, scaling of time, averaging over equal keys, causality.

The paths have slopes from 1e-6 to 300 and random, equal, repeated or wildly different keys. The reference runs in
float64, the kernels in float32.
"""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from backends import CPU, running
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from continuous_attention import continuous_attention, merge

QUERIES, DIM, VALUE_DIM = 3, 3, 2
START_LENGTH = 0.75
PATTERNS = ("random", "equal", "repeated", "alternating")
ENGINES = ("exact", "trapezoid", "rectangle", "taylor", *CPU)  # rules of the reference, and kernels
EXACT_ENGINES = pytest.mark.parametrize("engine", ["exact", *CPU])
EVERY_ENGINE = pytest.mark.parametrize("engine", ENGINES)
BOUNDARIES = ("zero", "node", "repeat", "half", "none")


@dataclass
class Path:
    """A random path, and queries that see all of it unless `intervals` say otherwise."""

    query: Tensor
    key: Tensor
    value: Tensor
    times: Tensor
    start: tuple[Tensor, Tensor]
    scale: float
    lse_tolerance: float
    engine: str = "exact"

    def compute_with(self, engine: str) -> None:
        """The kernels round in float32; moments are within 2e-6 then."""
        self.engine = engine
        if engine in CPU:
            self.query, self.key, self.value = self.query.float(), self.key.float(), self.value.float()
            self.start = self.start[0].float(), self.start[1].float()
            ratio = torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
            self.lse_tolerance = (self.lse_tolerance - 2e-13) * ratio + 4e-6

    def attend(self, boundary: str | tuple[Tensor, Tensor] = "none", **how: Any) -> tuple[Tensor, Tensor]:
        arguments: dict[str, Any] = {"times": self.times, "start_length": START_LENGTH, **how}
        named = self.engine if self.engine in CPU else "reference"
        with running(named) as backend:
            return continuous_attention(
                self.query,
                self.key,
                self.value,
                scale=self.scale,
                boundary=self.start if boundary == "node" else boundary,
                return_lse=True,
                rule="exact" if self.engine in CPU else self.engine,
                backend=backend,
                **arguments,
            )  # pyright: ignore[reportReturnType]

    def nodes(self, lo: int, hi: int) -> Tensor:
        """The intervals that let every query see [lo, hi)."""
        return torch.tensor([lo, hi]).expand(1, self.query.shape[2], 2)

    def assert_same(self, actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
        out_tolerance = 2 * self.lse_tolerance * float(self.value.abs().max())
        torch.testing.assert_close(actual[0].double(), expected[0].double(), rtol=0, atol=out_tolerance)
        torch.testing.assert_close(actual[1].double(), expected[1].double(), rtol=0, atol=self.lse_tolerance)


@st.composite
def paths(draw: st.DrawFn, min_nodes: int = 2, patterns: tuple[str, ...] = PATTERNS, queries: int = QUERIES) -> Path:
    """A path whose largest slope, the one to the start node included, is drawn from 1e-6 to 300.

    Times are sixteenths, so that differences are exact; nodes may share a time, but not all of them do.
    """
    nodes = draw(st.integers(min_nodes, 6), label="nodes")
    pattern = draw(st.sampled_from(patterns), label="pattern of the keys")
    steepness = 10 ** draw(st.floats(-6, math.log10(300)), label="log10 of the steepest slope")
    steps = draw(st.lists(st.integers(0, 40), min_size=nodes, max_size=nodes).filter(lambda s: sum(s[1:]) > 0))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6), label="seed"))

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    query, key, value = randn(1, 2, queries, DIM), randn(1, 2, nodes, DIM), randn(1, 2, nodes, VALUE_DIM)
    start = randn(2, DIM), randn(2, VALUE_DIM)
    if pattern == "equal":
        key = key[:, :, :1].expand_as(key)
    elif pattern == "repeated":
        key = key[:, :, torch.arange(nodes) // 2]
    elif pattern == "alternating":
        key = key[:, :, :1] * (-1.0) ** torch.arange(nodes)[:, None]
    scores = query @ torch.cat([torch.zeros_like(key[:, :, :1]), start[0][None, :, None], key], dim=2).mT
    scale = steepness / float(scores.diff(dim=-1).abs().max())
    # A dot product of D terms, its scaling and an interpolated key are off by (D + 3) eps of Σ |q k|; moments by 1e-13.
    largest = scale * float((query.abs() @ torch.cat([start[0][None, :, None], key], dim=2).abs().mT).max())
    lse_tolerance = 2 * ((DIM + 3) * torch.finfo(torch.float64).eps * largest + 1e-13)
    times = torch.tensor(steps, dtype=torch.float64).cumsum(0) / 16
    return Path(query, key, value, times, start, scale, lse_tolerance)


def insert(x: Tensor, node: int, between: Tensor) -> Tensor:
    """Insert `between` (…, 1, D) before the node."""
    return torch.cat([x[..., :node, :], between, x[..., node:, :]], dim=-2)


@given(path=paths(), boundary=st.sampled_from(BOUNDARIES), data=st.data())
@EXACT_ENGINES
def test_refinement_inside(engine: str, path: Path, boundary: str, data: st.DataObject) -> None:
    """A node inserted on a segment changes nothing."""
    path.compute_with(engine)
    expected = path.attend(boundary)
    node = data.draw(st.integers(1, len(path.times) - 1), label="segment")
    s = data.draw(st.integers(0, 8), label="eighths") / 8
    for name in ("key", "value"):
        x = getattr(path, name)
        setattr(path, name, insert(x, node, (1 - s) * x[:, :, node - 1 : node] + s * x[:, :, node : node + 1]))
    path.times = insert(
        path.times[:, None], node, (1 - s) * path.times[node - 1 : node, None] + s * path.times[node, None, None]
    )[:, 0]
    path.assert_same(path.attend(boundary), expected)


@given(path=paths(), s=st.sampled_from([0.0, 0.25, 0.5, 1.0]), boundary=st.sampled_from(["zero", "node", "repeat"]))
@EXACT_ENGINES
def test_refinement_of_the_start(engine: str, path: Path, s: float, boundary: str) -> None:
    """A node inserted on the start segment, which that shortens, changes nothing."""
    path.compute_with(engine)
    expected = path.attend(boundary)
    first_key, first_value = path.key[:, :, :1], path.value[:, :, :1]
    k0, v0 = (x[None, :, None] for x in path.start)
    if boundary == "zero":
        k0, v0 = torch.zeros_like(k0), torch.zeros_like(v0)
    if boundary == "repeat":
        k0, v0 = first_key, first_value
    path.key = insert(path.key, 0, (1 - s) * k0 + s * first_key)
    path.value = insert(path.value, 0, (1 - s) * v0 + s * first_value)
    path.times = torch.cat([path.times[:1] - (1 - s) * START_LENGTH, path.times])
    path.assert_same(path.attend(boundary, start_length=s * START_LENGTH), expected)


@given(path=paths(min_nodes=3), boundary=st.sampled_from(["zero", "node", "repeat", "none"]), data=st.data())
@pytest.mark.parametrize("engine", ["exact", "trapezoid", *CPU])
def test_additivity(engine: str, path: Path, boundary: str, data: st.DataObject) -> None:
    """Adjacent stretches that share one node merge into the whole, in any grouping."""
    path.compute_with(engine)
    end = len(path.times)
    first, second = sorted(data.draw(st.integers(0, end - 1), label="cut") for _ in range(2))
    a = path.attend(boundary, intervals=path.nodes(0, first + 1))
    b = path.attend("none", intervals=path.nodes(first, second + 1))
    c = path.attend("none", intervals=path.nodes(second, end))
    whole = path.attend(boundary)
    path.assert_same(merge(*merge(*a, *b), *c), whole)
    path.assert_same(merge(*a, *merge(*b, *c)), whole)


@given(path=paths(), boundary=st.sampled_from(BOUNDARIES), shift=st.integers(-(10**6), 10**6))
@EVERY_ENGINE
def test_times_enter_through_differences(engine: str, path: Path, boundary: str, shift: int) -> None:
    path.compute_with(engine)
    expected = path.attend(boundary)
    path.times = path.times + shift
    for actual, wanted in zip(path.attend(boundary), expected, strict=True):
        assert torch.equal(actual, wanted)


@given(path=paths(), boundary=st.sampled_from(BOUNDARIES), factor=st.floats(1e-3, 1e3))
@EVERY_ENGINE
def test_scaling_all_lengths_shifts_lse(engine: str, path: Path, boundary: str, factor: float) -> None:
    path.compute_with(engine)
    out, lse = path.attend(boundary)
    path.times = path.times * factor
    # A scaled time is rounded: the relative error of a length is that of the last time over the length.
    path.lse_tolerance += torch.finfo(path.query.dtype).eps * float(path.times[-1] / path.times.diff().amax()) * 4
    path.assert_same(path.attend(boundary, start_length=factor * START_LENGTH), (out, lse + math.log(factor)))


@given(path=paths(), boundary=st.sampled_from(BOUNDARIES))
@EVERY_ENGINE
def test_unit_steps_are_the_default(engine: str, path: Path, boundary: str) -> None:
    path.compute_with(engine)
    unit = torch.arange(len(path.times), dtype=torch.float64)
    path.assert_same(path.attend(boundary, times=unit), path.attend(boundary, times=None))


@given(path=paths(patterns=("equal",)), boundary=st.sampled_from(["node", "repeat", "half", "none"]))
@pytest.mark.parametrize("engine", ["exact", "trapezoid", "taylor", *CPU])
def test_equal_keys_average_by_trapezoid_weights(engine: str, path: Path, boundary: str) -> None:
    """The start node has the same key as the others here."""
    path.compute_with(engine)
    v0 = path.start[1]
    path.start = path.key[0, :, 0], v0
    lengths = path.times.diff()
    weights = torch.nn.functional.pad(lengths, (1, 0)) / 2 + torch.nn.functional.pad(lengths, (0, 1)) / 2
    values = path.value
    if boundary == "repeat":
        weights[0] += START_LENGTH
    elif boundary == "half":
        weights[[0, -1]] += START_LENGTH / 2
    elif boundary == "node":
        weights = torch.cat([torch.tensor([START_LENGTH / 2], dtype=torch.float64), weights])
        weights[1] += START_LENGTH / 2
        values = insert(values, 0, v0[None, :, None])
    average = (weights[:, None] * values).sum(-2, keepdim=True) / weights.sum()
    score = path.scale * (path.query.double() * path.key[:, :, :1]).sum(-1)
    expected = average.expand(-1, -1, QUERIES, -1), score + weights.sum().log()
    path.assert_same(path.attend(boundary), expected)


@given(path=paths(min_nodes=3, queries=3), boundary=st.sampled_from(BOUNDARIES))
@EVERY_ENGINE
def test_the_future_has_no_influence(engine: str, path: Path, boundary: str) -> None:
    """∂o_t/∂k_{t+1} = 0, and for values and times too: exactly, and other future nodes leave o_t bitwise as it is."""
    path.compute_with(engine)
    future = {name: getattr(path, name).clone().requires_grad_() for name in ("key", "value", "times")}
    for name, x in future.items():
        setattr(path, name, x)
    out, lse = path.attend(boundary, is_causal=True)
    nodes = len(path.times)
    for t in range(3):
        position = nodes - 3 + t
        finite = lse[..., t].masked_fill(lse[..., t].isinf(), 0.0)
        grads = torch.autograd.grad(out[..., t, :].sum() + finite.sum(), tuple(future.values()), retain_graph=True)
        for name, grad in zip(future, grads, strict=True):
            after = grad[position + 1 :] if name == "times" else grad[:, :, position + 1 :]
            assert not after.any(), name
    path.key, path.value, path.times = (x.detach().clone() for x in future.values())
    path.key[:, :, -1], path.value[:, :, -1] = 100 * torch.randn(DIM), torch.randn(VALUE_DIM)
    path.times[-1] += 5
    changed_out, changed_lse = path.attend(boundary, is_causal=True)
    assert torch.equal(changed_out[..., :-1, :], out[..., :-1, :])
    assert torch.equal(changed_lse[..., :-1], lse[..., :-1])
