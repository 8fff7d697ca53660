"""Users' data in files: readers, the writer that groups rows by user out of core, stores and their manifests.

Begin with `population`. Tables are read by `readers/`, brought into the order of their users by `grouping` and written
by `store`. `task_stores` has the data sets that packages add.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy_names import lazily

if TYPE_CHECKING:
    from .chunks import (
        CHUNK_BYTES,
        Chunk,
        Convert,
        Progress,
        chosen,
        converted,
        existing_file,
        ignore_user,
        no_progress,
        short,
        text_array,
    )
    from .manifest import Manifest, verify_store
    from .store import StageProgress, atomic_folder, no_stages, prepare_table, write_store
    from .task_stores import DataSet, DataUsed, find_store, open_store

__all__ = [
    "CHUNK_BYTES", "Chunk", "Convert", "DataSet", "DataUsed", "Manifest", "Progress", "StageProgress", "atomic_folder",
    "chosen", "converted", "existing_file", "find_store", "ignore_user", "no_progress", "no_stages", "open_store",
    "prepare_table", "short", "text_array", "verify_store", "write_store",
]  # fmt: skip
__getattr__, __dir__ = lazily(
    __name__,
    {
        ".chunks": "CHUNK_BYTES Chunk Convert Progress chosen converted existing_file ignore_user no_progress short "
        "text_array",
        ".manifest": "Manifest verify_store",
        ".store": "StageProgress atomic_folder no_stages prepare_table write_store",
        ".task_stores": "DataSet DataUsed find_store open_store",
    },
)
