"""`simplify` against plain Python and numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from continuous_attention import Path, continuous_attention, simplify

EPS = torch.finfo(torch.float64).eps
# Two float64 sums over the same path: scores of size 20 at most, lengths and weights off by the scores' error.
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 2048 * EPS}


def says(raised: pytest.ExceptionInfo, error: type[Exception], parts: list[str]) -> None:
    assert type(raised.value) is error
    missing = [part for part in parts if part not in str(raised.value)]
    assert not missing, f"{raised.value} doesn't say {missing}"


def polyline(vertices: int, heads: int, dim: int, *, seed: int = 0, pieces: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Corners (heads, vertices, dim) of whole numbers, the same with every line in pieces, and the times of these.

    Lines are 8 or 16 long and pieces a power of two, so that all of it is exact.
    """
    generator = torch.Generator().manual_seed(seed)
    corners = torch.randint(-8, 9, (heads, vertices, dim), generator=generator).double()
    at = (8 * torch.randint(1, 3, (vertices,), generator=generator)).cumsum(0).double()
    return corners, *refined(corners, at, pieces)


def refined(corners: Tensor, at: Tensor, pieces: int = 8) -> tuple[Tensor, Tensor]:
    s = torch.arange(pieces).double()[:, None] / pieces
    inner = [corners[:, i : i + 1] * (1 - s) + corners[:, i + 1 : i + 2] * s for i in range(corners.shape[1] - 1)]
    times = [at[i] * (1 - s[:, 0]) + at[i + 1] * s[:, 0] for i in range(len(at) - 1)]
    return torch.cat([*inner, corners[:, -1:]], dim=1), torch.cat([*times, at[-1:]])


