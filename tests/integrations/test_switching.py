"""A model's choice of layers and boundary: switching, checking, saving, loading, training, sharding, compiling."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from oracle import attention as integrate
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BeitConfig,
    BloomConfig,
    CLIPConfig,
    Gemma2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    SiglipVisionConfig,
    StaticCache,
    T5Config,
    TimeSeriesTransformerConfig,
    TrainingArguments,
    ViTConfig,
    WhisperConfig,
)

from continuous_attention import load_continuous, register_transformers, switch_to_continuous, switch_to_softmax
from continuous_attention.integrations import transformers as bridge

register_transformers()

LAYERS, WIDTH, HEADS, VOCABULARY = 4, 32, 4, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
VISION: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "image_size": 32,
    "patch_size": 8,
}
CHOSEN: dict[str, tuple[Any, list[int]]] = {
    "all": ("all", [0, 1, 2, 3]),
    "upper": ("upper", [2, 3]),
    "odd": ("odd", [1, 3]),
    "two": ((0, 2), [0, 2]),
    "last": ([-1], [3]),
    "none": ([], []),
}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def make(**how: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **how})).eval()


def tokens(*shape: int) -> Tensor:
    return torch.randint(3, VOCABULARY, shape or (2, 9))


def logits(model: Any, ids: Tensor, **how: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **how).logits


def boundaries(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: x for name, x in model.named_parameters() if "boundary" in name}


def randomize(model: nn.Module) -> None:
    for parameter in boundaries(model).values():
        nn.init.normal_(parameter)


def calls(model: Any, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keyword arguments of each layer's call of `continuous_attention`."""
    heard: list[dict[str, Any]] = []
    original = bridge.continuous_attention

    def listen(*args: Any, **kwargs: Any) -> Any:
        heard.append(kwargs)
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(bridge, "continuous_attention", listen)
        logits(model, ids)
    return heard


# The choice.


@pytest.mark.parametrize("boundary", ["zero", "repeat", "half", "none", "learned"])
@pytest.mark.parametrize("choice", CHOSEN)
def test_each_layer_runs_what_was_chosen(choice: str, boundary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, chosen = CHOSEN[choice]
    model = make()
    switch_to_continuous(model, layers=layers, boundary=boundary)
    for index, call in enumerate(calls(model, tokens(), monkeypatch)):
        assert call["rule"] == ("exact" if index in chosen else "rectangle")
        if index in chosen and boundary == "learned":
            attention = model.model.layers[index].self_attn
            assert call["boundary"] == (attention.boundary_key, attention.boundary_value)
        elif index in chosen:
            assert call["boundary"] == boundary
    assert len(boundaries(model)) == (2 * len(chosen) if boundary == "learned" else 0)


def test_a_config_alone_chooses_the_boundary() -> None:
    ids, model, other = tokens(), make(), make()
    switch_to_continuous(model, boundary="none")
    other.config.continuous_boundary = "none"
    other.set_attn_implementation("continuous")
    assert torch.equal(logits(other, ids), logits(model, ids))


@pytest.mark.parametrize("layers", ["upper", "odd"])
def test_a_choice_of_no_layer_raises(layers: str) -> None:
    model = make(num_hidden_layers=1)
    with pytest.raises(ValueError, match=f"layers='{layers}' chooses none of the 1 attention layers"):
        switch_to_continuous(model, layers=layers)


def test_learned_nodes_start_as_the_zero_node_and_matter() -> None:
    ids, model = tokens(), make()
    switch_to_continuous(model)
    zero = logits(model, ids)
    switch_to_continuous(model, boundary="learned")
    torch.testing.assert_close(logits(model, ids), zero)
    randomize(model)
    assert (logits(model, ids) - zero).abs().max() > 0.1


def test_switching_again_keeps_what_was_learned_and_forgets_what_isnt_wanted() -> None:
    ids, model = tokens(), make()
    softmax = logits(model, ids)
    switch_to_continuous(model, boundary="learned")
    randomize(model)
    learned = logits(model, ids)
    switch_to_continuous(model, boundary="learned")
    assert torch.equal(logits(model, ids), learned)
    switch_to_continuous(model, layers="upper", boundary="learned")
    assert sorted(boundaries(model)) == sorted(
        f"model.layers.{i}.self_attn.boundary_{x}" for i in (2, 3) for x in ("key", "value")
    )
    switch_to_continuous(model, boundary="none")
    assert not boundaries(model)
    model.set_attn_implementation("sdpa")
    assert torch.equal(logits(model, ids), softmax)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"layers": "top"}, "layers must be 'all', 'upper', 'odd' or a list of layer indices, got 'top'"),
        ({"layers": 1}, "layers must be .* got 1"),
        ({"layers": [0.5]}, "layers must be .* got"),
        ({"layers": [True, False]}, "layers must be .* got"),
        ({"layers": [0, 4]}, "index 4, and the model 4 layers"),
        ({"layers": [-5]}, "index -5, and the model 4 layers"),
        ({"boundary": "one"}, "boundary must be 'zero', .*'learned', got 'one'|boundary must be one of .* got 'one'"),
        ({"boundary": None}, "boundary must be one of .* got None"),
        ({"example": {"input_ids": "words"}}, "LlamaForCausalLM doesn't run on the example"),
        ({"example": {"ids": 1}}, "LlamaForCausalLM doesn't run on the example"),
    ],
)
def test_wrong_choices_change_nothing(choice: dict[str, Any], message: str) -> None:
    ids, model = tokens(), make()
    softmax, config = logits(model, ids), model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        switch_to_continuous(model, **choice)
    assert torch.equal(logits(model, ids), softmax)
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("name", "value"), [("continuous_layers", "top"), ("continuous_boundary", "one"), ("continuous_boundary", None)]
)
def test_wrong_choices_in_a_config_are_named(name: str, value: str) -> None:
    model = make()
    setattr(model.config, name, value)
    model.set_attn_implementation("continuous")
    with pytest.raises(ValueError, match=f"{name} must be .*{value}"):
        logits(model, tokens())


