"""Task `glyphs`: read a letter from its outline, in fonts that were never seen, however the outline's lines are cut.

Fonts draw letters with straight lines and Bézier curves; flattened, each outline is a few closed polylines. They form
one path whose contours aren't joined: the first vertex of a contour stands at the time of the last one before, so that
nothing is integrated between them. A contour's first vertex stands at its end again.

Shape legend: N letters, L vertices.
"""

from __future__ import annotations

import math
import string
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from continuous_attention import simplify
from continuous_attention.experiments.corpus import package_folder
from continuous_attention.experiments.lines import PathReader, cut_at, cut_evenly
from continuous_attention.experiments.report import UserError
from continuous_attention.experiments.task import PLAIN, TEST_SEED, Arm, Samples, Task

if TYPE_CHECKING:
    import numpy as np

    Contour = np.ndarray[Any, np.dtype[np.float64]]

LETTERS = string.digits + string.ascii_uppercase + string.ascii_lowercase
FONT_PACKAGES = ("font_hanken_grotesk", "font_roboto", "font_source_sans_pro")
"""Python packages with fonts, which are used where they are installed."""
OMITTED = ("cmex10", "cmmi10", "cmsy10", "Last Resort High-Efficiency")
"""Fonts that have all letters by name but draw something else."""
RELATED = {"cm": "Computer Modern", "DejaVu": "DejaVu"}
"""Families that share letters count as one, by how their names begin."""
TOLERANCE, FINE, FINEST = 0.1, 0.02, 0.005
"""Farthest that a flattened curve is from the curve; an H is 2 high."""
DENSE = 0.2
"""Longest piece of a densified outline."""
MERGED = 1e-4
"""Vertices this near to a straight line are merged away."""


# ---- Fonts


