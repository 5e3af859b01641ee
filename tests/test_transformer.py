"""Rotary embedding at times against complex numbers; encoder, decoder and block against themselves read otherwise."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from continuous_attention import (
    ContinuousMultiheadAttention,
    ContinuousTransformerBlock,
    ContinuousTransformerDecoder,
    ContinuousTransformerEncoder,
    continuous_attention,
    rotate,
)

EPS = torch.finfo(torch.float64).eps
B, L, Q, F, E, H, LAYERS = 3, 7, 5, 2, 8, 2, 2
PERIODS = (0.5, 20.0)
# Two ways to the same float64 numbers: sums of E, 4 E or L products of numbers of size 1 or so in each of 3 branches
# of each layer, and layer norms, which divide by a deviation of 0.1 or more.
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 3 * LAYERS * 4 * E * 10 * EPS}
OF_COMPILE = pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def uneven(*shape: int) -> Tensor:
    return (torch.rand(*shape, dtype=torch.float64) + 0.1).cumsum(-1)


def encoder(**how: Any) -> ContinuousTransformerEncoder:
    return ContinuousTransformerEncoder(F, E, H, LAYERS, **{"periods": PERIODS, **how}).double()


def decoder(**how: Any) -> ContinuousTransformerDecoder:
    return ContinuousTransformerDecoder(E, H, LAYERS, **{"periods": PERIODS, **how}).double()


def says(raised: pytest.ExceptionInfo, error: type[Exception], parts: list[str]) -> None:
    assert type(raised.value) is error
    missing = [part for part in parts if part not in str(raised.value)]
    assert not missing, f"{raised.value} doesn't say {missing}"


# Rotary embedding.


def turned(x: Tensor, times: Tensor, periods: tuple[float, float]) -> Tensor:
    """The same with complex numbers, one pair and one angle after another; times (B, L)."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:])
    turns = []
    for j in range(half):
        period = periods[0] * (periods[1] / periods[0]) ** (j / max(half - 1, 1))
        turns.append(z[..., j] * torch.exp(2j * math.pi * times[:, None] / period))
    rotated = torch.stack(turns, dim=-1)
    return torch.cat([rotated.real, rotated.imag], dim=-1)


@pytest.mark.parametrize("dim", [2, 4, 10])
def test_rotation_is_a_product_of_complex_numbers(dim: int) -> None:
    x, times = randn(B, H, L, dim), uneven(B, L)
    # Angles up to 2π · 8 / 0.5 are rounded some times, numbers up to 4 once more.
    close: dict[str, Any] = {"rtol": 0.0, "atol": 4 * 4 * EPS * 2 * math.pi * 16}
    torch.testing.assert_close(rotate(x, times, PERIODS), turned(x, times, PERIODS), **close)
    for shared in (times[0], times[:1]):
        torch.testing.assert_close(rotate(x, shared, PERIODS), turned(x, times[:1].expand(B, -1), PERIODS), **close)


def test_products_depend_on_differences_of_time() -> None:
    x, y = randn(B, H, L, 4), randn(B, H, L, 4)
    times = torch.randint(0, 80, (L,)).double() / 8  # exact beside epoch seconds
    start = 1.8e9

    def products(shift: float) -> Tensor:
        return rotate(x, times + shift, PERIODS) @ rotate(y, times + shift, PERIODS).mT

    # An angle of 2π · 1.8e9 / 0.5 is rounded some times; a product sums 4 numbers up to 16, two angles in each.
    angle = 2 * math.pi * start / PERIODS[0]
    torch.testing.assert_close(products(start), products(0.0), rtol=0.0, atol=4 * 16 * 2 * 2 * EPS * angle)


def test_rotation_keeps_dtype_length_and_gradients() -> None:
    x, times = randn(1, 1, 3, 4), uneven(1, 3)
    for dtype in (torch.float32, torch.bfloat16):
        assert rotate(x.to(dtype), times, PERIODS).dtype == dtype
    rotated = rotate(x, times, PERIODS)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), rtol=8 * EPS, atol=0.0)
    leaves = x.requires_grad_(), times.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, times: rotate(x, times, PERIODS), leaves)


