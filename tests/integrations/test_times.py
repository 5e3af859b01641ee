"""Times inside Hugging Face models: `take_times(model)` and `model(…, times=t)`.

The oracle is a second attention function, "by hand", which never hears of the hooks: the test gives it the times of
each kind of layer, worked out by loops. Everything else is a property: a sample alone, another unit, a split in two.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import SERIES, pad, series
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BertConfig,
    GPT2Config,
    InformerConfig,
    LlamaConfig,
    MistralConfig,
    PatchTSTConfig,
    PatchTSTForClassification,
    PatchTSTForPrediction,
    PatchTSTForPretraining,
    PatchTSTForRegression,
    PatchTSTModel,
    StaticCache,
    TimeSeriesTransformerConfig,
    Trainer,
    TrainingArguments,
)

from continuous_attention import (
    continuous_attention,
    register_transformers,
    switch_to_continuous,
    switch_to_softmax,
    take_times,
)

register_transformers()

VOCABULARY, WIDTH, HEADS, LENGTH, WINDOW = 64, 32, 4, 9, 4
# Weights ten times as large as usual: the scores differ by several units, so where the path is long matters.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {"n_embd": WIDTH, "n_layer": 2, "n_head": HEADS, "n_positions": 64, "attn_pdrop": 0.0}
DECODERS: dict[str, Callable[[], Any]] = {
    "llama": partial(LlamaConfig, **SIZES),
    "mistral": partial(MistralConfig, **SIZES, sliding_window=WINDOW),
    "gpt2": partial(GPT2Config, vocab_size=VOCABULARY, initializer_range=0.2, **GPT2),
}
STACKS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "init_std": 0.2,
    "dropout": 0.0,
}
# 23 readings in patches of 4, one every 3: the first one fits into no patch.
READINGS, PATCH, STRIDE, CHANNELS = 23, 4, 3, 2
PATCHES: dict[str, Any] = {
    "num_input_channels": CHANNELS,
    "context_length": READINGS,
    "patch_length": PATCH,
    "patch_stride": STRIDE,
    "d_model": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "ffn_dim": 48,
    "init_std": 0.2,
    "prediction_length": 3,
    "num_targets": 3,
    "random_mask_ratio": 0.0,
}
every_decoder = pytest.mark.parametrize("name", DECODERS)


def decoder(name: str = "llama", implementation: str = "continuous", **how: Any) -> Any:
    torch.manual_seed(0)
    config = DECODERS[name]()
    vars(config).update(how)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    take_times(model)
    return model


def bart(implementation: str = "continuous") -> Any:
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(BartConfig(**STACKS), attn_implementation=implementation).eval()
    take_times(model)
    return model


def patchtst(kind: Any = PatchTSTModel, implementation: str = "continuous", **how: Any) -> Any:
    torch.manual_seed(0)
    model = kind._from_config(PatchTSTConfig(**{**PATCHES, **how}), attn_implementation=implementation).eval()
    take_times(model)
    return model


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape or (3, LENGTH))


def grid(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Steps from 0.05 to 8, so that some segments are far longer than others."""
    return torch.empty(shape, dtype=dtype).uniform_(-3, 2).exp().cumsum(-1)


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Equal up to float32: two layers sum WIDTH products in each of eight steps, relative to the largest number."""
    atol = 8 * WIDTH * torch.finfo(torch.float32).eps * expected.abs().max().item()
    torch.testing.assert_close(got, expected, rtol=0.0, atol=atol)


def assert_differs(got: Tensor, other: Tensor) -> None:
    assert (got - other).abs().max() > 0.01 * other.abs().max()


@pytest.fixture(autouse=True)
def _quiet() -> None:
    torch.manual_seed(1)
    transformers.logging.set_verbosity_error()


# The oracle


class ByHand:
    """An attention function of its own: it runs with the times that `given` has for the layer's kind of nodes."""

    given: Callable[[nn.Module, Tensor, Tensor], Tensor | None]

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, scaling: float, **__: Any
    ) -> tuple[Tensor, None]:
        window = getattr(module.config, "sliding_window", None)
        # Informer's decoder doesn't say that it's causal; no test here has as many nodes in its encoder.
        is_decoder = getattr(module, "is_decoder", False) and query.shape[2] == key.shape[2]
        causal = is_decoder or getattr(module, "is_causal", True)
        out = continuous_attention(
            query,
            key,
            value,
            scale=scaling,
            enable_gqa=True,
            is_causal=causal,
            window=window,
            times=self.given(module, query, key),
        )
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).contiguous(), None


