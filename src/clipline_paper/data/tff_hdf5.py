"""TFF's HDF5 files: `/examples/<client>/<field>`, one data set a field, its first axis the client's examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipline.data import (
    CHUNK_BYTES,
    Chunk,
    Progress,
    chosen,
    existing_file,
    ignore_user,
    no_progress,
    short,
    text_array,
)
from clipline.errors import PopulationError

_MANY = 1 << 17  # entries; larger data sets are compared with what the file stores of them
_PACKED = 1100  # gzip compresses by a factor of at most 1032


def read_tff_hdf5(
    path: str | Path,
    *,
    fields: Sequence[str] | None = None,
    without_rows: Callable[[str], None] = ignore_user,
    progress: Progress = no_progress,
) -> Generator[Chunk, None, None]:
    """The examples of every client in the file; a client's examples stay in one chunk.

    Data sets of text give arrays of `str`. All clients must have the same fields. A client without examples is in no
    chunk: `without_rows` is told of it, since it is one of the users all the same. `progress` counts clients.
    """
    import h5py

    file = existing_file(path)
    try:
        with h5py.File(file, "r") as root:
            clients = root.get("examples")
            if not isinstance(clients, h5py.Group):
                raise PopulationError(f"{str(file)!r} has no group 'examples': give a file in TFF's layout")
            ids: list[str] = []
            parts: list[dict[str, NDArray[Any]]] = []
            names: list[str] = []
            held = 0
            for done, (client, group) in enumerate(clients.items(), start=1):
                if not isinstance(group, h5py.Group) or not isinstance(client, str):
                    raise PopulationError(f"client {client!r} is no group: give a file in TFF's layout")
                if len(group):
                    names = names or chosen(_named(client, group), fields, repr(str(file)))
                    part = _fields(client, group, names)
                if not len(group) or not len(part[names[0]]):
                    without_rows(client)  # its arrays may have any shape and type, as h5py's defaults do
                    continue
                ids.append(client)
                parts.append(part)
                held += sum(_bytes(array) for array in parts[-1].values())
                if held > CHUNK_BYTES:
                    yield _joined(ids, parts)
                    ids, parts, held = [], [], 0
                    progress(done, len(clients))
            if ids:
                yield _joined(ids, parts)
            progress(len(clients), len(clients))
    except (OSError, RuntimeError, KeyError, UnicodeDecodeError) as error:
        raise PopulationError(
            f"{str(file)!r} cannot be read as TFF's HDF5 ({short(error)}): copy or download it again"
        ) from None


def _named(client: str, group: Any) -> list[str]:
    """The names of a client's fields. h5py gives bytes for those that are not UTF-8."""
    for name in group:
        if not isinstance(name, str):
            raise PopulationError(f"client {client!r} has a field {name!r}, which is not UTF-8: copy the file again")
    return list(group)


def _fields(client: str, group: Any, names: list[str]) -> dict[str, NDArray[Any]]:
    part: dict[str, NDArray[Any]] = {}
    for name in names:
        if name not in group:
            raise PopulationError(f"client {client!r} has no field {name!r} as others have: leave it out of the fields")
        array = _content(client, name, group[name])
        if array.ndim == 0:
            raise PopulationError(f"client {client!r} has one value as {name!r}, not a list: copy the file again")
        part[name] = text_array(array.reshape(-1), f"client {client!r}") if array.dtype.kind in "OS" else array
    rows = {name: len(array) for name, array in part.items()}
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{count} of {name!r}" for name, count in rows.items())
        raise PopulationError(f"client {client!r} has unequal numbers of examples ({counts}): copy the file again")
    return part


def _content(client: str, name: str, data: Any) -> NDArray[Any]:
    """All of a data set, which must be one, of a size that the file can hold and a type that NumPy has."""
    import h5py

    if not isinstance(data, h5py.Dataset):
        raise PopulationError(f"client {client!r} has {name!r} as no data set: give a file in TFF's layout")
    try:
        if math.prod(data.shape or ()) > _MANY and data.nbytes > _PACKED * data.id.get_storage_size():
            raise PopulationError(
                f"client {client!r} has {name!r} of shape {data.shape}, far more than is stored: copy the file again"
            )
        return np.asarray(data[()])
    except (TypeError, ValueError, MemoryError) as error:
        if isinstance(error, PopulationError):
            raise
        raise RuntimeError(f"{name!r} of client {client!r}: {short(error)}") from None


def _bytes(array: NDArray[Any]) -> int:
    return array.nbytes if array.dtype.kind != "O" else sum(map(len, array))


def _joined(ids: list[str], parts: list[dict[str, NDArray[Any]]]) -> Chunk:
    """Clients end to end. What differs in shape or type between clients is refused here."""
    rows = [len(next(iter(part.values()))) for part in parts]
    for name, first in parts[0].items():
        for client, part in zip(ids, parts, strict=True):
            if (part[name].dtype, part[name].shape[1:]) != (first.dtype, first.shape[1:]):
                raise PopulationError(
                    f"client {client!r} has {name!r} as {part[name].dtype}{list(part[name].shape[1:])} but others as "
                    f"{first.dtype}{list(first.shape[1:])}: only examples of equal shape can be stored"
                )
    return np.repeat(np.array(ids), rows), {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
