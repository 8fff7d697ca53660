"""Federations over Flower's messages: the simulator's rounds, whatever nodes reply and whenever the server dies."""

import json
import math
import time

import numpy as np
import pytest
import torch
from oracle_rows import gaussian_epsilon

pytest.importorskip("flwr", reason="the extra federation is not installed")

from click.testing import CliRunner
from federations import DIM, UPDATES, USERS, app, grid, training
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from safetensors import safe_open
from samples import everything_in

import clipline as cl
from clipline.cli.parser import app as command
from clipline.errors import RunError, SettingError
from clipline.federated.backend import CohortRequest
from clipline.federated.clipping import ModularSum, centred, clip_rows, join_bit
from clipline.federated.draws import NoiseNow, WholeNoise
from clipline.federated.sampling import Cohort
from clipline.federation.encoders import SecureIntegers, packed
from clipline.federation.flower import AdaptiveClippingStrategy, _Grid
from clipline.federation.flower_client import InProcessGrid
from clipline.federation.secure_sum import SumServer
from clipline.privacy.ledger import Ledger
from clipline.privacy.two_views import account_both
from clipline.training.checkpoint import Circumstances, load_checkpoint
from clipline.training.durable import save_tensors
from clipline.training.run_files import PARTICIPATIONS
from clipline.trust.card import write_cards
from clipline.trust.verify import verify

CLIP = 0.3
JOINT = join_bit(*clip_rows(UPDATES, CLIP))  # what each user adds at the first clip


def strategy(made, **options):
    return AdaptiveClippingStrategy(made, **{"deadline": 0.3, "pause": 0.0, "attempts": 2, **options})


def one_sum(made, nodes, tmp_path, **options):
    """The release of the first round, its strategy, and the sum of update and bits without noise."""
    serving = strategy(made, **options)
    cohort = Cohort(np.array(nodes.get_node_ids()), made.algorithm.sampler.sampling)
    backend = _Grid(serving, nodes, tmp_path)
    (total,) = backend.sums([CohortRequest(torch.zeros(DIM), cohort, 0, lambda: CLIP)])
    rng = np.random.default_rng(5)
    noise = WholeNoise(rng) if serving.secure else NoiseNow(rng, DIM + 1)
    release, _ = made.algorithm.mechanism.step(total, noise, None, 0)
    return release, serving


@pytest.mark.parametrize("upload", [None, cl.Quantised(16), cl.RandomMask(1.0)], ids=str)
def test_a_federation_ends_where_the_simulation_ends(upload, tmp_path):
    simulated = training(upload).run()
    federated = strategy(training(upload)).run(grid(upload), tmp_path / "run")
    # With 16 bits a number of an update is off by 2 clips / 2^16 at most, and so is a mean; momentum and rounds add up.
    off = 1e-6 if upload != cl.Quantised(16) else 2 * 0.4 / 2**16 * 10 * np.sqrt(DIM)
    assert torch.allclose(federated.state.params, simulated.state.params, rtol=0, atol=off)
    assert federated.state.clip == simulated.state.clip
    assert federated.state.ledger == simulated.state.ledger
    assert [r.fraction_within for r in federated.reports] == [r.fraction_within for r in simulated.reports]


@pytest.mark.parametrize("failing", [None, "keys", "boxes", "masked", "answers"])
def test_a_secure_round_releases_what_the_simulated_one_does(failing, tmp_path):
    upload = cl.SecureSum(bits=24)
    nodes = Mute(app(upload), failing) if failing else grid(upload)
    made = training(upload, noise_multiplier=0.5, count_stddev=1.0)
    release, serving = one_sum(made, nodes, tmp_path)
    here = [0, 1, 2, 3, 4] if failing in ("keys", "boxes", "masked") else range(USERS)
    sim = training(upload, noise_multiplier=0.5, count_stddev=1.0)
    request = CohortRequest(torch.zeros(DIM), Cohort(np.array(here), sim.algorithm.sampler.sampling), 0, lambda: CLIP)
    (total,) = sim.backend.sums([request])
    expected, _ = sim.algorithm.mechanism.step(total, WholeNoise(np.random.default_rng(5)), None, 0)
    # Noise is the same, so that the two differ by how each user's numbers were rounded: a unit each, at most.
    code = made.algorithm.mechanism.code
    most = 2 * USERS * np.sqrt(code.dim) * code.unit * CLIP / USERS
    assert float((release.mean - expected.mean).norm()) < most < 1e-3
    assert release.fraction_within == pytest.approx(expected.fraction_within, abs=1e-3)
    assert serving.unprivate_replies["late or missing"] == bool(failing)