@pytest.fixture
def by_hand() -> Iterator[ByHand]:
    function = ByHand()
    AttentionInterface.register("by_hand", function)  # pyright: ignore[reportArgumentType]
    AttentionMaskInterface.register("by_hand", lambda **_: None)  # pyright: ignore[reportArgumentType]
    yield function
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop("by_hand")


@every_decoder
def test_a_decoder_runs_at_its_times(name: str, by_hand: ByHand) -> None:
    ids, times = tokens(), grid(3, LENGTH)
    by_hand.given = lambda *_: times
    with torch.no_grad():
        got = decoder(name)(ids, times=times).logits
        assert_close(got, decoder(name, "by_hand")(ids).logits)
        assert_differs(got, decoder(name)(ids).logits)


def times_of_patches(times: Tensor, use_cls_token: bool) -> Tensor:
    """(B · CHANNELS, nodes): the mean of each patch's readings, patches laid from the last reading backwards."""
    rows = []
    for row in times.double():
        ends = range(READINGS, PATCH - 1, -STRIDE)
        patches = [row[end - PATCH : end].mean() for end in reversed(ends)]
        rows += [torch.stack(patches[:1] * use_cls_token + patches)] * CHANNELS
    return torch.stack(rows).to(times.dtype)


def first(output: Any) -> Tensor:
    """The tensor that a PatchTST's output is about."""
    return next(output[x] for x in output if x != "loss" and isinstance(output[x], Tensor))


KINDS = [PatchTSTModel, PatchTSTForPrediction, PatchTSTForRegression, PatchTSTForClassification, PatchTSTForPretraining]


