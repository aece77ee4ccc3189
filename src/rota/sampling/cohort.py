"""What most samplers have in common: a budget of clients per round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rota.arrays import Array
from rota.errors import BadInput
from rota.plan import State


@dataclass(frozen=True)
class Cohort:
    """A sampler with a budget. By itself it is unbiased, and neither learns nor asks anything."""

    budget: float = 10

    unbiased: ClassVar[bool] = True
    needs: ClassVar[str] = "nothing"
    sees: ClassVar[frozenset[str]] = frozenset()
    costs: ClassVar[str] = "nothing"

    def init(self, shares: Array, rounds: int) -> State:
        """Refuse a budget of less than one client, or of more clients than there are."""
        clients = shares.shape[1]
        if not 1 <= self.budget <= clients:
            raise BadInput(
                f"sampler.budget is {self.budget:g} clients per round, but there are {clients}: "
                f"give a number from 1 to {clients}"
            )
        return {}
