"""Dates as times against whole numbers, and `simplify` against plain Python and numpy."""

from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest
import torch
from oracle import random_inputs
from torch import Tensor

from continuous_attention import Path, continuous_attention, simplify, to_times

EPS = torch.finfo(torch.float64).eps
# Two float64 sums over the same path: scores of size 20 at most, lengths and weights off by the scores' error.
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 2048 * EPS}
UTC = timezone.utc


def says(raised: pytest.ExceptionInfo, error: type[Exception], parts: list[str]) -> None:
    assert type(raised.value) is error
    missing = [part for part in parts if part not in str(raised.value)]
    assert not missing, f"{raised.value} doesn't say {missing}"


# Dates as times.

MOMENTS = [datetime(1969, 12, 31, 23), datetime(2024, 2, 29, 12, 30, 15), datetime(2026, 7, 1, 0, 0, 1)]
SECONDS = [-3600, 1709209815, 1782864001]
IN_SECONDS = {"ns": (1, 10**9), "us": (1, 10**6), "ms": (1, 1000), "s": (1, 1)}
IN_SECONDS |= {"m": (60, 1), "h": (3600, 1), "D": (86400, 1), "W": (604800, 1)}


def in_unit(seconds: list[int], unit: str) -> Tensor:
    """Whole numbers divided once, which Python rounds correctly."""
    numerator, denominator = IN_SECONDS[unit]
    return torch.tensor([s * denominator / numerator for s in seconds], dtype=torch.float64)


@pytest.mark.parametrize("unit", IN_SECONDS)
@pytest.mark.parametrize("counted_in", ["s", "ms", "us", "ns"])
def test_numpy_dates_in_any_unit(counted_in: str, unit: str) -> None:
    stamps = np.array(MOMENTS, dtype=f"datetime64[{counted_in}]")
    found = to_times(stamps, unit=unit)
    assert found.dtype == torch.float64
    # A count of nanoseconds beyond 2^53 is rounded before it is divided.
    torch.testing.assert_close(found, in_unit(SECONDS, unit), rtol=EPS if counted_in == "ns" else 0.0, atol=0.0)


@pytest.mark.parametrize("unit", IN_SECONDS)
@pytest.mark.parametrize("counted_in", ["s", "ms", "us", "ns"])
def test_durations(counted_in: str, unit: str) -> None:
    stamps = np.array([0, -90, 7200], dtype="timedelta64[s]").astype(f"timedelta64[{counted_in}]")
    assert torch.equal(to_times(stamps, unit=unit), in_unit([0, -90, 7200], unit))
    since = to_times(stamps, unit=unit, origin=np.timedelta64(30, "s"))
    assert torch.equal(since, in_unit([-30, -120, 7170], unit))


@pytest.mark.parametrize("counted_in", ["Y", "M", "W", "D", "h", "m"])
def test_coarse_dates(counted_in: str) -> None:
    """Years and months have no length of their own, but a first day."""
    stamps = np.array(["1970-01-01", "2024-01-01"], dtype=f"datetime64[{counted_in}]")
    days = {"W": 19719}.get(counted_in, 19723)  # weeks begin on Thursdays
    assert to_times(stamps, unit="D").tolist() == [0.0, days]


EAST = timezone(timedelta(hours=5, minutes=30))
DATES: dict[str, Any] = {
    "naive": MOMENTS,
    "aware": [x.replace(tzinfo=UTC).astimezone(EAST) for x in MOMENTS],
    "naive and aware": [MOMENTS[0], *(x.replace(tzinfo=UTC).astimezone(EAST) for x in MOMENTS[1:])],
    "ISO": ["1969-12-31T23:00", "2024-02-29 12:30:15", "2026-07-01T00:00:01.000"],
    "ISO with zones": ["1970-01-01T04:30+05:30", "2024-02-29T12:30:15Z", "2026-06-30T22:00:01-02:00"],
    "array of strings": np.array(["1969-12-31T23:00:00", "2024-02-29T12:30:15", "2026-07-01T00:00:01"]),
    "list of datetime64": [np.datetime64(x) for x in MOMENTS],
}


@pytest.mark.parametrize("kind", DATES)
def test_lists_of_dates(kind: str) -> None:
    assert to_times(DATES[kind]).tolist() == SECONDS


def test_days_and_single_dates() -> None:
    assert to_times([date(1970, 1, 2), date(1969, 12, 31)], unit="h").tolist() == [24.0, -24.0]
    for stamp in (MOMENTS[1], MOMENTS[1].isoformat(), np.datetime64(MOMENTS[1])):
        found = to_times(stamp)
        assert found.shape == ()
        assert found.item() == SECONDS[1]
    for nothing in ([], np.array([], dtype="datetime64[s]")):
        assert to_times(nothing).shape == (0,)


