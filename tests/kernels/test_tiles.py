"""The borders of tiles: lengths, windows and intervals that end at and around them, head dims, groups, and strides.

A block has 128 rows and a panel 16 lanes (64 and 64 on wide machines), and a tile 12 to 96 nodes, depending on the head
dims.
"""

from typing import Any

import pytest
import torch
from backends import CPU, DTYPES, assert_within_budget, threads
from torch import Tensor

from continuous_attention import continuous_attention_varlen

EVERY_VARIANT = pytest.mark.parametrize("backend", CPU)
BEST = CPU[:1]
BORDERS = (16, 32, 48, 64, 96, 128)
OFFSETS = (-2, -1, 0, 1, 2)
HEAD_DIMS = (1, 2, 15, 16, 17, 24, 33, 64, 96, 128, 200, 256)


def tensors(lq: int, lk: int, dim: int = 8, value_dim: int = 8, group: int = 1, batch: int = 1) -> dict[str, Tensor]:
    """Query, key and value of one key head, or two where there are groups."""
    heads = min(group, 2)
    shapes = {"query": (batch, heads * group, lq, dim), "key": (batch, heads, lk, dim)}
    return {name: torch.randn(shape) for name, shape in (shapes | {"value": (batch, heads, lk, value_dim)}).items()}


def check(leaves: dict[str, Tensor], backend: str, dtype: str = "float32", **how: Any) -> None:
    assert_within_budget(leaves, {"enable_gqa": True, **how}, backend, DTYPES[dtype])