def test_shares_of_noise_come_from_the_clients(tmp_path):
    upload = cl.SecureSum(bits=24, least_survivors=4)
    made = training(upload, noise_multiplier=0.5, count_stddev=1.0)
    release, serving = one_sum(made, grid(upload), tmp_path)
    assert serving.noise_by_clients
    assert serving.least_vectors == 4
    unit = made.algorithm.mechanism.code.stddev * made.algorithm.mechanism.code.unit * CLIP * np.sqrt(USERS / 4)
    errors = (release.mean * USERS - JOINT[:, :-1].sum(dim=0)) / unit
    assert 0.1 < float(errors.abs().max()) < 7  # of five normal numbers; either fails by chance once in 100,000


class Mute(InProcessGrid):
    """The last `count` nodes say nothing from one stage on, in so many attempts."""

    def __init__(self, app, stage, count=1, attempts=99):
        super().__init__(app, USERS)
        self.stage, self.quiet, self.attempts = stage, range(1000 + USERS - count, 1000 + USERS), attempts
        self.over, self.stages = set(), []

    def push_messages(self, messages):
        messages = list(messages)
        told = messages[0].content["clipline"]
        self.stages.append(told["stage"])
        if told["stage"] == "keys":
            self.over, self.attempts = set(), self.attempts - 1
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        (name,) = message_ids
        message = self._waiting.get(name)
        if message is not None and message.metadata.dst_node_id in self.quiet and self.attempts >= 0:
            if message.content["clipline"]["stage"] == self.stage:
                self.over.add(message.metadata.dst_node_id)
            if message.metadata.dst_node_id in self.over:
                return []
        return super().pull_messages(message_ids)


class Lying(InProcessGrid):
    """The first node replies what `lie` makes of its message and its honest reply: one message or several."""

    def __init__(self, lie, upload=None):
        super().__init__(app(upload), USERS)
        self.lie = lie

    def pull_messages(self, message_ids):
        replies = super().pull_messages(message_ids)
        return [lie for reply in replies for lie in self._told(reply)]

    def _told(self, reply):
        if reply.metadata.src_node_id != 1000:
            return [reply]
        made = self.lie(reply)
        return made if isinstance(made, list) else [made]


def saying(array, **more):
    raw = Array("float32", array.shape, "raw", array.tobytes())
    return lambda reply: put(reply, RecordDict({"reply": ArrayRecord({"vector": raw}), **more}))


def put(reply, content):
    reply.content = content
    return reply


def failed(reply):
    error = Message(Error(0, "ValueError: account 4711 of Ann"), reply_to=reply)
    error.__dict__["_metadata"] = reply.metadata
    return error


def other(name, value):
    def lie(reply):
        reply.metadata.__dict__[name] = value
        return reply

    return lie


def numbers(*values):
    return np.array(values, np.float32)


