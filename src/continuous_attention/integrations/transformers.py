"""Continuous attention inside Hugging Face models: `attn_implementation="continuous"`.

transformers asks two functions registered under that name. The mask function (masks.py) runs once per forward and kind
of mask and says which nodes each query sees, as intervals; the attention function runs in every layer. A padded or
packed batch cuts the path: each sequence has a path of its own, and its own start node before its first token.

Three attributes of a model's config say which layers are continuous and where their paths begin; they are saved with
it. `continuous_layers` is "all" (also where it's absent), "upper", "odd" or a list of indices, and the other layers run
softmax on the same intervals. `continuous_boundary` is "zero" (also where it's absent), "repeat", "half", "none" or
"learned"; then each attention module has parameters `boundary_key` (Hkv, D) and `boundary_value` (Hkv, Dv).
`continuous_start_length` (1.0 where it's absent) is the length of the segment before the first visible node.

Shape legend: B batch, Hq query heads, Hkv key/value heads, Lq queries, Lk nodes, D and Dv head dims.
"""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from continuous_attention import intervals as iv
from continuous_attention.functional import BOUNDARIES, continuous_attention
from continuous_attention.integrations import masks
from continuous_attention.integrations.parallel import RANKS
from continuous_attention.integrations.times import times_of

NAME = "continuous"
LAYERS = ("all", "upper", "odd")

# What some models pass to their attention function, and why it can't be honoured.
REFUSED = {
    "position_bias": "a bias per node isn't linear between two nodes of the path",
    "sinks": "attention sinks come as s_aux here",
    "indices": "a sparse selection of nodes has no path through it",
    "block_indices": "a sparse selection of nodes has no path through it",
    "cache": "a paged cache has no nodes in a row",
    "block_table": "a paged cache has no nodes in a row",
    "times": "take_times(model) first",
    "decoder_times": "take_times(model) first",
}


