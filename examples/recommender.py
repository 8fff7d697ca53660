"""A recommender with personal vectors: films' are learned privately; a user's own is a ridge solution in the loss."""

# %% Made-up ratings: each user has rated 24 of 150 films. One row a user: which films, and how good they were.
import tempfile

import numpy as np
import torch
from torch import nn

import clipline as cl

USERS, FILMS, RATED, TASTES = 4000, 150, 24, 3
rng = np.random.default_rng(0)
taste, film = rng.normal(size=(USERS, TASTES)), rng.normal(size=(FILMS, TASTES))
everything = 3 + 0.5 * rng.normal(size=FILMS) + taste @ film.T / 2 + 0.2 * rng.normal(size=(USERS, FILMS))
films = np.stack([rng.permutation(FILMS)[:RATED] for _ in range(USERS)])
people = cl.Population.from_arrays(
    np.arange(USERS), films=films, stars=np.take_along_axis(everything, films, axis=1).astype(np.float32)
)
train, test = people.split(test=0.1, seed=0)


# %% Films have a mean and a vector, which are trained. Half of a user's ratings give the user's vector, by ridge.
class Films(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.vector = nn.Parameter(torch.zeros(FILMS)), nn.Parameter(0.5 * torch.randn(FILMS, TASTES))

    def forward(self, films, stars):
        """(users, films): the stars that each user would give to every film, from these (users, rated) ratings."""
        known = self.vector[films]
        gram = known.transpose(1, 2) @ known + 0.5 * torch.eye(TASTES)
        wanted = (stars - 3 - self.mean[films]).unsqueeze(2)
        user = torch.linalg.solve(gram, known.transpose(1, 2) @ wanted)
        return 3 + self.mean + (self.vector @ user).squeeze(2)


def square(model, batch):
    """(users,): how wrong the first half of a user's ratings is about the second."""
    films, stars, half = batch["films"], batch["stars"], RATED // 2
    guessed = model(films[:, :half], stars[:, :half]).gather(1, films[:, half:])
    return (guessed - stars[:, half:]).square().mean(dim=1)


# %% Train. The number of users is declared and not counted: whether somebody is among them stays private.
privacy, local = cl.Privacy(epsilon=4.0, population_size=3_600), cl.LocalSGD(lr=6.0)
training = cl.Training(Films(), square, train, rounds=60, cohort_size=250, local=local, privacy=privacy)
result = training.run([cl.Evaluate(test, square, every=30)])

# %% Save, load, and recommend to somebody new from twelve ratings.
saved = cl.load(result.save(tempfile.mkdtemp()), model=Films())
stars = saved.predict({name: field[:1, : RATED // 2] for name, field in test.fields.items()})
print("for somebody new, the best films are", stars[0].argsort()[::-1][:3])
known, others = np.split(test.fields["stars"], 2, axis=1)
error, own_mean = result.metrics["square"] ** 0.5, np.square(others - known.mean(axis=1, keepdims=True)).mean() ** 0.5
print(f"root mean square error {error:.2f} stars; of each user's own mean: {own_mean:.2f}")
print(saved.guarantee)