@pytest.mark.parametrize("queries", [2, L, L + 2], ids=["fewer queries", "as many", "more queries"])
@pytest.mark.parametrize("given", ["nothing", "times", "query times"])
def test_a_module_with_periods_is_the_operator_of_rotated_heads(given: str, queries: int) -> None:
    module = ContinuousMultiheadAttention(E, H, batch_first=True, periods=PERIODS, dtype=torch.float64)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    query, nodes = randn(B, queries, E), randn(B, L, E)
    times = torch.arange(L).double().expand(B, L) if given == "nothing" else uneven(B, L)
    # Bottom-right: the last query stands on the last node, and what would stand before the first one stands on it.
    asked = times[:, [max(L - queries + j, 0) for j in range(queries)]]
    how: dict[str, Any] = {} if given == "nothing" else {"times": times}
    if given == "query times":
        asked = how["query_times"] = uneven(B, queries) + 0.05
    weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias
    assert biases is not None
    q, k, v = (
        (x @ weight.T + bias).unflatten(-1, (H, E // H)).transpose(1, 2)
        for x, weight, bias in zip((query, nodes, nodes), weights, biases.chunk(3), strict=True)
    )
    heads = continuous_attention(turned(q, asked, PERIODS), turned(k, times, PERIODS), v, is_causal=True, **how)
    assert isinstance(heads, Tensor)
    out, _ = module(query, nodes, nodes, is_causal=True, **how)
    # Scores of size 30 are rounded as angles of size 100 are.
    close: dict[str, Any] = {"rtol": 0.0, "atol": E * 30 * 100 * EPS}
    torch.testing.assert_close(out, module.out_proj(heads.transpose(1, 2).flatten(2)), **close)


@pytest.mark.parametrize(
    ("periods", "error", "parts"),
    [
        (1.0, TypeError, ["periods", "pair", "1.0"]),
        ((1.0,), TypeError, ["periods", "pair"]),
        ((2.0, 1.0), ValueError, ["periods", "rise", "(2.0, 1.0)"]),
        ((0.0, 1.0), ValueError, ["periods", "positive"]),
        ((1.0, math.inf), ValueError, ["periods", "finite", "inf"]),
        (("a", "b"), TypeError, ["periods", "number", "str"]),
    ],
    ids=str,
)
def test_wrong_periods_are_refused(periods: Any, error: type[Exception], parts: list[str]) -> None:
    for make in (encoder, decoder, lambda **how: ContinuousMultiheadAttention(E, H, **how), rotation):
        with pytest.raises(error) as raised:
            make(periods=periods)
        says(raised, error, parts)


HEADS = torch.zeros(2, 1, 3, 4)
WRONG_ROTATIONS: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "odd head dim": ({"x": HEADS[..., :3]}, ValueError, ["x", "even D", "(2, 1, 3, 3)"]),
    "3 dims": ({"x": HEADS[0]}, ValueError, ["x", "(B, H, L, D)", "(1, 3, 4)"]),
    "ints": ({"x": HEADS.long()}, TypeError, ["x", "float32", "int64"]),
    "times of ints": ({"times": torch.arange(3)}, TypeError, ["times", "float32 or float64", "int64"]),
    "times in half precision": ({"times": torch.zeros(3).half()}, TypeError, ["times", "float32", "float16"]),
    "times of more rows": ({"x": HEADS[:1], "times": torch.zeros(2, 3)}, ValueError, ["times", "(1, 3)", "(2, 3)"]),
    "times too short": ({"times": torch.zeros(1)}, ValueError, ["times", "(L,), (1, L) or (B, L)", "(1,)"]),
}


def rotation(**how: Any) -> Tensor:
    return rotate(**{"x": HEADS, "times": torch.zeros(3), "periods": PERIODS, **how})


@pytest.mark.parametrize("case", WRONG_ROTATIONS)
def test_wrong_rotations_are_named(case: str) -> None:
    changes, error, parts = WRONG_ROTATIONS[case]
    with pytest.raises(error) as raised:
        rotation(**changes)
    says(raised, error, parts)


def test_periods_need_pairs() -> None:
    with pytest.raises(ValueError, match="even head dim"):
        ContinuousMultiheadAttention(6, 2, periods=PERIODS)


def test_another_way_to_attend() -> None:
    class Mean(ContinuousMultiheadAttention):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, **how: Any) -> Tensor:
            assert visible is not None
            shapes.extend(x.shape for x in (query, key, value, visible))
            assert how["is_causal"] is False
            return value.mean(2, keepdim=True).expand_as(query)

    shapes: list[torch.Size] = []
    module = Mean(E, H, batch_first=True, dtype=torch.float64)
    query, nodes = randn(B, Q, E), randn(B, L, E)
    out, _ = module(query, nodes, nodes, key_padding_mask=torch.zeros(B, L, dtype=torch.bool))
    assert shapes == [(B, H, Q, E // H), (B, H, L, E // H), (B, H, L, E // H), (B, 1, 1, L)]
    assert module.in_proj_bias is not None
    value = nodes.mean(1, keepdim=True) @ module.in_proj_weight[2 * E :].T + module.in_proj_bias[2 * E :]
    torch.testing.assert_close(out, module.out_proj(value).expand(B, Q, E), **CLOSE)


# Encoder.

RUNS = [(0, 7), (0, 4), (3, 7)]


def padding(length: int = L) -> Tensor:
    present = torch.zeros(B, length, dtype=torch.bool)
    for row, (first, end) in enumerate(RUNS):
        present[row, first : min(end, length)] = True
    return present


@pytest.mark.parametrize(
    ("is_causal", "how"),
    [(False, {}), (True, {}), (True, {"boundary": "zero"}), (False, {"interpolation": "fourth_order"})],
    ids=["all", "causal", "causal from zero", "fourth order"],
)
def test_padding_full_of_nan_changes_nothing_in_the_encoder(is_causal: bool, how: dict[str, Any]) -> None:
    model, values, times, present = encoder(**how), randn(B, L, F), uneven(B, L), padding()
    observed = torch.rand(B, L, F) < 0.7
    values[~observed] = torch.nan
    values[~present], times[~present] = torch.nan, torch.nan
    out = model(values, times, observed=observed, present=present, is_causal=is_causal)
    out[present].square().sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for row, (first, end) in enumerate(RUNS):
        here = slice(row, row + 1), slice(first, end)
        alone = model(values[here], times[here], observed=observed[here], is_causal=is_causal)
        torch.testing.assert_close(out[here], alone, **CLOSE)
        alone.square().sum().backward()
    for name, parameter in model.named_parameters():
        wanted = parameter.grad
        assert wanted is not None
        # A parameter's gradient is a sum over the B · L readings, each through all layers.
        atol = B * L * 100 * CLOSE["atol"] * max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(found[name], wanted, rtol=0.0, atol=atol, msg=name)


@pytest.mark.parametrize("with_times", [False, True], ids=["unit steps", "times"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
def test_any_reading_may_be_padding(is_causal: bool, with_times: bool) -> None:
    """What is padding changes nothing by its time; between readings it cuts the path, as a mask does."""
    present = torch.tensor([[1, 1, 0, 1, 1, 1, 1], [0, 1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0, 0]]).bool()
    model, values = encoder(), randn(B, L, F)
    grid = uneven(B, L) if with_times else torch.arange(L).double().expand(B, L)
    values[~present], times = torch.nan, grid.masked_fill(~present, torch.nan).requires_grad_()
    out = model(values, times if with_times else None, present=present, is_causal=is_causal)
    x = model.embedding(torch.cat([values.masked_fill(~present[..., None], 0.0), torch.ones_like(values)], dim=-1))
    for block in model.blocks:
        x = block(x, along_itself={"times": grid, "is_causal": is_causal, "key_padding_mask": ~present})
    torch.testing.assert_close(out[present], model.norm(x)[present], **CLOSE)
    out[present].square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    if with_times:
        assert times.grad is not None
        assert not times.grad[~present].any()
        assert times.grad[present].isfinite().all()


def test_what_wasnt_observed_has_no_influence() -> None:
    model, values, times = encoder(), randn(B, L, F), uneven(L)
    observed = torch.rand(B, L, F) < 0.5
    spoilt = values.masked_fill(~observed, torch.nan).requires_grad_()
    out = model(spoilt, times, observed=observed)
    assert torch.equal(out, model(values, times, observed=observed))
    (grad,) = torch.autograd.grad(out.square().sum(), spoilt)
    assert not grad[~observed].any()
    assert grad[observed].all()
    # A reading of 0 isn't a missing one.
    zeros = torch.zeros_like(values)
    assert not torch.allclose(model(zeros, times), model(zeros, times, observed=observed))


def test_unit_steps_are_the_default() -> None:
    model, values = encoder(), randn(B, L, F)
    torch.testing.assert_close(model(values), model(values, torch.arange(L).double()), **CLOSE)


def test_a_reading_sees_no_later_one() -> None:
    model, values, times = encoder(), randn(1, L, F).requires_grad_(), uneven(1, L).requires_grad_()
    out = model(values, times, is_causal=True)
    for t in range(L):
        of_values, of_times = torch.autograd.grad(out[0, t].square().sum(), (values, times), retain_graph=True)
        assert not of_values[0, t + 1 :].any()
        assert not of_times[0, t + 1 :].any()
        assert of_values[0, : t + 1].any()


def test_outputs_depend_on_differences_of_time() -> None:
    """Rotation and lengths do; the day after tomorrow is read as today is."""
    model, values = encoder(), randn(B, L, F)
    times = torch.randint(1, 20, (B, L)).cumsum(-1).double() / 8  # exact beside the shift
    shift = 2.0**20
    # Angles of 2π · 2^20 / 0.5 are rounded, which moves scores and everything after them by as much.
    atol = CLOSE["atol"] * 2 * math.pi * shift / PERIODS[0]
    torch.testing.assert_close(model(values, times + shift), model(values, times), rtol=0.0, atol=atol)


@pytest.mark.parametrize("with_times", [False, True], ids=["unit steps", "times"])
@pytest.mark.parametrize("sizes", [[1] * 24, [5, 1, 0, 10, 8]], ids=["one by one", "chunks"])
def test_a_stream_is_read_as_at_once(sizes: list[int], with_times: bool) -> None:
    model, values, times = encoder(), randn(B, 24, F), uneven(B, 24)
    expected = model(values, times if with_times else None, is_causal=True)
    caches, pieces, first = model.caches(0.0, recent=4), [], 0
    assert len(caches) == LAYERS
    for size in sizes:
        here = slice(first, first + size)
        at = times[:, here] if with_times else None
        pieces.append(model(values[:, here], at, is_causal=True, caches=caches))
        first += size
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, **CLOSE)


def test_a_piece_that_fails_leaves_all_caches_as_they_were() -> None:
    model, values = encoder(), randn(B, 24, F)
    expected = model(values, is_causal=True)
    caches, last = model.caches(0.0, recent=4), model.blocks[-1].feedforward
    assert isinstance(last, nn.Module)
    for j in range(24):
        failing = last.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(values[:, j : j + 1], is_causal=True, caches=caches)
        failing.remove()
        assert [cache.seen for cache in caches] == [j] * LAYERS
        out = model(values[:, j : j + 1], is_causal=True, caches=caches)
        torch.testing.assert_close(out, expected[:, j : j + 1], **CLOSE)


def test_one_cache_for_two_blocks_is_refused() -> None:
    model = encoder()
    with pytest.raises(ValueError, match="caches must hold another one for each block, got the same one twice"):
        model(randn(B, L, F), caches=model.caches(0.0)[:1] * LAYERS)


# Decoder.


@pytest.mark.parametrize("self_attention", [False, True], ids=["independent", "self-attention"])
@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"is_causal": True, "time_window": 2.0}], ids=str)
def test_padding_full_of_nan_changes_nothing_in_the_decoder(how: dict[str, Any], self_attention: bool) -> None:
    model = decoder(features=F, self_attention=self_attention)
    memory, times, present = randn(B, L, E), uneven(B, L), padding()
    asked, known, query_present = uneven(B, Q) + 1.0, randn(B, Q, F), padding(Q)
    times[~present], asked[~query_present] = torch.nan, torch.nan
    out = model(asked, memory, times, values=known, present=present, query_present=query_present, **how)
    out[query_present].square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())
    for row, (first, end) in enumerate(RUNS):
        one, nodes, queries = slice(row, row + 1), slice(first, end), slice(first, min(end, Q))
        alone = model(asked[one, queries], memory[one, nodes], times[one, nodes], values=known[one, queries], **how)
        torch.testing.assert_close(out[one, queries], alone, **CLOSE)


