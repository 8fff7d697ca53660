"""What server and clients of a federation write into Flower's messages, and how it is read with distrust.

A request has the records `arrays` (the trained parameters by name), `config` (for the app's own function) and
`clipline`; later stages of a secure sum have `clients`. A reply has one record: one array without a header, or a few
bytes for each of some clients. Whatever else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RunError
from .encoders import Encoder, KeptShare, Plain, RotatedLevels
from .simulated import Quantised, RandomMask, SecureSum

try:
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
except ImportError as error:
    raise RunError("federations need the package flwr", "install clipline[federation]") from error

TOLD, CLIENTS, REPLY = "clipline", "clients", "reply"
SHOWS_ERRORS = "shows-errors"  # in the config of a node whose owner wants to see them
KEYS, BOX, SHARE, COMPLAINT = 64, 160, 66, 1  # bytes of two public keys, a box of shares, a share, a complaint
ENCODING = 2  # another number where encoders, rotations or masks change: machines with different ones must not mix

Uploads = SecureSum | Quantised | RandomMask | None


def declared(upload: Uploads) -> str:
    """What server and client must have in common about an upload, to compare."""
    return f"encoding {ENCODING}: {upload}"


def encoder_for(upload: Uploads, dim: int) -> Encoder:
    """The encoder of an upload that the server decodes."""
    if isinstance(upload, Quantised):
        return RotatedLevels(dim, upload.bits)
    return KeptShare(dim, upload.share) if isinstance(upload, RandomMask) else Plain(dim)


def vector_reply(vector: NDArray[Any]) -> RecordDict:
    """A reply of one array."""
    raw = Array(str(vector.dtype), vector.shape, "raw", np.ascontiguousarray(vector).tobytes())
    return RecordDict({REPLY: ArrayRecord({"vector": raw})})


def bytes_reply(values: Mapping[int, bytes]) -> RecordDict:
    """A reply of a few bytes for each of some clients, by their numbers."""
    return RecordDict({REPLY: numbered(values)})


def numbered(values: Mapping[int, bytes]) -> ConfigRecord:
    """Bytes by numbers of clients, as a record."""
    return ConfigRecord({str(number): value for number, value in values.items()})


def vector_in(content: RecordDict, like: NDArray[Any]) -> NDArray[Any]:
    """The array of a reply, which must have as many bytes as `like`: what the reply says of its shape is not read.

    Raises:
      ValueError: For anything else.
    """
    record = _only(content, ArrayRecord)
    (data,) = [array.data for array in record.values()]
    if len(data) != like.nbytes:
        raise ValueError
    return np.frombuffer(data, like.dtype).reshape(like.shape)


def bytes_in(content: RecordDict, size: int) -> dict[int, bytes]:
    """The bytes of a reply by numbers, each of this size.

    Raises:
      ValueError: For anything else.
    """
    found = {int(number): value for number, value in _only(content, ConfigRecord).items()}
    if not all(isinstance(value, bytes) and len(value) == size for value in found.values()):
        raise ValueError
    return found


def _only(content: RecordDict, kind: type) -> Any:
    """The record of a reply, which must have no other."""
    (name,) = content
    record = content[name]
    if name != REPLY or not isinstance(record, kind):
        raise ValueError
    return record
