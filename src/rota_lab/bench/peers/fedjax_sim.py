"""FedAvg in FedJAX: its federated_averaging on its compiled back end, client after client."""

# mypy: ignore-errors
from __future__ import annotations

import sys
import time
from importlib import metadata

import fedjax
import jax
import jax.numpy as jnp
import jax_models as models
import numpy as np
import work as shared
from fedjax.algorithms import fed_avg

work = shared.load(sys.argv[1])


def gradient(
    params: list[jax.Array], batch: dict[str, jax.Array], key: jax.Array
) -> list[jax.Array]:
    size = len(batch["y"])
    weight = jnp.full(size, 1 / size)

    def loss(params: list[jax.Array]) -> jax.Array:
        return models.loss(work, params, batch["x"], batch["y"], weight, key)

    return jax.grad(loss)(params)


def main() -> None:
    jax.tree_map = jax.tree.map  # FedJAX uses the older name
    device = jax.devices()[0]
    if (device.platform == "cpu") != (work.device == "cpu"):
        raise SystemExit(f"jax runs on {device.platform} here, not on {work.device}")
    x, y = models.examples(work, work.x), np.asarray(work.y, np.int32)
    clients = []
    for c in range(work.clients):
        rows = work.rows(c)
        clients.append(fedjax.ClientDataset({"x": x[rows], "y": y[rows]}))
    algorithm = fed_avg.federated_averaging(
        gradient,
        fedjax.optimizers.sgd(work.lr),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch, num_epochs=work.epochs),
    )
    state = algorithm.init([jnp.asarray(value) for value in models.start(work)])
    # compile for every size of a last batch, before the clock runs
    _, kinds = np.unique(np.diff(work.offsets) % work.batch, return_index=True)
    algorithm.apply(state, [(str(c), clients[c], jax.random.PRNGKey(0)) for c in kinds])
    ends = []
    for now, cohort in enumerate(work.cohorts):
        keys = jax.random.split(jax.random.PRNGKey(now), len(cohort))
        drawn = [(str(c), clients[c], key) for c, key in zip(cohort, keys, strict=True)]
        state, _ = algorithm.apply(state, drawn)
        jax.block_until_ready(state.params)
        ends.append(time.perf_counter())
    shared.report(work, ends, models.score(work, state.params), metadata.version("fedjax"))


if __name__ == "__main__":
    main()