def register_transformers() -> None:
    """Make `attn_implementation="continuous"` work in Hugging Face transformers 5; calling it again does no harm.

    Afterwards `from_pretrained(…, attn_implementation="continuous")`, `from_config(config,
    attn_implementation="continuous")` and `model.set_attn_implementation("continuous")` train, evaluate and generate
    with `continuous_attention` in every attention layer that asks transformers' attention interface; config attributes
    `continuous_layers` and `continuous_boundary` say in which layers and with which boundary.
    `switch_to_continuous` sets them and checks that every layer was reached; `load_continuous` loads such a model.
    docs/transformers.md says what works with which model, and what raises NotImplementedError.

    Raises:
        ImportError: transformers isn't installed, or older than version 5.12.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, __version__
    except ImportError as error:
        raise ImportError(
            "register_transformers() needs transformers: pip install 'continuous-attention[transformers]'"
        ) from error
    if tuple(map(int, __version__.split(".")[:2])) < (5, 12):
        raise ImportError(f"register_transformers() needs transformers 5.12 or newer, got {__version__}")
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, masks.mask_intervals)


# ---- The attention function


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of one layer: query (B, Hq, Lq, D) to out (B, Lq, Hq, Dv).

    Args:
        module: the attention layer. Its config chooses softmax or continuous, and the boundary; its `is_causal` counts
            where no mask and no argument says it.
        query: (B, Hq, Lq, D).
        key: (B, Hkv, Lk, D).
        value: (B, Hkv, Lk, Dv).
        attention_mask: what `masks.mask_intervals` made, or a user's own mask with four dims: boolean, or additive
            with nothing but 0 and −inf (or the dtype's lowest number).
        scaling: factor of the scores.
        dropout: must be 0.
        is_causal: for models that make no mask; then query j sees the nodes 0 to j.
        sliding_window: nodes seen at most; where there is a mask, it has cut this window already.
        softcap: bound of the scores, see `continuous_attention`.
        s_aux: (Hq,), a sink beside the path: out = ∫ e^{a(s)} v(s) ds / (∫ e^{a(s)} ds + e^{s_aux}).
        position_ids: (B, Lq); in causal layers a document begins where they don't rise.
        cu_seq_lens_q: (documents + 1,), where packed documents begin, and the total number of queries.
        cu_seq_lens_k: the same for the nodes.
        **kwargs: whatever else a model passes on. Those in REFUSED raise, `output_attentions` too; others don't
            matter here.

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
    if _witness is not None:
        _witness(module, key, value, position_ids is not None)

    boundary = _boundary(module)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if position_ids is not None and not (causal and position_ids.ndim == 2 and position_ids.shape[1] == query.shape[2]):
        position_ids = None
    times = times_of(module, query, key)
    how = {
        "scale": scaling,
        "boundary": "zero" if boundary is None else boundary,
        "times": None if boundary is None else times,
        "start_length": 1.0 if boundary is None else _start_length(module),
        "softcap": softcap,
        "rule": "rectangle" if boundary is None else "exact",
        "return_lse": s_aux is not None,
    }
    nodes = query.to(value.dtype), key.to(value.dtype), value
    spread = getattr(module, RANKS, None)
    if spread is None:
        intervals, mask, causal = _visible(
            (attention_mask, position_ids, cu_seq_lens_q, cu_seq_lens_k),
            (query.shape[2], key.shape[2], query.device, causal, sliding_window, layer),
        )
        result = continuous_attention(*nodes, mask, is_causal=causal, enable_gqa=True, intervals=intervals, **how)
    else:
        result = spread.attend(module, nodes, attention_mask, **how)
    if isinstance(result, Tensor):
        out = result
    else:
        out, lse = result
        assert s_aux is not None
        out = out * torch.sigmoid(lse - s_aux.reshape(-1, 1)).unsqueeze(-1).to(out.dtype)
    return out.transpose(1, 2).contiguous(), None


# What the queries of a layer see, as `continuous_attention` takes it: intervals, a boolean mask with gaps, is_causal.
_Seen = tuple[Tensor | None, Tensor | None, bool]
# What it follows from: attention_mask, position_ids, cu_seq_lens_q, cu_seq_lens_k; Lq, Lk, device, causal,
# sliding_window, name of the layer.
_Tensors = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_Numbers = tuple[int, int, torch.device, bool, int | None, str]
_remembered: deque[tuple[Any, list[Any], _Seen]] = deque(maxlen=8)


def _visible(tensors: _Tensors, numbers: _Numbers) -> _Seen:
    """`_resolve`, remembered, since all layers of a forward ask with the same tensors."""
    given = [x for x in tensors if x is not None]
    # Inference tensors don't tell when they change, and neither does a user's mask that is written to through numpy.
    is_users = tensors[0] is not None and tensors[0].dtype != torch.int64
    if not given or is_users or torch.compiler.is_compiling() or any(x.is_inference() for x in given):
        return _resolve(tensors, numbers)
    state = [None if x is None else x._version for x in tensors]
    for known, references, seen in tuple(_remembered):
        if known == (numbers, state) and all(
            x is (None if held is None else held()) for x, held in zip(tensors, references, strict=True)
        ):
            return seen
    seen = _resolve(tensors, numbers)
    _remembered.appendleft(((numbers, state), [None if x is None else ref(x) for x in tensors], seen))
    return seen


def _resolve(tensors: _Tensors, numbers: _Numbers) -> _Seen:
    attention_mask, position_ids, cu_seq_lens_q, cu_seq_lens_k = tensors
    query_length, key_length, device, causal, sliding_window, layer = numbers
    intervals = mask = None
    if attention_mask is not None and masks.is_plainly_causal(attention_mask, query_length):
        causal = query_length > 1
    elif attention_mask is not None:
        causal = False
        intervals = masks.unmark(attention_mask, query_length)
        if intervals is None:
            mask = _as_boolean(attention_mask, layer)
            if mask.shape[-1] < key_length:
                raise ValueError(
                    f"the mask of {layer} must be as long as its keys, {key_length}, got shape {tuple(mask.shape)}"
                )
            mask = mask[..., :key_length]
            intervals, mask = _without_gaps(mask)
    elif query_length == 1:
        causal = False
        if sliding_window is not None:
            intervals = torch.tensor([[[key_length - sliding_window, key_length]]], device=device)
    elif causal and (query_length != key_length or sliding_window is not None):
        # Without a mask the first query stands on the first node, whatever the cache has room for.
        causal = False
        left = None if sliding_window is None else sliding_window - 1
        intervals = iv.around(iv.standing(query_length, query_length, device), left, 0)

    cuts = []
    if position_ids is not None and query_length > 1:
        hull = intervals if mask is None else iv.of_mask(mask.any(1))[0]
        cuts.append(_documents_by_position(position_ids, hull))
    if (cu_seq_lens_q is None) != (cu_seq_lens_k is None):
        raise ValueError(f"{layer} got one of cu_seq_lens_q and cu_seq_lens_k without the other")
    if cu_seq_lens_q is not None and cu_seq_lens_k is not None:
        if not iv.holds(cu_seq_lens_q[-1:] == query_length):
            raise ValueError(
                f"cu_seq_lens_q of {layer} must end with the number of queries, {query_length}, got "
                f"{cu_seq_lens_q.tolist()}"
            )
        cuts.append(iv.of_documents(cu_seq_lens_q, cu_seq_lens_k, query_length)[0])
    for cut in cuts:
        if cut is not None:
            intervals = cut if intervals is None else iv.intersect(intervals, cut)
    return intervals, mask, causal


def _without_gaps(mask: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """A mask (B, Hq or 1, Lq, Lk) as intervals, or as it is where they don't say it all or can't be told."""
    if mask.shape[1] > 1 or not iv.readable(mask):
        return None, mask
    runs, contiguous = iv.of_mask(mask[:, 0])
    return (runs, None) if contiguous else (None, mask)


def _documents_by_position(position_ids: Tensor, intervals: Tensor | None) -> Tensor | None:
    offset: int | Tensor = 0
    if intervals is not None:
        # The last node that the query j sees is its own, offset + j, unless padding hides that.
        offset = (intervals[..., 1] - torch.arange(1, intervals.shape[1] + 1, device=intervals.device)).max()
    cut, packed = masks.of_position_ids(position_ids, intervals, offset)
    return cut if torch.compiler.is_compiling() or packed else None


def _as_boolean(mask: Tensor, layer: str) -> Tensor:
    """True = visible; additive masks count if they say nothing but visible or hidden."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(f"{layer} got a mask with dtype {mask.dtype}, wanted bool (True = visible)")
    return iv.of_additive(f"the mask of {layer}", mask)


