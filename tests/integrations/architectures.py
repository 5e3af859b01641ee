"""Hugging Face architectures, and what each does with continuous attention: the table of docs/transformers.md.

    python tests/integrations/architectures.py      # checks every architecture and rewrites the table

Each model is small and random, with weights large enough that what a query sees matters. `check` gives its row: the
answer to each question of COLUMNS, or the sentence with which the model is refused.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from continuous_attention import register_transformers, switch_to_continuous

COLUMNS = {
    "softmax": "with no layer continuous the outputs are those of eager attention",
    "continuous": "with all layers continuous they are finite, and others",
    "causal": "a later token changes nothing before it",
    "padded": "padded rows are what they are alone, padded on the right, and on the left for decoders",
    "cached": "generating token by token gives the logits of one forward, with dynamic and static caches",
    "packed": "packed sequences are what they are alone; an error says where that needs use_cache=False, and “nor with "
    "eager” that layers other than attention mix them",
}
PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
BEGIN, END = "<!-- architectures: begin -->", "<!-- architectures: end -->"

VOCABULARY, WIDTH, HEADS, LENGTHS = 64, 32, 4, (9, 6, 3)
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": WIDTH // HEADS}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "image_size": 32,
    "patch_size": 8,
}
SIGLIP = {"model_type": "siglip_vision_model", **IMAGE, "vision_use_head": False}
IMAGE_TOKEN: dict[str, Any] = {"image_token_id": VOCABULARY - 1}
TWO_STACKS: dict[str, Any] = {
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
SEQ2SEQ: dict[str, Any] = {
    **TWO_STACKS,
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
AUDIO: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
SERIES: dict[str, Any] = {
    "prediction_length": 4,
    "context_length": 12,
    **TWO_STACKS,
    "lags_sequence": [1, 2],
    "num_time_features": 1,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}


@dataclass(frozen=True)
class Architecture:
    """How to make a small model of an architecture, and what to ask it."""

    config: Callable[[], Any]
    auto: Any = hf.AutoModelForCausalLM
    family: str = "decoder"
    inputs: Callable[[], dict[str, Tensor]] = field(default=lambda: {"input_ids": tokens()})
    questions: tuple[str, ...] = tuple(COLUMNS)


def tokens(*shape: int) -> Tensor:
    """Tokens that aren't special."""
    return torch.randint(3, VOCABULARY, shape or (len(LENGTHS), max(LENGTHS)))


def series() -> dict[str, Tensor]:
    """A batch of series, with one time feature."""
    past, future = 14, 4
    return {
        "past_values": torch.randn(2, past),
        "past_time_features": torch.linspace(0, 1, past).expand(2, -1)[..., None],
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, future),
        "future_time_features": torch.linspace(1, 2, future).expand(2, -1)[..., None],
    }


def pixels() -> dict[str, Tensor]:
    """A batch of images."""
    return {"pixel_values": torch.randn(2, 3, 32, 32)}


def picture(patches: int = 16) -> dict[str, Tensor]:
    """A batch of texts, each with the tokens of one image between its words."""
    ids = torch.randint(3, VOCABULARY - 4, (2, patches + 5))
    ids[:, 2 : 2 + patches] = VOCABULARY - 1
    return {"input_ids": ids, **pixels()}


def picture_with_types() -> dict[str, Tensor]:
    """The same, and which tokens are the image's: they see each other in both directions."""
    inputs = picture()
    return {**inputs, "token_type_ids": (inputs["input_ids"] == VOCABULARY - 1).long()}


encoder = partial(Architecture, auto=hf.AutoModel, family="encoder", questions=("softmax", "continuous", "padded"))
seq2seq = partial(
    Architecture,
    auto=hf.AutoModelForSeq2SeqLM,
    family="encoder-decoder",
    inputs=lambda: {"input_ids": tokens(), "decoder_input_ids": tokens(3, 5)},
    questions=("softmax", "continuous", "causal", "padded", "cached"),
)
vision = partial(Architecture, auto=hf.AutoModel, family="vision", inputs=pixels, questions=("softmax", "continuous"))
audio = partial(
    Architecture,
    auto=hf.AutoModel,
    family="audio",
    inputs=lambda: {"input_values": torch.randn(2, 800)},
    questions=("softmax", "continuous"),
)
time_series = partial(
    Architecture, auto=hf.AutoModel, family="time series", inputs=series, questions=("softmax", "continuous")
)
multimodal = partial(
    Architecture,
    auto=hf.AutoModelForImageTextToText,
    family="multimodal",
    inputs=picture,
    questions=("softmax", "continuous"),
)

