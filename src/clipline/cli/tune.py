"""`clipline tune`: the paper's recipe for practice, from rates to a file to train with."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import say, tell
from ..errors import SettingError, check_choice, refuse
from ..settings import STAND_IN
from .parser import PATH, Argument, Command, Option, flags_for

if TYPE_CHECKING:
    from ..study.tune.question import Question

_TRIAL = "The trial"
_TARGET = "The promise"
_SEARCH = "The search"
_RUN = "The run"
_FLAGS = ("rounds", "client_lr", "server_lr", "batch_size", "user_column", "seed")
_COMPUTING = ("device", "engine", "precision", "workers", "compiled_steps")
# What a file of settings says of a final training, which is found here or given anew.
_NOT_OF_TRIAL = (
    "epsilon", "noise_multiplier", "max_epsilon", "delta", "count_stddev", "population_size", "cohort_size", "relation",
    "test_users", "data", "seed", "clip", "noise_source", "noise", "bands",
)  # fmt: skip


def tune(task: str, out: Path | None, cluster: str | None, as_json: bool, **flags: Any) -> None:
    """Find rates, noise and cohort for a private training, and write the file to train with.

    The three steps of the paper's last section, on data that are not private: (1) client and server rates with little
    noise, (2) as much noise as the model bears, (3) cohort and noise scaled together until the promise is met. Stop it
    at any time and give the same command again: no finished run is repeated.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    question = asked(task, given)
    from ..study.tune.answer import check_out, check_task

    path = Path("tune") / question.task.name if out is None else out
    check_out(path)
    check_task(path, question)
    answer = _answered(question, path, cluster)
    _finish(answer, path, as_json)


def asked(task: str, given: dict[str, Any]) -> Question:
    """The question that the command line asks, checked before any work: nothing is loaded yet."""
    from ..study.tune.question import COHORT, DEGRADATION, LEAST, MOST_RUNS, Question, target_for
    from ..tasks.train_settings import check_given, read_toml

    file: dict[str, Any] = {}
    if task.endswith(".toml"):
        file = read_toml(Path(task))
        check_given(file, f"config {task!r}")
        if "task" not in file:
            raise SettingError(f'config {task!r} has no task: write task = "handwriting", say')
        task = file.pop("task")
    pick: dict[str, Any] = {name: file[name] for name in ("epsilon", "delta", "relation") if name in file}
    pick |= given
    cohort_size = pick.pop("cohort_size", COHORT)
    data = given.get("data", file.get("data"))
    _check_uncharged(data)
    private_search = given.get("private_search", False)
    proxy = given.get("proxy")
    if private_search and proxy is not None:
        raise refuse("proxy", proxy, "left out with --private-search, which searches on the private data", "drop one")
    flags = {name: given[name] for name in (*_FLAGS, *_COMPUTING) if name in given}
    settings = {
        **{name: value for name, value in file.items() if name not in _NOT_OF_TRIAL},
        **flags,
        "cohort_size": cohort_size,
        "noise_multiplier": LEAST,
        "clip": "quantile",
        "noise": "independent",
    }
    settings.setdefault("seed", 0)  # trials are not private: the same ones on every machine that joins
    if file.get("clip", "quantile") != "quantile":
        raise refuse("clip", file["clip"], "'quantile' to tune, which leaves no clip to search", "drop it")
    users = given.get("users", file.get("population_size"))
    chosen, trial, private = _resolved(task, settings, proxy, data, private_search, users, given.get("proxy_users"))
    trial = replace(
        trial, server=trial.server or "sgd"
    )  # whose rate is searched, also where a training would need none
    # Of a private search the runs themselves are final. Adam and Yogi read how long single releases are.
    independent = given.get("independent_noise") or file.get("noise") == "independent" or private_search
    banded = not independent and trial.server not in ("adam", "yogi")
    target = target_for(
        pick.get("epsilon"), pick.get("delta"), users, trial.rounds, cohort_size, pick.get("relation"), banded=banded
    )
    better = given.get("better")
    if better is not None:
        check_choice("better", better, ("lower", "higher"))
    return Question(
        task=chosen,
        trial=trial,
        target=target,
        private_data=private,
        degradation=_share(given.get("degradation", DEGRADATION)),
        search=given.get("search", "grid"),
        runs=given.get("runs", MOST_RUNS),
        reach=given.get("reach", 1),
        sampler=given.get("sampler", "tpe"),
        pruner=given.get("pruner", "median"),
        private_search=private_search,
        noise_multiplier=given.get("noise", LEAST),
        metric=given.get("metric"),
        lower_is_better=None if better is None else better == "lower",
    )