# ---- Which layers, and where their paths begin


def _boundary(module: nn.Module) -> str | tuple[Tensor, Tensor] | None:
    """Where the path of this layer begins; None if the layer runs softmax."""
    config = getattr(module, "config", None)
    layers = getattr(config, "continuous_layers", "all")
    if layers != "all" and not _is_chosen(module, layers):
        return None
    boundary = getattr(config, "continuous_boundary", "zero")
    _check_boundary("continuous_boundary", boundary)
    if boundary != "learned":
        return boundary
    if not hasattr(module, "boundary_key"):
        raise ValueError(
            f"continuous_boundary='learned' in the config, but {type(module).__name__} has no boundary_key: load the "
            "model with load_continuous(path), or add it with switch_to_continuous(model, boundary='learned')"
        )
    return module.boundary_key, module.boundary_value  # pyright: ignore[reportReturnType]


def _start_length(module: nn.Module) -> float:
    return getattr(getattr(module, "config", None), "continuous_start_length", 1.0)


def _is_chosen(module: nn.Module, layers: Any) -> bool:
    _check_layers("continuous_layers", layers)
    if layers == "all" or len(layers) == 0:
        return layers == "all"
    place = getattr(module, PLACE, None)
    if place is None:
        raise ValueError(
            f"{type(module).__name__} doesn't know which layer it is, and the config has continuous_layers={layers!r}: "
            "call switch_to_continuous(model, …), or load_continuous(path)"
        )
    return _chooses(layers, *place)


def _chooses(layers: str | Sequence[int], index: int, count: int) -> bool:
    if isinstance(layers, str):
        return {"all": True, "upper": 2 * index >= count, "odd": index % 2 == 1}[layers]
    return index in layers or index - count in layers


def _check_layers(name: str, layers: Any) -> None:
    if isinstance(layers, str):
        if layers in LAYERS:
            return
    elif isinstance(layers, Sequence) and all(isinstance(x, Integral) and not isinstance(x, bool) for x in layers):
        return
    raise ValueError(f"{name} must be {', '.join(map(repr, LAYERS))} or a list of layer indices, got {layers!r}")


def _check_boundary(name: str, boundary: Any) -> None:
    choices = (*BOUNDARIES, "learned")
    if boundary not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {boundary!r}")


# ---- Switching and loading

