"""Hugging Face models with attn_implementation="continuous": padding, packing, windows, caches, training, refusals.

The models are tiny and random. With the rectangle rule they must give what sdpa gives; with the exact rule a batch
must give what its rows give alone, whatever way the rows were put together.
"""

import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from architectures import pad
from oracle import attention as integrate
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    SmolLM3Config,
    T5Config,
)

from continuous_attention import register_transformers
from continuous_attention.integrations import transformers as bridge

register_transformers()

VOCABULARY, WIDTH, HEADS, WINDOW = 64, 32, 4, 4
# Weights ten times as large as usual: the scores differ by several units, so what a query sees matters.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": WIDTH // HEADS}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": HEADS,
    "n_positions": 64,
    "initializer_range": 0.2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    **{name: SIZES[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": partial(LlamaConfig, **GROUPED),
    "qwen3": partial(Qwen3Config, **GROUPED),
    "gpt2": partial(GPT2Config, **GPT2_SIZES, attn_pdrop=0.0),
    "smollm3": partial(SmolLM3Config, **{**SIZES, "num_key_value_heads": 2}),
    "mistral": partial(MistralConfig, **GROUPED, sliding_window=WINDOW),
}
every_model = pytest.mark.parametrize("name", CONFIGS)
LENGTHS = [9, 6, 3]


def make(name: str, implementation: str = "continuous", **how: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name](), attn_implementation=implementation, **how).eval()


