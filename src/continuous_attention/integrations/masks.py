"""The masks of Hugging Face transformers as intervals.

transformers describes a mask by a function of (batch element, head, query, node), put together from a few known ones.
Each of these says an interval per query, so together they say the intersection, and no mask of Lq × Lk is made. What
isn't known goes the dense way: a boolean mask is made, and read.

Shape legend: B batch (or 1), Lq queries, Lk nodes of a layer's cache, which may begin at a later token than the first.
"""

import inspect
import re
import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from continuous_attention import intervals as iv

FARTHEST = 2**40  # more than any length, and far from the largest int64


def mask_intervals(**asked: Any) -> Tensor:
    """The mask function that transformers calls once per forward and kind of mask: which nodes each query sees.

    Args:
        **asked: batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask (B, Lk) or None,
            device, and whatever else transformers gives its own mask functions.

    Returns:
        What `mark` makes of the intervals (`mark_whole` where ranks share a sequence), or a boolean mask
        (B, 1, Lq, Lk), True = visible, where a row has a gap.
        Where each query sees just the nodes up to its own, and the last one all, a mask that `is_plainly_causal` knows.

    Raises:
        NotImplementedError: the model doesn't ask transformers' attention interface, or ranks can't share this mask.
        RuntimeError: a row has a gap, found while compiled code runs.
    """
    if whole is not None:
        return whole(asked)
    if torch.compiler.is_compiling():
        intervals, contiguous = iv.of_mask(_dense(asked)[:, 0])
        torch.ops.aten._assert_async.msg(contiguous, "compiled continuous attention can't follow a mask that has gaps")
        return mark(intervals)
    config = asked.get("config")
    if config is not None and not _asks_the_interface(type(config)):
        raise computes_by_itself(config.model_type)
    intervals = _direct(asked)
    if intervals is None:
        mask = _dense(asked)
        intervals, contiguous = iv.of_mask(mask[:, 0])
        if not contiguous:
            warnings.warn(
                "a mask with gaps, such as a hole in the padding, runs in plain torch and stores Lq × Lk scores",
                stacklevel=2,
            )
            return mask
    elif _hides_nothing_but_later_nodes(asked):
        return torch.empty(asked["batch_size"], 1, asked["q_length"] + 1, 0, dtype=torch.int64, device=intervals.device)
    return mark(intervals)


def computes_by_itself(model: str) -> NotImplementedError:
    """The error for a model that never asks for its attention."""
    return NotImplementedError(
        f"{model} computes attention by itself instead of asking transformers' attention interface, so it can't be "
        "continuous"
    )


def mark(intervals: Tensor) -> Tensor:
    """Intervals (B, Lq, 2) in the shape in which they travel through a model: int64 (B, 1, Lq + 1, 2).

    Four dims, since transformers hands on only masks with four dims untouched. A row of zeros comes first, so that no
    mask of a user looks like it, and a model that adds it to its scores fails instead of forgetting the mask.
    """
    return F.pad(intervals, (0, 0, 1, 0)).unsqueeze(1)


def unmark(mask: Tensor, query_length: int) -> Tensor | None:
    """The intervals that `mark` was given, None if it didn't make this mask."""
    if mask.dtype != torch.int64 or mask.shape[-2:] != (query_length + 1, 2):
        return None
    return mask[:, 0, 1:]


def mark_whole(intervals: Tensor) -> Tensor:
    """Intervals (B, Lq, 2) of a whole sequence, of which this rank has a part: int64 (B, 1, Lq + 2, 2), like `mark`."""
    return F.pad(intervals, (0, 0, 2, 0)).unsqueeze(1)


def unmark_whole(mask: Tensor, query_length: int) -> Tensor | None:
    """The intervals that `mark_whole` was given, None if it didn't make this mask."""
    if mask.dtype != torch.int64 or mask.shape[-2:] != (query_length + 2, 2):
        return None
    return mask[:, 0, 2:]