LIES = {
    "too short": (saying(numbers(*[9.0] * DIM)), "malformed"),
    "too long": (saying(np.ones(1_000_000, np.float32)), "malformed"),
    "doubles": (saying(np.ones(DIM + 1)), "malformed"),
    "NaN": (saying(numbers(*[np.nan] * DIM, 0.5)), "malformed"),
    "infinite": (saying(numbers(*[np.inf] * DIM, 0.5)), "malformed"),
    "metrics beside": (saying(numbers(*[0.0] * DIM, 0.5), metrics=MetricRecord({"num-examples": 3})), "malformed"),
    "numbers for an array": (lambda r: put(r, RecordDict({"reply": ConfigRecord({"vector": 1.0})})), "malformed"),
    "nothing": (lambda r: put(r, RecordDict()), "malformed"),
    "an error": (failed, "error"),
    "as another node": (other("_src_node_id", 1001), "foreign"),
    "to another message": (other("_reply_to_message_id", "message 99"), "foreign"),
    "late": (lambda r: [], "late or missing"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_bad_reply_adds_nothing_and_is_counted(lie, tmp_path, capfd, caplog):
    told, kind = LIES[lie]
    release, serving = one_sum(training(), Lying(told), tmp_path)
    assert torch.allclose(release.mean * USERS, JOINT[1:, :-1].sum(dim=0), atol=1e-6)
    assert serving.unprivate_replies["taken"] == USERS - 1
    assert serving.unprivate_replies[kind] == 1
    assert "Ann" not in capfd.readouterr().out + caplog.text + (tmp_path / PARTICIPATIONS).read_text()


@pytest.mark.parametrize(
    "values", [(*[1e30] * DIM, 0.5), (*[CLIP] * DIM, 1e9), (1e38, *[0.0] * (DIM - 1), -1e38), (*[1e-45] * DIM, -0.5)]
)
def test_a_lying_client_moves_the_sum_by_its_bound_at_most(values, tmp_path):
    release, serving = one_sum(training(), Lying(saying(numbers(*values))), tmp_path)
    assert serving.unprivate_replies["taken"] == USERS
    moved = release.mean * USERS - JOINT[1:, :-1].sum(dim=0)
    assert float(moved.double().norm()) <= CLIP * (1 + 1e-6)
    counted = (release.fraction_within - 0.5) * USERS - float(JOINT[1:, -1].sum())
    assert abs(counted) <= 0.5 + 1e-9


def test_a_reply_that_comes_twice_counts_once(tmp_path):
    release, serving = one_sum(training(), Lying(lambda reply: [reply, reply]), tmp_path)
    assert torch.allclose(release.mean * USERS, JOINT[:, :-1].sum(dim=0), atol=1e-6)
    assert serving.unprivate_replies["foreign"] == 1


def test_a_reply_that_flower_cannot_unpack_ends_nothing(tmp_path):
    def broken(reply):
        raise ValueError("of a client's making")

    release, serving = one_sum(training(), Lying(broken), tmp_path)
    assert torch.allclose(release.mean * USERS, JOINT[1:, :-1].sum(dim=0), atol=1e-6)
    assert serving.unprivate_replies["malformed"] == 1


def garbled(stage, value):
    """What the first node sends in a stage of a secure sum is replaced, where it is of these bytes."""

    def lie(reply):
        record = reply.content["reply"]
        if isinstance(record, ConfigRecord) and {len(own) for own in record.values()} == {stage}:
            return put(reply, RecordDict({"reply": ConfigRecord(dict.fromkeys(record, value))}))
        return reply

    return lie


KEYS, BOX, SHARE = 64, 160, 66


@pytest.mark.parametrize(
    ("stage", "value", "attempts", "counted"),
    [
        (KEYS, bytes(32) + bytes([1]) + bytes(31), 1, True),  # points with which nobody can agree on a secret
        (KEYS, b"short", 1, True),
        (BOX, bytes(159), 1, True),
        (BOX, bytes(160), 2, False),  # that nobody can open: left out of the second attempt
        (SHARE, bytes(66), 1, False),
        (SHARE, bytes(65), 1, True),
    ],
    ids=["weak keys", "short keys", "short box", "closed box", "wrong share", "short share"],
)
def test_one_bad_client_does_not_end_a_secure_round(stage, value, attempts, counted, tmp_path):
    upload = cl.SecureSum(24)
    made = training(upload, noise_multiplier=0.5, count_stddev=1.0)
    release, serving = one_sum(made, Lying(garbled(stage, value), upload), tmp_path)
    assert serving.told["asked"] == attempts
    assert (serving.unprivate_replies["malformed"] == 1) == counted
    # With the noise taken off: the sum of the others, or of all where only its shares are wrong.
    noise = of_nobody(made).mean * USERS
    first = 0 if stage == SHARE else 1
    code = made.algorithm.mechanism.code
    most = 2 * USERS * np.sqrt(code.dim) * code.unit * CLIP
    assert float((release.mean * USERS - noise - JOINT[first:, :-1].sum(dim=0)).norm()) < most < 1e-2


class Silent(InProcessGrid):
    """Only the first `alive` nodes ever reply."""

    def __init__(self, upload, alive):
        super().__init__(app(upload), USERS)
        self.alive = alive

    def pull_messages(self, message_ids):
        wanted = [one for one in message_ids if self._waiting[one].metadata.dst_node_id < 1000 + self.alive]
        return super().pull_messages(wanted)


@pytest.mark.parametrize("upload", [None, cl.SecureSum(24)], ids=str)
def test_with_too_few_replies_nothing_is_released_or_charged(upload, tmp_path):
    made = training(upload, noise_multiplier=0.5, rounds=2)
    with pytest.raises(RunError, match="abandoned 2 times"):
        strategy(made, least_replies=3).run(Silent(upload, alive=2), tmp_path / "run")
    assert Ledger.read(tmp_path / "run" / "ledger.jsonl").rounds == 0
    again = strategy(training(upload, noise_multiplier=0.5, rounds=2), least_replies=3)
    result = again.run(grid(upload), tmp_path / "run")
    assert result.state.ledger.rounds == result.guarantee.rounds == 2
    assert again.asked.counts == {str(1000 + place): 4 for place in range(USERS)}  # who was asked in vain counts


def secure(least_survivors=None, **options):
    upload = cl.SecureSum(24, least_survivors)
    return upload, training(upload, noise_multiplier=0.5, count_stddev=1.0, **options)


def of_nobody(made):
    """The first release of a secure sum without vectors, with the noise of `one_sum`."""
    code, mechanism = made.algorithm.mechanism.code, made.algorithm.mechanism
    total = ModularSum(code.dim, code.bits).finished(CLIP, made.algorithm.sampler.sampling)
    return mechanism.step(total, WholeNoise(np.random.default_rng(5)), None, 0)[0]


def test_of_a_round_whose_exact_sum_may_be_known_no_second_sum_is_opened(tmp_path):
    """Three nodes answer too late. A second sum without one of them would show that one's vector."""
    upload, made = secure()
    nodes = Mute(app(upload), "answers", count=3, attempts=1)
    release, _ = one_sum(made, nodes, tmp_path)
    assert torch.equal(release.mean, of_nobody(made).mean)
    assert nodes.stages == ["keys", "boxes", "masked", "answers"]
    # Nor by a server that is started again before the round is stored, or from an older checkpoint.
    again = strategy(made)
    again._read(tmp_path)
    assert again.opened == 0
    again.opened = 3
    cohort = Cohort(np.array(nodes.get_node_ids()), made.algorithm.sampler.sampling)
    _Grid(again, nodes, tmp_path).sums([CohortRequest(torch.zeros(DIM), cohort, 0, lambda: CLIP)])
    assert len(nodes.stages) == 4


def test_before_anybody_is_asked_for_shares_a_round_may_be_tried_again(tmp_path):
    upload, made = secure()
    release, serving = one_sum(made, Mute(app(upload), "masked", count=3, attempts=1), tmp_path)
    assert serving.told["asked"] == 2
    assert not torch.equal(release.mean, of_nobody(made).mean)


def test_a_cohort_below_least_replies_is_not_filled_up_where_the_server_adds_the_noise(tmp_path):
    """The vectors of others would be zeros: the sum would be that of the one node."""
    upload, made = secure()
    nodes, serving = Mute(app(upload), "none"), strategy(made)
    sampling = made.algorithm.sampler.sampling
    backend = _Grid(serving, nodes, tmp_path)
    request = CohortRequest(torch.zeros(DIM), Cohort(np.array([1002]), sampling), 0, lambda: CLIP)
    with pytest.raises(RunError, match="fewer than 2 nodes"):
        backend.sums([request])
    backend.sums([CohortRequest(torch.zeros(DIM), Cohort(np.array([], int), sampling), 0, lambda: CLIP)])
    assert nodes.stages == []


def test_no_cohort_is_drawn_before_enough_nodes_are_online(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("time.sleep", lambda seconds: online.append(1000 + len(online)))
    nodes, online = grid(), [1000]
    monkeypatch.setattr(nodes, "get_node_ids", lambda: list(online))
    serving = strategy(training(rounds=1), least_replies=5)
    serving.run(nodes, tmp_path / "run")
    assert serving.unprivate_replies["taken"] == len(online) == 5
    assert capsys.readouterr().err.count("waiting for more nodes: 1 are online") == 1


@pytest.mark.parametrize(
    ("count", "least", "shares", "opened"), [(1, 3, 3, True), (2, 3, 3, False), (1, 2, 4, True), (1, 4, 4, False)]
)
def test_nodes_that_fill_up_are_no_replies(count, least, shares, opened, tmp_path, monkeypatch):
    joints = []

    def noted(code, joint, *arguments, before=SecureIntegers.encode):
        joints.append(joint)
        return before(code, joint, *arguments)

    monkeypatch.setattr(SecureIntegers, "encode", noted)
    upload, made = secure(least_survivors=shares)
    nodes, serving = Mute(app(upload), "masked", count=count), strategy(made, least_replies=least)
    # Four of the last nodes are drawn and two fill up: three or two drawn nodes are left.
    cohort = Cohort(np.array([1002, 1003, 1004, 1005]), made.algorithm.sampler.sampling)
    request = CohortRequest(torch.zeros(DIM), cohort, 0, lambda: CLIP)
    backend = _Grid(serving, nodes, tmp_path)
    if opened:
        backend.sums([request])
        assert nodes.stages == ["keys", "boxes", "masked", "answers"]
        assert sorted(bool(joint.any()) for joint in joints) == [False] * 2 + [True] * 4
    else:
        with pytest.raises(RunError, match="abandoned 2 times"):
            backend.sums([request])
        assert "answers" not in nodes.stages


class Dies(Mute):
    """The server dies when it has what it takes to open the sum of the second round."""

    def pull_messages(self, message_ids):
        if self.stages.count("answers") == 2:
            raise KeyboardInterrupt
        return super().pull_messages(message_ids)


@pytest.mark.parametrize("dies", [False, True])
def test_against_the_server_every_sum_is_charged_that_it_may_have_opened(dies, tmp_path):
    upload, made = secure(least_survivors=3, rounds=2)
    folder = tmp_path / "run"
    if dies:
        with pytest.raises(KeyboardInterrupt):
            strategy(made).run(Dies(app(upload), "none"), folder)
    nodes = grid(upload) if dies else Mute(app(upload), "answers", count=3, attempts=1)
    serving = strategy(secure(least_survivors=3, rounds=2)[1])
    result = serving.run(nodes, folder)
    both = serving.guarantees(result)
    assert both.outsiders.rounds == 2
    assert (both.server.rounds, both.participations) == (3, 3)
    assert both.server.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(3) / 0.5, made.delta), rel=1e-6)


@pytest.mark.filterwarnings("ignore::clipline.federated.sampling.DeclaredUsersWarning")
@pytest.mark.parametrize(
    ("upload", "sizes", "options", "message"),
    [
        (None, {}, {"least_replies": 7}, "least_replies=7 must be a whole number at most 6"),
        (None, {}, {"least_replies": 0}, "least_replies=0"),
        (None, {}, {"least_replies": 2.0}, "least_replies=2.0"),
        (cl.SecureSum(24), {}, {"least_replies": 1}, "least_replies=1 must be a whole number at least 2"),
        (cl.SecureSum(24, least_survivors=7), {}, {}, "least_survivors=7 must be a whole number at most 6"),
        (cl.SecureSum(24), {}, {"max_participations": 3}, "max_participations=3 must be left out"),
        (
            cl.SecureSum(24), {"population_size": 10_000, "cohort_size": 60, "delta": 1e-5}, {"least_replies": 40},
            r"least_replies=40 must be at most 1\d where the server adds the noise",
        ),
        (cl.SecureSum(24), {"population_size": 100, "cohort_size": 3}, {}, "cohort_size=3 must be larger"),
    ],
)  # fmt: skip
def test_a_number_of_replies_that_cohorts_may_not_have_is_refused(upload, sizes, options, message):
    made = training(upload, noise_multiplier=0.5, count_stddev=1.0, **sizes)
    with pytest.raises(SettingError, match=message):
        AdaptiveClippingStrategy(made, **options)


@pytest.mark.filterwarnings("ignore::clipline.federated.sampling.DeclaredUsersWarning")
def test_an_empty_cohort_releases_noise_and_is_charged(tmp_path):
    made = training(noise_multiplier=1.0, population_size=10**9, cohort_size=1, rounds=3, delta=1e-9)
    serving = strategy(made, least_replies=1)
    result = serving.run(grid(), tmp_path / "run")  # nobody is drawn, but for once in 10 million tests
    assert result.state.ledger.rounds == 3
    assert float(result.state.params.abs().min()) > 0
    assert serving.unprivate_replies["taken"] == 0


def test_nobody_is_asked_more_often_than_the_cap_allows(tmp_path):
    serving = strategy(training(noise_multiplier=0.5, rounds=4), max_participations=2)
    result = serving.run(grid(), tmp_path / "run")
    assert result.state.ledger.rounds == 4
    assert serving.unprivate_replies["taken"] == 2 * USERS
    assert serving.asked.most == 2
    text = (tmp_path / "run" / "guarantees.txt").read_text()
    assert "Against the server: no promise" in text


def test_two_guarantees_stand_in_the_run_directory_and_the_cards_and_are_verified(tmp_path):
    folder, (upload, made) = tmp_path / "run", secure(least_survivors=3, cohort_size=5)
    strategy(made, max_participations=3).run(grid(upload), folder)
    outsiders, server = (folder / "guarantees.txt").read_text().splitlines()
    assert "Poisson sampling, 4 rounds" in outsiders
    assert "at most 3 rounds" in server
    assert "no sampling, 3 rounds" in server
    found = verify(folder)
    assert found.problems == ()
    assert str(found.both) == f"{outsiders}\n{server}"
    shown = CliRunner().invoke(command, ["verify", str(folder)])
    assert shown.exit_code == 0
    assert " ".join(shown.output.split()).startswith(f"{folder}: {outsiders} {server}")
    write_cards(folder, tmp_path / "card")
    for name in ("statement.md", "README.md"):
        text = (tmp_path / "card" / name).read_text()
        assert f"**{outsiders}**\n\n**{server}**" in text
        assert "Discrete Gaussian noise" in text
    assert (
        f'model_type_description: "Users train on devices of their own. {server}"'
        in (tmp_path / "card" / "deployment.yaml").read_text()
    )


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("guarantees.txt", "at most 3 rounds", "at most 2 rounds", "guarantees.txt says"),
        ("guarantees.txt", "Against the server, for", "Against nobody, for", "guarantees.txt says"),
        (PARTICIPATIONS, '"1003": 3', '"1003": 4', "a node that was asked 4 times, guarantees.txt is for 3"),
        (PARTICIPATIONS, "{", "", "cannot be read"),
        (PARTICIPATIONS, '"1003": 3', '"1003": "x"', "cannot be read"),
        (PARTICIPATIONS, '"sums": ', '"sums": Infinity, "x": ', "cannot be read"),
    ],
)
def test_two_guarantees_that_were_changed_are_found(name, old, new, problem, tmp_path):
    folder, (upload, made) = tmp_path / "run", secure(least_survivors=3)
    strategy(made, max_participations=3).run(grid(upload), folder)
    seal, text = verify(folder).seal, (folder / name).read_text()
    assert old in text
    (folder / name).write_text(text.replace(old, new, 1))
    found = verify(folder)
    assert any(problem in one for one in found.problems)
    assert (found.seal == seal) == (name == PARTICIPATIONS)