@pytest.mark.parametrize("use_cls_token", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_patchtst_runs_at_the_times_of_its_patches(kind: Any, use_cls_token: bool, by_hand: ByHand) -> None:
    times = grid(3, READINGS)
    by_hand.given = lambda *_: times_of_patches(times, use_cls_token)
    inputs = {"past_values": torch.randn(3, READINGS, CHANNELS)}
    make = partial(patchtst, kind, use_cls_token=use_cls_token)
    with torch.no_grad():
        got = first(make()(**inputs, times=times))
        assert_close(got, first(make(implementation="by_hand")(**inputs)))
        assert_differs(got, first(make()(**inputs)))


@pytest.mark.parametrize("which", [("times", "decoder_times"), ("times",), ("decoder_times",)])
def test_an_encoder_decoder_runs_at_both(which: tuple[str, ...], by_hand: ByHand) -> None:
    inputs = {"input_ids": tokens(), "decoder_input_ids": tokens(3, 5)}
    all_times = {"times": grid(3, LENGTH), "decoder_times": grid(3, 5)}
    times = {name: all_times[name] for name in which}

    def given(_: nn.Module, query: Tensor, key: Tensor) -> Tensor | None:
        return times.get("times" if key.shape[2] == LENGTH else "decoder_times")

    by_hand.given = given
    with torch.no_grad():
        assert_close(bart()(**inputs, **times).logits, bart("by_hand")(**inputs).logits)


@pytest.mark.parametrize(
    "config",
    [
        partial(TimeSeriesTransformerConfig, **SERIES),
        partial(InformerConfig, **SERIES, attention_type="full", distil=False),
    ],
    ids=["TimeSeriesTransformer", "Informer"],
)
def test_time_series_transformers_run_at_both(config: Callable[[], Any], by_hand: ByHand) -> None:
    inputs = series()
    times, decoder_times = grid(2, SERIES["context_length"]), grid(2, SERIES["prediction_length"])
    by_hand.given = lambda _, query, key: times if key.shape[2] == times.shape[-1] else decoder_times
    got = []
    for implementation, given in (("by_hand", {}), ("continuous", {"times": times, "decoder_times": decoder_times})):
        torch.manual_seed(0)
        model = AutoModel.from_config(config(), attn_implementation=implementation).eval()
        take_times(model)
        with torch.no_grad():
            got.append(model(**inputs, **given).last_hidden_state)
    assert_close(*got)


# Properties


@every_decoder
def test_unit_times_are_no_times(name: str) -> None:
    model, ids = decoder(name), tokens()
    with torch.no_grad():
        for times in (torch.arange(LENGTH) + 5.0, torch.arange(LENGTH).expand(3, -1).double()):
            assert_close(model(ids, times=times).logits, model(ids).logits)


def test_unit_patches_are_no_times() -> None:
    model, values = patchtst(), torch.randn(3, READINGS, CHANNELS)
    with torch.no_grad():
        times = torch.arange(READINGS) / STRIDE
        assert_close(first(model(values, times=times)), first(model(past_values=values)))


@every_decoder
def test_each_sample_has_its_own_grid(name: str) -> None:
    model, ids, times = decoder(name), tokens(), grid(3, LENGTH)
    with torch.no_grad():
        alone = [model(row[None], times=own).logits for row, own in zip(ids, times, strict=True)]
        assert_close(model(ids, times=times).logits, torch.cat(alone))


def test_each_series_has_its_own_grid() -> None:
    model, values, times = patchtst(), torch.randn(3, READINGS, CHANNELS), grid(3, READINGS)
    with torch.no_grad():
        alone = [first(model(row[None], times=own)) for row, own in zip(values, times, strict=True)]
        assert_close(first(model(values, times=times)), torch.cat(alone))


@pytest.mark.parametrize("unit", [0.25, 1000.0])
def test_the_unit_does_not_matter(unit: float) -> None:
    ids, times = tokens(), grid(3, LENGTH)
    with torch.no_grad():
        expected = decoder()(ids, times=times).logits
        assert_close(decoder(continuous_start_length=unit)(ids, times=unit * times).logits, expected)
        assert_differs(decoder(continuous_start_length=unit)(ids, times=times).logits, expected)


@every_decoder
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_rows_are_what_they_are_alone(name: str, side: str) -> None:
    lengths = [9, 6, 3]
    rows, own = [tokens(n) for n in lengths], [grid(n) for n in lengths]
    batch, model = pad(rows, side), decoder(name)
    times = torch.full((3, 9), float("nan"))
    times[batch["attention_mask"].bool()] = torch.cat(own)
    with torch.no_grad():
        got = model(**batch, times=times).logits[batch["attention_mask"].bool()]
        alone = [model(row[None], times=x).logits[0] for row, x in zip(rows, own, strict=True)]
        assert_close(got, torch.cat(alone))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_packed_rows_are_what_they_are_alone(name: str) -> None:
    lengths = [6, 3, 5]
    rows, own = [tokens(n) for n in lengths], [grid(n) for n in lengths]
    model = decoder(name)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        got = model(torch.cat(rows)[None], position_ids=positions, times=torch.cat(own)[None], use_cache=False).logits
        alone = [model(row[None], times=x).logits[0] for row, x in zip(rows, own, strict=True)]
        assert_close(got[0], torch.cat(alone))


@every_decoder
@pytest.mark.parametrize("cuts", [range(1, LENGTH), [6, 8], [2, 5]], ids=["tokens", "chunks", "more chunks"])
def test_cached_decoding_is_the_whole_forward(name: str, cuts: Any) -> None:
    model, ids, times = decoder(name), tokens(), grid(3, LENGTH)
    cache, logits = None, []
    with torch.no_grad():
        for begin, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
            out = model(ids[:, begin:end], times=times[:, :end], cache=cache, use_cache=True)
            cache = out.cache
            logits.append(out.logits)
        assert_close(torch.cat(logits, 1), model(ids, times=times).logits)


def test_a_static_cache_takes_a_time_for_each_place() -> None:
    model, ids, times = decoder(), tokens(), grid(3, LENGTH)
    places = torch.cat([times, torch.full((3, 4), float("nan"))], dim=-1)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH + 4)
    with torch.no_grad():
        logits = [model(ids[:, begin:end], times=places, cache=cache).logits for begin, end in [(0, 5), (5, 6), (6, 9)]]
        assert_close(torch.cat(logits, 1), model(ids, times=times).logits)