def test_queries_without_self_attention_are_independent() -> None:
    model, memory, times, asked = decoder(self_attention=False), randn(B, L, E), uneven(B, L), uneven(B, Q)
    out = model(asked, memory, times)
    order = torch.randperm(Q)  # times needn't rise then
    torch.testing.assert_close(model(asked[:, order], memory, times), out[:, order], **CLOSE)
    torch.testing.assert_close(model(asked[0, 2:3], memory, times)[0], out[0, 2:3], **CLOSE)
    with pytest.raises(ValueError, match="times must not decrease"):
        decoder()(asked.flip(1), memory, times)


def test_one_grid_of_times_for_all() -> None:
    model, memory, times, asked = decoder(), randn(B, L, E), uneven(L), uneven(Q)
    expected = model(asked.expand(B, Q), memory, times.expand(B, L))
    torch.testing.assert_close(model(asked, memory, times), expected, **CLOSE)


def test_a_node_in_between_changes_nothing() -> None:
    """Where no embedding turns the keys between the nodes, memory is a polyline, however many points it is given by."""
    memory, times, x = randn(B, L, E), uneven(B, L), randn(B, Q, E)
    s = torch.rand(L - 1, dtype=torch.float64)

    def finer(nodes: Tensor) -> Tensor:
        weight = s if nodes.ndim == 2 else s[:, None]
        between = nodes[:, :-1] * (1 - weight) + nodes[:, 1:] * weight
        return torch.cat([torch.stack([nodes[:, :-1], between], dim=2).flatten(1, 2), nodes[:, -1:]], dim=1)

    how: dict[str, Any] = {"self_attention": False, "cross_attention": True, "boundary": "none"}
    block = ContinuousTransformerBlock(E, H, **how).double()
    expected = block(x, memory=memory, along_memory={"times": times})
    found = block(x, memory=finer(memory), along_memory={"times": finer(times)})
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_node_given_twice_changes_nothing_in_the_decoder() -> None:
    """Rotated keys are no straight line of the memory, but a segment without length is none in either case."""
    model, memory, times, asked = decoder(self_attention=False), randn(B, L, E), uneven(B, L), uneven(B, Q)
    twice = [0, 1, 1, 2, 3, 4, 4, 4, 5, 6]
    torch.testing.assert_close(model(asked, memory[:, twice], times[:, twice]), model(asked, memory, times), **CLOSE)