def test_arrays_keep_their_shape() -> None:
    stamps = [[MOMENTS[0], MOMENTS[1]], [MOMENTS[1], MOMENTS[2]]]
    expected = torch.tensor([SECONDS[:2], SECONDS[1:]], dtype=torch.float64)
    for found in (to_times(stamps), to_times(np.array(stamps, dtype="datetime64[ms]"))):
        assert torch.equal(found, expected)


def test_not_a_time_is_nan() -> None:
    found = to_times(np.array(["2024-02-29T12:30:15", "NaT"], dtype="datetime64[ns]"))
    assert found[0] == SECONDS[1]
    assert found[1].isnan()
    assert to_times(np.array([1, "NaT"], dtype="timedelta64[s]")).isnan().tolist() == [False, True]
    for stamps in (
        [MOMENTS[1], None],
        np.array(["2024-02-29", np.nan], dtype=object),
        [timedelta(1), np.timedelta64("NaT")],
    ):
        assert to_times(stamps).isnan().tolist() == [False, True]
    assert to_times([None]).isnan().all()


@pytest.mark.parametrize("origin", [None, timedelta(seconds=30), np.timedelta64(30, "s")], ids=str)
def test_lists_of_durations(origin: Any) -> None:
    stamps = [timedelta(0), timedelta(seconds=-90), np.timedelta64(2, "h")]
    shift = 0 if origin is None else 30
    assert to_times(stamps, origin=origin).tolist() == [-shift, -90 - shift, 7200 - shift]


@pytest.mark.parametrize(
    "origin",
    ["2026-07-01", date(2026, 7, 1), datetime(2026, 7, 1, 2, tzinfo=timezone(timedelta(hours=2)))],
    ids=["ISO", "date", "aware"],
)
def test_nanoseconds_survive_with_an_origin(origin: Any) -> None:
    nanoseconds = [0, 1, 999_999_999, 86_399_999_999_999]
    stamps = np.datetime64("2026-07-01", "ns") + np.array(nanoseconds, dtype="timedelta64[ns]")
    assert to_times(stamps, unit="ns", origin=origin).tolist() == nanoseconds
    assert to_times(stamps, origin=origin).tolist() == [x / 10**9 for x in nanoseconds]


def test_epoch_seconds_keep_milliseconds() -> None:
    stamps = np.datetime64("2026-07-01", "ms") + np.arange(1000)
    steps = to_times(stamps).diff()
    # Each time is rounded to a multiple of 2^-22 s, by half of that at most.
    assert (steps - 1e-3).abs().max() <= 2.0**-22 + EPS
    assert (steps > 0).all()


def test_more_than_64_bits_of_nanoseconds() -> None:
    """What the stamps are counted in has room for the year 3000, whatever unit is asked for."""
    stamps = np.array(["3000-01-01", "1600-01-01"], dtype="datetime64[s]")
    assert to_times(stamps, unit="ns").tolist() == [32503680000 * 1e9, -11676096000 * 1e9]
    wide = np.array(["1700-01-01", "2250-01-01"], dtype="datetime64[ns]")
    for origin in ("1600-01-01", wide[0], np.datetime64("3000-01-01")):
        with pytest.raises(ValueError, match=r"64 bits.*larger unit"):
            to_times(wide, origin=origin)


class Zoned:
    """Like a pandas DatetimeIndex or the accessor of a Series: stamps with a time zone."""

    tz = EAST

    def tz_convert(self, zone: None) -> np.ndarray:
        assert zone is None
        return np.array(MOMENTS, dtype="datetime64[ns]")


class Series:
    """Like a pandas Series of such stamps, whose own tz_localize is about its index."""

    dt = Zoned()


@pytest.mark.parametrize("kind", [Zoned, Series])
def test_what_looks_like_pandas_with_a_time_zone(kind: Callable[[], object]) -> None:
    assert to_times(kind()).tolist() == SECONDS


def test_pandas() -> None:
    pd = pytest.importorskip("pandas")
    index = pd.DatetimeIndex(MOMENTS)
    zoned = index.tz_localize("UTC").tz_convert("Asia/Kolkata")
    for stamps in (index, zoned, pd.Series(index), pd.Series(zoned), list(zoned)):
        assert to_times(stamps).tolist() == SECONDS
    assert to_times(pd.Series(index - index[0])).tolist() == [x - SECONDS[0] for x in SECONDS]
    assert to_times(list(index - index[0]), origin=pd.Timedelta(1, "s")).tolist() == [
        x - SECONDS[0] - 1 for x in SECONDS
    ]
    for stamps in ([MOMENTS[1], pd.NaT], pd.Series([MOMENTS[1], None], dtype=object), [pd.Timedelta(1), pd.NaT]):
        assert to_times(stamps).isnan().tolist() == [False, True]