class Whole(NamedTuple):
    """What a batch says about this rank's queries; all nodes are those of the whole sequence."""

    real: Tensor  # (B, Lq, 2), the nodes that aren't padding
    documents: Tensor  # (B, Lq, 2), those of the query's document, for causal layers
    node: Tensor  # (B, Lq), the query's own


# While a model that works with other ranks runs: `cut_whole` with what its batch says, which makes its masks.
whole: Callable[[dict[str, Any]], Tensor] | None = None
whole_of: Any = None  # the model


def cut_whole(said: Whole, asked: dict[str, Any]) -> Tensor:
    """What `mark_whole` makes of the intervals, from the mask function that a model asked for on one rank."""
    queries, nodes = asked["q_length"], asked["kv_length"]
    if not queries == nodes == said.node.shape[1]:
        raise NotImplementedError(
            f"a mask of {queries} queries and {nodes} nodes, where this rank has {said.node.shape[1]} tokens: caches "
            "and other sequences can't be spread over ranks"
        )
    left, right = _reach(asked["mask_function"])
    seen = iv.intersect(said.real, iv.around(said.node, left, right))
    return mark_whole(iv.intersect(seen, said.documents) if right == 0 else seen)


def _reach(function: Callable[..., Any]) -> tuple[int | None, int | None]:
    """How many nodes before and behind its own a query sees by a mask function of transformers, None for all of them.

    Documents aren't looked at: `Whole` says them.
    """
    name, held = _name_and_closure(function)
    if name == "causal_mask_function":
        return None, 0
    if name in ("bidirectional_mask_function", "packed_sequence_mask_function"):
        return None, None
    if name == "sliding_window_overlay":
        return held["sliding_window"] - 1, None
    if name == "sliding_window_bidirectional_overlay":
        return held["sliding_window"], held["sliding_window"]
    if name == "remap_positions_for_packed_sequence":
        return _reach(held["mask_function"])
    if name == "and_masks":
        ways = zip(*map(_reach, held["mask_functions"]), strict=True)
        left, right = (min((x for x in way if x is not None), default=None) for way in ways)
        return left, right
    raise NotImplementedError(
        f"a mask by {name or getattr(function, '__qualname__', function)} can't be spread over ranks: only causal and "
        "bidirectional ones and sliding windows can"
    )


def is_plainly_causal(mask: Tensor, query_length: int) -> bool:
    """Whether this is the mask that stands for plain causality; its shape says so, so nothing has to be read."""
    return mask.dtype == torch.int64 and mask.shape[-2:] == (query_length + 1, 0)


def of_position_ids(position_ids: Tensor, intervals: Tensor | None, offset: int | Tensor) -> tuple[Tensor, Tensor]:
    """Packed documents: one begins where the position doesn't rise, at a query that sees its own node and others.

    Args:
        position_ids: (B, Lq).
        intervals: (B, Lq, 2), from the first to the last node that a query sees otherwise; None for all up to its own.
        offset: the node that the first query stands on.

    Returns:
        intervals (B, Lq, 2) from each document's first node on, and a boolean scalar: a document begins at some query.
    """
    node = torch.arange(position_ids.shape[1], device=position_ids.device) + offset
    begins = F.pad(position_ids.diff(dim=-1) <= 0, (1, 0))
    if intervals is not None:
        begins = begins & (intervals[..., 0] < node) & (node < intervals[..., 1])
    first = torch.where(begins, node, 0).cummax(-1).values
    return torch.stack([first, torch.full_like(first, FARTHEST)], dim=-1), begins.any()


