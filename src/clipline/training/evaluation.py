"""Metrics on users outside the training, measured while the next rounds train, and what goes by them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ..data.population import Population, share_users
from ..engine.core.batches import Examples
from ..engine.isolation.generators import preserve_generators, preserve_torch_generators
from ..errors import CliplineError, SettingError, check_choice, check_number, check_whole, failed, nearest, refuse
from ..federated.local_sgd import Batch
from ..federated.round import TrainState
from ..metric_direction import lower_is_better
from ..settings import SETTINGS
from .callbacks import Callback, Measuring
from .diagnosis import LAST, RELEASED, WITHOUT_MODEL, Known, main_metric
from .result import Metrics, RoundReport

if TYPE_CHECKING:
    from .training import Training

EvaluateModel = Callable[[nn.Module], Mapping[str, float]]  # the metrics of a model, on data of its own
Metric = Callable[[nn.Module, Batch], Tensor | Mapping[str, Tensor]]  # (examples,) numbers, or several by name

_TRIED = 8  # examples on which a metric is tried before training
_one_on_a_gpu = threading.Lock()  # runs side by side measure by turns: a batch fills the GPU, and takes its memory
_here = threading.local()  # `measuring`: whether this thread holds that lock


@dataclass(frozen=True, eq=False)
class Kept:
    """A copy of released parameters, with their metrics and after how many rounds they were released."""

    params: Tensor
    metrics: Metrics
    rounds: int


def check_measured(metric: str, asked: str, measuring: Sequence[Callback]) -> None:
    """Refuse a metric that nothing measures, where all names are known; `asked` is the setting that names it."""
    names = [getattr(one, "names", None) for one in measuring]
    known = [name for some in names if some is not None for name in some]
    if None in names or metric in known:
        return
    limit, way_out = "nothing is", "add Evaluate(test, metric) to the callbacks"
    if known:
        limit, way_out = f"those are {', '.join(known)}", nearest(metric, known)
    raise SettingError(f"{asked} must be one that is measured, and {limit}: {way_out}")


class Best:
    """Compares measurements one after the other; `kept` has the best one's parameters if `keeps`."""

    def __init__(self, metric: str, mode: Literal["min", "max"], *, min_delta: float = 0.0, keeps: bool = True) -> None:
        self.metric, self.mode, self.min_delta, self.keeps = metric, mode, min_delta, keeps
        self.value: float | None = None
        self.round_index: int | None = None  # as reports count them, from 0
        self.kept: Kept | None = None

    def take(self, report: RoundReport, state: TrainState) -> bool:
        """Whether this measurement is better than the best so far by more than `min_delta`; NaN never is."""
        value, sign = report.metrics[self.metric], 1 if self.mode == "max" else -1
        gain = 0.0 if self.value is None else (value - self.value) * sign
        if not ((self.value is None and value == value) or gain > self.min_delta):
            return False
        self.value, self.round_index = value, report.round_index
        if self.keeps:  # a few vectors of this length are there anyway
            self.kept = Kept(state.returned.clone(), report.metrics, state.round_index)
        return True


