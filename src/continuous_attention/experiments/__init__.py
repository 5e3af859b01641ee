"""Repeatable experiments behind `continuous-attention experiment …`."""