def test_a_model_of_torch_is_no_model_of_transformers() -> None:
    with pytest.raises(TypeError, match=r"model must be a transformers\.PreTrainedModel, got Linear"):
        switch_to_continuous(nn.Linear(2, 2))


def test_the_modes_of_training_stay() -> None:
    model = make().train()
    model.model.layers[1].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    switch_to_continuous(model)
    assert {name: module.training for name, module in model.named_modules()} == modes


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_switching_back_leaves_nothing_continuous(implementation: str, tmp_path: Path) -> None:
    ids, model = tokens(), make()
    softmax, config = logits(model, ids), model.config.to_dict()
    switch_to_continuous(model, layers="odd", boundary="learned")
    switch_to_softmax(model, implementation)
    assert model.config._attn_implementation == implementation
    assert model.config.to_dict() == config
    assert not boundaries(model)
    torch.testing.assert_close(logits(model, ids), softmax, rtol=1e-5, atol=1e-4)
    model.save_pretrained(tmp_path)
    assert "continuous" not in (tmp_path / "config.json").read_text()


# Models whose layers don't know their index, and stacks of layers.


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(
            ViTConfig(**VISION, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), id="vit"
        ),
        pytest.param(
            WhisperConfig(
                vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=4, decoder_layers=2, encoder_attention_heads=HEADS,
                decoder_attention_heads=HEADS, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=20,
                num_mel_bins=8, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
            ),
            id="whisper",
        ),
        pytest.param(
            BartConfig(
                vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=4, decoder_layers=2, encoder_attention_heads=HEADS,
                decoder_attention_heads=HEADS, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=32,
            ),
            id="bart",
        ),
    ],
)  # fmt: skip
def test_each_stack_counts_its_own_layers(config: Any) -> None:
    model = AutoModel.from_config(config).eval()
    switch_to_continuous(model, layers="upper", boundary="learned")
    found = {name.rpartition(".")[0] for name in boundaries(model)}
    if isinstance(config, ViTConfig):
        assert {int(name.split(".")[2 if name.startswith("encoder") else 1]) for name in found} == {2, 3}
    else:
        stacks = {"encoder.layers.2", "encoder.layers.3", "decoder.layers.1"}
        assert {name.rpartition(".")[0] for name in found} == stacks
        assert len(found) == 4  # the decoder's layer has two


