"""How many nodes of a smooth, oversampled stream attention needs: error against the fraction of nodes that are kept.

    python benchmarks/simplify.py [--out FOLDER]

The streams are trajectories of the Lorenz system (1,601 nodes, 0.005 apart) and days of blood glucose (a reading every
5 minutes, from bokeh_sampledata); keys and values are random linear maps of them, so that the scores of a query have a
standard deviation of about 2. `simplify` drops nodes at several tolerances, and what is left answers the queries by
the integral, by its fourth-order form, by softmax with trapezoid log-weights, and by softmax that knows no times; each
is compared with its own answer from all nodes. Beside it, every n-th node is kept. Errors are relative to the deviation
of the full answers over the queries. Writes simplify.csv and simplify.png.
"""

import argparse
import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from continuous_attention import Path as Nodes
from continuous_attention import continuous_attention, simplify
from continuous_attention.experiments import report
from continuous_attention.experiments.lorenz import STEP, trajectories
from continuous_attention.experiments.readings import Glucose

TOLERANCES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.4)
STRIDES = (2, 4, 8, 16, 32)
RULES = {"exact": "#D55E00", "fourth order": "#CC79A7", "trapezoid": "#0072B2", "softmax": "#000000"}
"""With the colours of their curves."""
HEADS, QUERIES, DIM, SHARPNESS = 4, 64, 16, 2.0
DAYS, DAY = 16, 24.0


class Row(NamedTuple):
    """One line of simplify.csv."""

    stream: str
    thinned_by: str
    """"simplify" or "every n-th"."""
    setting: float
    kept: float
    rule: str
    error: float


def streams() -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name, values (B, L, F), standardised, and times (L,) or (B, L)."""
    states = trajectories(8, torch.Generator().manual_seed(0), steps=1600)
    yield "Lorenz, 1,601 nodes", states, STEP * torch.arange(1601, dtype=torch.float64)
    ((times, values, _),) = Glucose(1, width=8, layers=1).series["test"]
    count = round(DAY * 12) + 1
    days = [values[i : i + count] for i in range(0, count * DAYS, count)]
    hours = [times[i : i + count] for i in range(0, count * DAYS, count)]
    yield f"glucose, {count} readings", torch.stack(days), torch.stack(hours)


def answers(query: Tensor, nodes: Nodes) -> dict[str, Any]:
    """What each rule makes of the nodes, (B, H, Q, D)."""
    how: dict[str, Any] = {"times": nodes.times, "boundary": "none"}
    asked = query, nodes.key, nodes.value, nodes.mask
    return {
        "exact": continuous_attention(*asked, **how),
        "fourth order": continuous_attention(*asked, **how, interpolation="fourth_order"),
        "trapezoid": continuous_attention(*asked, **how, rule="trapezoid"),
        "softmax": continuous_attention(*asked, rule="rectangle"),
    }


def measure() -> Iterator[Row]:
    """All rows."""
    for name, values, times in streams():
        generator = torch.Generator().manual_seed(1)
        maps = torch.randn(2, HEADS, values.shape[-1], DIM, generator=generator) / values.shape[-1] ** 0.5
        key, value = (values.float().unsqueeze(1) @ x for x in maps)
        query = SHARPNESS * torch.randn(len(values), HEADS, QUERIES, DIM, generator=generator)
        length = key.shape[2]
        full = answers(query, simplify(key, value, times, 0.0))
        thinned = [("simplify", x, simplify(key, value, times, x)) for x in TOLERANCES]
        for stride in STRIDES:
            index = torch.cat([torch.arange(0, length - 1, stride), torch.tensor([length - 1])])
            few = simplify(key[:, :, index], value[:, :, index], times[..., index], 0.0)
            thinned.append(("every n-th", stride, few))
        for how, setting, nodes in thinned:
            kept = float(nodes.node_count.float().mean()) / length
            for rule, answer in answers(query, nodes).items():
                spread = (full[rule] - full[rule].mean(2, keepdim=True)).square().mean().sqrt()
                error = float((answer - full[rule]).square().mean().sqrt() / spread)
                yield Row(name, how, setting, kept, rule, error)


def plot(path: Path, rows: list[Row]) -> None:
    """Error against the fraction of nodes kept, a panel for each stream."""
    names = list(dict.fromkeys(row.stream for row in rows))
    figure, panels = report.new_figure(11, 4.6, panels=len(names))
    for axes, name in zip(panels, names, strict=True):
        for rule, colour in RULES.items():
            for how, line in (("simplify", "-o"), ("every n-th", "--x")):
                here = sorted((x.kept, x.error) for x in rows if (x.stream, x.rule, x.thinned_by) == (name, rule, how))
                axes.plot(*zip(*here, strict=True), line, color=colour, label=f"{rule}, {how}", markersize=4)
        axes.set(title=name, xlabel="nodes kept", ylabel="error, of the answers' deviation", xscale="log", yscale="log")
        report.label_plainly(axes.xaxis)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    report.save_figure(path, figure)


def main() -> None:
    """Measure, print a table, write the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/simplify"), help="folder (default runs/simplify)")
    out = parser.parse_args().out
    rows = list(measure())
    out.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([Row._fields, *rows])
    report.replace(out / "simplify.csv", text.getvalue().encode())
    plot(out / "simplify.png", rows)
    header = ["stream", "thinned by", "kept", *RULES]
    table: dict[tuple[str, str, float], list[str]] = {}
    for row in rows:
        place = (row.stream, row.thinned_by, row.setting)
        table.setdefault(place, [row.stream, f"{row.thinned_by} {row.setting:g}", f"{row.kept:.3f}"]).append(
            f"{row.error:.2e}"
        )
    print(report.markdown_table(header, list(table.values())))
    print(f"\n{out / 'simplify.csv'}\n{out / 'simplify.png'}")


if __name__ == "__main__":
    main()
