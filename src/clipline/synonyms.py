"""What other libraries call our settings, and constructors that answer an unknown keyword with ours."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from .errors import SettingError, nearest, shown

Made = TypeVar("Made")
Answer = Callable[[str, object, list[str]], SettingError]  # to a keyword and its value, where these are known

# A word of Opacus, TensorFlow Privacy, Flower, scikit-learn or everyday use -> the setting.
SYNONYMS = {
    **dict.fromkeys(("eps", "target_epsilon", "privacy_budget", "budget"), "epsilon"),
    **dict.fromkeys(("target_delta",), "delta"),
    **dict.fromkeys(("noise_mult", "noise_scale", "noise_level", "sigma", "z"), "noise_multiplier"),
    **dict.fromkeys(("users", "n_users", "num_users", "clients", "n_clients", "num_clients", "n"), "population_size"),
    **dict.fromkeys(("users_per_round", "clients_per_round", "cohort", "n_sampled", "m"), "cohort_size"),
    **dict.fromkeys(("n_rounds", "num_rounds", "steps", "max_steps", "iterations"), "rounds"),
    **dict.fromkeys(("lr", "learning_rate", "local_lr", "eta"), "client_lr"),
    **dict.fromkeys(("server_learning_rate", "global_lr"), "server_lr"),
    **dict.fromkeys(("epochs", "n_epochs", "num_epochs", "local_epochs"), "client_epochs"),
    **dict.fromkeys(("bs", "local_batch_size", "train_batch_size"), "batch_size"),
    **dict.fromkeys(("momentum",), "server_momentum"),
    **dict.fromkeys(("weight_decay", "l2", "wd"), "client_weight_decay"),
    **dict.fromkeys(("optimizer", "optimiser", "client_optimizer"), "client_optimiser"),
    **dict.fromkeys(("server_optimizer", "server_optimiser"), "server"),
    **dict.fromkeys(
        ("clip_norm", "max_grad_norm", "max_norm", "clipping", "clipping_norm", "clipping_threshold", "l2_norm_clip"),
        "clip",
    ),
    **dict.fromkeys(("target_quantile", "gamma"), "quantile"),
    **dict.fromkeys(("initial_clip", "clip_init", "start_clip"), "clip_start"),
    **dict.fromkeys(("gpu", "use_gpu", "cuda"), "device"),
    **dict.fromkeys(("dtype",), "precision"),
    **dict.fromkeys(("n_jobs", "num_workers", "n_workers", "jobs", "threads"), "workers"),
    **dict.fromkeys(("random_state", "random_seed"), "seed"),
    **dict.fromkeys(("user", "user_id", "user_col", "users_column"), "user_column"),
    **dict.fromkeys(("eval_every", "evaluation_every"), "evaluate_every"),
}


def meant(name: str, known: Iterable[str]) -> str:
    """A way out for a name that is no setting: the one of `known` that it stands for, or the nearest by spelling."""
    names = list(known)
    setting = SYNONYMS.get(name)
    return f"did you mean {setting!r}?" if setting in names else nearest(name, names)


def refuses_unknown_keywords(made: type[Made], answer: Answer | None = None) -> type[Made]:
    """A class whose constructor answers an unknown keyword with the one that is meant. Goes above `@dataclass`.

    A field made by `declared` is found by the name of its setting too: `LocalSGD(client_lr=0.1)` means `lr`. The first
    check of all: a call may also leave out what is needed, and Python would report only that.
    """
    init: Any = made.__init__
    known = list(inspect.signature(made).parameters)
    fields: Any = getattr(made, "__dataclass_fields__", {})
    settings = {field.metadata.get("setting"): name for name, field in fields.items() if name in known}

    def refusal(name: str, value: object, known: list[str]) -> SettingError:
        setting = SYNONYMS.get(name, name)
        short = setting.removeprefix("client_").removeprefix("server_")
        ours = settings.get(setting) or (short if short in known else None)
        way_out = f"did you mean {ours!r}?" if ours else nearest(name, known)
        return SettingError(f"{name}={shown(value)} is no argument of {made.__name__}: {way_out}")

    @functools.wraps(init)
    def checked(self: Made, *args: Any, **keywords: Any) -> None:
        for name, value in keywords.items():
            if name not in known:
                raise (answer or refusal)(name, value, known)
        init(self, *args, **keywords)

    made.__init__ = checked  # type: ignore[method-assign, assignment]
    return made
