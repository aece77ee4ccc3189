"""FedAvg in DrJAX: its broadcast, its map over the clients, and its sum, compiled.

A client's local training is that of jax_scan.py with all clients together.
"""

# mypy: ignore-errors
from __future__ import annotations

import time
from importlib import metadata

import drjax
import jax
import jax.numpy as jnp
import jax_models as models
import numpy as np
import work as shared
from jax_scan import batches, scan, work


def compiled(steps: int):
    """A round in which every client takes `steps` steps; those beyond its own count nothing."""

    @jax.jit
    @drjax.program(placements={"clients": work.cohorts.shape[1]})
    def one(params, x, y, index, weight, keys, share):
        def local(params, index, weight, key, share):
            end = scan(params, x, y, index, weight, jax.random.wrap_key_data(key), steps)
            return [share * value for value in end]

        placed = drjax.broadcast(params), index, weight, keys, share
        return drjax.reduce_sum(drjax.map_fn(local, placed))

    return one


def main() -> None:
    device = jax.devices()[0]
    if (device.platform == "cpu") != (work.device == "cpu"):
        raise SystemExit(f"jax runs on {device.platform} here, not on {work.device}")
    if work.device == "cpu" and work.model not in ("logistic", "two_nn"):
        raise SystemExit("on a CPU, XLA takes minutes per round to map this network over clients")
    x = jax.device_put(models.examples(work, work.x))
    y = jax.device_put(np.asarray(work.y, np.int32))
    params = [jnp.asarray(value) for value in models.start(work)]
    sizes = np.diff(work.offsets)
    steps = -(-sizes // work.batch) * work.epochs
    same = bool((steps == steps.max()).all())
    rounds, lengths = {}, []
    for cohort in work.cohorts:
        longest = int(steps[cohort].max())
        lengths.append(longest if same else 1 << (longest - 1).bit_length())
    cohort = work.cohorts.shape[1]
    keys = jax.random.key_data(jax.random.split(jax.random.key(0), cohort))
    for length in set(lengths):  # compile for every number of steps before the clock runs
        rounds[length] = compiled(length)
        rows = np.zeros((cohort, length, work.batch), np.int32)
        weight, share = rows.astype(np.float32), np.ones(cohort, np.float32)
        jax.block_until_ready(rounds[length](params, x, y, rows, weight, keys, share))
    ends = []
    for now, (cohort, length) in enumerate(zip(work.cohorts, lengths, strict=True)):
        keys = jax.random.key_data(jax.random.split(jax.random.key(now), len(cohort)))
        share = (sizes[cohort] / sizes[cohort].sum()).astype(np.float32)
        index, weight = map(np.stack, zip(*(batches(c, length) for c in cohort), strict=True))
        params = rounds[length](params, x, y, index, weight, keys, share)
        jax.block_until_ready(params)
        ends.append(time.perf_counter())
    shared.report(work, ends, models.score(work, params), metadata.version("drjax"))


if __name__ == "__main__":
    main()
