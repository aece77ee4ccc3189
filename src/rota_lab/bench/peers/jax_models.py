"""The works' networks in JAX. Images are [n, height, width, channels]: XLA is fast with these."""

# mypy: ignore-errors
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import work as shared

CONVOLUTIONS = ("cnn", "pfl_cnn", "lenet", "resnet8")


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
        elif work.model in CONVOLUTIONS[:3] and value.ndim == 2 and len(out) == 4:
            # the first linear layer after two convolutions reads [height, width, channels]
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
    elif work.model == "lenet":
        x = pool(jax.nn.relu(convolve(x, *params[:2], "SAME")))
        x = pool(jax.nn.relu(convolve(x, *params[2:4], "VALID")))
        x, params = x.reshape(len(x), -1), params[4:]
    elif work.model == "resnet8":
        x = jax.nn.relu(normed(convolve(x, params[0], 0.0, "SAME"), *params[1:3]))
        x, params = residual(x, params[3:9], 1), params[9:]
        for _ in range(2):
            x, params = residual(x, params[:9], 2), params[9:]
        x = x.mean((1, 2))
    elif work.model == "transformer":
        x, params = params[1][x] + params[0], params[2:]
        for _ in range(2):
            x, params = attentive(x, *params[:12]), params[12:]
        x, params = layer_norm(x, *params[:2])[:, -1], params[2:]
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


def convolve(
    x: jax.Array, weight: jax.Array, bias: jax.Array | float, padding: str, stride: int = 1
) -> jax.Array:
    layout, side = ("NHWC", "HWIO", "NHWC"), (weight.shape[0] - 1) // 2
    around = [(side, side)] * 2 if padding == "SAME" else padding  # torch pads evenly
    strides = (stride, stride)
    y = jax.lax.conv_general_dilated(x, weight, strides, around, dimension_numbers=layout)
    return y + bias


def normed(x: jax.Array, scale: jax.Array, bias: jax.Array, groups: int = 2) -> jax.Array:
    """GroupNorm."""
    n, height, width, _ = x.shape
    parts = x.reshape(n, height * width, groups, -1)
    mean = parts.mean((1, 3), keepdims=True)
    parts = (parts - mean) * jax.lax.rsqrt(parts.var((1, 3), keepdims=True) + 1e-5)
    return parts.reshape(x.shape) * scale + bias


def residual(x: jax.Array, params: list[jax.Array], stride: int) -> jax.Array:
    out = convolve(x, params[0], 0.0, "SAME", stride)
    out = convolve(jax.nn.relu(normed(out, *params[1:3])), params[3], 0.0, "SAME")
    if stride > 1:
        x = normed(convolve(x, params[6], 0.0, "SAME", stride), *params[7:9])
    return jax.nn.relu(normed(out, *params[4:6]) + x)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale + bias


def attentive(
    x: jax.Array,
    scale1: jax.Array,
    bias1: jax.Array,
    w_in: jax.Array,
    b_in: jax.Array,
    w_out: jax.Array,
    b_out: jax.Array,
    scale2: jax.Array,
    bias2: jax.Array,
    w1: jax.Array,
    b1: jax.Array,
    w2: jax.Array,
    b2: jax.Array,
    heads: int = 4,
) -> jax.Array:
    n, time, width = x.shape
    parts = layer_norm(x, scale1, bias1) @ w_in.T + b_in
    query, key, value = (p.reshape(n, time, heads, -1) for p in jnp.split(parts, 3, -1))
    heard = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + heard.reshape(n, time, width) @ w_out.T + b_out
    hidden = jax.nn.gelu(layer_norm(x, scale2, bias2) @ w1.T + b1, approximate=False)
    return x + hidden @ w2.T + b2


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