@pytest.mark.parametrize("zone", [None, "Asia/Kolkata"])
def test_pandas_keeps_nanoseconds(zone: str | None) -> None:
    pd = pytest.importorskip("pandas")
    start = pd.Timestamp("2026-07-01T00:00:00.000000001").tz_localize("UTC").tz_convert(zone)
    stamps = [start + pd.Timedelta(x, "ns") for x in (0, 1, 999_999)]
    for kind in (stamps, pd.Series(stamps), pd.Series(stamps, dtype=object)):
        assert to_times(kind, unit="ns", origin=start).tolist() == [0, 1, 999_999]
    assert to_times([x - start for x in stamps], unit="ns").tolist() == [0, 1, 999_999]


WRONG_DATES: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "numbers": ({"stamps": [1.0, 2.0]}, TypeError, ["stamps", "dates", "float64"]),
    "a tensor": ({"stamps": torch.arange(3)}, TypeError, ["stamps", "dates", "int64"]),
    "words": ({"stamps": ["yesterday"]}, TypeError, ["stamps", "dates", "'yesterday'"]),
    "seconds in a string": ({"stamps": ["1700000000"]}, TypeError, ["stamps", "YYYY-MM", "'1700000000'"]),
    "a year": ({"stamps": [MOMENTS[0], "2024"]}, TypeError, ["stamps", "YYYY-MM", "'2024'"]),
    "today": ({"origin": "today"}, TypeError, ["origin", "YYYY-MM", "'today'"]),
    "an empty string": ({"stamps": ["2024-02-29", ""]}, TypeError, ["stamps", "YYYY-MM", "got ''"]),
    "a number beside a date": ({"stamps": [MOMENTS[0], 5]}, TypeError, ["stamps", "dates", "5", "int"]),
    "dates and durations": ({"stamps": [MOMENTS[0], timedelta(1)]}, TypeError, ["stamps", "got both"]),
    "rows of two lengths": ({"stamps": [MOMENTS, MOMENTS[:2]]}, ValueError, ["stamps", "equal length"]),
    "before the year 1": (
        {"stamps": [datetime(1, 1, 1, tzinfo=EAST)]},
        ValueError,
        ["stamps", "fit into 64 bits", "datetime(1, 1, 1"],
    ),
    "too far for nanoseconds": (
        {"stamps": [datetime(3000, 1, 1), np.datetime64("2026-07-01", "ns")]},
        ValueError,
        ["stamps", "fit into datetime64[ns]", "3000-01-01"],
    ),
    "no unit": ({"stamps": np.array([1, 2], dtype="timedelta64")}, TypeError, ["stamps", "unit", "timedelta64"]),
    "months": ({"stamps": np.array([1], dtype="timedelta64[M]")}, TypeError, ["stamps", "one length", "[M]"]),
    "unknown unit": ({"unit": "second"}, ValueError, ["unit", "'s'", "'second'"]),
    "months as unit": ({"unit": "M"}, ValueError, ["unit", "'D'", "'M'"]),
    "unit is a number": ({"unit": 1}, TypeError, ["unit", "string", "int"]),
    "origin is a number": ({"origin": 0}, TypeError, ["origin", "dates", "int64"]),
    "origin is a duration": (
        {"origin": np.timedelta64(1, "s")},
        TypeError,
        ["origin", "kind of stamps", "timedelta64"],
    ),
}


@pytest.mark.parametrize("case", WRONG_DATES)
def test_wrong_dates_are_named(case: str) -> None:
    changes, error, parts = WRONG_DATES[case]
    with pytest.raises(error) as raised:
        to_times(**{"stamps": MOMENTS, **changes})
    says(raised, error, parts)


def test_epoch_seconds_give_the_output_of_times_from_zero() -> None:
    query, key, value = random_inputs(heads=2, lq=8, lk=40)
    stamps = np.datetime64("2026-07-01", "ms") + np.random.default_rng(0).integers(20, 2000, 40).cumsum()
    from_zero, epoch = to_times(stamps, origin=stamps[0]), to_times(stamps)
    expected = continuous_attention(query, key, value, times=from_zero, boundary="none")
    found = continuous_attention(query, key, value, times=epoch, boundary="none")
    # The two times of a length are rounded to 2^-22 s, by half of that each, so each weight is off by a factor of
    # 1 ± r at most, and the output by 2 r times the diameter of the values, to first order.
    r = 2.0**-22 / float(from_zero.diff().min())
    diameter = float(torch.cdist(value, value).max())
    assert isinstance(found, Tensor)
    assert isinstance(expected, Tensor)
    assert (found - expected).norm(dim=-1).max() <= 2 * r * (1 + 2 * r) * diameter + CLOSE["atol"]


# Fewer nodes.


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
