"""FedJAX's rounds: federated averaging. FedJAX has no differential privacy, so these neither clip nor add noise."""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import protocol
from workload import SERVER_MOMENTUM, WORKLOADS, dense_arrays, user_fields

# FedJAX 0.0.17 was written for an older JAX: give back the names that it uses and JAX has dropped since.
for home, name, value in ((jax, "tree_map", jax.tree_util.tree_map), (jnp, "NINF", -np.inf), (jnp, "DeviceArray", Any)):
    try:
        getattr(home, name)
    except AttributeError:
        setattr(home, name, value)

import fedjax  # noqa: E402
import haiku as hk  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

MATRIX = {"w_init": hk.initializers.VarianceScaling()}


def autoencoder() -> Any:
    """emnist_ae: eight dense layers, the fourth without a sigmoid; mean over the pixels."""

    def forward(batch: Any) -> Any:
        ink = batch["x"]
        for number, width in enumerate((1000, 500, 250, 30, 250, 500, 1000, 784)):
            ink = hk.Linear(width, **MATRIX)(ink)
            ink = ink if number == 3 else jax.nn.sigmoid(ink)
        return ink

    return _model(forward, 784, 784, lambda batch, drawn: jnp.mean((drawn - batch["y"]) ** 2, axis=1))


def tag_regression() -> Any:
    """so_lr: one dense layer on rows of 10,000; mean over the tags."""

    def losses(batch: Any, logits: Any) -> Any:
        return jnp.mean(jax.nn.softplus(logits) - batch["y"] * logits, axis=1)

    return _model(lambda batch: hk.Linear(500, **MATRIX)(batch["x"]), 10_000, 500, losses)


def _model(forward: Callable[[Any], Any], width: int, outputs: int, losses: Callable[[Any, Any], Any]) -> Any:
    sample = {"x": np.zeros((1, width), np.float32), "y": np.zeros((1, outputs), np.float32)}
    return fedjax.create_model_from_haiku(hk.transform(forward), sample, losses)


# task -> (model, how the losses of a batch become one number). Networks are FedJAX's own where it has the paper's.
MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "emnist_cr": (lambda: fedjax.models.emnist.create_conv_model(only_digits=False), jnp.mean),
    "emnist_ae": (autoencoder, jnp.sum),
    "shakespeare": (fedjax.models.shakespeare.create_lstm_model, jnp.mean),
    "so_nwp": (lambda: fedjax.models.stackoverflow.create_lstm_model(expected_length=20.0), jnp.mean),
    "so_lr": (tag_regression, jnp.sum),
}


def data_of(task: str, user: int) -> Any:
    """One user's examples, in host memory, as FedJAX keeps them."""
    x, y = dense_arrays(task, user_fields(task, user))
    x, y = (array.astype(np.int32) if array.dtype == np.int64 else array for array in (x, y))
    return fedjax.ClientDataset({"x": x, "y": y})


def main() -> None:
    """Serve rounds."""
    wanted = protocol.arguments()
    clock = protocol.Clock()
    device, work = jax.devices()[0], WORKLOADS[wanted.task]
    if (device.platform == "cpu") != (wanted.device == "cpu"):
        raise SystemExit(f"jax chose {device.platform}, not {wanted.device}")
    make, reduce = MODELS[wanted.task]
    model = make()

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return reduce(model.train_loss(batch, model.apply_for_train(params, batch, key)))

    algorithm = fed_avg.federated_averaging(
        jax.grad(loss),
        fedjax.optimizers.sgd(work.client_lr),
        fedjax.optimizers.sgd(work.server_lr, momentum=SERVER_MOMENTUM),
        fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch_size),
    )
    held = [data_of(wanted.task, user) for user in range(wanted.users)]
    state = algorithm.init(model.init(jax.random.PRNGKey(0)))
    clock.ready(f"fedjax {importlib.metadata.version('fedjax')}, jax {jax.__version__}")
    for number in itertools.count():
        if not clock.go():
            break
        keys = jax.random.split(jax.random.PRNGKey(number), wanted.users)
        cohort = [(b"%d" % user, data, key) for user, (data, key) in enumerate(zip(held, keys, strict=True))]
        state, _ = algorithm.apply(state, cohort)
        clock.done(functools.partial(jax.block_until_ready, state.params))
    clock.close((device.memory_stats() or {}).get("peak_bytes_in_use") if device.platform != "cpu" else None)


if __name__ == "__main__":
    main()
