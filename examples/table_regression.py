"""Table regression: how long a ride takes, from a table with text, times and gaps, at epsilon 4."""

# %% A made-up table. Yours may be a DataFrame of pandas or polars, a Table of pyarrow, or a file (`from_table`).
import tempfile

import numpy as np
import pyarrow as pa
import torch
from torch import nn

import clipline as cl

rng = np.random.default_rng(0)
rider, km, hour = rng.integers(0, 3000, 30_000), rng.uniform(1, 16, 30_000), rng.integers(0, 24 * 90, 30_000)
bike, rush = rng.integers(0, 3, 3000)[rider], np.isin(hour % 24, (7, 8, 17, 18))
rides = pa.table({
    "rider": [f"r{one}" for one in rider],
    "start": np.datetime64("2026-01-01") + (hour * 3600).astype("m8[s]"),
    "bike": np.array(["city", "race", "cargo"])[bike],
    "km": pa.array(km, mask=rng.random(30_000) < 0.02),  # some are missing
    "minutes": km * np.array([4.0, 2.5, 5.5])[bike] * (1 + 0.3 * rush) + rng.normal(0, 2, 30_000),
})  # fmt: skip

# %% A population, split by rider. What is said of columns is known beforehand and not computed from riders' data.
kinds, since = {"bike": ["city", "race", "cargo"]}, {"start": "hours since 2026-01-01"}
people = cl.Population.from_dataframe(rides, user="rider", categories=kinds, timestamps=since, fill={"km": 8.0})
train, test = people.split(test=0.1, seed=0)


# %% A model of the fields that its `forward` names, and its squared error for each example of a batch.
class Minutes(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(1 + 4 + 24, 16), nn.Linear(16, 1)

    def forward(self, start, bike, km):
        bikes = (bike.unsqueeze(1) == torch.arange(4)).float()  # the fourth is for anything that was not listed
        hours = ((start % 24).long().unsqueeze(1) == torch.arange(24)).float()
        hidden = self.hidden(torch.cat([km.unsqueeze(1) / 8 - 1, bikes, hours], dim=1)).relu()
        return 35 + 20 * self.out(hidden).squeeze(1)  # about the middle and the spread of the minutes


def square(model, batch):
    return ((model(batch["start"], batch["bike"], batch["km"]) - batch["minutes"]) / 20).square()


# %% Train. The number of riders is declared and not counted: whether somebody is among them stays private.
privacy, local = cl.Privacy(epsilon=4.0, population_size=2_700), cl.LocalSGD(lr=0.3)
training = cl.Training(Minutes(), square, train, rounds=50, cohort_size=150, local=local, privacy=privacy)
result = training.run([cl.Evaluate(test, square, every=25)])

# %% Save, load, predict for rows without the answer.
saved = cl.load(result.save(tempfile.mkdtemp()), model=Minutes())
print("predicted", saved.predict(rides.drop_columns(["rider", "minutes"]).slice(0, 3)).round(1))
error, always = 20 * result.metrics["square"] ** 0.5, np.square(test.fields["minutes"] - 35).mean() ** 0.5
print(f"root mean square error {error:.2f} minutes; of always saying 35: {always:.2f}")
print(saved.guarantee)
