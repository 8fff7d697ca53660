"""The nodes of a federation: a mod that lets nothing leave an app's training function but a clipped update.

A request has the records `arrays` (the trained parameters by name), `config` (for the app's own function) and
`clipline`; later stages of a secure sum have `clients`. A reply has one record: one array, or a few bytes for each of
some clients. Whatever else is refused. `InProcessGrid` runs nodes without a network.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import RunError, check_number, check_whole, refuse
from ..federated.clipping import clip_rows, join_bit
from ..privacy.discrete_noise import discrete_event
from ..privacy.events import NoSampling
from ..random.discrete_gaussian import words_of
from ..random.normal_numbers import SystemNormal
from .encoders import Encoder, KeptShare, RotatedLevels, SecureIntegers, packed, word_type
from .secure_sum import ClosedBoxes, SumClient, SumPlan
from .simulated import Quantised, RandomMask, SecureSum

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise RunError("federations need the package flwr", "install clipline[federation]") from error

TOLD, CLIENTS, REPLY = "clipline", "clients", "reply"  # records of a request, and the one of a reply
SHOWS_ERRORS = "shows-errors"  # in the config of a node whose owner wants to see them
COMPLAINT = 1  # bytes of a complaint
ENCODING = 2  # another number where encoders, rotations or masks change: machines with different ones must not mix

Uploads = SecureSum | Quantised | RandomMask | None
TrainFunction = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, TrainFunction], Message]


def clipped(upload: Uploads = None, *, least_replies: int = 2, noise_multiplier: float | None = None) -> Mod:
    """A mod for the training function of a Flower `ClientApp`: it clips the update, adds the bit and encodes both.

    The function gets the trained parameters as the record "arrays" and must reply with a record "arrays" of the same
    names. Nothing else of its reply leaves the node: no metric, no number of examples, no text of an error. If it
    fails, the node sends an update of zero that was not within the clip, as a simulated user does. A node with the
    config `shows-errors=true` shows errors, to the server too.

    Args:
      upload: That of the server's `Training`: None, `Quantised`, `RandomMask` or `SecureSum`. The node answers no
        server whose upload differs in any setting.
      least_replies: With a `SecureSum`, how many vectors a sum must have. The node refuses to open a smaller one,
        whatever the server says. Where nodes add the noise, vectors of nodes that only fill up a cohort count too.
      noise_multiplier: Where nodes add the noise, the least of a round, such as the training's own. The node sends
        nothing if `least_survivors` shares of the noise that the server asks for come to less.

    Returns:
      The mod, for `@app.train(mods=[...])`.

    Raises:
      SettingError: If `least_replies` is below 2, or a `noise_multiplier` is given where nodes add no noise.

    Example:
      >>> app = ClientApp()
      >>> @app.train(mods=[clipped()])
      ... def train(message, context): ...
    """
    check_whole("least_replies", least_replies, at_least=2, way_out="a sum of one vector hides nothing: give 2 or more")
    if noise_multiplier is not None:
        check_number("noise_multiplier", noise_multiplier, above=0, way_out="give that of the training, such as 0.5")
        if not isinstance(upload, SecureSum) or upload.least_survivors is None:
            raise refuse("noise_multiplier", noise_multiplier, "left out where nodes add no noise",
                         "leave it out, or give upload=SecureSum(least_survivors=20), say")  # fmt: skip

    def mod(message: Message, context: Context, call_next: TrainFunction) -> Message:
        try:
            content = _answer(message, context, call_next, upload, least_replies, noise_multiplier or 0.0)
        except Exception:  # Flower would send its text to the server
            if context.node_config.get(SHOWS_ERRORS) is True:
                raise
            context.state.pop(TOLD, None)
            content = RecordDict()
        return Message(content, reply_to=message)

    return mod


def _answer(
    message: Message, context: Context, call_next: TrainFunction, upload: Uploads, least_replies: int,
    least_noise: float,
) -> RecordDict:  # fmt: skip
    told = message.content[TOLD]
    secure = isinstance(upload, SecureSum)
    if secure and told["stage"] in ("boxes", "masked", "answers"):
        return _go_on(message.content, context)
    if told["stage"] != ("keys" if secure else "train") or told["upload"] != declared(upload):
        raise RunError(
            f"the server asks for {told['upload']!r} and this app has {declared(upload)!r}",
            "run one app, and one version of clipline, on all machines",
        )
    if told["fills-up"] and (not isinstance(upload, SecureSum) or upload.least_survivors is None):
        raise RunError("the server asks for a vector of zeros, without noise: it would hide nobody")
    clip, round_index = float(told["clip"]), int(told["round"])
    if not 0 < clip < math.inf:
        raise RunError("the server's clip is not one")
    joint = _trained(message, context, call_next, clip)
    rng = np.random.default_rng()
    if not isinstance(upload, SecureSum):
        return _vector_reply(encoder_for(upload, len(joint) - 1).encode(joint, clip, round_index, rng))

    numbers = float(told["stddev"]), float(told["length"]), float(told["bit-weight"])
    code = SecureIntegers(len(joint) - 1, upload.bits, *numbers, most_users=1)
    shares = upload.least_survivors or 1
    event = discrete_event(NoSampling(), stddev=code.stddev, bound=code.bound, dim=code.dim, shares=shares)
    if event.noise_multiplier < least_noise * (1 - 1e-9):
        raise RunError(f"the server asks for a noise multiplier of {event.noise_multiplier:g}, not {least_noise:g}")
    least = max(least_replies, shares, int(told["threshold"]))
    plan = SumPlan(code.dim, code.bits, int(told["threshold"]), least, told["round-id"])
    noise = None if upload.least_survivors is None else words_of(SystemNormal())
    vector = code.encode(joint, clip, round_index, rng, noise, shares)
    client = SumClient(int(told["number"]), plan)
    keys = client.keys()
    _keep(context, client, vector.tobytes())
    return _bytes_reply({client.number: keys})


def _go_on(content: RecordDict, context: Context) -> RecordDict:
    """The other stages of a secure sum. What is kept is taken out first: after an error nothing is left to ask."""
    kept, told = context.state.pop(TOLD), content[TOLD]
    client, vector = SumClient.from_json(kept["client"]), kept["vector"]
    if told["round-id"] != client.plan.round_id:
        raise RunError("this is a stage of another round")
    if told["stage"] == "answers":
        return _bytes_reply(client.answer(told["alive"], told["dead"]))
    own = {int(number): value for number, value in content[CLIENTS].items()}
    if told["stage"] == "boxes":
        reply = _bytes_reply(client.boxes(own))
    else:
        words: NDArray[np.unsignedinteger] = np.frombuffer(vector, word_type(client.plan.bits))
        try:
            reply, vector = _vector_reply(packed(client.masked(own, words), client.plan.bits)), b""
        except ClosedBoxes as error:  # says so, and is out of the round
            return _bytes_reply(dict.fromkeys(error.senders, bytes(COMPLAINT)))
    _keep(context, client, vector)
    return reply


def _keep(context: Context, client: SumClient, vector: bytes) -> None:
    """For the next stage, which another process may answer. It stays on this node."""
    context.state[TOLD] = ConfigRecord({"client": client.to_json(), "vector": vector})


def _trained(message: Message, context: Context, call_next: TrainFunction, clip: float) -> Tensor:
    """Clipped update and centred bit (dim + 1,) float64: PRIVATE. Zeros for a node that only fills up a cohort."""
    before, told = message.content["arrays"].to_torch_state_dict(), message.content[TOLD]
    start = _flat(before, told["names"])
    if told["fills-up"]:
        return torch.zeros(len(start) + 1, dtype=torch.float64)
    try:
        after = call_next(message, context).content["arrays"].to_torch_state_dict()
        if any(after[name].shape != value.shape for name, value in before.items()):
            raise ValueError
        update = _flat(after, told["names"]) - start
    except Exception:  # as simulated: no update, not within the clip, and nobody is told why
        if context.node_config.get(SHOWS_ERRORS) is True:
            raise
        update = torch.full_like(start, math.nan)
    return join_bit(*clip_rows(update[None], clip))[0]


def _flat(arrays: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    return torch.cat([arrays[name].reshape(-1).double() for name in names])


# Messages


def declared(upload: Uploads) -> str:
    """What server and client must have in common about an upload, to compare."""
    return f"encoding {ENCODING}: {upload}"


def encoder_for(upload: Uploads, dim: int) -> Encoder:
    """The encoder of an upload that the server decodes."""
    if isinstance(upload, Quantised):
        return RotatedLevels(dim, upload.bits)
    return KeptShare(dim, upload.share if isinstance(upload, RandomMask) else 1.0)


def numbered(values: Mapping[int, bytes]) -> ConfigRecord:
    """Bytes by numbers of clients, as a record."""
    return ConfigRecord({str(number): value for number, value in values.items()})


def _vector_reply(vector: NDArray[Any]) -> RecordDict:
    raw = Array(str(vector.dtype), vector.shape, "raw", np.ascontiguousarray(vector).tobytes())
    return RecordDict({REPLY: ArrayRecord({"vector": raw})})


def _bytes_reply(values: Mapping[int, bytes]) -> RecordDict:
    return RecordDict({REPLY: numbered(values)})


def vector_in(content: RecordDict, like: NDArray[Any]) -> NDArray[Any]:
    """The array of a reply, as many bytes as `like`. What the reply says of its shape is not read. Raises otherwise."""
    (data,) = [array.data for array in _only(content, ArrayRecord).values()]
    if len(data) != like.nbytes:
        raise ValueError
    return np.frombuffer(data, like.dtype).reshape(like.shape)


def bytes_in(content: RecordDict, size: int) -> dict[int, bytes]:
    """The bytes of a reply by numbers, each of this size. Raises otherwise."""
    found = {int(number): value for number, value in _only(content, ConfigRecord).items()}
    if not all(isinstance(value, bytes) and len(value) == size for value in found.values()):
        raise ValueError
    return found


def _only(content: RecordDict, kind: type) -> Any:
    (name,) = content
    if name != REPLY or not isinstance(content[name], kind):
        raise ValueError
    return content[name]


class InProcessGrid:
    """A grid whose nodes run `app`, one after the other, each when its reply is asked for.

    `nodes` has the node config of each node; `partition-id` counts them. An error of the app is raised and ends the
    run, as it is yours to see here; `shows_errors=False` turns it into an error reply, as Flower does.
    """

    def __init__(
        self, app: Callable[[Message, Context], Message], nodes: int, run_config: Mapping[str, Any] | None = None, *,
        shows_errors: bool = True,
    ) -> None:  # fmt: skip
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app, self.shows_errors = app, shows_errors
        self.contexts = {
            1000 + place: Context(
                run_id=1, node_id=1000 + place, state=RecordDict(), run_config=dict(run_config or {}),
                node_config={"partition-id": place, "num-partitions": nodes, SHOWS_ERRORS: shows_errors},
            )
            for place in range(nodes)
        }  # fmt: skip
        self._waiting: dict[str, Message] = {}
        self._ids = itertools.count(1)

    def get_node_ids(self) -> list[int]:
        """All of them are online."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take messages, of which each gets an id."""
        ids = []
        for message in messages:
            ids.append(f"message {next(self._ids)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self._waiting[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies to these messages, once each."""
        asked = [self._waiting.pop(name) for name in list(message_ids) if name in self._waiting]
        return [self.reply(message) for message in asked]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Both at once, for strategies of Flower's own."""
        return self.pull_messages(self.push_messages(messages))

    def reply(self, message: Message) -> Message:
        """What the node answers that the message is for."""
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception:
            if self.shows_errors:
                raise
            return Message(Error(0, "the app failed"), reply_to=message)
