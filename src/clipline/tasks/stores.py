"""The old name of `clipline.data.task_stores`, kept until every import of it has changed."""

from ..data.task_stores import (
    OUTSIDERS,
    STAND_IN,
    DataUsed,
    data_home,
    data_state,
    data_used,
    find_store,
    with_users_of_store,
)

__all__ = [
    "OUTSIDERS",
    "STAND_IN",
    "DataUsed",
    "data_home",
    "data_state",
    "data_used",
    "find_store",
    "with_users_of_store",
]
