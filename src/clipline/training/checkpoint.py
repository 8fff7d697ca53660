"""The whole state of a run in one file: model, server momentum, clip, round and ledger together, or not at all.

Randomness needs no saving: every stream is a function of seed or key, purpose and round, so a resumed run draws what
the uninterrupted one would have drawn. The key is in a file beside it. Banded noise also goes on from that of the last
rounds, which is saved: whoever has it can subtract it, and such a checkpoint is as private as the data.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .. import __version__
from ..engine.core.personal import PersonalStore
from ..engine.prefetch import draws_on_device
from ..errors import RunError, check_number, check_whole
from ..federated.clip_controllers import ClipState, LateClip
from ..federated.mechanism import BandedMechanism, NoiseState
from ..federated.round import TrainState
from ..privacy.events import GaussianEvent
from ..privacy.ledger import Ledger
from . import durable
from .model_card import describe, device_name, in_use, layers_text
from .run_files import OLDER

if TYPE_CHECKING:
    from .training import Training

_VERSION = "2"
_ITS_VERSION = ("clipline", "clipline_paper", "torch", "numpy")  # is compared: their code need not be
_PERSONAL = "unprivate personal."  # begins the names of tensors that are outside the release
_NOISE = "unprivate noise "  # the same of earlier noise: the last round's is number 0
_CHECKSUM = re.compile("[0-9a-f]{32}")  # of which a reader learns no more than that it is another
# The next checkpoint waits so many times as long as the last one took to write, as writing holds Python's lock and so
# the rounds beside it; but no more seconds than somebody may lose by a power cut.
_PAUSE, _LONGEST_PAUSE = 40, 30.0
_SEED = "seed"  # the same: a message may be copied to where the noise must not be known
DATA_FINGERPRINT = "unprivate data fingerprint"  # the name of a line of circumstances that no message shows


def save_checkpoint(
    path: Path, state: TrainState, circumstances: str = "", personal: PersonalStore | None = None
) -> None:
    """Write atomically, and to disk: a crash or a power cut leaves the previous checkpoint, and so does damage.

    `circumstances` is whatever must be the same when the run goes on: a line each, `name = value` or `name: value`.
    With `personal` parameters those of this state are in it too, and the file is private.
    """
    tensors, metadata = _contents(state, personal)
    _write(path, tensors, {**metadata, "circumstances": circumstances})


def _contents(state: TrainState, personal: PersonalStore | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a checkpoint. States are never written to, so the tensors stay what they are."""
    runs = [{"count": count, "event": event.to_json()} for event, count in state.ledger.entries]
    tensors = {"params": state.params, **{f"server.{name}": value for name, value in state.server.items()}}
    if personal is not None:
        rows = personal.at(state.round_index)
        tensors[f"{_PERSONAL}initial"] = personal.initial
        tensors[f"{_PERSONAL}users"] = torch.tensor(list(rows), dtype=torch.int64)
        tensors[f"{_PERSONAL}rows"] = torch.stack([*rows.values()]) if rows else personal.initial.new_zeros(0)
    noise = state.noise
    if noise is not None:
        tensors |= {f"{_NOISE}{number}": earlier for number, earlier in enumerate(noise.unprivate_earlier)}
    metadata = {
        "noise": json.dumps(None if noise is None else [noise.index, len(noise.unprivate_earlier)]),
        "version": _VERSION,
        "clip": repr(state.clip.clip),
        "round_index": str(state.clip.round_index),
        "ledger": json.dumps(runs),
    }
    return tensors, metadata


