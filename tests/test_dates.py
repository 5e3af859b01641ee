"""Dates as times, against whole numbers."""

from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from oracle import random_inputs
from torch import Tensor

from continuous_attention import continuous_attention, to_times

EPS = torch.finfo(torch.float64).eps
UTC = timezone.utc


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
    missing = [part for part in parts if part not in str(raised.value)]
    assert type(raised.value) is error
    assert not missing, f"{raised.value} doesn't say {missing}"


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
    assert (found - expected).norm(dim=-1).max() <= 2 * r * (1 + 2 * r) * diameter + 2048 * EPS
