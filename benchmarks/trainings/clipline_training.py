"""clipline's whole training: what `clipline train` does, without evaluation, run directory and report."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from marks import Marks, arguments


def main() -> None:
    """Train, and tell of every round."""
    wanted, marks = arguments(), Marks()
    # Imported only now: the time that imports take is part of a training, and so is what they print.
    from dataclasses import replace

    import torch
    from users import even_offsets

    import clipline
    from clipline.engine.choose import SMALL_MODEL

    class Mark(clipline.Callback):
        reads_guarantee = False

        def on_round(self, report: object, state: object) -> None:
            marks.round()
            if marks.rounds == wanted.stop_after:
                os._exit(0)

    task = clipline.task_named(wanted.task)
    changes = {
        **wanted.settings,
        "data": wanted.store,
        "rounds": wanted.rounds,
        "cohort_size": wanted.users,
        "device": wanted.device,
        **wanted.options,
    }
    settings = task.settings.overridden(changes, "the benchmark")
    loaded = task.load(settings)
    if wanted.even:
        people = loaded.population
        offsets = even_offsets(people.offsets, settings.max_examples)
        fields = {name: field[: offsets[-1]] for name, field in people.fields.items()}
        loaded = replace(loaded, population=clipline.Population(offsets, fields, people.user_ids))
    training = task.training(settings, loaded)
    if training.dim < SMALL_MODEL:
        torch.set_num_threads(1)
    marks.ready(f"clipline {clipline.__version__}, torch {torch.__version__}")
    result = training.run([Mark()])
    for parameter in result.model.parameters():
        parameter.detach().cpu()
    marks.result()


if __name__ == "__main__":
    main()
