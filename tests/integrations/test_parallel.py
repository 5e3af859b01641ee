"""Hugging Face models whose sequences are spread over processes: loss and gradients are those of one process.

transformers computes the loss in float32, so that is how near they come; everything else is float64 here.
"""

from types import SimpleNamespace
from typing import Any

import processes
import pytest
import torch
from processes import Ranks, tiny_model
from torch import Tensor

from continuous_attention import parallelize_context, shard_batch, take_times
from continuous_attention.context_parallel import PLACEMENTS, SCHEDULES

BATCH, LENGTH, VOCABULARY = 2, 11, 40
EPS = torch.finfo(torch.float32).eps


def make_batch(kind: str) -> dict[str, Tensor]:
    ids = torch.randint(1, VOCABULARY, (BATCH, LENGTH))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[0, :3] = mask[1, 7:] = 0
        batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    if kind == "packed":
        batch["position_ids"] = torch.tensor([[*range(4), *range(7)], [*range(2), *range(6), *range(3)]])
    if kind == "times":
        batch["times"] = torch.rand(BATCH, LENGTH).double().cumsum(-1)
    return batch


def alone(batch: dict[str, Tensor], how: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    model = tiny_model(**how)
    if "times" in batch:
        take_times(model)
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return float(loss.detach()), {name: x.grad for name, x in model.named_parameters()}


def assert_same(loss: float, gradients: dict[str, Tensor], wanted: tuple[float, dict[str, Tensor]]) -> None:
    assert loss == pytest.approx(wanted[0], rel=8 * EPS)
    for name, gradient in wanted[1].items():
        # Sums over the tokens of terms that were rounded to float32 once.
        units = 8 if gradient.dtype == torch.float64 else 64
        torch.testing.assert_close(gradients[name], gradient, rtol=0.0, atol=units * EPS * float(gradient.abs().max()))


CHOICES: dict[str, dict[str, Any]] = {
    "all layers": {},
    "learned, with checkpoints": {"boundary": "learned", "checkpoints": True},
    "odd layers, half": {"layers": "odd", "boundary": "half"},
    "softmax": {"layers": []},
    "Mistral with a window": {"family": "Mistral", "sliding_window": 4},
    "a window in the mask only": {
        "family": "Phimoe",
        "num_local_experts": 2,
        "sliding_window": 3,
        "dtype": torch.float32,
    },
    "a window beside a plain mask": {"family": "Olmoe", "num_experts": 16, "sliding_window": 3, "dtype": torch.float32},
    "Gemma 2 with a softcap": {"family": "Gemma2", "sliding_window": 3, "head_dim": 4, "attn_logit_softcapping": 2.0},
}


KINDS = ("plain", "padded", "packed", "times")


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_model_on_two_ranks(ranks: Ranks, placement: str, choice: str) -> None:
    """With two kinds of batches and a schedule each, which change from case to case."""
    how, number = CHOICES[choice], list(CHOICES).index(choice)
    first = (number + PLACEMENTS.index(placement)) % 2
    for i, kind in enumerate(KINDS[first::2]):
        batch = make_batch("plain" if choice == "softmax" and kind == "times" else kind)
        answers = ranks.run(2, processes.train_spread, batch, placement, SCHEDULES[(number + i) % 2], how)
        loss = sum(float(loss) for loss, _ in answers) / 2
        gradients = {name: (answers[0][1][name] + answers[1][1][name]) / 2 for name in answers[0][1]}
        assert_same(loss, gradients, alone(batch, how))


def test_beside_fsdp_on_a_mesh(ranks: Ranks) -> None:
    """Two batches, each spread over two ranks, and parameters sharded over all: the mean of both losses."""
    how = {"boundary": "learned"}
    batches = [make_batch("plain"), make_batch("packed")]
    answers = ranks.run(4, processes.train_spread_and_sharded, tuple(batches), how)
    losses, all_gradients = zip(*(alone(batch, how) for batch in batches), strict=True)
    wanted = {name: (all_gradients[0][name] + all_gradients[1][name]) / 2 for name in all_gradients[0]}
    for _, gradients in answers:
        assert_same(sum(loss for loss, _ in answers) / 4, gradients, (sum(losses) / 2, wanted))


def test_a_batch_that_wasnt_cut_is_refused(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="must be given the batch that shard_batch made"):
        ranks.run(2, processes.run_spread, make_batch("plain"))


ENCODER: dict[str, Any] = {"head": "ForMaskedLM", "num_key_value_heads": None}
BERT: dict[str, Any] = ENCODER | {"family": "Bert"}
ROBERTA: dict[str, Any] = ENCODER | {"family": "Roberta"}


def test_labels_of_an_encoder_are_refused_and_its_logits_are_right(ranks: Ranks) -> None:
    batch = make_batch("padded")
    with pytest.raises(NotImplementedError, match="the loss of BertForMaskedLM isn't that of a causal language model"):
        ranks.run(2, processes.train_spread, batch, "contiguous", "ring", BERT)
    got = torch.cat(ranks.run(2, processes.logits_of_spread, batch, BERT), dim=1)
    wanted = tiny_model(**BERT).eval()(batch["input_ids"], batch["attention_mask"]).logits
    real = batch["attention_mask"] == 1
    torch.testing.assert_close(got[real], wanted[real], rtol=0.0, atol=1e-12)


def test_positions_that_the_whole_batch_says(ranks: Ranks) -> None:
    batch = {"input_ids": torch.randint(3, VOCABULARY, (BATCH, LENGTH))}
    with pytest.raises(NotImplementedError, match="RobertaForMaskedLM counts positions by ids"):
        ranks.run(2, processes.logits_of_spread, batch, ROBERTA)
    positions = torch.arange(2, LENGTH + 2).expand(BATCH, -1)
    got = ranks.run(2, processes.logits_of_spread, {**batch, "position_ids": positions}, ROBERTA)
    wanted = tiny_model(**ROBERTA).eval()(**batch).logits
    torch.testing.assert_close(torch.cat(got, dim=1), wanted, rtol=0.0, atol=1e-12)
    opt: dict[str, Any] = {"family": "OPT", "num_key_value_heads": None, "ffn_dim": 24, "word_embed_proj_dim": 16}
    got = ranks.run(2, processes.logits_of_spread, batch, opt)
    torch.testing.assert_close(torch.cat(got, dim=1), tiny_model(**opt).eval()(**batch).logits, rtol=0.0, atol=1e-12)
    padded = {**batch, "attention_mask": make_batch("padded")["attention_mask"]}
    with pytest.raises(NotImplementedError, match="OPTForCausalLM counts positions by padding"):
        ranks.run(2, processes.logits_of_spread, padded, opt)


def test_another_group_or_placement(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match="got placement='zigzag' and 2 ranks in shard_batch, placement='contiguous'"):
        ranks.run(2, processes.cut_otherwise, "zigzag", False)
    with pytest.raises(ValueError, match="and 3 ranks in shard_batch, placement='contiguous' and 4 ranks in parallel"):
        ranks.run(3, processes.cut_otherwise, "contiguous", True)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_fewer_tokens_than_ranks(ranks: Ranks, placement: str) -> None:
    with pytest.raises(ValueError, match="a token for each of the 3 ranks, got L=2"):
        ranks.run(3, processes.shard_tokens, {"input_ids": torch.ones(1, 2).long()}, placement)
    parts = ranks.run(3, processes.shard_tokens, {"input_ids": torch.ones(1, 3).long()}, placement)
    assert [part["input_ids"].shape[1] for part in parts] == [1, 1, 1]


def test_routers_are_refused(ranks: Ranks) -> None:
    how = {"family": "Olmoe", "num_experts": 16, "output_router_logits": True, "dtype": torch.float32}
    with pytest.raises(NotImplementedError, match="output_router_logits must be False in OlmoeForCausalLM"):
        ranks.run(2, processes.logits_of_spread, make_batch("plain"), how)


def test_switching_a_spread_model(ranks: Ranks) -> None:
    with pytest.raises(ValueError, match=r"call its handle's remove\(\) first"):
        ranks.run(2, processes.switch_while_spread)


def test_a_batch_without_names() -> None:
    with pytest.raises(TypeError, match="batch must be a mapping of names to tensors, got list"):
        shard_batch([1])  # pyright: ignore[reportArgumentType]


def test_remove(ranks: Ranks) -> None:
    batch = make_batch("plain")
    wanted, _ = alone(batch, {})
    assert [float(x) for x in ranks.run(2, processes.stop_being_spread, batch)] == [wanted, wanted]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"input_ids": torch.zeros(4).long()}, ValueError, r"input_ids must have shape \(B, L\), got \(4,\)"),
        (
            {"labels": torch.zeros(2, 3).long()},
            ValueError,
            r"labels must have shape \(B, L\) = \(2, 11\), got \(2, 3\)",
        ),
        ({"labels": torch.zeros(2, 11)}, TypeError, "labels must have dtype int32 or int64"),
        ({"times": torch.zeros(3)}, ValueError, r"times must have shape \(L,\) or \(B, L\)"),
        ({"token_type_ids": torch.zeros(2, 11).long()}, ValueError, "may have .* got .*token_type_ids"),
        ({"attention_mask": torch.tensor([[1, 0, 1] + [1] * 8] * 2)}, ValueError, "attention_mask must have no holes"),
    ],
)
def test_batches_that_are_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Tensor], error: type[Exception], message: str
) -> None:
    monkeypatch.setattr("continuous_attention.integrations.parallel.shard_sequence", lambda x, dim, **_: x)
    monkeypatch.setattr("continuous_attention.integrations.parallel.Team", lambda _: SimpleNamespace(size=2))
    with pytest.raises(error, match=message):
        shard_batch(make_batch("plain") | changes)


def test_models_that_are_refused() -> None:
    from transformers import BartConfig, BartForConditionalGeneration, Llama4TextConfig

    with pytest.raises(TypeError, match=r"must be a transformers\.PreTrainedModel, got Linear"):
        parallelize_context(torch.nn.Linear(2, 2))
    model = tiny_model()
    with pytest.raises(ValueError, match="schedule must be one of 'ring', 'all-gather', got 'circle'"):
        parallelize_context(model, schedule="circle")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="runs 'sdpa' attention: make it continuous first"):
        parallelize_context(model)
    model = tiny_model()
    model.config.layer_types = Llama4TextConfig(num_hidden_layers=4).layer_types
    with pytest.raises(NotImplementedError, match="layers of type chunked_attention"):
        parallelize_context(model)
    sizes: dict[str, Any] = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 40}
    model = BartForConditionalGeneration(BartConfig(**sizes, encoder_ffn_dim=8, decoder_ffn_dim=8))
    model.set_attn_implementation("continuous")
    with pytest.raises(NotImplementedError, match="an encoder and a decoder"):
        parallelize_context(model)
