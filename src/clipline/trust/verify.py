"""Checks a run directory: its guarantee is computed again from the ledger and compared with all that the files say.

This rests on the files, the accountants and arithmetic of its own, and on nothing that wrote the run. Whoever changes
all files alike is found out only by a seal that was noted before: one digest over what a guarantee rests on.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import CliplineError, RunError, regular
from ..privacy.accountant import account, account_renyi
from ..privacy.events import FixedSizeSampling, GaussianEvent, GroupedPoissonSampling, NoSampling, PoissonSampling
from ..privacy.guarantee import Guarantee
from ..privacy.ledger import Ledger
from ..privacy.relations import Relation
from ..privacy.two_views import TwoGuarantees, account_both, most_participations
from ..random.streams import GUESSABLE
from ..training.durable import damage
from ..training.run_files import (
    CHECKPOINT,
    GUARANTEES,
    KEY,
    LEDGER,
    METRICS,
    MODEL,
    OLDER,
    PARTICIPATIONS,
    SETTINGS,
    RunFiles,
    can_go_on,
    flat,
    guarantee_json,
    is_run_directory,
    read_run,
)

_SAME, _CLOSE = 1e-9, 0.01  # relative: numbers that were copied; an epsilon by another version's accountant
_LIBRARY = "privacy."  # before names in a settings file that `RunDirectory` wrote itself
Entries = tuple[tuple[GaussianEvent, int], ...]
_SHORT_NAMES = {"local.lr": "client_lr", "server.lr": "server_lr", "clip.quantile": "quantile", "clip.lr": "clip_lr"}
_NAMESPACE = "clipline"  # of signatures, as `ssh-keygen -Y` has it


@dataclass(frozen=True, eq=False)
class Verified:
    """What a run directory promises, by its ledger, and what is wrong with its files."""

    path: Path
    files: RunFiles
    ledger: Ledger  # of all that was charged
    guarantee: Guarantee | None  # computed again, by the tighter of both accountants; None where it cannot be
    renyi: float | None  # epsilon by the Renyi accountant alone
    contradictions: tuple[str, ...]  # between files that can be read: then the guarantee is none to rely on
    finished: bool
    both: TwoGuarantees | None = None  # of a federation: for outsiders, and against its server

    @property
    def problems(self) -> tuple[str, ...]:
        """Also files that are missing or damaged."""
        found = [*self.files.problems, *_missing(self), *_damaged(self.path), *_guessed(self.files)]
        found += [*self.contradictions, *_settings(self.files)]
        found += _metrics(self.files, self.guarantee) if self.finished else ()
        return tuple(dict.fromkeys(found))

    @property
    def warnings(self) -> tuple[str, ...]:
        """What nothing is wrong about, and whoever relies on the guarantee has to know."""
        seeded = self.guarantee is not None and self.guarantee.from_seed and not any(_guessed(self.files))
        told = f"cohorts and noise come from a seed: whoever knows it, as from {SETTINGS}, can subtract the noise"
        return (told,) if seeded and not _generated(self.files) else ()

    @property
    def seal(self) -> str:
        """See `seal`."""
        return seal(self.path)


def _no_run(path: Path) -> str:
    """What a path is that is no run directory, and what to give."""
    if not path.exists():
        return "does not exist: give a run directory, as clipline train writes it"
    if (path / MODEL).is_file():
        return f"is a saved model, which has no {LEDGER}: give the directory of its run, as RunDirectory writes it"
    runs = [one.name for one in sorted(path.iterdir()) if is_run_directory(one)] if path.is_dir() else []
    found = f"holds {len(runs)} runs: give one of them, such as {str(path / runs[0])!r}" if runs else None
    return found or "holds no run: give a run directory, as clipline train writes it"


def verify(path: Path) -> Verified:
    """Check the run in a folder. A run that can still be resumed has no model yet, which is no problem."""
    if not path.is_dir() or not any((path / name).is_file() for name in (SETTINGS, LEDGER, METRICS)):
        raise RunError(f"path={str(path)!r} {_no_run(path)}")
    files = read_run(path)
    finished = (path / MODEL).is_file() and not can_go_on(path)
    ledger = Ledger() if files.ledger is None else files.ledger
    problems = [f"{MODEL} has no card, or one that cannot be read"] if finished and not files.card else []
    problems += [*_rounds(files, ledger, finished), *_doubled(path / METRICS), *_terms(files, ledger)]
    charged = _charged(files, ledger)
    guarantee = renyi = None
    try:
        guarantee, renyi = _guarantee(files, charged)
    except CliplineError as error:
        problems.append(f"the rounds cannot be accounted: {error}")
    if guarantee is not None:
        problems += [*_card(files, guarantee, finished), *_curve(files, guarantee), *_plan(files, guarantee)]
        if (text := _header(_bytes(path / MODEL))[0].get("guarantee")) != files.card.get("guarantee", {}).get("text"):
            problems.append(f"the model's metadata say {text!r}, which its card does not")
    elif ledger.rounds:
        problems.append("delta or the neighbouring relation is not on record")
    both = None
    if finished and "federation" in files.card and not (path / GUARANTEES).is_file():
        problems.append(f"{GUARANTEES} is missing")
    if guarantee is not None and (path / GUARANTEES).is_file():
        try:
            told = files.card["federation"]
            both = account_both(guarantee, charged, most_participations(told, charged.rounds))
            problems += _federation(path, both, told["asked"])
            noted = [files.settings, flat(files.card["settings"])]
            upload = next((one for one in noted if any(name.startswith("upload.") for name in one)), {})
            if told["noise_by_clients"] is not ("upload.least_survivors" in upload):
                problems.append("the model's card and the settings of upload differ in who adds the noise")
        except (KeyError, TypeError, ValueError, OverflowError, CliplineError):
            problems.append("the model's card does not say how often a user of the federation may have been asked")
    return Verified(path, files, charged, guarantee, renyi, tuple(problems), finished, both)


def _missing(found: Verified) -> Iterator[str]:
    expected = [SETTINGS, LEDGER, METRICS]
    expected += [] if can_go_on(found.path) else [MODEL]
    yield from (f"{name} is missing" for name in expected if not (found.path / name).is_file())


def _damaged(path: Path) -> Iterator[str]:
    """Tensors and metadata that are not what their checksum says, and a key that should be gone."""
    if (path / KEY).exists() and not can_go_on(path):
        yield f"{KEY} is still there: whoever has it can subtract the noise, so delete it"
    for name in (MODEL, CHECKPOINT, OLDER):
        if (path / name).is_file() and (wrong := damage(path / name)) is not None:
            yield f"{name} is damaged: {wrong}"


def _guessed(files: RunFiles) -> Iterator[str]:
    """A seed that somebody may find by trying all of them, where people's data were trained on."""
    seed, z = files.settings.get("seed"), _number(files.notes.get("noise_multiplier"))
    seeded = _setting(files, "noise_source") == "seed" and z != 0 and not _generated(files)
    if seeded and isinstance(seed, int) and seed < GUESSABLE:
        yield (
            f"cohorts and noise come from seed {seed}, which is easily guessed: whoever tries it can subtract the "
            "noise, so train without a seed"
        )


