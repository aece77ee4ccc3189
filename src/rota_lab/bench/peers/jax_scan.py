"""FedAvg in JAX, in one of three ways.

vmap  all clients train together. Each takes as many steps as the client with the most; batches
      beyond a client's own count nothing. The number of steps is rounded up to a power of two, so
      that there are few numbers to compile for.
scan  one client per thread; its local steps are one compiled scan.
step  one client per thread, which calls a compiled step: on a CPU, XLA's convolutions are ten times
      slower inside a loop that it compiles.
"""

# mypy: ignore-errors
from __future__ import annotations

import os
import sys

WAY = sys.argv[2]
if WAY != "vmap":  # the threads are ours, so XLA needs none
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"

import functools  # noqa: E402
import time  # noqa: E402
from concurrent.futures import ThreadPoolExecutor  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jax_models as models  # noqa: E402
import numpy as np  # noqa: E402
import work as shared  # noqa: E402

work = shared.load(sys.argv[1])
rng = np.random.default_rng(0)


def batches(client: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """A client's mini-batches, padded to `steps` of them: rows of x, and the weight of each row.

    The weight is 1 / (examples in the batch), or 0 for padding.
    """
    rows = work.rows(client)
    size = rows.stop - rows.start
    each = -(-size // work.batch)
    index, weight = np.zeros((2, steps, work.batch))
    for epoch in range(work.epochs):
        here = slice(epoch * each, (epoch + 1) * each)
        order, count = np.zeros(each * work.batch), np.zeros(each * work.batch)
        order[:size], count[:size] = rng.permutation(size) + rows.start, 1.0
        index[here], weight[here] = order.reshape(each, -1), count.reshape(each, -1)
    weight /= np.maximum(weight.sum(1, keepdims=True), 1)
    return index.astype(np.int32), weight.astype(np.float32)


def step(params, x, y, index, weight, key) -> list[jax.Array]:
    """One mini-batch."""
    grads = jax.grad(functools.partial(models.loss, work))(params, x[index], y[index], weight, key)
    return [p - work.lr * g for p, g in zip(params, grads, strict=True)]


def scan(params, x, y, index, weight, key, steps: int) -> list[jax.Array]:
    """A client's local training. If `steps` is known at compile time, the loop becomes a scan."""

    def one(t, now):
        return step(now, x, y, index[t], weight[t], jax.random.fold_in(key, t))

    return jax.lax.fori_loop(0, steps, one, params)


@functools.partial(jax.jit, static_argnums=7)
def together(params, x, y, index, weight, keys, share, steps: int) -> list[jax.Array]:
    """A whole round."""
    ends = jax.vmap(lambda i, w, k: scan(params, x, y, i, w, k, steps))(index, weight, keys)
    return [jnp.tensordot(share, end, 1) for end in ends]


one_scan, one_step = jax.jit(scan), jax.jit(step)


@jax.jit
def mean(share, ends) -> list[jax.Array]:
    """The mean of the clients' weights; `share` has a number per client."""
    out = []
    for same in zip(*ends, strict=True):
        out.append(sum(s * end for s, end in zip(share, same, strict=True)))
    return out


def alone(params, x, y, index, weight, key, steps: int) -> list[jax.Array]:
    """A client's local training, on the calling thread."""
    if WAY == "scan":
        return jax.block_until_ready(one_scan(params, x, y, index, weight, key, steps))
    for t, own in enumerate(jax.random.split(key, steps)):
        params = one_step(params, x, y, index[t], weight[t], own)
    return jax.block_until_ready(params)


def main() -> None:
    device = jax.devices()[0]
    if (device.platform == "cpu") != (work.device == "cpu"):
        raise SystemExit(f"jax runs on {device.platform} here, not on {work.device}")
    x = jax.device_put(models.examples(work, work.x))
    y = jax.device_put(np.asarray(work.y, np.int32))
    params = [jnp.asarray(value) for value in models.start(work)]
    sizes = np.diff(work.offsets)
    steps = -(-sizes // work.batch) * work.epochs
    most = int(steps.max())
    same = bool((steps == most).all())
    threads = ThreadPoolExecutor(os.cpu_count())
    if WAY == "vmap" and not same:  # compile for every number of steps before the clock runs
        cohort = work.cohorts.shape[1]
        keys, share = jax.random.split(jax.random.key(0), cohort), np.zeros(cohort, np.float32)
        for length in {1 << (int(steps[few].max()) - 1).bit_length() for few in work.cohorts}:
            rows = np.zeros((cohort, length, work.batch), np.int32)
            together(params, x, y, rows, rows.astype(np.float32), keys, share, length)
    ends = []
    for now, cohort in enumerate(work.cohorts):
        keys = jax.random.split(jax.random.key(now), len(cohort))
        share = (sizes[cohort] / sizes[cohort].sum()).astype(np.float32)
        if WAY == "vmap":
            longest = int(steps[cohort].max())
            length = longest if same else 1 << (longest - 1).bit_length()
            index, weight = map(np.stack, zip(*(batches(c, length) for c in cohort), strict=True))
            params = together(params, x, y, index, weight, keys, share, length)
        else:
            jobs = []
            for c, key in zip(cohort, keys, strict=True):
                mine = batches(c, most)
                jobs.append(threads.submit(alone, params, x, y, *mine, key, int(steps[c])))
            params = mean(list(share), [job.result() for job in jobs])
        jax.block_until_ready(params)
        ends.append(time.perf_counter())
    shared.report(work, ends, models.score(work, params), jax.__version__)


if __name__ == "__main__":
    main()