def test_a_query_sees_nothing_later() -> None:
    model, memory, times = decoder(features=F), randn(1, L, E).requires_grad_(), torch.arange(L).double()[None]
    known, asked = randn(1, Q, F).requires_grad_(), torch.arange(Q).double()[None] + 0.5
    out = model(asked, memory, times, values=known, is_causal=True)
    for t in range(Q):
        of_memory, of_known = torch.autograd.grad(out[0, t].square().sum(), (memory, known), retain_graph=True)
        assert not of_memory[0, t + 1 :].any()
        assert not of_known[0, t + 1 :].any()
        assert of_memory[0, : t + 1].any()


def test_a_time_window_hides_old_nodes() -> None:
    model, memory, times = decoder(self_attention=False), randn(1, L, E).requires_grad_(), torch.arange(L).double()
    out = model(torch.tensor([5.25]).double(), memory, times, is_causal=True, time_window=2.5)
    (grad,) = torch.autograd.grad(out.square().sum(), memory)
    assert grad[0].any(-1).tolist() == [False, False, False, True, True, True, False]


def test_gradients_reach_all_times() -> None:
    reader, model, values = encoder(), decoder(), randn(B, L, F)
    leaves = uneven(B, L).requires_grad_(), (uneven(B, Q) + 0.5).requires_grad_()
    out = model(leaves[1], reader(values, leaves[0]), leaves[0])
    for grad in torch.autograd.grad(out.square().sum(), leaves):
        assert grad.isfinite().all()
        assert grad.any()


