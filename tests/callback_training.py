"""A `Training` that takes callbacks, in the plainest way: one round after the other."""

import time
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial

import torch

from clipline.privacy.accountant import account
from clipline.training import training as today
from clipline.training.options import Compute
from clipline.training.reports import ReportQueue, RoundReport
from clipline.training.run_directory import directory_first


class Training:
    """What callbacks may use of a training."""

    def __init__(
        self, model, loss, population, *, rounds, cohort_size, local, clip=None, server=None, privacy,
        compute=None, seed=0, on_error="zero", trial_batch=None,
    ):  # fmt: skip
        compute = Compute() if compute is None else compute
        self._inner = today.Training(
            model, loss, population, rounds=rounds, cohort_size=cohort_size, local=local, seed=seed, clip=clip,
            server=server, on_error=on_error, trial_batch=trial_batch, **vars(privacy), **vars(compute),
        )  # fmt: skip
        self.rounds, self.cohort_size, self.population, self.seed = rounds, cohort_size, population, seed
        self.privacy, self.compute, self.local = privacy, compute, local
        self.algorithm, self.plain = self._inner.algorithm, self._inner.plain
        for name in ("relation", "delta", "noise_multiplier", "max_epsilon", "planned", "declared"):
            setattr(self, name, getattr(self._inner, name))

    @property
    def dim(self):
        return self.algorithm.clients.flat.dim

    @property
    def device(self):
        return self.algorithm.clients.flat.vector.device

    def guarantee_of(self, ledger):
        return account(ledger, delta=self.delta, relation=self.relation)

    def init(self):
        return self.algorithm.init()

    def model_at(self, state):
        return self.algorithm.clients.flat.export(state.params)

    def run(self, callbacks=(), *, state=None):
        state = self.init() if state is None else state
        callbacks = sorted(callbacks, key=lambda callback: not hasattr(callback, "charged"))
        stopped, measured = "finished", {}
        with ExitStack() as end, self.algorithm.workforce.at_work():
            end.callback(self.algorithm.ahead.forget)
            for callback in callbacks:
                callback.on_start(self, state)
                end.callback(callback.close)

            def observe(report, state):
                for callback in callbacks:
                    callback.on_round(report, state)

            queue = ReportQueue(observe, limit=20)
            while state.round_index < self.rounds:
                if any(getattr(callback, "stop_requested", False) for callback in callbacks):
                    stopped = "interrupted"
                    break
                begun, clip = time.perf_counter(), state.clip.clip
                state, release = self.algorithm.round(state, last=state.round_index + 1 >= self.rounds)
                report = RoundReport(
                    state.round_index - 1, clip, release.fraction_within, {}, time.perf_counter() - begun,
                    partial(self.guarantee_of, state.ledger),
                )  # fmt: skip
                last = state.round_index == self.rounds
                metrics = self._measure(callbacks, state, last)
                queue.hand_in(report, state, metrics)
            queue.finish()
            measured = queue.reports[-1].metrics if queue.reports else {}
            if not measured and (metrics := self._measure(callbacks, state, True)) is not None:
                measured = metrics.result()
            ledgers = [state.ledger, *(callback.charged for callback in callbacks if hasattr(callback, "charged"))]
            charged = max(ledgers, key=lambda ledger: ledger.rounds)
            result = today.TrainResult(
                self.model_at(state), state, self.guarantee_of(charged), measured, tuple(queue.reports), stopped
            )
            for callback in callbacks:
                callback.on_end(result)
        return result

    def resume(self, path, callbacks=()):
        directory, callbacks = directory_first(path, callbacks)
        with closing(directory):
            return self.run(callbacks, state=directory.reopen(self))

    @staticmethod
    def _measure(callbacks, state, last):
        asked = [callback.measure(state, last=last) for callback in callbacks if hasattr(callback, "measure")]
        return next((future for future in asked if future is not None), None)

    def with_engine(self, clients):
        """The same, trained by another engine."""
        self.algorithm = replace(self.algorithm, clients=clients)
        return self


def linear(features=6, classes=3):
    """A linear classifier in float32 that starts at zero."""
    model = torch.nn.Linear(features, classes, bias=False)
    torch.nn.init.zeros_(model.weight)
    return model
