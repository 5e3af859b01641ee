"""Intervals held against plain sets: what each function means is listed here node by node, in Python loops."""

import itertools
from bisect import bisect_left, bisect_right

import pytest
import torch
from torch import Tensor

from continuous_attention import intervals as iv

CPU = torch.device("cpu")
NODES = 5
PAIRS = [(lo, hi) for lo in range(-1, NODES + 2) for hi in range(-1, NODES + 2)]


def nodes_of(interval: Tensor) -> set[int]:
    """The nodes of one interval, of a path with NODES nodes."""
    lo, hi = interval.tolist()
    return {i for i in range(NODES) if lo <= i < hi}


def test_everything_is_every_node() -> None:
    assert iv.everything(7, CPU).tolist() == [[[0, 7]]]


@pytest.mark.parametrize(
    ("query_length", "key_length", "expected"),
    [(3, 3, [0, 1, 2]), (2, 5, [3, 4]), (1, 4, [3]), (4, 2, [-2, -1, 0, 1]), (0, 3, [])],
    ids=["square", "cached", "decode", "more queries", "no queries"],
)
def test_standing_is_bottom_right(query_length: int, key_length: int, expected: list[int]) -> None:
    assert iv.standing(query_length, key_length, CPU).tolist() == [expected]


@pytest.mark.parametrize("left", [None, 0, 1, 9])
@pytest.mark.parametrize("right", [None, 0, 2])
def test_around_counts_nodes_to_both_sides(left: int | None, right: int | None) -> None:
    positions = [-1, 0, 3, 4]
    for position, interval in zip(positions, iv.around(torch.tensor([positions]), left, right)[0], strict=True):
        first = 0 if left is None else position - left
        last = NODES if right is None else position + right
        assert nodes_of(interval) == {i for i in range(NODES) if first <= i <= last}


def test_intersect_is_the_intersection_of_sets() -> None:
    first, second = torch.tensor(PAIRS)[None], torch.tensor(PAIRS)[:, None]
    all_three = iv.intersect(first, second, torch.tensor([[[1, 4]]]))
    for row, b in zip(all_three, PAIRS, strict=True):
        for interval, a in zip(row.tolist(), PAIRS, strict=True):
            assert set(range(*interval)) == set(range(*a)) & set(range(*b)) & {1, 2, 3}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k"),
    [([3, 2], [3, 2]), ([1, 2, 3], [4, 2, 1]), ([0, 2, 0, 3], [2, 0, 0, 3]), ([0, 0], [0, 3]), ([2], [0]), ([], [])],
    ids=["square", "ragged", "empty documents", "no queries", "no nodes", "no documents"],
)
def test_of_documents_lists_each_documents_nodes(
    lengths_q: list[int], lengths_k: list[int], dtype: torch.dtype
) -> None:
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(x)], dtype=dtype) for x in (lengths_q, lengths_k))
    intervals, position = iv.of_documents(cu_q, cu_k, sum(lengths_q))
    expected, standing, begin = [], [], 0
    for length_q, length_k in zip(lengths_q, lengths_k, strict=True):
        expected += [[begin, begin + length_k]] * length_q
        standing += [begin + length_k - length_q + j for j in range(length_q)]
        begin += length_k
    assert intervals.shape == (1, sum(lengths_q), 2)
    assert intervals[0].tolist() == expected
    assert position.tolist() == [standing]


def test_of_mask_every_row_of_five_nodes() -> None:
    rows = list(itertools.product([False, True], repeat=NODES))
    for row in rows:
        intervals, contiguous = iv.of_mask(torch.tensor([row]))
        seen = {i for i in range(NODES) if row[i]}
        hull = set(range(min(seen), max(seen) + 1)) if seen else set()
        assert nodes_of(intervals[0]) == hull
        assert bool(contiguous) == (seen == hull)


def test_of_mask_one_gap_anywhere_says_so() -> None:
    mask = torch.ones(2, 3, NODES, dtype=torch.bool)
    assert bool(iv.of_mask(mask)[1])
    mask[1, 2, 3] = False
    intervals, contiguous = iv.of_mask(mask)
    assert not bool(contiguous)
    assert intervals.shape == (2, 3, 2)


@pytest.mark.parametrize("shape", [(2, 3, 0), (2, 0, 3), (0, 3, 3)], ids=["no nodes", "no queries", "no batch"])
def test_of_mask_of_nothing_is_contiguous(shape: tuple[int, ...]) -> None:
    intervals, contiguous = iv.of_mask(torch.ones(shape, dtype=torch.bool))
    assert intervals.shape == (*shape[:-1], 2)
    assert bool(contiguous)
    assert not iv.visible_nodes(intervals, shape[-1]).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("hidden", ["-inf", "lowest"])
