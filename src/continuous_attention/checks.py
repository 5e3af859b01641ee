"""What arguments must be: each check raises an error that names the argument, what came and what is wanted.

ValueError for shapes and meanings, TypeError for types, NotImplementedError for a capability. Checks that have to read
a tensor's values are left out under torch.compile.

Shape legend: B batch, Hq query heads, Hkv key/value heads, Lq queries, Lk nodes, D and Dv head dims.
"""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from continuous_attention import intervals as iv

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_tensor(name: str, x: Any, dtypes: tuple[torch.dtype, ...], device: torch.device | None) -> None:
    """A dense tensor of one of these dtypes on the query's device, where there is one."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a {'nested' if x.is_nested else dtype_name(x.layout)} one")
    if x.dtype not in dtypes:
        raise TypeError(f"{name} must have dtype {' or '.join(map(dtype_name, dtypes))}, got {dtype_name(x.dtype)}")
    if device is not None and x.device != device:
        raise ValueError(f"{name} must be on the query's device {device}, got {x.device}")


def check_shape(name: str, x: Tensor, shapes: list[tuple[int, ...]], meaning: str) -> None:
    """One of these shapes; `meaning` says them in letters."""
    if tuple(x.shape) not in shapes:
        wanted = " or ".join(dict.fromkeys(str(shape) for shape in shapes))
        raise ValueError(f"{name} must have shape {meaning} = {wanted}, got {tuple(x.shape)}")


def check_choice(name: str, x: object, choices: tuple[str, ...], otherwise: str = "") -> None:
    """One of these strings; `otherwise` says what else the argument may be."""
    if not isinstance(x, str):
        raise TypeError(f"{name} must be a string, got {type(x).__name__}")
    if x not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}{otherwise}, got {x!r}")


def check_flag(name: str, x: object) -> None:
    """True or False."""
    if not isinstance(x, bool):
        raise TypeError(f"{name} must be a bool, got {type(x).__name__}")


def check_number(name: str, x: object) -> float:
    """A finite number, returned as a float."""
    if isinstance(x, bool) or not isinstance(x, Real):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    if not torch.compiler.is_compiling() and not math.isfinite(x):
        raise ValueError(f"{name} must be finite, got {x}")
    return float(x)


def check_integer(name: str, x: Any, least: int) -> None:
    """A whole number from `least` on."""
    if not is_integer(x):
        raise TypeError(f"{name} must be an int, got {type(x).__name__}")
    if x < least:
        raise ValueError(f"{name} must be at least {least}, got {x}")


def check_qkv(query: Tensor, key: Tensor, value: Tensor, names: tuple[str, str, str], layout: str) -> None:
    """Types, dims and the sizes that must agree; `names` are those of the caller's arguments."""
    for name, x in zip(names, (query, key, value), strict=True):
        check_tensor(name, x, FLOATS, query.device if isinstance(query, Tensor) else None)
        if x.ndim != len(layout.split(",")):
            raise ValueError(f"{name} must have shape ({layout}), got {tuple(x.shape)}")
    if query.shape[-1] != key.shape[-1] or query.shape[-1] == 0:
        raise ValueError(
            f"{names[0]} and {names[1]} must have the same head dim D > 0, got {query.shape[-1]} and {key.shape[-1]}"
        )
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(
            f"{names[1]} and {names[2]} must agree in all but the head dim, got {tuple(key.shape)} and "
            f"{tuple(value.shape)}"
        )


def check_heads(heads: int, key_heads: int, enable_gqa: bool) -> None:
    """Query heads that are as many as the others, or a multiple where that is allowed."""
    if heads == key_heads and heads > 0:
        return
    if heads == 0 or key_heads == 0 or heads % key_heads:
        raise ValueError(f"the query's heads must be a multiple of the key's, got Hq={heads} and Hkv={key_heads}")
    if not enable_gqa:
        raise ValueError(
            f"query and key must have the same number of heads unless enable_gqa=True, got Hq={heads} and "
            f"Hkv={key_heads}"
        )


def unify_dtypes(names: tuple[str, str, str], *tensors: Tensor) -> list[Tensor]:
    """Cast as autocast casts the arguments of SDPA; without it they must have one dtype."""
    device = tensors[0].device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        tensors = tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)
    if len({x.dtype for x in tensors}) > 1:
        got = ", ".join(dtype_name(x.dtype) for x in tensors)
        raise TypeError(f"{names[0]}, {names[1]} and {names[2]} must have the same dtype, got {got}")
    return list(tensors)


def check_dropout(dropout_p: float) -> None:
    """No dropout."""
    if check_number("dropout_p", dropout_p) != 0:
        raise NotImplementedError(
            f"dropout_p must be 0, got {dropout_p}: attention weights here are integrals over segments that "
            "neighbouring nodes share, and a path without some of them isn't the same path any more; apply dropout "
            "to the output instead"
        )


