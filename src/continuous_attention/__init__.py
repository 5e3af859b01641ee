"""Continuous softmax attention: the query integrates over the path through keys and values."""

from continuous_attention.context_parallel import context_parallel_attention
from continuous_attention.dates import to_times
from continuous_attention.functional import continuous_attention, continuous_attention_varlen, merge
from continuous_attention.integrations.parallel import parallelize_context, shard_batch
from continuous_attention.integrations.times import take_times
from continuous_attention.integrations.transformers import (
    load_continuous,
    register_transformers,
    switch_to_continuous,
    switch_to_softmax,
)
from continuous_attention.nn import ContinuousMultiheadAttention, rotate
from continuous_attention.path import ContinuousCache, Path, simplify
from continuous_attention.ranks import shard_sequence, unshard_sequence
from continuous_attention.transformer import (
    ContinuousTransformerBlock,
    ContinuousTransformerDecoder,
    ContinuousTransformerEncoder,
)

__all__ = [
    "ContinuousCache",
    "ContinuousMultiheadAttention",
    "ContinuousTransformerBlock",
    "ContinuousTransformerDecoder",
    "ContinuousTransformerEncoder",
    "Path",
    "context_parallel_attention",
    "continuous_attention",
    "continuous_attention_varlen",
    "load_continuous",
    "merge",
    "parallelize_context",
    "register_transformers",
    "rotate",
    "shard_batch",
    "shard_sequence",
    "simplify",
    "switch_to_continuous",
    "switch_to_softmax",
    "take_times",
    "to_times",
    "unshard_sequence",
]
__version__ = "0.1.0"
