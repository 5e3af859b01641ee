"""What the elementwise part of the forward kernel costs beside its two matrix products.

    python benchmarks/elementwise.py [--repeats N]

The products take a time in proportion to the head dim D, what is done to the scores takes the same for every D. So a
straight line through the times for several D has the elementwise part as its value at D = 0. One thread, float32.
"""

import argparse
import statistics
import time

import torch

from continuous_attention import continuous_attention
from continuous_attention.kernels import cpu

DIMS = (32, 48, 64, 96, 128)
LENGTH = 2048


def main() -> None:
    """Print the line, and its parts at each D."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeats", type=int, default=15, help="calls for each D, of which the fastest counts (default 15)"
    )
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    inputs = {dim: [torch.randn(1, 1, LENGTH, dim) for _ in range(3)] for dim in DIMS}
    fastest = dict.fromkeys(DIMS, float("inf"))
    for _ in range(repeats + 1):
        for dim in DIMS:
            query, key, value = inputs[dim]
            begin = time.perf_counter()
            continuous_attention(query, key, value, backend="cpu")
            fastest[dim] = min(fastest[dim], time.perf_counter() - begin)
    nanoseconds = [fastest[dim] / LENGTH**2 * 1e9 for dim in DIMS]
    slope, at_zero = statistics.linear_regression(DIMS, nanoseconds)
    print(f"variant {cpu.chosen}, one thread: a score takes {at_zero:.3f} ns + D · {slope:.4f} ns\n")
    print(
        "| D | ns per score | by the line | elementwise | GFLOP/s of the products alone |\n|---:|---:|---:|---:|---:|"
    )
    for dim, measured in zip(DIMS, nanoseconds, strict=True):
        line = at_zero + slope * dim
        print(f"| {dim} | {measured:.3f} | {line:.3f} | {at_zero / line:.0%} | {4 / slope:.1f} |")


if __name__ == "__main__":
    main()