def test_fewer_participations_are_found_without_the_file_of_who_was_asked(tmp_path):
    """One attempt comes to nothing, which the ledger does not show: the model's card does."""
    folder, (upload, made) = tmp_path / "run", secure(least_survivors=3)
    strategy(made).run(Mute(app(upload), "answers", count=4, attempts=1), folder)
    found = verify(folder)
    assert found.problems == ()
    assert found.both.participations == found.ledger.rounds + 1 == 5
    (folder / PARTICIPATIONS).unlink()
    assert verify(folder).problems == ()
    (folder / "guarantees.txt").write_text(f"{account_both(found.guarantee, found.ledger, 4)}\n")
    (problem,) = verify(folder).problems
    assert "guarantees.txt says" in problem


def edit_federation(folder, **changes):
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    card = json.loads(metadata["card"])
    card["federation"].update(changes)
    save_tensors(tensors, folder / "model.safetensors", {**metadata, "card": json.dumps(card)})


@pytest.mark.parametrize("asked", [math.nan, math.inf, "4", None])
def test_a_card_whose_participations_are_no_number_is_a_problem(asked, tmp_path):
    folder, (upload, made) = tmp_path / "run", secure(least_survivors=3)
    strategy(made).run(grid(upload), folder)
    edit_federation(folder, asked=asked)
    (problem,) = verify(folder).problems
    assert "does not say how often a user of the federation may have been asked" in problem


