"""The regularised leader omega + gamma, which K-Vib and Vrb follow with a uniform part theta."""

from __future__ import annotations

import numpy as np

from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import State
from rota.sampling.feedback import Feedback


def begin(
    shares: Array,
    draws: float,
    usual: Array,
    theta: float | None,
    gamma: float | None,
    bound: float | None,
) -> State:
    """The state before the first round; `usual` is each model's theta where none is given.

    gamma is the given one, or G^2 N / (theta draws) from the given `bound` G. NaN means that it is
    learnt. `spent` counts the draws so far.
    """
    if theta is not None and not 0 < theta <= 1:
        raise BadInput(f"sampler.theta is {theta:g}: it must be above 0 and at most 1")
    for name, value in (("gamma", gamma), ("bound", bound)):
        if value is not None and not value > 0:
            raise BadInput(f"sampler.{name} is {value:g}: it must be above 0")
    if gamma is not None and bound is not None:
        raise BadInput("sampler.gamma and sampler.bound both set the regulariser: give one of them")
    mixed = usual if theta is None else np.full(len(shares), theta)
    regulariser = np.full(len(shares), np.nan if gamma is None else gamma)
    if bound is not None:
        regulariser = bound**2 * (shares > 0).sum(axis=1) / (mixed * draws)
    omega = np.zeros(shares.shape)
    return {"omega": omega, "theta": mixed, "gamma": regulariser, "spent": np.zeros(1)}


def learn(state: State, back: Feedback, estimate: Array, budget: float) -> State:
    """Add a round's finite estimates of pi^2 to omega, and its `budget` to the draws so far."""
    omega = state["omega"].copy()
    omega[back.model, back.client] += np.where(np.isfinite(estimate), estimate, 0.0)
    return {**state, "omega": omega, "spent": state["spent"] + budget}


def sums(state: State) -> Array:
    """omega + gamma, where a learnt gamma is the sum of omega / the draws so far.

    As long as nothing is known, a learnt gamma is 1. It is Theorem 8's G^2 N / (theta draws), with
    omega's unbiased estimate of the mean pi^2 in place of the bound G^2, and without theta, which
    would make the sampler slow to leave uniform sampling.
    """
    learnt = state["omega"].sum(axis=1) / np.maximum(state["spent"], 1)
    gamma = np.where(np.isnan(state["gamma"]), np.where(learnt > 0, learnt, 1.0), state["gamma"])
    return np.asarray(state["omega"] + gamma[:, None])