# Modules.


def test_a_block_is_what_its_formula_says() -> None:
    block = ContinuousTransformerBlock(E, H, cross_attention=True, feedforward=5, periods=PERIODS).double()
    x, memory, times, asked = randn(B, Q, E), randn(B, L, E), uneven(B, L), uneven(B, Q)
    along, across = block.self_attention, block.cross_attention
    assert along is not None
    assert across is not None
    nodes = nn.functional.layer_norm(x, (E,))  # norms are the plain ones at first
    y = x + along(nodes, nodes, nodes, times=asked)[0]
    y = y + across(nn.functional.layer_norm(y, (E,)), memory, memory, times=times, query_times=asked)[0]
    parameters = dict(block.feedforward.named_parameters())
    hidden = nn.functional.gelu(nn.functional.layer_norm(y, (E,)) @ parameters["1.weight"].T + parameters["1.bias"])
    assert hidden.shape[-1] == 5
    expected = y + hidden @ parameters["3.weight"].T + parameters["3.bias"]
    found = block(x, along_itself={"times": asked}, memory=memory, along_memory={"times": times, "query_times": asked})
    torch.testing.assert_close(found, expected, **CLOSE)
    with pytest.raises(ValueError, match="memory=None"):
        block(x)


def test_dropout_is_for_training() -> None:
    model, values = encoder(dropout=0.5), randn(B, L, F)
    assert not torch.equal(model(values), model(values))
    model.eval()
    assert torch.equal(model(values), model(values))


