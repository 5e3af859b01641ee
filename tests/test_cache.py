"""`ContinuousCache` held against the whole stream, which the tests keep."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from oracle import random_inputs
from torch import Tensor

from continuous_attention import ContinuousCache, ContinuousMultiheadAttention, Path, continuous_attention

EPS = torch.finfo(torch.float64).eps
# Two float64 sums over the same path: scores of size 20 at most, lengths and weights off by the scores' error.
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 2048 * EPS}
CHUNKINGS = {"one by one": [1] * 60, "chunks": [1, 5, 0, 17, 2, 30, 0, 5], "at once": [60], "by 7": [7] * 8 + [4]}
B, H, L, RECENT = 2, 2, 60, 4


def uneven(length: int, batch: int = B) -> Tensor:
    return (torch.rand(batch, length, dtype=torch.float64) + 0.1).cumsum(-1)


def chunks(sizes: list[int]) -> Iterator[slice]:
    ends = [0, *np.cumsum(sizes).tolist()]
    return (slice(first, end) for first, end in pairwise(ends))


def attend(query: Tensor, path: Path, **how: Any) -> tuple[Tensor, Tensor]:
    """Of the newest nodes, which the queries stand on."""
    return continuous_attention(
        query, path.key, path.value, path.mask, is_causal=True, times=path.times, return_lse=True, **how
    )  # pyright: ignore[reportReturnType]


def whole(query: Tensor, key: Tensor, value: Tensor, times: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    return continuous_attention(query, key, value, is_causal=True, times=times, return_lse=True, **how)  # pyright: ignore[reportReturnType]


def assert_same(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for x, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, wanted, **CLOSE)


def stream(batch: int = B, length: int = L, *, dim: int = 3, value_dim: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Random keys, values and times."""
    _, key, value = random_inputs(batch, H, H, 1, length, dim, value_dim)
    return key, value, uneven(length, batch)


def polyline(batch: int, vertices: int) -> tuple[Tensor, Tensor, Tensor]:
    """Key, value and times of a path with corners of whole numbers and lines in 8 pieces, all of it exact."""
    corners = torch.randint(-8, 9, (batch, H, vertices, 5)).double()
    s = torch.arange(8).double()[:, None] / 8
    inner = [corners[:, :, i : i + 1] * (1 - s) + corners[:, :, i + 1 : i + 2] * s for i in range(vertices - 1)]
    nodes = torch.cat([*inner, corners[:, :, -1:]], dim=2) / 4
    lengths = (8 * torch.randint(1, 3, (batch, vertices - 1))).repeat_interleave(8, dim=-1) / 8
    times = torch.cat([torch.zeros(batch, 1), lengths.cumsum(-1)], dim=-1).double()
    return nodes[..., :3], nodes[..., 3:], times


# Nothing to drop.


@pytest.mark.parametrize("sizes", CHUNKINGS.values(), ids=CHUNKINGS)
@pytest.mark.parametrize("boundary", ["zero", "none"])
def test_a_generic_stream_is_kept_whole(boundary: str, sizes: list[int]) -> None:
    key, value, times = stream()
    query = torch.randn(B, H, L, 3, dtype=torch.float64)
    expected = whole(query, key, value, times, boundary=boundary)
    cache = ContinuousCache(0.0, recent=RECENT)
    assert cache.path is None
    for here in chunks(sizes):
        path = cache.update(key[:, :, here], value[:, :, here], times[:, here])
        for x, y in zip(path[:3], (key, value, times), strict=True):
            assert torch.equal(x, y[:, : here.stop] if y.ndim == 2 else y[:, :, : here.stop])
        assert path.present.all()
        assert cache.seen == here.stop
        out, lse = expected
        assert_same(attend(query[:, :, here], path, boundary=boundary), (out[:, :, here], lse[:, :, here]))
    assert cache.path is not None
    assert cache.path.key.shape[2] == L


