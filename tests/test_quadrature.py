"""The trapezoid and rectangle rules, through torch's SDPA (backend=None) and in the reference, against softmax."""

import math
from typing import Any

import pytest
import torch
from oracle import BOUNDARY_NAMES, attention, boundary_of, random_inputs
from torch import Tensor

from continuous_attention import continuous_attention

BACKENDS = pytest.mark.parametrize("backend", [None, "reference"], ids=["sdpa", "reference"])
RULES = pytest.mark.parametrize("rule", ["trapezoid", "rectangle"])
BOUNDARIES = pytest.mark.parametrize("boundary", BOUNDARY_NAMES)
# A softmax in float64 with scores up to about 20: some 20 eps in each weight, and sums of a few terms.
FLOAT64: dict[str, Any] = {"rtol": 1e-13, "atol": 1e-13}

TIMES = torch.tensor([0.0, 0.5, 0.5, 2.0, 4.0], dtype=torch.float64)
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": 2},
    "empty rows": {"intervals": torch.tensor([[[0, 3], [2, 2], [4, 1], [1, 5], [5, 9]]], dtype=torch.int32)},
    "one node": {"intervals": torch.tensor([[[i, i + 1] for i in range(5)]], dtype=torch.int32)},
    "times": {"times": TIMES},
    "times, causal": {"times": TIMES, "is_causal": True},
    "times per sample": {"times": torch.stack([TIMES, TIMES.flip(0).neg()]), "window": (1, 1)},
    "equal times": {"times": torch.full((5,), 3.0), "is_causal": True},
    "query times": {
        "times": TIMES,
        "query_times": torch.tensor([-1.0, 0.25, 0.5, 3.0, 9.0], dtype=torch.float64),
        "is_causal": True,
    },
}


def softmax(query: Tensor, key: Tensor, value: Tensor, weights: list[float]) -> Tensor:
    """softmax(a + log w) v, written out."""
    logits = query @ key.mT / math.sqrt(query.shape[-1]) + torch.tensor(weights, dtype=query.dtype).log()
    return logits.softmax(-1) @ value


@BACKENDS
@RULES
@BOUNDARIES
@pytest.mark.parametrize("setting", SETTINGS)
def test_softmax_with_log_weights(setting: str, boundary: str, rule: str, backend: str | None) -> None:
    inputs = random_inputs(lq=5, lk=5)
    how = {"boundary": boundary_of(boundary, *inputs[1:]), "start_length": 0.7, "enable_gqa": True, "rule": rule}
    how |= SETTINGS[setting]
    out = continuous_attention(*inputs, backend=backend, **how)
    torch.testing.assert_close(out, attention(*inputs, **how)[0], **FLOAT64)


@BACKENDS
@pytest.mark.parametrize("boundary", ["zero", "half", "none"])
def test_rectangle_rule_with_unit_steps_is_softmax(boundary: str, backend: str | None) -> None:
    query, key, value = random_inputs(2, 2, 2, 3, 5)
    out = continuous_attention(query, key, value, boundary=boundary, rule="rectangle", backend=backend)
    torch.testing.assert_close(out, softmax(query, key, value, [1.0] * 5), **FLOAT64)


@BACKENDS
def test_rectangle_rule_puts_each_length_on_the_later_node(backend: str | None) -> None:
    query, key, value = random_inputs(2, 2, 2, 3, 5)
    out = continuous_attention(query, key, value, times=TIMES, start_length=0.7, rule="rectangle", backend=backend)
    torch.testing.assert_close(out, softmax(query, key, value, [0.7, 0.5, 0.0, 1.5, 2.0]), **FLOAT64)


@BACKENDS
@pytest.mark.parametrize(
    ("boundary", "start", "weights"),
    [
        ("none", None, [0.25, 0.25, 0.75, 1.75, 1.0]),
        ("repeat", None, [0.25 + 0.7, 0.25, 0.75, 1.75, 1.0]),
        ("half", None, [0.25 + 0.35, 0.25, 0.75, 1.75, 1.0 + 0.35]),
        ("zero", 0.35, [0.25 + 0.35, 0.25, 0.75, 1.75, 1.0]),
    ],
)
def test_trapezoid_rule_halves_the_ends(
    boundary: str, start: float | None, weights: list[float], backend: str | None
) -> None:
    query, key, value = random_inputs(2, 2, 2, 3, 5)
    out = continuous_attention(
        query, key, value, boundary=boundary, times=TIMES, start_length=0.7, rule="trapezoid", backend=backend
    )
    if start is not None:
        key, value = (torch.cat([torch.zeros_like(x[:, :, :1]), x], dim=2) for x in (key, value))
        weights = [start, *weights]
    torch.testing.assert_close(out, softmax(query, key, value, weights), **FLOAT64)


@BACKENDS
@RULES
@BOUNDARIES
def test_nan_in_unseen_nodes(boundary: str, rule: str, backend: str | None) -> None:
    query, key, value = random_inputs(lq=3, lk=5)
    how = {"boundary": boundary_of(boundary, key, value), "enable_gqa": True, "rule": rule, "backend": backend}
    how["intervals"] = torch.tensor([[[0, 3], [1, 3], [2, 2]], [[1, 5], [0, 5], [4, 4]]])
    expected = continuous_attention(query, key, value, **how)
    for x in (key, value):
        x[0, :, 3:] = torch.nan
    torch.testing.assert_close(continuous_attention(query, key, value, **how), expected, rtol=0, atol=0)


@RULES
@BOUNDARIES
@pytest.mark.parametrize("setting", ["causal", "empty rows", "times, causal", "query times"])
def test_sdpa_has_the_gradients_of_the_definition(setting: str, boundary: str, rule: str) -> None:
    """The reference's own gradients are checked in test_gradients.py."""
    inputs = random_inputs(lq=5, lk=5)
    weights = torch.randn(2, 4, 5, 2, dtype=torch.float64)
    start = boundary_of(boundary, *inputs[1:])
    leaves = [*inputs, *(start if isinstance(start, tuple) and rule == "trapezoid" else ())]
    for x in leaves:
        x.requires_grad_()
    grads = []
    for backend in (None, "reference"):
        out = continuous_attention(
            *inputs, boundary=start, enable_gqa=True, rule=rule, backend=backend, **SETTINGS[setting]
        )
        assert isinstance(out, Tensor)
        grads.append(torch.autograd.grad((out * weights).sum(), leaves))
    torch.testing.assert_close(*grads, **FLOAT64)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@RULES
def test_half_precision_keeps_the_lengths(rule: str, dtype: torch.dtype) -> None:
    """Lengths that differ by less than the dtype's eps still differ in the output.

    All scores are equal and v is 1 at the first node and −1 at the last, so out is the difference of two weights: about
    1e-4, rounded relative to itself. Each weight, about 1/8, may be off by some eps of float32.
    """
    lengths = 1 + 1e-4 * torch.arange(8, dtype=torch.float64)
    query, key = torch.zeros(1, 1, 1, 8, dtype=dtype), torch.zeros(1, 1, 8, 8, dtype=dtype)
    value = torch.zeros(1, 1, 8, 1, dtype=dtype)
    value[..., 0, 0], value[..., -1, 0] = 1, -1
    how: dict[str, Any] = {"times": lengths.cumsum(0), "boundary": "none", "rule": rule}
    out = continuous_attention(query, key, value, **how)
    expected, _ = attention(query, key, value, **how)
    assert isinstance(out, Tensor)
    assert expected.abs() > 2e-5
    torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=2e-7)