def test_a_layer_without_an_index_asks_for_the_switch() -> None:
    config = ViTConfig(**VISION, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config.continuous_layers = "upper"
    model = AutoModel.from_config(config, attn_implementation="continuous").eval()
    with pytest.raises(ValueError, match=r"doesn't know which layer it is.*switch_to_continuous"):
        model(torch.zeros(1, 3, 32, 32))


def test_two_models_in_one_are_switched_with_an_example() -> None:
    text = {**SIZES, "eos_token_id": 2, "pad_token_id": 0, "bos_token_id": 1}
    del text["num_key_value_heads"], text["initializer_range"]
    model = AutoModel.from_config(CLIPConfig(text_config=text, vision_config=VISION)).eval()
    with pytest.raises(ValueError, match=r"CLIPModel doesn't run on an example made from its config; pass example"):
        switch_to_continuous(model)
    assert model.config._attn_implementation == "sdpa"
    example = {"input_ids": tokens(1, 5), "pixel_values": torch.randn(1, 3, 32, 32)}
    with torch.no_grad():
        before = model(**example).logits_per_text
        switch_to_continuous(model, layers="upper", example=example)
        after = model(**example).logits_per_text
    assert model.config.text_config.continuous_layers == model.config.vision_config.continuous_layers == "upper"
    assert not torch.allclose(before, after)


# Models that can't.

CANT: dict[str, tuple[Callable[[], Any], str]] = {
    "own attention": (
        lambda: AutoModelForCausalLM.from_config(
            BloomConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=1, n_head=HEADS)
        ),
        "BloomForCausalLM computes attention by itself",
    ),
    "position bias": (
        lambda: AutoModelForSeq2SeqLM.from_config(
            T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=1, num_heads=HEADS)
        ),
        "T5Attention passes position_bias",
    ),
    "a mask that it adds to": (
        lambda: AutoModel.from_config(BeitConfig(**VISION, use_relative_position_bias=True)),
        "BeitModel (runs with|computes)",
    ),
    "one layer of its own": (
        lambda: AutoModel.from_config(SiglipVisionConfig(**VISION)),
        r"its MultiheadAttention \(.*head\.attention\) ran 1 times and asked transformers' attention interface 0 times",
    ),
}


@pytest.mark.parametrize("case", CANT)
def test_models_that_cant_are_named_and_stay_as_they_were(case: str) -> None:
    build, message = CANT[case]
    model = build().eval()
    implementation, config = model.config._attn_implementation, model.config.to_dict()
    with pytest.raises(NotImplementedError, match=message):
        switch_to_continuous(model)
    assert model.config._attn_implementation == implementation
    assert model.config.to_dict() == config


def test_a_model_of_unknown_inputs_wants_an_example() -> None:
    config = TimeSeriesTransformerConfig(prediction_length=2, context_length=4, d_model=8, lags_sequence=[1])
    model = AutoModel.from_config(config)
    with pytest.raises(ValueError, match=r"it takes past_values|pass example"):
        switch_to_continuous(model)


# Soft-capping and attention sinks.


def gemma2() -> Any:
    config = Gemma2Config(**SIZES, head_dim=8, attn_logit_softcapping=2.0, final_logit_softcapping=None)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def gpt_oss() -> Any:
    config = GptOssConfig(**SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=4)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("build", [gemma2, gpt_oss], ids=["softcap", "sinks"])
def test_softmax_layers_with_softcap_or_sinks_equal_eager(build: Callable[[], Any]) -> None:
    model, ids = build(), tokens()
    eager = logits(model, ids)
    switch_to_continuous(model, layers=[])
    # Sums of WIDTH products in each of eight sub-layers, relative to the largest number.
    limit = 8 * WIDTH * torch.finfo(torch.float32).eps * eager.abs().max().item()
    torch.testing.assert_close(logits(model, ids), eager, rtol=0, atol=limit)
    switch_to_continuous(model)
    assert (logits(model, ids) - eager).abs().max() > 10 * limit


