"""out, lse and gradients of the reference against adaptive quadrature of the integral itself."""

import math
from typing import Any

import pytest
import torch
from cases import BATCH, CASES, GRIDS, HEADS, KEY_HEADS, LENGTHS, random_times, random_view
from oracle import BOUNDARY_NAMES, attention, boundary_of, gradients, random_inputs
from torch import Tensor

from continuous_attention import continuous_attention, reference

# quad is asked for 1e-12, and its error estimates are sums over segments; scores of about 20 round to 1e-14.
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


@pytest.mark.parametrize("boundary", BOUNDARY_NAMES)
@pytest.mark.parametrize(("grid", "lengths", "view"), CASES)
def test_out_and_lse_are_the_integral(grid: str, lengths: str, view: str, boundary: str) -> None:
    lq, lk = LENGTHS[lengths]
    inputs = random_inputs(BATCH, HEADS, KEY_HEADS, lq, lk)
    how = {
        "boundary": boundary_of(boundary, *inputs[1:]),
        "start_length": 0.75,
        "enable_gqa": True,
        **random_times(grid, lq, lk),
        **random_view(view, lq, lk),
    }
    actual = continuous_attention(*inputs, return_lse=True, backend="reference", **how)
    torch.testing.assert_close(actual, attention(*inputs, **how), **EXACT)


@pytest.mark.parametrize("boundary", BOUNDARY_NAMES)
@pytest.mark.parametrize("view", ["causal", "causal, window 2", "mask with gaps"])
@pytest.mark.parametrize("steepness", [1e-3, 1.0, 100.0], ids="steepness {:g}".format)
def test_gradients_are_the_integral(steepness: float, view: str, boundary: str) -> None:
    """Slopes up to 300 and more, where finite differences see nothing; relative to the largest gradient.

    Nodes 1 and 2 share a time unless slopes are steep: then a node without length may lie far above the peak, and the
    gradient of its segment's length above all others.
    """
    inputs = random_inputs(BATCH, HEADS, KEY_HEADS, 4, 4, steepness=steepness)
    how = {
        "boundary": boundary_of(boundary, *inputs[1:]),
        "times": torch.tensor([0.0, 0.5, 0.75 if steepness > 10 else 0.5, 2.0], dtype=torch.float64),
        "enable_gqa": True,
        **random_view(view, 4, 4),
    }
    leaves = [*inputs, *(how["boundary"] if boundary == "node" else ()), how["times"]]
    for x in leaves:
        x.requires_grad_()
    out, lse = continuous_attention(*inputs, return_lse=True, backend="reference", **how)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    torch.autograd.backward((out, lse), (grad_out, grad_lse))
    for x, expected in zip(leaves, gradients(*inputs, grad_out, grad_lse, **how), strict=True):
        assert x.grad is not None
        torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))


@pytest.mark.parametrize("view", ["causal", "causal, window 2", "window (1, 0)", "causal, time window"])
@pytest.mark.parametrize("grid", GRIDS[1:])
def test_a_mask_per_head_means_the_same(grid: str, view: str) -> None:
    inputs = random_inputs()
    how = {"enable_gqa": True, "return_lse": True, **random_times(grid, 4, 4), **random_view(view, 4, 4)}
    mask = random_view("mask of runs", 4, 4)["attn_mask"]
    for_all_heads = continuous_attention(*inputs, attn_mask=mask, **how)
    per_head = continuous_attention(*inputs, attn_mask=mask.expand(-1, HEADS, -1, -1), **how)
    torch.testing.assert_close(per_head, for_all_heads, **EXACT)


@pytest.mark.parametrize("boundary", BOUNDARY_NAMES)
def test_float32(boundary: str) -> None:
    """Scores are off by (D + 3) eps of Σ |q k|, moments by 2e-6; out moves by twice as much, relative to the values."""
    inputs = random_inputs(BATCH, HEADS, KEY_HEADS, 4, 4, dtype=torch.float32)
    how = {"boundary": boundary_of(boundary, *inputs[1:]), "is_causal": True, "enable_gqa": True}
    out, lse = continuous_attention(*inputs, return_lse=True, backend="reference", **how)
    expected_out, expected_lse = attention(*inputs, **how)
    norms = [float(x.norm(dim=-1).max()) for x in (*inputs[:2], *(how["boundary"][:1] if boundary == "node" else ()))]
    error = 6 * torch.finfo(torch.float32).eps * norms[0] * max(norms[1:]) / 3**0.5 + 2e-6
    assert out.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=error)
    largest = max(float(x.abs().max()) for x in (inputs[2], *(how["boundary"][1:] if boundary == "node" else ())))
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=2 * error * largest)


@pytest.mark.parametrize("scale", [0.0, 1.5, -0.7])
def test_scale(scale: float) -> None:
    inputs = random_inputs(1, 2, 2)
    actual = continuous_attention(*inputs, scale=scale, return_lse=True, backend="reference")
    torch.testing.assert_close(actual, attention(*inputs, scale=scale), **EXACT)