def ragged() -> list[Tensor]:
    return [row[:n] for row, n in zip(tokens(), LENGTHS, strict=True)]


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape or (len(LENGTHS), max(LENGTHS)))


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Equal up to float32: four sub-layers sum WIDTH products each, relative to the largest number."""
    scale = expected.abs().max().item()
    torch.testing.assert_close(got, expected, rtol=0.0, atol=4 * WIDTH * torch.finfo(torch.float32).eps * scale)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()


# The same as sdpa where no layer is continuous, and something else where they are.


@every_model
@pytest.mark.parametrize("side", ["right", "left"])
def test_softmax_layers_give_the_logits_of_sdpa(name: str, side: str) -> None:
    batch = pad(ragged(), side)
    seen = batch["attention_mask"].bool()
    model = make(name)
    model.config.continuous_layers = []
    with torch.no_grad():
        assert_close(model(**batch).logits[seen], make(name, "sdpa")(**batch).logits[seen])
        ids = tokens()
        assert_close(model(ids).logits, make(name, "sdpa")(ids).logits)


@every_model
def test_the_exact_rule_is_what_runs(name: str) -> None:
    ids = tokens()
    with torch.no_grad():
        model = make(name, "sdpa")
        softmax = model(ids).logits
        model.set_attn_implementation("continuous")
        continuous = model(ids).logits
        assert torch.equal(continuous, make(name)(ids).logits)
        model.set_attn_implementation("sdpa")
        assert torch.equal(model(ids).logits, softmax)
    assert (continuous - softmax).abs().max() > 0.1


def test_registering_again_changes_nothing() -> None:
    ids, model = tokens(), make("llama")
    before = model(ids).logits
    register_transformers()
    assert torch.equal(model(ids).logits, before)
    assert torch.equal(make("llama")(ids).logits, before)


# Rows alone and together.


@every_model
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_rows_equal_the_rows_alone(name: str, side: str) -> None:
    model = make(name)
    rows = ragged()
    batch = pad(rows, side)
    seen = batch["attention_mask"].bool()
    with torch.no_grad():
        logits = model(**batch).logits
        refilled = model(**{**batch, "input_ids": batch["input_ids"].where(seen, 7)}).logits
        assert torch.equal(refilled[seen], logits[seen])
        for i, row in enumerate(rows):
            assert_close(logits[i, seen[i]], model(row[None]).logits[0])


@every_model
def test_packed_sequences_equal_the_sequences_alone(name: str) -> None:
    model = make(name)
    rows = ragged()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    with torch.no_grad():
        packed = model(torch.cat(rows)[None], position_ids=positions, use_cache=False).logits[0]
        assert_close(packed, torch.cat([model(row[None]).logits[0] for row in rows]))
        rows[1] = rows[1].flip(0)
        changed = model(torch.cat(rows)[None], position_ids=positions, use_cache=False).logits[0]
    others = torch.ones(sum(LENGTHS), dtype=torch.bool)
    others[LENGTHS[0] : LENGTHS[0] + LENGTHS[1]] = False
    assert torch.equal(changed[others], packed[others])
    assert not torch.equal(changed, packed)


@every_model
def test_a_hole_in_the_padding_cuts_the_path(name: str) -> None:
    model, ids = make(name), tokens()
    mask = torch.ones_like(ids)
    mask[0, 3:5] = mask[1, 6] = 0
    seen = mask.bool()
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    if name == "mistral":
        causal &= ~torch.ones(9, 9, dtype=torch.bool).tril(-WINDOW)
    with torch.no_grad(), pytest.warns(UserWarning, match="a hole in the padding"):  # noqa: PT031
        logits = model(ids, attention_mask=mask).logits
        refilled = model(ids.where(seen, 7), attention_mask=mask).logits
        by_hand = model(ids, attention_mask=(causal & seen[:, None])[:, None]).logits
    assert logits.isfinite().all()
    assert torch.equal(refilled[seen], logits[seen])
    assert_close(by_hand[seen], logits[seen])


@every_model
def test_later_tokens_leave_earlier_logits_unchanged(name: str) -> None:
    model, ids = make(name), tokens()
    later = ids.clone()
    later[:, 5:] = tokens(3, 4)
    with torch.no_grad():
        before, after = model(ids).logits, model(later).logits
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_a_sliding_window_forgets() -> None:
    model, ids = make("mistral"), tokens(1, 12)
    earlier = ids.clone()
    earlier[:, 0] = 3 + (ids[:, 0] - 2) % (VOCABULARY - 3)
    # Two layers reach back 2 · (WINDOW − 1) nodes.
    first_unaware = 1 + 2 * (WINDOW - 1)
    with torch.no_grad():
        before, after = model(ids).logits, model(earlier).logits
    assert not torch.equal(before[:, first_unaware - 1], after[:, first_unaware - 1])
    assert torch.equal(before[:, first_unaware:], after[:, first_unaware:])


def test_a_bidirectional_model_ignores_padding() -> None:
    torch.manual_seed(0)
    config = BertConfig(**SIZES, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
    model = AutoModel.from_config(config, attn_implementation="continuous").eval()
    rows = ragged()
    batch = pad(rows, "right")
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state
        for i, row in enumerate(rows):
            assert_close(hidden[i, : len(row)], model(row[None]).last_hidden_state[0])


# Caches.


@every_model
@pytest.mark.parametrize("cache", [None, "static"], ids=["default cache", "static cache"])
def test_generating_equals_recomputing(name: str, cache: str | None) -> None:
    model = make(name)
    batch = pad([row[:n] for row, n in zip(tokens(2, 6), (6, 3), strict=True)], "left")
    with torch.no_grad():
        run = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=6,
            min_new_tokens=6,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            cache_implementation=cache,
        )
        mask = torch.cat([batch["attention_mask"], torch.ones(2, 6, dtype=torch.long)], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        full = model(run.sequences, attention_mask=mask, position_ids=positions, use_cache=False).logits
    assert_close(torch.stack(run.logits, dim=1), full[:, 5:-1])


# Training.


@every_model
def test_the_loss_goes_down(name: str) -> None:
    model = make(name).train()
    ids = tokens()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(20):
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(loss < float("inf") for loss in losses)
    assert losses[-1] < 0.9 * losses[0]
    assert sum(b < a for a, b in itertools.pairwise(losses)) >= 15


def test_gradient_checkpointing_changes_nothing() -> None:
    model, ids = make("llama").train(), tokens()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert torch.equal(plain, checkpointed)


@every_model
@pytest.mark.parametrize("how", ["bfloat16 model", "bfloat16 autocast"])
def test_bfloat16_is_finite(name: str, how: str) -> None:
    model = make(name, dtype=torch.bfloat16 if how == "bfloat16 model" else torch.float32).train()
    batch = pad(ragged(), "left")
    labels = batch["input_ids"].where(batch["attention_mask"].bool(), -100)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "bfloat16 autocast"):
        run = model(**batch, labels=labels)
    run.loss.backward()
    assert run.logits.dtype == torch.bfloat16
    assert run.logits.isfinite().all()
    assert run.loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# Masks with four dims.


@pytest.mark.parametrize("kind", ["bool", "-inf", "lowest"])
@pytest.mark.parametrize("gaps", [False, True], ids=["causal", "gaps"])
def test_users_masks_with_four_dims(kind: str, gaps: bool) -> None:
    model, ids = make("llama"), tokens()
    visible = torch.ones(9, 9, dtype=torch.bool).tril().expand(3, 1, 9, 9)
    if gaps:
        visible = visible & ((torch.rand(3, 1, 9, 9) < 0.7) | torch.eye(9, dtype=torch.bool))
    low = float("-inf") if kind == "-inf" else torch.finfo(torch.float32).min
    mask = visible if kind == "bool" else torch.zeros(visible.shape).masked_fill(~visible, low)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits
        expected = model(ids, attention_mask=visible).logits if gaps else model(ids).logits
    assert logits.isfinite().all()
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("bias", [-1e4, -1.0, 0.5, float("nan")])
def test_other_additive_masks_are_refused(bias: float) -> None:
    mask = torch.zeros(3, 1, 9, 9).masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), bias)
    with pytest.raises(NotImplementedError, match="mask of LlamaAttention has values other than 0 and −inf"):
        make("llama")(tokens(), attention_mask=mask)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("length", [2, 9])
def test_a_users_mask_of_ints_is_no_mask_of_intervals(length: int, dtype: torch.dtype) -> None:
    mask = torch.ones(length, length, dtype=dtype).tril().expand(3, 1, length, length)
    with pytest.raises((TypeError, ValueError), match=r"mask.*bool"):
        make("llama")(tokens(3, length), attention_mask=mask)


# The attention function by itself.


class Layer(nn.Module):
    """An attention layer as far as the attention function looks at it."""

    def __init__(self, is_causal: bool | None) -> None:
        super().__init__()
        if is_causal is not None:
            self.is_causal = is_causal


def layer_inputs(lq: int = 4, lk: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(2, HEADS, lq, 8, dtype=torch.float64)
    key, value = (torch.randn(2, 2, lk, dim, dtype=torch.float64) for dim in (8, 6))
    return query, key, value


@pytest.mark.parametrize(
    ("own", "given", "causal"),
    [(None, None, True), (True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
@pytest.mark.parametrize(("lq", "lk"), [(4, 4), (3, 5), (1, 5)])
def test_without_a_mask_the_argument_counts_before_the_layer(
    own: bool | None, given: bool | None, causal: bool, lq: int, lk: int
) -> None:
    query, key, value = layer_inputs(lq, lk)
    out, weights = bridge.attention_forward(Layer(own), query, key, value, None, scaling=0.3, is_causal=given)
    visible = torch.ones(lq, lk, dtype=torch.bool)
    if causal and lq > 1:
        visible = visible.tril()
    expected, _ = integrate(query, key, value, attn_mask=visible, scale=0.3, enable_gqa=True)
    assert weights is None
    # The oracle integrates to 1e-12.
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=0.0, atol=1e-11)


def test_arguments_that_dont_matter_are_ignored() -> None:
    query, key, value = layer_inputs()
    plain, _ = bridge.attention_forward(Layer(True), query, key, value, None)
    harmless = {
        "position_ids": torch.arange(4)[None],
        "use_cache": True,
        "output_attentions": False,
        "sliding_window": None,
        "softcap": None,
        "s_aux": None,
        "position_bias": None,
        "num_items_in_batch": torch.tensor(3),
        "cu_seq_lens_q": None,
    }
    out, _ = bridge.attention_forward(Layer(True), query, key, value, None, dropout=0.0, **harmless)
    assert torch.equal(out, plain)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ({"sinks": torch.zeros(HEADS)}, "sinks.*s_aux"),
        ({"position_bias": torch.zeros(1, HEADS, 4, 4)}, "position_bias.*linear"),
        ({"indices": torch.zeros(1)}, "indices.*no path"),
        ({"block_indices": torch.zeros(1)}, "block_indices.*no path"),
        ({"output_attentions": True}, "output_attentions.*no weights per token"),
        ({"dropout": 0.1}, r"dropout 0\.1.*attention_dropout, attn_pdrop"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_cant_be_honoured_is_refused(argument: dict[str, Any], reason: str) -> None:
    query, key, value = layer_inputs()
    with pytest.raises(NotImplementedError, match=f"^Layer .*{reason}"):
        bridge.attention_forward(Layer(True), query, key, value, None, **argument)


REFUSED_MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "attention dropout": (partial(LlamaConfig, **GROUPED, attention_dropout=0.1), "LlamaAttention .*dropout 0.1"),
    "attn_pdrop": (partial(GPT2Config, **GPT2_SIZES, attn_pdrop=0.1), "GPT2Attention .*dropout 0.1"),
}


@pytest.mark.parametrize("case", REFUSED_MODELS)
def test_models_that_cant_be_continuous_are_refused(case: str) -> None:
    config, message = REFUSED_MODELS[case]
    model = AutoModelForCausalLM.from_config(config(), attn_implementation="continuous").train()
    with pytest.raises(NotImplementedError, match=message):
        model(tokens())
    if "dropout" in message:  # not used in evaluation
        assert model.eval()(tokens()).logits.isfinite().all()


def test_t5_with_its_position_bias_is_refused() -> None:
    config = T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=1, num_heads=HEADS)
    model = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="continuous").eval()
    with pytest.raises(NotImplementedError, match="T5Attention passes position_bias"):
        model(input_ids=tokens(), decoder_input_ids=tokens())


def test_attention_weights_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="LlamaAttention asks for output_attentions"):
        make("llama")(tokens(), output_attentions=True)


# Without transformers.


def test_a_missing_transformers_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers: pip install 'continuous-attention\[transformers\]'"):
        register_transformers()


@pytest.mark.parametrize("version", ["4.57.1", "5.0.0", "5.9.2"])
def test_an_old_transformers_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    with pytest.raises(ImportError, match=rf"transformers 5\.12 or newer, got {version}"):
        register_transformers()


@pytest.mark.parametrize("version", ["5.12.0", "5.24.0.dev0", "6.0.0"])
def test_newer_ones_are_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    register_transformers()


def test_cu_seq_lens_cut_the_path() -> None:
    model, ids = make("llama"), tokens()[:1, :8]
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    positions = torch.cat([torch.arange(3), torch.arange(5)])[None]
    with torch.no_grad():
        packed = model(ids, position_ids=positions, cu_seq_lens_q=ends, cu_seq_lens_k=ends).logits
        alone = torch.cat([model(ids[:, :3]).logits, model(ids[:, 3:]).logits], dim=1)
    torch.testing.assert_close(packed, alone)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_model_with_attention_of_its_own_cant_ignore_the_mask(heads: int) -> None:
    # BLOOM adds what the mask function returns to its scores.
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=1, n_head=heads)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="continuous").eval()
    with pytest.raises((RuntimeError, NotImplementedError)):
        model(torch.randint(3, VOCABULARY, (2, 8)))
