"""Rounds of Algorithm 1 whose sum comes from clients who encode, add noise, mask and drop out."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="the extra federation is not installed")

from clipline import QuantileClip, ServerSGD
from clipline.federated.clipping import clip_rows, join_bit
from clipline.federated.discrete_mechanism import DiscreteMechanism
from clipline.federated.draws import PlainDraws, WholeNoise
from clipline.federated.round import Algorithm
from clipline.federated.sampling import PoissonSampler
from clipline.federation.encoders import secure_integers
from clipline.federation.secure_sum import SumClient, SumPlan, SumServer
from clipline.privacy.accountant import account
from clipline.privacy.relations import Relation
from clipline.privacy.two_views import Participations, account_both
from clipline.random.discrete_gaussian import words_of
from clipline.random.normal_numbers import SystemNormal
from clipline.random.streams import Streams

DIM, USERS, COHORT, LEAST, CAP = 30, 40, 20, 6, 8
UPDATES = torch.randn(USERS, DIM, generator=torch.Generator().manual_seed(0)).double() / math.sqrt(DIM)


class Federation:
    """A server and its clients in one process. Users above the cap are left out; two clients drop out of each round."""

    def __init__(self, noise_by_clients):
        code = secure_integers(
            DIM, 18, cohort_size=COHORT, noise_multiplier=0.5, count_stddev=3.0,
            survivors=LEAST if noise_by_clients else None,
        )  # fmt: skip
        mechanism = DiscreteMechanism(COHORT, 0.5, 3.0, code=code, shares=LEAST if noise_by_clients else None)
        sampler = PoissonSampler(USERS, COHORT)
        self.algorithm = Algorithm(sampler, mechanism, ServerSGD(1.0, momentum=0.0), QuantileClip(start=1.0))
        self.code, self.by_clients, self.asked = code, noise_by_clients, Participations(CAP)
        self.draws = PlainDraws(sampler, Streams(5), DIM, noise=WholeNoise)
        self.exact = []

    def round(self, state):
        going = self.algorithm.round(state, self.draws)
        request = next(going)
        users = [int(name) for name in self.asked.allowed(map(str, request.cohort.users))]
        self.asked = self.asked.add(map(str, users))
        try:
            going.send(self.sum_of(users, request))
        except StopIteration as end:
            return end.value
        raise AssertionError("a round asks for one sum")

    def sum_of(self, users, request):
        plan = SumPlan(self.code.dim, self.code.bits, len(users) // 2 + 1, max(LEAST, len(users) // 2 + 1),
                       f"run, round {request.round_index}".encode())  # fmt: skip
        clients, server = {user + 1: SumClient(user + 1, plan) for user in users}, SumServer(plan)
        for number, client in clients.items():
            assert server.add_keys(number, client.keys())
        roster = server.roster()
        for number, client in clients.items():
            assert server.add_boxes(number, client.boxes(roster))
        boxes, dropped = server.boxes_for(), sorted(clients)[:2]
        exact = torch.zeros(DIM + 1, dtype=torch.float64)
        for number, client in clients.items():
            if number in dropped:
                continue
            joint = join_bit(*clip_rows(UPDATES[number - 1][None], request.clip))[0]
            rng, noise = np.random.default_rng(number), words_of(SystemNormal()) if self.by_clients else None
            vector = self.code.encode(joint, request.clip, request.round_index, rng, noise, LEAST)
            assert server.add_masked(number, client.masked(boxes[number], vector))
            exact += joint
        alive, dead = server.survivors()
        assert dead == set(dropped)
        for number in alive:
            assert server.add_answer(number, clients[number].answer(alive, dead))
        self.exact.append((exact, len(alive), request.clip))
        return server.total().finished(request.clip, request.cohort.sampling)


@pytest.mark.parametrize("noise_by_clients", [False, True])
def test_rounds_release_the_sum_of_the_survivors_with_the_stated_noise(noise_by_clients):
    federation, errors, counts = Federation(noise_by_clients), [], []
    state = federation.algorithm.init(torch.zeros(DIM))
    for _ in range(12):
        state, release = federation.round(state)
        exact, alive, clip = federation.exact[-1]
        wider = math.sqrt(alive / LEAST) if noise_by_clients else 1.0  # more shares than the least
        unit = federation.code.stddev * federation.code.unit * clip * wider
        errors += ((release.mean * COHORT - exact[:-1]) / unit).tolist()
        counts.append(((release.fraction_within - 0.5) * COHORT - float(exact[-1])) / (3.0 * wider))
    # 5 standard errors, which fail by chance once in a million
    assert np.std(errors) == pytest.approx(1, rel=5 / math.sqrt(2 * len(errors)))
    assert np.mean(errors) == pytest.approx(0, abs=5 / math.sqrt(len(errors)))
    assert np.std(counts) == pytest.approx(1, rel=5 / math.sqrt(2 * len(counts)))
    assert state.ledger.rounds == 12
    assert federation.asked.most == CAP


def test_the_ledger_of_such_a_run_makes_two_statements():
    federation = Federation(noise_by_clients=True)
    state = federation.algorithm.init(torch.zeros(DIM))
    for _ in range(4):
        state, _ = federation.round(state)
    outsiders = account(state.ledger, delta=1e-3, relation=Relation.ZERO_OUT)
    both = account_both(outsiders, state.ledger, federation.asked.most)
    assert both.outsiders.rounds == 4
    assert both.server.rounds == federation.asked.most
    assert both.server.sampler == "none"
    assert "Poisson sampling, 4 rounds" in str(both)