def test_a_card_that_lets_clients_add_the_servers_noise_is_found(tmp_path):
    """The server has seen exact sums, and card and guarantees.txt promise something against it."""
    folder, (upload, made) = tmp_path / "run", secure()
    strategy(made).run(grid(upload), folder)
    found = verify(folder)
    assert (found.problems, found.both.server) == ((), None)
    edit_federation(folder, noise_by_clients=True)
    (folder / "guarantees.txt").write_text(f"{account_both(found.guarantee, found.ledger, 4)}\n")
    assert verify(folder).problems == ("the model's card and the settings of upload differ in who adds the noise",)
    (folder / "guarantees.txt").unlink()
    assert verify(folder).problems == ("guarantees.txt is missing",)


def test_a_cap_that_was_passed_already_is_no_cap_of_a_resumed_run(tmp_path):
    folder, (upload, made) = tmp_path / "run", secure(least_survivors=3)
    with pytest.raises(KeyboardInterrupt):
        strategy(made, max_participations=3).run(Dies(app(upload), "none"), folder)
    again = strategy(secure(least_survivors=3)[1], max_participations=1)
    with pytest.raises(SettingError, match="max_participations=1 must be a whole number at least 2"):
        again.run(grid(upload), folder)


def test_a_node_that_was_left_out_for_its_boxes_is_left_out_of_a_resumed_run(tmp_path):
    upload, made = secure()
    _, serving = one_sum(made, Lying(garbled(BOX, bytes(160)), upload), tmp_path)
    again = strategy(secure()[1])
    again._read(tmp_path)
    assert again.barred == serving.barred == {1000}