def _generated(files: RunFiles) -> bool:
    """Whether nobody's data were trained on, by what the run says of its data."""
    return files.facts.get("data") in ("embedded", "stand-in")


def _rounds(files: RunFiles, ledger: Ledger, finished: bool) -> Iterator[str]:
    """Whether rounds are missing or double."""
    known = [one["round"] for one in files.rounds]
    if known != [*range(len(known))]:
        seen = {*known}
        missing = islice((number for number in range(max(known)) if number not in seen), 5)
        yield f"{METRICS} lacks rounds: {', '.join(map(str, missing))}"
    if len(known) > ledger.rounds:
        yield f"{METRICS} has {len(known)} rounds and {LEDGER} charges {ledger.rounds}"
    planned, done = files.settings.get("rounds"), files.card.get("rounds")
    if isinstance(planned, int) and len(known) > planned:
        yield f"{METRICS} has {len(known)} rounds and {SETTINGS} {planned}"
    if isinstance(done, int) and done > ledger.rounds:
        yield f"the model's card has {done} rounds and {LEDGER} charges {ledger.rounds}"
    if not finished:
        return
    if done != len(known):
        yield f"the model's card has {done} rounds and {METRICS} {len(known)}"
    if files.card.get("stopped") == "finished" and planned != done:
        yield f"the model's card says that all rounds were done, {done} of {planned}"
    if _setting(files, "noise_source") == "seed" and ledger.rounds > len(known):
        yield f"{LEDGER} charges {ledger.rounds} rounds and {METRICS} has {len(known)}"


