"""Task `lorenz`: learn the operator from x(t) to (y(t), z(t)) of the Lorenz system, on irregular and on coarse grids.

The system is that of "Continuum Attention for Neural Operators" (Calvello, Kovachki, Levine, Stuart, 2024): σ = 10,
ρ = 28, β = 8/3, on 0 ≤ t ≤ 2, errors in relative L2. Coordinates are standardised.

Shape legend: N trajectories, L nodes.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from continuous_attention.experiments.task import PLAIN, TEST_SEED, Arm, Samples, Task, clumped_order
from continuous_attention.transformer import ContinuousTransformerEncoder

SIGMA, RHO, BETA = 10.0, 28.0, 8 / 3
STEP, STEPS = 0.005, 400
"""Of the finest grid, on which the system is solved; all other grids are parts of it."""
SETTLING = 5.0
"""Time from the random start to the attractor."""
MEAN, DEVIATION = (0.0, 0.0, 23.5), (7.9, 9.0, 8.6)
COARSE = 16
IRREGULAR_NODES = 48


def trajectories(count: int, generator: torch.Generator, steps: int = STEPS) -> Tensor:
    """Solutions on the finest grid by the classical Runge-Kutta method, (N, steps + 1, 3)."""
    start = torch.randn(count, 3, generator=generator, dtype=torch.float64) * 8
    state = start + torch.tensor([0.0, 0.0, 25.0], dtype=torch.float64)
    for _ in range(round(SETTLING / STEP)):
        state = _runge_kutta(state)
    states = [state]
    for _ in range(steps):
        states.append(_runge_kutta(states[-1]))
    mean, deviation = (torch.tensor(x, dtype=torch.float64) for x in (MEAN, DEVIATION))
    return ((torch.stack(states, dim=1) - mean) / deviation).float()


def _runge_kutta(state: Tensor) -> Tensor:
    k1 = _velocity(state)
    k2 = _velocity(state + STEP / 2 * k1)
    k3 = _velocity(state + STEP / 2 * k2)
    k4 = _velocity(state + STEP * k3)
    return state + STEP / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def _velocity(state: Tensor) -> Tensor:
    x, y, z = state.unbind(-1)
    return torch.stack([SIGMA * (y - x), x * (RHO - z) - y, x * y - BETA * z], dim=-1)


def clumped_grids(count: int, nodes: int, generator: torch.Generator, clumping: float = 1.0) -> Tensor:
    """Random parts of the finest grid, both ends included, (N, nodes) indices."""
    order = clumped_order(count, STEPS + 1, generator, clumping)
    order[:, [0, -1]] = math.inf
    return order.topk(nodes, dim=-1).indices.sort(-1).values


def even_grids(count: int, every: int) -> Tensor:
    """The same part of the finest grid for all, every so many nodes, (N, nodes) indices."""
    return torch.arange(0, STEPS + 1, every).expand(count, -1)


class Operator(nn.Module):
    """An encoder over the nodes of x(t), with a linear map to (y, z) at each; its loss is the relative L2 error."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.encoder = ContinuousTransformerEncoder(1, width, heads, layers, periods=(0.5, 4.0), feedforward=2 * width)
        self.head = nn.Linear(width, 2)

    def forward(self, values: Tensor, times: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Compare the prediction for x (N, L, 1) with the target (N, L, 2)."""
        prediction = self.head(self.encoder(values, times))
        errors = ((prediction - target).norm(dim=1) / target.norm(dim=1)).mean(-1)
        return {"loss": errors.mean(), "errors": errors}


class Lorenz(Task):
    """See the module."""

    title = "Lorenz 63: y(t) and z(t) from x(t)"
    measure = "relative L2 error"
    arms = (*PLAIN, *(Arm(arm.rule, "coarse") for arm in PLAIN))
    tests: ClassVar[dict[str, str]] = {
        **{f"dt {STEP * n:g}": f"every {n * STEP:g} from 0 to 2" for n in (1, 2, 4, 8, 16)},
        "half dense": "every 0.01 up to 1, then every 0.04",
        "even 101": "101 nodes of the finest grid at random",
        "clumped 200": "200 nodes, clumped at random",
        "clumped 64": "64 nodes, clumped at random",
        "clumped 32": "32 nodes, clumped at random",
    }

    curve = tuple(name for name in tests if name.startswith("dt"))

    def __init__(self, test_samples: int, *, width: int, heads: int, layers: int, training_trajectories: int) -> None:
        self.sizes = width, heads, layers
        self.training_trajectories = trajectories(training_trajectories, torch.Generator().manual_seed(TEST_SEED + 1))
        generator = torch.Generator().manual_seed(TEST_SEED)
        self.test_trajectories = trajectories(test_samples, generator)
        self.grids = {name: self._grid(name, test_samples, generator) for name in self.tests}
        self.validation_trajectories = trajectories(64, torch.Generator().manual_seed(TEST_SEED + 2))
        self.validation_grids = clumped_grids(64, IRREGULAR_NODES, torch.Generator().manual_seed(TEST_SEED + 3))

    @staticmethod
    def _grid(name: str, count: int, generator: torch.Generator) -> Tensor:
        kind, _, size = name.partition(" ")
        if name == "half dense":
            return torch.cat([torch.arange(0, 200, 2), torch.arange(200, STEPS + 1, 8)]).expand(count, -1)
        if kind == "dt":
            return even_grids(count, round(float(size) / STEP))
        return clumped_grids(count, int(size), generator, clumping=float(kind == "clumped"))

    def model(self, arm: Arm) -> nn.Module:
        """See `Task`."""
        return Operator(*self.sizes)

    def training(self, arm: Arm, seed: int, count: int) -> Samples:
        """See `Task`."""
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(self.training_trajectories), (count,), generator=generator)
        grids = clumped_grids(count, IRREGULAR_NODES, generator)
        if arm.data == "coarse":
            grids = even_grids(count, COARSE)
        return _sampled(self.training_trajectories, grids, chosen)

    def validation(self, arm: Arm) -> Samples:
        """See `Task`."""
        grids = self.validation_grids
        if arm.data == "coarse":
            grids = even_grids(len(grids), COARSE)
        return _sampled(self.validation_trajectories, grids)

    def test(self, arm: Arm, name: str) -> Samples:
        """See `Task`."""
        return _sampled(self.test_trajectories, self.grids[name])


def _sampled(states: Tensor, grids: Tensor, chosen: Tensor | None = None) -> Samples:
    """Trajectories at the nodes of grids (N, L); `chosen` (N,) are their rows."""
    rows = torch.arange(len(grids)) if chosen is None else chosen
    nodes = states[rows.unsqueeze(-1), grids]
    return Samples({"values": nodes[..., :1], "times": STEP * grids.float(), "target": nodes[..., 1:]})
