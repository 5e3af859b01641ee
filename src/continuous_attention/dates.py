"""Dates as times: numpy, pandas and Python dates as the float64 numbers that attention takes."""

import re
import warnings
from datetime import date, datetime, timedelta, timezone
from typing import Any

import torch
from torch import Tensor

from continuous_attention.checks import check_choice

UNITS = ("ns", "us", "ms", "s", "m", "h", "D", "W")


def to_times(stamps: Any, *, unit: str = "s", origin: Any = None) -> Tensor:
    """Turn dates into the float64 times that `continuous_attention` takes: times = (stamps − origin) / unit.

    The difference is taken in whole nanoseconds (or in what the stamps are counted in), so no digit is lost before the
    division. float64 then holds seconds since 1970 to 0.2 µs; give an `origin` near the data where that matters, and
    the same one for times and query times.

    Args:
        stamps: numpy datetime64 or timedelta64 of any shape, a pandas DatetimeIndex, TimedeltaIndex or Series of these,
            or a list of dates (datetime, pandas Timestamp, ISO strings from "2026-07" on), or of durations (timedelta,
            pandas Timedelta). Time zones are turned into UTC, and what has none counts as UTC. None and NaT among
            them are missing.
        unit: "ns", "us", "ms", "s", "m" (minutes), "h", "D" or "W".
        origin: the date of time 0, one of the things that `stamps` may hold; 1970-01-01 where None (for durations:
            a duration, 0 where None).

    Returns:
        times of the shape of `stamps`, float64; NaN where a stamp is missing, which suits padding.

    Raises:
        TypeError: these aren't dates.
        ValueError: the unit isn't one of these, the stamps' rows differ in length, or stamps or stamps − origin don't
            fit into 64 bits.
    """
    import numpy as np

    check_choice("unit", unit, UNITS)
    dates = _as_numpy("stamps", stamps)
    zero = np.zeros((), dtype=dates.dtype) if origin is None else _as_numpy("origin", origin)
    if dates.dtype.kind != zero.dtype.kind:
        raise TypeError(f"origin must be of the kind of stamps, {dates.dtype}, got {zero.dtype}")
    passed = dates - zero
    common = np.promote_types(dates.dtype, zero.dtype)
    overflows = (passed > 0) != (dates > zero)
    for x in (dates, zero):
        overflows = overflows | ((x.astype(common).astype(x.dtype) != x) & ~np.isnat(x))
    if overflows.any():
        raise ValueError(f"stamps − origin must fit into {passed.dtype} of 64 bits; give both in a larger unit")
    # numpy's own division would count both in the smaller unit, which overflows without a word.
    count = np.where(np.isnat(passed), np.nan, passed.astype(np.int64))
    step = np.ones((), passed.dtype)
    one = np.timedelta64(1, unit)
    return torch.from_numpy(np.asarray(count / (one / step) if one > step else count * (step / one)))


def _as_numpy(name: str, stamps: Any) -> Any:
    """Dates as datetime64 without a time zone, or durations as timedelta64."""
    import numpy as np

    accessor = getattr(stamps, "dt", stamps)  # of a pandas Series
    if getattr(accessor, "tz", None) is not None:
        stamps = accessor.tz_convert(None)
    try:
        found = np.asarray(stamps)
    except ValueError as error:
        raise ValueError(
            f"{name} must be one date, or rows of equal length: fill short ones up with None ({error})"
        ) from None
    if found.dtype.kind in "OU":
        found = _of_objects(name, found)
    elif found.size == 0 and found.dtype.kind not in "mM":
        found = found.astype("datetime64[s]")
    if found.dtype.kind not in "mM":
        raise TypeError(f"{name} must hold dates (datetime64, datetime, ISO strings), got {found.dtype}")
    counted_in = np.datetime_data(found.dtype)[0]
    if counted_in in ("Y", "M") and found.dtype.kind == "M":
        return found.astype("datetime64[D]")
    if counted_in in ("generic", "Y", "M"):
        raise TypeError(f"{name} must hold dates, or durations in a unit of one length, got {found.dtype}")
    return found


def _of_objects(name: str, objects: Any) -> Any:
    """An array of objects or strings as datetime64 or timedelta64, in the finest unit among them."""
    import numpy as np

    stamps = []
    with warnings.catch_warnings():  # numpy warns that it turns a time zone into UTC, as wanted
        warnings.simplefilter("ignore", UserWarning)
        for x in objects.ravel().tolist():
            try:
                stamps.append(_as_stamp(x))
            except (TypeError, ValueError) as error:
                raise TypeError(f"{name} must hold dates, got {x!r} ({error})") from None
            except OverflowError as error:
                raise ValueError(f"{name} must hold dates that fit into 64 bits, got {x!r} ({error})") from None
    known = [x for x in stamps if x is not None]
    if len({x.dtype.kind for x in known}) > 1:
        raise TypeError(f"{name} must hold dates or durations, got both")
    dtype = np.result_type(*{x.dtype for x in known}) if known else np.dtype("datetime64[s]")
    for x in known:
        if x.dtype != dtype and x.astype(dtype).astype(x.dtype) != x:
            raise ValueError(f"{name} must fit into {dtype} of 64 bits, the finest unit among them, got {x}")
    return np.array(stamps, dtype=dtype).reshape(objects.shape)


def _as_stamp(x: Any) -> Any:
    """One date as datetime64 without a time zone, one duration as timedelta64, or None where it's missing."""
    import numpy as np

    if x is None or x != x:  # NaT and NaN
        return None
    if isinstance(x, str):
        if not re.match(r"\d{4}-\d{2}", x):
            raise TypeError("an ISO date begins with YYYY-MM")
        return np.datetime64(x)
    if isinstance(x, datetime) and x.tzinfo:
        x = x.astimezone(timezone.utc).replace(tzinfo=None)
    for convert in ("to_datetime64", "to_timedelta64"):  # of pandas, which has nanoseconds
        if hasattr(x, convert):
            return getattr(x, convert)()
    if isinstance(x, timedelta):
        return np.timedelta64(x)
    if isinstance(x, date):
        return np.datetime64(x)
    if isinstance(x, (np.datetime64, np.timedelta64)):
        return x
    raise TypeError(f"a {type(x).__name__} is none")
