"""Times of the nodes inside Hugging Face models: `model(…, times=t)`.

A hook before the outermost forward takes the times out of its keyword arguments, one after it forgets them, and in
between every attention layer asks for those of its nodes. So no forward on the way has to know of them. They are kept
per thread, and a layer that gradient checkpointing runs again during backward gets those it had the first time.

Shape legend: B batch, Lq queries, Lk nodes of a layer, L times.
"""

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from continuous_attention import intervals as iv
from continuous_attention.checks import FLOATS, check_order, check_tensor

ARGUMENTS = ("times", "decoder_times")
NODES = "_continuous_nodes"  # attribute of a module: the argument that has the times of its nodes, or None


@dataclass
class _Given:
    """The times of one forward."""

    model: Any
    times: dict[str, Tensor]
    cached: int | None  # nodes in the cache when the forward began; None without a cache, or with one of fixed size
    outer: "_Given | None"
    used: set[str] = field(default_factory=set)


_thread = threading.local()


def take_times(model: Any) -> None:
    """Make a Hugging Face model with continuous attention take `times`, in place; calling it again does no harm.

    Afterwards `model(…, times=t)` runs the path of each sample at the times of its nodes, in every layer that asks
    transformers' attention interface, whatever the arguments of the model's forward; without `times` it runs as before.
    The times are (L,) or (B, L), float32 or float64, non-decreasing, in any unit; differentiable. Differences are taken
    in their dtype, so epoch seconds want float64. What L is:

    * one per node. Nodes that padding hides may have any time, even NaN, and packed documents each their own origin.
    * with a cache one per cached and new node, (B, Lk); with a static cache one for each of its places.
    * encoder-decoders: `times` are those of the encoder's nodes, in the cross-attention as well, `decoder_times` those
      of the decoder's. One without the other leaves the other nodes at unit steps.
    * PatchTST: one per reading, (context_length,) or (B, context_length). A patch has the mean of its readings' times
      and the cls token that of the first patch, so it adds no length. What patching drops needs no time.

    `config.continuous_start_length` (1.0 where it's absent) is the length of the segment before the first visible node,
    in the unit of the times. Layers that run softmax (`continuous_layers`) have no use for times and ignore them.
    Trainer needs `remove_unused_columns=False`. `generate` refuses the argument, since each of its steps would need the
    times of more nodes: decode in a loop of your own. `torch.compile(fullgraph=True)` compiles a forward with times.
    Reentrant checkpointing gives gradients only to times that are leaves.

    Args:
        model: a `transformers.PreTrainedModel`, the one that is called: the hooks of a part don't run for the whole.

    Raises:
        TypeError: the model isn't one of transformers.
        The forward raises ValueError where times don't fit a layer, decrease where they're seen, aren't finite there,
        or reach no layer; TypeError for a wrong type or dtype; NotImplementedError for PatchTST with
        channel_attention=True, static caches that slide, and layers whose nodes have no times.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    encoder = set(model.get_encoder().modules()) if model.config.is_encoder_decoder else set()
    for name, module in model.named_modules():
        if "Attention" in type(module).__name__:
            setattr(module, NODES, _nodes_of(module, name, encoder))
    if _keep not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_keep, with_kwargs=True)
        model.register_forward_hook(_forget, always_call=True)


def times_of(module: nn.Module, query: Tensor, key: Tensor) -> Tensor | None:
    """The times (Lk,) or (B, Lk) of the nodes of an attention layer in the forward that runs now, None for unit steps.

    Args:
        module: the attention layer.
        query: (B, Hq, Lq, D).
        key: (B, Hkv, Lk, D).

    Raises:
        ValueError: they don't fit the layer.
        NotImplementedError: its nodes aren't those that the times are for.
    """
    given = _given()
    if given is None:
        return None
    layer, name = type(module).__name__, getattr(module, NODES, "times")
    if name is None:
        raise NotImplementedError(f"times can't reach {layer}: it attends to nodes from elsewhere, which have no times")
    times = given.times.get(name)
    if times is None:
        return None
    given.used.add(name)
    batch, length = key.shape[0], key.shape[2]
    is_cached = name == ("decoder_times" if given.model.config.is_encoder_decoder else "times")
    nodes = given.cached + query.shape[2] if is_cached and given.cached is not None else length
    if tuple(times.shape) not in ((nodes,), (batch, nodes)):
        raise ValueError(
            f"{name} must have one time per node of {layer}, cached ones included, shape (Lk,) or (B, Lk) = "
            f"({nodes},) or ({batch}, {nodes}), got {tuple(times.shape)}"
        )
    times = times[..., -length:]  # a sliding window's cache keeps the last nodes only
    return times.to(key.device)


def _nodes_of(module: nn.Module, name: str, encoder: set[nn.Module]) -> str | None:
    if module in encoder:
        return "times"
    if re.search("encoder_attn|cross", f"{name} {type(module).__name__}", re.IGNORECASE):
        return "times" if encoder else None
    return "decoder_times" if encoder else "times"


# ---- The hooks


def _given() -> _Given | None:
    return getattr(_thread, "given", None)


def _keep(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    asked = {name: kwargs[name] for name in ARGUMENTS if name in kwargs}
    if not asked:
        return None
    kwargs = {name: x for name, x in kwargs.items() if name not in ARGUMENTS}
    times = {name: x for name, x in asked.items() if x is not None}
    if not times:
        return args, kwargs
    for name, x in times.items():
        check_tensor(name, x, (torch.float32, torch.float64), None)
    if "decoder_times" in times and not model.config.is_encoder_decoder:
        raise ValueError(
            f"decoder_times are for models with an encoder and a decoder, {type(model).__name__} takes times alone"
        )
    if model.config.model_type == "patchtst":
        readings = kwargs.get("past_values", args[0] if args else None)
        times = {"times": _of_patches(times["times"], readings, model.config)}
    cached = _count_cached(kwargs.get("cache", kwargs.get("past_key_values")))
    if model.training and torch.is_grad_enabled():
        _keep_in_checkpoints(model)
    _thread.given = _Given(model, times, cached, _given())
    return args, kwargs


def _count_cached(cache: Any) -> int | None:
    if cache is None:
        return None
    if not cache.is_compileable:
        return cache.get_seq_length()
    if any(cache.is_sliding):
        raise NotImplementedError("times can't be used with a static cache that slides, whose places change their node")
    return None


def _forget(model: Any, _: Any, output: Any) -> None:
    given = _given()
    if given is None or given.model is not model:
        return
    _thread.given = given.outer
    unused = [name for name in given.times if name not in given.used]
    if unused and output is not None:  # None after an exception
        raise ValueError(
            f"{' and '.join(unused)} reached no attention layer of {type(model).__name__}, which runs with "
            f"{model.config._attn_implementation!r} attention: make it continuous with switch_to_continuous(model)"
        )


def _keep_in_checkpoints(model: Any) -> None:
    """Make the checkpointed layers get their times again when backward, after the forward's end, runs them again."""
    for module in model.modules():
        checkpoint = vars(module).get("_gradient_checkpointing_func")
        if checkpoint is not None and getattr(checkpoint, "func", None) is not _checkpoint:
            module._gradient_checkpointing_func = partial(_checkpoint, checkpoint)