def _doubled(path: Path) -> Iterator[str]:
    numbers = re.findall(rb'^{"round": (\d+),', _bytes(path), re.MULTILINE)
    if twice := sorted({int(number) for number in numbers if numbers.count(number) > 1}):
        yield f"{path.name} has rounds twice: {', '.join(map(str, twice[:5]))}"


def _terms(files: RunFiles, ledger: Ledger) -> Iterator[str]:
    """Whether noise and sampling are the same in ledger, settings and card, and noise is split by Theorem 1."""
    rounds = [event for event in ledger.events if event.statistic is None]
    resolved = files.card.get("resolved")
    told = [(SETTINGS, files.notes)] + ([("the model's card", resolved)] if isinstance(resolved, dict) else [])
    for name, values in told:
        z, delta_z, count = (
            _number(values.get(key)) for key in ("noise_multiplier", "delta_noise_multiplier", "count_stddev")
        )
        if z is None or delta_z is None:
            yield f"{name} does not say how much noise there is"
            continue
        parts = [delta_z] if count is None else [delta_z, 2 * count]
        precision = sum(1 / one / one if one else math.inf for one in parts)
        if z and not _alike(precision**-0.5, z):
            yield f"{name}: noise on updates and count comes to {precision**-0.5:.6g} by Theorem 1, and not to {z:.6g}"
        for event in rounds:
            if not _alike(event.noise_multiplier, z):
                yield f"{LEDGER} charges a noise multiplier of {event.noise_multiplier:g}, {name} has {z:g}"
            if (bands := values.get("bands", 1)) != getattr(event.sampling, "bands", 1):
                yield f"{LEDGER} charges {event.sampling}, {name} has {bands} bands of noise"
    cohort, users = _setting(files, "cohort_size"), _setting(files, "population_size") or files.notes.get("users")
    asked = files.settings.get("noise.bands", files.settings.get("bands"))
    if not isinstance(cohort, int | None) or not isinstance(users, int | None):
        yield f"{SETTINGS} has a cohort of {cohort!r} and a population of {users!r}, which must be whole numbers"
    for event in rounds:
        if isinstance(cohort, int) and isinstance(users, int) and users > 0 and not _drawn(event, cohort, users):
            yield f"{LEDGER} charges {event.sampling}, {SETTINGS} has {cohort:,} of {users:,} users"
        if isinstance(asked, int) and asked != getattr(event.sampling, "bands", 1):
            yield f"{LEDGER} charges {event.sampling}, {SETTINGS} has {asked} bands of noise"
    about = files.card.get("settings")
    for name in ("rounds", "cohort_size"):
        if isinstance(about, dict) and about.get(name) != files.settings.get(name):
            yield f"{name} is {about.get(name)} in the model's card and {files.settings.get(name)} in {SETTINGS}"
    for name, value in resolved.items() if isinstance(resolved, dict) else ():
        if (noted := files.notes.get(name)) != value:
            yield f"{name} is {value} in the model's card and {noted} in {SETTINGS}"


