"""Continuous softmax attention: the query integrates over the path through keys and values."""

from continuous_attention.functional import continuous_attention, continuous_attention_varlen, merge
from continuous_attention.integrations.transformers import (
    load_continuous,
    register_transformers,
    switch_to_continuous,
    switch_to_softmax,
)
from continuous_attention.nn import ContinuousMultiheadAttention

__all__ = [
    "ContinuousMultiheadAttention",
    "continuous_attention",
    "continuous_attention_varlen",
    "load_continuous",
    "merge",
    "register_transformers",
    "switch_to_continuous",
    "switch_to_softmax",
]
__version__ = "0.1.0"
