"""Tiny files in the exact layouts of TFF, made by hand."""

import sqlite3
import struct

import h5py
import numpy as np

TABLES = """
CREATE TABLE examples (
    split_name TEXT NOT NULL, client_id TEXT NOT NULL, serialized_example_proto BLOB NOT NULL);
CREATE TABLE client_metadata (
    client_id TEXT NOT NULL, split_name TEXT NOT NULL, num_examples INTEGER NOT NULL);
"""


def varint(number):
    """Seven bits a byte, lowest first; negative numbers as 64-bit two's complement."""
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(out + bytes([number]))


def delimited(field, data):
    return varint(field << 3 | 2) + varint(len(data)) + data


def feature(value, packed=True):
    """A `tf.train.Feature` of text, floats or whole numbers."""
    if isinstance(value, str | bytes):
        return delimited(1, delimited(1, value.encode() if isinstance(value, str) else value))
    if isinstance(value[0], float):
        parts = [struct.pack("<f", number) for number in value]
        kind, wire = 2, 5
    else:
        parts = [varint(number) for number in value]
        kind, wire = 3, 0
    return delimited(kind, delimited(1, b"".join(parts)) if packed else b"".join(varint(8 | wire) + p for p in parts))


def example(packed=True, **features):
    """A serialized `tf.train.Example`."""
    entries = (
        delimited(1, delimited(1, name.encode()) + delimited(2, feature(value, packed)))
        for name, value in features.items()
    )
    return delimited(1, b"".join(entries))


def write_sqlite(path, rows):
    """`rows` are (split, client, serialized example)."""
    base = sqlite3.connect(path)
    base.executescript(TABLES)
    base.executemany("INSERT INTO examples VALUES (?, ?, ?)", rows)
    base.execute("INSERT INTO client_metadata SELECT client_id, split_name, COUNT(*) FROM examples GROUP BY 1, 2")
    base.commit()
    base.close()
    return path


def write_hdf5(path, clients):
    """`clients` maps a client to its fields; lists of text become variable-length strings."""
    with h5py.File(path, "w") as root:
        examples = root.create_group("examples")
        for client, fields in clients.items():
            group = examples.create_group(client)
            for name, value in fields.items():
                text = isinstance(value, list) and isinstance(value[0], str)
                group.create_dataset(name, data=value, dtype=h5py.string_dtype() if text else np.asarray(value).dtype)
    return path