def _drawn(event: GaussianEvent, cohort: int, users: int) -> bool:
    """Whether an event is of the sampling that settings tell of: Poisson, fixed, or none, which costs most."""
    if isinstance(event.sampling, NoSampling):
        return True
    if isinstance(event.sampling, FixedSizeSampling):
        return (event.sampling.cohort_size, event.sampling.population_size) == (cohort, users)
    groups = event.sampling.bands if isinstance(event.sampling, GroupedPoissonSampling) else 1
    is_poisson = isinstance(event.sampling, PoissonSampling | GroupedPoissonSampling)
    return is_poisson and _alike(event.sampling.rate, groups * cohort / users)


def _charged(files: RunFiles, ledger: Ledger) -> Ledger:
    """The ledger; where a metric could end the run, with all rounds it could have had: when it ended tells of data."""
    covered = files.card.get("guarantee", {}).get("rounds")
    updates = [event for event in ledger.events if event.statistic is None]
    early = files.card.get("stopped") in ("early", "interrupted")
    if not isinstance(covered, int) or len(updates) != 1 or not early:
        return ledger
    return ledger.add(ledger.next_event, max(0, min(covered, 1 << 40) - ledger.rounds))


def _guarantee(files: RunFiles, ledger: Ledger) -> tuple[Guarantee | None, float | None]:
    delta = _number(files.notes.get("delta")) or _number(files.card.get("guarantee", {}).get("delta"))
    relation = files.notes.get("relation") or _setting(files, "relation")
    if not ledger.rounds or delta is None or not isinstance(relation, str):
        return None, None
    found, renyi = _accounted(ledger.entries, delta, Relation.named(relation))
    found = replace(
        found,
        from_seed=_setting(files, "noise_source") == "seed",
        example_level=files.notes.get("example_level") is True,
        shows_errors=files.notes.get("shows_errors") is True,
    )
    return found, renyi


@lru_cache(maxsize=4096)
def _accounted(entries: Entries, delta: float, relation: Relation) -> tuple[Guarantee, float]:
    """By the tighter of both accountants, and epsilon by the Renyi one; kept for a page that follows a run."""
    ledger = Ledger(entries)
    found = account(ledger, delta=delta, relation=relation)
    return found, account_renyi(ledger, delta=delta, relation=relation).epsilon


def _card(files: RunFiles, guarantee: Guarantee, finished: bool) -> Iterator[str]:
    """Where the model's card tells of another guarantee than the ledger comes to."""
    told = files.card.get("guarantee", {})
    if not finished and told.get("rounds") != guarantee.rounds:  # of an interruption, after which the run went on
        return
    same_version = files.card.get("clipline") == __version__
    for name, value in guarantee_json(guarantee).items():
        given: Any = list(value) if isinstance(value, tuple) else value
        if name in ("epsilon", "order") and not same_version and _number(told.get(name)) and given:
            agrees = name == "order" or math.isclose(told[name], given, rel_tol=_CLOSE)
        else:
            agrees = _alike(told.get(name), given)
        if not agrees:
            yield f"{name} is {told.get(name)} in the model's card, and {given} by {LEDGER}"
    if same_version and told.get("text") != str(guarantee):
        yield f"the model's card says {told.get('text')!r}, and {LEDGER} comes to {str(guarantee)!r}"


def _federation(path: Path, both: TwoGuarantees, times: int) -> Iterator[str]:
    """Where a federation's two sentences are not what the ledger comes to, or nodes were asked more often."""
    if (told := _text(path / GUARANTEES).strip()) != str(both):
        yield f"{GUARANTEES} says {told!r}, and {LEDGER} and the model's card come to {str(both)!r}"
    try:
        kept = json.loads(_text(path / PARTICIPATIONS) or "{}")
        most, sums = max(map(int, kept.get("asked", {}).values()), default=0), int(kept.get("sums", 0))
    except (ValueError, OverflowError, AttributeError, TypeError):
        yield f"{PARTICIPATIONS} cannot be read"
        return
    if sums > times or (both.server is not None and most > both.participations):
        told = f"{sums} cohorts that were asked, and a node that was asked {most} times"
        yield f"{PARTICIPATIONS} has {told}, {GUARANTEES} is for {both.participations}"


