"""`ContinuousMultiheadAttention` held against `nn.MultiheadAttention`, which it equals with the rectangle rule."""

import copy
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import attention as integrate
from torch import Tensor, nn

from continuous_attention import ContinuousCache, ContinuousMultiheadAttention

B, LQ, LK, E, H = 3, 5, 5, 8, 2
EPS = torch.finfo(torch.float64).eps
# Two ways to the same float64 numbers: projections sum E products, attention LK nodes, inputs and weights are about 1.
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 64 * EPS}
NEG_INF = float("-inf")


def pair(**how: Any) -> tuple[nn.MultiheadAttention, ContinuousMultiheadAttention]:
    """The two modules with the same random parameters in float64."""
    torchs = nn.MultiheadAttention(E, H, dtype=torch.float64, **how)
    ours = ContinuousMultiheadAttention(E, H, rule="rectangle", dtype=torch.float64, **how)
    for parameter in torchs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(torchs.state_dict())
    return torchs, ours


def inputs(*, batch_first: bool = True, lq: int = LQ, lk: int = LK, kdim: int = E, vdim: int = E) -> list[Tensor]:
    shapes = (B, lq, E), (B, lk, kdim), (B, lk, vdim)
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    return tensors if batch_first else [x.transpose(0, 1) for x in tensors]


def agree(torchs: nn.MultiheadAttention, ours: ContinuousMultiheadAttention, xs: list[Tensor], **how: Any) -> None:
    expected, _ = torchs(*xs, need_weights=False, **how)
    out, weights = ours(*xs, **how)
    assert weights is None
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected, **CLOSE)


# The same result.


