"""Nodes of a federation in one process: what an app does, without a network, to try it and to test it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import RunError
from .flower_messages import SHOWS_ERRORS

try:
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity
except ImportError as error:
    raise RunError("federations need the package flwr", "install clipline[federation]") from error


class InProcessGrid:
    """A grid whose nodes run `app`, one after the other, each when its reply is asked for.

    `nodes` has the node config of each node; `partition-id` counts them. An error of the app is raised and ends the
    run, as it is yours to see here; `shows_errors=False` turns it into an error reply, as Flower does.
    """

    def __init__(
        self,
        app: Callable[[Message, Context], Message],
        nodes: int,
        run_config: Mapping[str, Any] | None = None,
        *,
        shows_errors: bool = True,
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.app, self.shows_errors = app, shows_errors
        self.contexts = {
            1000 + place: Context(
                run_id=1, node_id=1000 + place, state=RecordDict(), run_config=dict(run_config or {}),
                node_config={"partition-id": place, "num-partitions": nodes, SHOWS_ERRORS: shows_errors},
            )
            for place in range(nodes)
        }  # fmt: skip
        self._waiting: dict[str, Message] = {}
        self._ids = itertools.count(1)

    def get_node_ids(self) -> list[int]:
        """All of them are online."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Take messages, of which each gets an id."""
        ids = []
        for message in messages:
            ids.append(f"message {next(self._ids)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self._waiting[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """The replies to these messages, once each."""
        asked = [self._waiting.pop(name) for name in list(message_ids) if name in self._waiting]
        return [self.reply(message) for message in asked]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Both at once, for strategies of Flower's own."""
        return self.pull_messages(self.push_messages(messages))

    def reply(self, message: Message) -> Message:
        """What the node answers that the message is for."""
        try:
            return self.app(message, self.contexts[message.metadata.dst_node_id])
        except Exception:
            if self.shows_errors:
                raise
            return Message(Error(0, "the app failed"), reply_to=message)
