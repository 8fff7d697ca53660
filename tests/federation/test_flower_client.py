"""What leaves a node: a clipped update and its bit, or nothing."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="the extra federation is not installed")

from federations import DIM, UPDATES, app, grid, training
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

import clipline as cl
from clipline.errors import SettingError
from clipline.federation.flower_client import InProcessGrid, clipped, declared

ARRAYS = ArrayRecord({"a": torch.zeros(DIM - 2), "z": torch.zeros(2)})


def asked(nodes, told, node=1000, clients=None):
    """The content of a node's reply."""
    records = {"clipline": told, "clients": clients}
    records = {name: ConfigRecord(record) for name, record in records.items() if record is not None}
    content = RecordDict({"arrays": ARRAYS, **records})
    (name,) = nodes.push_messages([Message(content, node, "train")])
    (reply,) = nodes.pull_messages([name])
    assert not reply.has_error()
    return reply.content


SECURE = cl.SecureSum(24)
TRAIN = {
    "stage": "train", "names": ["z", "a"], "clip": 0.3, "round": 0, "fills-up": False, "upload": declared(None),
}  # fmt: skip
KEYS = {
    **TRAIN, "stage": "keys", "upload": declared(SECURE),
    "threshold": 2, "stddev": 20.0, "length": 9.0, "bit-weight": 3.0, "round-id": b"r",
}  # fmt: skip


def vector(content):
    assert list(content) == ["reply"]
    return np.frombuffer(content["reply"]["vector"].data, np.float32)


def test_the_clipped_update_and_its_bit_leave_in_the_order_that_was_asked_for():
    update = UPDATES[0].double()
    sent = vector(asked(grid(), TRAIN))
    assert sent[:-1] == pytest.approx((update * 0.3 / update.norm()).numpy(), rel=1e-6)
    assert sent[-1] == -0.5
    within = vector(asked(grid(), {**TRAIN, "clip": 9.0}))
    assert within == pytest.approx([*UPDATES[0].tolist(), 0.5], rel=1e-6)


def failing(message, context):
    raise ValueError("account 4711 of Ann")


def not_finite(message, context):
    arrays = {name: array * math.nan for name, array in message.content["arrays"].to_torch_state_dict().items()}
    return Message(RecordDict({"arrays": ArrayRecord(arrays)}), reply_to=message)


def another_shape(message, context):
    return Message(RecordDict({"arrays": ArrayRecord({"a": torch.zeros(4), "z": torch.zeros(1)})}), reply_to=message)


def no_arrays(message, context):
    return Message(RecordDict(), reply_to=message)


@pytest.mark.parametrize("train", [failing, not_finite, another_shape, no_arrays])
def test_a_training_that_fails_sends_a_zero_update_that_was_not_within(train, capfd):
    made = ClientApp()
    made.train(mods=[clipped()])(train)
    sent = vector(asked(InProcessGrid(made, 1, shows_errors=False), TRAIN))
    assert sent.tolist() == [0.0] * DIM + [-0.5]
    assert "Ann" not in "".join(capfd.readouterr())


def test_only_a_node_whose_owner_says_true_shows_errors():
    made = ClientApp()
    made.train(mods=[clipped()])(failing)
    nodes = InProcessGrid(made, 1, shows_errors=False)
    nodes.contexts[1000].node_config["shows-errors"] = "false"
    assert vector(asked(nodes, TRAIN)).tolist() == [0.0] * DIM + [-0.5]


def test_one_s_own_errors_are_shown_in_one_process():
    made = ClientApp()
    made.train(mods=[clipped()])(failing)
    with pytest.raises(ValueError, match="Ann"):
        asked(InProcessGrid(made, 1), TRAIN)


@pytest.mark.parametrize(
    "told",
    [
        None,  # of another strategy, which would get the model as it is
        {**TRAIN, "clip": math.inf},
        {**TRAIN, "clip": 0.0},
        {**TRAIN, "names": ["z", "b"]},
        KEYS,
    ],
)
def test_other_requests_get_nothing(told):
    assert list(asked(grid(shows_errors=False), told)) == []


UPLOADS = [None, cl.Quantised(8), cl.Quantised(4), cl.RandomMask(0.5), cl.RandomMask(1.0), SECURE, cl.SecureSum(18),
           cl.SecureSum(24, least_survivors=3)]  # fmt: skip