def test_a_sink_is_mass_beside_the_path_and_learns() -> None:
    query, key, value = (torch.randn(1, 2, 5, 8, dtype=torch.float64) for _ in range(3))
    sink = torch.randn(2, dtype=torch.float64, requires_grad=True)
    out, _ = bridge.attention_forward(nn.Linear(1, 1), query, key, value, None, scaling=0.3, s_aux=sink)
    plain, lse = integrate(query, key, value, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril(), scale=0.3)
    share = lse.exp() / (lse.exp() + sink.exp()[:, None])
    torch.testing.assert_close(out.transpose(1, 2), share.unsqueeze(-1) * plain, rtol=0, atol=1e-11)
    got = torch.autograd.grad(out.square().sum(), sink)[0]
    expected = torch.autograd.grad((share.unsqueeze(-1) * plain).square().sum(), sink)[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


# Saving and loading.


@pytest.mark.parametrize("boundary", ["none", "learned"])
@pytest.mark.parametrize("layers", ["all", "upper", [0, -1]], ids=str)
def test_saving_and_loading_gives_the_same_model(layers: Any, boundary: str, tmp_path: Path) -> None:
    ids, model = tokens(), make()
    switch_to_continuous(model, layers=layers, boundary=boundary)
    randomize(model)
    model.save_pretrained(tmp_path)
    loaded = load_continuous(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(logits(loaded, ids), logits(model, ids))
    assert loaded.config.continuous_layers == model.config.continuous_layers
    assert loaded.config.continuous_boundary == boundary
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(load_continuous(tmp_path / "again"), ids), logits(model, ids))
    if (boundary, layers) == ("none", "all"):
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids), logits(model, ids))
    else:
        with pytest.raises(ValueError, match=r"load_continuous\(path\)"):
            logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids)


def test_loading_in_another_class_and_dtype(tmp_path: Path) -> None:
    model = make()
    switch_to_continuous(model, layers="upper", boundary="learned")
    randomize(model)
    model.save_pretrained(tmp_path)
    base = load_continuous(tmp_path, model_class=AutoModel, dtype=torch.bfloat16)
    assert type(base).__name__ == "LlamaModel"
    for name, parameter in boundaries(base).items():
        assert torch.equal(parameter, dict(model.named_parameters())[f"model.{name}"].bfloat16())


def test_loading_a_softmax_model_makes_it_continuous(tmp_path: Path) -> None:
    ids, model = tokens(), make()
    model.save_pretrained(tmp_path)
    switch_to_continuous(model)
    assert torch.equal(logits(load_continuous(tmp_path), ids), logits(model, ids))


def test_a_boundary_that_wasnt_saved_starts_as_zero(tmp_path: Path) -> None:
    ids, model = tokens(), make()
    switch_to_continuous(model, boundary="learned")
    zero = logits(model, ids)
    state = {name: x for name, x in model.state_dict().items() if "boundary" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    assert torch.equal(logits(load_continuous(tmp_path), ids), zero)


def test_an_unknown_architecture_wants_its_class(tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["MyLlama"]}))
    with pytest.raises(ValueError, match="architecture 'MyLlama'; pass model_class"):
        load_continuous(tmp_path)
    assert type(load_continuous(tmp_path, model_class=AutoModelForCausalLM)) is type(model)


# Training.


def test_trainer_trains_saves_and_resumes_a_learned_boundary(tmp_path: Path) -> None:
    from transformers import Trainer

    rows = [{"input_ids": row, "labels": row} for row in tokens(32, 12)]

    def train(folder: Path, steps: int, resume: bool = False) -> Any:
        model = make()
        switch_to_continuous(model, boundary="learned")
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=4, learning_rate=1e-2,
            lr_scheduler_type="constant", report_to="none", disable_tqdm=True, use_cpu=True, logging_strategy="no",
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)  # pyright: ignore[reportArgumentType]
        trainer.train(resume_from_checkpoint=resume or None)
        return trainer.model

    whole = train(tmp_path / "whole", 4)
    assert all(parameter.abs().max() > 0 for parameter in boundaries(whole).values())
    train(tmp_path / "parts", 2)
    parts = train(tmp_path / "parts", 4, resume=True)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, dict(parts.named_parameters())[name]), name
    loaded = load_continuous(tmp_path / "whole" / "checkpoint-4")
    ids = tokens()
    assert torch.equal(logits(loaded, ids), logits(whole.eval(), ids))


SHARDED = """
import sys, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig
from continuous_attention import switch_to_continuous
torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(LlamaConfig(**eval(sys.argv[1])))
switch_to_continuous(model, layers="upper", boundary="learned")
ids = torch.randint(3, 64, (4, 9))
loss = model(ids, labels=ids).loss
loss.backward()
expected = {name: x.grad.clone() for name, x in model.named_parameters()}
model.zero_grad()
for layer in model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
mine = ids[2 * dist.get_rank() :][:2]
model(mine, labels=mine).loss.backward()
for name, parameter in model.named_parameters():
    if "boundary" in name:
        assert parameter.to_local().shape[0] == 1, "two heads on two processes"
    torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], msg=lambda m: f"{name}: {m}")
dist.destroy_process_group()
"""