def test_a_run_that_a_metric_ended_is_charged_as_planned_in_both_sentences(tmp_path):
    upload, made = secure(least_survivors=3, rounds=6)
    evaluate = cl.Evaluate(lambda model: {"accuracy": 0.0}, every=1)
    result = strategy(made).run(grid(upload), tmp_path / "run", [evaluate, cl.EarlyStopping("accuracy", patience=1)])
    assert len(result.reports) < 6
    outsiders, server = (tmp_path / "run" / "guarantees.txt").read_text().splitlines()
    assert "Poisson sampling, 6 rounds" in outsiders
    assert "no sampling, 6 rounds" in server
    assert verify(tmp_path / "run").problems == ()


def test_a_cap_is_for_relations_in_which_one_neighbour_adds_nothing():
    with pytest.raises(SettingError, match="relation="):
        strategy(secure(least_survivors=3, relation="replace-one")[1], max_participations=3)


class Power(InProcessGrid):
    """The power fails when messages are pushed for the given time. Before, everything must be on disk."""

    def __init__(self, made, folder, fails_at=None):
        super().__init__(app(made.upload), USERS)
        self.made, self.folder, self.fails_at, self.pushed = made, folder, fails_at, 0

    def push_messages(self, messages):
        messages = list(messages)
        if "arrays" not in messages[0].content:  # a later stage of a secure sum
            return super().push_messages(messages)
        t = messages[0].content["clipline"]["round"]
        state = load_checkpoint(self.folder / "checkpoint.safetensors", "cpu", str(Circumstances(self.made)))
        sent = messages[0].content["arrays"].to_torch_state_dict()
        assert state.round_index == t
        assert torch.equal(state.params, torch.cat([sent["z"], sent["a"]]))
        assert Ledger.read(self.folder / "ledger.jsonl", unfinished=True).rounds >= state.ledger.rounds >= t
        assert json.loads((self.folder / PARTICIPATIONS).read_text())["asked"]["1000"] > t
        self.pushed += 1
        if self.pushed == self.fails_at:
            raise KeyboardInterrupt
        return super().push_messages(messages)