def _check_uncharged(data: object) -> None:
    """Refuse private data that were made by private statistics: what is computed here would leave out their cost."""
    from ..data.manifest import MANIFEST, read_entries

    path = Path(str(data))
    for folder in (path, path / "train"):
        if data is not None and (folder / MANIFEST).is_file() and read_entries(folder).get("charges"):
            raise refuse(
                "data", str(data), "made without private statistics, which tune does not count",
                "tune for the data as they were before, with an epsilon less what the statistics took",
            )  # fmt: skip


def _resolved(
    task: str,
    settings: dict[str, Any],
    proxy: str | None,
    data: str | None,
    private_search: bool,
    users: int | None,
    proxy_users: int | None,
) -> tuple[Any, Any, str | None]:
    """The task, the settings of its trial, and where the private data lie, if that is known."""
    from ..data.chunks import check_exists
    from ..data.task_stores import find_store
    from ..study.tune.question import GENERATED
    from ..tasks import is_task_file, task_named
    from .train import resolve

    if is_task_file(task):
        where = data if private_search else proxy
        if where is None:
            raise SettingError(
                f"--{'data' if private_search else 'proxy'} is missing: {task!r} generates no users",
                "give --data DATA" if private_search
                else "give --proxy DATA, non-private data of the same kind; or --private-search to charge the search",
            )  # fmt: skip
        check_exists("data" if private_search else "proxy", Path(where))
        chosen, trial = resolve(task, None, {**settings, "data": where})
        return chosen, trial, data
    known = task_named(task)
    embedded = known.settings.data is None
    for name, value in (("proxy", proxy), ("data", data)):
        if embedded and value is not None:
            raise refuse(name, value, f"left out, as task {task!r} generates its users", "drop it")
    if data == STAND_IN:
        data = None
    elif data is None and not embedded and (found := find_store(task)) is not None and str(found) != proxy:
        data = str(found)
    where = (data if private_search else proxy) or STAND_IN
    if where == STAND_IN:
        default = known.settings.drawn_users()
        generated = min(GENERATED, default) if proxy_users is None else proxy_users
        drawn = users if private_search else generated
        settings |= {"population_size": drawn}
    elif proxy_users is not None:
        raise refuse("proxy_users", proxy_users, "left out where the search has stored data", "drop it")
    if not embedded:
        settings |= {"data": where}
    chosen, trial = resolve(task, None, settings)
    return chosen, trial, data


def _answered(question: Question, path: Path, cluster: str | None) -> Any:
    """Run the steps."""
    from ..study.directory import StudyDirectory
    from ..study.study import Study, StudyProgress
    from ..study.tune.answer import data_words, task_facts
    from ..study.tune.private_search import FOLDER, candidates_of, price_search, tune_privately
    from ..study.tune.recipe import STAGES
    from ..study.tune.recipe import tune as run_recipe

    logging.getLogger("optuna").setLevel(logging.WARNING)  # it has a line for every trial, and so have we
    tell(f"trial on {data_words(question)}; kept in {path}")
    folder = path / FOLDER if question.private_search else path
    if question.private_search:
        price = price_search(question.target, question.noise_multiplier, len(candidates_of(question)))
    directory = StudyDirectory(folder)
    study = Study(
        directory, question.task, cluster=cluster, progress=StudyProgress("", () if question.private_search else STAGES)
    )
    try:
        directory.note_experiment("tune", task_facts(folder, question))
        if question.private_search:
            return tune_privately(question, price, study, tell)
        return run_recipe(question, study, tell)
    except KeyboardInterrupt:
        kept = len(directory.ids())
        tell(f"interrupted with {kept} finished runs in {folder}: give the same command again, and none is repeated")
        raise
    finally:
        study.close()


