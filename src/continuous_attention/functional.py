"""The public functions: validate, resolve what was asked for into intervals and lengths, choose a back end.

Shape legend: B batch, Hq query heads, Hkv key/value heads, Lq queries, Lk nodes, D and Dv head dims.
"""

import math
from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from continuous_attention import intervals as iv
from continuous_attention import ops, path, quadrature, reference
from continuous_attention.checks import (
    FLOATS,
    check_choice,
    check_documents,
    check_dropout,
    check_flag,
    check_heads,
    check_mask,
    check_number,
    check_order,
    check_qkv,
    check_shape,
    check_tensor,
    check_times,
    check_window,
    dtype_name,
    unify_dtypes,
)
from continuous_attention.kernels import cpu, triton

BOUNDARIES = ("zero", "repeat", "half", "none")
RULES = ("exact", "trapezoid", "rectangle", "taylor")
SHORTEST_PATH = 1e-30
"""Below it, the kernels' float32 lengths lose digits."""
INTERPOLATIONS = ("linear", "fourth_order")
BACKENDS = ("reference", "cpu", "triton")


def continuous_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    boundary: str | tuple[Tensor, Tensor] = "zero",
    times: Tensor | None = None,
    query_times: Tensor | None = None,
    start_length: float = 1.0,
    window: int | tuple[int, int] | None = None,
    time_window: float | None = None,
    intervals: Tensor | None = None,
    softcap: float | None = None,
    rule: str = "exact",
    interpolation: str = "linear",
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Continuous softmax attention: the query integrates over the path that joins the keys and values.

        o = ∫ e^{scale·q·k(s)} v(s) ds / ∫ e^{scale·q·k(s)} ds

    Node i is the key k_i with its value v_i, at time τ_i = i unless `times` says otherwise; keys and values are
    joined by straight lines. The first eight arguments and the layout are those of
    `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: (B, Hq, Lq, D), float16, bfloat16, float32 or float64; halves are accumulated in float32.
        key: (B, Hkv, Lk, D), dtype of the query.
        value: (B, Hkv, Lk, Dv), dtype of the query.
        attn_mask: boolean, True = visible, broadcastable to (B, Hq, Lq, Lk). It cuts the path: a segment counts if
            both its nodes are visible. Intersects with `is_causal`, `window` and `intervals`.
        dropout_p: must be 0: without some of its nodes a path isn't the same path any more.
        is_causal: query j stands on node Lk − Lq + j and sees the nodes up to it. This bottom-right alignment is
            flash-attn's; SDPA's differs where Lq ≠ Lk. With `query_times`, the nodes with τ_i ≤ τ_q are seen and
            the path is held constant from the last of them up to τ_q.
        scale: factor of the scores, 1/√D by default.
        enable_gqa: allow Hq to be a multiple of Hkv.
        boundary: where the path begins, before the first node that the query sees. "zero": at a zero key and value;
            (k0, v0): at these, shapes (Hkv, D) and (Hkv, Dv), usually trainable; "repeat": at the first node itself;
            "half": held constant for half of `start_length` beyond both ends; "none": at the first node.
        times: (Lk,) or (B, Lk), float32 or float64, non-decreasing, any unit; differentiable. Differences are taken
            in this dtype, so epoch seconds want float64.
        query_times: (Lq,) or (B, Lq), dtype of `times`, where the queries stand in time; differentiable. Needs `times`
            and matters to `is_causal`, `window` and `time_window`.
        start_length: length of the segment before the first visible node, in the unit of `times`.
        window: number of nodes seen, the query's own included (needs `is_causal`), or flash-attn's (left, right)
            numbers of nodes beside the query's own, −1 for no limit.
        time_window: only nodes with τ_i ≥ τ_q − time_window are seen, in the unit of `times`.
        intervals: int32 or int64 (B or 1, Lq, 2): the nodes [lo, hi) that each query sees, for everything else.
        softcap: bound c > 0 of the scores: the nodes, the start node included, have the score c·tanh(a_i/c), and
            between them the score is a straight line as ever. This is a definition: the path then runs through the
            bounded scores instead of the keys. It takes plain torch, no kernel has it.
        rule: "exact" for the integral. "trapezoid" and "rectangle" are the quadratures that an ordinary softmax
            with log-weights can do: weights (h_i + h_{i+1})/2 (half of it at the ends of the domain, the start node
            included), or h_i with `start_length` on the first visible node (unit steps: the ordinary softmax, no start
            node). They run in torch's SDPA, which differentiates once; in the reference where lse or a gradient of
            times is wanted or a mask has gaps.
            "taylor" is the exact rule to first order in the slopes, a short convolution of the scores.
        interpolation: "linear" takes the nodes as they are. "fourth_order" takes them for points of smooth curves and
            first moves every key and value z_i by −c_i z''_i, z'' the divided second difference and
            c_i = (h_i³ + h_{i+1}³) / (12 (h_i + h_{i+1})), so that the integral (with boundary "none") has order 4 in
            the step on any grid. Lost is exact refinement: a node inserted on a line is no point of the curve. Every
            query has to see the whole path, so it excludes `is_causal` and windows; a segment without length is a
            border between two curves; fewer than three nodes stay as they are.
        return_lse: also return lse = log ∫ e^{scale·q·k(s)} ds, shape (B, Hq, Lq), float32 (float64 for float64).
        backend: None for the best one that can do it. "reference" can do everything, in plain torch, differentiates
            as often as you like, and stores the scores. "cpu" and "triton", the fused kernels on CPUs and on GPUs, do
            the exact rule in float32, bfloat16 and float16, with head dims up to 256 and no gaps in a mask; they store
            no scores and differentiate once. A named one never falls back.

    Returns:
        out (B, Hq, Lq, Dv), or (out, lse). A query that sees nothing gets 0 and lse −inf; a domain without length
        (one node and no boundary, or all times equal) gives its last node's value and lse −inf.

    Raises:
        ValueError: a shape, device or meaning is wrong.
        TypeError: a type or dtype is wrong.
        NotImplementedError: this can't be done, or not by the named back end.
        Checks that have to read a tensor's values, such as the order of times, are left out under torch.compile.

    Source: docs/math.md.
    """
    how: dict[str, Any] = {
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
        "boundary": boundary,
        "start_length": start_length,
        "window": window,
        "softcap": softcap,
        "rule": rule,
        "interpolation": interpolation,
        "return_lse": return_lse,
        "backend": backend,
    }
    if attn_mask is times is query_times is time_window is intervals is None and ops.is_plain(query, key, value):
        prepared = _prepare_once(query, key, value, how)
        if prepared is not None:
            out, lse = ops.attention_of_plain(query, key, value, prepared)
            return (out, lse) if return_lse else out
    names = ("query", "key", "value")
    check_qkv(query, key, value, names, "B, heads, length, head dim")
    query, key, value = unify_dtypes(names, query, key, value)
    call = resolve_batch(
        query,
        key,
        value,
        **_everywhere(query, key),
        mask=attn_mask,
        times=times,
        query_times=query_times,
        time_window=time_window,
        intervals=intervals,
        **how,
    )
    return _run(query, key, value, call)


def continuous_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    boundary: str | tuple[Tensor, Tensor] = "zero",
    times: Tensor | None = None,
    query_times: Tensor | None = None,
    start_length: float = 1.0,
    window: int | tuple[int, int] | None = None,
    time_window: float | None = None,
    softcap: float | None = None,
    rule: str = "exact",
    interpolation: str = "linear",
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`continuous_attention` of documents of different lengths, packed one after another as flash-attn does.

    Documents don't see each other: each has its own path, and its own boundary before its first visible node.

    Args:
        q: (tokens of all documents, Hq, D).
        k: (nodes of all documents, Hkv, D); Hq is a multiple of Hkv.
        v: (nodes of all documents, Hkv, Dv).
        cu_seqlens_q: int32 or int64 (documents + 1,), 0 and the ends of the documents in `q`; empty ones are allowed.
        cu_seqlens_k: the same for `k` and `v`.
        max_seqlen_q: the length of the longest document in `q`, or more; not needed here, checked where given.
        max_seqlen_k: the same for `k`.
        is_causal: as in `continuous_attention`, bottom-right aligned within each document.
        scale: factor of the scores, 1/√D by default.
        boundary: where each path begins.
        times: (nodes of all documents,), non-decreasing within each document.
        query_times: (tokens of all documents,).
        start_length: length of the segment before the first visible node.
        window: number of nodes seen, or (left, right).
        time_window: only nodes with τ_i ≥ τ_q − time_window are seen.
        softcap: bound of the scores, see `continuous_attention`.
        rule: "exact", "trapezoid", "rectangle" or "taylor".
        interpolation: "linear" or "fourth_order", of each document.
        return_lse: also return lse, of shape (tokens, Hq), the shape of out without its last dim.
        backend: "reference", "cpu", "triton" or None, see `continuous_attention`.

    Returns:
        out (tokens of all documents, Hq, Dv), or (out, lse).

    Raises:
        ValueError, TypeError, NotImplementedError: as `continuous_attention`.
    """
    names = ("q", "k", "v")
    check_qkv(q, k, v, names, "tokens, heads, head dim")
    q, k, v = unify_dtypes(names, q, k, v)
    check_heads(q.shape[1], k.shape[1], enable_gqa=True)
    check_documents(cu_seqlens_q, cu_seqlens_k, (len(q), len(k)), q.device, (max_seqlen_q, max_seqlen_k))
    seen, position = iv.of_documents(cu_seqlens_q, cu_seqlens_k, len(q))
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    call = resolve(
        query,
        key,
        value,
        seen=seen,
        position=position,
        origin=seen[..., 0],
        mask=None,
        is_causal=is_causal,
        scale=scale,
        boundary=boundary,
        times=check_times("times", times, None, len(k), q.device),
        query_times=check_times("query_times", query_times, None, len(q), q.device),
        start_length=start_length,
        window=window,
        time_window=time_window,
        softcap=softcap,
        rule=rule,
        interpolation=interpolation,
        return_lse=return_lse,
        backend=backend,
    )
    result = _run(query, key, value, call)
    if isinstance(result, Tensor):
        return result[0].transpose(0, 1).contiguous()
    out, lse = result
    return out[0].transpose(0, 1).contiguous(), lse[0].transpose(0, 1).contiguous()


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge the results over two adjacent stretches of the same path, which share one node.

        lse = log(e^{lse_a} + e^{lse_b})        out = e^{lse_a − lse} out_a + e^{lse_b − lse} out_b

    The integral is additive: piece b begins at the node where piece a ends, with boundary "none". Exact, and
    differentiable.

    Args:
        out_a: (…, Dv), the earlier stretch.
        lse_a: (…), its log-sum-exp; −inf where it is empty or has no length.
        out_b: (…, Dv), the later stretch.
        lse_b: (…).

    Returns:
        out (…, Dv) in the dtype of `out_a`, and lse (…), computed in float32 (float64 for float64). Where neither
        piece has length, the later one's output that isn't 0, since an empty piece has output 0.

    Raises:
        ValueError: the shapes don't fit.
        TypeError: an argument isn't a floating point tensor.
    """
    for name, x in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        check_tensor(name, x, FLOATS, out_a.device if isinstance(out_a, Tensor) else None)
    if out_a.ndim == 0:
        raise ValueError("out_a must have shape (…, Dv), got ()")
    check_shape("out_b", out_b, [tuple(out_a.shape)], "out_a's shape")
    for name, x in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_shape(name, x, [tuple(out_a.shape[:-1])], "out_a's shape without the last dim")
    widest = reduce(torch.promote_types, (x.dtype for x in (out_a, lse_a, out_b, lse_b)))
    dtype = reference.accumulation_dtype(widest)
    a, b, lse_a, lse_b = (x.to(dtype) for x in (out_a, out_b, lse_a, lse_b))
    peak = torch.maximum(lse_a, lse_b).detach()
    no_length = peak == -math.inf
    peak = peak.masked_fill(no_length, 0.0)
    weight_a, weight_b = (lse_a - peak).exp(), (lse_b - peak).exp()
    total = (weight_a + weight_b).masked_fill(no_length, 1.0)
    out = (weight_a.unsqueeze(-1) * a + weight_b.unsqueeze(-1) * b) / total.unsqueeze(-1)
    later = torch.where((b == 0).all(-1, keepdim=True), a, b)
    out = torch.where(no_length.unsqueeze(-1), later, out)
    lse = torch.where(no_length, -math.inf, peak + total.log())
    return out.to(out_a.dtype), lse


class Call(NamedTuple):
    """What was asked for, without the words: what `reference.attention` is given after query, key and value."""

    kernels: str | None  # the fused kernels that run it, "cpu" or "triton"
    quadrature: bool  # torch's SDPA runs it
    return_lse: bool
    rule: str
    softcap: float | None
    mask: Tensor | None
    seen: Tensor
    joined: Tensor | None  # for fourth order, see `path.correct`
    arguments: dict[str, Any]


def _run(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor | tuple[Tensor, Tensor]:
    if call.joined is not None:
        key, value = (path.correct(nodes, call.arguments["lengths"], call.joined) for nodes in (key, value))
    if call.kernels is not None:
        prepared = ops.prepare(query.shape[2], key.shape[2], call.seen, kernels=call.kernels, **call.arguments)
        out, lse = ops.attention(query, key, value, prepared)
    elif call.quadrature:
        return quadrature.attention(query, key, value, call.seen, rule=call.rule, **call.arguments)
    else:
        plainly = {"mask": call.mask, "rule": call.rule, "softcap": call.softcap, **call.arguments}
        out, lse = reference.attention(query, key, value, call.seen, **plainly)
    return (out, lse) if call.return_lse else out


def _prepare_once(query: Tensor, key: Tensor, value: Tensor, how: dict[str, Any]) -> tuple[Any, ...] | None:
    """`ops.prepare` for calls whose answer depends on sizes and numbers only, remembered: it costs more than they do.

    None where the kernels don't run it, where another way has to be gone, and where something is wrong with the
    arguments, which the ordinary way says better.
    """
    if query.ndim != 4 or query.shape[2] > 4096 or torch.is_autocast_enabled("cpu"):
        return None
    inputs = query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype
    try:
        return _prepare_sizes(*inputs, cpu.chosen, **how)
    except (TypeError, ValueError, NotImplementedError):  # an argument that can't be hashed is one of them
        return None


@lru_cache(maxsize=128, typed=True)
def _prepare_sizes(*inputs: Any, **how: Any) -> tuple[Any, ...] | None:
    shapes, dtypes = inputs[:3], inputs[3:6]
    if not isinstance(how["boundary"], str):
        return None
    # Tensors of these sizes that take no memory. What is made of them lasts, whatever the mode it is made in.
    with torch.inference_mode(False):
        query, key, value = (
            torch.zeros((), dtype=dtype, device="cpu").expand(shape)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        names = ("query", "key", "value")
        check_qkv(query, key, value, names, "B, heads, length, head dim")
        unify_dtypes(names, query, key, value)
        call = resolve_batch(
            query,
            key,
            value,
            **_everywhere(query, key),
            times=None,
            query_times=None,
            time_window=None,
            intervals=None,
            **how,
        )
        return (
            ops.prepare(query.shape[2], key.shape[2], call.seen, kernels=call.kernels, **call.arguments)
            if call.kernels is not None and call.joined is None
            else None
        )


def resolve_batch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seen: Tensor,
    position: Tensor,
    origin: int | Tensor = 0,
    mask: Tensor | None = None,
    times: Tensor | None,
    query_times: Tensor | None,
    intervals: Tensor | None,
    dropout_p: float = 0.0,
    enable_gqa: bool,
    **how: Any,
) -> Call:
    """Validate and resolve the arguments of `continuous_attention`; `seen`, `position` and `origin` as in `resolve`."""
    if len(query) != len(key):
        raise ValueError(f"query and key must have the same batch size B, got {len(query)} and {len(key)}")
    check_heads(query.shape[1], key.shape[1], enable_gqa)
    batch, heads, query_length, key_length = (*query.shape[:3], key.shape[2])
    check_dropout(dropout_p)
    check_flag("enable_gqa", enable_gqa)
    if mask is not None:
        mask = check_mask(mask, (batch, heads, query_length, key_length), query.device)
    if intervals is not None:
        check_tensor("intervals", intervals, (torch.int32, torch.int64), query.device)
        check_shape("intervals", intervals, [(batch, query_length, 2), (1, query_length, 2)], "(B or 1, Lq, 2)")
        seen = iv.intersect(seen, intervals.long().clamp(0, key_length))
    return resolve(
        query,
        key,
        value,
        seen=seen,
        position=position,
        origin=origin,
        mask=mask,
        times=check_times("times", times, batch, key_length, query.device),
        query_times=check_times("query_times", query_times, batch, query_length, query.device),
        **how,
    )


def _everywhere(query: Tensor, key: Tensor) -> dict[str, Tensor]:
    """What queries see, and where they stand, before anything was asked for."""
    query_length, key_length = query.shape[2], key.shape[2]
    return {
        "seen": iv.everything(key_length, query.device),
        "position": iv.standing(query_length, key_length, query.device),
    }


def resolve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    seen: Tensor,
    position: Tensor,
    origin: int | Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    boundary: str | tuple[Tensor, Tensor],
    times: Tensor | None,
    query_times: Tensor | None,
    start_length: float,
    window: int | tuple[int, int] | None,
    time_window: float | None,
    softcap: float | None,
    rule: str,
    interpolation: str,
    return_lse: bool,
    backend: str | None,
) -> Call:
    """Resolve to intervals, lengths and ends, and choose who runs it.

    `seen` (B or 1, Lq or 1, 2) is what is visible at most, `position` (1, Lq) the node that each query stands on, and
    `origin` the first node that there is for it.
    """
    check_choice("rule", rule, RULES)
    if softcap is not None and check_number("softcap", softcap) <= 0:
        raise ValueError(f"softcap must be positive, or None for no bound, got {softcap}")
    kernels = _choose_kernels(backend, query, value, rule, softcap)
    check_flag("is_causal", is_causal)
    check_flag("return_lse", return_lse)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else check_number("scale", scale)
    start_length = check_number("start_length", start_length)
    if not 0 <= start_length <= torch.finfo(torch.float32).max:
        raise ValueError(f"start_length must be at least 0 and fit into float32, got {start_length}")
    start_node, start_held, end_held = _resolve_boundary(boundary, rule, start_length, key, value)

    if mask is not None:
        seen, mask = _absorb_mask(seen, mask)
    if mask is not None:
        if backend is not None and kernels is not None:
            obstacle = "can't follow an attn_mask that has gaps, differs between heads, or is hidden by a compiler"
            raise _incapable(backend, obstacle)
        kernels = None
    if times is not None:
        check_order(times, seen)
    if times is not None and query_times is not None and times.dtype != query_times.dtype:
        raise TypeError(
            f"times and query_times must have the same dtype, got {dtype_name(times.dtype)} and "
            f"{dtype_name(query_times.dtype)}"
        )
    if query_times is not None and not iv.holds(query_times.isfinite()):
        raise ValueError(f"query_times must be finite, got {query_times[~query_times.isfinite()][0].item()}")
    sides = check_window(window, is_causal)
    joined = None
    check_choice("interpolation", interpolation, INTERPOLATIONS)
    if interpolation == "fourth_order":
        partial = {"is_causal": is_causal, "window": window is not None, "time_window": time_window is not None}
        joined = iv.used_segments(seen, key.shape[2])
        _check_whole(seen, joined, mask, rule, softcap, [name for name, given in partial.items() if given])
    seen = _resolve_position(seen, position, origin, is_causal, times, query_times, sides, time_window)
    end_length = end_held
    if is_causal and times is not None and query_times is not None:
        end_length = end_held + _held_until(query_times, times, seen, mask)

    lengths = None if times is None else iv.segment_lengths(times, seen)
    if kernels is not None and lengths is not None and not iv.holds(_fits_float32(lengths)):
        if backend is not None:
            obstacle = f"keeps lengths in float32, and these times differ by less than {SHORTEST_PATH} altogether"
            raise _incapable(backend, obstacle)
        kernels = None
    arguments = {
        "scale": scale,
        "lengths": lengths,
        "start_node": start_node,
        "start_length": start_held,
        "end_length": end_length,
    }
    return Call(
        kernels=kernels,
        quadrature=backend is None
        and mask is None
        and softcap is None
        and not return_lse
        and _fits_sdpa(key, rule, arguments),
        return_lse=return_lse,
        rule=rule,
        softcap=None if softcap is None else float(softcap),
        mask=mask,
        seen=seen,
        joined=joined,
        arguments=arguments,
    )


def _choose_kernels(backend: str | None, query: Tensor, value: Tensor, rule: str, softcap: float | None) -> str | None:
    """Which fused kernels run, as far as it doesn't depend on what is visible.

    Raises:
        NotImplementedError: they were asked for by name and can't.
    """
    if backend is not None:
        check_choice("backend", backend, BACKENDS, " or None")
    if backend == "reference":
        return None
    kernels = backend or ("cpu" if query.device.type in ("cpu", "meta") else "triton")
    obstacle = _obstacle(kernels, query, value, rule, softcap)
    if obstacle is None:
        return kernels
    if backend is not None:
        raise _incapable(backend, obstacle)
    return None


def _obstacle(kernels: str, query: Tensor, value: Tensor, rule: str, softcap: float | None) -> str | None:
    """Why these kernels can't run it."""
    dim, value_dim = query.shape[-1], value.shape[-1]
    if query.dtype not in ops.DTYPES:
        return f"computes {', '.join(map(dtype_name, ops.DTYPES))}, got {dtype_name(query.dtype)}"
    if rule != "exact":
        return f"has the rule 'exact' only, got {rule!r}"
    if softcap is not None:
        return f"has no softcap, got {softcap}"
    if dim > ops.LARGEST_HEAD_DIM or not 0 < value_dim <= ops.LARGEST_HEAD_DIM:
        return f"needs head dims D and Dv from 1 to {ops.LARGEST_HEAD_DIM}, got {dim} and {value_dim}"
    if value.shape[-2] > ops.MOST_NODES:
        return f"counts nodes up to {ops.MOST_NODES}, got {value.shape[-2]}"
    if ops.is_transformed():
        return "can't run inside the transforms of torch.func, such as vmap"
    return _obstacle_on_gpu(query) if kernels == "triton" else _obstacle_on_cpu(query)


def _obstacle_on_cpu(query: Tensor) -> str | None:
    if query.device.type not in ("cpu", "meta"):
        return f"needs tensors on the CPU, got them on {query.device}"
    if cpu.module is None:
        return f"isn't there: {cpu.reason}; {cpu.REINSTALL}"
    return None


def _obstacle_on_gpu(query: Tensor) -> str | None:
    if triton.reason:
        return f"isn't there: {triton.reason}"
    if max(query.shape[:2]) > triton.MOST_PROGRAMS or query.shape[:3].numel() > ops.MOST_NODES:
        return (
            f"takes B and Hq up to {triton.MOST_PROGRAMS} and B·Hq·Lq up to {ops.MOST_NODES}, got {tuple(query.shape)}"
        )
    if query.is_cuda:
        return triton.obstacle_of(query.device)
    if query.is_cpu and not triton.interpreted:
        return (
            "needs tensors on a GPU, got them on the CPU; the environment variable TRITON_INTERPRET=1 runs it there, "
            "slowly, for tests"
        )
    if query.is_cpu and query.dtype == torch.bfloat16:
        return "has no bfloat16 in Triton's interpreter, which multiplies it wrongly"
    return None if query.device.type in ("cpu", "meta") else f"needs tensors on a GPU, got them on {query.device}"


def _incapable(backend: str, obstacle: str) -> NotImplementedError:
    return NotImplementedError(f"backend={backend!r} {obstacle}; backend='reference' can do this")


def _resolve_boundary(
    boundary: str | tuple[Tensor, Tensor], rule: str, start_length: float, key: Tensor, value: Tensor
) -> tuple[tuple[Tensor, Tensor] | None, float, float]:
    """The start node, the length before the first visible node, and the length held after the last one."""
    heads, dim, value_dim = key.shape[1], key.shape[3], value.shape[3]
    if isinstance(boundary, str):
        check_choice("boundary", boundary, BOUNDARIES, " or a pair of tensors (k0, v0)")
    elif isinstance(boundary, Sequence) and len(boundary) == 2:
        for place, width, meaning in ((0, dim, "(Hkv, D)"), (1, value_dim, "(Hkv, Dv)")):
            check_tensor(f"boundary[{place}]", boundary[place], FLOATS, key.device)
            check_shape(f"boundary[{place}]", boundary[place], [(heads, width)], meaning)
    else:
        raise TypeError(
            f"boundary must be one of {', '.join(BOUNDARIES)} or a pair of tensors (k0, v0), got "
            f"{type(boundary).__name__}"
        )
    # The rectangle rule evaluates each segment at its later node: no start node, and the step before the
    # first node is `start_length` whatever the path does there.
    if rule == "rectangle" or boundary == "repeat":
        return None, start_length, 0.0
    if boundary == "half":
        return None, start_length / 2, start_length / 2
    if boundary == "none":
        return None, 0.0, 0.0
    if boundary == "zero":
        return (key.new_zeros(heads, dim), value.new_zeros(heads, value_dim)), start_length, 0.0
    return (boundary[0], boundary[1]), start_length, 0.0  # pyright: ignore[reportReturnType]


def _check_whole(
    seen: Tensor, joined: Tensor, mask: Tensor | None, rule: str, softcap: float | None, partial: list[str]
) -> None:
    """What interpolation="fourth_order" needs: the exact rule, and queries that see all of a path or nothing of it."""
    if rule != "exact":
        raise ValueError(f"interpolation='fourth_order' is a correction of rule='exact', got rule={rule!r}")
    obstacle = None
    if partial:
        obstacle = f"got {', '.join(partial)}"
    elif mask is not None:
        obstacle = "got an attn_mask that has gaps, differs between heads, or is hidden by a compiler"
    elif not iv.holds(_sees_whole_paths(seen, joined)):
        obstacle = "got intervals or an attn_mask that cut it"
    if obstacle is not None:
        raise NotImplementedError(
            "interpolation='fourth_order' needs queries that see the whole path, because the last node that a query "
            f"sees of a part would need a correction of its own; {obstacle}"
        )
    if softcap is not None:
        raise NotImplementedError("interpolation='fourth_order' has no order 4 with a softcap, which bends the scores")


def _sees_whole_paths(seen: Tensor, joined: Tensor) -> Tensor:
    """For each query, whether the path is cut for all of them where its interval begins and ends; (B, Lq)."""
    lo, hi = seen.unbind(-1)
    key_length = joined.shape[-1]
    joined = torch.nn.functional.pad(joined, (0, 1))
    cut = ~joined.gather(-1, lo.clamp(0, key_length)) & ~joined.gather(-1, hi.clamp(0, key_length))
    return cut | (hi <= lo)


def _absorb_mask(seen: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Turn a mask without gaps into intervals; what can't be said in intervals stays a mask beside its hull."""
    if mask.stride(1) == 0:
        mask = mask[:, :1]  # expanded: all heads agree
    runs, contiguous = iv.of_mask(mask.any(1))
    said = mask.shape[1] == 1 and iv.readable(mask) and bool(contiguous)
    return iv.intersect(seen, runs), None if said else mask


def _resolve_position(
    seen: Tensor,
    position: Tensor,
    origin: int | Tensor,
    is_causal: bool,
    times: Tensor | None,
    query_times: Tensor | None,
    window: tuple[int | None, int | None],
    time_window: float | None,
) -> Tensor:
    """Cut what is seen by where each query stands: causality, window and time window."""
    for name, given in (("query_times", query_times), ("time_window", time_window)):
        if given is not None and times is None:
            raise ValueError(f"{name} needs times, got times=None")
    times = None if times is None else times.detach()
    now = None if query_times is None else query_times.detach()
    if times is not None and now is not None:
        position = iv.bisect(times, seen, now, right=True) - 1
    if is_causal or window != (None, None):
        left, right = window
        seen = iv.intersect(seen, iv.around(position, left, 0 if is_causal else right))
    if time_window is None or times is None:
        return seen
    if check_number("time_window", time_window) <= 0:
        raise ValueError(f"time_window must be positive, got {time_window}")
    if now is None:
        if not is_causal and not iv.holds(position >= origin):
            raise ValueError(
                "time_window needs query_times where there are more queries than nodes, since a query before the "
                "first node stands at no time"
            )
        now = iv.at(times, position)
    earliest = iv.bisect(times, seen, now - time_window, right=False)
    return iv.intersect(seen, torch.stack([earliest, torch.full_like(earliest, times.shape[-1])], dim=-1))


def _held_until(query_times: Tensor, times: Tensor, seen: Tensor, mask: Tensor | None) -> Tensor:
    """How long the path is held constant from each query's last visible node to the query's own time."""
    seen = seen.unsqueeze(1)
    if mask is not None:
        seen = iv.of_mask(iv.visible_nodes(seen, times.shape[-1]) & mask)[0]
    lo, hi = seen.unbind(-1)
    held = query_times.unsqueeze(1) - iv.at(times.unsqueeze(1), hi - 1)
    return torch.where(hi > lo, held, 0.0)


def _fits_float32(lengths: Tensor) -> Tensor:
    """Whether the path of each batch element, of lengths (B or 1, Lk), is long enough for shares of it in float32."""
    longest = lengths.detach().sum(-1)
    return (longest == 0) | (longest >= SHORTEST_PATH)


def _fits_sdpa(key: Tensor, rule: str, arguments: dict[str, Any]) -> bool:
    """A quadrature is an ordinary softmax, unless the gradient of its lengths is wanted."""
    lengths = [x for x in (arguments["lengths"], arguments["end_length"]) if isinstance(x, Tensor)]
    wants_length_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in lengths)
    return rule in ("trapezoid", "rectangle") and key.shape[2] > 0 and not wants_length_gradient