def _text(path: Path) -> str:
    return _bytes(path).decode("utf-8", errors="replace")


def _curve(files: RunFiles, guarantee: Guarantee) -> Iterator[str]:
    """Where metrics.jsonl tells of a greater epsilon than was charged, or of another delta."""
    for name, limit in (("epsilon", guarantee.epsilon), ("delta", guarantee.delta)):
        known = [number for one in files.rounds if (number := _number(one.get(name))) is not None]
        if known and (max(known) > limit * (1 + _CLOSE) or (name == "delta" and not _alike(known[-1], limit))):
            yield f"{METRICS} has {name} {max(known):.6g}, and {LEDGER} comes to {limit:.6g}"


def _metrics(files: RunFiles, guarantee: Guarantee | None) -> Iterator[str]:
    """Where metrics.jsonl ends with less epsilon than was charged, or tells of other metrics than the card."""
    known = [number for one in files.rounds if (number := _number(one.get("epsilon"))) is not None]
    if known and guarantee is not None and known[-1] < guarantee.epsilon * (1 - _CLOSE):
        yield f"{METRICS} ends with epsilon {known[-1]:.6g}, and {LEDGER} comes to {guarantee.epsilon:.6g}"
    after, metrics = files.card.get("model_rounds", files.card.get("rounds")), files.card.get("metrics")
    told = {one["round"] + 1: one for one in files.rounds}.get(after) if isinstance(after, int) else None
    if told is None and files.card and files.rounds:
        yield f"the model's card says that it was released after {after} rounds, which {METRICS} does not have"
    for name, value in metrics.items() if isinstance(metrics, dict) else ():
        if told is not None and not _alike(told.get(name), value):
            yield f"{name} is {value} in the model's card, and {told.get(name)} in {METRICS} after {after} rounds"


def _settings(files: RunFiles) -> Iterator[str]:
    """Where the card has other settings than the file, or the file than what it notes of them."""
    about = files.card.get("settings")
    for name, value in flat(about).items() if isinstance(about, dict) else ():
        if name in ("compute.workers", "compute.device"):  # a resume may change them
            continue
        short = _SHORT_NAMES.get(name, name.removeprefix(_LIBRARY))
        noted = files.settings.get(name, files.settings.get(short))
        same_kind = type(noted) is type(value) or (_number(noted) is not None and _number(value) is not None)
        if noted is not None and same_kind and not _alike(noted, value):
            yield f"{name} is {value} in the model's card and {noted} in {SETTINGS}"
    for name in ("delta", "noise_multiplier", "relation"):
        noted, value = files.notes.get(name), _setting(files, name)
        if noted is not None and value is not None and not _alike(noted, value):
            yield f"{name} is {value} in {SETTINGS}, which notes {noted} below"
    facts = files.card.get("facts")
    for name, value in facts.items() if isinstance(facts, dict) else ():
        if files.facts.get(name) != value:
            yield f"{name} is {value!r} in the model's card and {files.facts.get(name)!r} in {SETTINGS}"


def _plan(files: RunFiles, guarantee: Guarantee) -> Iterator[str]:
    """Where the settings ask for less epsilon than the rounds charged have; a killed run may have released more."""
    planned = _number(files.settings.get("rounds"))
    for name in ("epsilon", "max_epsilon") if planned is None or guarantee.rounds <= planned else ():
        asked = _number(_setting(files, name))
        if asked is not None and guarantee.epsilon > asked * (1 + _CLOSE):
            yield f"{name} is {asked:g} in {SETTINGS}, and {LEDGER} comes to {guarantee.epsilon:.6g}"


def _setting(files: RunFiles, name: str) -> Any:
    return files.settings.get(name, files.settings.get(f"{_LIBRARY}{name}"))


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 else None