def _checkpoint(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(_run_given, _given(), function), *args, **kwargs)


def _run_given(given: _Given | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before = _given()
    _thread.given = given
    try:
        return function(*args, **kwargs)
    finally:
        _thread.given = before


# ---- PatchTST


def _of_patches(times: Tensor, readings: Any, config: Any) -> Tensor:
    """The times of a PatchTST's nodes, (N,) or (B · channels, N), from those of its readings."""
    if config.channel_attention:
        raise NotImplementedError(
            "times can't be used with channel_attention=True: its second attention runs along the channels, which have "
            "no times"
        )
    check_tensor("past_values", readings, FLOATS, None)
    if readings.ndim != 3:
        raise ValueError(f"past_values must have shape (B, context_length, channels), got {tuple(readings.shape)}")
    batch, length, channels = readings.shape
    if tuple(times.shape) not in ((length,), (batch, length)):
        raise ValueError(
            f"times must have one time per reading, shape (context_length,) or (B, context_length) = ({length},) or "
            f"({batch}, {length}), got {tuple(times.shape)}"
        )
    size, stride = config.patch_length, config.patch_stride
    used = times[..., (length - size) % stride :]
    check_order(used.reshape(-1, used.shape[-1]), iv.everything(used.shape[-1], used.device))
    # The means' differences are means of differences, which are never negative, and so never round to a step back.
    steps = (used[..., stride:] - used[..., :-stride]).unfold(-1, size, stride).mean(-1)
    start = used[..., :size].mean(-1, keepdim=True)
    patches = torch.cat([start, start + steps.cumsum(-1)], dim=-1)
    if config.use_cls_token:
        patches = torch.cat([start, patches], dim=-1)
    return patches if patches.ndim == 1 else patches.repeat_interleave(channels, dim=0)
