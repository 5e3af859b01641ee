# pyright: reportCallIssue=false, reportIndexIssue=false, reportArgumentType=false
# (a kernel takes a grid in brackets, and numbers where it is declared to take constants)
"""From tensors to launches: what ops.py calls.

Shape legend: B batch, Hq query heads, Hkv key/value heads, Lq queries, Lk nodes, D and Dv head dims.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from continuous_attention.kernels.triton import tuning
from continuous_attention.kernels.triton.backward import (
    KAPPA,
    ROW_FIELDS,
    nodes_kernel,
    queries_kernel,
    rows_kernel,
    schedule_kernel,
)
from continuous_attention.kernels.triton.decode import merge_kernel, split_kernel
from continuous_attention.kernels.triton.forward import forward_kernel
from continuous_attention.kernels.triton.rows import Shape
from continuous_attention.kernels.triton.segment import INTERPRETED, LOG2E
from continuous_attention.kernels.triton.tuning import Config

MOST_ROWS_OF_DECODE = 64  # queries of a group, all together
NODES_PER_SPLIT = 512  # at least
FUSION = {"enable_fp_fusion": True}


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    intervals: Tensor,
    lengths: Tensor | None,
    start_key: Tensor | None,
    start_value: Tensor | None,
    end_lengths: Tensor | None,
    scale: float,
    start_length: float,
    end_length: float,
    out: Tensor,
    lse: Tensor,
    rest: Tensor | None,
    normalizer: Tensor | None,
) -> None:
    """Write out (B, Hq, Lq, Dv) and lse (B, Hq, Lq), and for the backward pass rest and normalizer.

    The inputs are those of ops.py's operators.
    """
    if out.numel() == 0 and lse.numel() == 0:
        return
    batch, heads, query_length = lse.shape
    key_heads, key_length = key.shape[1:3]
    group = heads // key_heads
    nodes = query, key, value, intervals, lengths
    ends = start_key, start_value, end_lengths
    results = out, lse, rest, normalizer
    strides = *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], _batch_stride(intervals)
    strides = *strides, _batch_stride(lengths)
    numbers = scale * LOG2E.value, start_length, end_length
    has_end = end_lengths is not None or end_length > 0
    kernel = "split" if group * query_length <= MOST_ROWS_OF_DECODE and key_length > NODES_PER_SPLIT else "forward"
    choice = tuning.key_of(kernel, query.shape[3], value.shape[3], query.dtype, key_length)

    def launch(config: Config) -> None:
        blocks = triton.cdiv(query_length, config.block_m)
        forward_kernel[(blocks, heads, batch)](
            *nodes, *ends, *results, *strides, _batch_stride(end_lengths), *numbers, heads, query_length, key_length,
            S=shape_of(query, key, value, config), HAS_END=has_end,
            LIMIT=2.0**14 if query.dtype == torch.float16 else 2.0**40,
            num_warps=config.warps, num_stages=config.stages, **FUSION,
        )  # fmt: skip

    def launch_splits(config: Config) -> None:
        rows = tuning.padded(group * query_length)
        config = config._replace(block_m=rows, block_n=max(config.block_n, 8 * config.warps))
        shape = shape_of(query, key, value, config)._replace(chains=4 * config.warps)
        tiles = triton.cdiv(key_length, shape.block_n - shape.chains)
        splits = min(triton.cdiv(key_length, NODES_PER_SPLIT), triton.cdiv(2 * processors(query), batch * key_heads))
        tiles_per_split = triton.cdiv(tiles, splits)
        splits = triton.cdiv(tiles, tiles_per_split)
        sums = lse.new_empty((batch * key_heads, splits, rows, shape.value_dim_padded))
        scales = lse.new_empty((batch * key_heads, splits, rows, 2))
        options = {"num_warps": config.warps, **FUSION}
        split_kernel[(splits, key_heads, batch)](
            *nodes, sums, scales, *strides, numbers[0], query_length, key_length, tiles_per_split,
            S=shape, num_stages=config.stages, **options,
        )  # fmt: skip
        merge_kernel[(key_heads, batch)](
            *nodes[:4], *ends, sums, scales, *results, *strides[:-1], _batch_stride(end_lengths), *numbers,
            query_length, key_length, splits, S=shape, HAS_END=has_end, **options,
        )  # fmt: skip

    with _on_device(query):
        tuning.run(choice, query.device, launch_splits if kernel == "split" else launch)


def backward(
    out_gradient: Tensor,
    lse_gradient: Tensor | None,
    out: Tensor,
    rest: Tensor | None,
    normalizer: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    intervals: Tensor,
    lengths: Tensor | None,
    start_key: Tensor | None,
    start_value: Tensor | None,
    end_lengths: Tensor | None,
    scale: float,
    start_length: float,
    end_length: float,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, lengths, start_key, start_value and end_lengths, by head where they share.

    Returns:
        (B, Hq, Lq, D), (B, Hkv, Lk, D), (B, Hkv, Lk, Dv), and where they are `wanted` lengths (B, Hkv, Lk), start_key
        (parts, Hkv, D), start_value (parts, Hkv, Dv) and end_lengths (B, Hq, Lq), to be added up.
    """
    batch, heads, query_length = lse_shape = normalizer.shape[:3]
    key_heads, key_length, dim = key.shape[1:]
    value_dim, group = value.shape[3], heads // key_heads
    of_start, of_lengths, of_ends = wanted
    if key_length == 0 or normalizer.numel() == 0:
        shapes = (batch, key_heads, key_length), (batch, key_heads, dim), (batch, key_heads, value_dim), lse_shape
        parts = zip(shapes, (of_lengths, of_start, of_start, of_ends), strict=True)
        none = [normalizer.new_zeros(shape) if asked else None for shape, asked in parts]
        return *(x.new_zeros(x.shape) for x in (query, key, value)), *none
    out, rest = out.contiguous(), None if rest is None else rest.contiguous()
    gain = None
    if query.dtype == torch.float16:
        # dA is below twice this bound, and float16 holds 2^16; a power of two, so nothing is rounded.
        bound = _largest(out_gradient) * _largest(value) * value_dim**0.5
        if lse_gradient is not None:
            bound = bound + _largest(lse_gradient.where(normalizer[..., 1] > 0, 0.0))
        gain = torch.exp2(12 - torch.ceil(torch.log2(bound))).clamp(2.0**-100, 2.0**60)
        gain = gain.where(bound.isfinite() & (bound > 0), 1.0).reshape(1)
    fused = adds_tiles(query) and not torch.are_deterministic_algorithms_enabled()
    strides = *query.stride()[:2], *key.stride()[:2], *value.stride()[:2], *out_gradient.stride()[:3]

    choices = {
        name: tuning.key_of(name, dim, value_dim, query.dtype, key_length) for name in ("rows", "nodes", "queries")
    }
    gradients = [x.new_empty(x.shape) for x in (query, key, value)]

    def launch_rows(config: Config, rows: int) -> tuple[Any, ...]:
        """What stands apart from the tiles, with room for so many rows per head."""
        config = config._replace(block_m=math.gcd(config.block_m, rows))
        blocks = rows // config.block_m
        table = normalizer.new_empty((ROW_FIELDS, batch, heads, rows))
        d_query = normalizer.new_empty((batch, heads, rows, dim))
        parts = [
            normalizer.new_empty((batch, key_heads, group * blocks, size)) if of_start else None
            for size in (dim, value_dim)
        ]
        d_ends = normalizer.new_empty((batch, heads, query_length)) if of_ends else None
        rows_kernel[(blocks, heads, batch)](
            query, key, value, out, rest, normalizer, out_gradient, lse_gradient, intervals,
            start_key, start_value, end_lengths, gain, table, d_query, *parts, d_ends,
            *strides, _batch_stride(intervals), _batch_stride(end_lengths),
            scale * LOG2E.value, start_length, end_length, batch * heads, heads, query_length, rows,
            S=shape_of(query, key, value, config), HAS_END=end_lengths is not None or end_length > 0,
            num_warps=config.warps, **FUSION,
        )  # fmt: skip
        return table, d_query, *(None if x is None else x.sum(2) for x in parts), d_ends

    def launch_nodes(config: Config) -> tuple[Any, ...]:
        shape = shape_of(query, key, value, config, out_gradient)
        step = shape.block_n - shape.chains
        tiles, rows = triton.cdiv(key_length, step), triton.cdiv(query_length, shape.block_m) * shape.block_m
        table, d_query, *ends = tuning.run(choices["rows"], query.device, lambda x: launch_rows(x, rows))
        schedule = intervals.new_empty((len(intervals), tiles, 4))
        schedule_kernel[(tiles, len(intervals))](
            intervals, schedule, _batch_stride(intervals), query_length, tiles,
            STEP=step, BLOCK_M=shape.block_m, AT_ONCE=max(1, 1024 // shape.block_m), num_warps=4,
        )  # fmt: skip
        joints = [normalizer.new_empty((batch, key_heads, tiles * shape.chains, 2, size)) for size in (dim, value_dim)]
        d_lengths = normalizer.new_zeros((batch, key_heads, key_length)) if of_lengths else None
        nodes_kernel[(tiles, key_heads, batch)](
            query, key, value, out_gradient, table, intervals, lengths, schedule, gain,
            *gradients[1:], *joints, d_lengths, d_query,
            add_by_tiles(d_query, shape.block_m, shape.dim_padded) if fused else None,
            *strides, _batch_stride(intervals), _batch_stride(lengths), scale * LOG2E.value,
            batch * heads, heads, query_length, key_length, rows, tiles,
            S=shape, FUSED=fused, num_warps=config.warps, num_stages=config.stages, **FUSION,
        )  # fmt: skip
        for gradient, joint in zip(gradients[1:], joints, strict=True):
            at_joints = gradient[:, :, :: shape.block_n // shape.chains - 1]
            joint[:, :, 1:, 0] += joint[:, :, :-1, 1]
            at_joints.copy_(joint[:, :, : at_joints.shape[2], 0])
        return table, d_query, d_lengths, *ends

    def launch_queries(config: Config, table: Tensor, d_query: Tensor) -> None:
        rows = d_query.shape[2]
        blocks = triton.cdiv(query_length, config.block_m)
        queries_kernel[(blocks, heads, batch)](
            query, key, value, out_gradient, table, intervals, lengths, d_query, gain, gradients[0],
            *strides, _batch_stride(intervals), _batch_stride(lengths), scale * LOG2E.value,
            batch * heads, heads, query_length, key_length, rows,
            S=shape_of(query, key, value, config), num_warps=config.warps, num_stages=config.stages, **FUSION,
        )  # fmt: skip

    with _on_device(query):
        table, d_query, d_lengths, *ends = tuning.run(choices["nodes"], query.device, launch_nodes)
        if fused:
            d_query = d_query[:, :, :query_length]
            torch.mul(d_query if gain is None else d_query / gain, scale / KAPPA.value, out=gradients[0])
        else:
            tuning.run(choices["queries"], query.device, lambda config: launch_queries(config, table, d_query))
    return *gradients, d_lengths, *ends


def shape_of(query: Tensor, key: Tensor, value: Tensor, config: Config, *others: Tensor) -> Shape:
    """What a call's kernels are compiled for: nothing of it depends on how many queries and nodes there are."""
    dim, value_dim = query.shape[3], value.shape[3]
    offsets = [max(x.shape[2], 256) * x.stride(2) for x in (query, key, value, *others)]
    return Shape(
        group=query.shape[1] // key.shape[1],
        dim=dim,
        dim_padded=tuning.padded(dim),
        value_dim=value_dim,
        value_dim_padded=tuning.padded(value_dim),
        query_stride=query.stride(2),
        key_stride=key.stride(2),
        value_stride=value.stride(2),
        wide=max(offsets) + 2**20 > 2**31,
        few=query.dtype != torch.float32,
        block_m=config.block_m,
        block_n=config.block_n,
        chains=4,
        stages=config.stages,
    )


def _largest(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, math.inf).float()


def _batch_stride(x: Tensor | None) -> int:
    """0 where all batch elements share one."""
    return 0 if x is None or len(x) == 1 else x.stride(0)


def adds_tiles(query: Tensor) -> bool:
    """Whether the device adds whole tiles to memory at once; elsewhere two kernels take less time than one."""
    if INTERPRETED:
        return True
    return torch.version.hip is None and query.shape[3] % 4 == 0 and tuning.capability(query.device) >= (9, 0)


def add_by_tiles(total: Tensor, block_m: int, dim_padded: int) -> Any:
    """What adds whole tiles to the rows of (…, D); None in the interpreter, where a kernel adds number by number."""
    if INTERPRETED:
        return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(total.flatten(0, 2), [block_m, dim_padded])


def processors(x: Tensor) -> int:
    """How many programs run side by side, at least."""
    return 4 if INTERPRETED else torch.cuda.get_device_properties(x.device).multi_processor_count


def _on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which needn't be the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
