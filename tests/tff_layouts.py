"""Tiny files in the exact layouts of TFF, made by hand."""

import json
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
    path.unlink(missing_ok=True)
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
                text = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
                group.create_dataset(name, data=value, dtype=h5py.string_dtype() if text else np.asarray(value).dtype)
    return path


# Tiny versions of the four data sets, with two splits each: split -> [(client, fields of one example), ...].
WORDS = ["how", "to", "sort", "a", "list", *(f"w{i}" for i in range(5, 10_000))]
TAGS = ["python", "c#", *(f"t{i}" for i in range(2, 500))]


def _images(field, shape, dtype, unit):
    rng = np.random.default_rng(3)

    def rows(clients):
        return [
            (client, {field: (rng.integers(0, 256, shape) / unit).astype(dtype), "label": np.array([number], np.int64)})
            for number, client in enumerate(clients)
        ]

    return {"train": rows(["b", "a", "b", "c"]), "test": rows(["a", "b"])}


def _posts(*posts):
    return [
        (client, {"tokens": tokens, "title": title, "tags": tags, "creation_date": "2017", "type": "answer"})
        for client, tokens, title, tags in posts
    ]


TINY = {
    "emnist": _images("pixels", (28, 28), np.float32, 255),
    "cifar100": _images("image", (32, 32, 3), np.int64, 1),
    "shakespeare": {
        "train": [
            ("HAMLET", {"snippets": "To be"}),
            ("HAMLET", {"snippets": "x" * 100}),
            ("YORICK", {"snippets": "~"}),
        ],
        "test": [("HAMLET", {"snippets": "or not"}), ("YORICK", {"snippets": "."})],
    },
    "stackoverflow": {
        "train": _posts(
            ("9", "how to sort", "sort list", "python|cobol"),
            ("10", "a list", "how", "c#|python"),
            ("9", "oh", "", "x"),
        ),
        "test": _posts(("9", "sort a list", "how to", "python"), ("11", "oh", "to", "c#")),
    },
}
_NAMES = {
    "emnist": ("emnist_all.sqlite", "fed_emnist_{}.h5", "all_{}"),
    "cifar100": ("cifar100.sqlite", "fed_cifar100_{}.h5", "{}"),
    "shakespeare": ("shakespeare.sqlite", "shakespeare_{}.h5", "{}"),
    "stackoverflow": ("stackoverflow.sqlite", "stackoverflow_{}.h5", "{}"),
}


def write_original(folder, name, kind):
    """The tiny data set under its original file names, as "sqlite" or "hdf5", with Stack Overflow's lists."""
    folder.mkdir(parents=True, exist_ok=True)
    base, tree, split_name = _NAMES[name]
    if kind == "sqlite":
        rows = [
            (split_name.format(split), client, example(**{key: _flat(value) for key, value in fields.items()}))
            for split, examples in TINY[name].items()
            for client, fields in examples
        ]
        write_sqlite(folder / base, rows)
    else:
        for split, examples in TINY[name].items():
            clients = {client: {key: [] for key in fields} for client, fields in examples}
            for client, fields in examples:
                for key, value in fields.items():
                    clients[client][key].append(value)
            arrays = {
                client: {key: value if isinstance(value[0], str) else np.stack(value) for key, value in fields.items()}
                for client, fields in clients.items()
            }
            write_hdf5(folder / tree.format(split), arrays)
    if name == "stackoverflow":
        counts = "".join(f"{word} {20_000 - place}\n" for place, word in enumerate(WORDS))
        (folder / "stackoverflow.word_count").write_text(counts + "unlisted 1\n")
        tags = {tag: 1000 - place for place, tag in enumerate(TAGS)}
        (folder / "stackoverflow.tag_count").write_text(json.dumps({"rare": 1, **dict(reversed(tags.items()))}))
    return folder


def _flat(value):
    if isinstance(value, str):
        return value
    return [float(x) if value.dtype.kind == "f" else int(x) for x in value.ravel()]
