"""Pictures in a folder, and a table that says whose each is: fields of uint8, all of one declared size."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import PopulationError, check_whole, refuse
from ..chunks import is_file
from .tables import whole_table

_MODES = {1: "L", 3: "RGB"}  # Pillow's names
_KINDS = ("PNG", "JPEG")


def read_images(folder: str | Path, files: Sequence[Any], size: tuple[int, int], channels: int) -> NDArray[np.uint8]:
    """The pictures at these paths inside the folder: (files, channels, height, width) uint8, 0 to 255.

    PNG and JPEG. A picture of another size is scaled to `size`, (height, width), and one with other colours converted
    to grey (1 channel) or RGB (3). A file that is missing, outside the folder, damaged, of another kind or too large is
    refused, by its place in the table and not by its name, which may say who is on it.
    """
    image, root, mode = _pillow(), Path(folder), _MODES.get(channels)
    if mode is None:
        raise refuse("channels", channels, "1 (grey) or 3 (RGB)", "give channels=3, say")
    if not root.is_dir():
        raise PopulationError(f"folder={str(folder)!r} is no folder: give the one that holds the pictures")
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise refuse("size", size, "(height, width), in pixels", "give size=(28, 28), say")
    way_out = "give the pixels that the model takes, such as 28"
    height, width = (check_whole("size", one, at_least=1, at_most=1 << 14, way_out=way_out) for one in size)
    pictures = np.empty((len(files), channels, height, width), np.uint8)
    for place, file in enumerate(files):
        path = root / file if isinstance(file, str | Path) else root
        if not is_file(path) or not path.resolve().is_relative_to(root.resolve()):
            raise PopulationError(
                f"picture {place + 1} is not in the folder {str(root)!r}: copy it there, or leave its row out"
            )
        try:
            with (
                warnings.catch_warnings(action="error", category=image.DecompressionBombWarning),
                image.open(path, formats=_KINDS) as opened,
            ):
                picture = opened.convert(mode).resize((width, height), image.Resampling.BILINEAR)
        except Exception as error:  # Pillow's decoders fail in many ways, and quote the path
            raise PopulationError(
                f"picture {place + 1} of {len(files)} cannot be read as PNG or JPEG ({type(error).__name__}): copy it "
                "again, convert it, or leave its row out"
            ) from None
        pictures[place] = np.asarray(picture, np.uint8).reshape(height, width, channels).transpose(2, 0, 1)
    return pictures


def table_of(table: Any, user: str, path: str) -> Any:
    """The table with columns `user`, `path` and perhaps labels: a dataframe as it is, a file or a mapping as Arrow's.

    A mapping has columns by name, or files and their users.
    """
    if isinstance(table, str | Path):
        return whole_table(table, as_text=(user, path))
    if not isinstance(table, Mapping):
        return table
    import pyarrow as pa

    columns = table if user in table else {path: list(table), user: list(table.values())}
    try:
        return pa.table({name: pa.array(list(values)) for name, values in columns.items()})
    except (pa.ArrowException, TypeError) as error:
        raise PopulationError(
            f"the table of pictures cannot be read ({type(error).__name__}): give columns {user!r} and {path!r}"
        ) from None


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise PopulationError(
            "pictures need Pillow, which is not installed: pip install 'clipline[images]', or give arrays to "
            "Population.from_arrays"
        ) from None
    return Image