def test_learned_boundaries_are_sharded_by_fsdp(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), repr(SIZES)],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs[0]


# Generation.


def generate(model: Any, ids: Tensor, **how: Any) -> Tensor:
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        return model.generate(input_ids=ids, **{**settings, **how})


def test_beam_search_and_assisted_generation_run() -> None:
    model, ids = make(), tokens(1, 5)
    switch_to_continuous(model, layers="odd")
    greedy = generate(model, ids)
    assert torch.equal(generate(model, ids, assistant_model=make()), greedy)
    beams = generate(model, ids, num_beams=3, num_return_sequences=3)
    assert beams.shape == (3, 11)

    # The best of three beams is at least as likely as the greedy one.
    def likelihood(sequence: Tensor) -> Tensor:
        scores = logits(model, sequence[None]).log_softmax(-1)[0, 4:-1]
        return scores.gather(-1, sequence[5:, None]).sum()

    assert likelihood(beams[0]) >= likelihood(greedy[0]) - 1e-4


def test_chunked_prefill_equals_the_whole() -> None:
    model, ids = make(), tokens(2, 9)
    switch_to_continuous(model, layers="upper")
    torch.testing.assert_close(generate(model, ids, prefill_chunk_size=4), generate(model, ids))
    with torch.no_grad():
        first = model(ids[:, :4], use_cache=True)
        second = model(ids[:, 4:], cache=first.past_key_values)
    torch.testing.assert_close(second.logits, logits(model, ids)[:, 4:], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("layers", ["all", "upper"])
def test_a_compiled_decode_step_with_a_static_cache(layers: str, padded: bool) -> None:
    model, ids = make(), tokens(2, 8)
    switch_to_continuous(model, layers=layers)
    mask = torch.ones(2, 9, dtype=torch.long)
    if padded:
        mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    next_ids = tokens(2, 1)
    full = logits(model, torch.cat([ids, next_ids], 1), attention_mask=mask, position_ids=positions, use_cache=False)
    cache = StaticCache(config=model.config, max_cache_len=16)
    logits(model, ids, attention_mask=mask[:, :-1], position_ids=positions[:, :-1], cache=cache)
    torch._dynamo.reset()
    step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        out = step(input_ids=next_ids, attention_mask=mask, position_ids=positions[:, -1:], cache=cache).logits
    torch.testing.assert_close(out, full[:, -1:], rtol=1e-5, atol=1e-4)


def test_compiled_holes_in_the_padding_raise() -> None:
    model, ids = make(), tokens()
    switch_to_continuous(model)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    with torch.no_grad():
        padded = compiled(input_ids=ids, attention_mask=mask, use_cache=False).logits
        torch.testing.assert_close(
            padded[:, 1:], logits(model, ids, attention_mask=mask, use_cache=False)[:, 1:], rtol=1e-5, atol=1e-4
        )
        mask[:, 0], mask[:, 4] = 1, 0
        with pytest.raises(RuntimeError, match="can't follow a mask that has gaps"):
            compiled(input_ids=ids, attention_mask=mask, use_cache=False)


# Packed batches.


@pytest.mark.parametrize("how", [{}, {"use_cache": False}], ids=["default cache", "no cache"])
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_packed_positions_count_with_and_without_a_cache(how: dict[str, Any], compiled: bool) -> None:
    model, ids = make(), tokens(1, 9)
    switch_to_continuous(model, layers="odd")
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    alone = torch.cat([logits(model, ids[:, :4]), logits(model, ids[:, 4:])], dim=1)
    forward = model.forward
    if compiled:
        torch._dynamo.reset()
        forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        packed = forward(input_ids=ids, position_ids=positions, **how).logits
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-4)


