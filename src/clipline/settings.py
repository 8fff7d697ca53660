"""Every setting, declared once: name, type, default, limit, help and group.

The keys of TOML files, the flags of the command line with their help, and the keyword arguments of `Privacy`,
`Compute`, `LocalSGD`, `QuantileClip`, `ServerSGD` and others follow from the class `Settings`, and so do their checks.
No torch and no NumPy here: the command line reads this before anything is loaded.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from .errors import check_choice, check_number, check_whole, nearest, refuse
from .lr_schedules import check_schedule

__all__ = ["SETTINGS", "STAND_IN", "check"]

STAND_IN = "stand-in"  # as the setting `data`: generate users even where a store is found

# Outside anything a model does, inside what float32 can hold. They exist so that a runaway (say, pure noise as the
# fraction) ends in a number, and so that no clip is so small that noise made for it vanishes; they are not a range to
# tune.
SMALLEST_CLIP = 1e-30
LARGEST_CLIP = 1e30
SMALLEST_EPSILON = 1e-12  # below, nothing is learned and searching for the noise takes minutes
LARGEST_DELTA = 0.1  # above, whatever a guarantee says holds for nine users of ten at best

WHAT = "What to train"
LOCAL = "Local training of a user"
SERVER = "Server"
CLIP = "Clip"
PRIVACY = "Privacy"
MEASURING = "Measuring"
COMPUTE = "Computing (changes no guarantee)"
RUN = "The run"
GROUPS = (WHAT, LOCAL, SERVER, CLIP, PRIVACY, MEASURING, COMPUTE, RUN)  # in the order of the help


@dataclass(frozen=True)
class Setting:
    """One setting. `check` refuses a value outside its limits, with the same sentence wherever the value came from."""

    name: str  # of the TOML key and the keyword argument; the flag has dashes for underscores
    kind: type  # int, float, str or bool
    optional: bool  # whether it may be None, that is, left out
    default: Any  # MISSING: a task, a file or a flag has to give it
    help: str
    group: str
    limits: Mapping[str, float]  # of a number: above, at_least, below, at_most
    way_out: str = ""  # the end of the sentence that refuses a value
    unset: str = ""  # what holds if it is left out, in words, where that is not `default`
    by_task: bool = False  # whether tasks have values of their own for it
    choices: tuple[Any, ...] = ()  # all values there are; with `or_number` those beside numbers
    or_number: bool = False
    some_tasks: bool = False  # whether only some tasks have it: None on the others
    own_check: Callable[[Setting, object], None] | None = None
    metavar: str = "TEXT"  # what the command line's help calls a text

    @property
    def flag(self) -> str:
        """How the command line spells it."""
        return "--" + self.name.replace("_", "-")

    def check(self, value: object) -> None:
        """Raise a `SettingError` with name, value, limit and way out unless `value` is allowed."""
        if value is None and self.optional:
            return
        if self.or_number and isinstance(value, str):
            if value not in self.choices:
                limit = f"one of {', '.join(self.choices)} or a number"
                raise refuse(self.name, value, limit, nearest(value, self.choices))
        elif self.own_check is not None:
            self.own_check(self, value)
        elif self.kind is bool:
            if not isinstance(value, bool):
                raise refuse(self.name, value, "true or false", self.way_out)
        elif self.kind is str:
            check_choice(self.name, value, self.choices)
        elif self.choices and not self.or_number:
            if isinstance(value, bool) or value not in self.choices:
                raise refuse(self.name, value, " or ".join(map(str, self.choices)), self.way_out)
        else:
            check_of_kind: Any = check_whole if self.kind is int else check_number
            check_of_kind(self.name, value, **self.limits, way_out=self.way_out)


def setting(help: str, group: str, *, default: Any = MISSING, **options: Any) -> Any:
    """Declare a field of `Settings`, with what `Setting` says of it. Its name and type are those of the field."""
    metadata = {"declares": {"help": help, "group": group, **options}}
    return dataclasses.field(default=default, metadata=metadata)  # MISSING is dataclasses' own way to say none


def _check_path(setting: Setting, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise refuse(setting.name, value, f"the path of a folder or a file, or {STAND_IN}", "give the path as text")
    if any(0xD800 <= ord(letter) < 0xE000 for letter in value):
        raise refuse(setting.name, value, "text in UTF-8, as settings are stored so", "rename the folder")


def _check_text(setting: Setting, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise refuse(setting.name, value, "text", setting.way_out)


def _check_schedule(setting: Setting, value: object) -> None:
    check_schedule(setting.name, value)


def _check_device(setting: Setting, value: object) -> None:
    # A torch.device has been checked by torch. Whether a device is there, `Compute.resolved` says, which has torch.
    if not isinstance(value, str) and type(value).__name__ != "device":
        raise refuse(setting.name, value, "auto, cpu or cuda", setting.way_out)


def _check_clip(setting: Setting, value: object) -> None:
    if value != math.inf:  # no clipping at all: for study
        check_clip(setting.name, value, setting.way_out)


def check_clip(name: str, clip: object, way_out: str) -> float:
    """A clip that noise can be made for."""
    return check_number(name, clip, at_least=SMALLEST_CLIP, at_most=LARGEST_CLIP, way_out=way_out)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings there are, flat, as TOML files and flags spell them. Each value is checked alone, on construction.

    What two settings mean together is checked by the object that takes both: see `Privacy`.
    """

    task: str = setting("Name of the task.", WHAT, own_check=_check_text, way_out="see clipline tasks")
    rounds: int = setting(
        "Rounds of training, T.", WHAT, at_least=1, at_most=10**9, way_out="train for at least one round",
        by_task=True,
    )  # fmt: skip
    data: str | None = setting(
        "Folder made by clipline data prepare; for a file of your own also a table (Parquet, CSV, JSONL, NPZ); or "
        f"{STAND_IN}, to generate users.",
        WHAT, default=None, own_check=_check_path, some_tasks=True,
        unset=f"what is in CLIPLINE_DATA or clipline-data, else {STAND_IN}",
    )  # fmt: skip
    user_column: str | None = setting(
        "Column of a table that says whose row it is.", WHAT, default=None, own_check=_check_text, some_tasks=True,
        way_out="give the name of a column",
    )  # fmt: skip
    classes: int | None = setting(
        "Classes in a generated population.", WHAT, default=None, some_tasks=True, at_least=2, at_most=62,
        way_out="10 are the digits, 36 with capitals, 62 with small letters", by_task=True,
    )  # fmt: skip
    augment: bool | None = setting(
        "Random crops and flips in training.", WHAT, default=None, some_tasks=True,
        way_out="leave it out for the original's choice", by_task=True,
    )  # fmt: skip
    group_count: int | None = setting(
        "Groups of group normalisation.", WHAT, default=None, some_tasks=True, choices=(2, 32),
        way_out="the original had one of these", by_task=True,
    )  # fmt: skip
    padding_in_loss: bool | None = setting(
        "Whether the training loss averages over padding too.", WHAT, default=None, some_tasks=True,
        way_out="leave it out for the original's choice", by_task=True,
    )  # fmt: skip

    client_lr: float = setting(
        "Learning rate of a user.", LOCAL, above=0, at_most=1e30, way_out="0.1 is a usual start", by_task=True
    )
    batch_size: int = setting(
        "Examples in a batch.", LOCAL, default=20, at_least=1, at_most=10**9,
        way_out="the paper's tasks use 4 to 100", by_task=True,
    )  # fmt: skip
    client_epochs: int = setting(
        "Passes over a user's examples.", LOCAL, default=1, at_least=1, at_most=10**6, way_out="the paper uses 1"
    )
    max_examples: int | None = setting(
        "Maximum examples per user (the first N are used).", LOCAL, default=None, at_least=1,
        way_out="leave it out for no limit", by_task=True,
    )  # fmt: skip
    client_optimiser: str = setting(
        "Optimiser of a user, fresh in every round (adam: as AdamW).", LOCAL, default="sgd", choices=("sgd", "adam")
    )
    client_momentum: float = setting(
        "Momentum of a user (sgd).", LOCAL, default=0.0, at_least=0, below=1, way_out="0.9 is usual; 0 turns it off",
        unset="0",
    )  # fmt: skip
    client_weight_decay: float = setting(
        "Weight decay of a user.", LOCAL, default=0.0, at_least=0, at_most=1e30,
        way_out="1e-4 is usual; 0 turns it off", unset="0",
    )  # fmt: skip
    client_clip_norm: float | None = setting(
        "Largest norm of a gradient in a user's own steps. Has nothing to do with privacy.", LOCAL, default=None,
        above=0, at_most=1e30, way_out="1.0 is usual; leave it out for no limit",
    )  # fmt: skip
    client_proximal: float = setting(
        "FedProx: pulls a user back to the round's parameters, by mu/2 |w - w_round|^2.", LOCAL, default=0.0,
        at_least=0, at_most=1e30, way_out="0.01 to 1 is usual; 0 turns it off", unset="0",
    )  # fmt: skip
    client_lr_schedule: str | None = setting(
        "Rate of users over the rounds: cosine, linear:END, step:EVERY:FACTOR, warmup:ROUNDS; commas multiply.",
        LOCAL, default=None, own_check=_check_schedule, unset="constant",
    )  # fmt: skip

    server: str | None = setting(
        "Optimiser of the server; normalised needs no rate.", SERVER, default=None,
        choices=("normalised", "sgd", "adam", "yogi"), unset="normalised, or sgd where server_lr is given",
    )  # fmt: skip
    server_lr: float | None = setting(
        "Learning rate of the server (sgd, adam, yogi).", SERVER, default=None, above=0, at_most=1e30,
        way_out="1.0 applies the mean update as it is; 0.01 is a usual start for adam and yogi", by_task=True,
        unset="none for normalised, 1.0 for sgd, 0.01 for adam and yogi",
    )  # fmt: skip
    server_momentum: float = setting(
        "Momentum of the server (sgd).", SERVER, default=0.9, at_least=0, below=1,
        way_out="the paper uses 0.9; 0 turns it off",
    )  # fmt: skip
    server_lr_schedule: str | None = setting(
        "Rate of the server over the rounds, as --client-lr-schedule.", SERVER, default=None,
        own_check=_check_schedule, unset="constant",
    )  # fmt: skip
    average: str | None = setting(
        "Whether to give, measure and save the average of the models of all rounds (exponential, 0.9).", SERVER,
        default=None, choices=("on", "off"), unset="on for normalised, off for other servers",
    )  # fmt: skip

    clip: str | float = setting(
        "quantile (adapts by itself), fixed (the value of --fixed-clip), a number, or none.", CLIP,
        default="quantile", choices=("quantile", "fixed", "none"), or_number=True, own_check=_check_clip,
        way_out="give a clip near the norms of updates, such as 1.0, or track a quantile",
    )  # fmt: skip
    quantile: float = setting(
        "Which quantile of the update norms to track.", CLIP, default=0.5, above=0, below=1,
        way_out="0.5 tracks the median and needs no tuning",
    )  # fmt: skip
    clip_start: float = setting(
        "Clip of the first round.", CLIP, default=0.1, at_least=SMALLEST_CLIP, at_most=LARGEST_CLIP,
        way_out="a start safely below the expected norms, such as 0.1, grows tenfold in 23 rounds",
        by_task=True,
    )  # fmt: skip
    clip_lr: float = setting("Learning rate of the clip.", CLIP, default=0.2, above=0, way_out="the paper uses 0.2")
    clip_rule: str = setting(
        "How the clip moves: by a factor or by a difference.", CLIP, default="geometric",
        choices=("geometric", "linear"),
    )  # fmt: skip
    clamp_fraction: bool = setting(
        "Limit the noisy fraction of updates within the clip to 0 ... 1.", CLIP, default=False,
        way_out="false is the paper's choice",
    )  # fmt: skip
    fixed_clip: float | None = setting(
        "What --clip fixed means.", CLIP, default=None, at_least=SMALLEST_CLIP, at_most=LARGEST_CLIP,
        way_out="give a clip near the norms of updates, such as 1.0", by_task=True,
    )  # fmt: skip

    epsilon: float | None = setting(
        "Epsilon to spend on all rounds; the noise follows.", PRIVACY, default=None, at_least=SMALLEST_EPSILON,
        way_out="4.0 is a usual target", by_task=True,
    )  # fmt: skip
    noise_multiplier: float | None = setting(
        "Noise z of a whole round; 0 is not private. Instead of --epsilon.", PRIVACY, default=None, at_least=0,
        way_out="0 is no noise and no privacy", by_task=True,
    )  # fmt: skip
    delta: float | None = setting(
        "Delta of the guarantee.", PRIVACY, default=None, above=0, at_most=LARGEST_DELTA,
        way_out="leave it out for (number of users)^-1.1", unset="(number of users)^-1.1",
    )  # fmt: skip
    population_size: int | None = setting(
        "How many users there are, n: a public number, declared beforehand and not read from the data. The rate and "
        "delta follow from it, and the guarantee is for add-or-remove. A generated population has this many users.",
        PRIVACY, default=None, at_least=1, at_most=10**12, way_out="give the number of users that is known beforehand",
        unset="counted in stored data, and the guarantee is for zero-out", by_task=True,
    )  # fmt: skip
    cohort_size: int = setting(
        "Users a round, m (expected number under Poisson sampling).", PRIVACY, at_least=1,
        way_out="sample at least one user a round", by_task=True,
    )  # fmt: skip
    sampling: str = setting("How a cohort is drawn.", PRIVACY, default="poisson", choices=("poisson", "fixed"))
    relation: str | None = setting(
        "Which populations are neighbours (paper: to reproduce its table, not a guarantee).", PRIVACY, default=None,
        choices=("add-or-remove", "replace-one", "zero-out", "paper"),
        unset="add-or-remove for poisson, or zero-out where users are counted; replace-one for fixed",
    )  # fmt: skip
    count_stddev: float | None = setting(
        "Noise on the count of users within the clip, in users.", PRIVACY, default=None, at_least=0,
        way_out="cohort_size / 20 is the paper's choice",
        unset="cohort_size / 20, or more where that would cost over 1% of noise",
    )  # fmt: skip
    noise: str = setting(
        "independent in every round, or banded: cancels over rounds, for users drawn from groups in turn.", PRIVACY,
        default="independent", choices=("independent", "banded"),
    )  # fmt: skip
    bands: int | str = setting(
        "Rounds whose banded noise cancels; auto takes the number with the least noise on the model.", PRIVACY,
        default="auto", choices=("auto",), or_number=True, at_least=1, way_out="8 is usual; auto chooses by the plan",
    )  # fmt: skip
    max_epsilon: float | None = setting(
        "Stop before the round that would pass this epsilon.", PRIVACY, default=None, above=0,
        way_out="4.0 is a usual target", unset="that of --epsilon, or no limit",
    )  # fmt: skip
    noise_source: str = setting(
        "seed (replayable: whoever knows the seed can subtract the noise) or system (nobody can).", PRIVACY,
        default="seed", choices=("seed", "system"), unset="seed if a seed is given, else system",
    )  # fmt: skip

    test_users: int | None = setting(
        "Users to measure on, outside a generated population.", MEASURING, default=None, some_tasks=True, at_least=2,
        way_out="one to validate on and one to test on", unset="all of a store", by_task=True,
    )  # fmt: skip
    evaluate_on: str | None = setting(
        "validation or test (disjoint halves of the test users), or original (all of them).", MEASURING,
        default=None, some_tasks=True, choices=("validation", "test", "original"), by_task=True,
    )  # fmt: skip
    evaluate_every: int | None = setting(
        "Rounds between measurements.", MEASURING, default=None, at_least=1, way_out="1 is after every round",
        unset="10, or a hundredth of the rounds if that is more",
    )  # fmt: skip

    early_stopping: str | None = setting(
        "Stop when this metric has not got better in 5 measurements, and give the best model. All rounds are charged.",
        MEASURING, default=None, own_check=_check_text, way_out="give the name of a metric that is measured",
        metavar="METRIC",
    )  # fmt: skip

    device: str = setting(
        "Where users train.", COMPUTE, default="auto", own_check=_check_device, choices=("auto", "cpu", "cuda"),
        way_out="leave it out to take what is there",
    )  # fmt: skip
    engine: str = setting(
        "stacked trains many users at once.", COMPUTE, default="auto", choices=("auto", "one-by-one", "stacked")
    )
    precision: str = setting(
        "Arithmetic of local training; sums and noise are float64.", COMPUTE, default="float32",
        choices=("float32", "tf32", "bf16"),
    )  # fmt: skip
    workers: int | str | None = setting(
        "Processes that share the users among them; torchrun brings more machines.", COMPUTE, default=None,
        choices=("torchrun",), or_number=True, at_least=1, way_out="1 trains in this process alone",
        unset="one a core; 1 with a GPU",
    )  # fmt: skip
    compiled_steps: str = setting(
        "On a GPU: compile the step of many users; auto where a training is long enough to gain from it.", COMPUTE,
        default="auto", choices=("auto", "always", "never"),
    )  # fmt: skip

    seed: int = setting(
        "Repeats a run, for simulations. Whoever knows it can subtract the noise, and no privacy is left.", RUN,
        default=0, at_least=0, at_most=2**256 - 1,
        way_out="give a seed such as 0 or 2026", unset="drawn, for the initial model alone",
    )  # fmt: skip
    unprivate_timing: bool = setting(
        "Store how long each round took, which tells who took part.", RUN, default=False,
        way_out="false keeps times out of files",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name, declared in SETTINGS.items():
            declared.check(getattr(self, name))

    @property
    def measured_every(self) -> int:
        """`evaluate_every`, or what holds where it is left out: a long run is measured about a hundred times."""
        return self.evaluate_every if self.evaluate_every is not None else max(10, self.rounds // 100)


def _read_declarations() -> dict[str, Setting]:
    annotations = typing.get_type_hints(Settings)
    found = {}
    for field in dataclasses.fields(Settings):
        annotation = annotations[field.name]
        kinds = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        options = dict(field.metadata["declares"])
        limits = {name: options.pop(name) for name in ("above", "at_least", "below", "at_most") if name in options}
        kind = next(kind for kind in (bool, int, float, str) if kind in kinds)  # a number before the words beside it
        optional = types.NoneType in kinds
        found[field.name] = Setting(field.name, kind, optional, field.default, limits=limits, **options)
    return found


SETTINGS = _read_declarations()


def check(name: str, value: Any) -> Any:
    """`value` if the setting of this name allows it; otherwise a `SettingError`."""
    SETTINGS[name].check(value)
    return value


def declared(name: str, **changes: Any) -> Any:
    """A field of another dataclass that is a setting: with its default, or `default=` another, for `check_declared`.

    So `lr: float = declared("client_lr")` is the keyword argument of the setting `client_lr`.
    """
    default = changes.get("default", SETTINGS[name].default)
    metadata = {"setting": name}
    return dataclasses.field(default=default, metadata=metadata)


def check_declared(taker: Any) -> None:
    """Check every field of a dataclass that was made by `declared`."""
    for field in dataclasses.fields(taker):
        value = getattr(taker, field.name)
        if "setting" in field.metadata and not (value is None and field.default is None):  # left out
            check(field.metadata["setting"], value)


def keywords_for(taker: type, settings: Settings) -> dict[str, Any]:
    """The values of these settings that a dataclass takes, by the names of its keyword arguments."""
    return {
        field.name: getattr(settings, field.metadata["setting"])
        for field in dataclasses.fields(taker)
        if "setting" in field.metadata
    }


def toml_text(settings: Mapping[str, Any]) -> str:
    """Settings as TOML, mappings as tables; what is None is left out."""
    import tomli_w

    return tomli_w.dumps(_as_toml(settings))


def _as_toml(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _as_toml(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [_as_toml(entry) for entry in value]
    if isinstance(value, bool | int | float):
        return value
    return value.item() if hasattr(value, "item") else str(value)  # a number of NumPy has one
