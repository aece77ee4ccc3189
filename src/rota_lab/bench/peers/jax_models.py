"""The works' networks in JAX. Images are [n, height, width, channels]: XLA is fast with these."""

# mypy: ignore-errors
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import work as shared

CONVOLUTIONS = {"cnn": "SAME", "pfl_cnn": "VALID"}


def examples(work: shared.Prepared, x: np.ndarray) -> np.ndarray:
    """Examples as the network takes them."""
    if work.model in CONVOLUTIONS:
        return np.ascontiguousarray(x.transpose(0, 2, 3, 1))
    return np.asarray(x)


def start(work: shared.Prepared) -> list[np.ndarray]:
    """The weights of round 0: torch's, with convolutions as [height, width, inputs, outputs]."""
    out = []
    for value in work.start:
        if value.ndim == 4:
            channels = value.shape[0]
            value = value.transpose(2, 3, 1, 0)
        elif work.model in CONVOLUTIONS and value.ndim == 2 and len(out) == 4:
            # the first linear layer reads [height, width, channels]
            side = int((value.shape[1] // channels) ** 0.5)
            images = value.reshape(-1, channels, side, side)
            value = images.transpose(0, 2, 3, 1).reshape(value.shape)
        out.append(np.ascontiguousarray(value))
    return out


def apply(
    work: shared.Prepared, params: list[jax.Array], x: jax.Array, key: jax.Array | None
) -> jax.Array:
    """The logits; with a key, those of training (with dropout)."""
    if work.model in ("logistic", "two_nn"):
        x = x.reshape(len(x), -1)
    elif work.model == "cnn":
        x = pool(jax.nn.relu(convolve(x, *params[:2], "SAME")))
        x = pool(jax.nn.relu(convolve(x, *params[2:4], "SAME")))
        x, params = x.reshape(len(x), -1), params[4:]
    elif work.model == "pfl_cnn":
        first, second = (None, None) if key is None else jax.random.split(key)
        x = jax.nn.relu(convolve(x, *params[:2], "VALID"))
        x = drop(pool(jax.nn.relu(convolve(x, *params[2:4], "VALID"))), first, 0.25)
        x = x.reshape(len(x), -1)
        x = drop(jax.nn.relu(x @ params[4].T + params[5]), second, 0.5)
        params = params[6:]
    elif work.model == "lstm_shakespeare":
        x = jax.nn.one_hot(x, work.classes)
        x = lstm(lstm(x, *params[:4]), *params[4:8])[:, -1]
        params = params[8:]
    else:
        raise ValueError(f"no network '{work.model}'")
    *hidden, (weight, bias) = zip(params[::2], params[1::2], strict=True)
    for w, b in hidden:
        x = jax.nn.relu(x @ w.T + b)
    return x @ weight.T + bias


def convolve(x: jax.Array, weight: jax.Array, bias: jax.Array, padding: str) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, weight, (1, 1), padding, dimension_numbers=layout)
    return y + bias


def pool(x: jax.Array) -> jax.Array:
    n, height, width, channels = x.shape
    return x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))


def drop(x: jax.Array, key: jax.Array | None, p: float) -> jax.Array:
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - p, x.shape), x / (1 - p), 0.0)


def lstm(
    x: jax.Array, w_ih: jax.Array, w_hh: jax.Array, b_ih: jax.Array, b_hh: jax.Array
) -> jax.Array:
    def step(
        state: tuple[jax.Array, jax.Array], now: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        hidden, cell = state
        i, f, g, o = jnp.split(now + hidden @ w_hh.T, 4, -1)
        cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
        return (hidden, cell), hidden

    inputs = (x @ w_ih.T + b_ih + b_hh).swapaxes(0, 1)
    nothing = jnp.zeros((x.shape[0], w_hh.shape[1]), inputs.dtype)
    return jax.lax.scan(step, (nothing, nothing), inputs)[1].swapaxes(0, 1)


def loss(
    work: shared.Prepared,
    params: list[jax.Array],
    x: jax.Array,
    y: jax.Array,
    weight: jax.Array,
    key: jax.Array,
) -> jax.Array:
    """The weighted sum of the examples' cross-entropies."""
    scores = jax.nn.log_softmax(apply(work, params, x, key))
    return -(weight * jnp.take_along_axis(scores, y[:, None], 1)[:, 0]).sum()


def score(work: shared.Prepared, params: list[jax.Array]) -> tuple[float, float]:
    """The accuracy on the test examples, and their mean loss."""
    scores = jax.jit(lambda params, x: jax.nn.log_softmax(apply(work, params, x, None)))
    hits, loss = 0, 0.0
    for first in range(0, len(work.test_y), 1000):
        y = work.test_y[first : first + 1000]
        outputs = np.asarray(scores(params, examples(work, work.test_x[first : first + 1000])))
        hits += int((outputs.argmax(-1) == y).sum())
        loss -= float(outputs[np.arange(len(y)), y].sum())
    return hits / len(work.test_y), loss / len(work.test_y)