def _finish(answer: Any, path: Path, as_json: bool) -> None:
    """Write the files and print the summary; a target that cannot be met ends in its refusal."""
    from ..study.tune import answer as files

    settings, named = files.final_of(answer), files.Files.of(answer.question, path)
    if settings is None:
        named.final.unlink(missing_ok=True)  # it does not meet what is asked
    else:
        words = f"Written by clipline tune; what it found is in {named.page.name}."
        words += f"\nPrivacy: {files.privacy_words(answer)}"
        secret = answer.question.private_search
        if secret:
            words += "\nThe seed below is that of the chosen run and draws its noise: keep this file secret."
        files.write_final(named.final, settings, words=words, epsilon=answer.question.target.epsilon, secret=secret)
    content = files.facts(answer, path)
    files.write_file(named.facts, content)
    files.write_file(named.page, files.page(answer, named))
    if as_json:
        print(json.dumps(content))
    else:
        say(files.summary(answer, named))
    if settings is None:
        raise answer.refusal


def _share(value: object) -> float:
    """5% and 0.05 are the same."""
    text = str(value).strip()
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        raise refuse("degradation", value, "a share such as 5% or 0.05", "5% is the paper's") from None


_target, _trial, _search, _run = (partial(Option, group=group) for group in (_TARGET, _TRIAL, _SEARCH, _RUN))
command = Command(
    "tune",
    tune,
    [
        Argument(["task"], help="A task by name, a TOML file of settings, or a Python file of your own (see train)."),
        *flags_for(("epsilon", "delta"), group=_TARGET),
        _target(
            ["--population-size", "--users", "users"], type=int, metavar="N",
            help="How many private users there are, known beforehand.",
        ),
        _target(
            ["--relation"], metavar="add-or-remove|replace-one|zero-out", unset="add-or-remove",
            help="Which populations are neighbours.",
        ),
        _target(["--data"], metavar="DATA", help="Private data, for final.toml; the search does not use them."),
        _trial(
            ["--proxy"], metavar="DATA", unset="the task's generated users",
            help="Non-private data to search on: a folder or a table, as --data of train.",
        ),
        _trial(["--proxy-users"], type=int, metavar="N", unset="4000, or the task's", help="How many to generate."),
        _trial(["--cohort-size"], type=int, metavar="N", unset="100", help="Users a round, m."),
        _trial(["--degradation"], metavar="SHARE", unset="5%", help="How much of the metric more noise may cost."),
        _trial(["--metric"], metavar="NAME", unset="the task's", help="What to compare by."),
        _trial(
            ["--better"], metavar="lower|higher", unset="by its name: lower for a loss, an error, a perplexity",
            help="Which way the metric is better.",
        ),
        *flags_for(_FLAGS[:-1], group=_TRIAL),
        _search(
            ["--search"], metavar="grid|optuna", unset="grid",
            help="How to look for rates; optuna needs the extra 'search'.",
        ),
        _search(["--runs"], type=int, metavar="N", unset="25", help="Runs of step 1 at most."),
        _search(["--reach"], type=int, metavar="N", unset="1", help="Half decades to each side of the first grid."),
        _search(["--sampler"], metavar="NAME", unset="tpe", help="Of optuna: tpe, random, qmc, gp."),
        _search(["--pruner"], metavar="NAME", unset="median", help="Of optuna: median, halving, none."),
        _search(
            ["--private-search"], is_flag=True, default=None,
            help="Search on the private data; the price is charged and shown.",
        ),
        _search(
            ["--noise-multiplier", "--noise", "noise"], type=float, metavar="X", unset="0.01",
            help="Noise z of step 1, at the trial's cohort.",
        ),
        _search(
            ["--independent-noise"], is_flag=True, default=None,
            help="Independent noise in the final training, not banded (docs/howto/noise.md).",
        ),
        _run(
            ["--out"], type=PATH, unset="tune/TASK",
            help="Where runs and results go; one that is there is continued.",
        ),
        _run(["--seed"], type=int, metavar="N", unset="0", help="Seed of the trial; the final training draws its own."),
        _run(["--cluster"], metavar="auto|ADDRESS", help="Make the runs on a Ray cluster; needs the extra 'cluster'."),
        *flags_for(_COMPUTING, group=_RUN),
        _run(["--json", "as_json"], is_flag=True, help="End with one JSON object on standard output."),
    ],
    groups=(_TARGET, _TRIAL, _SEARCH, _RUN),
)  # fmt: skip