@pytest.mark.parametrize("make", [encoder, decoder, lambda: decoder(features=F, self_attention=False)])
def test_a_state_dict_goes_round(make: Any) -> None:
    model, other = make(), make()
    assert any(not torch.equal(x, y) for x, y in zip(model.parameters(), other.parameters(), strict=True))
    other.load_state_dict(model.state_dict())
    for (name, x), y in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("inputs", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_casts_what_is_known(inputs: torch.dtype) -> None:
    reader, model = encoder().float(), decoder(features=F).float()
    values, known, asked = torch.randn(B, L, F), torch.randn(B, Q, F), uneven(B, Q)
    times = uneven(B, L)
    expected = model(asked, reader(values, times), times, values=known)
    with torch.autocast("cpu", torch.bfloat16):
        memory = reader(values.to(inputs), times).to(inputs)
        out = model(asked, memory, times, values=known)
    # Layer norms make outputs of size 1; each of three branches of two layers rounds inputs and products to 8 bits.
    assert (out - expected).abs().max() < 3 * LAYERS * 4 * 2.0**-8 * 4
    with pytest.raises(TypeError, match=r"values must have dtype .*got float64"), torch.autocast("cpu", torch.bfloat16):
        model(asked, memory, times, values=known.double())


def test_models_without_rotation() -> None:
    reader, model, values, times = encoder(periods=None), decoder(periods=None), randn(B, L, F), uneven(B, L)
    twice = [0, 1, 1, 2, 3, 4, 5, 6]
    asked = uneven(B, Q)
    out = model(asked, reader(values, times), times)
    again = reader(values[:, twice], times[:, twice])
    torch.testing.assert_close(model(asked, again, times[:, twice]), out, **CLOSE)


@OF_COMPILE
def test_compiled_models_give_the_same() -> None:
    reader = ContinuousTransformerEncoder(F, E, H, 1, periods=PERIODS).double()
    model = ContinuousTransformerDecoder(E, H, 1, periods=PERIODS, self_attention=False).double()
    values, times, asked = randn(B, L, F), uneven(B, L), uneven(B, Q)

    def both(values: Tensor, times: Tensor, asked: Tensor) -> Tensor:
        return model(asked, reader(values, times), times)

    torch.compiler.reset()
    compiled = torch.compile(both, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(values, times, asked), both(values, times, asked), **CLOSE)


# Errors.

VALUES, TIMES, MEMORY, ASKED = torch.zeros(B, L, F), torch.arange(L).float(), torch.zeros(B, L, E), torch.zeros(B, Q)
WRONG_READINGS: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "values are a list": ({"values": [1.0]}, TypeError, ["values", "tensor", "list"]),
    "values of another dtype": ({"values": VALUES.double()}, TypeError, ["values", "float32", "float64"]),
    "values without a batch": ({"values": VALUES[0]}, ValueError, ["values", "(B, L, F) = (B, L, 2)", "(7, 2)"]),
    "features": ({"values": VALUES[..., :1]}, ValueError, ["values", "(B, L, 2)", "(3, 7, 1)"]),
    "observed of floats": ({"observed": VALUES}, TypeError, ["observed", "bool", "float32"]),
    "observed per reading": ({"observed": VALUES[..., 0] == 0}, ValueError, ["observed", "(B, L, F)", "(3, 7)"]),
    "present too short": ({"present": VALUES[:, :4, 0] == 0}, ValueError, ["present", "(B, L)", "(3, 7)", "(3, 4)"]),
    "times too short": ({"times": TIMES[:4]}, ValueError, ["times", "(7,) or (3, 7)", "(4,)"]),
    "times decrease": ({"times": TIMES.flip(0)}, ValueError, ["times must not decrease", "6.0 then 5.0"]),
    "times of ints": ({"times": TIMES.long()}, TypeError, ["times", "float32 or float64", "int64"]),
    "one cache": ({"caches": [None]}, ValueError, ["caches", "one for each of 2 blocks", "got 1"]),
    "caches and padding": (
        {"caches": [None, None], "present": VALUES[..., 0] == 0},
        ValueError,
        ["present", "caches", "got both"],
    ),
}
WRONG_QUESTIONS: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "query_times are a list": ({"query_times": [1.0]}, TypeError, ["query_times", "tensor", "list"]),
    "query_times of ints": ({"query_times": ASKED.long()}, TypeError, ["query_times", "float32", "int64"]),
    "query_times are a number": ({"query_times": torch.tensor(1.0)}, ValueError, ["query_times", "(Q,)", "()"]),
    "query_times of another batch": ({"query_times": ASKED[:2]}, ValueError, ["query_times", "(3, 5)", "(2, 5)"]),
    "query_times of another dtype": ({"query_times": ASKED.double()}, TypeError, ["times and query_times", "float64"]),
    "query_times are NaN": ({"query_times": ASKED * torch.nan}, ValueError, ["times must be finite", "nan"]),
    "memory is missing": ({"memory": None}, TypeError, ["memory", "tensor", "NoneType"]),
    "memory of another dtype": ({"memory": MEMORY.bfloat16()}, TypeError, ["memory", "float32", "bfloat16"]),
    "memory without a batch": ({"memory": MEMORY[0]}, ValueError, ["memory", "(B, L, 8)", "(7, 8)"]),
    "memory is too narrow": ({"memory": MEMORY[..., :4]}, ValueError, ["memory", "(B, L, 8)", "(3, 7, 4)"]),
    "times too short": ({"times": TIMES[:4]}, ValueError, ["times", "(7,) or (3, 7)", "(4,)"]),
    "no times": ({"times": None}, ValueError, ["query_times needs times"]),
    "values without features": (
        {"values": VALUES[:, :Q]},
        ValueError,
        ["values", "None where it has none", "(3, 5, 2)"],
    ),
    "present too short": ({"present": ASKED == 0}, ValueError, ["present", "(3, 7)", "(3, 5)"]),
    "query_present too long": (
        {"query_present": MEMORY[..., 0] == 0},
        ValueError,
        ["query_present", "(3, 5)", "(3, 7)"],
    ),
    "time_window is 0": ({"time_window": 0.0}, ValueError, ["time_window", "positive", "0.0"]),
}


