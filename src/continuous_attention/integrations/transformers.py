"""Continuous attention inside Hugging Face models: `attn_implementation="continuous"`.

transformers asks two functions registered under that name. The mask function runs once per forward and mask type and
says which nodes each query sees, as intervals; the attention function runs in every layer. A padded or packed batch
cuts the path: each sequence has a path of its own, and its own zero node before its first token.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from continuous_attention import intervals as iv
from continuous_attention.functional import continuous_attention

NAME = "continuous"

# What some models pass to their attention function, and why it can't be honoured.
REFUSED = {
    "softcap": "soft-capped scores aren't linear between two nodes, so the integral has no closed form",
    "position_bias": "a bias per node isn't linear between two nodes of the path",
    "s_aux": "attention sinks are extra mass outside of the path",
    "sinks": "attention sinks are extra mass outside of the path",
    "indices": "a sparse selection of nodes has no path through it",
    "block_indices": "a sparse selection of nodes has no path through it",
}


def register_transformers() -> None:
    """Make `attn_implementation="continuous"` work in Hugging Face transformers 5; calling it again does no harm.

    Afterwards `from_pretrained(…, attn_implementation="continuous")`, `from_config(config,
    attn_implementation="continuous")` and `model.set_attn_implementation("continuous")` train and evaluate a model
    with `continuous_attention` (boundary "zero") in every attention layer that asks transformers' attention
    interface; a model with attention of its own isn't reached. Padding, packed sequences, sliding windows and chunks
    cut the path. Packed sequences are known by `cu_seq_lens_q` and `cu_seq_lens_k`, or by `position_ids` alone, which
    transformers heeds only without an attention mask and without a cache (use_cache=False). Attention dropout,
    soft-capping, position biases, sinks and additive masks raise NotImplementedError.

    Raises:
        ImportError: transformers isn't installed, or older than version 5.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__
    except ImportError as error:
        raise ImportError(
            "register_transformers() needs transformers 5: pip install 'continuous-attention[transformers]'"
        ) from error
    if int(__version__.split(".")[0]) < 5:
        raise ImportError(f"register_transformers() needs transformers 5 or newer, got {__version__}")
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_intervals)


def mask_intervals(
    *, allow_is_causal_skip: bool = False, allow_is_bidirectional_skip: bool = False, **kwargs: Any
) -> Tensor:
    """The mask function: which nodes each query sees, of all that transformers' masks can say.

    Returns:
        int64 (B, 1, Lq + 1, 2): a row of zeros, then each query's interval [lo, hi). Four dims, since transformers
        hands on only masks with four dims untouched. One row too many, so that no mask of a user looks like it and a
        model that doesn't call `attention_forward` but adds it to its scores fails instead of forgetting the mask.
        A mask with gaps stays boolean, (B, 1, Lq, Lk).
    """
    from transformers.masking_utils import sdpa_mask

    mask = sdpa_mask(allow_is_causal_skip=False, allow_is_bidirectional_skip=False, **kwargs)
    assert mask is not None  # nothing may be skipped
    if torch.compiler.is_compiling():
        return mask
    intervals, contiguous = iv.of_mask(mask)
    return F.pad(intervals, (0, 0, 1, 0)) if contiguous else mask


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of one layer: query (B, Hq, Lq, D) to out (B, Lq, Hq, Dv).

    Args:
        module: the attention layer; its `is_causal` counts where no mask and no argument says it.
        query: (B, Hq, Lq, D).
        key: (B, Hkv, Lk, D).
        value: (B, Hkv, Lk, Dv).
        attention_mask: what `mask_intervals` returned, or a user's own mask with four dims: boolean, or additive
            with nothing but 0 and −inf (or the dtype's lowest number).
        scaling: factor of the scores.
        dropout: must be 0.
        is_causal: for models that make no mask; then query j sees the nodes 0 to j.
        **kwargs: whatever else a model passes on: `cu_seq_lens_q` and `cu_seq_lens_k` are packed documents; those in
            REFUSED raise, `output_attentions` too; others don't matter here.

    Returns:
        (out, None): there are no weights per token to return.

    Raises:
        NotImplementedError: something was asked for that continuous attention can't honour.
    """
    layer = type(module).__name__
    if dropout:
        raise NotImplementedError(
            f"{layer} asks for attention dropout {dropout}, and a path without some of its nodes isn't the same path "
            "any more: set it to 0 in the model's config (attention_dropout, attn_pdrop, …)"
        )
    for name, reason in REFUSED.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{layer} passes {name}, which continuous attention can't honour: {reason}")
    if kwargs.get("output_attentions"):
        raise NotImplementedError(f"{layer} asks for output_attentions; continuous attention has no weights per token")

    intervals = mask = None
    if attention_mask is None:
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if is_causal and query.shape[2] > 1:
            intervals = iv.around(iv.standing(query.shape[2], query.shape[2], query.device), None, 0)
    elif attention_mask.dtype == torch.int64 and attention_mask.shape[-2:] == (query.shape[2] + 1, 2):
        intervals = attention_mask[:, 0, 1:]
    else:
        mask = _as_boolean(attention_mask, layer)[..., : key.shape[2]]
    if kwargs.get("cu_seq_lens_q") is not None and kwargs.get("cu_seq_lens_k") is not None:
        documents, _ = iv.of_documents(kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"], query.shape[2])
        intervals = documents if intervals is None else iv.intersect(intervals, documents)
    out = continuous_attention(
        query.to(value.dtype),
        key.to(value.dtype),
        value,
        mask,
        scale=scaling,
        enable_gqa=True,
        intervals=intervals,
    )
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous(), None


def _as_boolean(mask: Tensor, layer: str) -> Tensor:
    """True = visible; additive masks count if they say nothing but visible or hidden."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(f"{layer} got a mask with dtype {mask.dtype}, wanted bool (True = visible)")
    return iv.of_additive(f"the mask of {layer}", mask)
