"""Task `polyline`: integrals of functions along random polylines, from their vertices, with one attention layer.

The target is (1/ℓ) ∫ f(x(s)) ds along the line, for eight functions f of the plane: four Gaussian bumps, u², uv, v²
and sin 3u. A polyline is exactly what the operator integrates over, so cutting its segments must not change any answer.

Shape legend: N samples, L nodes.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from continuous_attention.experiments.lines import PathReader, arc_lengths, cut_at, cut_evenly, resample
from continuous_attention.experiments.task import PLAIN, TEST_SEED, Arm, Samples, Task

VERTICES = 8
BUMPS = ((0.7, 0.2), (-0.6, 0.5), (0.1, -0.8), (-0.3, -0.4))
BUMP_WIDTH = 0.35
SPREAD = 0.9
RESAMPLED = 57
"""Points at equal distances, which the last arm sees instead of the vertices."""


def means(start: Tensor, end: Tensor) -> Tensor:
    """The mean of each function over straight lines between points (…, 2), in closed form; (…, 8)."""
    along = end - start
    length = along.norm(dim=-1, keepdim=True).clamp_min(1e-9)
    from_center = start.unsqueeze(-2) - torch.tensor(BUMPS, dtype=start.dtype)
    # A Gaussian bump along a line is a Gaussian in the distance from the foot of the perpendicular.
    foot = (from_center * along.unsqueeze(-2)).sum(-1) / length
    beside = from_center.square().sum(-1) - foot.square()
    unit = BUMP_WIDTH * math.sqrt(2)
    span = torch.erf((foot + length) / unit) - torch.erf(foot / unit)
    bumps = 3 * torch.exp(-beside / unit**2) * span * unit * math.sqrt(math.pi) / (2 * length)
    (u, v), (du, dv) = ((start + end) / 2).unbind(-1), (along / 2).unbind(-1)
    others = (u * u + du * du / 3, u * v + du * dv / 3, v * v + dv * dv / 3)
    wave = torch.sin(3 * u) * torch.sinc(3 * du / math.pi)
    return torch.cat([bumps, torch.stack([*others, wave], dim=-1)], dim=-1)


def polylines(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Vertices (N, 8, 2) and the mean of each function along the line (N, 8)."""
    vertices = SPREAD * torch.randn(count, VERTICES, 2, generator=generator)
    lengths = vertices.diff(dim=1).norm(dim=-1, keepdim=True)
    # In float64: the bumps are differences of almost equal numbers far from their centre.
    of_segments = means(vertices[:, :-1].double(), vertices[:, 1:].double()).float()
    return vertices, (of_segments * lengths).sum(1) / lengths.sum(1)


class LineIntegrals(nn.Module):
    """A path reader with one attention layer, and the mean square error of standardised targets."""

    def __init__(self, deviation: Tensor) -> None:
        super().__init__()
        self.reader = PathReader(2, width=32, heads=4, latents=12, layers=1, hidden=128, outputs=8)
        self.register_buffer("deviation", deviation)

    def forward(self, values: Tensor, times: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Compare the prediction for vertices (N, L, 2) with the target (N, 8)."""
        outputs = self.reader(values, times)
        errors = ((outputs - target) / self.deviation).square().mean(-1)
        return {"loss": errors.mean(), "errors": errors, "outputs": outputs}


class Polyline(Task):
    """See the module."""

    title = "Line integrals along random polylines of 8 vertices"
    measure = "mean square error over the targets' variance"
    arms = (
        *PLAIN,
        Arm("trapezoid", f"resampled to {RESAMPLED}"),
    )
    tests: ClassVar[dict[str, str]] = {
        "8 vertices": "the polylines as they are",
        "×2": "each segment cut into 2 equal pieces",
        "×8": "each segment cut into 8 equal pieces",
        "random ×4": "each segment cut into 4 pieces at random, most of them short",
    }

    curve = same_lines = ("8 vertices", "×2", "×8", "random ×4")

    def __init__(self, test_samples: int) -> None:
        generator = torch.Generator().manual_seed(TEST_SEED)
        self.test_vertices, self.test_targets = polylines(test_samples, generator)
        self.shares = torch.rand(test_samples, VERTICES - 1, 3, generator=generator) ** 3
        self.validation_data = polylines(512, torch.Generator().manual_seed(TEST_SEED + 1))
        self.deviation = polylines(4096, torch.Generator().manual_seed(TEST_SEED + 2))[1].std(0)

    def model(self, arm: Arm) -> nn.Module:
        """See `Task`."""
        return LineIntegrals(self.deviation)

    def training(self, arm: Arm, seed: int, count: int) -> Samples:
        """See `Task`."""
        return self._samples(arm, *polylines(count, torch.Generator().manual_seed(seed)))

    def validation(self, arm: Arm) -> Samples:
        """See `Task`."""
        return self._samples(arm, *self.validation_data)

    def test(self, arm: Arm, name: str) -> Samples:
        """See `Task`."""
        vertices = {
            "8 vertices": lambda: self.test_vertices,
            "×2": lambda: cut_evenly(self.test_vertices, 2),
            "×8": lambda: cut_evenly(self.test_vertices, 8),
            "random ×4": lambda: cut_at(self.test_vertices, self.shares),
        }[name]()
        return self._samples(arm, vertices, self.test_targets)

    @staticmethod
    def _samples(arm: Arm, vertices: Tensor, target: Tensor) -> Samples:
        if arm.data:
            vertices = resample(vertices, RESAMPLED)
        return Samples({"values": vertices, "times": arc_lengths(vertices), "target": target})