def test_grouped_queries() -> None:
    key, value, times = stream()
    query = torch.randn(B, 2 * H, L, 3, dtype=torch.float64)
    out, lse = whole(query, key, value, times, enable_gqa=True)
    cache = ContinuousCache(0.0, recent=RECENT)
    for j in range(L):
        here = slice(j, j + 1)
        path = cache.update(key[:, :, here], value[:, :, here], times[:, here])
        assert_same(attend(query[:, :, here], path, enable_gqa=True), (out[:, :, here], lse[:, :, here]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_times_keep_their_dtype(dtype: torch.dtype) -> None:
    key, value, times = stream()
    times = times.to(dtype)
    cache = ContinuousCache((0.1, 0.1), recent=RECENT)
    for here in chunks([7] * 8 + [4]):
        assert cache.update(key[:, :, here], value[:, :, here], times[:, here]).times.dtype == dtype
    with pytest.raises(TypeError, match="times must have dtype"):
        cache.update(
            key[:, :, :1], value[:, :, :1], times[:, -1:].to(torch.float32 if dtype.itemsize == 8 else torch.float64)
        )


@pytest.mark.parametrize("how", ["none", "one grid"])
def test_times_of_all_rows(how: str) -> None:
    key, value, _ = stream()
    cache = ContinuousCache(0.0, recent=RECENT)
    for here in chunks(CHUNKINGS["chunks"]):
        at = None if how == "none" else torch.arange(here.start, here.stop, dtype=torch.float64)
        cache.update(key[:, :, here], value[:, :, here], at)
    assert cache.path is not None
    assert torch.equal(cache.path.times, torch.arange(L, dtype=torch.float64).expand(B, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_without_times_one_unit_after_another(dtype: torch.dtype) -> None:
    key, value, _ = stream(length=6)
    cache = ContinuousCache(0.0)
    cache.update(key[:, :, :0], value[:, :, :0], torch.zeros(0, dtype=dtype))
    cache.update(key[:, :, :2], value[:, :, :2])
    cache.update(key[:, :, 2:3], value[:, :, 2:3], torch.tensor([[5.5], [7.0]], dtype=dtype))
    path = cache.update(key[:, :, 3:5], value[:, :, 3:5])
    assert path.times.tolist() == [[0.0, 1.0, 5.5, 6.5, 7.5], [0.0, 1.0, 7.0, 8.0, 9.0]]


# Nodes to drop.


@pytest.mark.parametrize("sizes", [[1] * 161, [7] * 23, [161]], ids=["one by one", "by 7", "at once"])
def test_inserted_nodes_are_dropped_and_nothing_changes(sizes: list[int]) -> None:
    key, value, times = polyline(B, 21)
    length = key.shape[2]
    query = torch.randn(B, H, length, 3, dtype=torch.float64)
    out, lse = whole(query, key, value, times)
    # A stretch that is simplified begins and ends inside of lines: thirds of these are rounded, numbers up to 2 are.
    cache = ContinuousCache(8 * EPS, recent=RECENT)
    for here in chunks(sizes):
        path = cache.update(key[:, :, here], value[:, :, here], times[:, here])
        assert_same(attend(query[:, :, here], path), (out[:, :, here], lse[:, :, here]))
    path = cache.update(key[:, :, :0], value[:, :, :0], times[:, :0])
    # The corners, where one stretch that was simplified ends and the next begins, and what is too new.
    settled = min(len(sizes), length // RECENT)
    assert int(path.node_count.max()) <= 21 + settled + 2 * RECENT


def waves(times: Tensor, dim: int) -> Tensor:
    """Smooth curves (B, H, L, dim) of size 2 and periods from 10 to 60."""
    speed, phase = torch.rand(2, len(times), H, 1, dim, dtype=torch.float64)
    return 2 * torch.sin((0.1 + 0.5 * speed) * times[:, None, :, None] + 6 * phase)


@pytest.mark.parametrize("sizes", [[1] * 400, [13] * 30 + [10]], ids=["one by one", "by 13"])
def test_every_dropped_node_is_near_the_path(sizes: list[int]) -> None:
    tolerances = (0.1, 0.05)
    times = uneven(400) / 4
    key, value = waves(times, 3), waves(times, 2)
    cache, longest = ContinuousCache(tolerances, recent=16), 0
    for here in chunks(sizes):
        path = cache.update(key[:, :, here], value[:, :, here], times[:, here])
        longest = int(path.node_count.max())
        for row in range(B):
            present = path.present[row]
            tau = path.times[row, present].numpy()
            for z, held, tolerance in ((key, path.key, tolerances[0]), (value, path.value, tolerances[1])):
                raw, line = z[row, :, : here.stop].numpy(), held[row][:, present].numpy()
                at = times[row, : here.stop].numpy()
                between = [np.stack([np.interp(at, tau, x[:, d]) for d in range(x.shape[1])], axis=-1) for x in line]
                distance = np.linalg.norm(raw - np.stack(between), axis=-1)
                assert distance.max() <= tolerance + 16 * EPS * 2  # two interpolations of numbers up to 2
    assert longest < 200


def test_the_newest_nodes_are_always_there() -> None:
    times = uneven(80) / 10
    key, value = waves(times, 3), waves(times, 2)
    cache = ContinuousCache(10.0, recent=5)
    for j in range(80):
        here = slice(j, j + 1)
        path = cache.update(key[:, :, here], value[:, :, here], times[:, here])
        newest, count = slice(max(j - 4, 0), j + 1), min(j + 1, 5)
        assert path.present[:, -count:].all()
        assert torch.equal(path.key[:, :, -count:], key[:, :, newest])
        assert torch.equal(path.value[:, :, -count:], value[:, :, newest])
        assert torch.equal(path.times[:, -count:], times[:, newest])
        # The very first node stays too.
        assert torch.equal(path.times[path.present.int().argmax(-1).eq(0), 0], times[path.present[:, 0], 0])
    assert cache.path is not None
    assert int(cache.path.node_count.max()) < 40


def test_a_window_among_the_newest_sees_no_difference() -> None:
    key, value, times = stream()
    query = torch.randn(B, H, L, 3, dtype=torch.float64)
    for window in (1, 3, 5):
        out, lse = whole(query, key, value, times, window=window)
        cache = ContinuousCache(100.0, recent=5)
        for j in range(L):
            here = slice(j, j + 1)
            path = cache.update(key[:, :, here], value[:, :, here], times[:, here])
            assert_same(attend(query[:, :, here], path, window=window), (out[:, :, here], lse[:, :, here]))
        assert cache.path is not None
        assert int(cache.path.node_count.max()) < L / 2


def test_batch_elements_keep_different_numbers_of_nodes() -> None:
    times = uneven(L, batch=3)
    line = times[:, None, :, None].expand(3, H, L, 2)
    key = torch.stack([line[0], waves(times / 2, 2)[1], torch.randn(H, L, 2, dtype=torch.float64)])
    cache, alone = ContinuousCache(0.05, recent=RECENT), [ContinuousCache(0.05, recent=RECENT) for _ in range(3)]
    for here in chunks([3] * 20):
        path = cache.update(key[:, :, here], key[:, :, here], times[:, here])
        for row in range(3):
            one = slice(row, row + 1)
            own = alone[row].update(key[one, :, here], key[one, :, here], times[one, here])
            present = path.present[row]
            assert present.tolist() == sorted(present.tolist())  # padding on the left
            for x, y in zip(path[:2], own[:2], strict=True):
                assert torch.equal(x[row][:, present], y[0])
                assert not x[row][:, ~present].any()
            assert torch.equal(path.times[row, present], own.times[0])
    assert cache.path is not None
    few, some, all_ = cache.path.node_count.tolist()
    assert few < some < all_ == L


def test_a_smooth_stream_needs_little_memory() -> None:
    step, tolerance, recent, chunk = 0.002, 1e-3, 64, 10
    cache, longest = ContinuousCache(tolerance, recent=recent), 0
    for first in range(0, 5000, chunk):
        t = step * torch.arange(first, first + chunk, dtype=torch.float64)
        circle = torch.stack([t.cos(), t.sin()], dim=-1)[None, None]
        longest = max(longest, cache.update(circle, circle, t).times.shape[1])
    # A chord of length h is h²/8 from the circle. A stretch of `recent` nodes or more, cut into halves until they are
    # short enough, leaves pieces of half of that h at least, or one; beside these there are the newest nodes.
    shortest = (8 * tolerance) ** 0.5 / 2
    assert longest <= 5000 * step / shortest + 5000 / recent + 2 * recent + chunk
    assert cache.seen == 5000


def test_equal_times_and_repeated_nodes() -> None:
    key, value, _ = stream(batch=1)
    times = (torch.arange(L) // 3).double()[None]
    query = torch.randn(1, H, L, 3, dtype=torch.float64)
    out, lse = whole(query, key, value, times)
    cache = ContinuousCache(0.0, recent=RECENT)
    for j in range(L):
        here = slice(j, j + 1)
        path = cache.update(key[:, :, here], value[:, :, here], times[:, here])
        assert_same(attend(query[:, :, here], path), (out[:, :, here], lse[:, :, here]))
    assert cache.path is not None
    assert int(cache.path.node_count) < L  # the middle one of three at one time has no length


# What arrives.


def test_no_new_nodes() -> None:
    key, value, times = stream()
    cache = ContinuousCache(0.0, recent=RECENT)
    path = cache.update(key[:, :, :0], value[:, :, :0], times[:, :0])
    assert path.key.shape == (B, H, 0, 3)
    out = continuous_attention(key[:, :, :1], path.key, path.value, path.mask, times=path.times)
    assert isinstance(out, Tensor)
    assert not out.any()
    cache.update(key, value, times)
    before = [x.clone() for x in cache.update(key[:, :, :0], value[:, :, :0], times[:, :0])]
    for x, y in zip(cache.update(key[:, :, :0], value[:, :, :0]), before, strict=True):
        assert torch.equal(x, y)
    assert cache.seen == L


def test_nothing_flows_through_it() -> None:
    key, value, times = (x.requires_grad_() for x in stream())
    path = ContinuousCache(0.0).update(key, value, times)
    assert not any(x.requires_grad for x in path)


def test_modes_of_autograd_mix() -> None:
    key, value, times = stream()
    cache, plain = ContinuousCache(0.0, recent=RECENT), ContinuousCache(0.0, recent=RECENT)
    for j in range(L):
        new = [key[:, :, j : j + 1], value[:, :, j : j + 1], times[:, j : j + 1]]
        expected = plain.update(*new)
        with torch.inference_mode(j % 3 == 0):
            path = cache.update(*new)
        for x, y in zip(path, expected, strict=True):
            assert torch.equal(x, y)


def test_thinned_out_in_inference_mode_and_updated_outside() -> None:
    key, value, times = stream()
    cache = ContinuousCache(0.0, recent=RECENT)
    for j in range(L):
        here = slice(j, j + 1)
        with torch.inference_mode():
            cache.update(key[:, :, here], value[:, :, here], times[:, here])
            cache.update(key[:, :, :0], value[:, :, :0])  # makes no room after thinning out
        cache.drop_newest(1)
        path = cache.update(key[:, :, here], value[:, :, here], times[:, here])
        assert torch.equal(path.times[:, -1], times[:, j])


def test_a_batch_of_none() -> None:
    key, value, times = stream()
    cache = ContinuousCache(0.0, recent=RECENT)
    for here in chunks([1] * 20 + [40]):
        path = cache.update(key[:0, :, here], value[:0, :, here], times[:0, here])
        assert path.key.shape[0] == 0
    assert cache.seen == L


def test_dropping_all_leaves_it_as_it_was_made() -> None:
    cache = ContinuousCache(0.0)
    cache.update(NEW, NEW, LATER)
    cache.drop_newest(2)
    assert cache.path is None
    assert cache.update(NEW[:1].float(), NEW[:1].float()).times.tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("count", [1.5, "1", True])
def test_a_count_to_drop_is_an_int(count: Any) -> None:
    cache = ContinuousCache(0.0)
    cache.update(NEW, NEW, LATER)
    with pytest.raises(TypeError, match=f"count must be an int, got {type(count).__name__}"):
        cache.drop_newest(count)
    with pytest.raises(ValueError, match=r"count must be from 0 to 2.*got 3"):
        cache.drop_newest(3)


NAN_TIMES = torch.tensor([[99.0, torch.nan]], dtype=torch.float64).expand(B, 2)
NEW = torch.zeros(B, H, 2, 3, dtype=torch.float64)
LATER = torch.tensor([98.0, 99.0], dtype=torch.float64)
WRONG_UPDATES: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "batch size": ({"key": NEW[:1], "value": NEW[:1, ..., :2]}, ValueError, ["key", "(2, 2, 2, 3)", "(1, 2, 2, 3)"]),
    "batch size without times": (
        {"key": NEW[:1], "value": NEW[:1, ..., :2], "times": None},
        ValueError,
        ["key", "(2, 2, 2, 3)", "(1, 2, 2, 3)"],
    ),
    "no heads": ({"key": NEW[:, :0], "value": NEW[:, :0, :, :2]}, ValueError, ["key", "at least one head"]),
    "heads": ({"key": NEW[:, :1], "value": NEW[:, :1, :, :2]}, ValueError, ["key", "(2, 2, 2, 3)", "(2, 1, 2, 3)"]),
    "head dim": ({"key": NEW[..., :2]}, ValueError, ["key", "(2, 2, 2, 3)", "(2, 2, 2, 2)"]),
    "value dim": ({"value": NEW}, ValueError, ["value", "(2, 2, 2, 2)", "(2, 2, 2, 3)"]),
    "lengths": ({"value": NEW[:, :, :1, :2]}, ValueError, ["key and value"]),
    "dtype of keys": ({"key": NEW.float()}, TypeError, ["key", "float64", "float32"]),
    "dtype of values": ({"value": NEW[..., :2].float()}, TypeError, ["value", "float64", "float32"]),
    "dtype of times": ({"times": LATER.float()}, TypeError, ["times", "float64", "float32"]),
    "times too short": ({"times": LATER[:1]}, ValueError, ["times", "(2,) or (2, 2)", "(1,)"]),
    "times decrease": ({"times": LATER.flip(0)}, ValueError, ["times must not decrease", "99.0 then 98.0"]),
    "times before the last": ({"times": LATER - 98}, ValueError, ["times must not decrease", "got 0.0 after"]),
    "times are NaN": ({"times": NAN_TIMES}, ValueError, ["times must be finite", "nan"]),
    "key is a list": ({"key": [1.0]}, TypeError, ["key", "tensor", "list"]),
    "times are a list": ({"times": [98.0, 99.0]}, TypeError, ["times", "tensor", "list"]),
}


@pytest.mark.parametrize("case", WRONG_UPDATES)
def test_a_wrong_update_leaves_the_cache_as_it_was(case: str) -> None:
    changes, error, parts = WRONG_UPDATES[case]
    key, value, times = stream(length=2 * RECENT)  # the next update would thin them out
    cache, other = ContinuousCache(0.0, recent=RECENT), ContinuousCache(0.0, recent=RECENT)
    for one in (cache, other):
        one.update(key, value, times)
    with pytest.raises(error) as raised:
        cache.update(**{"key": NEW, "value": NEW[..., :2], "times": LATER, **changes})
    assert type(raised.value) is error
    missing = [part for part in parts if part not in str(raised.value)]
    assert not missing, f"{raised.value} doesn't say {missing}"
    assert cache.seen == other.seen
    for i in range(2):
        assert cache.path is not None
        assert other.path is not None
        for x, y in zip(cache.path, other.path, strict=True):
            assert torch.equal(x, y)
        for one in (cache, other):
            one.update(NEW, NEW[..., :2], LATER + 2 * i)


def test_a_wrong_first_update_leaves_it_empty() -> None:
    cache = ContinuousCache(0.0)
    with pytest.raises(ValueError, match="times must not decrease"):
        cache.update(NEW, NEW, LATER.flip(0))
    assert cache.path is None
    assert cache.seen == 0
    assert cache.update(NEW.float(), NEW.float(), LATER).key.dtype == torch.float32


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"tolerance": -1.0}, ValueError, "tolerance must be at least 0"),
        ({"tolerance": "0"}, TypeError, "tolerance must be a number or a pair"),
        ({"recent": 0}, ValueError, "recent must be at least 1, got 0"),
        ({"recent": 4.0}, TypeError, "recent must be an int, got float"),
        ({"recent": True}, TypeError, "recent must be an int, got bool"),
    ],
    ids=str,
)
def test_a_wrong_cache_is_refused_when_it_is_made(how: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ContinuousCache(**{"tolerance": 0.0, **how})


# In ContinuousMultiheadAttention.


@pytest.mark.parametrize("with_times", [False, True], ids=["unit steps", "times"])
@pytest.mark.parametrize("periods", [None, (0.5, 80.0)], ids=["no rotation", "rotation"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["length first", "batch first"])
def test_the_module_decodes_what_it_reads_at_once(
    batch_first: bool, periods: tuple[float, float] | None, with_times: bool
) -> None:
    module = ContinuousMultiheadAttention(8, 2, batch_first=batch_first, periods=periods, dtype=torch.float64)
    x, times = torch.randn(B, L, 8, dtype=torch.float64), uneven(L) if with_times else None
    along = x if batch_first else x.transpose(0, 1)
    expected, _ = module(along, along, along, is_causal=True, times=times)
    cache = ContinuousCache(0.0, recent=RECENT)
    pieces = []
    for here in chunks([1, 5, 17, 2, 30, 1, 4]):
        new = along[:, here] if batch_first else along[here]
        at = None if times is None else times[:, here]
        pieces.append(module(new, new, new, is_causal=True, times=at, cache=cache)[0])
    torch.testing.assert_close(torch.cat(pieces, dim=1 if batch_first else 0), expected, **CLOSE)
    assert cache.seen == L


def test_the_module_names_the_key_of_another_batch_size() -> None:
    module, cache = ContinuousMultiheadAttention(8, 2, batch_first=True, periods=(0.5, 80.0)), ContinuousCache(0.0)
    x = torch.randn(2, 3, 8)
    module(x, x, x, cache=cache)
    with pytest.raises(ValueError, match="key must have shape"):
        module(x[:1], x[:1], x[:1], cache=cache)
    assert cache.seen == 3


@pytest.mark.parametrize("mask", ["key_padding_mask", "attn_mask"])
def test_no_masks_beside_a_cache(mask: str) -> None:
    module = ContinuousMultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 3, 8)
    shape = (1, 3) if mask == "key_padding_mask" else (3, 3)
    cache = ContinuousCache(0.0)
    with pytest.raises(ValueError, match="don't go together with a cache"):
        module(x, x, x, cache=cache, **{mask: torch.zeros(shape, dtype=torch.bool)})
    assert cache.seen == 0
