"""How long each client needs for a whole model, from the times of whole models and of parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rota.arrays import Array

POWER, UNSURE = 1.0, 0.5
"""What is assumed of a power before any part was timed: its mean and standard deviation."""
LEAST, MOST = 0.3, 3.0
"""The range of powers."""
DRIFT = 0.1
"""How much a log time may change per round, in units of its noise."""
SURPRISE = 5.0
"""A time that is off by more standard deviations than this means that conditions have changed."""


@dataclass
class Times:
    """What is known of each client's time for each model, as arrays [models, clients].

    A client that needs the time T for the whole model needs T r^k for a part of width r. FLuID
    takes k = 1. In truth k depends on the model and on the device: transfer shrinks with the number
    of parameters, layers between two others shrink with r^2, and latency does not shrink. So a
    Kalman filter estimates log T and k of each pair from log seconds = log T + k log r + noise.

    Log T drifts slowly, so that an estimate becomes less sure with every round without a
    measurement. If a time is very far from what is expected, conditions have changed: then log T is
    forgotten, and the new time counts at once.
    """

    log: Array
    power: Array
    var: Array
    power_var: Array
    both: Array
    """The covariance of log T and k."""
    last: Array
    """The round of the last measurement."""

    @classmethod
    def unknown(cls, shape: tuple[int, ...]) -> Times:
        """No client was measured yet."""
        log, var, both, last = np.full(shape, np.nan), *np.zeros((3, *shape))
        return cls(log, np.full(shape, POWER), var, np.full(shape, UNSURE**2), both, last)

    def learn(
        self, where: tuple[Array, Array], seconds: Array, width: Array, now: int, noise: float
    ) -> None:
        """Learn from rows: each is a (model, client) pair that trained a part of this width."""
        found, h = np.log(seconds), np.log(width)
        log, power = self.log[where], self.power[where]
        new = np.isnan(log)
        log = np.where(new, found - power * h, log)
        var = self.var[where] + (DRIFT * noise) ** 2 * (now - self.last[where])
        power_var, both = self.power_var[where], self.both[where]
        # a first time says nothing about the power
        var = np.where(new, power_var * h**2, var)
        both = np.where(new, -power_var * h, both)
        off = found - log - power * h
        spread = var + 2 * h * both + h**2 * power_var + noise**2
        changed = off**2 > SURPRISE**2 * spread
        var = np.where(changed, var + off**2, var)
        both = np.where(changed, 0.0, both)
        spread = var + 2 * h * both + h**2 * power_var + noise**2
        a, b = var + h * both, both + h * power_var
        self.log[where] = log + a / spread * off
        self.power[where] = np.clip(power + b / spread * off, LEAST, MOST)
        self.var[where] = np.where(new, var + noise**2, var - a * a / spread)
        self.power_var[where] = np.where(new, power_var, power_var - b * b / spread)
        self.both[where] = np.where(new, both, both - a * b / spread)
        self.last[where] = now

    def of_clients(self) -> Array:
        """Each client's time for a whole model, NaN if unknown.

        With several models it is the mean of the client's relative times, times the models' mean.
        A client that is measured for the cheapest model alone is not thought to be the fastest.
        """
        if len(self.log) == 1:
            return np.asarray(np.exp(self.log[0]))
        known = np.isfinite(self.log).any(axis=1)
        if not known.any():
            return np.full(self.log.shape[1], np.nan)
        log = self.log[known]
        usual = np.nanmedian(log, axis=1, keepdims=True)
        return np.asarray(np.exp(_mean(log - usual)) * np.exp(usual).mean())

    def powers(self) -> Array:
        """Each client's power: the mean over the models that it was measured for."""
        return _mean(np.where(np.isfinite(self.log), self.power, np.nan))


def _mean(values: Array) -> Array:
    """The means over the first axis of what is known."""
    known = np.isfinite(values)
    number, total = known.sum(axis=0), np.where(known, values, 0.0).sum(axis=0)
    return np.asarray(np.divide(total, number, out=np.full(len(total), np.nan), where=number > 0))
