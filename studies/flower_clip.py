"""Where Flower's own adaptive clipping goes, beside clipline's, on the same nodes: docs/images/flower_clip.png.

    python studies/flower_clip.py        # two minutes; needs the extra `federation`

A node sends the same update in every round, and the median of the norms is 1. Both servers run in this process on
Flower's messages, with the same quantile, step, noise and starts. Flower's counts the updates that were clipped and
moves the clip as if it had counted those that were not (flwr/serverapp/strategy/dp_adaptive_clipping.py).
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping, FedAvg
from torch import Tensor, nn

import clipline as cl
from clipline.federation import AdaptiveClippingStrategy, InProcessGrid, clipped
from clipline.plotting import ACCENT, PALETTE, LineEnd, label_ends, new_figure, save_figure

NODES, DIM, ROUNDS, NOISE, STARTS = 60, 20, 100, 0.5, (0.1, 5.0)
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "flower_clip.png"


def updates() -> Tensor:
    """(nodes, dim): norms are log-normal with median 1."""
    rng = np.random.default_rng(0)
    norms = np.exp(0.5 * rng.standard_normal(NODES))
    directions = rng.standard_normal((NODES, DIM))
    lengths = norms / np.median(norms) / np.linalg.norm(directions, axis=1)
    return torch.from_numpy(directions * lengths[:, None]).float()


UPDATES = updates()


def nodes(mods: Sequence[Any] = ()) -> InProcessGrid:
    """Nodes that add their update to whatever parameters they get."""
    app = ClientApp()

    @app.train(mods=list(mods))
    def train(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"].to_torch_state_dict()
        moved = {"weight": arrays["weight"] + UPDATES[int(context.node_config["partition-id"])]}
        content = {"arrays": ArrayRecord(moved), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    return InProcessGrid(app, NODES)


def flowers(start: float) -> list[float]:
    """Clips of Flower's strategy."""
    inner = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=NODES, min_available_nodes=NODES)
    strategy = DifferentialPrivacyServerSideAdaptiveClipping(inner, NOISE, NODES, initial_clipping_norm=start)
    clips: list[float] = []
    np.random.seed(0)  # noqa: NPY002  # Flower draws its noise there
    strategy.start(
        nodes(), ArrayRecord({"weight": torch.zeros(DIM)}), num_rounds=ROUNDS,
        evaluate_fn=lambda *_: clips.append(strategy.clipping_norm),
    )  # fmt: skip
    return clips


class Vector(nn.Module):
    """The parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIM))


def ours(start: float) -> list[float]:
    """Clips of clipline's strategy."""
    training = cl.Training(
        Vector(), lambda model, batch: batch["x"] @ model.weight, cl.Population.from_arrays(range(NODES), x=UPDATES),
        rounds=ROUNDS, cohort_size=NODES, local=cl.LocalSGD(lr=1.0), clip=cl.QuantileClip(0.5, start=start),
        privacy=cl.Privacy(noise_multiplier=NOISE, population_size=NODES),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        result = AdaptiveClippingStrategy(training, least_replies=NODES).run(nodes([clipped()]), Path(folder) / "run")
    return [*(report.clip for report in result.reports), result.state.clip.clip]


def main() -> None:
    """Run all four, print where they end and draw them."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    figure, (axis,) = new_figure(1, 1, width=7, height=3.6)
    axis.axhline(1, color="0.6", linestyle="--", linewidth=1)
    ends = [LineEnd(ROUNDS, 1.0, "clipline; dashed: the median", PALETTE[0])]
    for name, run, colour in ((f"Flower {version('flwr')}", flowers, ACCENT), ("clipline", ours, PALETTE[0])):
        for start in STARTS:
            clips = run(start)
            print(f"{name}, from {start:g}: after {ROUNDS} rounds {clips[-1]:.2g}")
            axis.plot(clips, color=colour)
            if run is flowers:
                ends.append(LineEnd(ROUNDS, clips[-1], f"{name}, from {start:g}", colour))
    axis.set(yscale="log", xlabel="round", ylabel="clip", xlim=(0, ROUNDS))
    label_ends(axis, ends)
    save_figure(figure, PICTURE)


if __name__ == "__main__":
    main()
