"""Merging adjacent stretches of a path: the integral is additive, so the pieces must give the whole."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from continuous_attention import continuous_attention, merge

B, H, LQ, LK, D, DV = 2, 2, 3, 9, 8, 4
EPS = torch.finfo(torch.float64).eps
# A merge adds one exponential, one product and one sum per piece to two results that are good to a few EPS.
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 64 * EPS}
Piece = tuple[Tensor, Tensor]


def inputs(steepness: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (torch.randn(B, H, n, dim).double() for n, dim in ((LQ, D), (LK, D), (LK, DV)))
    return query * steepness, key, value


def stretch(inputs: tuple[Tensor, Tensor, Tensor], first: int, last: int, **how: Any) -> Piece:
    """The path from node `first` to node `last`."""
    query, key, value = inputs
    nodes = slice(first, last + 1)
    out, lse = continuous_attention(query, key[:, :, nodes], value[:, :, nodes], return_lse=True, **how)
    return out, lse


def assert_equal_pieces(got: Piece, expected: Piece) -> None:
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("boundary", ["zero", "repeat", "none"])
@pytest.mark.parametrize("cut", [1, 4, LK - 2])
@pytest.mark.parametrize("steepness", [1.0, 20.0])
def test_two_adjacent_stretches_make_the_whole(cut: int, boundary: str, steepness: float) -> None:
    x = inputs(steepness)
    merged = merge(*stretch(x, 0, cut, boundary=boundary), *stretch(x, cut, LK - 1, boundary="none"))
    assert_equal_pieces(merged, stretch(x, 0, LK - 1, boundary=boundary))


def test_the_formula() -> None:
    out_a, out_b, lse_a, lse_b = torch.randn(5, 3), torch.randn(5, 3), torch.randn(5), torch.randn(5)
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    expected = torch.logaddexp(lse_a.double(), lse_b.double())
    weight = (lse_a.double() - expected).exp()[:, None]
    close: dict[str, Any] = {"rtol": 0.0, "atol": 16 * torch.finfo(torch.float32).eps}
    torch.testing.assert_close(lse.double(), expected, **close)
    torch.testing.assert_close(out.double(), weight * out_a.double() + (1 - weight) * out_b.double(), **close)


def test_two_halves_of_equal_mass_average() -> None:
    out, lse = merge(torch.tensor([[1.0]]), torch.zeros(1), torch.tensor([[3.0]]), torch.zeros(1))
    assert out.item() == 2.0
    assert lse.item() == pytest.approx(math.log(2), abs=torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("offset", [-1e4, -700.0, 700.0, 1e4])
def test_only_the_difference_of_the_lse_counts(offset: float) -> None:
    a, b = stretch(inputs(), 0, 4), stretch(inputs(), 4, 8)
    out, lse = merge(*a, *b)
    shifted = merge(a[0], a[1] + offset, b[0], b[1] + offset)
    torch.testing.assert_close(shifted[0], out, rtol=0.0, atol=8 * EPS * abs(offset))
    torch.testing.assert_close(shifted[1] - offset, lse, rtol=0.0, atol=8 * EPS * abs(offset))


@pytest.mark.parametrize("gap", [800.0, 1e30])
def test_a_hopeless_side_vanishes(gap: float) -> None:
    out, lse = stretch(inputs(), 0, 4)
    for merged in (merge(out, lse, out + 7, lse - gap), merge(out + 7, lse - gap, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)


def nothing(like: Piece) -> Piece:
    return torch.zeros_like(like[0]), torch.full_like(like[1], -math.inf)


def test_an_empty_side_changes_nothing() -> None:
    piece = stretch(inputs(), 0, 4)
    for out, lse in (merge(*piece, *nothing(piece)), merge(*nothing(piece), *piece)):
        assert torch.equal(out, piece[0])
        assert torch.equal(lse, piece[1])


def test_an_empty_side_per_row() -> None:
    a, b = stretch(inputs(), 0, 4), stretch(inputs(), 4, 8)
    empty = torch.zeros_like(a[1], dtype=torch.bool)
    empty[0, 1, 2] = True
    out, lse = merge(a[0].masked_fill(empty[..., None], 0.0), a[1].masked_fill(empty, -math.inf), *b)
    whole = merge(*a, *b)
    torch.testing.assert_close(out, torch.where(empty[..., None], b[0], whole[0]), **CLOSE)
    torch.testing.assert_close(lse, torch.where(empty, b[1], whole[1]), **CLOSE)


def test_two_empty_sides_are_empty() -> None:
    piece = nothing(stretch(inputs(), 0, 4))
    out, lse = merge(*piece, *piece)
    assert not out.any()
    assert (lse == -math.inf).all()


def test_without_length_the_later_node_is_the_last_visible_one() -> None:
    x = inputs()
    earlier, later = stretch(x, 2, 2, boundary="none"), stretch(x, 3, 3, boundary="none")
    assert (earlier[1] == -math.inf).all()
    out, lse = merge(*earlier, *later)
    assert torch.equal(out, later[0])
    assert (lse == -math.inf).all()
    # Where the later stretch is empty, the earlier node is the last one.
    assert torch.equal(merge(*earlier, *nothing(later))[0], earlier[0])
    assert torch.equal(merge(*nothing(earlier), *later)[0], later[0])


def test_many_pieces_in_any_order_of_merging() -> None:
    x = inputs()
    cuts = [0, 1, 3, 4, 7, LK - 1]
    pieces = [stretch(x, a, b, boundary="zero" if a == 0 else "none") for a, b in itertools.pairwise(cuts)]
    from_the_left = pieces[0]
    for piece in pieces[1:]:
        from_the_left = merge(*from_the_left, *piece)
    from_the_right = pieces[-1]
    for piece in reversed(pieces[:-1]):
        from_the_right = merge(*piece, *from_the_right)
    assert_equal_pieces(from_the_left, from_the_right)
    assert_equal_pieces(from_the_left, stretch(x, 0, LK - 1))


def test_merging_is_associative_and_the_sides_may_change_places() -> None:
    a, b, c = (stretch(inputs(), *span) for span in ((0, 2), (2, 5), (5, 8)))
    assert_equal_pieces(merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)))
    assert_equal_pieces(merge(*a, *b), merge(*b, *a))


def test_gradcheck() -> None:
    arguments = [torch.randn(shape).double().requires_grad_() for shape in ((3, 2), (3,), (3, 2), (3,))]
    torch.autograd.gradcheck(merge, arguments)
    torch.autograd.gradgradcheck(merge, arguments)


def test_gradcheck_beside_empty_rows() -> None:
    out_a, lse_a, out_b, lse_b = (torch.randn(shape).double() for shape in ((4, 2), (4,), (4, 2), (4,)))
    empty_a, empty_b = torch.tensor([[False, True, False, True], [False, False, True, True]])

    def masked(*arguments: Tensor) -> Tensor:
        """An empty row has lse −∞ and out 0, whatever comes in; its gradient is 0."""
        a, la, b, lb = arguments
        out, lse = merge(
            a.masked_fill(empty_a[:, None], 0.0),
            la.masked_fill(empty_a, -math.inf),
            b.masked_fill(empty_b[:, None], 0.0),
            lb.masked_fill(empty_b, -math.inf),
        )
        return torch.cat([out, lse.masked_fill(empty_a & empty_b, 0.0)[:, None]], dim=1)

    torch.autograd.gradcheck(masked, [x.requires_grad_() for x in (out_a, lse_a, out_b, lse_b)])


def test_gradients_of_the_pieces_are_those_of_the_whole() -> None:
    leaves = [x.requires_grad_() for x in inputs()]
    x = (leaves[0], leaves[1], leaves[2])

    def gradients(piece: Piece) -> tuple[Tensor, ...]:
        return torch.autograd.grad(piece[0].square().sum() + piece[1].sum(), leaves)

    merged = merge(*stretch(x, 0, 4), *stretch(x, 4, LK - 1, boundary="none"))
    for got, expected in zip(gradients(merged), gradients(stretch(x, 0, LK - 1)), strict=True):
        # Keys add up LQ queries, values reach about 3: 8 times the budget of an output.
        torch.testing.assert_close(got, expected, rtol=0.0, atol=8 * CLOSE["atol"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_outputs_with_float32_lse(dtype: torch.dtype) -> None:
    exact = [stretch(inputs(), 0, 4), stretch(inputs(), 4, 8)]
    (out_a, lse_a), (out_b, lse_b) = ((out.to(dtype), lse.float()) for out, lse in exact)
    out, lse = merge(out_a, lse_a, out_b, lse_b)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    expected = merge(out_a.double(), lse_a.double(), out_b.double(), lse_b.double())
    # Computed in float32 and rounded once: half a unit in the last place of the half.
    single = 16 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(out.double(), expected[0], rtol=torch.finfo(dtype).eps / 2, atol=single)
    torch.testing.assert_close(lse.double(), expected[1], rtol=0.0, atol=single)


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_doesnt_touch_it(autocast: torch.dtype) -> None:
    a, b = ((out.float(), lse.float()) for out, lse in (stretch(inputs(), 0, 4), stretch(inputs(), 4, 8)))
    with torch.autocast("cpu", autocast):
        inside = merge(*a, *b)
    for got, expected in zip(inside, merge(*a, *b), strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, expected)


# What is refused.

OUT, LSE = torch.zeros(2, 3, 4), torch.zeros(2, 3)
WRONG: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "out_a is a list": ({"out_a": [0.0]}, TypeError, ["out_a", "tensor", "list"]),
    "lse_b is None": ({"lse_b": None}, TypeError, ["lse_b", "tensor", "NoneType"]),
    "out_b is int": ({"out_b": OUT.int()}, TypeError, ["out_b", "float32", "int32"]),
    "lse_a is bool": ({"lse_a": LSE.bool()}, TypeError, ["lse_a", "float32", "bool"]),
    "out_b on another device": ({"out_b": OUT.to("meta")}, ValueError, ["out_b", "device cpu", "got meta"]),
    "lse_a on another device": ({"lse_a": LSE.to("meta")}, ValueError, ["lse_a", "device cpu", "got meta"]),
    "out_b's shape": ({"out_b": OUT[:1]}, ValueError, ["out_b", "out_a's shape", "(2, 3, 4)", "(1, 3, 4)"]),
    "lse_a's shape": ({"lse_a": LSE[:1]}, ValueError, ["lse_a", "(2, 3)", "(1, 3)"]),
    "lse_b has the head dim": ({"lse_b": LSE[..., None]}, ValueError, ["lse_b", "(2, 3)", "(2, 3, 1)"]),
    "no head dim": (
        {"out_a": OUT[0, 0, 0], "lse_a": LSE[0, 0], "out_b": OUT[0, 0, 0], "lse_b": LSE[0, 0]},
        ValueError,
        ["out_a", "Dv", "()"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str) -> None:
    changes, error, parts = WRONG[case]
    with pytest.raises(error) as raised:
        merge(**{"out_a": OUT, "lse_a": LSE, "out_b": OUT, "lse_b": LSE, **changes})
    assert type(raised.value) is error
    missing = [part for part in parts if part not in str(raised.value)]
    assert not missing, f"{raised.value} doesn't say {missing}"


def test_the_widest_dtype_of_both_pieces_counts() -> None:
    a, b = torch.randn(3, 2), torch.randn(3, 2, dtype=torch.float64)
    assert merge(a, torch.zeros(3), b, torch.zeros(3))[1].dtype == torch.float64