@pytest.mark.parametrize("batch_first", [False, True], ids=["length first", "batch first"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize(
    "widths", [{}, {"kdim": 6}, {"vdim": 10}, {"kdim": 6, "vdim": 10}], ids=["E", "kdim", "vdim", "kdim and vdim"]
)
def test_equals_multihead_attention(widths: dict[str, int], bias: bool, batch_first: bool) -> None:
    torchs, ours = pair(batch_first=batch_first, bias=bias, **widths)
    agree(torchs, ours, inputs(batch_first=batch_first, lq=4, lk=6, **widths))


@pytest.mark.parametrize("batch_first", [False, True], ids=["length first", "batch first"])
def test_equals_multihead_attention_without_a_batch(batch_first: bool) -> None:
    torchs, ours = pair(batch_first=batch_first)
    xs = [x[0] for x in inputs()]
    agree(torchs, ours, xs)
    padding = torch.tensor([False, False, False, True, True])
    hidden = ~torch.ones(LQ, LK, dtype=torch.bool).tril()
    agree(torchs, ours, xs, key_padding_mask=padding, attn_mask=hidden)
    agree(torchs, ours, xs, attn_mask=hidden.expand(H, LQ, LK))


def additive(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, NEG_INF)


# A row that sees nothing is NaN in torch and 0 here, so every row keeps a node. Beside a gap the path is cut and even
# the rectangle rule isn't a softmax any more, so each row sees one run.
PADDING = torch.arange(LK) >= torch.tensor([5, 3, 1])[:, None]
CAUSAL = ~torch.ones(LQ, LK, dtype=torch.bool).tril()
FIRST = torch.randint(0, LK, (B * H, LQ, 1), generator=torch.Generator().manual_seed(0))
PER_HEAD = (torch.arange(LK) < FIRST) | (torch.arange(LK) > FIRST + 1)
PER_HEAD_FROM_0 = torch.arange(LK) > FIRST
HIDING: dict[str, dict[str, Tensor]] = {
    "padding": {"key_padding_mask": PADDING},
    "causal": {"attn_mask": CAUSAL},
    "per head": {"attn_mask": PER_HEAD},
    "padding and causal": {"key_padding_mask": PADDING, "attn_mask": CAUSAL},
    "padding and per head": {"key_padding_mask": PADDING, "attn_mask": PER_HEAD_FROM_0},
}


@pytest.mark.parametrize("kind", ["boolean", "additive"])
@pytest.mark.parametrize("hiding", HIDING)
def test_masks_hide_as_in_multihead_attention(hiding: str, kind: str) -> None:
    masks = HIDING[hiding] if kind == "boolean" else {name: additive(mask) for name, mask in HIDING[hiding].items()}
    agree(*pair(batch_first=True), inputs(), **masks)


def test_is_causal_equals_torchs_hint_with_its_mask() -> None:
    torchs, ours = pair(batch_first=True)
    xs = inputs()
    expected, _ = torchs(*xs, need_weights=False, attn_mask=CAUSAL, is_causal=True)
    for how in ({"is_causal": True}, {"attn_mask": CAUSAL, "is_causal": True}):
        torch.testing.assert_close(ours(*xs, **how)[0], expected, **CLOSE)


def test_gradients_equal_those_of_multihead_attention() -> None:
    torchs, ours = pair(batch_first=True)
    xs = inputs()
    grads = []
    for module in (torchs, ours):
        out, _ = module(*xs, need_weights=False, attn_mask=CAUSAL, key_padding_mask=PADDING)
        out.square().sum().backward()
        grads.append({name: parameter.grad for name, parameter in module.named_parameters()})
    assert grads[0].keys() == grads[1].keys()
    for name, expected in grads[0].items():
        # A parameter's gradient is a sum over B · LQ rows.
        torch.testing.assert_close(grads[1][name], expected, rtol=0.0, atol=B * LQ * CLOSE["atol"], msg=name)


# The exact rule, against the integral of the projected inputs.


@pytest.mark.parametrize("boundary", ["zero", "repeat", "half", "none", "learned"])
def test_the_exact_rule_is_the_integral(boundary: str) -> None:
    module = ContinuousMultiheadAttention(
        E, H, batch_first=True, boundary=boundary, start_length=0.5, dtype=torch.float64
    )
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    xs = inputs()
    times = torch.rand(LK, dtype=torch.float64).cumsum(0)
    parameters = module.state_dict()
    weights, biases = (parameters[f"in_proj_{name}"].chunk(3) for name in ("weight", "bias"))
    q, k, v = (
        F.linear(x, weight, bias).unflatten(-1, (H, E // H)).transpose(1, 2)
        for x, weight, bias in zip(xs, weights, biases, strict=True)
    )
    node = (module.boundary_key, module.boundary_value) if boundary == "learned" else boundary
    how: dict[str, Any] = {"is_causal": True, "times": times, "window": 3}
    visible = ~PADDING[:, None, None]
    heads, _ = integrate(q, k, v, attn_mask=visible, boundary=node, start_length=0.5, **how)
    out, _ = module(*xs, key_padding_mask=PADDING, **how)
    # The oracle integrates to 1e-12, and the output projection sums E of its numbers.
    torch.testing.assert_close(out, module.out_proj(heads.transpose(1, 2).flatten(2)), rtol=0.0, atol=E * 1e-11)


def test_times_query_times_and_time_window_reach_the_operator() -> None:
    module = ContinuousMultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    xs = inputs()
    times = torch.rand(B, LK, dtype=torch.float64).cumsum(-1)
    now = times + 0.3
    out, _ = module(*xs, is_causal=True, times=times, query_times=now, time_window=1.0)
    assert not torch.allclose(out, module(*xs, is_causal=True, times=times, query_times=now)[0])
    for row in range(B):
        alone = [x[row : row + 1] for x in xs]
        how = {"times": times[row], "query_times": now[row], "time_window": 1.0}
        torch.testing.assert_close(module(*alone, is_causal=True, **how)[0][0], out[row], **CLOSE)


# Parameters.


@pytest.mark.parametrize("how", [{}, {"bias": False}, {"kdim": 6}, {"kdim": 6, "vdim": 10, "bias": False}], ids=str)
def test_parameters_are_named_shaped_and_initialised_as_in_multihead_attention(how: dict[str, Any]) -> None:
    states = []
    for kind in (nn.MultiheadAttention, ContinuousMultiheadAttention):
        torch.manual_seed(0)
        states.append(kind(E, H, **how).state_dict())
    assert list(states[0]) == list(states[1])
    for name, expected in states[0].items():
        assert torch.equal(states[1][name], expected), name


def test_a_state_dict_loads_both_ways() -> None:
    torchs, ours = pair(batch_first=True)
    nn.MultiheadAttention(E, H, dtype=torch.float64).load_state_dict(ours.state_dict())
    learned = ContinuousMultiheadAttention(E, H, boundary="learned", dtype=torch.float64)
    keys = learned.load_state_dict(torchs.state_dict(), strict=False)
    assert keys.missing_keys == ["boundary_key", "boundary_value"]
    assert keys.unexpected_keys == []


def test_a_learned_boundary_starts_at_zero_and_trains() -> None:
    learned = ContinuousMultiheadAttention(E, H, batch_first=True, boundary="learned")
    zero = ContinuousMultiheadAttention(E, H, batch_first=True)
    zero.load_state_dict({name: x for name, x in learned.state_dict().items() if not name.startswith("boundary")})
    xs = [x.float() for x in inputs()]
    assert learned.boundary_key.shape == learned.boundary_value.shape == (H, E // H)
    assert torch.equal(learned(*xs)[0], zero(*xs)[0])

    target = torch.randn(B, LQ, E)
    optimizer = torch.optim.Adam([learned.boundary_key, learned.boundary_value], lr=0.1)
    losses = []
    for _ in range(30):
        loss = F.mse_loss(learned(*xs, is_causal=True)[0], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert learned.boundary_key.any()
    assert learned.boundary_value.any()


def copied(module: nn.Module, how: str) -> nn.Module:
    if how == "deepcopy":
        return copy.deepcopy(module)
    if how == "pickle":
        return pickle.loads(pickle.dumps(module))
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_compute_the_same_and_share_nothing(how: str) -> None:
    module = ContinuousMultiheadAttention(
        E, H, batch_first=True, boundary="learned", start_length=0.5, dtype=torch.float64
    )
    nn.init.normal_(module.boundary_key)
    xs = inputs()
    twin = copied(module, how)
    assert torch.equal(twin(*xs)[0], module(*xs)[0])
    assert not {x.data_ptr() for x in twin.parameters()} & {x.data_ptr() for x in module.parameters()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_dtype_and_device_are_those_asked_for(dtype: torch.dtype) -> None:
    module = ContinuousMultiheadAttention(E, H, batch_first=True, boundary="learned", dtype=dtype)
    assert {x.dtype for x in module.parameters()} == {dtype}
    assert module(*(x.to(dtype) for x in inputs()))[0].dtype == dtype
    assert {x.device.type for x in ContinuousMultiheadAttention(E, H, device="meta").parameters()} == {"meta"}


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_as_multihead_attention(autocast: torch.dtype) -> None:
    torchs, ours = (module.float() for module in pair(batch_first=True))
    xs = [x.float() for x in inputs()]
    with torch.autocast("cpu", autocast):
        expected, out = torchs(*xs, need_weights=False)[0], ours(*xs)[0]
    assert out.dtype == expected.dtype == autocast


def test_repr_names_the_choices() -> None:
    shown = repr(ContinuousMultiheadAttention(E, H, boundary="half", rule="taylor"))
    for part in ("embed_dim=8", "num_heads=2", "boundary='half'", "rule='taylor'"):
        assert part in shown


# Inside torch's own layers.


def encoder_layer(**how: Any) -> tuple[nn.TransformerEncoderLayer, nn.TransformerEncoderLayer]:
    """An encoder layer, and its copy with continuous attention that has the same parameters."""
    torchs = nn.TransformerEncoderLayer(E, H, 2 * E, dropout=0.0, batch_first=True, dtype=torch.float64)
    ours = copy.deepcopy(torchs)
    attention = ContinuousMultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **how)
    attention.load_state_dict(torchs.self_attn.state_dict())
    ours.register_module("self_attn", attention)
    return torchs, ours


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("masked", ["none", "padding", "causal", "both"])
def test_encoder_layer_takes_no_shortcut_past_it(masked: str, grad: bool, training: bool) -> None:
    x = torch.randn(B, LQ, E, dtype=torch.float64)
    how: dict[str, Any] = {
        **({"src_key_padding_mask": PADDING} if masked in ("padding", "both") else {}),
        **({"src_mask": CAUSAL, "is_causal": True} if masked in ("causal", "both") else {}),
    }
    torchs, exact = encoder_layer()
    _, rectangle = encoder_layer(rule="rectangle")
    rectangle.load_state_dict(torchs.state_dict())
    exact.load_state_dict(torchs.state_dict())
    for layer in (torchs, exact, rectangle):
        layer.train(training)
    with torch.set_grad_enabled(grad):
        torchs_out, exact_out, rectangle_out = (layer(x, **how) for layer in (torchs, exact, rectangle))
        # What the layer does, step by step, with the continuous attention in its place.
        attended, _ = exact.self_attn(
            x, x, x, key_padding_mask=how.get("src_key_padding_mask"), attn_mask=how.get("src_mask")
        )
        y = exact.norm1(x + attended)
        by_hand = exact.norm2(y + exact.linear2(F.relu(exact.linear1(y))))
    seen = ~PADDING if "src_key_padding_mask" in how else torch.ones(B, LQ, dtype=torch.bool)
    # The norms divide by standard deviations of about 1; torch's own shortcut may leave padded rows at 0.
    torch.testing.assert_close(rectangle_out[seen], torchs_out[seen], rtol=0.0, atol=4 * CLOSE["atol"])
    torch.testing.assert_close(exact_out, by_hand, rtol=0.0, atol=4 * CLOSE["atol"])
    assert not torch.allclose(exact_out[seen], torchs_out[seen], atol=1e-3)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_encoder_of_several_layers_with_padding(training: bool) -> None:
    torchs, ours = encoder_layer(rule="rectangle")
    x = torch.randn(B, LQ, E, dtype=torch.float64)
    encoders = [nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training) for layer in (torchs, ours)]
    with torch.no_grad():
        expected, out = (encoder(x, src_key_padding_mask=PADDING) for encoder in encoders)
    torch.testing.assert_close(out[~PADDING], expected[~PADDING], rtol=0.0, atol=8 * CLOSE["atol"])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused_by_name() -> None:
    # An encoder that was built around torch's attention packs padded batches into nested tensors in eval mode.
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 2 * E, batch_first=True), 1).eval()
    encoder.layers[0].register_module("self_attn", ContinuousMultiheadAttention(E, H, batch_first=True))
    with torch.no_grad(), pytest.raises(NotImplementedError, match="nested"):
        encoder(torch.zeros(B, LQ, E), src_key_padding_mask=PADDING)


def test_decoder_layer() -> None:
    torchs = nn.TransformerDecoderLayer(E, H, 2 * E, dropout=0.0, batch_first=True, dtype=torch.float64)
    ours = copy.deepcopy(torchs)
    for name in ("self_attn", "multihead_attn"):
        attention = ContinuousMultiheadAttention(E, H, batch_first=True, rule="rectangle", dtype=torch.float64)
        attention.load_state_dict(getattr(torchs, name).state_dict())
        ours.register_module(name, attention)
    x, memory = torch.randn(B, LQ, E).double(), torch.randn(B, LK, E).double()
    how = {"tgt_mask": CAUSAL, "tgt_is_causal": True, "memory_key_padding_mask": PADDING}
    torch.testing.assert_close(ours(x, memory, **how), torchs(x, memory, **how), rtol=0.0, atol=4 * CLOSE["atol"])


# What is refused.

X = torch.zeros(B, LQ, E)
BOOL: dict[str, Any] = {"dtype": torch.bool}
WRONG_MODULES: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "heads don't divide": ({"num_heads": 3}, ValueError, ["embed_dim", "multiple", "embed_dim=8", "num_heads=3"]),
    "no heads": ({"num_heads": 0}, ValueError, ["num_heads=0"]),
    "no width": ({"embed_dim": 0}, ValueError, ["embed_dim=0"]),
    "heads are a float": ({"num_heads": 2.0}, TypeError, ["num_heads", "int", "float"]),
    "width is a string": ({"embed_dim": "8"}, TypeError, ["embed_dim", "int", "str"]),
    "kdim is negative": ({"kdim": -1}, ValueError, ["kdim", "-1"]),
    "vdim is 0": ({"vdim": 0}, ValueError, ["vdim", "0"]),
    "dropout": ({"dropout": 0.1}, NotImplementedError, ["dropout", "must be 0", "0.1", "output"]),
    "unknown boundary": ({"boundary": "one"}, ValueError, ["boundary", "'one'", "zero", "learned"]),
    "unknown rule": ({"rule": "simpson"}, ValueError, ["rule", "'simpson'", "'exact'"]),
    "unknown backend": ({"backend": "cuda"}, ValueError, ["backend", "'cuda'", "'reference'"]),
    "start_length is negative": ({"start_length": -1.0}, ValueError, ["start_length", "at least 0", "-1.0"]),
}
WRONG_INPUTS: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "need_weights": ({"need_weights": True}, NotImplementedError, ["need_weights", "must be False"]),
    "query is a list": ({"query": [1.0]}, TypeError, ["query", "tensor", "list"]),
    "query without a batch": ({"query": X[0]}, ValueError, ["query, key and value", "2 dims", "(5, 8), (3, 5, 8)"]),
    "width": ({"key": X[..., :4]}, ValueError, ["widths", "(8, 8, 8)", "(8, 4, 8)"]),
    "batch sizes": ({"query": X[:2]}, ValueError, ["query and key", "same batch size", "2 and 3"]),
    "lengths": ({"value": X[:, :4]}, ValueError, ["key and value"]),
    "padding too short": (
        {"key_padding_mask": torch.zeros(B, 4, **BOOL)},
        ValueError,
        ["key_padding_mask", "(B, Lk) = (3, 5)", "(3, 4)"],
    ),
    "padding without a batch": (
        {"key_padding_mask": torch.zeros(LK, **BOOL)},
        ValueError,
        ["key_padding_mask", "(3, 5)", "(5,)"],
    ),
    "padding of lengths": (
        {"key_padding_mask": torch.zeros(B, LK).int()},
        TypeError,
        ["key_padding_mask", "boolean", "int32"],
    ),
    "padding is a list": ({"key_padding_mask": [True]}, TypeError, ["key_padding_mask", "tensor", "list"]),
    "padding on another device": (
        {"key_padding_mask": torch.zeros(B, LK, device="meta", **BOOL)},
        ValueError,
        ["key_padding_mask", "device cpu", "got meta"],
    ),
    "padding with a bias": (
        {"key_padding_mask": torch.full((B, LK), 0.5)},
        NotImplementedError,
        ["key_padding_mask", "0 and −inf", "leaks"],
    ),
    "mask too short": (
        {"attn_mask": torch.zeros(LQ, 4, **BOOL)},
        ValueError,
        ["attn_mask", "(Lq, Lk) = (5, 5)", "(B·H, Lq, Lk) = (6, 5, 5)", "(5, 4)"],
    ),
    "mask per batch element": (
        {"attn_mask": torch.zeros(B, LQ, LK, **BOOL)},
        ValueError,
        ["attn_mask", "(6, 5, 5)", "(3, 5, 5)"],
    ),
    "mask of ints": ({"attn_mask": torch.zeros(LQ, LK).int()}, TypeError, ["attn_mask", "boolean", "int32"]),
    "mask is a list": ({"attn_mask": [[True]]}, TypeError, ["attn_mask", "tensor", "list"]),
    "mask on another device": (
        {"attn_mask": torch.zeros(LQ, LK, device="meta")},
        ValueError,
        ["attn_mask", "device cpu", "got meta"],
    ),
    "mask with a bias": (
        {"attn_mask": torch.full((LQ, LK), 0.5)},
        NotImplementedError,
        ["attn_mask", "0 and −inf", "leaks"],
    ),
    "mask with NaN": ({"attn_mask": torch.full((LQ, LK), torch.nan)}, NotImplementedError, ["attn_mask", "0 and −inf"]),
    "query_times without times": ({"query_times": torch.zeros(LQ)}, ValueError, ["query_times", "times=None"]),
    "window is 0": ({"window": 0, "is_causal": True}, ValueError, ["window", "at least 1", "got 0"]),
}


def says(raised: pytest.ExceptionInfo, error: type[Exception], parts: list[str]) -> None:
    assert type(raised.value) is error
    missing = [part for part in parts if part not in str(raised.value)]
    assert not missing, f"{raised.value} doesn't say {missing}"


@pytest.mark.parametrize("case", WRONG_MODULES)
def test_a_wrong_module_is_refused_when_it_is_made(case: str) -> None:
    changes, error, parts = WRONG_MODULES[case]
    with pytest.raises(error) as raised:
        ContinuousMultiheadAttention(**{"embed_dim": E, "num_heads": H, **changes})
    says(raised, error, parts)


@pytest.mark.parametrize("case", WRONG_INPUTS)
def test_wrong_inputs_are_named(case: str) -> None:
    changes, error, parts = WRONG_INPUTS[case]
    module = ContinuousMultiheadAttention(E, H, batch_first=True)
    with pytest.raises(error) as raised:
        module(**{"query": X, "key": X, "value": X, **changes})
    says(raised, error, parts)


@pytest.mark.parametrize("lengths", list(itertools.product([0, 3], [0, 4])), ids=str)
def test_empty_sequences(lengths: tuple[int, int]) -> None:
    lq, lk = lengths
    module = ContinuousMultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    out, _ = module(*inputs(lq=lq, lk=lk))
    assert out.shape == (B, lq, E)
    if lk == 0:
        assert torch.equal(out, module.out_proj.bias.expand_as(out))


def test_a_cache_is_as_it_was_after_a_refusal() -> None:
    module = ContinuousMultiheadAttention(8, 2, batch_first=True, boundary="none", periods=(1.0, 10.0))
    cache = ContinuousCache(0.0)
    x = torch.randn(1, 4, 8)
    module(x, x, x, is_causal=True, cache=cache)
    with pytest.raises(ValueError, match="window must be at least 1"):
        module(x, x, x, is_causal=True, window=0, cache=cache)
    with pytest.raises(ValueError, match="query needs query_times where it is longer"):
        module(torch.randn(1, 5, 8), x, x, is_causal=True, cache=cache)
    with pytest.raises(ValueError, match="don't go together with a cache"):
        module(x, x, x, torch.zeros(1, 4, dtype=torch.bool), cache=cache)
    assert cache.seen == 4
    fourth = ContinuousMultiheadAttention(8, 2, batch_first=True, interpolation="fourth_order")
    with pytest.raises(NotImplementedError, match="a cache needs interpolation='linear'"):
        fourth(x, x, x, cache=cache)


@pytest.mark.parametrize(
    ("periods", "error", "message"),
    [
        (3.0, TypeError, "periods must be a pair"),
        ((1.0, "a"), TypeError, "periods must be a number"),
        ((2.0, 1.0), ValueError, "periods must be positive and rise"),
        ((0.0, 1.0), ValueError, "periods must be positive and rise"),
    ],
)
def test_periods_are_checked(periods: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ContinuousMultiheadAttention(8, 2, periods=periods)
    with pytest.raises(ValueError, match="need an even head dim"):
        ContinuousMultiheadAttention(6, 2, periods=(1.0, 2.0))
