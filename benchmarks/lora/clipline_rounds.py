"""clipline's rounds with adapters."""

from __future__ import annotations

import numpy as np
import torch
from work import (
    BATCH,
    CLIENT_LR,
    NOISE_MULTIPLIER,
    SERVER_LR,
    SERVER_MOMENTUM,
    START_CLIP,
    Rounds,
    arguments,
    model_and_ids,
)

import clipline as cl


class Marks(cl.Callback):
    """Tells of every round."""

    def __init__(self, rounds: Rounds) -> None:
        self.rounds = rounds

    def on_round(self, report: object, state: object) -> None:
        """The round is over."""
        self.rounds.done()


def main() -> None:
    """Train."""
    wanted = arguments()
    rounds = Rounds(wanted.device)
    model, ids = model_and_ids(wanted.base, wanted.device)
    rounds.start()
    count, each, tokens = ids.shape
    users = cl.Population.from_arrays(np.repeat(np.arange(count), each), input_ids=ids.reshape(-1, tokens))
    training = cl.Training(
        model, cl.causal_lm_loss, users, rounds=wanted.rounds, cohort_size=count,
        local=cl.LocalSGD(lr=CLIENT_LR, batch_size=BATCH), clip=cl.QuantileClip(0.5, start=START_CLIP),
        server=cl.ServerSGD(SERVER_LR, momentum=SERVER_MOMENTUM),
        privacy=cl.Privacy(noise_multiplier=NOISE_MULTIPLIER, sampling="fixed"),
        compute=cl.Compute(
            device=wanted.device, precision="bf16" if wanted.device == "cuda" else "float32", engine="stacked"
        ),
        seed=0,
    )  # fmt: skip
    version = f"clipline {cl.__version__}, torch {torch.__version__}"
    rounds.ready(model, f"{version}; {training.engine}")
    training.run([Marks(rounds)])
    rounds.ready(model, f"{version}; {training.engine}")  # what cannot be recorded or compiled has shown by now


if __name__ == "__main__":
    main()
