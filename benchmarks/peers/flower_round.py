"""Flower's rounds: FedAvgM under its server-side fixed clipping, in its simulation (Ray), one actor for each core."""

from __future__ import annotations

import importlib.metadata
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import protocol
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvgM
from flwr.simulation import run_simulation
from torch_models import MODELS, tensors_of
from workload import NOISE_MULTIPLIER, SERVER_MOMENTUM, WORKLOADS, dense_arrays, user_fields


def client(task: str, device: str, folder: str) -> ClientApp:
    """Trains one user on what the folder holds of him. Actors import nothing of this file: it travels pickled."""
    app = ClientApp()
    work = WORKLOADS[task]

    @app.train()
    def train(message: Message, context: Context) -> Message:
        user = int(context.node_config["partition-id"])
        x, y = tensors_of(np.load(f"{folder}/x{user}.npy"), np.load(f"{folder}/y{user}.npy"))
        x, y = x.to(device), y.to(device)
        network = MODELS[task]().to(device)
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        network.train()
        optimiser = torch.optim.SGD(network.parameters(), work.client_lr)
        for rows in torch.randperm(len(x), device=device).split(work.batch_size):
            optimiser.zero_grad()
            network.loss(x[rows], y[rows]).backward()
            optimiser.step()
        content = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
        return Message(content=RecordDict(content), reply_to=message)

    return app


def server(wanted: Any, clock: protocol.Clock) -> ServerApp:
    """All users in every round; measured between two calls of the server-side evaluation, which evaluates nothing."""
    app = ServerApp()
    work = WORKLOADS[wanted.task]

    def evaluate(number: int, arrays: ArrayRecord) -> None:
        if number > 0:
            clock.done()
        if not clock.go():
            clock.close()  # while the actors still live: their memory counts

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        averaging = FedAvgM(
            fraction_train=1.0,
            fraction_evaluate=0.0,
            min_train_nodes=wanted.users,
            min_evaluate_nodes=0,
            min_available_nodes=wanted.users,
            server_learning_rate=work.server_lr,
            server_momentum=SERVER_MOMENTUM,
        )
        strategy = DifferentialPrivacyServerSideFixedClipping(averaging, NOISE_MULTIPLIER, work.clip, wanted.users)
        first = ArrayRecord(MODELS[wanted.task]().state_dict())
        clock.ready(f"flwr {importlib.metadata.version('flwr')}, torch {torch.__version__}")
        strategy.start(grid, first, num_rounds=wanted.warmups + wanted.rounds, evaluate_fn=evaluate)

    return app


def main() -> None:
    """Serve rounds."""
    wanted = protocol.arguments()
    clock = protocol.Clock()
    share = 0.25 if wanted.device == "cuda" else 0.0  # of the GPU, for each client
    resources = {"num_cpus": 1, "num_gpus": share}
    with tempfile.TemporaryDirectory() as folder:
        for user in range(wanted.users):
            x, y = dense_arrays(wanted.task, user_fields(wanted.task, user))
            np.save(Path(folder) / f"x{user}.npy", x)
            np.save(Path(folder) / f"y{user}.npy", y)
        run_simulation(
            server_app=server(wanted, clock),
            client_app=client(wanted.task, wanted.device, folder),
            num_supernodes=wanted.users,
            backend_config={"client_resources": resources},
        )


if __name__ == "__main__":
    main()