def test_an_encoder_decoder_decodes_with_a_cache() -> None:
    model, ids, target = bart(), tokens(), tokens(3, 5)
    times, decoder_times = grid(3, LENGTH), grid(3, 5)
    encoded = model(ids, decoder_input_ids=target, times=times).encoder_last_hidden_state
    cache, logits = None, []
    with torch.no_grad():
        for end in range(1, 6):
            out = model(
                encoder_outputs=(encoded,),
                decoder_input_ids=target[:, end - 1 : end],
                times=times,
                decoder_times=decoder_times[:, :end],
                cache=cache,
                use_cache=True,
            )
            cache = out.cache
            logits.append(out.logits)
        expected = model(ids, decoder_input_ids=target, times=times, decoder_times=decoder_times).logits
        assert_close(torch.cat(logits, 1), expected)


def test_layers_that_run_softmax_ignore_times() -> None:
    ids, times = tokens(), grid(3, LENGTH)
    with torch.no_grad():
        softmax = decoder("llama", "sdpa")(ids).logits
        assert_close(decoder(continuous_layers=[], continuous_start_length=3.0)(ids, times=times).logits, softmax)


def test_epoch_seconds_keep_their_differences() -> None:
    model, ids, times = decoder(), tokens(), grid(3, LENGTH, dtype=torch.float64)
    series, values = patchtst(), torch.randn(3, READINGS, CHANNELS)
    readings = grid(3, READINGS, dtype=torch.float64)
    with torch.no_grad():
        assert_close(model(ids, times=times + 1.7e9).logits, model(ids, times=times.float()).logits)
        assert_close(first(series(values, times=readings + 1.7e9)), first(series(values, times=readings.float())))


def test_equal_readings_never_step_back() -> None:
    model = patchtst(patch_stride=1)
    with torch.no_grad():
        for scale in torch.rand(20):
            times = (grid(2, READINGS) * scale).repeat_interleave(2, dim=-1)[:, :READINGS]
            assert first(model(torch.randn(2, READINGS, CHANNELS), times=times)).isfinite().all()


# Gradients, and the ways a forward is run


def gradients(model: Any, times: Tensor, *batches: dict[str, Any]) -> list[Tensor]:
    """Of two forwards before one backward."""
    model.zero_grad()
    times.grad = None
    losses = [model(**batch, times=times).loss for batch in batches]
    torch.stack(losses).sum().backward()
    assert times.grad is not None
    return [times.grad, *(x.grad.clone() for x in model.parameters() if x.grad is not None)]


def test_gradients_reach_times(by_hand: ByHand) -> None:
    ids, times = tokens(), grid(3, LENGTH).requires_grad_()
    got = gradients(decoder(), times, {"input_ids": ids, "labels": ids})[0].clone()
    by_hand.given = lambda *_: times
    times.grad = None
    decoder("llama", "by_hand")(ids, labels=ids).loss.backward()
    assert times.grad is not None
    assert got[:, :-1].abs().min() > 0
    assert_close(got, times.grad)


def test_gradients_reach_the_times_of_readings() -> None:
    model, values, times = patchtst(PatchTSTForPrediction), torch.randn(3, READINGS, CHANNELS), grid(3, READINGS)
    times.requires_grad_()
    first(model(values, times=times)).square().sum().backward()
    assert times.grad is not None
    assert (times.grad[:, 1:] != 0).all()
    assert (times.grad[:, 0] == 0).all()  # the reading that fits into no patch


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_run_again_at_their_times(reentrant: bool) -> None:
    model, times = decoder().train(), grid(3, LENGTH).requires_grad_()
    batches = [{"input_ids": ids, "labels": ids} for ids in (tokens(), tokens())]
    expected = gradients(model, times, *batches)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    for got, x in zip(gradients(model, times, *batches), expected, strict=True):
        assert_close(got, x)
    # A forward without times runs again without them, and one with others between makes no difference.
    ids = tokens()
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    model(ids, labels=ids, times=times)
    loss.backward()
    got = [x.grad.clone() for x in model.parameters()]
    model.activation_checkpointing_disable()
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    for x, parameter in zip(got, model.parameters(), strict=True):
        assert_close(x, parameter.grad)


