from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import prose
from torch.nn.modules.module import register_module_forward_pre_hook


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "texts"
    folder.mkdir()
    paths = [folder / "one.txt", folder / "two.txt"]
    for seed, path in enumerate(paths):
        path.write_text(prose(seed), encoding="utf-8")
    return paths


@pytest.fixture
def batches() -> Iterator[list[torch.Tensor]]:
    """The token batches that models in training mode have seen."""
    seen: list[torch.Tensor] = []

    def see(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, torch.nn.Embedding) and module.training:
            seen.append(inputs[0].clone())

    with register_module_forward_pre_hook(see):
        yield seen