@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_server_that_died_goes_on_and_forgets_no_release(fails_at, tmp_path):
    folder = tmp_path / "run"
    made = training(noise_multiplier=0.5)
    with pytest.raises(KeyboardInterrupt):
        strategy(made).run(Power(made, folder, fails_at), folder)
    made, again = training(noise_multiplier=0.5), Power(training(noise_multiplier=0.5), folder)
    serving = strategy(made)
    result = serving.run(again, folder)
    assert again.pushed == made.rounds - (fails_at - 1)
    assert result.guarantee.rounds == result.state.ledger.rounds == made.rounds
    assert serving.asked.most == made.rounds + 1  # the one that was asked in vain


@pytest.mark.parametrize("upload", [None, cl.SecureSum(24)], ids=str)
def test_with_an_evaluation_too_a_round_is_on_disk_before_the_next_parameters_leave(upload, tmp_path, monkeypatch):
    begun = []

    def slow(training, ledger, before=cl.Training.accounting):
        def account():
            begun.append(ledger.rounds)
            time.sleep(0.2)
            return before(training, ledger)()

        return account

    monkeypatch.setattr(cl.Training, "accounting", slow)
    folder, made = tmp_path / "run", training(upload, noise_multiplier=0.5, count_stddev=1.0)
    evaluate = cl.Evaluate(lambda model: {"length": float(model.z.norm())}, every=1)
    nodes = Power(made, folder)
    result = strategy(made).run(nodes, folder, [evaluate, cl.Callback()])
    assert nodes.pushed == made.rounds
    assert set(begun) >= {1, 2, 3, 4}
    assert all(report.metrics for report in result.reports)


