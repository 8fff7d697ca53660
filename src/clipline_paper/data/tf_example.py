"""A reader of serialized `tf.train.Example` messages, so that TFF's files need no TensorFlow.

The wire format of protocol buffers, as far as this message uses it: `Example.features = 1`, `Features.feature = 1` is
a map (entries with key 1 and value 2), and a `Feature` is one of `bytes_list = 1`, `float_list = 2`, `int64_list = 3`,
each with `repeated value = 1`, packed or not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Value = list[bytes] | NDArray[Any]  # bytes; or (entries,) float32 or int64

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_BYTES, _FLOATS, _WHOLES = 1, 2, 3


def parse_example(data: bytes, wanted: Collection[str] | None = None) -> dict[str, Value]:
    """The features of one serialized example by name, or only those wanted.

    A feature without any value is an empty list of bytes. Raises ValueError for bytes that are no such message.
    """
    features: dict[str, Value] = {}
    for number, _, start, end in _parts(data, 0, len(data)):
        if number != 1:
            continue
        for entry_number, _, entry_start, entry_end in _parts(data, start, end):
            if entry_number == 1:
                name, place = _entry(data, entry_start, entry_end)
                if wanted is None or name in wanted:
                    features[name] = _feature(data, *place)
    return features


def _parts(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Every field of a message that lies at `at:end`: its number, its wire type, and where its payload lies."""
    while at < end:
        key, at = _varint(data, at, end)
        wire = key & 7
        if wire == _DELIMITED:
            size, at = _varint(data, at, end)
            stop = at + size
        elif wire == _VARINT:
            stop = _varint(data, at, end)[1]
        elif wire in (_FIXED32, _FIXED64):
            stop = at + (4 if wire == _FIXED32 else 8)
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if stop > end:
            raise ValueError(f"a field at byte {at} runs over the end")
        yield key >> 3, wire, at, stop
        at = stop


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The whole number at `at`, seven bits a byte, lowest first, and where it ends."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"a number at byte {at} does not end")


def _entry(data: bytes, start: int, end: int) -> tuple[str, tuple[int, int]]:
    """Name and place of the value of one entry of the map; both may be left out on the wire."""
    name, place = "", (end, end)
    for number, _, at, stop in _parts(data, start, end):
        if number == 1:
            name = data[at:stop].decode()
        elif number == 2:
            place = at, stop
    return name, place


def _feature(data: bytes, start: int, end: int) -> Value:
    value: Value = []
    for kind, _, at, stop in _parts(data, start, end):
        # A packed list is one payload of many numbers, an unpacked one many payloads of one: joined, they are equal.
        payloads = [data[begin:close] for number, _, begin, close in _parts(data, at, stop) if number == 1]
        if kind == _BYTES:
            value = payloads
        elif kind == _FLOATS:
            value = np.frombuffer(b"".join(payloads), dtype="<f4")
        elif kind == _WHOLES:
            value = _wholes(b"".join(payloads))
    return value


def _wholes(data: bytes) -> NDArray[np.int64]:
    """Numbers of seven bits a byte, end to end, as int64; negative ones take ten bytes and wrap around."""
    raw = np.frombuffer(data, dtype=np.uint8)
    last = raw < 0x80
    if last.all():
        return raw.astype(np.int64)
    if not last[-1]:
        raise ValueError("a list of whole numbers does not end")
    starts = np.concatenate([[0], np.flatnonzero(last)[:-1] + 1])
    sizes = np.diff(starts, append=len(raw))
    if sizes.max() > 10:
        raise ValueError("a whole number is longer than ten bytes")
    shifts = (7 * (np.arange(len(raw)) - np.repeat(starts, sizes))).astype(np.uint64)
    return np.add.reduceat((raw & 0x7F).astype(np.uint64) << shifts, starts).view(np.int64)