@pytest.mark.parametrize("own", UPLOADS, ids=str)
def test_a_node_answers_no_server_whose_upload_is_another(own):
    nodes, stage = InProcessGrid(app(own), 1, shows_errors=False), KEYS if isinstance(own, cl.SecureSum) else TRAIN
    for other in UPLOADS:
        reply = asked(nodes, {**stage, "number": 1, "upload": declared(other)})
        assert bool(list(reply)) == (other == own)
    assert list(asked(nodes, {**stage, "number": 1, "upload": declared(own).replace("encoding 2", "encoding 1")})) == []


def test_a_node_makes_no_share_of_a_noise_that_is_none():
    for odd in ({"stddev": 0.0}, {"stddev": math.nan}, {"length": 2.0**40}, {"bit-weight": -3.0}):
        assert list(asked(grid(SECURE, shows_errors=False), {**KEYS, "number": 1, **odd})) == []


@pytest.mark.parametrize(("least", "answered"), [(None, True), (0.49, True), (0.5, True), (0.51, False)])
def test_a_node_makes_no_share_of_less_noise_than_its_app_promises(least, answered):
    upload = cl.SecureSum(24, least_survivors=3)
    made = training(upload, noise_multiplier=0.5, count_stddev=1.0)
    code = made.algorithm.mechanism.code  # its noise on its bound is a multiplier of 0.5
    assert math.sqrt(code.stddev**2 - 4) / code.bound == pytest.approx(0.5)
    told = {**KEYS, "upload": declared(upload), "stddev": code.stddev, "length": code.length, "number": 1}
    nodes = InProcessGrid(app(upload, noise_multiplier=least), 1, shows_errors=False)
    assert bool(list(asked(nodes, {**told, "bit-weight": code.bit_weight}))) == answered


@pytest.mark.parametrize("upload", [None, cl.Quantised(8), SECURE], ids=str)
def test_a_node_that_adds_no_noise_cannot_promise_any(upload):
    with pytest.raises(SettingError, match=r"noise_multiplier=.* must be left out"):
        clipped(upload, noise_multiplier=0.5)


def test_a_node_that_cannot_open_a_box_names_the_sender_and_is_out_of_the_round():
    nodes, boxes = opened()
    told = {"stage": "masked", "round-id": b"r"}
    own = {sender: own["1"] for sender, own in boxes.items() if sender != "1"}
    reply = asked(nodes, told, 1000, {**own, "3": bytes(160)})
    assert dict(reply["reply"]) == {"3": bytes(1)}
    assert list(asked(nodes, told, 1000, own)) == []


@pytest.mark.parametrize("upload", [None, cl.Quantised(8), SECURE], ids=str)
def test_a_node_without_noise_of_its_own_fills_up_no_cohort(upload):
    """Its zeros would count as a vector, and hide nobody."""
    told = {**(KEYS if upload == SECURE else TRAIN), "number": 1, "upload": declared(upload)}
    assert list(asked(grid(upload), told)) == ["reply"]
    assert list(asked(grid(upload, shows_errors=False), {**told, "fills-up": True})) == []


def opened(count=3, least=2, upload=SECURE):
    """Nodes that have answered all stages but the last, and what they are to be asked then."""
    nodes = InProcessGrid(app(upload, least_replies=least), count, shows_errors=False)
    numbers = {1000 + place: place + 1 for place in range(count)}
    keys = {}
    for node, number in numbers.items():
        keys |= dict(asked(nodes, {**KEYS, "number": number, "upload": declared(upload)}, node)["reply"])
    boxes = {}
    for node, number in numbers.items():
        reply = asked(nodes, {"stage": "boxes", "round-id": b"r"}, node, keys)
        boxes |= {str(number): dict(reply["reply"])} if "reply" in reply else {}
    return nodes, boxes


def test_a_node_answers_no_stage_twice_and_none_of_another_round():
    nodes, boxes = opened()
    told = {"stage": "masked", "round-id": b"r"}
    mine, others = ({sender: own[name] for sender, own in boxes.items() if sender != name} for name in "12")
    assert list(asked(nodes, {**told, "round-id": b"s"}, 1001, others)) == []
    assert list(asked(nodes, told, 1000, mine)) == ["reply"]
    assert list(asked(nodes, told, 1000, mine)) == []
    answers = {"stage": "answers", "round-id": b"r", "alive": [1, 2, 3], "dead": []}
    assert list(asked(nodes, answers, 1000)) == []  # after an error nothing is left to ask


def test_a_node_takes_the_least_number_of_vectors_from_its_app_and_not_from_the_server():
    _, boxes = opened(count=3, least=4)
    assert boxes == {}
    _, boxes = opened(count=3, upload=cl.SecureSum(24, least_survivors=4))
    assert boxes == {}


def test_clipped_refuses_a_sum_of_one():
    with pytest.raises(SettingError, match="least_replies=1"):
        clipped(least_replies=1)