def random_intervals(batch: int, lq: int, lk: int) -> Tensor:
    """Empty ones, single nodes, short and long runs, in stretches that leave gaps between them."""
    lo = torch.randint(0, lk, (batch, lq))
    lo = torch.where(torch.rand(batch, lq) < 0.5, lo // 40 * 40, lo)
    length = torch.tensor([0, 1, 2, 7, lk])[torch.randint(0, 5, (batch, lq))]
    return torch.stack([lo, (lo + length).clamp(max=lk)], dim=-1)


@EVERY_VARIANT
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("border", BORDERS)
def test_lengths(border: int, causal: bool, backend: str) -> None:
    for offset in OFFSETS:
        length = border + offset
        for lq, lk in ((length, length), (length, 20), (3, length)):
            check(tensors(lq, lk), backend, is_causal=causal, boundary="half")


@EVERY_VARIANT
@pytest.mark.parametrize("border", BORDERS)
def test_windows(border: int, backend: str) -> None:
    for offset in OFFSETS:
        check(tensors(135, 135), backend, is_causal=True, window=border + offset)
        check(tensors(70, 140), backend, window=(border + offset - 1, 3), boundary="none")


@EVERY_VARIANT
@pytest.mark.parametrize("border", BORDERS)
def test_intervals_that_begin_and_end_at_a_border(border: int, backend: str) -> None:
    """Every pair of offsets, of one path that begins there and one that ends there."""
    edges = torch.tensor([border + offset for offset in OFFSETS])
    lo, hi = torch.cartesian_prod(edges, edges).T
    intervals = torch.stack([torch.cat([lo, lo * 0]), torch.cat([hi + 7, hi])], dim=-1)
    order = torch.randperm(len(intervals))
    check(tensors(len(intervals), 140), backend, intervals=intervals[None, order])


@pytest.mark.parametrize("backend", BEST)
@pytest.mark.parametrize("value_dim", [1, 17, 64, 256])
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_head_dims(dim: int, value_dim: int, backend: str) -> None:
    for d, dv in {(dim, value_dim), (value_dim, dim), (dim, dim)}:
        for dtype in ("float32", "bfloat16"):
            check(tensors(9, 100, d, dv), backend, dtype, is_causal=True)


@EVERY_VARIANT
@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
def test_groups(group: int, backend: str) -> None:
    """Rows of a block are query by query, so a block's border falls within a query's heads."""
    for lq in (1, 21, 64, 65):
        check(tensors(lq, 70, group=group), backend, is_causal=True, window=30)


@EVERY_VARIANT
@pytest.mark.parametrize("batch", [1, 2], ids=["shared", "per sample"])
@pytest.mark.parametrize("boundary", ["zero", "node", "half", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_any_intervals(seed: int, boundary: str, batch: int, backend: str) -> None:
    torch.manual_seed(seed)
    leaves, how = tensors(67, 300, group=2, batch=2), {"boundary": boundary}
    if boundary == "node":
        leaves |= {"k0": torch.randn(2, 8), "v0": torch.randn(2, 8)}
        del how["boundary"]
    check(leaves, backend, intervals=random_intervals(batch, 67, 300), **how)


@EVERY_VARIANT
@pytest.mark.parametrize("boundary", ["zero", "half", "none"])
@pytest.mark.parametrize("lq", [1, 2, 5, 40])
@pytest.mark.parametrize("count", [3, 8], ids="{} threads".format)
def test_paths_in_pieces(count: int, lq: int, boundary: str, backend: str) -> None:
    """Few queries on several threads: each takes a piece of the path, and the pieces are merged."""
    for lk in (513, 1031):
        edges = torch.tensor([lk * i // n for n in (2, 3, 4) for i in range(n + 1)])
        edges = edges[torch.randint(0, len(edges), (lq, 2))] + torch.randint(-1, 2, (lq, 2))
        leaves = tensors(lq, lk, group=2)
        with threads(count):
            check(leaves, backend, boundary=boundary, is_causal=True)
            check(leaves, backend, boundary=boundary, intervals=edges.clamp(0, lk).sort(-1).values[None])
            leaves["times"] = (torch.randint(0, 12, (lk,)) * (torch.rand(lk) < 0.5)).cumsum(-1).double() / 8
            check(leaves, backend, "bfloat16", boundary=boundary, is_causal=True)


@EVERY_VARIANT
@pytest.mark.parametrize("batch", [(), (2,)], ids=["shared", "per sample"])
@pytest.mark.parametrize("boundary", ["zero", "repeat", "half", "none"])
def test_times_with_segments_of_no_length(boundary: str, batch: tuple[int, ...], backend: str) -> None:
    """Runs of equal times cross the borders; some queries stand on nodes, between them, and outside of all."""
    steps = torch.randint(0, 12, (*batch, 140)) * (torch.rand(*batch, 140) < 0.5)
    leaves = tensors(70, 140, group=2, batch=2)
    leaves["times"] = steps.cumsum(-1).double() / 8
    leaves["query_times"] = torch.randint(-4, int(leaves["times"].max() * 8) + 8, (*batch, 70)).double() / 8
    for causal in (False, True):
        check(leaves, backend, boundary=boundary, is_causal=causal, time_window=20.0)


@EVERY_VARIANT
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_packed_documents(causal: bool, backend: str) -> None:
    for lengths_q, lengths_k in (([63, 1, 0, 65], [15, 49, 31, 33]), ([1, 1, 1], [96, 0, 97])):
        ends = {
            f"cu_seqlens_{name}": torch.tensor([0, *lengths]).cumsum(0).int()
            for name, lengths in (("q", lengths_q), ("k", lengths_k))
        }
        leaves = tensors(sum(lengths_q), sum(lengths_k), group=3)
        leaves = {name[0]: x[0].transpose(0, 1) for name, x in leaves.items()}
        assert_within_budget(leaves, {"is_causal": causal, **ends}, backend, torch.float32, continuous_attention_varlen)


@EVERY_VARIANT
@pytest.mark.parametrize("layout", ["heads behind length", "sliced rows", "sliced dims", "reversed dims"])
def test_strides(layout: str, backend: str) -> None:
    def lay(x: Tensor) -> Tensor:
        b, h, n, d = x.shape
        return {
            "heads behind length": lambda: x.transpose(1, 2).contiguous().transpose(1, 2),
            "sliced rows": lambda: torch.full((b, h, 3 * n, d), torch.nan).index_copy_(2, torch.arange(n) * 3, x)[
                :, :, ::3
            ],
            "sliced dims": lambda: torch.cat([x, torch.full_like(x, torch.nan)], dim=-1)[..., :d],
            "reversed dims": lambda: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        }[layout]()

    leaves = {name: lay(x) for name, x in tensors(65, 97, dim=17, value_dim=9, group=2, batch=2).items()}
    check(leaves, backend, is_causal=True)
