"""Three ways to start the threads of the CPU kernels, measured beside torch's own operators.

    python benchmarks/threads.py [--repeats N] [--rounds N] [--threads N]

The kernels ask the process for GOMP_parallel and find the one of the OpenMP runtime that torch has loaded. Here a
small library with that name is preloaded (threads.cpp, compiled with c++), which gives the kernels that runtime, new
threads for every call, or a second copy of the runtime. Each way runs in processes of its own, in turn; there,
forward calls of continuous attention are timed back to back and between calls of torch's softmax attention.
Linux, a torch that uses GNU's OpenMP, and a C++ compiler are needed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from continuous_attention import continuous_attention

WAYS = ("torch's pool", "new threads per call", "a second runtime")
SHAPES = ((1, 8, 128, 64), (1, 8, 512, 64), (1, 8, 2048, 64))
LONGEST = 2048


def measure(repeats: int, threads: int) -> list[list[list[float]]]:
    """The seconds of every call, by shape."""
    torch.set_num_threads(threads)
    return [of_shape(shape, repeats) for shape in SHAPES]


def of_shape(shape: tuple[int, ...], repeats: int) -> list[list[float]]:
    """Seconds: ours back to back, ours between softmax calls, and these softmax calls."""
    q, k, v = (torch.randn(shape) for _ in range(3))

    def ours() -> float:
        begin = time.perf_counter()
        continuous_attention(q, k, v, backend="cpu")
        return time.perf_counter() - begin

    def softmax() -> float:
        begin = time.perf_counter()
        F.scaled_dot_product_attention(q, k, v)
        return time.perf_counter() - begin

    count = repeats * max(1, LONGEST // shape[2])
    alone = [ours() for _ in range(count + 2)]
    pairs = [(softmax(), ours()) for _ in range(count + 2)]
    # The first ones warm up.
    return [alone[2:], [own for _, own in pairs[2:]], [other for other, _ in pairs[2:]]]


def runtime_of_torch() -> Path:
    """The file of the OpenMP runtime that torch loads."""
    code = "import torch; print(*{line.split()[-1] for line in open('/proc/self/maps') if 'libgomp' in line})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    if len(found) != 1:
        sys.exit(f"this torch doesn't use GNU's OpenMP runtime once: {found}")
    return Path(found[0])


def main() -> None:
    """Start the processes, and print their figures as one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=8, help="calls in a process at the longest shape (default 8)")
    parser.add_argument("--rounds", type=int, default=5, help="processes for each way (default 5)")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="default all cores")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # for the processes that this one starts
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options.repeats, options.threads)))
        return

    runtime = runtime_of_torch()
    figures = {way: [[[], [], []] for _ in SHAPES] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        library, copy = f"{folder}/threads.so", f"{folder}/second.so"
        shutil.copy(runtime, copy)
        source = str(Path(__file__).with_suffix(".cpp"))
        subprocess.run(["c++", "-O2", "-shared", "-fPIC", "-pthread", source, "-o", library, "-ldl"], check=True)
        for _ in range(options.rounds):
            for way in WAYS:
                child = subprocess.run(
                    [sys.executable, *sys.argv, "--way", way],
                    env={
                        **os.environ,
                        "LD_PRELOAD": library,
                        "CSA_WAY": way,
                        "CSA_OPENMP_OF_TORCH": str(runtime),
                        "CSA_OPENMP_COPY": copy,
                    },
                    stdout=subprocess.PIPE,
                    check=True,
                )
                for of_shape, new in zip(figures[way], json.loads(child.stdout), strict=True):
                    for times, more in zip(of_shape, new, strict=True):
                        times += more

    print(f"milliseconds, median (lowest) of {options.rounds} processes each, {options.threads} threads\n")
    print("| shape | threads | back to back | between softmax calls | these softmax calls |\n|---|---|---:|---:|---:|")
    for i, shape in enumerate(SHAPES):
        for way in WAYS:
            cells = [f"{median(times) * 1e3:.2f} ({min(times) * 1e3:.2f})" for times in figures[way][i]]
            print(f"| {shape} | {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
