"""The server's side of a federation: a `Training` whose users are the nodes of a Flower grid."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..console import tell
from ..errors import RunError, check_number, check_whole, refuse
from ..federated.backend import CohortRequest
from ..federated.clipping import ClippedSum, ModularSum, PartialSums
from ..federated.discrete_mechanism import DiscreteMechanism
from ..federated.mechanism import GaussianMechanism
from ..federated.round import TrainState
from ..federated.sampling import Cohort, PoissonSampler
from ..privacy.events import PoissonSampling
from ..privacy.relations import Relation
from ..privacy.two_views import Participations, TwoGuarantees, account_both, most_participations
from ..random.streams import NormalGenerator
from ..training import durable
from ..training.callbacks import Callback
from ..training.result import RoundReport, TrainResult
from ..training.run_directory import RunDirectory, checked_path, directory_first
from ..training.run_files import GUARANTEES, PARTICIPATIONS, can_go_on
from ..training.training import Training
from .encoders import unpacked
from .flower_client import CLIENTS, COMPLAINT, TOLD, bytes_in, declared, encoder_for, numbered, vector_in
from .secure_sum import BOX, KEYS, SHARE, RoundAbandoned, SumPlan, SumServer

try:
    from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
except ImportError as error:
    raise RunError("federations need the package flwr", "install clipline[federation]") from error

_UNLIMITED = 1 << 40
_TOO_SMALL = 1e-6  # of delta: what cohorts that are too small for a sum may add to it, at most
_POLL = 0.2  # seconds; Flower's own loop waits 3

Take = Callable[[int, RecordDict], bool]  # adds a node's reply, if it is one


class AdaptiveClippingStrategy:
    """Trains over a Flower grid what a `Training` would simulate: same noise, clip, server step, budget and ledger.

    One node is one user. Each round draws nodes that are online, by Poisson sampling at the training's declared rate,
    and sends them parameters and clip. They answer with one vector each: clipped update and bit, encoded as the
    training's `upload` says. With a `SecureSum` this process sees the sum alone.

    The training's population is a stand-in with examples of the right shapes: nobody's data are on the server.

    A round is abandoned if fewer of the drawn nodes reply than `least_replies`, or than were drawn. Nothing of it is
    released, and the same cohort is asked again. An empty cohort is released and charged like any other. What holds
    for small cohorts and second sums of a `SecureSum` is in docs/howto/federation.md.

    Args:
      training: Poisson sampling with a declared `population_size`, noise from the system, on the processor.
      least_replies: How many drawn nodes a sum must have if a node fails; with a `SecureSum` at least 2. It is also how
        many nodes must be online before a cohort is drawn. At most `cohort_size`; with noise by the server so far below
        it that chance hardly ever draws fewer.
      deadline: Seconds to wait for the replies of a stage. A secure sum has four, and needs the replies of more than
        half of the nodes that were asked.
      max_participations: How often a node may be asked, in all. It bounds what the server may learn of a user. Refused
        where a `SecureSum` has noise by the server, against whom it bounds nothing.
      attempts: How often a round may be abandoned in a row before the run stops. It can be resumed.
      pause: Seconds between two attempts.

    Raises:
      SettingError: If the training cannot be run over a network, or a setting is outside its limits.

    Example:
      >>> app = ServerApp()
      >>> @app.main()
      ... def main(grid, context):
      ...     AdaptiveClippingStrategy(training, least_replies=20).run(grid, "/srv/runs/rides")
    """

    def __init__(
        self, training: Training, *, least_replies: int = 2, deadline: float = 60.0,
        max_participations: int | None = None, attempts: int = 10, pause: float = 5.0,
    ) -> None:  # fmt: skip
        mechanism = training.algorithm.mechanism
        _check(training)
        self.secure = isinstance(mechanism, DiscreteMechanism)
        self.noise_by_clients = isinstance(mechanism, DiscreteMechanism) and mechanism.shares is not None
        least = 2 if self.secure else 1
        check_whole("least_replies", least_replies, at_least=least, way_out="give the replies of a round, such as 20")
        check_number("deadline", deadline, above=0, way_out="give seconds, such as 60")
        check_number("pause", pause, at_least=0, way_out="give seconds, such as 5")
        check_whole("attempts", attempts, at_least=1, way_out="give 10, say")
        if max_participations is not None:
            Participations(max_participations)  # refuses what cannot be
            if training.relation not in (Relation.ADD_OR_REMOVE, Relation.ZERO_OUT):
                way_out = "leave relation out, or max_participations"
                raise refuse("relation", training.relation.value, "add-or-remove or zero-out here", way_out)
            if self.secure and not self.noise_by_clients:
                way_out = "leave it out, or let clients add the noise: SecureSum(least_survivors=20)"
                limit = "left out where the server adds the noise"
                raise refuse("max_participations", max_participations, limit, way_out)
        self.training, self.least_replies, self.deadline = training, least_replies, deadline
        self.max_participations, self.attempts, self.pause = max_participations, attempts, pause
        self.asked = Participations(_UNLIMITED if max_participations is None else max_participations)
        self.unprivate_replies: Counter[str] = Counter()  # how many of each kind; no text of a reply is kept
        self.abandoned = 0
        self.told = {"noise_by_clients": self.noise_by_clients, "asked": 0}  # what the model's card tells
        if max_participations is not None:
            self.told["max_participations"] = max_participations
        self.barred: set[int] = set()  # nodes whose shares or boxes have kept a secure sum from coming out
        self.opened = -1  # the last round whose exact sum the server may have; only where it adds the noise
        self.least_vectors = least_replies  # of a sum, with those of nodes that fill up
        self._check_replies()
        if isinstance(mechanism, DiscreteMechanism) and mechanism.shares is not None:
            way_out = "lower it: so many clients must be online"
            check_whole("least_survivors", mechanism.shares, at_most=self._sampler.population_size, way_out=way_out)
            self.least_vectors = max(least_replies, mechanism.shares)

    @property
    def _sampler(self) -> Any:
        return self.training.algorithm.sampler

    def run(self, grid: Any, directory: str | Path, callbacks: Sequence[Callback] = ()) -> TrainResult:
        """Train over the grid. A run directory that an interrupted run has left is gone on with.

        Before parameters leave, state, ledger and participations are on disk. If this process dies, run it again with
        the same directory: rounds that were released and not stored yet are charged again, and none is forgotten.
        """
        folder, callbacks = directory_first(checked_path(directory), callbacks)
        resumes = can_go_on(folder.path)
        if resumes:
            self._read(folder.path)
        federated, problem = copy(self.training), copy(self.training.problem)
        problem.fast = replace(problem.fast, prefetch=False)  # a cohort is drawn when its round begins
        online = _OnlineNodes(self._sampler, lambda: self._online(grid))
        federated.problem, federated.algorithm = problem, replace(self.training.algorithm, sampler=online)
        federated.backend = _Grid(self, grid, folder.path)
        federated.federation = self.told
        federated.replays = False  # nodes that are asked again reply otherwise
        callbacks = [*callbacks, _OnDisk(self, folder)]
        return federated.resume(folder.path, callbacks) if resumes else federated.run(callbacks)

    def guarantees(self, result: TrainResult) -> TwoGuarantees:
        """What a run promises to outsiders, and against this server."""
        ledger = result.state.ledger
        most = most_participations(self.told, result.guarantee.rounds)  # of a run that a metric ended: all planned
        rounds = ledger if ledger.rounds else ledger.add(self.training.algorithm.event)
        return account_both(result.guarantee, rounds, most)

    def _check_replies(self) -> None:
        """Refuse a `least_replies` that cohorts cannot have."""
        sampler, way_out = self._sampler, "lower it, or raise cohort_size"
        check_whole("least_replies", self.least_replies, at_most=sampler.cohort_size, way_out=way_out)
        if not self._enough(sampler.population_size):
            most = next((k for k in range(self.least_replies, 1, -1) if self._enough(sampler.population_size, k)), 0)
            limit = "where the server adds the noise: chance would draw smaller cohorts, whose sum nobody may see"
            if most:
                raise refuse("least_replies", self.least_replies, f"at most {most} {limit}", way_out)
            way_out = "raise cohort_size, to population_size say, or let clients add the noise: least_survivors=20"
            raise refuse("cohort_size", sampler.cohort_size, f"larger {limit}", way_out)

    def _enough(self, nodes: int, least: int | None = None) -> bool:
        """Whether cohorts drawn from so many nodes will do."""
        least = least or self.least_replies
        if nodes < least or not self.secure or self.noise_by_clients:
            return nodes >= max(least, self.least_vectors)
        from scipy.special import bdtr

        rate = self._sampler.sampling.rate
        too_small = self.training.rounds * float(bdtr(least - 1, nodes, rate) - (1 - rate) ** nodes)
        # A run that stops there differs from one that goes on by this chance, whoever is in the data.
        return too_small * (1 + math.exp(min(self.training.planned.epsilon, 700))) <= _TOO_SMALL * self.training.delta

    def _online(self, grid: Any) -> list[int]:
        """The nodes that are online, once there are enough."""
        if not self._enough(count := len(grid.get_node_ids())):
            tell(f"waiting for more nodes: {count} are online, too few to draw a cohort of")
        while not self._enough(len(nodes := sorted(grid.get_node_ids()))):
            time.sleep(1.0)
        return nodes

    def _read(self, folder: Path) -> None:
        try:
            kept = json.loads((folder / PARTICIPATIONS).read_text(encoding="utf-8"))
            counts = {name: int(count) for name, count in kept["asked"].items()}
            self.unprivate_replies, self.abandoned = Counter(kept["replies"]), int(kept["abandoned"])
            self.told["asked"], self.opened = int(kept["sums"]), int(kept["opened"])
            self.barred = {int(node) for node in kept["barred"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            what, way_out = f"{str(folder / PARTICIPATIONS)!r} cannot be read", "restore it, or start a new run"
            raise RunError(what, way_out) from error
        self.asked = replace(self.asked, counts=counts)  # refuses a cap that is below what nodes were asked already

    def write(self, folder: Path) -> None:
        """Have the participations on disk."""
        kept = {"asked": self.asked.counts, "replies": self.unprivate_replies, "abandoned": self.abandoned,
                "sums": self.told["asked"], "opened": self.opened, "barred": sorted(self.barred)}  # fmt: skip
        durable.write(folder / PARTICIPATIONS, json.dumps(kept), mode=0o600)


def _check(training: Training) -> None:
    """Refuse a training that would promise something else over a network."""
    sampler, mechanism = training.algorithm.sampler, training.algorithm.mechanism
    if type(sampler) is not PoissonSampler or type(mechanism) not in (GaussianMechanism, DiscreteMechanism):
        raise refuse("training", "of another kind", "one with Poisson sampling and independent noise", "leave out both")
    if not training.declared:
        way_out = "declare how many nodes there are, as a public number"
        raise refuse("population_size", None, "given in Privacy for a federation", way_out)
    if training.personal is not None or training.device.type != "cpu":
        raise refuse("training", "with personal parameters or a GPU", "without them on a server", "leave them out")
    if training.privacy.noise_source == "seed" and training.noise_multiplier > 0:
        raise refuse("noise_source", "seed", "'system', as other replies with the same noise show the difference",
                     "leave seed out")  # fmt: skip


@dataclass(frozen=True)
class _OnlineNodes:
    """Samples nodes that are online, each at the declared rate."""

    declared: PoissonSampler
    online: Callable[[], list[int]]

    @property
    def cohort_size(self) -> int:
        return self.declared.cohort_size

    @property
    def sampling(self) -> PoissonSampling:
        return self.declared.sampling

    def draw(self, rng: NormalGenerator, round_index: int = 0) -> Cohort:
        nodes = np.array(self.online(), np.uint64)
        drawn = replace(self.declared, users=len(nodes)).draw(rng, round_index)
        return Cohort(np.sort(nodes[drawn.users].view(np.int64)), drawn.sampling)


class _OnDisk(Callback):
    """Waits after every round until all of it is on disk, and writes down the guarantees at the end."""

    reads_guarantee, waits_for_metrics = False, True

    def __init__(self, strategy: AdaptiveClippingStrategy, folder: RunDirectory) -> None:
        self._strategy, self._folder = strategy, folder

    def on_start(self, training: Training, state: TrainState) -> None:
        (self._folder.path / GUARANTEES).unlink(missing_ok=True)  # of a run that was interrupted
        self._strategy.write(self._folder.path)
        self._folder.store(state)

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        self._folder.store(state)

    def on_end(self, result: TrainResult) -> None:
        durable.write(self._folder.path / GUARANTEES, f"{self._strategy.guarantees(result)}\n")
        self._strategy.write(self._folder.path)


class _Grid:
    """The backend of a federated training: each sum comes from the nodes of a grid."""

    size = 1

    def __init__(self, strategy: AdaptiveClippingStrategy, grid: Any, folder: Path) -> None:
        self._strategy, self._grid, self._folder = strategy, grid, folder

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    def sums(self, requests: Sequence[CohortRequest]) -> list[ClippedSum]:
        """The sum of each request, however often its cohort has to be asked: PRIVATE."""
        return [self._sum(request) for request in requests]

    def _sum(self, request: CohortRequest) -> ClippedSum:
        strategy = self._strategy
        if request.round_index <= strategy.opened:  # before this process was started again
            return self._nothing(request)
        for _ in range(strategy.attempts):
            names = {str(node): node for node in request.cohort.users.view(np.uint64).tolist()}
            nodes = [names[name] for name in strategy.asked.allowed(names) if names[name] not in strategy.barred]
            strategy.asked = strategy.asked.add(map(str, nodes))
            strategy.told["asked"] += 1
            strategy.write(self._folder)  # they count from now on, whatever happens
            found = self._secure(request, nodes) if strategy.secure else self._plain(request, nodes)
            if found is not None:
                return found
            strategy.abandoned += 1
            time.sleep(strategy.pause)
        raise RunError(
            f"round {request.round_index} was abandoned {strategy.attempts} times, as too few nodes replied",
            "start nodes with this server's app, raise the deadline or lower least_replies; then run it again to go on",
        )

    def _plain(self, request: CohortRequest, nodes: list[int]) -> ClippedSum | None:
        """The sum of vectors that are decoded one by one, and clipped again as they come."""
        training, clip, t = self._strategy.training, request.clip, request.round_index
        encoder = encoder_for(training.upload, training.dim)  # type: ignore[arg-type]
        nothing = torch.zeros(training.dim + 1, dtype=torch.float64)
        like = encoder.encode(nothing, clip, t, np.random.default_rng())
        sums = PartialSums(torch.empty(1, training.dim + 1, dtype=torch.float64))

        def take(node: int, content: RecordDict) -> bool:
            decoded = encoder.decode(vector_in(content, like), clip, t)
            return decoded is not None and sums.add_clipped(decoded, clip)

        told = self._with_parameters(request, stage="train")
        replies = self._ask({node: told({}) for node in nodes}, take)
        if replies < min(self._strategy.least_replies, len(nodes)):
            return None
        (found,) = sums.finished([clip], [request.cohort.sampling])
        return found

    def _nothing(self, request: CohortRequest) -> ClippedSum:
        """A secure sum of no vectors."""
        mechanism: Any = self._strategy.training.algorithm.mechanism
        return ModularSum(mechanism.code.dim, mechanism.code.bits).finished(request.clip, request.cohort.sampling)

    def _secure(self, request: CohortRequest, nodes: list[int]) -> ClippedSum | None:
        """The sum of masked vectors.

        If clients add the noise, others that are online fill up a small cohort: their vectors are zero, and they add
        their shares. They do not count as replies. Without noise they would hide nobody, so then there are none.
        """
        strategy = self._strategy
        mechanism: Any = strategy.training.algorithm.mechanism
        code, left_out = mechanism.code, strategy.barred.union(nodes)
        if not strategy.noise_by_clients and len(nodes) < strategy.least_replies:
            if not nodes:
                return self._nothing(request)
            raise RunError(
                f"round {request.round_index} has a cohort of fewer than {strategy.least_replies} nodes, whose sum "
                "must not be opened", "have more nodes online, or lower least_replies; then run it again to go on",
            )  # fmt: skip
        others = [node for node in self._grid.get_node_ids() if node not in left_out]
        wanted = max(strategy.least_vectors, mechanism.cohort_size) - len(nodes) if strategy.noise_by_clients else 0
        rng = np.random.default_rng()
        fill = {others[place] for place in rng.permutation(len(others))[: max(wanted, 0)]}
        order = rng.permutation(np.array([*nodes, *fill], np.uint64)).tolist()  # numbers tell clients nothing
        number = {node: place + 1 for place, node in enumerate(order)}
        threshold = max(2, len(order) // 2 + 1)
        least = max(strategy.least_vectors, threshold)
        server = SumServer(plan := SumPlan(code.dim, code.bits, threshold, least, secrets.token_bytes(16)))
        told = self._with_parameters(
            request, stage="keys", threshold=threshold, stddev=code.stddev, length=code.length,
            **{"bit-weight": code.bit_weight, "round-id": plan.round_id},
        )  # fmt: skip

        def stage(name: str, values: Mapping[int, Mapping[int, bytes]], take: Take, **more: Any) -> None:
            """Ask these clients, each with bytes by the number of another."""
            told = ConfigRecord({"stage": name, "round-id": plan.round_id, **more})
            contents = {one: RecordDict({TOLD: told, CLIENTS: numbered(own)}) for one, own in values.items()}
            self._ask({order[one - 1]: content for one, content in contents.items()}, take)

        def taking(add: Callable[[int, dict[int, bytes]], bool], size: int) -> Take:
            return lambda node, content: add(number[node], bytes_in(content, size))

        like = np.zeros(-(-code.dim * code.bits // 8), np.uint8)

        def masked(node: int, content: RecordDict) -> bool:
            if isinstance(content.get("reply"), ArrayRecord):
                return server.add_masked(number[node], unpacked(vector_in(content, like), code.bits, code.dim))
            server.add_complaint(number[node], bytes_in(content, COMPLAINT))
            return False

        try:
            self._ask({node: told({"number": number[node], "fills-up": node in fill}) for node in order},
                      taking(lambda one, keys: server.add_keys(one, *keys.values()), KEYS))  # fmt: skip
            roster = server.roster()
            stage("boxes", dict.fromkeys(roster, roster), taking(server.add_boxes, BOX))
            stage("masked", server.boxes_for(), masked)
            alive, dead = server.survivors()
            if len(alive - {number[node] for node in fill}) < min(strategy.least_replies, len(nodes)):
                return None
            if not strategy.noise_by_clients:
                strategy.opened = request.round_index
                strategy.write(self._folder)  # on disk before anybody is asked for shares
            nothing: dict[int, bytes] = {}
            stage("answers", dict.fromkeys(alive, nothing), taking(server.add_answer, SHARE), alive=sorted(alive),
                  dead=sorted(dead))  # fmt: skip
            return server.total().finished(request.clip, request.cohort.sampling)
        except RoundAbandoned:
            # Shares may still come: with another sum of this round the server could tell the two apart.
            return self._nothing(request) if strategy.opened == request.round_index else None
        finally:
            strategy.barred |= {order[one - 1] for one in server.suspects}
            strategy.write(self._folder)

    def _with_parameters(self, request: CohortRequest, **same: Any) -> Callable[[Mapping[str, Any]], RecordDict]:
        """Contents of messages that have the parameters: for each node what is the same for all, and its own."""
        shapes = self._strategy.training.problem.model.named_shapes
        pieces = torch.split(request.params, [shape.numel() for shape in shapes.values()])
        named = {name: piece.reshape(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
        arrays, t = ArrayRecord(named), request.round_index
        told = {"names": list(shapes), "clip": request.clip, "round": t, "fills-up": False,
                "upload": declared(self._strategy.training.upload), **same}  # type: ignore[arg-type]  # fmt: skip
        return lambda own: RecordDict(
            {"arrays": arrays, "config": ConfigRecord({"server-round": t + 1}), TOLD: ConfigRecord({**told, **own})}
        )

    def _ask(self, contents: Mapping[int, RecordDict], take: Take) -> int:
        """Send each node its message and hand over replies one by one, until the deadline; how many were taken.

        Replies are told apart by the message that they answer. What cannot be taken is counted and forgotten.
        """
        count, taken = self._strategy.unprivate_replies, 0
        if not contents:
            return 0
        ttl = 2 * self._strategy.deadline + 60  # clocks of machines differ
        messages = [Message(content, node, MessageType.TRAIN, ttl=ttl) for node, content in contents.items()]
        waiting = {name: node for name, node in zip(self._grid.push_messages(messages), contents, strict=True) if name}
        count["not sent"] += len(contents) - len(waiting)
        end = time.monotonic() + self._strategy.deadline
        while waiting:
            for name in list(waiting):
                for reply in self._pulled(name, waiting):
                    node = waiting.get(reply.metadata.reply_to_message_id)
                    kind = _kind(reply, node, take)
                    count[kind] += 1
                    taken += kind == "taken"
                    if kind != "foreign":
                        del waiting[reply.metadata.reply_to_message_id]
            if time.monotonic() >= end:
                break
            if waiting:
                time.sleep(_POLL)
        count["late or missing"] += len(waiting)
        return taken

    def _pulled(self, name: str, waiting: dict[str, int]) -> Iterable[Message]:
        """The reply to a message, if it is there; one that Flower cannot unpack is given up."""
        try:
            return list(self._grid.pull_messages([name]))
        except Exception:  # a client chose what is in it; if the network fails, the next messages cannot be sent
            self._strategy.unprivate_replies["malformed"] += 1
            del waiting[name]
            return []


def _kind(reply: Message, node: int | None, take: Take) -> str:
    """What becomes of a reply, in a word."""
    if node is None:
        return "foreign"
    if reply.has_error():
        return "error"
    if reply.metadata.src_node_id != node:
        return "foreign"
    try:
        return "taken" if take(node, reply.content) else "malformed"
    except Exception:  # whatever it holds, it must not end the run
        return "malformed"