def _write(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    copied = {name: tensor.cpu().contiguous().clone() for name, tensor in tensors.items()}
    durable.save_tensors(copied, path, metadata, private=True, keep_as=path.with_name(OLDER))


class CheckpointWriter:
    """Writes checkpoints in a thread, beside the rounds that follow. If one waits when the next comes, that one goes.

    A fortieth of the time goes into writing, or half a minute lies between two: where checkpoints come faster, the
    latest waits until then or until `flush`. What cannot be written raises its error at the next `write` or `flush`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="clipline-checkpoint")
        self._waiting: Callable[[], None] | None = None
        self._busy: Future[None] | None = None  # until it has found nothing waiting
        self._hurry = threading.Event()  # somebody waits

    def write(self, state: TrainState, circumstances: object = "", personal: PersonalStore | None = None) -> None:
        """Begin to write, as `save_checkpoint` does. The state may be of a GPU that is still at work on it.

        The text of `circumstances` is asked for by the thread, which may wait for it.
        """
        tensors, metadata = _contents(state, personal)
        device = state.params.device
        ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
        with self._lock:
            if self._busy is not None and self._busy.done():
                self._busy.result()
            self._waiting = partial(self._write, tensors, metadata, circumstances, ready)
            if self._busy is None:
                self._busy = self._thread.submit(self._work)

    def flush(self) -> None:
        """Wait until everything is written."""
        self._hurry.set()
        try:
            if (busy := self._busy) is not None:
                busy.result()
        finally:
            self._hurry.clear()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._hurry.set()
        self._thread.shutdown(wait=True)

    def _work(self) -> None:
        while True:
            with self._lock:
                write, self._waiting = self._waiting, None
                if write is None:
                    self._busy = None
                    return
            begun = time.perf_counter()
            write()
            self._hurry.wait(min(_PAUSE * (time.perf_counter() - begun), _LONGEST_PAUSE))

    def _write(
        self,
        tensors: Mapping[str, Tensor],
        metadata: dict[str, str],
        circumstances: object,
        ready: torch.cuda.Event | None,
    ) -> None:
        stream: Any = None
        if ready is not None:  # a copy on the stream of the rounds would hold them up
            stream = torch.cuda.Stream(tensors["params"].device)  # type: ignore[no-untyped-call]
            stream.wait_event(ready)
        with torch.cuda.stream(stream):  # None does nothing
            _write(self._path, tensors, {**metadata, "circumstances": str(circumstances)})


class DamagedError(RunError):
    """A checkpoint is not what was written."""


class DamagedCheckpointWarning(UserWarning):
    """The last checkpoint of a run is damaged, and the run goes on from the one before."""


def load_last(path: Path, device: torch.device | str, circumstances: str) -> TrainState:
    """The checkpoint at this path or, where that is missing or damaged, the one before, which takes its place."""
    older = path.with_name(OLDER)
    try:
        return load_checkpoint(path, device, circumstances)
    except DamagedError:
        if not older.is_file():
            raise
        state = load_checkpoint(older, device, circumstances)
        warnings.warn(
            f"{str(path)!r} is damaged or missing: the run goes on from the checkpoint before it, after "
            f"{state.round_index} rounds",
            DamagedCheckpointWarning,
            stacklevel=2,
        )
        older.replace(path)
        return state


def load_checkpoint(path: Path, device: torch.device | str = "cpu", circumstances: str = "") -> TrainState:
    """What `save_checkpoint` wrote, to the last bit; refused under other circumstances."""
    try:
        wrong = durable.damage(path)
        with safe_open(path, "pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (OSError, SafetensorError) as error:
        raise DamagedError(f"{str(path)!r} cannot be read as a checkpoint ({error}): start the run again") from None
    if wrong is not None:
        raise DamagedError(f"{str(path)!r} is damaged, {wrong}: start the run again")
    if metadata.get("version") != _VERSION:
        raise RunError(f"{str(path)!r} has version {metadata.get('version')!r} but must have {_VERSION}: start again")
    if metadata.get("circumstances") != circumstances:
        changed = _difference(metadata.get("circumstances", ""), circumstances)
        raise RunError(f"{str(path)!r} cannot be resumed, {changed}, or start a new run")
    try:
        ledger = Ledger()
        for run in json.loads(metadata["ledger"]):
            ledger = ledger.add(GaussianEvent.from_json(run["event"]), run["count"])
        clip = ClipState(
            check_number("clip", float(metadata["clip"]), at_least=0, infinite=True, way_out="none"),
            check_whole("round_index", int(metadata["round_index"]), at_least=0, way_out="none"),
        )
        params = tensors.pop("params")
        index, vectors = json.loads(metadata["noise"]) or (None, 0)
        earlier = tuple(tensors.pop(f"{_NOISE}{number}") for number in range(vectors))
        noise = None if index is None else NoiseState(clip.round_index, index, earlier)
        server = {
            name.removeprefix("server."): tensor for name, tensor in tensors.items() if not name.startswith(_PERSONAL)
        }
        return TrainState(clip.round_index, params, server, LateClip.known(clip), ledger, noise)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{str(path)!r} is damaged ({error!r}): start the run again") from None


def load_personal(path: Path, round_index: int, personal: PersonalStore) -> None:
    """Put the personal parameters of a checkpoint, that of the state before this round, into the store."""
    try:
        with safe_open(path, "pt") as file:
            initial, users, rows = (file.get_tensor(f"{_PERSONAL}{name}") for name in ("initial", "users", "rows"))
    except (OSError, SafetensorError) as error:
        raise RunError(f"{str(path)!r} has no personal parameters to go on with ({error}): start again") from None
    if initial.shape != personal.initial.shape or len(users) != len(rows):
        raise RunError(f"{str(path)!r} holds personal parameters of another model: start the run again")
    personal.restore(round_index, initial, dict(zip(users.tolist(), rows.unbind(0), strict=True)))


def _difference(before: str, now: str) -> str:
    """The first line that is not the same and what to do, for the reader, who is told no more of data than that."""
    then, today = _by_name(before), _by_name(now)
    name = next((one for one in [*then, *today] if then.get(one) != today.get(one)), "")
    if name in (DATA_FINGERPRINT, _SEED):
        return "the data have changed: restore them" if name != _SEED else "the seed has changed: restore it"
    lines = [told.get(name, "nothing") for told in (then, today)]
    if all(map(_CHECKSUM.search, lines)):
        return f"the {name.removeprefix('checksum of the ')} has changed: restore it"
    return f"it was written under other circumstances ({lines[0]!r} then, {lines[1]!r} now): restore them"


def _by_name(circumstances: str) -> dict[str, str]:
    return {re.split(" = |: ", line, maxsplit=1)[0]: line for line in circumstances.splitlines()}


# Either changes no release (the device's name, which `device in use` stands for) or rounding alone. The seed is
# compared where noise comes from it.
_MAY_DIFFER = ("seed", "compute.workers", "compute.device")


class Circumstances:
    """What must be the same when a run is resumed, as text, a line each.

    A round that is run again has the same noise. Had anything of this changed in between, the difference of its two
    releases would show the data. The lines are those of `describe` and of `same` (what the caller adds), the versions,
    what computes, and checksums of the model and the data. Left out is what changes no release, or rounding alone: the
    number of workers, and where the data lie. The checksums are computed in a thread, which is waited for when the text
    is asked for.
    """

    def __init__(self, training: Training, same: Mapping[str, object] | None = None) -> None:
        settings = {name: value for name, value in _flat(describe(training)) if name not in _MAY_DIFFER}
        facts = {
            "clipline version": __version__,
            "torch version": torch.__version__,
            "numpy version": np.__version__,
            "device in use": device_name(training.device),
            "engine in use": in_use(training),
            "on_error": training.problem.on_error,
        }
        if isinstance(mechanism := training.algorithm.mechanism, BandedMechanism):  # computed again on a resume
            facts |= {"scipy version": scipy.__version__, "coefficients of the noise": mechanism.coefficients_hash}
        if draws_on_device(training.problem):  # its logarithms, in numbers of the tail, are rounded otherwise
            facts["noise"] = "drawn by the GPU"
        if training.privacy.noise_source == "seed":  # else a round that is run again draws from the key
            facts[_SEED] = str(training.seed)
        chosen = {**(same or {}), **settings}
        lines = {name: json.dumps(value, ensure_ascii=False, default=str) for name, value in chosen.items()}
        self._text = "".join(f"{name} = {text}\n" for name, text in lines.items() if text != "null")
        self._text += "".join(f"{name}: {value}\n" for name, value in facts.items())
        model = training.problem.model.evaluated(training.problem.model.initial)
        self._model = _in_thread(lambda: model_fingerprint(model))
        self._data = _in_thread(training.population.fingerprint)

    def __str__(self) -> str:
        model, data = self._model.result(), self._data.result()
        return f"{self._text}checksum of the model: {model}\n{DATA_FINGERPRINT}: {data}\n"


def model_fingerprint(model: nn.Module) -> str:
    """A checksum of a model's layers, of its parameters' names, types and shapes, and of all values not trained."""
    digest = hashlib.sha256(layers_text(model).encode("utf-8", "surrogatepass"))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in tensors:
        digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad)).encode())
        if not tensor.requires_grad:
            values = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(values.view(torch.uint8).numpy().data if values.numel() else b"")
    return digest.hexdigest()[:32]


def code_fingerprint(*things: Any) -> str:
    """A checksum of the code of functions and of objects' classes, with what they use of their own modules.

    What comes from installed packages goes by its name, and so does what has no code in Python.
    """
    known = set[int]()

    def told(thing: Any, module: str | None) -> str:
        if isinstance(thing, partial):
            return "".join(told(one, module) for one in (thing.func, *thing.args, *thing.keywords.items()))
        thing = inspect.unwrap(thing)
        thing = getattr(thing, "__func__", thing)  # of a method
        if isinstance(thing, CodeType):
            constants = [told(one, module) if isinstance(one, CodeType) else _steady(one) for one in thing.co_consts]
            return repr((thing.co_code, thing.co_names, constants))
        if isinstance(thing, _PLAIN):
            return _steady(thing)
        if not isinstance(thing, type | FunctionType):
            held = {
                name: _steady(one) for name, one in getattr(thing, "__dict__", {}).items() if isinstance(one, _PLAIN)
            }
            held.pop("training", None)  # a mode, set while it is used
            return repr(held) + told(type(thing), module)
        away = (module is not None and thing.__module__ != module) or _installed(thing.__module__)
        if id(thing) in known or away:
            return thing.__qualname__
        known.add(id(thing))
        if isinstance(thing, type):
            own = [part for name, part in vars(thing).items() if name[:2] != "__" or isinstance(part, FunctionType)]
            used = [part.fget if isinstance(part, property) else getattr(part, "__func__", part) for part in own]
        else:
            used = [thing.__code__, *(thing.__defaults__ or ()), *inspect.getclosurevars(thing).nonlocals.values()]
            used += [thing.__globals__[name] for name in thing.__code__.co_names if name in thing.__globals__]
        bases = [told(base, None) for base in getattr(thing, "__bases__", ())]
        return "".join([thing.__qualname__, *(told(one, thing.__module__) for one in used), *bases])

    return hashlib.sha256("".join(told(one, None) for one in things).encode("utf-8", "surrogatepass")).hexdigest()[:32]


_PLAIN = (int, float, str, bytes, bool, tuple, frozenset, type(None))  # compared by their values


def _steady(value: Any) -> str:
    """A text that is the same in every process: of a set in order."""
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _installed(module: str) -> bool:
    path = getattr(sys.modules.get(module), "__file__", None)
    unwritten = path is None and module != "__main__"
    return unwritten or "site-packages" in str(path) or module.split(".")[0] in _ITS_VERSION


def _flat(tables: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values of tables as `table.name`."""
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", entry) for key, entry in value.items())
        else:
            yield name, value


def _in_thread(work: Callable[[], str]) -> Future[str]:
    """What this will give, from a thread that does not keep the process alive when a run ends before."""
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # for whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name="clipline-fingerprint", daemon=True).start()
    return future
