"""What K-Vib and Vrb share: they follow the regularised leader, omega + gamma, and mix in a part theta of uniform sampling."""

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
    """The state before the first round: nothing seen. `usual` is the theta of each model where none is given.

    gamma is the given one, or G^2 N / (theta draws) of the given `bound` G, or NaN: it is learnt. `spent` counts the draws so far.
    """
    for name, value, most in (
        ("theta", theta, 1.0),
        ("gamma", gamma, np.inf),
        ("bound", bound, np.inf),
    ):
        if value is not None and not 0 < value <= most:
            raise BadInput(
                f"sampler.{name} is {value:g}: it must be above 0" + " and at most 1" * (most == 1)
            )
    if gamma is not None and bound is not None:
        raise BadInput("sampler.gamma and sampler.bound both set the regulariser: give one of them")
    mixed = usual if theta is None else np.full(len(shares), theta)
    regulariser = np.full(len(shares), np.nan if gamma is None else gamma)
    if bound is not None:
        regulariser = bound**2 * (shares > 0).sum(axis=1) / (mixed * draws)
    return {
        "omega": np.zeros(shares.shape),
        "theta": mixed,
        "gamma": regulariser,
        "spent": np.zeros(1),
    }


def learn(state: State, back: Feedback, estimate: Array, budget: float) -> State:
    """omega grows by the estimates of pi^2, from a round of so many draws. An estimate that overflows is left out."""
    omega = state["omega"].copy()
    omega[back.model, back.client] += np.where(np.isfinite(estimate), estimate, 0.0)
    return {**state, "omega": omega, "spent": state["spent"] + budget}


def sums(state: State) -> Array:
    """omega + gamma. A gamma that is not given is sum of omega / draws so far (1, so the same for all, while nothing is known).

    That is Theorem 8's G^2 N / (theta draws) with the mean pi^2, of which omega is an unbiased estimate, for its bound G^2, and without
    theta: with it the sampler would be slow to leave uniform sampling.
    """
    learnt = state["omega"].sum(axis=1) / np.maximum(state["spent"], 1)
    gamma = np.where(np.isnan(state["gamma"]), np.where(learnt > 0, learnt, 1.0), state["gamma"])
    return np.asarray(state["omega"] + gamma[:, None])
