"""FedAvg in FedJAX: its own federated_averaging on its compiled back end, one client after the other."""

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
    return jax.grad(
        lambda p: models.loss(work, p, batch["x"], batch["y"], jnp.full(size, 1 / size), key)
    )(params)


def main() -> None:
    jax.tree_map = jax.tree.map  # its older name, under which FedJAX calls it
    device = jax.devices()[0]
    if (device.platform == "cpu") != (work.device == "cpu"):
        raise SystemExit(f"jax runs on {device.platform} here, not on {work.device}")
    x, y = models.examples(work, work.x), np.asarray(work.y, np.int32)
    clients = [
        fedjax.ClientDataset({"x": x[work.rows(c)], "y": y[work.rows(c)]})
        for c in range(work.clients)
    ]
    algorithm = fed_avg.federated_averaging(
        gradient,
        fedjax.optimizers.sgd(work.lr),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch, num_epochs=work.epochs),
    )
    state = algorithm.init([jnp.asarray(value) for value in models.start(work)])
    # every size of a last batch is compiled for before the clock runs
    _, kinds = np.unique(np.diff(work.offsets) % work.batch, return_index=True)
    algorithm.apply(state, [(str(c), clients[c], jax.random.PRNGKey(0)) for c in kinds])
    ends = []
    for now, cohort in enumerate(work.cohorts):
        keys = jax.random.split(jax.random.PRNGKey(now), len(cohort))
        state, _ = algorithm.apply(
            state, [(str(c), clients[c], key) for c, key in zip(cohort, keys, strict=True)]
        )
        jax.block_until_ready(state.params)
        ends.append(time.perf_counter())
    shared.report(work, ends, models.score(work, state.params), metadata.version("fedjax"))


if __name__ == "__main__":
    main()