def test_packing_that_would_be_ignored_raises() -> None:
    # Llama 4 doesn't tell its attention layers the positions.
    config = Llama4TextConfig(
        **SIZES,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        attention_chunk_size=4,
        no_rope_layers=[1] * 4,
    )
    model, ids = AutoModelForCausalLM.from_config(config).eval(), tokens(1, 9)
    for _ in range(2):
        switch_to_continuous(model)
    assert len(model._forward_pre_hooks) == 1
    positions = torch.cat([torch.arange(4), torch.arange(5)])[None]
    with pytest.raises(ValueError, match=r"Llama4ForCausalLM ignores packed position_ids .* pass use_cache=False"):
        logits(model, ids, position_ids=positions)
    logits(model, ids, position_ids=positions, use_cache=False)
    logits(model, ids, position_ids=torch.arange(9)[None])
    logits(model, ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    model.set_attn_implementation("sdpa")
    logits(model, ids, position_ids=positions)


@pytest.mark.parametrize("hole", [3, 4])
@pytest.mark.filterwarnings("ignore:a mask with gaps")
def test_packed_positions_count_beside_a_hole_in_the_padding(hole: int) -> None:
    model, ids = make(), tokens(2, 10)
    switch_to_continuous(model)
    positions = torch.arange(5).repeat(2)[None].expand(2, -1)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[1, hole] = 0
    packed = logits(model, ids, attention_mask=mask, position_ids=positions, use_cache=False)
    alone = torch.cat([logits(model, ids[:, :5]), logits(model, ids[:, 5:])], dim=1)
    torch.testing.assert_close(packed[0], alone[0], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(packed[1, 5:], alone[1, 5:], rtol=1e-5, atol=1e-4)


def test_packed_positions_count_in_a_compiled_forward_with_a_static_cache() -> None:
    model, ids = make(), tokens(1, 10)
    switch_to_continuous(model)
    positions = torch.arange(5).repeat(2)[None]
    alone = torch.cat([logits(model, ids[:, :5]), logits(model, ids[:, 5:])], dim=1)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=16)
        packed = compiled(input_ids=ids, position_ids=positions, cache=cache).logits
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-4)


def test_one_of_two_cu_seq_lens_raises() -> None:
    model = make()
    switch_to_continuous(model)
    with pytest.raises(ValueError, match="one of cu_seq_lens_q and cu_seq_lens_k without the other"):
        model(tokens(1, 9), cu_seq_lens_q=torch.tensor([0, 3, 9]))


def test_a_mask_shorter_than_the_keys_raises() -> None:
    model = make()
    switch_to_continuous(model)
    with pytest.raises(ValueError, match=r"mask of LlamaAttention must be as long as its keys, 9, got shape"):
        model(tokens(1, 9), attention_mask=torch.ones(1, 1, 9, 7, dtype=torch.bool).tril())


def test_cu_seq_lens_that_dont_fit_are_named() -> None:
    model = make()
    switch_to_continuous(model)
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q of LlamaAttention must end with .* 9, got \[0, 3, 8\]"):
        model(tokens(1, 9), cu_seq_lens_q=ends, cu_seq_lens_k=ends)


def test_a_mask_that_changes_in_place_is_seen_again() -> None:
    model, ids = make(), tokens()
    switch_to_continuous(model)
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    whole = logits(model, ids, attention_mask=mask)
    mask[..., 0] = False
    again, fresh = logits(model, ids, attention_mask=mask), logits(model, ids, attention_mask=mask.clone())
    assert torch.equal(again, fresh)
    assert not torch.equal(again[:, 3:], whole[:, 3:])
    with torch.inference_mode():
        mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
        assert torch.equal(model(ids, attention_mask=mask).logits, whole)
        mask[..., 0] = False
        assert torch.equal(model(ids, attention_mask=mask).logits, fresh)


@pytest.mark.parametrize(("lq", "lk", "window", "visible"), [(5, 5, 2, 2), (1, 5, 3, 3), (5, 8, 2, 2)])
def test_a_window_without_a_mask_is_honoured(lq: int, lk: int, window: int, visible: int) -> None:
    query, key, value = (torch.randn(1, 2, x, 8, dtype=torch.float64) for x in (lq, lk, lk))
    forward = partial(bridge.attention_forward, nn.Linear(1, 1), query, key, value, None, sliding_window=window)
    mask = torch.zeros(lq, lk, dtype=torch.bool)
    for j in range(lq):
        last = lk - 1 if lq == 1 else j  # the first query stands on the first node
        mask[j, max(0, last - visible + 1) : last + 1] = True
    expected, _ = integrate(query, key, value, attn_mask=mask)
    torch.testing.assert_close(forward()[0].transpose(1, 2), expected, rtol=0, atol=1e-11)
