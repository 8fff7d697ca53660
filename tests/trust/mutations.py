"""Known ways to break private training, each as a change of the real code, and the check that must notice.

`python tests/trust/mutations.py` runs all checks on all of them and writes docs/results/mutations.md.
"""

import warnings
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import torch

from clipline.data.population import Population
from clipline.engine.core import one_by_one
from clipline.engine.core.updates import Updates
from clipline.engine.isolation.guard import Isolation
from clipline.engine.workers.transport import PipeTransport
from clipline.federated import clipping, round
from clipline.federated.mechanism import GaussianMechanism
from clipline.privacy.events import GaussianEvent
from clipline.random.streams import Streams
from clipline.training import durable
from clipline.trust.self_test import checks

PAGE = Path(__file__).parents[2] / "docs" / "results" / "mutations.md"


@dataclass(frozen=True)
class Mutation:
    """What is replaced: (object, name, what makes the new value of the old one)."""

    name: str
    caught_by: str  # how the name of a check begins
    owner: object
    attribute: str
    broken: object

    @contextmanager
    def applied(self):
        """Within, the code is broken."""
        real = vars(self.owner)[self.attribute]
        plain = real.__func__ if isinstance(real, classmethod | staticmethod) else real
        new = self.broken(plain)
        with mock.patch.object(self.owner, self.attribute, type(real)(new) if plain is not real else new):
            yield


def inverted_bit(real):
    def broken(norms, clip):
        scale, within = real(norms, clip)
        return scale, ~within

    return broken


def noise_of_next_clip(real):
    def broken(self, total, numbers, widened=1.0):
        plain = replace(self, noise_multiplier=0.0, count_stddev=0.0)
        fraction = real(plain, total, torch.zeros_like(numbers)).fraction_within
        total.bound *= float(np.exp(-0.2 * (fraction - 0.5)))
        return real(self, total, numbers, widened)

    return broken


def z_delta_charged(real):
    return lambda self, sampling: GaussianEvent(sampling, float(self.delta_noise_multiplier))


def realised_denominator(real):
    def broken(self, state, draws):
        cohort, noise = draws.take(state.round_index)
        again = mock.Mock(take=lambda index: (cohort, noise), prefetch=draws.prefetch)
        mechanism = replace(self.mechanism, cohort_size=max(1, len(cohort.users)))
        return (yield from real(replace(self, mechanism=mechanism), state, again))

    return broken


def reused_stream(real):
    return lambda self, round_index: real(self, 0)


def unclipped_scalar(real):
    return lambda self: torch.linalg.norm(self.dense(sum(one.values.shape[1] for one in self.pieces))[:, :-1], dim=1)


def float16_norm(real):
    return lambda self: torch.cat([piece.squares().half() for piece in self.pieces], dim=1).sum(dim=1).sqrt().double()


def state_kept(real):
    return lambda self: ""


def trained_twice(real):
    def broken(self, requests):
        for block in real(self, requests):
            yield block
            yield block

    return broken


def lost_share(real):
    def broken(self, rank):
        self._memory.sums[1:].zero_()
        return real(self, rank)

    return broken


def shifted_row(real):
    def broken(cls, path, user, **options):
        read = real(cls, path, user, **options)
        fields = {name: np.roll(np.asarray(field), 1, axis=0) for name, field in read.fields.items()}
        return replace(read, fields=fields)

    return broken


def out_of_memory_forgiven(real):
    return lambda error: True


def unsynced(real):
    return lambda file, path: file.flush()


MUTATIONS = [
    Mutation("inverted bit", "the clip moves", clipping, "clip_factors", inverted_bit),
    Mutation("noise from the next clip", "scale and", GaussianMechanism, "_hidden", noise_of_next_clip),
    Mutation("z_delta in the ledger", "scale and", GaussianMechanism, "event", z_delta_charged),
    Mutation("realised denominator", "the mean is", round.Algorithm, "round", realised_denominator),
    Mutation("reused stream", "scale and", Streams, "noise", reused_stream),
    Mutation("unclipped scalar", "one user more or less, one by one", Updates, "norms", unclipped_scalar),
    Mutation("float16 norm overflow", "one user more or less, one by one", Updates, "norms", float16_norm),
    Mutation("state kept between users", "nothing of a user", Isolation, "after_user", state_kept),
    Mutation("a user trained twice", "one user more or less, one by one", one_by_one.OneByOne, "train", trained_twice),
    Mutation("a worker's share lost", "one user more or less, two", PipeTransport, "reduce", lost_share),
    Mutation("a shifted row", "one user more or less, one by one", Population, "from_table", shifted_row),
    Mutation("out-of-memory as a user's error", "errors of", one_by_one, "users_own", out_of_memory_forgiven),
    Mutation("an unsynced ledger", "ledger on disk", durable, "sync", unsynced),
]


def outcomes(begins=""):
    """Name, whether it passed, and what it measured, of the checks whose name begins so; an error is a failure."""
    for name, run in checks():
        if name.startswith(begins):
            with TemporaryDirectory() as folder:
                try:
                    passed, measured, *_ = run(Path(folder))
                except Exception as error:
                    passed, measured = False, f"{type(error).__name__}: {error}"
            yield name, passed, " ".join(measured.split())


def page():
    """The table: all checks on sound code, then on each mutation."""
    sound = list(outcomes())
    rows = [["none", *("pass" if passed else "-" for _, passed, _ in sound), "all passed"]]
    assert all(passed is not False for _, passed, _ in sound), sound
    for mutation in MUTATIONS:
        with mutation.applied():
            found = list(outcomes())
        said = next(measured for name, _, measured in found if name.startswith(mutation.caught_by))
        rows.append([mutation.name, *("" if passed else "**caught**" for _, passed, _ in found), said])
    numbers = [f"{number + 1}" for number in range(len(sound))]
    lines = [["what was broken", *numbers, "what the named check measured"], ["---"] * (len(sound) + 2), *rows]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    named = "\n".join(f"{number}. {name}" for number, (name, _, _) in zip(numbers, sound, strict=True))
    caught = sum("**caught**" in row for row in rows)
    return f"""# Seeded breakages, and the checks that notice

Each row breaks the real code in one way. All checks of `clipline selftest` then run.
{caught} of {len(MUTATIONS)} are caught.
The last column has what was measured by the check that `tests/trust/test_mutations.py` expects to notice.
Made by `python tests/trust/mutations.py`. The checks are:

{named}

{table}
"""


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    PAGE.write_text(page(), encoding="utf-8")