@pytest.mark.parametrize("rule", ["trapezoid", "rectangle", "taylor"])
@pytest.mark.parametrize("boundary", BOUNDARY_NAMES)
@pytest.mark.parametrize("view", ["full", "causal", "mask with gaps", "causal, intervals"])
@pytest.mark.parametrize("grid", ["unit steps", "times per sample", "query times"])
def test_rules_are_softmaxes_with_log_weights(grid: str, view: str, boundary: str, rule: str) -> None:
    inputs = random_inputs(BATCH, HEADS, KEY_HEADS, 5, 4)
    how = {
        "boundary": boundary_of(boundary, *inputs[1:]),
        "start_length": 0.75,
        "enable_gqa": True,
        "rule": rule,
        **random_times(grid, 5, 4),
        **random_view(view, 5, 4),
    }
    actual = continuous_attention(*inputs, return_lse=True, backend="reference", **how)
    torch.testing.assert_close(actual, attention(*inputs, **how), **EXACT)


def taylor_by_hand(scores: Tensor) -> Tensor:
    """a_i + b_i with b_i = (a_{i−1} + a_{i+1} − 2a_i)/6 inside and log ½ ± δ/3 at the ends."""
    bend = torch.zeros_like(scores)
    bend[..., 1:-1] = (scores[..., :-2] + scores[..., 2:] - 2 * scores[..., 1:-1]) / 6
    bend[..., 0] = (scores[..., 1] - scores[..., 0]) / 3 - math.log(2)
    bend[..., -1] = (scores[..., -2] - scores[..., -1]) / 3 - math.log(2)
    return scores + bend


def test_taylor_rule_is_a_short_convolution_of_the_scores() -> None:
    query, key, value = random_inputs(2, 2, 2, 3, 6)
    logits = taylor_by_hand(query @ key.mT / 3**0.5)
    actual = continuous_attention(query, key, value, boundary="none", rule="taylor", return_lse=True)
    torch.testing.assert_close(actual, (logits.softmax(-1) @ value, logits.logsumexp(-1)), rtol=1e-13, atol=1e-13)


def test_rectangle_rule_with_unit_steps_is_softmax() -> None:
    query, key, value = random_inputs(2, 2, 2, 3, 6)
    logits = query @ key.mT / 3**0.5
    actual = continuous_attention(query, key, value, rule="rectangle", return_lse=True)
    torch.testing.assert_close(actual, (logits.softmax(-1) @ value, logits.logsumexp(-1)), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("rule", ["trapezoid", "taylor"])
def test_rules_approach_the_integral(rule: str) -> None:
    """Halving all slopes divides the error of the trapezoid rule by 4, of the first-order one by 4 as well."""
    query, key, value = random_inputs(1, 1, 1, 1, 6)
    errors = []
    for scale in (1e-3, 5e-4):
        exact = continuous_attention(query, key, value, scale=scale, return_lse=True)[1]
        errors.append(continuous_attention(query, key, value, scale=scale, rule=rule, return_lse=True)[1] - exact)
    assert (errors[0] / errors[1]).item() == pytest.approx(4, rel=0.02)


def test_stretches_differentiated_by_themselves() -> None:
    """With the whole domain's out and normalizer, two stretches that share a node have its gradients between them."""
    query, key, value = random_inputs(BATCH, HEADS, KEY_HEADS, 3, 7)
    start = torch.randn(KEY_HEADS, 3, dtype=torch.float64), torch.randn(KEY_HEADS, 2, dtype=torch.float64)
    lengths, held = torch.rand(BATCH, 7).double(), torch.rand(BATCH, 1, 3).double()
    leaves = [x.requires_grad_() for x in (query, key, value, lengths, *start, held)]
    seen = torch.tensor([[[0, 7]]])
    how: dict[str, Any] = {"scale": 0.5, "start_node": start, "start_length": 0.75}
    out, lse = reference.attention(query, key, value, seen, lengths=lengths, end_length=held, **how)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    wanted = torch.autograd.grad((out, lse), leaves, (dout, dlse))

    sums = [torch.zeros_like(x) for x in leaves]
    level = lse.detach(), torch.ones_like(lse)
    for nodes, given in ((slice(0, 5), how), (slice(4, 7), {"scale": 0.5, "end_length": held})):
        stretch = key[:, :, nodes], value[:, :, nodes], torch.tensor([[[0, nodes.stop - nodes.start]]])
        given = {**given, "lengths": lengths[:, nodes], "wanted": (True, True, True)}
        found = reference.differentiate(dout, dlse, out.detach(), None, *level, query, *stretch, **given)
        places = (..., (..., nodes, slice(None)), (..., nodes, slice(None)), (..., nodes), ..., ..., ...)
        for total, place, x in zip(sums, places, found, strict=True):
            if x is not None:
                total[place] += x
    for got, expected in zip(sums, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
