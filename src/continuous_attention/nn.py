"""Modules around the operator.

Shape legend: B batch, Lq queries, Lk nodes, E embed_dim, H heads, D = E / H.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from continuous_attention import intervals as iv
from continuous_attention.checks import FLOATS, check_number, check_shape, check_tensor, check_times
from continuous_attention.functional import BACKENDS, BOUNDARIES, INTERPOLATIONS, RULES, continuous_attention
from continuous_attention.path import ContinuousCache


class ContinuousMultiheadAttention(nn.Module):
    """Multi-head continuous attention with the parameters, names and mask convention of `nn.MultiheadAttention`.

        head_h = continuous_attention(Q W_h^Q, K W_h^K, V W_h^V)        out = concat(head_1, …, head_H) W^O

    Its parameters have the same names and shapes, so `load_state_dict` takes those of an `nn.MultiheadAttention`
    (with a learned boundary, pass strict=False). It can replace `self_attn` in `nn.TransformerEncoderLayer`.

    Args:
        embed_dim: E, width of queries and output.
        num_heads: H, a divisor of E.
        dropout: must be 0, see `continuous_attention`.
        bias: whether the projections have biases.
        kdim: width of `key`, E by default.
        vdim: width of `value`, E by default.
        batch_first: inputs are (B, length, width) instead of (length, B, width).
        boundary: "zero", "repeat", "half" or "none" (see `continuous_attention`), or "learned": each head has a
            trainable start node, `boundary_key` and `boundary_value` (H, D), zero at first.
        start_length: length of the segment before the first visible node, in the unit of `times`.
        rule: "exact", "trapezoid", "rectangle" or "taylor".
        interpolation: "linear" or "fourth_order", see `continuous_attention`.
        periods: shortest and longest period of a rotary embedding at the times (or the positions where there are
            none), in their unit; see `rotate`. None for no embedding.
        backend: "reference", "cpu" or None, see `continuous_attention`.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        ValueError: a size or choice is wrong.
        NotImplementedError: dropout isn't 0.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        boundary: str = "zero",
        start_length: float = 1.0,
        rule: str = "exact",
        interpolation: str = "linear",
        periods: tuple[float, float] | None = None,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "kdim": kdim, "vdim": vdim}
        for name, size in sizes.items():
            if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
                raise TypeError(f"{name} must be an int, got {type(size).__name__}")
            if size is not None and size <= 0:
                raise ValueError(f"{name} must be positive, got {name}={size}")
        if embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, got embed_dim={embed_dim}, num_heads={num_heads}"
            )
        if dropout:
            raise NotImplementedError(f"dropout must be 0, got {dropout!r}: apply it to the output instead")
        choices = {"boundary": (boundary, (*BOUNDARIES, "learned")), "rule": (rule, RULES)}
        choices["interpolation"] = (interpolation, INTERPOLATIONS)
        if backend is not None:
            choices["backend"] = (backend, BACKENDS)
        for name, (choice, allowed) in choices.items():
            if choice not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {choice!r}")
        if isinstance(start_length, bool) or not isinstance(start_length, (int, float)):
            raise TypeError(f"start_length must be a number, got {type(start_length).__name__}")
        if not 0 <= start_length < float("inf"):
            raise ValueError(f"start_length must be at least 0 and finite, got {start_length}")
        if boundary == "learned" and rule == "rectangle":
            raise ValueError("boundary='learned' has no use for rule='rectangle', which knows no start node")
        if periods is not None:
            periods = _check_periods(periods, embed_dim // num_heads)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.kdim, self.vdim = kdim or embed_dim, vdim or embed_dim
        self.batch_first = batch_first
        self.boundary, self.start_length, self.rule, self.backend = boundary, start_length, rule, backend
        self.interpolation, self.periods = interpolation, periods
        # nn.TransformerEncoderLayer asks for this before it takes a shortcut past forward; False keeps it off.
        self._qkv_same_embed_dim = False

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        if self.kdim == self.vdim == embed_dim:
            self.in_proj_weight = parameter(3 * embed_dim, embed_dim)
        else:
            self.q_proj_weight = parameter(embed_dim, embed_dim)
            self.k_proj_weight = parameter(embed_dim, self.kdim)
            self.v_proj_weight = parameter(embed_dim, self.vdim)
        self.in_proj_bias = parameter(3 * embed_dim) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        if boundary == "learned":
            self.boundary_key = parameter(num_heads, self.head_dim)
            self.boundary_value = parameter(num_heads, self.head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as `nn.MultiheadAttention` does; a learned boundary starts as the zero node."""
        for name, parameter in self.named_parameters():
            if name.startswith("boundary") or name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("proj_weight"):
                nn.init.xavier_uniform_(parameter)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        *,
        is_causal: bool = False,
        times: Tensor | None = None,
        query_times: Tensor | None = None,
        window: int | tuple[int, int] | None = None,
        time_window: float | None = None,
        cache: ContinuousCache | None = None,
    ) -> tuple[Tensor, None]:
        """Attend from `query` along the path through `key` and `value`.

        Args:
            query: (Lq, B, E), or (B, Lq, E) with `batch_first`, or (Lq, E) without a batch.
            key: (Lk, B, kdim), or as above.
            value: (Lk, B, vdim), or as above.
            key_padding_mask: (B, Lk), or (Lk,) without a batch; boolean, True = NOT a node, as in
                `nn.MultiheadAttention`. Additive masks of 0 and −inf say the same and are allowed too.
            need_weights: must be False, there are no weights per token to return.
            attn_mask: (Lq, Lk) or (B·H, Lq, Lk); boolean, True = NOT visible, or additive with 0 and −inf.
            is_causal: each query sees the nodes up to its own; needs no mask beside it.
            times: (Lk,) or (B, Lk), see `continuous_attention`.
            query_times: (Lq,) or (B, Lq).
            window: number of nodes seen, or (left, right).
            time_window: only nodes with τ_i ≥ τ_q − time_window are seen.
            cache: nodes that came before; those of `key` and `value`, whose times are `times`, are appended to it.
                Queries see what it holds, and no masks count then. For decoding, without gradients through the cache.

        Returns:
            (out, None) with out shaped like `query`.

        Raises:
            ValueError, TypeError, NotImplementedError: as `continuous_attention`.
        """
        if need_weights:
            raise NotImplementedError("need_weights must be False: continuous attention has no weights per token")
        for name, x in (("query", query), ("key", key), ("value", value)):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
            if x.is_nested:
                raise NotImplementedError(
                    f"{name} is a nested tensor; pad it instead (nn.TransformerEncoder: enable_nested_tensor=False)"
                )
        dims = {x.ndim for x in (query, key, value)}
        if dims not in ({2}, {3}):
            raise ValueError(
                "query, key and value must all have 2 dims, or 3 with a batch, got shapes "
                f"{tuple(query.shape)}, {tuple(key.shape)}, {tuple(value.shape)}"
            )
        widths = (query.shape[-1], key.shape[-1], value.shape[-1])
        if widths != (self.embed_dim, self.kdim, self.vdim):
            raise ValueError(
                f"query, key and value must have widths (embed_dim, kdim, vdim) = "
                f"{(self.embed_dim, self.kdim, self.vdim)}, got {widths}"
            )
        batch_dim = 0 if self.batch_first or dims == {2} else 1
        if dims == {2}:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        q, k, v = (self._split_heads(x.movedim(batch_dim, 0)) for x in self._project(query, key, value))
        visible = self._visible(key_padding_mask, attn_mask, q, k)
        if cache is not None and visible is not None:
            raise ValueError("key_padding_mask and attn_mask don't go together with a cache, got both")
        if cache is not None:
            if self.interpolation != "linear":
                raise NotImplementedError(f"a cache needs interpolation='linear', got {self.interpolation!r}")
            if query_times is None and q.shape[2] > k.shape[2]:
                raise ValueError(
                    "with a cache, query needs query_times where it is longer than the new nodes it stands on, got "
                    f"{q.shape[2]} queries and {k.shape[2]} nodes"
                )
            times = cache.next_times(k) if times is None else times
        if self.periods is not None:
            q, k = self._rotated(q, k, times, query_times)
        how = {
            "is_causal": is_causal,
            "times": times,
            "query_times": query_times,
            "window": window,
            "time_window": time_window,
        }
        out = self.attend(q, k, v, visible, **how) if cache is None else self._attend_cached(cache, q, k, v, **how)
        out = self.out_proj(out.transpose(1, 2).flatten(2)).movedim(0, batch_dim)
        return (out.squeeze(0) if dims == {2} else out), None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, **how: Any) -> Tensor:
        """Attend with the heads apart: `continuous_attention` as this module was set up; override it for another one.

        Args:
            query: (B, H, Lq, D).
            key: (B, H, Lk, D).
            value: (B, H, Lk, D).
            visible: boolean, broadcastable to (B, H, Lq, Lk).
            **how: is_causal, times, query_times, window and time_window of `continuous_attention`.
        """
        boundary = (self.boundary_key, self.boundary_value) if self.boundary == "learned" else self.boundary
        out = continuous_attention(
            query,
            key,
            value,
            visible,
            boundary=boundary,
            start_length=self.start_length,
            rule=self.rule,
            interpolation=self.interpolation,
            backend=self.backend,
            **how,
        )
        assert isinstance(out, Tensor)
        return out

    def _attend_cached(
        self, cache: ContinuousCache, q: Tensor, k: Tensor, v: Tensor, times: Tensor | None, **how: Any
    ) -> Tensor:
        path = cache.update(k, v, times)
        try:
            return self.attend(q, path.key, path.value, path.mask, times=path.times, **how)
        except Exception:
            cache.drop_newest(k.shape[2])
            raise

    def _rotated(self, q: Tensor, k: Tensor, times: Tensor | None, query_times: Tensor | None) -> tuple[Tensor, Tensor]:
        assert self.periods is not None
        times = check_times("times", times, len(k), k.shape[2], k.device)
        query_times = check_times("query_times", query_times, len(q), q.shape[2], q.device)
        if times is None:
            times = torch.arange(k.shape[2], device=k.device, dtype=torch.float64)
        if query_times is None:
            # Bottom-right: the last query stands on the last node.
            query_times = iv.at(times, iv.standing(q.shape[2], k.shape[2], q.device))
        return rotate(q, query_times, self.periods), rotate(k, times, self.periods)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        if self.kdim == self.vdim == self.embed_dim:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        inputs = (query, key, value)
        return [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)]

    def _split_heads(self, x: Tensor) -> Tensor:
        """(B, length, E) to (B, H, length, D)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _visible(
        self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, q: Tensor, k: Tensor
    ) -> Tensor | None:
        """The two masks of nn.MultiheadAttention as one mask of `continuous_attention` (True = visible)."""
        batch, queries, nodes = len(q), q.shape[2], k.shape[2]
        visible = None
        if key_padding_mask is not None:
            padding = _hidden("key_padding_mask", key_padding_mask, q.device)
            padding = padding.unsqueeze(0) if padding.ndim == 1 else padding
            if padding.shape != (batch, nodes):
                raise ValueError(
                    f"key_padding_mask must have shape (B, Lk) = {(batch, nodes)}, got {tuple(key_padding_mask.shape)}"
                )
            visible = ~padding[:, None, None]
        if attn_mask is not None:
            hidden = _hidden("attn_mask", attn_mask, q.device)
            if hidden.shape == (queries, nodes):
                hidden = hidden[None, None]
            elif hidden.shape == (batch * self.num_heads, queries, nodes):
                hidden = hidden.unflatten(0, (batch, self.num_heads))
            else:
                raise ValueError(
                    f"attn_mask must have shape (Lq, Lk) = {(queries, nodes)} or (B·H, Lq, Lk) = "
                    f"{(batch * self.num_heads, queries, nodes)}, got {tuple(attn_mask.shape)}"
                )
            visible = ~hidden if visible is None else visible & ~hidden
        return visible

    def extra_repr(self) -> str:
        """What print(module) shows."""
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, boundary={self.boundary!r}, rule={self.rule!r}"


def rotate(x: Tensor, times: Tensor, periods: tuple[float, float]) -> Tensor:
    """Rotary embedding at real times: pair j of the head dim is turned by the angle 2π τ / period_j.

        period_j = shortest · (longest / shortest)^(j / (D/2 − 1))        j = 0, …, D/2 − 1

    For D = 2 there is the shortest period only.

    The product of two vectors rotated at τ and τ' depends on τ − τ' only. Angles are computed in the dtype of the
    times, so epoch seconds want float64.

    Args:
        x: (B, H, L, D), D even; dims j and j + D/2 make a pair.
        times: (L,), (1, L) or (B, L), float32 or float64, in any unit.
        periods: shortest and longest period, positive, in the unit of `times`.

    Returns:
        Shape and dtype of `x`.

    Raises:
        ValueError, TypeError: a shape, type or period is wrong.

    Source: Su et al., RoFormer (2021), with times for positions and the periods named.
    """
    check_tensor("x", x, FLOATS, None)
    if x.ndim != 4 or x.shape[-1] % 2:
        raise ValueError(f"x must have shape (B, H, L, D) with an even D, got {tuple(x.shape)}")
    batch, length = len(x), x.shape[2]
    check_tensor("times", times, (torch.float32, torch.float64), x.device)
    check_shape("times", times, [(length,), (1, length), (batch, length)], "(L,), (1, L) or (B, L)")
    shortest, longest = _check_periods(periods, x.shape[-1])
    steps = torch.linspace(0.0, 1.0, x.shape[-1] // 2, dtype=times.dtype, device=x.device)
    period = shortest * (longest / shortest) ** steps
    angle = (2 * math.pi * (times.unsqueeze(-1) / period)).unsqueeze(-3)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _check_periods(periods: Any, head_dim: int) -> tuple[float, float]:
    if not isinstance(periods, Sequence) or len(periods) != 2:
        raise TypeError(f"periods must be a pair (shortest, longest), got {periods!r}")
    shortest, longest = (check_number("periods", x) for x in periods)
    if not 0 < shortest <= longest:
        raise ValueError(f"periods must be positive and rise, got {periods}")
    if head_dim % 2:
        raise ValueError(f"periods need an even head dim for pairs to rotate, got embed_dim / num_heads = {head_dim}")
    return shortest, longest


def _hidden(name: str, mask: Tensor, device: torch.device) -> Tensor:
    """A mask of nn.MultiheadAttention as boolean, True = hidden."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(mask).__name__}")
    if mask.device != device:
        raise ValueError(f"{name} must be on the query's device {device}, got {mask.device}")
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(f"{name} must be boolean (True = hidden) or additive with 0 and −inf, got {mask.dtype}")
    return ~iv.of_additive(name, mask)