def test_a_release_that_was_not_stored_is_charged_again(tmp_path):
    class Dies(cl.Callback):
        def on_release(self, state):
            if state.round_index == 2:
                raise KeyboardInterrupt

    folder, made = tmp_path / "run", training(noise_multiplier=0.5)
    with pytest.raises(KeyboardInterrupt):
        strategy(made).run(grid(), folder, [Dies()])
    assert Ledger.read(folder / "ledger.jsonl").rounds == 2
    result = strategy(training(noise_multiplier=0.5)).run(grid(), folder)
    assert result.guarantee.rounds == made.rounds + 1


class Spying(InProcessGrid):
    """Notes every reply that reaches the server, and what the server holds then."""

    def __init__(self, upload, servers=()):
        super().__init__(app(upload), USERS)
        self.seen, self.held, self.servers = [], set(), servers

    def reply(self, message):
        self.held |= {*everything_in([*self.servers])}
        reply = super().reply(message)
        self.seen.append((message.metadata.dst_node_id - 1000, reply.content))
        return reply


def test_a_secure_server_holds_no_vector_in_clear_at_any_time(tmp_path, monkeypatch):
    """Looked for: what clients have encoded, byte for byte, in every message and in all that the server keeps."""
    encoded, servers = [], []

    class Watched(SumServer):
        def __init__(self, plan):
            super().__init__(plan)
            servers.append(self)

    def noted(code, *arguments, before=SecureIntegers.encode, **options):
        encoded.append(before(code, *arguments, **options))
        return encoded[-1].copy()

    monkeypatch.setattr("clipline.federation.flower.SumServer", Watched)
    monkeypatch.setattr(SecureIntegers, "encode", noted)
    upload, made = secure()
    nodes = Spying(upload, servers)
    one_sum(made, nodes, tmp_path)
    sent = [value for _, content in nodes.seen for record in content.values() for value in record.values()]
    clear = [value if isinstance(value, bytes) else value.data for value in sent]
    joined = b"|".join([*nodes.held, *everything_in(servers), *clear])
    assert len(encoded) == USERS
    assert len(joined) > 5000  # it looked at something
    for words in encoded:
        for whole in (words.tobytes(), packed(words, 24).tobytes()):
            assert not any(whole[start : start + 12] in joined for start in range(len(whole) - 11))


def test_no_message_of_a_secure_round_shows_an_update_or_a_bit(tmp_path):
    upload = cl.SecureSum(bits=24)
    made, nodes = training(upload, noise_multiplier=0.5, count_stddev=1.0), Spying(upload)
    one_sum(made, nodes, tmp_path)
    code, kinds, far = made.algorithm.mechanism.code, [], []
    for user, content in nodes.seen:
        assert list(content) == ["reply"]
        record = content["reply"]
        kinds.append("vector")
        if isinstance(record, ArrayRecord):
            clear = code.encode(JOINT[user], CLIP, 0, np.random.default_rng(0)).astype(np.int64)
            sent = np.frombuffer(record["vector"].data, np.uint8).reshape(-1, 3) @ np.array([1, 1 << 8, 1 << 16])
            far += (centred(sent - clear, 24) / 2**23).tolist()  # a mask, uniform in -1 to 1
        else:
            (size,) = {len(value) for value in record.values()}
            kinds[-1] = {64: "keys", 160: "boxes", 66: "shares"}[size]
    assert sorted(kinds) == sorted(["keys", "boxes", "vector", "shares"] * USERS)
    # Of 6 x dim uniform numbers: the mean of squares is 1/3, with deviation 0.3 / sqrt(count); 5 of them.
    assert np.mean(np.square(far)) == pytest.approx(1 / 3, abs=5 * 0.3 / np.sqrt(len(far)))
    assert np.mean(far) == pytest.approx(0, abs=5 * 0.58 / np.sqrt(len(far)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: training(population_size=None), "population_size"),
        (lambda: training(population_size=None, sampling="fixed"), "Poisson sampling"),
        (lambda: training(noise_multiplier=0.5, noise_source="seed"), "noise_source"),
    ],
)
def test_what_cannot_be_promised_over_a_network_is_refused(wrong, message):
    with pytest.raises(SettingError, match=message):
        AdaptiveClippingStrategy(wrong())