PLACE = "_continuous_place"  # attribute of an attention module: its index in its stack of layers, and their number
# Hears of every call while a switch is checked: the module, its key and value, and whether it was told positions.
_witness: Callable[[nn.Module, Tensor, Tensor, bool], None] | None = None


def switch_to_continuous(
    model: Any,
    *,
    layers: str | Sequence[int] = "all",
    boundary: str = "zero",
    example: dict[str, Any] | None = None,
) -> None:
    """Make the attention of a Hugging Face model continuous, in place, and check with one forward that it is.

    The choice is written into `model.config`, so `save_pretrained` keeps it, and `load_continuous(path)` brings it back
    (after `register_transformers()`, `from_pretrained(path)` does so, too, where all layers are continuous and nothing
    is learned; otherwise the first forward raises). Call it again for another choice; `switch_to_softmax(model)` undoes
    it.

    Args:
        model: a `transformers.PreTrainedModel`.
        layers: the attention layers that become continuous, counted in each stack of layers: "all"; "upper", the second
            half; "odd", those with indices 1, 3, 5, …; or indices, negative ones from the end. The others run softmax
            on the same nodes.
        boundary: where the paths begin: "zero", "repeat", "half", "none" (see `continuous_attention`) or "learned": new
            parameters `boundary_key` (Hkv, D) and `boundary_value` (Hkv, Dv) in each chosen attention module, zero at
            first and in its keys' dtype. Behind a rotary embedding the start key counts as rotated already.
        example: keyword arguments for the checking forward; made from the config where None. Layers that it doesn't run
            aren't checked.

    Raises:
        TypeError: the model isn't one of transformers.
        ValueError: a choice is wrong, an index has no layer, or the model doesn't run on the example.
        NotImplementedError: a layer computes attention by itself, or asks for something that can't be continuous. The
            model is then as it was before.
    """
    register_transformers()
    if not hasattr(model, "set_attn_implementation"):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    if any(RANKS in vars(module) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} works with other ranks since parallelize_context(model): call its handle's "
            "remove() first, and parallelize_context again afterwards"
        )
    _check_layers("layers", layers)
    _check_boundary("boundary", boundary)
    configs = _configs(model)
    before = model.config._attn_implementation
    with _restored_after_errors(configs):
        if not model._can_set_attn_implementation():
            raise masks.computes_by_itself(type(model).__name__)
        model.set_attn_implementation(NAME)
        for config in configs:
            config.continuous_layers, config.continuous_boundary = "all", "zero"
        called, told_positions = _run_checked(model, example, before)
        places = _places(model, called)
        chosen = [place for place in places.values() if _chooses(layers, *place)]
        for index in () if isinstance(layers, str) else layers:
            if not any(-count <= index < count for _, count in places.values()):
                counts = sorted({count for _, count in places.values()})
                raise ValueError(f"layers has the index {index}, and the model {' and '.join(map(str, counts))} layers")
        if len(layers) > 0 and not chosen:
            raise ValueError(f"layers={layers!r} chooses none of the {len(places)} attention layers")

    for module, place in places.items():
        setattr(module, PLACE, place)
    if not told_positions and _refuse_packing_with_a_cache not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_refuse_packing_with_a_cache, with_kwargs=True)
    shapes = _place_boundaries(model, called, layers if boundary == "learned" else [])
    for config in configs:
        config.continuous_layers = layers if isinstance(layers, str) else [int(x) for x in layers]
        config.continuous_boundary = boundary
    # Plain attributes of a config are saved, and this one is what from_pretrained goes by.
    model.config.attn_implementation = NAME
    if boundary == "learned":
        model.config.continuous_boundary_shapes = shapes
    else:
        vars(model.config).pop("continuous_boundary_shapes", None)


def switch_to_softmax(model: Any, implementation: str = "sdpa") -> None:
    """Undo `switch_to_continuous`, in place: softmax attention, and nothing continuous left in what will be saved.

    Learned boundaries are dropped. For a while only, `model.set_attn_implementation("sdpa")` is enough.

    Args:
        model: a `transformers.PreTrainedModel`.
        implementation: of the softmax attention, a name that transformers knows.

    Raises:
        ValueError: transformers doesn't know the implementation, or not for this model.
    """
    model.set_attn_implementation(implementation)
    for config in _configs(model):
        for name in ("layers", "boundary", "boundary_shapes", "start_length"):
            vars(config).pop(f"continuous_{name}", None)
        vars(config).pop("attn_implementation", None)
    for module in model.modules():
        if vars(module).pop(PLACE, None) is not None:
            _drop_boundary(module)