ARCHITECTURES: dict[str, Architecture] = {
    "Llama": Architecture(partial(hf.LlamaConfig, **GROUPED)),
    "Llama 4 (chunks)": Architecture(
        partial(
            hf.Llama4TextConfig,
            **GROUPED,
            attention_chunk_size=4,
            intermediate_size_mlp=48,
            num_local_experts=2,
            interleave_moe_layer_step=2,
            no_rope_layers=[1, 0],
            attn_temperature_tuning=False,
        )
    ),
    "Qwen3": Architecture(partial(hf.Qwen3Config, **GROUPED)),
    "Qwen3-MoE": Architecture(
        partial(hf.Qwen3MoeConfig, **GROUPED, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=24)
    ),
    "Mistral (window)": Architecture(partial(hf.MistralConfig, **GROUPED, sliding_window=4)),
    "Mixtral": Architecture(partial(hf.MixtralConfig, **GROUPED, num_local_experts=2, num_experts_per_tok=2)),
    "Phi-3": Architecture(partial(hf.Phi3Config, **{**TEXT, "num_key_value_heads": 2})),
    "SmolLM3": Architecture(partial(hf.SmolLM3Config, **{**TEXT, "num_key_value_heads": 2})),
    "Gemma 2 (softcap)": Architecture(
        partial(hf.Gemma2Config, **GROUPED, attn_logit_softcapping=5.0, sliding_window=4)
    ),
    "Gemma 3 (hybrid)": Architecture(partial(hf.Gemma3TextConfig, **GROUPED, sliding_window=4)),
    "GPT-OSS (sinks)": Architecture(
        partial(hf.GptOssConfig, **GROUPED, num_local_experts=2, num_experts_per_tok=2, sliding_window=4)
    ),
    "OLMo 2": Architecture(partial(hf.Olmo2Config, **{**TEXT, "num_key_value_heads": 2})),
    "Cohere": Architecture(partial(hf.CohereConfig, **{**TEXT, "num_key_value_heads": 2})),
    "Granite": Architecture(partial(hf.GraniteConfig, **{**TEXT, "num_key_value_heads": 2})),
    "GPT-2": Architecture(
        partial(
            hf.GPT2Config, vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=64, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, attn_pdrop=0.0,
        )
    ),
    "GPT-NeoX": Architecture(partial(hf.GPTNeoXConfig, **TEXT)),
    "OPT": Architecture(
        partial(
            hf.OPTConfig, vocab_size=VOCABULARY, hidden_size=WIDTH, ffn_dim=48, num_hidden_layers=2,
            word_embed_proj_dim=WIDTH, num_attention_heads=HEADS, max_position_embeddings=64, pad_token_id=0,
            bos_token_id=1, eos_token_id=2,
        )
    ),
    "Qwen3-Next (linear and softmax layers)": Architecture(
        partial(
            hf.Qwen3NextConfig, **GROUPED, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
            linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=2,
            num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24,
        ),
    ),
    "Jamba (linear and softmax layers)": Architecture(
        partial(
            hf.JambaConfig, **{**TEXT, "num_key_value_heads": 2}, attn_layer_period=2, attn_layer_offset=1,
            expert_layer_period=2, num_experts=2, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False,
        )
    ),
    "BLOOM": Architecture(partial(hf.BloomConfig, vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=2, n_head=HEADS)),
    "Falcon": Architecture(
        partial(
            hf.FalconConfig, vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=HEADS,
        )
    ),
    "BERT": encoder(partial(hf.BertConfig, **TEXT, **NO_DROPOUT)),
    "RoBERTa": encoder(partial(hf.RobertaConfig, **TEXT, **NO_DROPOUT)),
    "ELECTRA": encoder(partial(hf.ElectraConfig, **TEXT, **NO_DROPOUT, embedding_size=WIDTH)),
    "DistilBERT": encoder(
        partial(hf.DistilBertConfig, vocab_size=VOCABULARY, dim=WIDTH, n_layers=2, n_heads=HEADS, hidden_dim=48)
    ),
    "ModernBERT (window)": encoder(
        partial(hf.ModernBertConfig, **TEXT, local_attention=4, cls_token_id=1, sep_token_id=2)
    ),
    "DeBERTa-v2": encoder(partial(hf.DebertaV2Config, **TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"])),
    "BART": seq2seq(partial(hf.BartConfig, **SEQ2SEQ, max_position_embeddings=64)),
    "Marian": seq2seq(partial(hf.MarianConfig, **SEQ2SEQ, max_position_embeddings=64)),
    "M2M-100": seq2seq(partial(hf.M2M100Config, **SEQ2SEQ, max_position_embeddings=64)),
    "T5": seq2seq(
        partial(
            hf.T5Config, vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=48, num_layers=2, num_heads=HEADS,
            pad_token_id=0, eos_token_id=2,
        )
    ),
    "Whisper": seq2seq(
        partial(hf.WhisperConfig, **SEQ2SEQ, num_mel_bins=8, max_source_positions=20, max_target_positions=64),
        auto=hf.AutoModelForSpeechSeq2Seq,
        inputs=lambda: {"input_features": torch.randn(3, 8, 40), "decoder_input_ids": tokens(3, 5)},
        questions=("softmax", "continuous", "causal", "cached"),
    ),
    "ViT": vision(partial(hf.ViTConfig, **IMAGE)),
    "DINOv2": vision(partial(hf.Dinov2Config, **{k: v for k, v in IMAGE.items() if k != "intermediate_size"})),
    "CLIP": vision(
        partial(hf.CLIPConfig, text_config=TEXT, vision_config=IMAGE, projection_dim=16),
        inputs=lambda: {"input_ids": torch.cat([tokens(2, 8), torch.full((2, 1), 2)], 1), **pixels()},
    ),
    "SigLIP (vision)": vision(partial(hf.SiglipVisionConfig, **IMAGE)),
    "SigLIP (vision, without its head)": vision(partial(hf.SiglipVisionConfig, **IMAGE, vision_use_head=False)),
    "Swin": vision(
        partial(hf.SwinConfig, image_size=32, patch_size=4, embed_dim=16, depths=[2], num_heads=[2], window_size=4)
    ),
    "Wav2Vec2": audio(partial(hf.Wav2Vec2Config, **AUDIO)),
    "HuBERT": audio(partial(hf.HubertConfig, **AUDIO)),
    "TimeSeriesTransformer": time_series(partial(hf.TimeSeriesTransformerConfig, **SERIES)),
    "Informer (full attention)": time_series(
        partial(hf.InformerConfig, **SERIES, attention_type="full", distil=False)
    ),
    "Autoformer": time_series(partial(hf.AutoformerConfig, **SERIES, moving_average=3, label_length=4)),
    "PatchTST": time_series(
        partial(
            hf.PatchTSTConfig, num_input_channels=2, context_length=32, patch_length=4, patch_stride=4, d_model=WIDTH,
            num_hidden_layers=2, num_attention_heads=HEADS, ffn_dim=48,
        ),
        inputs=lambda: {"past_values": torch.randn(2, 32, 2)},
    ),
    "TimesFM": time_series(
        partial(
            hf.TimesFmConfig, patch_length=4, context_length=16, horizon_length=4, hidden_size=WIDTH,
            intermediate_size=WIDTH, head_dim=8, num_hidden_layers=2, num_attention_heads=HEADS, freq_size=3,
        ),
        inputs=lambda: {
            "past_values": torch.randn(2, 16),
            "past_values_padding": torch.zeros(2, 16),
            "freq": torch.zeros(2, 1, dtype=torch.long),
        },
    ),
    "LLaVA": multimodal(
        partial(
            hf.LlavaConfig, vision_config={"model_type": "clip_vision_model", **IMAGE},
            text_config={"model_type": "llama", **GROUPED}, **IMAGE_TOKEN, vision_feature_layer=-1,
        ),
    ),
    "PaliGemma (prefix)": multimodal(
        partial(
            hf.PaliGemmaConfig, vision_config={**SIGLIP, "projection_dim": WIDTH},
            text_config={"model_type": "gemma", **GROUPED}, **IMAGE_TOKEN, projection_dim=WIDTH,
            hidden_size=WIDTH,
        ),
        inputs=lambda: {**picture(), "token_type_ids": (torch.arange(21) >= 19).long().expand(2, -1)},
    ),
    "Gemma 3 (image blocks)": multimodal(
        partial(
            hf.Gemma3Config, vision_config=SIGLIP,
            text_config={
                "model_type": "gemma3_text", **GROUPED, "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            **IMAGE_TOKEN, mm_tokens_per_image=16,
        ),
        inputs=picture_with_types,
    ),
}  # fmt: skip


# ---- The checks


class Probe:
    """A model of an architecture, and how far rounding alone moves its outputs."""

    def __init__(self, architecture: Architecture) -> None:
        self.architecture = architecture
        torch.manual_seed(0)
        model = architecture.auto.from_config(architecture.config(), attn_implementation="eager").eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02 if "experts" in name or "router" in name else 0.2)
            elif name.endswith("sinks"):
                nn.init.normal_(parameter)
        self.model = model
        self.inputs = architecture.inputs()
        self.eager = self.run(**self.inputs)
        switch_to_continuous(model, layers=[], example=self.inputs)
        self.softmax = self.run(**self.inputs)
        switch_to_continuous(model, example=self.inputs)
        self.continuous = self.run(**self.inputs)
        # A layer of float32 sums WIDTH products; four layers, each with attention and an MLP of two products.
        self.limit = 16 * WIDTH * torch.finfo(torch.float32).eps * self.eager.abs().max().item()

    def run(self, **inputs: Any) -> Tensor:
        torch.manual_seed(0)
        with torch.no_grad():
            output = self.model(**inputs)
        for name in ("logits", "logits_per_image", "last_hidden_state"):
            if getattr(output, name, None) is not None:
                return getattr(output, name)
        raise AssertionError(f"no tensor in {type(output).__name__}")

    def same(self, got: Tensor, expected: Tensor) -> bool:
        return bool((got - expected).abs().max() <= self.limit)

    def ask(self, question: str) -> str:
        return getattr(self, f"is_{question}")()

    def is_softmax(self) -> str:
        return "yes" if self.same(self.softmax, self.eager) else "wrong"

    def is_continuous(self) -> str:
        others = not self.same(self.continuous, self.eager)
        return "yes" if self.continuous.isfinite().all() and others else "wrong"

    def is_causal(self) -> str:
        name = "input_ids" if self.architecture.family == "decoder" else "decoder_input_ids"
        ids = self.inputs[name]
        later = torch.cat([ids[:, :3], 3 + (ids[:, 3:] + 7) % (VOCABULARY - 3)], dim=1)
        changed = self.run(**{**self.inputs, name: later})
        kept = self.same(changed[:, :3], self.continuous[:, :3])
        return "yes" if kept and not self.same(changed[:, 3:], self.continuous[:, 3:]) else "wrong"

    def is_padded(self) -> str:
        sides = ("right", "left") if self.architecture.family == "decoder" else ("right",)
        return "yes" if all(self.same(*pair) for side in sides for pair in self._padded(side)) else "wrong"

    def _padded(self, side: str) -> Iterator[tuple[Tensor, Tensor]]:
        rows = [row[:n] for row, n in zip(self.inputs["input_ids"], LENGTHS, strict=True)]
        batch = pad(rows, side)
        if self.architecture.family != "decoder":
            del batch["position_ids"]
        decoder = self.inputs.get("decoder_input_ids")
        together = self.run(**batch, **({} if decoder is None else {"decoder_input_ids": decoder}))
        for i, row in enumerate(rows):
            if decoder is None:
                yield together[i, batch["attention_mask"][i].bool()], self.run(input_ids=row[None])[0]
            else:
                yield together[i], self.run(input_ids=row[None], decoder_input_ids=decoder[i : i + 1])[0]

    def is_cached(self) -> str:
        return "yes" if all(map(self._is_cached, (None, "static"))) else "wrong"

    def _is_cached(self, cache: str | None) -> bool:
        if self.architecture.family == "decoder":
            batch = pad([tokens(6), tokens(3)], "left")
            batch = {name: batch[name] for name in ("input_ids", "attention_mask")}
        else:
            batch = {name: x for name, x in self.inputs.items() if name != "decoder_input_ids"}
        with torch.no_grad():
            run = self.model.generate(
                **batch,
                max_new_tokens=6,
                min_new_tokens=6,
                do_sample=False,
                num_beams=1,
                output_logits=True,
                return_dict_in_generate=True,
                cache_implementation=cache,
            )
        got = torch.stack(run.logits, dim=1)
        if self.architecture.family != "decoder":
            return self.same(got, self.run(**batch, decoder_input_ids=run.sequences)[:, -7:-1])
        mask = torch.cat([batch["attention_mask"], torch.ones(2, 6, dtype=torch.long)], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        inputs = {"input_ids": run.sequences, "attention_mask": mask, "position_ids": positions}
        if self.model.config.model_type == "opt":
            del inputs["position_ids"]
        return self.same(got, self.run(**inputs, use_cache=False)[:, 5:-1])

    def is_packed(self) -> str:
        if not self._is_packed(use_cache=False):
            # Layers that aren't attention carry their state from one sequence into the next, whatever attention does.
            self.model.set_attn_implementation("eager")
            eager = self._is_packed(use_cache=False)
            self.model.set_attn_implementation("continuous")
            return "wrong" if eager else "nor with eager"
        try:
            return "yes" if self._is_packed() else "wrong"
        except ValueError as error:
            return "without a cache" if "pass use_cache=False" in str(error) else "wrong"

    def _is_packed(self, **how: Any) -> bool:
        rows = [row[:n] for row, n in zip(self.inputs["input_ids"], LENGTHS, strict=True)]
        alone = torch.cat([self.run(input_ids=row[None])[0] for row in rows])
        positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
        return self.same(self.run(input_ids=torch.cat(rows)[None], position_ids=positions, **how)[0], alone)


def pad(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    """The rows as one batch, with the positions that `generate` and collators give them."""
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(-len(row), None)
        ids[i, place], mask[i, place] = row, 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def check(name: str) -> dict[str, str] | str:
    """The answers of an architecture, "–" where a question doesn't apply; or why it is refused."""
    architecture = ARCHITECTURES[name]
    try:
        probe = Probe(architecture)
        return {x: probe.ask(x) if x in architecture.questions else "–" for x in COLUMNS}
    except NotImplementedError as error:
        return str(error)


# ---- The table


def table() -> str:
    """The rows of all architectures, and the sentences of those that are refused."""
    lines = [f"| | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
    refusals = []
    for name, architecture in ARCHITECTURES.items():
        row = check(name)
        print(f"{name}: {row}", file=sys.stderr, flush=True)
        if isinstance(row, str):
            refusals.append(f"* **{name}**: {row}")
        else:
            lines.append(f"| {name}, {architecture.family} | {' | '.join(row.values())} |")
    meanings = [f"* **{name}**: {meaning}." for name, meaning in COLUMNS.items()]
    return "\n".join([*lines, "", *meanings, "", "Refused, with these sentences:", "", *refusals])


def documented() -> dict[str, dict[str, str] | str]:
    """What the page says of each architecture, as `check` gives it."""
    text = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    rows: dict[str, dict[str, str] | str] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == len(COLUMNS) + 1 and ", " in cells[0]:
            rows[cells[0].rpartition(", ")[0]] = dict(zip(COLUMNS, cells[1:], strict=True))
        elif line.startswith("* **") and line[4:].partition("**: ")[0] in ARCHITECTURES:
            name, _, sentence = line[4:].partition("**: ")
            rows[name] = sentence
    return rows


def main() -> None:
    """Rewrite the table."""
    register_transformers()
    torch.set_num_threads(1)  # as the tests do; more only get in each other's way on models this small
    hf.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