def test_of_additive_zero_is_visible(dtype: torch.dtype, hidden: str) -> None:
    low = -torch.inf if hidden == "-inf" else torch.finfo(dtype).min
    assert iv.of_additive("mask", torch.tensor([0.0, low, -0.0], dtype=dtype)).tolist() == [True, False, True]


@pytest.mark.parametrize("bias", [1.0, -1.0, -1e4, 1e-30, torch.inf, torch.nan])
def test_of_additive_anything_else_is_a_bias(bias: float) -> None:
    with pytest.raises(NotImplementedError, match="mask has values other than 0 and −inf: a bias can't cut the path"):
        iv.of_additive("mask", torch.tensor([0.0, bias, -torch.inf]))


@pytest.mark.parametrize(
    ("times_shape", "position_shape"), [((5,), (2,)), ((1, 5), (3, 2)), ((3, 5), (1, 2)), ((3, 1, 5), (4, 2))]
)
def test_at_reads_the_time_and_moves_outsiders_inside(
    times_shape: tuple[int, ...], position_shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(0)
    times = torch.rand(times_shape, generator=generator)
    position = torch.randint(-3, 8, position_shape, generator=generator)
    got = iv.at(times, position)
    shape = torch.broadcast_shapes(times_shape[:-1], position_shape[:-1])
    assert got.shape == (*shape, 2)
    for index in itertools.product(*map(range, shape)):
        row = times.expand(*shape, -1)[index].tolist()
        wanted = [row[min(max(i, 0), 4)] for i in position.expand(*shape, -1)[index].tolist()]
        assert got[index].tolist() == wanted


def test_at_without_nodes_is_zero() -> None:
    assert iv.at(torch.zeros(1, 0), torch.tensor([[-1, 0, 3]])).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("right", [False, True])
def test_bisect_is_pythons_bisect_within_the_interval(right: bool) -> None:
    times = [0.0, 1.0, 1.0, 1.0, 4.0]
    bounds = [-1.0, 0.0, 0.5, 1.0, 2.0, 4.0, 5.0]
    cases = [((lo, hi), bound) for lo in range(6) for hi in range(lo, 6) for bound in bounds]
    intervals = torch.tensor([[pair for pair, _ in cases]])
    got = iv.bisect(torch.tensor([times]), intervals, torch.tensor([[bound for _, bound in cases]]), right=right)
    search = bisect_right if right else bisect_left
    assert got.tolist() == [[search(times, bound, lo, hi) for (lo, hi), bound in cases]]


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, -7.0, 99.0])
def test_bisect_never_reads_outside_of_the_interval(garbage: float) -> None:
    times = torch.tensor([[garbage, garbage, 1.0, 2.0, 3.0, garbage, garbage, garbage]])
    intervals = torch.tensor([[[2, 5]]])
    bounds = torch.tensor([[0.5, 1.0, 2.5, 3.0, 9.0]])
    assert iv.bisect(times, intervals, bounds, right=True).tolist() == [[2, 3, 4, 5, 5]]
    assert iv.bisect(times, intervals, bounds, right=False).tolist() == [[2, 2, 4, 4, 5]]


def test_bisect_of_an_empty_interval_is_its_beginning() -> None:
    times = torch.arange(5.0)[None]
    assert iv.bisect(times, torch.tensor([[[3, 3], [4, 2], [0, 0]]]), torch.tensor([[9.0]]), right=True).tolist() == [
        [3, 4, 0]
    ]


def test_bisect_has_a_row_of_times_per_batch_element() -> None:
    times = torch.tensor([[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]])
    got = iv.bisect(times, torch.tensor([[[0, 3]]]), torch.tensor([[1.5, 11.0]]), right=True)
    assert got.tolist() == [[2, 3], [0, 2]]


def test_visible_and_covered_nodes_of_every_pair_of_intervals() -> None:
    every = list(itertools.product(PAIRS, repeat=2))
    intervals = torch.tensor(every)
    visible, covered = iv.visible_nodes(intervals, NODES), iv.covered_nodes(intervals, NODES)
    assert visible.shape == (len(every), 2, NODES)
    assert covered.shape == (len(every), NODES)
    for pair, rows, union in zip(every, visible.tolist(), covered.tolist(), strict=True):
        expected = [[lo <= i < hi for i in range(NODES)] for lo, hi in pair]
        assert rows == expected
        assert union == [a or b for a, b in zip(*expected, strict=True)]


def test_covered_nodes_are_counted_per_batch_element() -> None:
    intervals = torch.tensor([[[0, 2], [1, 2]], [[3, 5], [2, 2]]])
    assert iv.covered_nodes(intervals, NODES).int().tolist() == [[1, 1, 0, 0, 0], [0, 0, 0, 1, 1]]


def test_an_interval_of_everything_survives_the_largest_integers() -> None:
    unlimited = iv.around(torch.tensor([[2**62]]), None, None)
    assert nodes_of(unlimited[0, 0]) == set(range(NODES))
    assert iv.covered_nodes(unlimited, NODES).all()