def test_threads_have_times_of_their_own() -> None:
    model, ids = decoder(), tokens()
    grids = [grid(3, LENGTH) for _ in range(4)] + [None]
    results: dict[int, Tensor] = {}

    def run(i: int) -> None:
        for _ in range(5):
            with torch.no_grad():
                results[i] = model(ids, times=grids[i]).logits

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(grids))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        for i, times in enumerate(grids):
            assert_close(results[i], model(ids, times=times).logits)


def test_a_compiled_forward_takes_times() -> None:
    model, ids, times = decoder(num_hidden_layers=1), tokens(), grid(3, LENGTH)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert_close(compiled(ids, times=times).logits, model(ids, times=times).logits)


def test_trainer_hands_times_on(tmp_path: Path) -> None:
    model = decoder()
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda *x: seen.append(x[2]["times"]), with_kwargs=True, prepend=True)
    rows = [{"input_ids": ids, "labels": ids, "times": grid(LENGTH)} for ids in tokens(4, LENGTH)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        remove_unused_columns=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        activation_checkpointing=True,
        dataloader_pin_memory=False,
    )
    before = copy.deepcopy(model.state_dict())
    Trainer(model=model, args=arguments, train_dataset=rows).train()  # pyright: ignore[reportArgumentType]
    assert [tuple(x.shape) for x in seen] == [(2, LENGTH)] * 2
    assert any((before[name] != x).any() for name, x in model.state_dict().items())


# A forward leaves nothing behind


def test_it_can_be_called_twice_and_copied() -> None:
    model, ids, times = decoder(), tokens(), grid(3, LENGTH)
    take_times(model)
    assert len(model._forward_pre_hooks) == len(model._forward_hooks) == 1
    with torch.no_grad():
        expected = model(ids, times=times).logits
        copied = copy.deepcopy(model)
        del model
        assert_close(copied(ids, times=times).logits, expected)


def test_a_part_may_take_times_as_well() -> None:
    model, ids, times = decoder(), tokens(), grid(3, LENGTH)
    with torch.no_grad():
        expected, without = model(ids, times=times).logits, model(ids).logits
        take_times(model.model)
        assert_close(model(ids, times=times).logits, expected)
        assert_close(model.lm_head(model.model(ids, times=times).last_hidden_state), expected)
        assert_close(model(ids).logits, without)


def test_times_are_forgotten_after_an_error() -> None:
    model, ids, times = decoder(), tokens(), grid(3, LENGTH)
    with torch.no_grad():
        expected = model(ids).logits
        with pytest.raises(ValueError, match="times must have one time per node"):
            model(ids, times=times[:, 1:])
        assert_close(model(ids).logits, expected)
        assert_close(model(ids, times=None).logits, expected)
        with pytest.raises(IndexError):
            model(ids + VOCABULARY, times=times)
        assert_close(model(ids).logits, expected)


# The start length


def test_the_start_length_is_saved_and_undone(tmp_path: Path) -> None:
    model = decoder(continuous_start_length=2.5)
    switch_to_continuous(model)
    model.config.save_pretrained(tmp_path)
    assert LlamaConfig.from_pretrained(tmp_path).continuous_start_length == 2.5
    switch_to_softmax(model)
    assert not hasattr(model.config, "continuous_start_length")


@pytest.mark.parametrize(("wrong", "error"), [(-1.0, ValueError), ("long", TypeError)])
def test_the_start_length_is_checked(wrong: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="start_length must be"):
        decoder(continuous_start_length=wrong)(tokens(), times=grid(LENGTH))


# What is refused


