"""What a time series task is: data, a model, and a measure of its errors; and how a trained model is tested.

Shape legend: N samples.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from continuous_attention.experiments.rules import RULES, use_rule

TEST_SEED = 20261130
"""Test data are drawn with this seed, whatever the seed of a run."""

TRIMMED = ("values", "times", "present", "observed")
"""What has a node in each place of its second dim."""


@dataclass(frozen=True)
class Samples(Dataset[dict[str, Tensor]]):
    """Tensors (N, …) by name, batches of which are what a model is called with."""

    tensors: dict[str, Tensor]

    def __len__(self) -> int:
        """Return N."""
        return len(next(iter(self.tensors.values())))

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return a batch, as torch's DataLoader asks for it, without the padding that all of it has."""
        batch = {name: x[torch.as_tensor(indices)] for name, x in self.tensors.items()}
        if "present" in batch:
            longest = int(batch["present"].sum(-1).max())
            batch |= {name: batch[name][:, :longest] for name in TRIMMED if name in batch}
        return batch

    def batches(self, size: int) -> list[dict[str, Tensor]]:
        """Return all samples in order."""
        return [self.__getitems__(range(i, min(i + size, len(self)))) for i in range(0, len(self), size)]


class Arm(NamedTuple):
    """One of the models that are compared."""

    rule: str
    data: str = ""
    """What is special about its data, in training and in the tests."""

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"{self.rule}, {self.data}" if self.data else self.rule


PLAIN = tuple(Arm(rule) for rule in RULES if rule != "gauss")
"""The arms of every task."""


def clumped_order(count: int, places: int, generator: torch.Generator, clumping: float = 1.0) -> Tensor:
    """Random numbers (count, places) whose largest k are a draw of k places without replacement.

    The density of the draw has a random sum of waves for its logarithm, so that places come in clumps; at `clumping` 0
    it is even.
    """
    place = torch.linspace(0, 1, places)
    density = torch.zeros(count, places)
    for wave in (1, 2, 3, 5):
        size, phase = torch.randn(count, 1, generator=generator), torch.rand(count, 1, generator=generator)
        density += clumping * size * torch.cos(math.pi * wave * place + 2 * math.pi * phase)
    # Log-densities plus Gumbel noise.
    return density - torch.log(-torch.log(torch.rand(count, places, generator=generator).clamp(1e-9, 1 - 1e-7)))


def parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(x.numel() for x in model.parameters() if x.requires_grad)


class Task(ABC):
    """Data and model of one task; the same object serves all arms and seeds."""

    title: ClassVar[str]
    measure: ClassVar[str]
    """What the errors are, with a unit; lower is better."""
    arms: ClassVar[tuple[Arm, ...]]
    tests: ClassVar[dict[str, str]]
    """What the columns of the table are, by name."""
    curve: ClassVar[tuple[str, ...]]
    """Tests that differ in the number of nodes alone, for the plot of the error against it."""
    same_lines: ClassVar[tuple[str, ...]] = ()
    """Tests that draw the same lines in other ways, so that the model's "outputs" should be those of the first one."""

    def build(self, arm: Arm, seed: int) -> nn.Module:
        """Return the freshly initialised model of an arm; all arms of a seed get the same weights."""
        torch.manual_seed(seed)
        model = self.model(arm)
        if arm.rule in RULES:  # others are models without attention
            use_rule(model, arm.rule)
        return model

    def model(self, arm: Arm) -> nn.Module:
        """Return a model that maps a batch to {"loss", "errors"}, and "outputs" where there are `same_lines`."""
        raise NotImplementedError

    @abstractmethod
    def training(self, arm: Arm, seed: int, count: int) -> Samples:
        """Return `count` training samples, the same for all arms of a seed but for what the arm says."""

    @abstractmethod
    def validation(self, arm: Arm) -> Samples:
        """Return the samples that the loss curve is measured on; no test data."""

    @abstractmethod
    def test(self, arm: Arm, name: str) -> Samples:
        """Return the samples of a test."""

    def baselines(self, name: str) -> dict[str, tuple[float, float]]:
        """Return the errors of what isn't trained, each with the nodes that it was given per sample."""
        return {}


class Tested(NamedTuple):
    """What a test of one model gave."""

    outputs: Tensor
    error: float
    nodes: float
    """Nodes per sample."""
    milliseconds: float
    """Time of the forward pass per sample."""
    kilobytes: float
    """What a training step keeps for its backward pass, per sample."""


@torch.no_grad()
def evaluate(model: nn.Module, samples: Samples, batch_size: int) -> Tested:
    """Test a model: the mean of its errors, and what it cost."""
    model.eval()
    batches = samples.batches(batch_size)
    few = samples.__getitems__(range(min(16, len(samples))))
    model(**few)  # the first call is slower
    started = time.perf_counter()
    found = [model(**batch) for batch in batches]
    seconds = time.perf_counter() - started
    errors = torch.cat([x["errors"] for x in found])
    outputs = torch.cat([x.get("outputs", x["errors"]) for x in found])
    nodes = [float(b["present"].sum()) if "present" in b else float(b["times"].numel()) for b in batches]
    kept = _bytes_kept(model, few) / len(few["times"])
    count = len(samples)
    return Tested(outputs, float(errors.mean()), sum(nodes) / count, 1000 * seconds / count, kept / 1024)


def _bytes_kept(model: nn.Module, batch: dict[str, Tensor]) -> int:
    """The storage that autograd keeps for the backward pass, parameters excepted."""
    storages = {x.untyped_storage().data_ptr(): 0 for x in (*model.parameters(), *batch.values())}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        storages.setdefault(storage.data_ptr(), storage.nbytes())
        return x

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        outcome = model(**batch)  # what it keeps must live while it is counted, or an address could come twice
    del outcome
    return sum(storages.values())
