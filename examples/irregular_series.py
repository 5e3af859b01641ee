# %% [markdown]
# # An irregular series, read at any time
#
# Two sensors are read at odd moments, and often only one of them. A small model reads what there is, as a path through
# time, and answers for every minute of two days. Run it as a script, or cell by cell as a notebook (VS Code, Spyder and
# Jupyter with jupytext know this format). It takes one to three minutes on two CPU cores, and writes
# irregular_series.png.
#
#     pip install -c constraints.txt -e '.[experiments]' && python examples/irregular_series.py

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

from continuous_attention import ContinuousTransformerDecoder, ContinuousTransformerEncoder, to_times

torch.manual_seed(0)

# %% [markdown]
# ## Data
#
# A daily wave whose phase and height change from sample to sample; the second sensor lags behind the first. Readings
# come as dates, 12 to 32 in two days, and `present` says which places of the padded batch hold one. `observed` says
# which of the two sensors was read. Your own data want the same layout:
#
# | | shape | |
# |---|---|---|
# | values | (B, L, F) | anything where nothing was observed |
# | times | (B, L) | any unit, rising, own grid for each sample |
# | observed | (B, L, F) | True = read |
# | present | (B, L) | True = a reading, False = padding |

# %%
# Lists of different lengths become such tensors like this; None is what wasn't read, or isn't there at all.
own = [
    [("2026-03-01 08:00", 0.3, None), ("2026-03-01 08:40", 0.5, -0.2), ("2026-03-01 21:15", None, 0.1)],
    [("2026-03-02 06:00", 0.1, 0.4), ("2026-03-02 06:05", 0.2, None)],
]
longest = max(map(len, own))
rows = [row + [(None, None, None)] * (longest - len(row)) for row in own]
own_times = to_times([[date for date, *_ in row] for row in rows], unit="h", origin="2026-03-01")
own_values = torch.tensor([[[np.nan if x is None else x for x in read] for _, *read in row] for row in rows])
own_observed, own_present = ~own_values.isnan(), ~own_times.isnan()
print("hours since 1 March:", own_times.tolist(), "present:", own_present.tolist())

# %% [markdown]
# The data of this example are made up, so that the truth is known.

# %%
START = np.datetime64("2026-03-01T00:00")
MINUTES = 2 * 24 * 60
LONGEST = 32


def sensors(hours: torch.Tensor, phase: torch.Tensor, height: torch.Tensor) -> torch.Tensor:
    """The truth: both sensors at the given hours, (B, L, 2)."""
    first = height * torch.sin(2 * torch.pi * (hours - phase) / 24) + 0.3 * torch.sin(
        2 * torch.pi * (hours - phase) / 5
    )
    second = 0.7 * height * torch.sin(2 * torch.pi * (hours - phase - 3) / 24)
    return torch.stack([first, second], dim=-1)


def batch(size: int) -> dict[str, torch.Tensor]:
    """Random samples: a history, and 16 other moments to answer for."""
    phase, height = 24 * torch.rand(size, 1), 0.5 + torch.rand(size, 1)
    minutes = torch.rand(size, MINUTES).argsort(-1)[:, : LONGEST + 16]  # all different
    read, asked = minutes[:, :LONGEST].sort(-1).values, minutes[:, LONGEST:].sort(-1).values
    times, query_times = (
        to_times(START + m.numpy().astype("timedelta64[m]"), unit="h", origin=START) for m in (read, asked)
    )
    values = sensors(times.float(), phase, height) + 0.05 * torch.randn(size, LONGEST, 2)
    return {
        "values": values,
        "times": times,
        "observed": torch.rand(size, LONGEST, 2) < 0.7,
        "present": torch.arange(LONGEST) < torch.randint(12, LONGEST + 1, (size, 1)),
        "query_times": query_times,
        "target": sensors(query_times.float(), phase, height),
    }


# %% [markdown]
# ## Model
#
# The encoder makes one vector per reading, the decoder reads the path through them at the query times. `periods` are
# those of the rotary embedding: from below the usual gap between readings to above the length of a series, in hours.


# %%
class Interpolator(nn.Module):
    """Both sensors at any times."""

    def __init__(self) -> None:
        super().__init__()
        periods = (1.0, 100.0)
        self.encoder = ContinuousTransformerEncoder(2, 48, 4, 2, periods=periods, feedforward=96)
        self.decoder = ContinuousTransformerDecoder(48, 4, 1, periods=periods, self_attention=False, feedforward=96)
        self.head = nn.Linear(48, 2)

    def forward(
        self,
        values: torch.Tensor,
        times: torch.Tensor,
        observed: torch.Tensor,
        present: torch.Tensor,
        query_times: torch.Tensor,
    ) -> torch.Tensor:
        """Return (B, Q, 2)."""
        memory = self.encoder(values, times, observed=observed, present=present)
        return self.head(self.decoder(query_times, memory, times, present=present))


# %% [markdown]
# ## Training
#
# Nothing special: plain PyTorch, new samples in every step.

# %%
STEPS = 400
model = Interpolator()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
for step in range(1, STEPS + 1):
    data = batch(32)
    target = data.pop("target")
    loss = nn.functional.mse_loss(model(**data), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 100 == 0:
        print(f"step {step}: mean square error {loss.item():.4f}")

# %% [markdown]
# ## Every minute of two days
#
# The readings of one sample, the truth, and what the model says. Times are continuous: ask for as many as you like.

# %%
model.eval()
torch.manual_seed(7)
phase, height = torch.tensor([[5.0]]), torch.tensor([[1.2]])
data = batch(1)
data.pop("target")
data["values"] = sensors(data["times"].float(), phase, height) + 0.05 * torch.randn(1, LONGEST, 2)
hours = torch.linspace(0, 48, MINUTES + 1, dtype=torch.float64)[None]
with torch.no_grad():
    answer = model(**data | {"query_times": hours})[0]
truth = sensors(hours.float(), phase, height)[0]
error = (answer - truth).square().mean().sqrt()
print(f"{int(data['present'].sum())} readings, error over two days {error:.3f}")

figure, axes = plt.subplots(figsize=(9, 4.2), layout="constrained")
for sensor, colour in enumerate(("#0072B2", "#D55E00")):
    seen = (data["present"][0] & data["observed"][0, :, sensor]).numpy()
    axes.plot(hours[0], truth[:, sensor], color=colour, alpha=0.35, linewidth=3, label=f"sensor {sensor + 1}, truth")
    axes.plot(hours[0], answer[:, sensor], color=colour, label=f"sensor {sensor + 1}, model")
    axes.plot(
        data["times"][0, seen],
        data["values"][0, seen, sensor],
        "o",
        color=colour,
        label=f"sensor {sensor + 1}, readings",
    )
axes.set_xlabel("hours since 1 March 2026")
axes.set_ylabel("reading")
axes.spines[["top", "right"]].set_visible(False)
figure.legend(loc="outside lower center", ncols=2, frameon=False)
figure.savefig("irregular_series.png", dpi=150)