def load_continuous(path: Any, *, model_class: Any = None, example: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """Load a model that was saved with continuous attention: weights, learned boundaries, and the choice of layers.

    Args:
        path: folder or name, as for `from_pretrained`.
        model_class: of the model; the one that its config names where None.
        example: as in `switch_to_continuous`.
        **kwargs: for the class's `from_pretrained`: dtype, device_map, revision, ….

    Returns:
        The model, with continuous attention as its config says; all layers and boundary "zero" where it says nothing.

    Raises:
        ValueError: the config names no class that transformers has.
        ValueError, NotImplementedError: as `switch_to_continuous`.
    """
    register_transformers()
    import transformers

    config = kwargs.pop("config", None)
    if config is None:
        names = "cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token", "trust_remote_code"
        config = transformers.AutoConfig.from_pretrained(path, **{x: kwargs[x] for x in names if x in kwargs})
    if model_class is None:
        name = (getattr(config, "architectures", None) or ["none"])[0]
        model_class = getattr(transformers, name, None)
        if model_class is None:
            raise ValueError(f"the config of {path} names the architecture {name!r}; pass model_class")
    if hasattr(model_class, "_model_mapping"):  # an Auto class
        model_class = model_class._model_mapping[type(config)]
    layers = getattr(config, "continuous_layers", "all")
    boundary = getattr(config, "continuous_boundary", "zero")
    shapes = getattr(config, "continuous_boundary_shapes", {})
    loader = _with_boundaries(model_class, shapes) if boundary == "learned" else model_class
    how = {"config": config, "attn_implementation": NAME, "output_loading_info": True, **kwargs}
    model, info = loader.from_pretrained(path, **how)
    model.__class__ = model_class
    with torch.no_grad():
        for name in info["missing_keys"]:
            if name.endswith((".boundary_key", ".boundary_value")):
                model.get_parameter(name).zero_()
    switch_to_continuous(model, layers=layers, boundary=boundary, example=example)
    return model


def _configs(model: Any) -> list[Any]:
    """The configs of a model and of all its parts."""
    found = [model.config, *(module.config for module in model.modules() if hasattr(module, "config"))]
    return list({id(config): config for config in found}.values())


@contextmanager
def _restored_after_errors(configs: list[Any]) -> Iterator[None]:
    before = [dict(vars(config)) for config in configs]
    try:
        yield
    except BaseException:
        for config, attributes in zip(configs, before, strict=True):
            vars(config).clear()
            vars(config).update(attributes)
        raise


def _refuse_packing_with_a_cache(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where transformers ignores packed position_ids and the attention layers aren't told of them."""
    positions, use_cache = kwargs.get("position_ids"), kwargs.get("use_cache")
    if positions is None or kwargs.get("attention_mask") is not None or torch.compiler.is_compiling():
        return
    if use_cache is None:
        use_cache = getattr(model.config.get_text_config(), "use_cache", False)
    if use_cache and model.config._attn_implementation == NAME and bool((positions.diff(dim=-1) <= 0).any()):
        raise ValueError(
            f"{type(model).__name__} ignores packed position_ids (they don't rise everywhere) when it uses a cache: "
            "pass use_cache=False"
        )


def _run_checked(
    model: Any, example: dict[str, Any] | None, before: str
) -> tuple[dict[nn.Module, tuple[Tensor, Tensor]], bool]:
    """Run the model once.

    Returns:
        The attention modules in order, each with a key and a value that it had; and whether all were told position_ids.
    """
    global _witness
    ran: Counter[nn.Module] = Counter()
    asked: Counter[nn.Module] = Counter()
    called: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    told: list[bool] = []

    def witness(module: nn.Module, key: Tensor, value: Tensor, told_positions: bool) -> None:
        asked[module] += 1
        told.append(told_positions)
        called.setdefault(module, (key, value))

    modes = {module: module.training for module in model.modules()}
    hooks = [
        module.register_forward_pre_hook(lambda module, _: ran.update([module]))
        for module in model.modules()
        if _looks_like_attention(module)
    ]
    _witness = witness
    try:
        model.eval()
        with torch.no_grad():
            inputs = _example_for(model) if example is None else example
            try:
                model(**inputs)
            except NotImplementedError:
                raise
            except Exception as error:
                model.set_attn_implementation(before)
                model(**inputs)
                raise NotImplementedError(
                    f"{type(model).__name__} runs with {before} attention, but not with continuous attention ({error})"
                ) from error
    except NotImplementedError:
        raise
    except Exception as error:
        wanted = "an example made from its config; pass example={…}" if example is None else "the example"
        raise ValueError(f"{type(model).__name__} doesn't run on {wanted} ({error})") from error
    finally:
        _witness = None
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode

    names = {module: name for name, module in model.named_modules()}
    for module, times in ran.items():
        if asked[module] < times:  # more often where it takes images one by one
            raise NotImplementedError(
                f"{type(model).__name__} can't be continuous: its {type(module).__name__} ({names[module]}) ran "
                f"{times} times and asked transformers' attention interface {asked[module]} times"
            )
    if not called:
        raise NotImplementedError(f"no layer of {type(model).__name__} asks transformers' attention interface")
    return called, all(told)


def _looks_like_attention(module: nn.Module) -> bool:
    """A softmax attention layer by its name, and none around another one."""
    found = [x for x in module.modules() if "Attention" in type(x).__name__]
    return found == [module] and not re.search("Linear|Lightning", type(module).__name__)


def _example_for(model: Any) -> dict[str, Tensor]:
    """The smallest input that a model with this config takes."""
    config, name, device = model.config, model.main_input_name, model.device

    def ids() -> Tensor:
        return torch.arange(8, device=device)[None] % config.get_text_config().vocab_size

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(1, *shape, device=device, dtype=model.dtype)

    if name == "input_ids":
        example = {name: ids()}
    elif name == "pixel_values":
        size = config.image_size if isinstance(config.image_size, Sequence) else [config.image_size] * 2
        example = {name: zeros(config.num_channels, *size)}
    elif name == "input_features":
        example = {name: zeros(config.num_mel_bins, 2 * config.max_source_positions)}
    else:
        raise ValueError(f"it takes {name}")
    if config.is_encoder_decoder:
        example["decoder_input_ids"] = ids()
    return example


def _places(model: Any, called: dict[nn.Module, Any]) -> dict[nn.Module, tuple[int, int]]:
    """The index of each attention module among those with the same name but for the numbers, and how many they are."""
    stacks: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules():
        if module in called:
            stacks.setdefault(re.sub(r"\d+", "", name), []).append(module)
    return {module: (i, len(stack)) for stack in stacks.values() for i, module in enumerate(stack)}


def _place_boundaries(
    model: Any, called: dict[nn.Module, tuple[Tensor, Tensor]], layers: str | Sequence[int]
) -> dict[str, list[int]]:
    """Give the chosen modules their start node, take it from the others, and return the shapes by module name."""
    shapes = {}
    for name, module in model.named_modules():
        if module not in called:
            continue
        if not _is_chosen(module, layers):
            _drop_boundary(module)
            continue
        key, value = called[module]
        shapes[name] = [key.shape[1], key.shape[3], value.shape[3]]
        if not hasattr(module, "boundary_key"):
            _add_boundary(module, shapes[name], device=key.device, dtype=key.dtype)
    return shapes


def _add_boundary(module: nn.Module, shape: Sequence[int], **how: Any) -> None:
    heads, dim, value_dim = shape
    module.register_parameter("boundary_key", nn.Parameter(torch.zeros(heads, dim, **how)))
    module.register_parameter("boundary_value", nn.Parameter(torch.zeros(heads, value_dim, **how)))


def _drop_boundary(module: nn.Module) -> None:
    for name in ("boundary_key", "boundary_value"):
        module._parameters.pop(name, None)


def _with_boundaries(model_class: Any, shapes: dict[str, list[int]]) -> Any:
    """The model class, but its models are made with start nodes, so that from_pretrained fills them."""

    class WithBoundaries(model_class):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            modules, prefix = dict(self.named_modules()), f"{self.base_model_prefix}."
            for name, shape in shapes.items():
                # A model with a head calls its base model by the prefix, the base model alone doesn't.
                module = modules.get(name) or modules.get(prefix + name) or modules[name.removeprefix(prefix)]
                _add_boundary(module, shape)

    WithBoundaries.__name__ = model_class.__name__
    return WithBoundaries
