"""Transformer blocks for series and paths: features at irregular times in, features at any times out.

Shape legend: B batch, L nodes (readings), Q queries, F features, E embed_dim.
"""

from typing import Any

import torch
from torch import Tensor, nn

from continuous_attention.checks import check_integer, check_shape, check_tensor, check_times
from continuous_attention.nn import ContinuousMultiheadAttention
from continuous_attention.path import ContinuousCache


class ContinuousTransformerBlock(nn.Module):
    """Attention and a feed-forward network, each behind a layer norm and beside a residual connection.

        x ← x + self-attention(norm(x))      x ← x + cross-attention(norm(x), memory)      x ← x + W₂ gelu(W₁ norm(x))

    Args:
        embed_dim: E.
        num_heads: of each attention, a divisor of E.
        self_attention: whether the nodes attend along their own path.
        cross_attention: whether they attend along the path of a memory.
        feedforward: hidden width, 4 E where None.
        dropout: of the two branches' outputs, not of attention weights.
        **attention: `boundary`, `start_length`, `rule`, `interpolation`, `periods` and `backend` of
            `ContinuousMultiheadAttention`.

    Raises:
        ValueError, TypeError: a size or choice is wrong.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        self_attention: bool = True,
        cross_attention: bool = False,
        feedforward: int | None = None,
        dropout: float = 0.0,
        **attention: Any,
    ) -> None:
        super().__init__()
        check_integer("embed_dim", embed_dim, 1)
        hidden = 4 * embed_dim if feedforward is None else feedforward
        check_integer("feedforward", hidden, 1)

        def branch(wanted: bool) -> tuple[nn.LayerNorm, ContinuousMultiheadAttention] | tuple[None, None]:
            if not wanted:
                return None, None
            module = ContinuousMultiheadAttention(embed_dim, num_heads, batch_first=True, **attention)
            return nn.LayerNorm(embed_dim), module

        self.self_norm, self.self_attention = branch(self_attention)
        self.cross_norm, self.cross_attention = branch(cross_attention)
        self.feedforward = nn.Sequential(
            nn.LayerNorm(embed_dim), nn.Linear(embed_dim, hidden), nn.GELU(), nn.Linear(hidden, embed_dim)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        *,
        along_itself: dict[str, Any] | None = None,
        memory: Tensor | None = None,
        along_memory: dict[str, Any] | None = None,
    ) -> Tensor:
        """Transform x (B, L, E).

        Args:
            x: (B, L, E).
            along_itself: keyword arguments of the self-attention: times, key_padding_mask, is_causal, ….
            memory: (B, Lk, E), the nodes of the cross-attention.
            along_memory: keyword arguments of the cross-attention: times, query_times, ….
        """
        if self.self_norm is not None and self.self_attention is not None:
            nodes = self.self_norm(x)
            x = x + self.dropout(self.self_attention(nodes, nodes, nodes, **(along_itself or {}))[0])
        if self.cross_norm is not None and self.cross_attention is not None:
            if memory is None:
                raise ValueError("a block with cross-attention needs a memory, got memory=None")
            x = x + self.dropout(self.cross_attention(self.cross_norm(x), memory, memory, **(along_memory or {}))[0])
        return x + self.dropout(self.feedforward(x))


class ContinuousTransformerEncoder(nn.Module):
    """Read a series of features at irregular times: (B, L, F) to (B, L, E).

    Each reading becomes a node, Linear([features, which of them were observed]); blocks of self-attention along the
    path through the nodes follow, and a layer norm. Rotary embedding at the real times tells the nodes apart.

    Args:
        features: F.
        embed_dim: E.
        num_heads: a divisor of E.
        num_layers: blocks.
        periods: shortest and longest period of the rotary embedding, in the unit of the times: somewhat below the
            usual gap between readings, and somewhat above the length of a series. None for no embedding, so that only
            the lengths of the segments come from the times.
        feedforward: hidden width, 4 E where None.
        dropout: of each branch's output.
        boundary: where the path begins, see `continuous_attention`; "none" is the path from the first reading on.
        start_length: length of the segment before the first reading, for the other boundaries.
        rule: "exact", or a quadrature to compare with.
        interpolation: "linear", or "fourth_order" for smooth series: not causal, not with caches, and under
            torch.compile not with `present`.
        backend: see `continuous_attention`.

    Raises:
        ValueError, TypeError: a size or choice is wrong.
    """

    def __init__(
        self,
        features: int,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        *,
        periods: tuple[float, float] | None,
        feedforward: int | None = None,
        dropout: float = 0.0,
        boundary: str = "none",
        start_length: float = 1.0,
        rule: str = "exact",
        interpolation: str = "linear",
        backend: str | None = None,
    ) -> None:
        super().__init__()
        check_integer("features", features, 1)
        check_integer("embed_dim", embed_dim, 1)
        check_integer("num_layers", num_layers, 1)
        self.features = features
        self.embedding = nn.Linear(2 * features, embed_dim)
        self.blocks = nn.ModuleList(
            ContinuousTransformerBlock(
                embed_dim,
                num_heads,
                feedforward=feedforward,
                dropout=dropout,
                boundary=boundary,
                start_length=start_length,
                rule=rule,
                interpolation=interpolation,
                periods=periods,
                backend=backend,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(embed_dim)

    def forward(
        self,
        values: Tensor,
        times: Tensor | None = None,
        *,
        observed: Tensor | None = None,
        present: Tensor | None = None,
        is_causal: bool = False,
        caches: list[ContinuousCache] | None = None,
    ) -> Tensor:
        """Encode a batch of series.

        Args:
            values: (B, L, F), dtype of the weights (or what autocast casts); what wasn't observed may hold anything.
            times: (L,) or (B, L), float32 or float64, non-decreasing; 0, 1, 2, … where None.
            observed: boolean (B, L, F), True = observed, all where None.
            present: boolean (B, L), True = a reading, False = padding; all where None. Padding between readings cuts
                the path there.
            is_causal: each reading sees those up to it.
            caches: one for each block, from `caches`, to read a stream piece by piece: is_causal counts then, and
                `present` is not allowed. Where an exception passes, none of them keeps the new nodes.

        Returns:
            (B, L, E); what padding gets means nothing.

        Raises:
            ValueError, TypeError: a shape, type or meaning is wrong.
        """
        _check_dtype("values", values, self.norm.weight)
        if values.ndim != 3 or values.shape[-1] != self.features:
            raise ValueError(f"values must have shape (B, L, F) = (B, L, {self.features}), got {tuple(values.shape)}")
        seen = _check_mask("observed", observed, values.shape, "(B, L, F)", values)
        if caches is not None and len(caches) != len(self.blocks):
            raise ValueError(f"caches must hold one for each of {len(self.blocks)} blocks, got {len(caches)}")
        padding = _padding("present", present, values)
        if caches is not None and padding is not None:
            raise ValueError("present doesn't go together with caches, got both")
        if caches is not None and len({id(cache) for cache in caches}) < len(caches):
            raise ValueError("caches must hold another one for each block, got the same one twice")
        known = torch.ones_like(values) if seen is None else seen.to(values.dtype)
        nodes = values if seen is None else values.masked_fill(~seen, 0.0)
        nodes = nodes if padding is None else nodes.masked_fill(padding.unsqueeze(-1), 0.0)
        times = _times("times", times, padding, nodes)
        x = self.embedding(torch.cat([nodes, known], dim=-1))
        how = {"times": times, "is_causal": is_causal, "key_padding_mask": padding}
        if caches is not None:
            return self.norm(self._through_caches(x, how, caches))
        for block in self.blocks:
            x = block(x, along_itself=how)
        return self.norm(x)

    def _through_caches(self, x: Tensor, how: dict[str, Any], caches: list[ContinuousCache]) -> Tensor:
        seen = [cache.seen for cache in caches]
        try:
            for block, cache in zip(self.blocks, caches, strict=True):
                x = block(x, along_itself=how | {"cache": cache})
        except BaseException:
            for cache, before in zip(caches, seen, strict=True):
                cache.drop_newest(cache.seen - before)
            raise
        return x

    def caches(self, tolerance: float | tuple[float, float], *, recent: int = 64) -> list[ContinuousCache]:
        """Empty caches for the blocks, see `ContinuousCache`."""
        return [ContinuousCache(tolerance, recent=recent) for _ in self.blocks]


class ContinuousTransformerDecoder(nn.Module):
    """Read the path of a memory at any times: (B, Q) times to (B, Q, E).

    Queries start from one learned vector plus Linear(features) where they have any; blocks of self-attention along
    the path of the queries (unless switched off), cross-attention along the path of the memory, and feed-forward
    follow, and a layer norm.

    Args:
        embed_dim: E, width of the memory too.
        num_heads: a divisor of E.
        num_layers: blocks.
        periods: shortest and longest period of the rotary embedding, in the unit of the times; None for none.
        features: what is known about each query (a calendar, a dose, …), 0 for nothing.
        self_attention: False makes each query independent of the others.
        feedforward: hidden width, 4 E where None.
        dropout: of each branch's output.
        boundary: where the paths begin.
        start_length: length of the segment before the first node, for boundaries other than "none".
        rule: "exact", or a quadrature to compare with.
        interpolation: "linear", or "fourth_order" for smooth series: not causal, and under torch.compile without
            `present` and `query_present`.
        backend: see `continuous_attention`.

    Raises:
        ValueError, TypeError: a size or choice is wrong.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        *,
        periods: tuple[float, float] | None,
        features: int = 0,
        self_attention: bool = True,
        feedforward: int | None = None,
        dropout: float = 0.0,
        boundary: str = "none",
        start_length: float = 1.0,
        rule: str = "exact",
        interpolation: str = "linear",
        backend: str | None = None,
    ) -> None:
        super().__init__()
        check_integer("features", features, 0)
        check_integer("embed_dim", embed_dim, 1)
        check_integer("num_layers", num_layers, 1)
        self.features = features
        self.start = nn.Parameter(torch.randn(embed_dim) / embed_dim**0.5)
        self.embedding = nn.Linear(features, embed_dim, bias=False) if features > 0 else None
        self.blocks = nn.ModuleList(
            ContinuousTransformerBlock(
                embed_dim,
                num_heads,
                self_attention=self_attention,
                cross_attention=True,
                feedforward=feedforward,
                dropout=dropout,
                boundary=boundary,
                start_length=start_length,
                rule=rule,
                interpolation=interpolation,
                periods=periods,
                backend=backend,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(embed_dim)

    def forward(
        self,
        query_times: Tensor,
        memory: Tensor,
        times: Tensor,
        *,
        values: Tensor | None = None,
        present: Tensor | None = None,
        query_present: Tensor | None = None,
        is_causal: bool = False,
        time_window: float | None = None,
    ) -> Tensor:
        """Read a batch of memories.

        Args:
            query_times: (Q,) or (B, Q), dtype of `times`; non-decreasing unless self-attention is off.
            memory: (B, L, E), from the encoder; dtype of the weights, or what autocast casts.
            times: (L,) or (B, L), of the memory's nodes.
            values: (B, Q, F), what is known about each query, where the decoder has features; dtypes as of `memory`.
            present: boolean (B, L), True = a node of the memory, False = padding.
            query_present: boolean (B, Q), True = a query, False = padding.
            is_causal: each query sees the nodes and queries up to its own time.
            time_window: each query sees nodes of the memory not older than this.

        Returns:
            (B, Q, E); what padding gets means nothing.

        Raises:
            ValueError, TypeError: a shape, type or meaning is wrong.
        """
        _check_dtype("memory", memory, self.norm.weight)
        if memory.ndim != 3 or memory.shape[-1] != len(self.start):
            raise ValueError(f"memory must have shape (B, L, E) = (B, L, {len(self.start)}), got {tuple(memory.shape)}")
        batch = len(memory)
        check_tensor("query_times", query_times, (torch.float32, torch.float64), memory.device)
        length = query_times.shape[-1] if query_times.ndim else 0
        check_shape("query_times", query_times, [(length,), (batch, length)], "(Q,) or (B, Q)")
        x = self.start.expand(batch, length, -1)
        if (values is None) != (self.embedding is None):
            raise ValueError(
                f"values must have shape (B, Q, F) = {(batch, length, self.features)} where the decoder has features, "
                f"and be None where it has none; it has {self.features}, got "
                f"{'None' if values is None else tuple(values.shape)}"
            )
        if values is not None and self.embedding is not None:
            _check_dtype("values", values, self.norm.weight)
            check_shape("values", values, [(batch, length, self.features)], "(B, Q, F)")
            x = x + self.embedding(values)
        padding, query_padding = _padding("present", present, memory), _padding("query_present", query_present, x)
        asked = _times("query_times", query_times, query_padding, x)
        along_itself = {"times": asked, "is_causal": is_causal, "key_padding_mask": query_padding}
        along_memory = {
            "times": _times("times", times, padding, memory),
            "query_times": asked,
            "is_causal": is_causal,
            "time_window": time_window,
            "key_padding_mask": padding,
        }
        for block in self.blocks:
            x = block(x, along_itself=along_itself, memory=memory, along_memory=along_memory)
        return self.norm(x)


def _check_dtype(name: str, x: Tensor, weight: Tensor) -> None:
    """The dtype of the weights, or under autocast one that it casts as it casts them."""
    device, dtypes = weight.device.type, (weight.dtype,)
    if weight.dtype != torch.float64 and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        dtypes = (torch.float16, torch.bfloat16, torch.float32)
    check_tensor(name, x, dtypes, weight.device)


def _padding(name: str, present: Tensor | None, x: Tensor) -> Tensor | None:
    """Present nodes (B, L) as a key_padding_mask, None if all are."""
    present = _check_mask(name, present, x.shape[:2], "(B, L)", x)
    return None if present is None else ~present


def _times(name: str, times: Tensor | None, padding: Tensor | None, x: Tensor) -> Tensor | None:
    """The times of x (B, L, …), with those of padding replaced: NaN there would reach the gradients as 0 · NaN.

    Padding gets the time of the last present one before it, or of the first one; 0 where nothing is present.
    """
    checked = check_times(name, times, len(x), x.shape[1], x.device)
    if checked is None or padding is None or x.shape[1] == 0:
        return times
    places = torch.arange(x.shape[1], device=x.device)
    first = (~padding).int().argmax(-1, keepdim=True)
    source = torch.where(padding, first, places).cummax(-1).values
    return torch.where(padding.all(-1, keepdim=True), 0.0, checked.expand(len(x), -1).gather(-1, source))


def _check_mask(name: str, mask: Tensor | None, shape: tuple[int, ...], meaning: str, x: Tensor) -> Tensor | None:
    if mask is not None:
        check_tensor(name, mask, (torch.bool,), x.device)
        check_shape(name, mask, [tuple(shape)], meaning)
    return mask