def check_mask(mask: Tensor, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
    """The mask with four dims, the last one expanded to Lk."""
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        raise TypeError(f"attn_mask must be boolean (True = visible), got {dtype_name(mask.dtype)}: {iv.WHY_NO_BIAS}")
    check_tensor("attn_mask", mask, (torch.bool,), device)
    if mask.ndim > 4 or any(x not in (1, y) for x, y in zip(reversed(mask.shape), reversed(shape), strict=False)):
        raise ValueError(f"attn_mask must be broadcastable to (B, Hq, Lq, Lk) = {shape}, got shape {tuple(mask.shape)}")
    mask = mask[(None,) * (4 - mask.ndim)]
    return mask.expand(-1, -1, -1, shape[3])


def check_times(name: str, times: Tensor | None, batch: int | None, length: int, device: torch.device) -> Tensor | None:
    """The times with a batch dim, (B or 1, L)."""
    if times is None:
        return None
    check_tensor(name, times, (torch.float32, torch.float64), device)
    side = "Lq" if name == "query_times" else "Lk"
    shapes = [(length,)] if batch is None else [(length,), (batch, length)]
    check_shape(name, times, shapes, f"({side},)" if batch is None else f"({side},) or (B, {side})")
    return times if times.ndim == 2 else times.unsqueeze(0)


def check_order(times: Tensor, seen: Tensor) -> None:
    """Times must be finite and not decrease, as far as any query may see them."""
    times = times.detach()
    rises, largest = times.diff(dim=-1), torch.finfo(torch.float32).max
    if iv.readable(times) and bool(times[:, :1].isfinite().all() & (rises >= 0).all() & (rises <= largest).all()):
        return  # all of them, whoever sees them
    finite = times.isfinite() | ~iv.covered_nodes(seen, times.shape[-1])
    if not iv.holds(finite):
        row, node = (int(x) for x in (~finite).nonzero()[0])
        value = float(times[min(row, len(times) - 1), node])
        raise ValueError(f"times must be finite, got {value} at node {node}{_in_batch(row, finite)}")
    if times.dtype == torch.float64 and not iv.holds(iv.segment_lengths(times, seen) <= largest):
        raise ValueError("times must have differences that fit into float32; give them in a larger unit")
    ordered = (rises >= 0) | ~iv.used_segments(seen, times.shape[-1])[:, 1:]
    if not iv.holds(ordered):
        row, node = (int(x) for x in (~ordered).nonzero()[0])
        before, after = times[min(row, len(times) - 1), node : node + 2].tolist()
        raise ValueError(
            f"times must not decrease, got {before!r} then {after!r} at nodes {node} and {node + 1}"
            f"{_in_batch(row, ordered)}"
        )


def _in_batch(row: int, rows: Tensor) -> str:
    return f" of batch element {row}" if len(rows) > 1 else ""


def check_window(window: Any, is_causal: bool) -> tuple[int | None, int | None]:
    """The window as numbers of nodes to the left and right of the query's own, None for no limit."""
    if window is None:
        return None, None
    if is_integer(window):
        if int(window) <= 0:
            raise ValueError(f"window must be at least 1, the query's own node, got {window}")
        if not is_causal:
            raise ValueError(
                f"window={window} counts the nodes up to the query's own and needs is_causal=True; for another "
                "window give (left, right)"
            )
        return min(int(window) - 1, 2**40), 0
    if not isinstance(window, Sequence) or len(window) != 2 or not all(map(is_integer, window)):
        raise TypeError(f"window must be an int or a pair of ints (left, right), got {window!r}")
    left, right = (int(side) for side in window)
    if left < -1 or right < -1:
        raise ValueError(f"window=(left, right) must be at least 0 each, or -1 for no limit, got {(left, right)}")
    # More than any length has, and far from the largest int64.
    left, right = min(left, 2**40), min(right, 2**40)
    return (None if left == -1 else left), (None if right == -1 else right)


def is_integer(x: Any) -> bool:
    """Whether it's a whole number of any type, bool excepted."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def check_cu_seqlens(
    name: str, cu_seqlens: Tensor, max_name: str, max_seqlen: int | None, total: int, device: torch.device
) -> None:
    """The ends of packed documents."""
    check_tensor(name, cu_seqlens, (torch.int32, torch.int64), device)
    if cu_seqlens.ndim != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"{name} must have shape (documents + 1,), got {tuple(cu_seqlens.shape)}")
    if max_seqlen is not None and not is_integer(max_seqlen):
        raise TypeError(f"{max_name} must be an int, got {type(max_seqlen).__name__}")
    steps = cu_seqlens.diff()
    if not iv.holds(steps >= 0) or not iv.holds((cu_seqlens[:1] == 0) & (cu_seqlens[-1:] == total)):
        raise ValueError(f"{name} must rise from 0 to the number of tokens {total}, got {cu_seqlens.tolist()}")
    if max_seqlen is not None and not iv.holds(steps <= max_seqlen):
        raise ValueError(f"{max_name} must be at least the longest document {int(steps.max())}, got {max_seqlen}")


def check_documents(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    totals: tuple[int, int],
    device: torch.device,
    max_seqlens: tuple[int | None, int | None] = (None, None),
) -> None:
    """The ends of packed documents in so many queries and nodes."""
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "max_seqlen_q", max_seqlens[0], totals[0], device)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, "max_seqlen_k", max_seqlens[1], totals[1], device)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_q and cu_seqlens_k must count the same documents, got {len(cu_seqlens_q) - 1} and "
            f"{len(cu_seqlens_k) - 1}"
        )


def dtype_name(dtype: torch.dtype | torch.layout) -> str:
    """A dtype or layout as users write it, without "torch."."""
    return str(dtype).removeprefix("torch.")
