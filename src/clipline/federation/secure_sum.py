"""Sums of vectors that no server sees the parts of, after Bonawitz et al. (2017): double masks, with dropouts.

Four stages, each a message from every client and an answer of the server:

1. keys: every client sends two public keys; the server sends everybody's to all.
2. boxes: every client splits its two secrets into shares, one in an encrypted box for each other client.
3. masked: every client sends its vector plus a mask of its own and masks that it has in common with each other client.
4. answers: clients send shares, of the own masks of those who are alive and of the keys of those who are dead.

The masks of pairs cancel in the sum. With enough shares the server takes off the masks that are left. It sees the sum.

Nothing here sends anything: messages go in and come out. The promise is for a server that follows the protocol but
looks at everything (docs/howto/federation.md). Everything is made for one round and used for it alone.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import RunError, check_whole, refuse
from ..federated.clipping import ModularSum
from .encoders import word_type

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ImportError as error:
    raise RunError("secure sums need the package cryptography", "install clipline[federation]") from error

Boxes = Mapping[int, bytes]  # by the other client's number
Answer = Mapping[int, bytes]  # a share, by the number of the client whose secret it is of

PRIME = (1 << 521) - 1  # shares are numbers below it
KEYS, SHARE, NONCE = 64, 66, 12  # bytes of two public keys (for boxes, for masks), of a share, and before a box
BOX = NONCE + 2 * SHARE + 16
T = TypeVar("T")
_private = X25519PrivateKey.from_private_bytes
_TRIES = 64  # sets of clients whose shares are put together, before a secret is given up
_NUMBERS = range(1, 1 << 64)  # of clients


class RoundAbandoned(RunError):
    """Too few clients are left. Nothing is opened, and nothing may be charged."""


class ClosedBoxes(RunError):
    """The boxes of `senders` cannot be opened. A client says so to the server, and nothing more in that round."""

    def __init__(self, senders: Iterable[int]) -> None:
        super().__init__("this round's sum is refused: a box cannot be opened", "abandon the round")
        self.senders = frozenset(senders)


@dataclass(frozen=True)
class SumPlan:
    """What server and clients agree on before a round.

    `threshold` is how many clients it takes to open a sum, more than half of those who take part: clients refuse fewer.
    No sum of fewer than `least_survivors` vectors is opened: clients take it from the published app, not from the
    server. `round_id` is different in every round of every run.
    """

    dim: int
    bits: int
    threshold: int
    least_survivors: int
    round_id: bytes

    def __post_init__(self) -> None:
        check_whole("dim", self.dim, at_least=1, way_out="give the length of a vector")
        check_whole("bits", self.bits, at_least=1, at_most=32, way_out="give the bits of the modulus")
        check_whole("threshold", self.threshold, at_least=2, way_out="give more than half of the clients of a round")
        way_out = "give the threshold, or more: a sum of one vector hides nothing"
        check_whole("least_survivors", self.least_survivors, at_least=self.threshold, way_out=way_out)
        if not isinstance(self.round_id, bytes) or not self.round_id:
            raise refuse("round_id", self.round_id, "bytes that name the run and the round", "give b'run 7, round 3'")


class SumClient:
    """One client in one round: `keys`, `boxes`, `masked` and `answer`, once each and in this order."""

    def __init__(self, number: int, plan: SumPlan) -> None:
        if number not in _NUMBERS:
            raise refuse("number", number, "above 0 and below 2^64", "give one that no other client has")
        self.number, self.plan = number, plan
        self._box_key, self._mask_key = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._own = secrets.token_bytes(32)  # seed of the client's own mask
        self._roster: dict[int, bytes] = {}
        self._received: dict[int, bytes] = {}
        self._stage = 0

    def keys(self) -> bytes:
        """The public keys."""
        self._next(0)
        return self._public

    def boxes(self, roster: Mapping[int, bytes]) -> dict[int, bytes]:
        """A box of shares for every other client, from everybody's public keys."""
        self._next(1)
        if roster.get(self.number) != self._public or len(_singly(roster.values())) != 2 * len(roster):
            raise _refused("the list of keys is not what was sent")
        if not all(number in _NUMBERS for number in roster):
            raise _refused("the list of keys has numbers that no client has")
        if len(roster) < self.plan.least_survivors or 2 * self.plan.threshold <= len(roster):
            raise _refused(f"{len(roster)} clients do not fit the plan")
        self._roster = dict(roster)
        own = split(self._own, self.plan.threshold, self._roster)
        key = split(self._mask_key.private_bytes_raw(), self.plan.threshold, self._roster)
        self._received = {self.number: own[self.number] + key[self.number]}
        return {other: self._closed(other, own[other] + key[other]) for other in roster if other != self.number}

    def masked(self, boxes: Boxes, vector: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
        """The vector with all masks. `boxes` are of those who still take part.

        Raises:
          ClosedBoxes: If some of them cannot be opened.
        """
        self._next(2)
        if not boxes.keys() <= self._roster.keys() - {self.number} or len(boxes) + 1 < self.plan.least_survivors:
            raise _refused("the boxes are not of enough clients of this round")
        word = word_type(self.plan.bits)
        if vector.shape != (self.plan.dim,) or vector.dtype != word:
            raise _refused(f"the vector is not one of {self.plan.dim} numbers of type {np.dtype(word)}")
        opened = {other: self._opened(other, box) for other, box in boxes.items()}
        if closed := [other for other, shares in opened.items() if not shares]:
            raise ClosedBoxes(closed)
        self._received |= opened
        total, masks = vector.copy(), _Masks(self.plan)
        masks.add(total, _derived(self._own, "own", self.plan, self.number))
        for other in boxes:
            masks.add(total, self._common("pair", other), negative=self.number > other)
        self._own = b""  # whoever takes this client over now cannot take the mask off
        total &= word((1 << self.plan.bits) - 1)  # else carries of the sum would tell how many numbers were negative
        return total

    def answer(self, alive: Iterable[int], dead: Iterable[int]) -> dict[int, bytes]:
        """Shares: of the own mask of each who is alive, of the key of each who is dead.

        Refused, and nothing is shown, if too few are alive, if somebody is in both lists or in none, and twice.
        """
        self._next(3)
        living, gone = set(alive), set(dead)
        if living & gone or living | gone != self._received.keys() or self.number not in living:
            raise _refused("the lists of living and dead do not fit those who took part")
        if len(living) < self.plan.least_survivors:
            raise _refused(f"only {len(living)} clients are left")
        return {other: share[:SHARE] if other in living else share[SHARE:] for other, share in self._received.items()}

    def to_json(self) -> str:
        """Everything, secrets too, for a client whose process ends between two stages. It must not leave the client."""
        plan = {**vars(self.plan), "round_id": self.plan.round_id.hex()}
        own = [key.hex() for key in (self._box_key.private_bytes_raw(), self._mask_key.private_bytes_raw(), self._own)]
        known = [{other: data.hex() for other, data in held.items()} for held in (self._roster, self._received)]
        return json.dumps([self.number, self._stage, plan, own, known])

    @classmethod
    def from_json(cls, text: str) -> SumClient:
        """The client that `to_json` wrote. Take what is written up once only: then no stage is answered twice."""
        number, stage, plan, own, known = json.loads(text)
        client = cls(number, SumPlan(**{**plan, "round_id": bytes.fromhex(plan["round_id"])}))
        box_key, mask_key, client._own = map(bytes.fromhex, own)
        client._box_key, client._mask_key = _private(box_key), _private(mask_key)
        client._roster, client._received = (
            {int(other): bytes.fromhex(data) for other, data in held.items()} for held in known
        )
        client._stage = stage
        return client

    @property
    def _public(self) -> bytes:
        return _public(self._box_key) + _public(self._mask_key)

    def _next(self, stage: int) -> None:
        if stage != self._stage:
            raise _refused("a stage was asked for twice, or out of turn")
        self._stage += 1

    def _closed(self, other: int, shares: bytes) -> bytes:
        nonce = secrets.token_bytes(NONCE)
        cipher = AESGCM(self._common("box", other))
        return nonce + bytes(cipher.encrypt(nonce, shares, _names(self.plan, self.number, other)))

    def _opened(self, other: int, box: bytes) -> bytes:
        """The two shares in a box; nothing if it was changed, or holds anything else."""
        cipher = AESGCM(self._common("box", other))
        try:
            shares = cipher.decrypt(box[:NONCE], box[NONCE:], _names(self.plan, other, self.number))
        except (InvalidTag, ValueError):
            return b""
        return bytes(shares) if len(shares) == 2 * SHARE else b""

    def _common(self, purpose: str, other: int) -> bytes:
        key, first = (self._box_key, 0) if purpose == "box" else (self._mask_key, 32)
        return _common(key, self._roster[other][first : first + 32], purpose, self.plan, self.number, other)


class SumServer:
    """The server of one round. Each `add_...` says whether the message was taken; none shows anybody's vector.

    After the messages of a stage `roster`, `boxes_for`, `survivors` and `total` close it, in this order. Messages that
    cannot be right are not taken, and a few wrong shares do no harm. `suspects` are clients who have kept others from
    going on: leave them out of the next attempt.
    """

    def __init__(self, plan: SumPlan) -> None:
        self.plan = plan
        self._keys: dict[int, bytes] = {}
        self._boxes: dict[int, Boxes] = {}  # by sender, then receiver
        self._sum: NDArray[np.unsignedinteger] = np.zeros(plan.dim, word_type(plan.bits))  # masked
        self._alive: set[int] = set()
        self._answers: dict[int, Answer] = {}
        self._complaints: dict[int, frozenset[int]] = {}
        self._unfit: set[int] = set()  # whose secret does not come out of its shares
        self._stage = 0

    def add_keys(self, number: int, keys: bytes) -> bool:
        """Stage 1."""
        if number not in _NUMBERS or not _are_bytes({number: keys}, {number}, KEYS):
            return False
        fits = len(_singly([*self._keys.values(), keys])) == 2 * len(self._keys) + 2
        return self._kept(0, self._keys, number, fits and all(map(_is_key, _singly([keys]))), keys)

    def roster(self) -> dict[int, bytes]:
        """Everybody's keys, for all who sent theirs."""
        self._close(0, len(self._keys))
        if 2 * self.plan.threshold <= len(self._keys):
            limit = f"more than half of the {len(self._keys)} clients who take part"
            raise refuse("threshold", self.plan.threshold, limit, "ask fewer clients, or raise it")
        return dict(self._keys)

    def add_boxes(self, number: int, boxes: Boxes) -> bool:
        """Stage 2."""
        fits = number in self._keys and _are_bytes(boxes, self._keys.keys() - {number}, BOX)
        return self._kept(1, self._boxes, number, fits, boxes)

    def boxes_for(self) -> dict[int, dict[int, bytes]]:
        """For each who sent boxes, the boxes of the others who did, by sender."""
        self._close(1, len(self._boxes))
        return {
            receiver: {sender: boxes[receiver] for sender, boxes in self._boxes.items() if sender != receiver}
            for receiver in self._boxes
        }

    def add_masked(self, number: int, vector: NDArray[Any]) -> bool:
        """Stage 3. The vector is added to the others at once and not kept."""
        fits = number in self._boxes and number not in self._alive and isinstance(vector, np.ndarray)
        if self._stage != 2 or not fits or vector.shape != self._sum.shape or vector.dtype != self._sum.dtype:
            return False
        self._sum += vector
        self._alive.add(number)
        return True

    def add_complaint(self, number: int, senders: Iterable[int]) -> bool:
        """Stage 3, of a client who has no vector to send, since it cannot open these clients' boxes."""
        accused = frozenset(senders)
        fits = number in self._boxes.keys() - self._alive and bool(accused)
        return self._kept(2, self._complaints, number, fits and accused <= self._boxes.keys() - {number}, accused)

    @property
    def suspects(self) -> set[int]:
        """Whose boxes more than half of the others cannot open, or whose shares do not fit together."""
        accused = [number for senders in self._complaints.values() for number in senders]
        return self._unfit | {one for one in self._boxes if 2 * accused.count(one) > len(self._boxes) - 1}

    def survivors(self) -> tuple[set[int], set[int]]:
        """Who is alive, and who sent boxes but no vector: the same lists for everybody who is alive."""
        self._close(2, len(self._alive))
        return set(self._alive), self._boxes.keys() - self._alive

    def add_answer(self, number: int, answer: Answer) -> bool:
        """Stage 4."""
        fits = number in self._alive and _are_bytes(answer, self._boxes.keys(), SHARE)
        return self._kept(3, self._answers, number, fits, answer)

    def total(self) -> ModularSum:
        """The sum of the vectors of all who are alive: PRIVATE."""
        if len(self._answers) < self.plan.threshold:
            raise RoundAbandoned(f"{len(self._answers)} clients answered, {self.plan.threshold} are needed")
        self._close(3, len(self._alive))
        masks = _Masks(self.plan)
        for number, secret in self._secrets().items():
            if number in self._alive:
                masks.add(self._sum, _derived(secret, "own", self.plan, number), negative=True)
                continue
            key = _private(secret)
            for other in self._alive:  # takes off what the other has added
                common = _common(key, self._keys[other][32:], "pair", self.plan, number, other)
                masks.add(self._sum, common, negative=other < number)
        found = ModularSum(self.plan.dim, self.plan.bits)
        found.add(self._sum & self._sum.dtype.type((1 << self.plan.bits) - 1))
        self._sum = np.zeros_like(self._sum)
        return found

    def _secrets(self) -> dict[int, bytes]:
        """The seed of each who is alive and the key of each who is dead, from shares of which a few may be wrong."""
        senders, found = list(self._answers), dict[int, bytes]()
        chosen = senders[: self.plan.threshold]
        weights = lagrange(chosen)
        for number in self._boxes:
            for some in chain([chosen], _some_of(senders, self.plan.threshold)):
                if some is not chosen:
                    chosen, weights = some, lagrange(some)
                secret = combined({sender: self._answers[sender][number] for sender in some}, weights)
                if secret is None:
                    continue
                if number in self._alive or _public(_private(secret)) == self._keys[number][32:]:
                    found[number] = secret
                    break
        self._unfit = self._boxes.keys() - found.keys()
        if self._unfit:
            raise RoundAbandoned(f"the shares of {len(self._unfit)} clients' secrets do not fit together")
        return found

    def _kept(self, stage: int, held: dict[int, T], number: int, fits: bool, value: T) -> bool:
        """Keep a message that fits, of a client who has sent none in this stage."""
        if taken := self._stage == stage and fits and number not in held:
            held[number] = value
        return taken

    def _close(self, stage: int, left: int) -> None:
        if stage != self._stage:
            raise _refused("a stage was closed twice, or out of turn")
        if left < self.plan.least_survivors:
            raise RoundAbandoned(f"{left} clients are left, {self.plan.least_survivors} are needed")
        self._stage += 1


def _some_of(senders: list[int], count: int) -> Iterator[list[int]]:
    """So many of the senders in every way, where there are few ways; otherwise in some ways by chance."""
    if math.comb(len(senders), count) <= _TRIES:
        yield from map(list, combinations(senders, count))
        return
    for _ in range(_TRIES):
        yield secrets.SystemRandom().sample(senders, count)


class _Masks:
    """Adds the words of a key to a vector: AES-256 in counter mode, each key for one vector."""

    def __init__(self, plan: SumPlan) -> None:
        size = plan.dim * np.dtype(word_type(plan.bits)).itemsize
        self._zeros, self._buffer = bytes(size), bytearray(size + 16)
        self._words = np.frombuffer(self._buffer, np.dtype(word_type(plan.bits)).newbyteorder("<"), plan.dim)

    def add(self, total: NDArray[np.unsignedinteger], key: bytes, *, negative: bool = False) -> None:
        Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update_into(self._zeros, self._buffer)
        (np.subtract if negative else np.add)(total, self._words, out=total)


def split(secret: bytes, threshold: int, numbers: Iterable[int]) -> dict[int, bytes]:
    """Shamir's shares of 32 bytes, by client: any `threshold` of them give the secret, fewer tell nothing."""
    factors = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = {}
    for number in numbers:
        value = 0
        for factor in reversed(factors):
            value = (value * number + factor) % PRIME
        shares[number] = value.to_bytes(SHARE, "big")
    return shares


def lagrange(numbers: Iterable[int]) -> dict[int, int]:
    """With these weights the shares of these clients add up to the secret."""
    known, weights = list(numbers), {}
    for one in known:
        above = below = 1
        for other in known:
            if other != one:
                above, below = above * -other % PRIME, below * (one - other) % PRIME
        weights[one] = above * pow(below, -1, PRIME) % PRIME
    return weights


def combined(shares: Mapping[int, bytes], weights: Mapping[int, int]) -> bytes | None:
    """The secret of 32 bytes of which these are shares; None if they are not, but for a chance of 2^-265."""
    value = sum(int.from_bytes(share, "big") * weights[number] for number, share in shares.items()) % PRIME
    return None if value >> 256 else value.to_bytes(32, "big")


def _are_bytes(values: object, numbers: Collection[int], size: int) -> bool:
    """Whether a message has bytes of this size for each of these clients, and nothing else."""
    if not isinstance(values, Mapping) or values.keys() != set(numbers):
        return False
    return all(isinstance(value, bytes) and len(value) == size for value in values.values())


def _singly(pairs: Iterable[bytes]) -> set[bytes]:
    """The public keys of which these are pairs."""
    return {pair[first : first + 32] for pair in pairs for first in (0, 32)}


def _public(key: X25519PrivateKey) -> bytes:
    return bytes(key.public_key().public_bytes_raw())


def _is_key(public: bytes) -> bool:
    """Whether others can agree on a secret with whoever sent this: with some bytes nobody can."""
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        return False
    return True


def _common(key: X25519PrivateKey, public: bytes, purpose: str, plan: SumPlan, one: int, other: int) -> bytes:
    """The key that two clients have in common for one purpose in one round."""
    try:
        exchanged = key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise _refused("a public key is not one") from None
    return _derived(exchanged, purpose, plan, min(one, other), max(one, other))


def _derived(secret: bytes, purpose: str, plan: SumPlan, *numbers: int) -> bytes:
    info = f"clipline secure sum 1/{purpose}/".encode() + _names(plan, *numbers)
    return bytes(HKDF(SHA256(), 32, None, info).derive(secret))


def _names(plan: SumPlan, *numbers: int) -> bytes:
    return b"".join(number.to_bytes(8, "big") for number in numbers) + plan.round_id


def _refused(why: str) -> RunError:
    return RunError(f"this round's sum is refused: {why}", "abandon the round")