@pytest.mark.parametrize(
    ("times", "error", "message"),
    [
        (grid(3, LENGTH + 1), ValueError, r"LlamaAttention, .* = \(9,\) or \(3, 9\), got \(3, 10\)"),
        (grid(2, LENGTH), ValueError, r"times must have .*\(3, 9\), got \(2, 9\)"),
        (grid(3, LENGTH, 1), ValueError, r"times must have .*got \(3, 9, 1\)"),
        (grid(3, LENGTH).half(), TypeError, "times must have dtype float32 or float64, got float16"),
        (torch.arange(LENGTH), TypeError, "times must have dtype float32 or float64, got int64"),
        ([1.0] * LENGTH, TypeError, "times must be a tensor, got list"),
        (-grid(3, LENGTH), ValueError, "times must not decrease"),
        (grid(3, LENGTH) * torch.inf, ValueError, "times must be finite"),
    ],
)
def test_wrong_times_are_refused(times: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        decoder()(tokens(), times=times)


@pytest.mark.parametrize(
    ("times", "message"),
    [
        (grid(3, READINGS - 1), r"one time per reading.*= \(23,\) or \(3, 23\), got \(3, 22\)"),
        (grid(3 * CHANNELS, READINGS), r"one time per reading.*got \(6, 23\)"),
        (torch.cat([grid(READINGS - 2), torch.zeros(2)]), "times must not decrease"),
    ],
)
def test_wrong_times_of_readings_are_refused(times: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        patchtst()(torch.randn(3, READINGS, CHANNELS), times=times)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ({}, TypeError, "past_values must be a tensor, got NoneType"),
        ({"past_values": torch.randn(3, READINGS)}, ValueError, r"past_values must have shape .*got \(3, 23\)"),
    ],
)
def test_readings_without_values_are_refused(inputs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        patchtst()(**inputs, times=grid(READINGS))


def test_attention_along_the_channels_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="channel_attention=True"):
        patchtst(channel_attention=True)(torch.randn(3, READINGS, CHANNELS), times=grid(READINGS))


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("count", [LENGTH + 1, LENGTH - 1, WINDOW, 1])
def test_times_must_be_those_of_all_cached_nodes(name: str, count: int) -> None:
    model, ids = decoder(name), tokens()
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).cache
        with pytest.raises(ValueError, match=rf"times must have one time per node .*= \(9,\) or .*got \(3, {count}\)"):
            model(ids[:, -1:], times=grid(3, count), cache=cache)


def test_a_static_cache_that_slides_is_refused() -> None:
    model = decoder("mistral")
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    with pytest.raises(NotImplementedError, match="static cache that slides"):
        model(tokens(), times=grid(LENGTH), cache=cache)


def test_times_that_nothing_reads_are_refused() -> None:
    with pytest.raises(ValueError, match="reached no attention layer of LlamaForCausalLM, which runs with 'sdpa'"):
        decoder("llama", "sdpa")(tokens(), times=grid(LENGTH))


def test_times_without_take_times_are_refused() -> None:
    model = AutoModelForCausalLM.from_config(DECODERS["llama"](), attn_implementation="continuous")
    with pytest.raises(NotImplementedError, match=r"passes times.*take_times\(model\)"):
        model(tokens(), times=grid(LENGTH))


def test_decoder_times_need_a_decoder_beside_an_encoder() -> None:
    with pytest.raises(ValueError, match="LlamaForCausalLM takes times alone"):
        decoder()(tokens(), decoder_times=grid(LENGTH))


def test_cross_attention_to_nodes_without_times_is_refused() -> None:
    config = BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="continuous").eval()
    take_times(model)
    with pytest.raises(NotImplementedError, match="nodes from elsewhere"):
        model(tokens(), encoder_hidden_states=torch.randn(3, LENGTH, WIDTH), times=grid(LENGTH))


def test_generate_refuses_times() -> None:
    with pytest.raises(ValueError, match=r"not used by the model.*times"):
        decoder().generate(tokens(), times=grid(3, LENGTH), max_new_tokens=2)


def test_other_models_are_refused() -> None:
    with pytest.raises(TypeError, match=r"transformers\.PreTrainedModel, got Linear"):
        take_times(nn.Linear(2, 2))