def _dense(asked: dict[str, Any]) -> Tensor:
    from transformers.masking_utils import sdpa_mask

    mask = sdpa_mask(**{**asked, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    assert mask is not None  # nothing may be skipped
    return mask


def _direct(asked: dict[str, Any]) -> Tensor | None:
    """The intervals (B, Lq, 2) without a dense mask, None where the mask function or the padding says more."""
    padding, device = asked.get("attention_mask"), asked.get("device", "cpu")
    first, nodes = asked.get("kv_offset", 0), asked["kv_length"]
    position = torch.arange(asked["q_length"], device=device) + asked.get("q_offset", 0)
    seen = _said_by(asked["mask_function"], position[None])
    if seen is None:
        return None
    if padding is not None:
        real, contiguous = iv.of_mask(padding[:, first : first + nodes])
        if padding.ndim != 2 or not contiguous:
            return None
        seen = iv.intersect(seen, real[:, None] + first)
    return (seen - first).clamp(0, nodes).expand(asked["batch_size"], -1, -1)


def _hides_nothing_but_later_nodes(asked: dict[str, Any]) -> bool:
    from transformers.masking_utils import causal_mask_function

    padding, q_length, nodes = asked.get("attention_mask"), asked["q_length"], asked["kv_length"]
    if asked["mask_function"] is not causal_mask_function or q_length not in (1, nodes):
        return False
    offset = asked.get("q_offset", 0)
    if not isinstance(offset, int) or offset + q_length != nodes + asked.get("kv_offset", 0):
        return False
    return padding is None or bool(padding.all())


def _said_by(function: Callable[..., Any], position: Tensor) -> Tensor | None:
    """The nodes for which a mask function of transformers is true, for queries at these positions (B, Lq)."""
    name, held = _name_and_closure(function)
    if name == "causal_mask_function":
        return iv.around(position, None, 0)
    if name == "bidirectional_mask_function":
        return iv.around(position, None, None)
    if name == "sliding_window_overlay":
        return iv.around(position, held["sliding_window"] - 1, None)
    if name == "sliding_window_bidirectional_overlay":
        return iv.around(position, held["sliding_window"], held["sliding_window"])
    if name == "chunked_overlay":
        size, start = held["chunk_size"], held["left_padding"][:, None]
        lo = start + torch.div(position - start, size, rounding_mode="floor") * size
        return torch.stack([lo, lo + size], dim=-1)
    if name == "packed_sequence_mask_function":
        document = held["packed_sequence_mask"].contiguous()
        of_query = document.gather(-1, position.expand(len(document), -1))
        ends = [torch.searchsorted(document, of_query, right=right) for right in (False, True)]
        return torch.stack(ends, dim=-1)
    if name == "and_masks":
        return _said_by_all(held["mask_functions"], position)
    return None


def _said_by_all(functions: tuple[Callable[..., Any], ...], position: Tensor) -> Tensor | None:
    packed = any(_name_and_closure(function)[0] == "packed_sequence_mask_function" for function in functions)
    seen = iv.around(position, None, None)
    for function in functions:
        name, held = _name_and_closure(function)
        if name == "remap_positions_for_packed_sequence" and packed:
            # It speaks of positions in the document, which are the nodes moved by the same number in all of it.
            own = held["position_ids"].gather(-1, position.expand(len(held["position_ids"]), -1))
            said = _said_by(held["mask_function"], own)
            said = None if said is None else said.clamp(max=FARTHEST) + (position - own).unsqueeze(-1)
        else:
            said = _said_by(function, position)
        if said is None:
            return None
        seen = iv.intersect(seen, said)
    return seen


def _name_and_closure(function: Callable[..., Any]) -> tuple[str, dict[str, Any]]:
    """The name under which transformers defines a mask function or its maker ("" for others), and what it holds."""
    if getattr(function, "__module__", None) != "transformers.masking_utils" or not inspect.isfunction(function):
        return "", {}
    cells = function.__closure__ or ()
    held = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
    return function.__qualname__.partition(".")[0], held


@cache
def _asks_the_interface(config_class: type) -> bool:
    """Whether the model's source asks transformers' attention interface; benefit of the doubt where there's none."""
    module = sys.modules.get(config_class.__module__.replace("configuration_", "modeling_"))
    try:
        source = inspect.getsource(module) if module is not None else ""
    except (OSError, TypeError):
        return True
    has_attention = re.search(r"^class \w*Attention\w*\(nn\.Module\):", source, re.MULTILINE)
    return has_attention is None or "ALL_ATTENTION_FUNCTIONS" in source