class Evaluate(Measuring):
    """Measures the model after every `every` rounds and after the last one; the reports have the metrics.

    The model is a copy in eval mode, on the training's device and without gradients. It computes in float32, with
    products rounded to tf32 on a GPU unless the training's precision is float32. One thread measures while the next
    rounds train. Do not write to frozen parameters: they are shared with the training. If the training averages
    released models, the average is what is measured. The last model is measured too, under names such as
    `last/accuracy`.

    Metrics have no noise, and the guarantee does not cover the test users. A population that shares user ids with the
    training is refused; `Population.split` makes two that share none. An object serves one run at a time.

    Args:
      test: A population of users who do not take part in the training, or a function that takes the model and returns
        named numbers.
      metric: `metric(model, batch)` gives one number for each example as a tensor (examples,), or a mapping from names
        to such tensors. Each is averaged over all examples, so that a user weighs by the number of examples. A single
        tensor is named after the function. Leave it out if `test` is a function.
      every: Rounds between two measurements.
      batch_size: Examples of a batch. Batches are as the loss gets them, users end to end.
      keep_best: The result has the best measured model instead of the last: the best by the metric of this name. True
        takes the run directory's metric, or the first that is not a loss. Every model is released, so this costs no
        privacy.
      by: "user" averages over the examples of each user first. `user_accuracy` is then the mean over users, and
        `worst_tenth_accuracy` over the tenth of them for whom the metric is worst, at least one. Users without examples
        do not count.

    Raises:
      SettingError: If the users overlap, or the metric does not give a number for each example. A few examples are
        tried before the first round.

    Example:
      >>> accuracy = lambda model, batch: (model(batch["x"]).argmax(1) == batch["y"]).float()
      >>> training.run([cl.Evaluate(test, accuracy, every=10)])
    """

    def __init__(
        self,
        test: Population | EvaluateModel,
        metric: Metric | None = None,
        *,
        every: int = 10,
        batch_size: int = 256,
        keep_best: bool | str = False,
        by: Literal["example", "user"] = "example",
    ) -> None:
        if not isinstance(keep_best, bool | str):
            raise refuse("keep_best", keep_best, "True, False or the name of a metric", "give keep_best=True")
        self.keep_best = keep_best
        self.by_user = check_choice("by", by, ("example", "user")) == "user"
        if self.by_user and not isinstance(test, Population):
            raise refuse("by", by, '"example" where test is a function of the model', "average in that function")
        if isinstance(test, Population):
            if metric is None:
                way_out = "give a function of model and batch, such as the loss"
                raise refuse("metric", metric, "given where test is a population", way_out)
            if test.examples == 0:
                raise SettingError("test has 0 examples but needs at least 1 to measure on: give users with data")
        elif metric is not None:
            raise refuse("metric", metric, "left out where test is a function of the model", "drop one of them")
        elif not callable(test):
            raise refuse("test", test, "a Population or a function of the model", "give users outside the training")
        self.test, self.metric = test, metric
        self.every = check_whole("every", every, at_least=1, way_out=SETTINGS["evaluate_every"].way_out)
        self.batch_size = check_whole("batch_size", batch_size, at_least=1, way_out="256 is a usual choice")
        self._thread: ThreadPoolExecutor | None = None
        self._best: Best | None = None
        self.names: Sequence[str] | None = None  # of its metrics, once they are known

    @property
    def kept(self) -> Kept | None:
        """What the result is made of, where that is not the last round."""
        return None if self._best is None else self._best.kept

    def on_start(self, training: Training, state: TrainState) -> None:
        """Make the model to measure with, and the thread."""
        if self._thread is not None:
            raise SettingError("Evaluate is at work in another run but serves one at a time: make one for each run")
        test = getattr(self.test, "population", self.test)  # `Perplexity` has one
        if test is training.population:
            raise SettingError(
                "test is the population that trains but must hold other users, as metrics have no noise and would tell "
                "of the users whom the guarantee covers: set users aside before training and give those"
            )
        if isinstance(test, Population) and share_users(test, training.population):
            raise SettingError(
                "test holds users who train: some user ids are in both populations. Metrics have no noise, so they "
                "would tell of users whom the guarantee covers. Split by user first: train, test = population.split()"
            )
        self._best, self.names = None, None
        device = training.device
        self._model = training.problem.model.evaluated(state.params).eval()
        self._trainable = training.problem.model.released_parameters(self._model)  # personal ones are as at first
        if isinstance(self.test, Population):
            assert self.metric is not None
            examples = Examples(self.test, device, state.params.dtype)
            few = min(_TRIED, self.batch_size, self.test.examples)
            with torch.no_grad(), preserve_generators(), preserve_torch_generators(device):  # an error costs no privacy
                names = averages(self.metric, examples, few, self._model, until=few)
                self.names = [one for name in names for one in (_by_user(name) if self.by_user else [name])]
            self._evaluate: EvaluateModel = partial(
                averages, self.metric, examples, self.batch_size, by_user=self.by_user
            )
        else:
            self._evaluate = self.test
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # A test function may train a model itself, and waits for what that training measures.
        by_turns = self._stream is not None and not getattr(_here, "measuring", False)
        self._turn: AbstractContextManager[object] = _one_on_a_gpu if by_turns else nullcontext()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="clipline-evaluation")

    def measure(self, state: TrainState, *, last: bool) -> Future[Metrics] | None:
        """Metrics of this state, begun in the background; None if this round is not measured."""
        if not last and state.round_index % self.every:
            return None
        assert self._thread is not None, "on_start comes first"
        ready = torch.cuda.current_stream(self._device).record_event() if self._stream is not None else None
        return self._thread.submit(self._measure, state, ready)

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """Keep the model if it is the best so far and that was asked for."""
        own = {name: value for name, value in report.metrics.items() if name in (self.names or ())}
        if not self.keep_best or not report.metrics:
            return
        asked = self.keep_best if isinstance(self.keep_best, str) else main_metric([own], self._known)
        if self._best is None and asked is not None:
            self._best = Best(asked, "min" if lower_is_better(asked, self._known.facts) else "max")
        if self._best is not None and self._best.metric in report.metrics:
            self._best.take(report, state)
        elif isinstance(self.keep_best, str):  # another `Evaluate` measures it, perhaps, and more rarely
            check_measured(self.keep_best, f"keep_best={self.keep_best!r}", self._measuring)

    def check_metrics(self, measuring: Sequence[Measuring], known: Known) -> None:
        """Refuse a `keep_best` of which it is known before the first round that nothing measures it."""
        self._measuring, self._known = measuring, known
        if isinstance(self.keep_best, str):
            check_measured(self.keep_best, f"keep_best={self.keep_best!r}", measuring)

    def close(self) -> None:
        """End the thread. What it has not begun to measure is dropped."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None

    def _measure(self, state: TrainState, ready: torch.cuda.Event | None) -> Metrics:
        with self._turn, torch.no_grad(), torch.cuda.stream(self._stream):  # without a stream, the latter does nothing
            _here.measuring = True
            if self._stream is not None and ready is not None:
                self._stream.wait_event(ready)
            metrics = self._metrics_of(state.returned)
            last = {} if state.returned is state.params else self._metrics_of(state.params)
            if self._stream is not None:
                self._stream.synchronize()
        _check_names(metrics)
        self.names = list(metrics)
        of_last = {LAST + name: value for name, value in last.items() if not name.startswith(WITHOUT_MODEL)}
        return {**metrics, **of_last}

    def _metrics_of(self, params: Tensor) -> Metrics:
        pieces = torch.split(params.clone(), [param.numel() for param in self._trainable])  # a metric may write
        for param, piece in zip(self._trainable, pieces, strict=True):
            param.data = piece.view_as(param)
        return _named_numbers(self._evaluate, self._model)


@contextmanager
def _explained(what: str, fields: Iterable[str], way_out: str) -> Iterator[None]:
    """Within, an error of the caller's own function says whose it is."""
    try:
        yield
    except CliplineError:
        raise
    except Exception as error:
        raise failed(what, error, fields, way_out) from error