WRONG_SIZES: list[tuple[str, Any, type[Exception], str]] = [
    ("num_layers", -1, ValueError, "at least 1, got -1"),
    ("num_layers", 2.0, TypeError, "an int, got float"),
    ("features", -2, ValueError, "at least [01], got -2"),
    ("features", "a", TypeError, "an int, got str"),
    ("embed_dim", 0, ValueError, "at least 1, got 0"),
    ("embed_dim", "a", TypeError, "an int, got str"),
    ("num_heads", 0, ValueError, "positive"),
    ("num_heads", 3, ValueError, "a multiple of num_heads"),
    ("feedforward", -1, ValueError, "at least 1, got -1"),
    ("feedforward", True, TypeError, "an int, got bool"),
]


@pytest.mark.parametrize(("name", "size", "error", "words"), WRONG_SIZES, ids=str)
def test_wrong_sizes_are_named(name: str, size: Any, error: type[Exception], words: str) -> None:
    sizes = {"features": F, "embed_dim": E, "num_heads": H, "num_layers": LAYERS, "periods": PERIODS, name: size}
    for make in (ContinuousTransformerEncoder, ContinuousTransformerDecoder):
        with pytest.raises(error, match=f"({name}|embed_dim) must be {words}"):
            make(**sizes)


@pytest.mark.parametrize("case", WRONG_READINGS)
def test_wrong_readings_are_named(case: str) -> None:
    changes, error, parts = WRONG_READINGS[case]
    with pytest.raises(error) as raised:
        encoder().float()(**{"values": VALUES, "times": TIMES, **changes})
    says(raised, error, parts)


@pytest.mark.parametrize("case", WRONG_QUESTIONS)
def test_wrong_questions_are_named(case: str) -> None:
    changes, error, parts = WRONG_QUESTIONS[case]
    with pytest.raises(error) as raised:
        decoder().float()(**{"query_times": ASKED, "memory": MEMORY, "times": TIMES, **changes})
    says(raised, error, parts)


@pytest.mark.parametrize("values", [None, VALUES, VALUES[:, :Q, :1]], ids=["none", "length", "features"])
def test_a_decoder_with_features_wants_them(values: Tensor | None) -> None:
    with pytest.raises(ValueError, match=r"values must have shape \(B, Q, F\) = \(3, 5, 2\)"):
        decoder(features=F).float()(ASKED, MEMORY, TIMES, values=values)


def test_fourth_order_isnt_causal() -> None:
    with pytest.raises(NotImplementedError, match="is_causal"):
        encoder(interpolation="fourth_order").float()(VALUES, TIMES, is_causal=True)