def find_fonts(folders: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the font files that have all letters, by family: of matplotlib, FONT_PACKAGES and the folders."""
    from matplotlib import get_data_path
    from matplotlib.ft2font import FT2Font

    packages = [folder for name in FONT_PACKAGES if (folder := package_folder(name))]
    families: dict[str, dict[str, Path]] = defaultdict(dict)
    for folder in (Path(get_data_path()) / "fonts" / "ttf", *packages, *folders):
        files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".ttf", ".otf"))
        if not files:
            raise UserError(f"no fonts (.ttf or .otf) in {folder}")
        for file in files:
            try:
                font = FT2Font(str(file))
                complete = all(font.get_char_index(ord(letter)) for letter in LETTERS)
            except RuntimeError:
                continue  # not a font that can be read
            if complete and font.family_name not in OMITTED:
                family = next((y for x, y in RELATED.items() if font.family_name.startswith(x)), font.family_name)
                families[family].setdefault(font.postscript_name, file)
    return {family: list(families[family].values()) for family in sorted(families)}


def outlines(file: Path, tolerance: float) -> list[list[Contour]]:
    """Return the flattened contours of all letters, closed, in units in which an H reaches from −1 to 1."""
    from matplotlib.ft2font import FT2Font

    font = FT2Font(str(file))
    font.set_size(1000, 72)
    height = _contours(font, "H", math.inf)
    top, bottom = max(c[:, 1].max() for c in height), min(c[:, 1].min() for c in height)
    scale = 2 / (top - bottom)
    result = []
    for letter in LETTERS:
        contours = _contours(font, letter, tolerance / scale)
        left, right = min(c[:, 0].min() for c in contours), max(c[:, 0].max() for c in contours)
        result.append([(c - [(left + right) / 2, (top + bottom) / 2]) * scale for c in contours])
    return result


def _contours(font: Any, letter: str, tolerance: float) -> list[Contour]:
    import numpy as np
    from matplotlib.ft2font import LoadFlags

    font.load_char(ord(letter), flags=LoadFlags.NO_HINTING)
    vertices, codes = font.get_path()
    contours: list[list[Contour]] = []
    i = 0
    while i < len(codes):
        # Codes: 1 move, 2 line, 3 and 4 Bézier curves of degree 2 and 3, 79 close.
        degree = {1: 0, 2: 1, 3: 2, 4: 3, 79: 1}[int(codes[i])]
        if degree == 0:
            contours.append([vertices[i]])
            i += 1
            continue
        here = contours[-1]
        if degree > 1:
            here.extend(_flattened(np.array([here[-1], *vertices[i : i + degree]]), tolerance))
        else:
            here.append(here[0] if codes[i] == 79 else vertices[i])
        i += degree
    closed = [np.array([*c, c[0]]) for c in contours]
    moved = [np.vstack([c[:1], c[1:][np.abs(np.diff(c, axis=0)).max(1) > 0]]) for c in closed]
    return [c for c in moved if len(c) > 2]


def _flattened(control: Contour, tolerance: float) -> Contour:
    """Points along a Bézier curve, without its first one: a chord deviates by at most |second derivative| / 8."""
    import numpy as np

    degree = len(control) - 1
    bend = degree * (degree - 1) * np.linalg.norm(np.diff(control, 2, axis=0), axis=1).max(initial=0.0)
    pieces = max(1, math.ceil(math.sqrt(bend / 8 / tolerance)))
    share = np.arange(1, pieces + 1)[:, None] / pieces
    weights = [math.comb(degree, i) * share**i * (1 - share) ** (degree - i) for i in range(degree + 1)]
    return np.hstack(weights) @ control


# ---- Outlines in batches


@dataclass(frozen=True)
class Outlines:
    """Letters as padded paths."""

    vertices: Tensor
    """(N, L, 2)"""
    joined: Tensor
    """Boolean (N, L): there is a line from the vertex before."""
    present: Tensor
    """Boolean (N, L)"""

    def at(self, index: Tensor) -> Outlines:
        """Some of them."""
        return Outlines(self.vertices[index], self.joined[index], self.present[index])

    @property
    def times(self) -> Tensor:
        """Lengths along the path, (N, L)."""
        steps = self.vertices.diff(dim=1).norm(dim=-1) * self.joined[:, 1:]
        return F.pad(steps.cumsum(-1), (1, 0))


def padded(letters: Sequence[Sequence[Tensor]]) -> Outlines:
    """Letters, each a list of contours (L, 2), as a batch."""
    joined = [torch.cat([torch.arange(len(c)) > 0 for c in contours]) for contours in letters]
    vertices = [torch.cat(list(contours)) for contours in letters]
    present = [torch.ones(len(x), dtype=torch.bool) for x in vertices]
    batch = (nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (vertices, joined, present))
    return Outlines(*batch)


def merged(outlines: Outlines) -> Outlines:
    """Without the vertices that lie on a straight line between others."""
    nodes = outlines.vertices.unsqueeze(1)
    path = simplify(nodes, nodes, outlines.times, MERGED, present=outlines.present)
    # Two nodes at one time are two contours, or the padding.
    joined = F.pad(path.times.diff(dim=-1) > 0, (1, 0))
    return Outlines(path.key[:, 0], joined, path.present)


def _cut_letters(letters: Sequence[Sequence[Tensor]], test: str) -> Sequence[Sequence[Tensor]]:
    """The letters with their lines cut as a test says."""
    cut = {"cut ×4": _evenly, "unevenly ×4": _unevenly, "half ×8": _half}.get(test)
    generator = torch.Generator().manual_seed(TEST_SEED)
    return letters if cut is None else [[cut(contour, generator) for contour in contours] for contours in letters]


def _evenly(contour: Tensor, generator: torch.Generator) -> Tensor:
    return cut_evenly(contour[None], 4)[0]


def _unevenly(contour: Tensor, generator: torch.Generator) -> Tensor:
    return cut_at(contour[None], torch.rand(1, len(contour) - 1, 3, generator=generator) ** 3)[0]


def _half(contour: Tensor, generator: torch.Generator) -> Tensor:
    segments = len(contour) - 1
    pieces = cut_at(contour[None], torch.rand(1, segments, 7, generator=generator))[0]
    chosen = torch.rand(segments, generator=generator) < 0.5
    cuts = F.pad(chosen[:, None].expand(-1, 7), (1, 0), value=True).flatten()
    return pieces[F.pad(cuts, (0, 1), value=True)]


def _densified(contour: Tensor) -> Tensor:
    pieces = (contour.diff(dim=0).norm(dim=-1) / DENSE).ceil().clamp_min(1).long()
    start = torch.repeat_interleave(torch.arange(len(pieces)), pieces)
    place = torch.arange(int(pieces.sum())) - (pieces.cumsum(0) - pieces)[start]
    share = (place / pieces[start]).unsqueeze(-1)
    return torch.cat([torch.lerp(contour[start], contour[start + 1], share), contour[-1:]])


# ---- The task


@dataclass(frozen=True)
class Letters(Samples):
    """Training letters, each turned, sheared and moved a little when it is asked for."""

    outlines: Outlines

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """See `Samples`."""
        chosen, turned, moved = (x[torch.as_tensor(indices)] for x in self.tensors.values())
        outlines = self.outlines.at(chosen)
        changed = Outlines(outlines.vertices @ turned + moved, outlines.joined, outlines.present)
        return _samples(changed, chosen % len(LETTERS)).__getitems__(range(len(indices)))


def _training(outlines: Outlines, chosen: Tensor, generator: torch.Generator) -> Letters:
    count = len(chosen)
    turned = torch.eye(2) + 0.08 * torch.randn(count, 2, 2, generator=generator)
    moved = 0.05 * torch.randn(count, 1, 2, generator=generator)
    return Letters({"chosen": chosen, "turned": turned, "moved": moved}, outlines)


def _samples(outlines: Outlines, label: Tensor) -> Samples:
    return Samples({"values": outlines.vertices, "times": outlines.times, "present": outlines.present, "target": label})


class Classifier(nn.Module):
    """A path reader with two attention layers along the outline, and cross-entropy; errors are wrong letters in %."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = PathReader(2, width=48, heads=4, latents=8, layers=2, hidden=128, outputs=len(LETTERS))

    def forward(self, values: Tensor, times: Tensor, present: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Read outlines (N, L, 2); the target is a letter's index (N,)."""
        logits = self.reader(values, times, present)
        loss = F.cross_entropy(logits, target, label_smoothing=0.05)
        return {"loss": loss, "errors": 100.0 * (logits.argmax(-1) != target), "outputs": logits}


class Glyphs(Task):
    """See the module."""

    title = "Letters from their outlines, in unseen fonts"
    measure = "wrong letters, %"
    arms = (
        *PLAIN,
        Arm("gauss"),
        Arm("trapezoid", "densified"),
        Arm("trapezoid", "merged"),
    )
    tests: ClassVar[dict[str, str]] = {
        "unchanged": "outlines flattened as in training",
        "cut ×4": "each line cut into 4 equal pieces",
        "unevenly ×4": "each line cut into 4 pieces at random, most of them short",
        "half ×8": "half of the lines cut into 8 pieces at random",
        "finer": f"curves flattened to {FINE:g} of half an H's height instead of {TOLERANCE:g}",
        "finest": f"curves flattened to {FINEST:g}",
    }

    curve = ("unchanged", "cut ×4", "half ×8")
    same_lines = ("unchanged", "cut ×4", "unevenly ×4", "half ×8")

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self.fonts = find_fonts(folders)
        families = list(self.fonts)
        self.unseen = families[2::3]
        seen = self._letters([family for family in families if family not in self.unseen], TOLERANCE)
        flat = {tolerance: self._letters(self.unseen, tolerance) for tolerance in (TOLERANCE, FINE, FINEST)}
        unseen = {
            name: _cut_letters(flat[{"finer": FINE, "finest": FINEST}.get(name, TOLERANCE)], name)
            for name in self.tests
        }
        kinds = dict.fromkeys(arm.data for arm in self.arms)
        self.seen = {kind: _prepared(kind, seen) for kind in kinds}
        self.test_samples = {
            (kind, name): _samples(_prepared(kind, letters), _labels(len(letters)))
            for kind in kinds
            for name, letters in unseen.items()
        }

    def _letters(self, families: Sequence[str], tolerance: float) -> list[list[Tensor]]:
        return [
            [torch.from_numpy(contour).float() for contour in contours]
            for family in families
            for file in self.fonts[family]
            for contours in outlines(file, tolerance)
        ]

    def model(self, arm: Arm) -> nn.Module:
        """See `Task`."""
        return Classifier()

    def training(self, arm: Arm, seed: int, count: int) -> Samples:
        """See `Task`."""
        generator = torch.Generator().manual_seed(seed)
        outlines = self.seen[arm.data]
        chosen = torch.randint(len(outlines.vertices), (count,), generator=generator)
        return _training(outlines, chosen, generator)

    def validation(self, arm: Arm) -> Samples:
        """See `Task`."""
        generator = torch.Generator().manual_seed(TEST_SEED + 1)
        outlines = self.seen[arm.data]
        return _training(outlines, torch.randperm(len(outlines.vertices), generator=generator)[:496], generator)

    def test(self, arm: Arm, name: str) -> Samples:
        """See `Task`."""
        return self.test_samples[arm.data, name]


def _labels(count: int) -> Tensor:
    """Letters come font by font."""
    return torch.arange(count) % len(LETTERS)


def _prepared(kind: str, letters: Sequence[Sequence[Tensor]]) -> Outlines:
    """The letters as the arms with such data see them."""
    if kind == "densified":
        letters = [[_densified(contour) for contour in contours] for contours in letters]
    outlines = padded(letters)
    return merged(outlines) if kind == "merged" else outlines
