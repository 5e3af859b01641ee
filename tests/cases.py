"""What a query may be asked to see, in every combination: grids of times, lengths, and views."""

from itertools import product
from typing import Any

import torch
from torch import Tensor

BATCH, HEADS, KEY_HEADS = 2, 4, 2
LENGTHS = {"Lq=Lk": (4, 4), "Lq<Lk": (1, 4), "Lq>Lk": (4, 2)}
GRIDS = ("unit steps", "times", "times per sample", "query times")
VIEWS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "causal, window 2": {"is_causal": True, "window": 2},
    "causal, window (1, 2)": {"is_causal": True, "window": (1, 2)},
    "window (1, 0)": {"window": (1, 0)},
    "window (-1, 1)": {"window": (-1, 1)},
    "time window": {"time_window": 1.5},
    "causal, time window": {"is_causal": True, "time_window": 1.5},
    "mask of runs": {"attn_mask": "runs"},
    "mask with gaps": {"attn_mask": "gaps"},
    "causal, mask with gaps": {"is_causal": True, "attn_mask": "gaps"},
    "causal, window 2, mask with gaps": {"is_causal": True, "window": 2, "attn_mask": "gaps"},
    "intervals": {"intervals": True},
    "causal, intervals": {"is_causal": True, "intervals": True},
}


def is_defined(grid: str, lengths: str, view: str) -> bool:
    """A time window needs times, and a query that stands before the first node needs a time of its own."""
    if "time window" not in view:
        return True
    return grid != "unit steps" and (lengths != "Lq>Lk" or "query" in grid or "causal" in view)


def random_times(grid: str, lq: int, lk: int) -> dict[str, Tensor]:
    """Times in eighths, so that differences are exact; some nodes share a time, some queries come before all."""
    if grid == "unit steps":
        return {}
    batch = (BATCH,) if "per sample" in grid else ()
    times = {"times": torch.randint(0, 12, (*batch, lk)).cumsum(-1).double() / 8}
    if grid == "query times":
        times["query_times"] = torch.randint(-4, 30, (BATCH, lq)).double() / 8
    return times


def random_view(view: str, lq: int, lk: int) -> dict[str, Any]:
    """The arguments of a view, with random masks and intervals; some of these are empty."""
    how = dict(VIEWS[view])
    ends = torch.randint(0, lk + 1, (BATCH, 1, lq, 2)).sort(-1).values
    if "intervals" in how:
        how["intervals"] = ends[:, 0].int()
    if how.get("attn_mask") == "gaps":
        how["attn_mask"] = torch.rand(BATCH, HEADS, lq, lk) < 0.7
    elif "attn_mask" in how:
        nodes = torch.arange(lk)
        how["attn_mask"] = (nodes >= ends[..., :1]) & (nodes < ends[..., 1:])
    return how


CASES = [case for case in product(GRIDS, LENGTHS, VIEWS) if is_defined(*case)]