def _named_numbers(evaluate: EvaluateModel, model: nn.Module) -> Metrics:
    """What a function of the model measures."""
    with _explained(f"test function {_name(evaluate)!r}", (), "mend it, or try it on the model"):
        found = evaluate(model)
    try:
        return {name: float(value) for name, value in found.items()}
    except (AttributeError, TypeError, ValueError):
        raise refuse(
            "result of the test function", type(found).__name__, "a mapping from names to numbers",
            'return {"accuracy": 0.9}, say',
        ) from None  # fmt: skip


@torch.no_grad()
def averages(
    metric: Metric, examples: Examples, batch_size: int, model: nn.Module, until: int | None = None,
    *, by_user: bool = False,
) -> Metrics:  # fmt: skip
    """Each metric's mean over all examples, or those before `until`, summed in float64 where the model is.

    With `by_user` it is the mean over users of their own means, and the same over the worst tenth of users.
    """
    total = examples.population.examples if until is None else until
    parts: dict[str, list[Tensor]] = {}  # sums of batches, or all values
    for start in range(0, total, batch_size):
        stop = min(start + batch_size, total)
        batch = examples.between(start, stop)
        with _explained(f"metric {_name(metric)!r}", batch, "mend it, or measure other users"):
            values = metric(model, batch)
        named = values if isinstance(values, Mapping) else {_name(metric): values}
        _check_names(named)
        if parts and named.keys() != parts.keys():
            limit = f"the same in every batch, and the first had {sorted(parts)}"
            raise refuse("metric names", sorted(named), limit, "return every name for every batch")
        for name, value in named.items():
            if not isinstance(value, Tensor) or value.shape != (stop - start,):
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise SettingError(
                    f"metric {name!r} returned {got} but must return a tensor of shape ({stop - start},), one number "
                    "for each example: do not average in the metric"
                )
        for name, value in named.items():  # all are checked: a batch's names are there together
            parts.setdefault(name, []).append(value.double() if by_user else value.double().sum())
    if not by_user:
        return {name: float(sum(part)) / total for name, part in parts.items()}
    sizes = np.diff(examples.population.offsets)
    found: dict[str, float] = {}
    for name, part in parts.items():
        values = torch.cat(part)
        lengths = torch.as_tensor(sizes[sizes > 0], device=values.device)
        means = torch.segment_reduce(values, "mean", lengths=lengths)
        worst = means.sort(descending=lower_is_better(name)).values[: max(1, len(means) // 10)]
        found |= dict(zip(_by_user(name), (float(means.mean()), float(worst.mean())), strict=True))
    return found


def _by_user(name: str) -> tuple[str, str]:
    return f"user_{name}", f"worst_tenth_{name}"


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name in RELEASED:
            raise refuse("metric", name, f"named other than {', '.join(RELEASED)}", "give it another name")


def _name(metric: Metric | EvaluateModel) -> str:
    """That of the function, if it has one."""
    name = getattr(metric, "__name__", "<partial>")
    return "metric" if name.startswith("<") else name


class EarlyStopping(Callback):
    """Stops the run when a metric has not improved in `patience` measurements in a row.

    THE GUARANTEE IS THAT OF ALL ROUNDS PLANNED. What the rounds released decides when to stop. The epsilon of the
    rounds that were run would hold only if their number had been fixed beforehand. To spend less, plan fewer rounds.

    Training waits for each measurement, so that the same run always stops after the same round. The result has `stopped
    == "early"`: the run is over and its directory is not resumed. If a run is interrupted and resumed, the count of
    measurements and the search for the best begin again.

    Args:
      metric: Name of a metric that an `Evaluate` of the same run measures, on users outside the training.
      mode: Whether it is better lower ("min") or higher ("max"). Left out, it is "min" for a loss, an error or a
        perplexity by the metric's name, and "max" otherwise.
      patience: How many measurements in a row may bring no improvement.
      min_delta: By how much a value must be better to count. NaN never is.
      restore_best: Give the best model that was measured instead of the last. It was released like any other, so this
        costs no privacy.

    Raises:
      SettingError: If a value is not allowed, or nothing measures `metric`.

    Example:
      >>> training.run([cl.Evaluate(test, accuracy), cl.EarlyStopping("accuracy", restore_best=True)])
    """

    reads_guarantee = False
    waits_for_metrics = True
    stop_reason = "early"

    def __init__(
        self,
        metric: str,
        *,
        mode: Literal["min", "max"] | None = None,
        patience: int = 5,
        min_delta: float = 0.0,
        restore_best: bool = False,
    ) -> None:
        by_name: Literal["min", "max"] = "min" if lower_is_better(metric) else "max"
        self.metric, self.mode = metric, by_name if mode is None else mode
        check_choice("mode", self.mode, ("min", "max"))
        self.patience = check_whole("patience", patience, at_least=1, way_out="count measurements, not rounds")
        self.min_delta = check_number("min_delta", min_delta, at_least=0, way_out="0 takes any improvement")
        if not isinstance(restore_best, bool):
            raise refuse("restore_best", restore_best, "True or False", "True gives the best model")
        self.restore_best = restore_best
        self._begin()

    def _begin(self) -> None:
        self.stop_requested, self._since = False, 0
        self._best = Best(self.metric, self.mode, min_delta=self.min_delta, keeps=self.restore_best)

    @property
    def best(self) -> float | None:
        """The best value so far."""
        return self._best.value

    @property
    def best_round(self) -> int | None:
        """The round that had it, as reports count them, from 0."""
        return self._best.round_index

    @property
    def kept(self) -> Kept | None:
        """What the result is made of, where that is not the last round."""
        return self._best.kept

    def on_start(self, training: Training, state: TrainState) -> None:
        """Begin to count, and charge every round that may come."""
        self._begin()
        self.charged = state.ledger.add(training.algorithm.next_event(state), training.affordable(state))

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """Compare with the best so far, if the round was measured."""
        if not report.metrics:
            return
        if self.metric not in report.metrics:  # measured by another `Evaluate`, perhaps, and more rarely
            self.check_metrics(self._measuring)
            return
        self._since = 0 if self._best.take(report, state) else self._since + 1
        self.stop_requested = self._since >= self.patience

    def check_metrics(self, measuring: Sequence[Measuring], known: Known | None = None) -> None:
        """Refuse a metric of which it is known before the first round that nothing measures it."""
        self._measuring = measuring
        check_measured(self.metric, f"metric={self.metric!r} of EarlyStopping", measuring)