def _alike(one: object, other: object) -> bool:
    a, b = _number(one), _number(other)
    return one == other if a is None or b is None else math.isclose(a, b, rel_tol=_SAME)


# The seal


def seal(path: Path) -> str:
    """SHA-256 over ledger, settings without the seed, metrics and the model's tensors, in hexadecimal digits.

    Of a federation over its two sentences too.
    """
    whole = hashlib.sha256(b"clipline seal 1\n")
    for name in (LEDGER, SETTINGS, METRICS, *((GUARANTEES,) if (path / GUARANTEES).is_file() else ())):
        lines = _bytes(path / name)
        if name == SETTINGS:
            lines = re.sub(rb"(?m)^seed = .*\n", b"", lines)
        whole.update(f"{name} {hashlib.sha256(lines).hexdigest()}\n".encode())
    whole.update(f"tensors {_tensors(path / MODEL)}\n".encode())
    return whole.hexdigest()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.is_file() else b""
    except OSError as error:
        raise RunError(f"{str(path)!r} cannot be read ({error}): a seal needs all files") from None


def _tensors(path: Path) -> str:
    """A checksum of names, types, shapes and values: all of the file but its metadata, where the card is."""
    data = _bytes(path)
    _, tensors, values = _header(data)
    digest = hashlib.sha256(json.dumps(tensors, sort_keys=True).encode())
    digest.update(values)
    return digest.hexdigest()


def _header(data: bytes) -> tuple[dict[str, Any], dict[str, Any], memoryview]:
    """The metadata of a safetensors file, its tensors by name, and their values; all values if it cannot be read."""
    try:
        (length,) = struct.unpack_from("<Q", data)
        tensors = json.loads(data[8 : 8 + length])
        metadata = tensors.pop("__metadata__", {})
        return metadata if isinstance(metadata, dict) else {}, tensors, memoryview(data)[8 + length :]
    except (struct.error, ValueError, AttributeError, TypeError, RecursionError):
        return {}, {}, memoryview(data)


def model_digest(path: Path) -> str:
    """SHA-256 of a run's model file, as `sha256sum` prints it."""
    return hashlib.sha256(_bytes(path / MODEL)).hexdigest()


# Signatures by the user's own SSH key

SIGNATURE = "seal.sig"


def sign_run(path: Path, key: Path) -> Path:
    """Sign the seal with an SSH key, into seal.sig of the run."""
    regular(key)
    signed = _ssh_keygen(["sign", "-f", str(key), "-n", _NAMESPACE], _sealed(path), f"the key {str(key)!r}")
    (path / SIGNATURE).write_bytes(signed)
    return path / SIGNATURE


def check_signature(path: Path, signers: Path) -> str:
    """Who signed this seal, of those in a file of allowed signers (a line each: name, then public key)."""
    file = str(path / SIGNATURE)
    if not (path / SIGNATURE).is_file():
        raise RunError(f"{file!r} does not exist: sign the run with --sign KEY first")
    regular(signers)
    by = f"{file!r} and {str(signers)!r}"
    name = _ssh_keygen(["find-principals", "-f", str(signers), "-s", file], b"", by).decode().splitlines()[0]
    _ssh_keygen(["verify", "-f", str(signers), "-I", name, "-n", _NAMESPACE, "-s", file], _sealed(path), by)
    return name


def _sealed(path: Path) -> bytes:
    return f"clipline seal {seal(path)}\n".encode()


def _ssh_keygen(arguments: list[str], text: bytes, what: str) -> bytes:
    try:
        done = subprocess.run(["ssh-keygen", "-Y", *arguments], input=text, capture_output=True, check=False)
    except FileNotFoundError:
        raise RunError("ssh-keygen is not installed: install OpenSSH, or note the seal instead") from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).decode(errors="replace").split())
        raise RunError(f"{what}: ssh-keygen refused ({said}): check the key, the signers and that the run is unchanged")
    return done.stdout
