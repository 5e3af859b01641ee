"""Polylines as paths: lengths, cuts that change no point of a line, resampling; and a model that reads a path.

Shape legend: N lines, L vertices, F features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from continuous_attention.nn import ContinuousMultiheadAttention


def arc_lengths(vertices: Tensor) -> Tensor:
    """The length of the line up to each vertex: (N, L, F) to (N, L)."""
    return F.pad(vertices.diff(dim=1).norm(dim=-1).cumsum(-1), (1, 0))


def cut_evenly(vertices: Tensor, pieces: int) -> Tensor:
    """Cut every segment into equal pieces."""
    shares = torch.arange(1, pieces, dtype=vertices.dtype) / pieces
    return cut_at(vertices, shares.expand(len(vertices), vertices.shape[1] - 1, -1))


def cut_at(vertices: Tensor, shares: Tensor) -> Tensor:
    """Cut the segments (N, L, F) at the given shares of them, (N, L − 1, cuts) between 0 and 1, in any order."""
    shares = F.pad(shares.sort(-1).values, (1, 0)).unsqueeze(-1)
    pieces = torch.lerp(vertices[:, :-1, None], vertices[:, 1:, None], shares)
    return torch.cat([pieces.flatten(1, 2), vertices[:, -1:]], dim=1)


def resample(vertices: Tensor, count: int) -> Tensor:
    """Points at equal distances along each line, (N, count, F)."""
    times = arc_lengths(vertices)
    wanted = times[:, -1:] * torch.linspace(0, 1, count)
    after = torch.searchsorted(times, wanted).clamp(1, times.shape[1] - 1)
    start, end = (times.gather(1, index) for index in (after - 1, after))
    share = ((wanted - start) / (end - start).clamp_min(1e-12)).clamp(0, 1).unsqueeze(-1)
    rows = torch.arange(len(vertices)).unsqueeze(-1)
    return torch.lerp(vertices[rows, after - 1], vertices[rows, after], share)


class PathReader(nn.Module):
    """Learned latents that attend along a path, and a network that turns them into outputs: (N, L, F) to (N, outputs).

    Keys and values are linear in the features of a vertex, so straight lines stay straight, and the exact rule sees no
    difference between a line and its cut form. Between two attentions along the path, the latents attend to each
    other by ordinary softmax.

    Args:
        features: F.
        width: of the latents.
        heads: of each attention.
        latents: their number.
        layers: attentions along the path.
        hidden: width of the network at the end.
        outputs: its outputs.
    """

    def __init__(
        self, features: int, *, width: int, heads: int, latents: int, layers: int, hidden: int, outputs: int
    ) -> None:
        super().__init__()
        # Wide, so that the first attention is sharper than an average.
        self.latents = nn.Parameter(3 * torch.randn(latents, width))
        self.along = nn.ModuleList(
            ContinuousMultiheadAttention(width, heads, kdim=features, vdim=features, boundary="none", batch_first=True)
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers - 1))
        self.mixing = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers - 1)
        )
        self.head = nn.Sequential(
            nn.Flatten(),
            nn.LayerNorm(latents * width),
            nn.Linear(latents * width, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, outputs),
        )

    def forward(self, values: Tensor, times: Tensor, present: Tensor | None = None) -> Tensor:
        """Read lines (N, L, F) whose vertices stand at `times` (N, L); `present` (N, L) is False for padding."""
        x = self.latents.expand(len(values), -1, -1)
        padding = None if present is None else ~present
        for i, attention in enumerate(self.along):
            query = self.norms[i - 1](x) if i else x
            read = attention(query, values, values, key_padding_mask=padding, times=times)[0]
            x = x + read if i else read
            if i < len(self.mixing):
                x = self.mixing[i](x)
        return self.head(x)