def wiggly(length: int, *, batch: int = 1, heads: int = 2, dim: int = 3, seed: int = 0) -> Tensor:
    """Random walks (batch, heads, length, dim) that were smoothed a little."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randn(batch, heads, length + 5, dim, dtype=torch.float64, generator=generator)
    return steps.unfold(2, 5, 1).mean(-1).cumsum(2)[:, :, :length]


def waves(times: Tensor, *, batch: int = 1, heads: int = 2, dim: int = 3, seed: int = 0) -> Tensor:
    """Smooth curves (batch, heads, L, dim), of periods from 10 to 60."""
    generator = torch.Generator().manual_seed(seed)
    speed, phase = torch.rand(2, batch, heads, 1, dim, dtype=torch.float64, generator=generator)
    return 2 * torch.sin((0.1 + 0.5 * speed) * times.double()[:, None] + 6 * phase)


def uneven(length: int, *, seed: int = 0) -> Tensor:
    return (torch.rand(length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.1).cumsum(0)


def nodes_of(path: Path, times: Tensor, row: int = 0) -> list[int]:
    """Which nodes stayed, found again by their times, which differ."""
    return np.searchsorted(times.detach().numpy(), path.times[row, path.present[row]].detach().numpy()).tolist()


def excess(z: Tensor, times: Tensor, kept: list[int], tolerance: float) -> float:
    """How far beyond the tolerance nodes (heads, L, D) are from the path through the kept ones; numpy."""
    tau = times.numpy()
    line = np.stack(
        [np.stack([np.interp(tau, tau[kept], x[kept, d]) for d in range(x.shape[1])], -1) for x in z.numpy()]
    )
    return float(np.linalg.norm(z.numpy() - line, axis=-1).max()) - tolerance


def peucker(z: list[tuple[np.ndarray, float]], tau: np.ndarray, first: int, last: int) -> list[int]:
    """The nodes from first to last that stay, as Ramer, Douglas and Peucker say it: recursively."""
    worst, where = 1.0, -1
    for i in range(first + 1, last):
        s = (tau[i] - tau[first]) / (tau[last] - tau[first])
        far = max(
            float(np.linalg.norm(x[i] - (1 - s) * x[first] - s * x[last])) / limit for nodes, limit in z for x in nodes
        )
        if far > worst:
            worst, where = far, i
    if where < 0:
        return [first, last]
    return [*peucker(z, tau, first, where)[:-1], *peucker(z, tau, where, last)]


@pytest.mark.parametrize("tolerance", [0.05, 0.5, 3.0, (0.2, 1.0), (2.0, 0.1)], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_nodes_are_those_of_ramer_douglas_and_peucker(seed: int, tolerance: float | tuple[float, float]) -> None:
    key, value, times = wiggly(60, seed=seed), wiggly(60, dim=2, seed=seed + 10), uneven(60, seed=seed)
    path = simplify(key, value, times, tolerance)
    of_key, of_value = tolerance if isinstance(tolerance, tuple) else (tolerance, tolerance)
    kept = peucker([(key[0].numpy(), of_key), (value[0].numpy(), of_value)], times.numpy(), 0, 59)
    assert nodes_of(path, times) == kept
    assert path.node_count.tolist() == [len(kept)]
    assert torch.equal(path.key, key[:, :, kept])
    assert torch.equal(path.value, value[:, :, kept])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("times_dtype", [torch.float64, torch.float32], ids=str)
def test_every_dropped_node_is_near_the_path(times_dtype: torch.dtype, dtype: torch.dtype) -> None:
    times = uneven(500).to(times_dtype)
    key, value = waves(times).to(dtype), waves(times, dim=2, seed=1).to(dtype)
    path = simplify(key, value, times, (0.3, 0.5))
    assert path.key.dtype == dtype
    assert path.times.dtype == times_dtype
    kept = nodes_of(path, times)
    assert 10 < len(kept) < 250
    for z, tolerance in ((key, 0.3), (value, 0.5)):
        rounding = 16 * EPS * float(z.abs().max())  # of two interpolations
        assert excess(z[0].double(), times.double(), kept, tolerance) <= rounding


@pytest.mark.parametrize("tolerance", [0.0, 0.001, (0.0, 0.5)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_refined_polylines_give_back_their_corners(seed: int, tolerance: float | tuple[float, float]) -> None:
    corners, nodes, times = polyline(9, 2, 5, seed=seed)
    key, value = nodes[None, ..., :3], nodes[None, ..., 3:]
    path = simplify(key, value, times, tolerance)
    assert torch.equal(path.key, corners[None, ..., :3])
    assert torch.equal(path.value, corners[None, ..., 3:])
    query = torch.randn(1, 2, 5, 3, dtype=torch.float64) / 8
    for boundary in ("none", "zero", "repeat", "half"):
        how: dict[str, Any] = {"boundary": boundary, "return_lse": True}
        found = continuous_attention(query, path.key, path.value, path.mask, times=path.times, **how)
        for x, wanted in zip(found, continuous_attention(query, key, value, times=times, **how), strict=True):
            torch.testing.assert_close(x, wanted, **CLOSE)


@pytest.mark.parametrize("boundary", ["none", "zero", "repeat", "half"])
@pytest.mark.parametrize("tolerance", [0.02, 0.2])
def test_the_output_moves_no_more_than_promised(tolerance: float, boundary: str) -> None:
    times = uneven(200) / 4
    key, value = waves(times, batch=2), waves(times, batch=2, dim=2, seed=1)
    query = torch.randn(2, 2, 16, 3, dtype=torch.float64)
    path = simplify(key, value, times, tolerance)
    assert path.key.shape[2] < 150
    whole = continuous_attention(query, key, value, times=times, boundary=boundary)
    fewer = continuous_attention(query, path.key, path.value, path.mask, times=path.times, boundary=boundary)
    assert isinstance(whole, Tensor)
    assert isinstance(fewer, Tensor)
    bounded = torch.cat([value, torch.zeros_like(value[:, :, :1])], dim=2) if boundary == "zero" else value
    diameter = torch.cdist(bounded, bounded).amax((-1, -2))[..., None]
    epsilon = 3**-0.5 * query.norm(dim=-1) * tolerance
    limit = tolerance + torch.expm1(2 * epsilon) * diameter
    moved = (whole - fewer).norm(dim=-1)
    assert (moved <= limit).all()
    assert moved.max() > 0


def test_rows_with_padding_equal_rows_alone() -> None:
    key, value = wiggly(40, batch=4), wiggly(40, batch=4, dim=2, seed=1)
    times = torch.stack([uneven(40, seed=i) for i in range(4)])
    present = torch.zeros(4, 40, dtype=torch.bool)
    runs = [(0, 40), (0, 25), (12, 40), (7, 8)]
    for row, (first, end) in enumerate(runs):
        present[row, first:end] = True
        for z in (key, value):
            z[row].masked_fill_(~present[row, :, None], torch.nan)
        times[row].masked_fill_(~present[row], torch.nan)
    path = simplify(key, value, times, 0.4, present=present)
    assert path.key.shape[2] == path.node_count.max()
    for row, (first, end) in enumerate(runs):
        here = slice(row, row + 1)
        of_key, of_value, at = key[here, :, first:end], value[here, :, first:end], times[here, first:end]
        alone = simplify(of_key, of_value, at, 0.4)
        count = alone.key.shape[2]
        assert path.present[row].tolist() == [True] * count + [False] * (path.key.shape[2] - count)
        assert torch.equal(path.key[row, :, :count], alone.key[0])
        assert torch.equal(path.value[row, :, :count], alone.value[0])
        assert torch.equal(path.times[row, :count], alone.times[0])
        # Padding is zeros at the last time.
        assert not path.key[row, :, count:].any()
        assert not path.value[row, :, count:].any()
        assert (path.times[row, count:] == alone.times[0, -1]).all()


def test_a_row_without_nodes() -> None:
    present = torch.tensor([[True] * 5, [False] * 5])
    path = simplify(wiggly(5, batch=2), wiggly(5, batch=2), uneven(5), 0.0, present=present)
    assert path.node_count.tolist() == [5, 0]
    assert path.times.isfinite().all()
    out = continuous_attention(torch.randn(2, 2, 1, 3).double(), path.key, path.value, path.mask, times=path.times)
    assert isinstance(out, Tensor)
    assert not out[1].any()


def test_unit_steps_are_the_default() -> None:
    key, value = wiggly(40, batch=2), wiggly(40, batch=2, seed=1)
    found, expected = (simplify(key, value, times, 0.5) for times in (None, torch.arange(40.0).double()))
    for x, wanted in zip(found, expected, strict=True):
        assert torch.equal(x, wanted)


@pytest.mark.parametrize("lk", [0, 1, 2])
def test_few_nodes_stay(lk: int) -> None:
    key, value = wiggly(lk, batch=2), wiggly(lk, batch=2, seed=1)
    path = simplify(key, value, None, 100.0)
    assert path.node_count.tolist() == [lk, lk]
    assert torch.equal(path.key, key)
    assert torch.equal(path.value, value)


def test_no_batch_element() -> None:
    path = simplify(torch.zeros(0, 2, 5, 3), torch.zeros(0, 2, 5, 3), None, 0.0)
    assert path.node_count.shape == (0,)


def test_a_straight_line_is_its_two_ends() -> None:
    nodes = torch.arange(33).double()[None, None, :, None] * torch.tensor([1.0, -2.0, 0.5])
    path = simplify(nodes, nodes, None, 0.0)  # 32 steps, so that interpolation is exact
    assert path.times.tolist() == [[0.0, 32.0]]
    far = simplify(wiggly(50), wiggly(50), None, 1e6)
    assert far.times.tolist() == [[0.0, 49.0]]


def test_between_nodes_at_one_time_there_is_no_path() -> None:
    times = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    key, value = wiggly(7), wiggly(7, seed=1)
    path = simplify(key, value, times, 0.0)
    assert path.times.tolist() == [[0.0, 1.0, 1.0, 2.0, 3.0]]
    assert torch.equal(path.key, key[:, :, [0, 1, 4, 5, 6]])
    query = torch.randn(1, 2, 4, 3, dtype=torch.float64)
    found = continuous_attention(query, path.key, path.value, times=path.times)
    expected = continuous_attention(query, key, value, times=times)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_all_at_one_time() -> None:
    key, value = wiggly(6), wiggly(6, seed=1)
    path = simplify(key, value, torch.ones(6), 0.0)
    assert torch.equal(path.key, key[:, :, [0, -1]])
    assert torch.equal(path.value, value[:, :, [0, -1]])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", ["key", "value"])
def test_what_isnt_finite_stays_with_its_neighbours(place: str, bad: float) -> None:
    line = torch.arange(30).double()[None, None, :, None].repeat(1, 2, 1, 2)
    spoilt = line.clone()
    spoilt[0, 1, 12, 1] = spoilt[0, 0, 14, 0] = bad
    key, value = (spoilt, line) if place == "key" else (line, spoilt)
    path = simplify(key, value, None, 0.1)
    assert path.times.tolist() == [[0.0, 11.0, 12.0, 13.0, 14.0, 15.0, 29.0]]


@pytest.mark.parametrize("place", ["key", "value"])
def test_one_head_is_enough_to_keep_a_node(place: str) -> None:
    line = torch.arange(9).double()[None, None, :, None].repeat(1, 3, 1, 2)
    bent = line.clone()
    bent[0, 1, 4:, 1] = 4.0
    key, value = (bent, line) if place == "key" else (line, bent)
    path = simplify(key, value, None, 0.1)
    assert path.times.tolist() == [[0.0, 4.0, 8.0]]
    loose = (3.0, 0.0) if place == "key" else (0.0, 3.0)  # the corner is 2 from the line
    assert simplify(key, value, None, loose).times.tolist() == [[0.0, 8.0]]


def test_a_distance_that_equals_the_tolerance_is_allowed() -> None:
    nodes = torch.tensor([0.0, 0.5, 0.0])[None, None, :, None]
    assert simplify(nodes, nodes, None, 0.5).node_count.tolist() == [2]
    assert simplify(nodes, nodes, None, float(np.nextafter(0.5, 0.0))).node_count.tolist() == [3]


def test_gradients_flow_to_what_stayed() -> None:
    leaves = [wiggly(40), wiggly(40, seed=1), uneven(40)]
    key, value, times = (x.clone().requires_grad_() for x in leaves)
    query = torch.randn(1, 2, 4, 3, dtype=torch.float64)
    path = simplify(key, value, times, 0.5)
    kept = nodes_of(path, times)
    assert len(kept) < 30
    out = continuous_attention(query, path.key, path.value, path.mask, times=path.times)
    assert isinstance(out, Tensor)
    found = torch.autograd.grad(out.square().sum(), (key, value, times))
    fewer = [x.clone().requires_grad_() for x in (leaves[0][:, :, kept], leaves[1][:, :, kept], leaves[2][kept])]
    out = continuous_attention(query, fewer[0], fewer[1], times=fewer[2])
    assert isinstance(out, Tensor)
    expected = torch.autograd.grad(out.square().sum(), fewer)
    for grad, wanted, whole in zip(found, expected, (key, value, times), strict=True):
        scattered = torch.zeros_like(whole)
        scattered[kept if whole.ndim == 1 else (slice(None), slice(None), kept)] = wanted
        torch.testing.assert_close(grad, scattered, **CLOSE)


X = torch.zeros(2, 1, 4, 3)
WRONG_NODES: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "tolerance is negative": ({"tolerance": -0.1}, ValueError, ["tolerance", "at least 0", "-0.1"]),
    "one tolerance is negative": ({"tolerance": (1.0, -0.5)}, ValueError, ["tolerance", "at least 0", "-0.5"]),
    "tolerance is NaN": ({"tolerance": float("nan")}, ValueError, ["tolerance", "finite", "nan"]),
    "tolerance is a bool": ({"tolerance": True}, TypeError, ["tolerance", "number", "True"]),
    "tolerance is a string": ({"tolerance": "0"}, TypeError, ["tolerance", "number", "'0'"]),
    "three tolerances": ({"tolerance": (1.0, 1.0, 1.0)}, TypeError, ["tolerance", "pair", "(1.0, 1.0, 1.0)"]),
    "key is a list": ({"key": [1.0]}, TypeError, ["key", "tensor", "list"]),
    "key without a batch": ({"key": X[0]}, ValueError, ["key", "(B, heads, length, head dim)", "(1, 4, 3)"]),
    "lengths": ({"value": X[:, :, :3]}, ValueError, ["key and value", "(2, 1, 4, 3)", "(2, 1, 3, 3)"]),
    "times too short": ({"times": torch.zeros(3)}, ValueError, ["times", "(Lk,) or (B, Lk) = (4,) or (2, 4)", "(3,)"]),
    "times of ints": ({"times": torch.arange(4)}, TypeError, ["times", "float32 or float64", "int64"]),
    "times decrease": ({"times": torch.tensor([0.0, 2.0, 1.0, 3.0])}, ValueError, ["times must not decrease", "2.0"]),
    "times are NaN": ({"times": torch.tensor([0.0, 1.0, torch.nan, 3.0])}, ValueError, ["times must be finite", "2"]),
    "present of ints": ({"present": torch.ones(2, 4).int()}, TypeError, ["present", "bool", "int32"]),
    "present too short": ({"present": torch.ones(2, 3).bool()}, ValueError, ["present", "(B, Lk) = (2, 4)", "(2, 3)"]),
    "present with gaps": ({"present": torch.tensor([[1, 1, 0, 1]] * 2).bool()}, ValueError, ["present", "one run"]),
}


@pytest.mark.parametrize("case", WRONG_NODES)
def test_wrong_nodes_are_named(case: str) -> None:
    changes, error, parts = WRONG_NODES[case]
    with pytest.raises(error) as raised:
        simplify(**{"key": X, "value": X, "times": None, "tolerance": 0.0, **changes})
    says(raised, error, parts)
