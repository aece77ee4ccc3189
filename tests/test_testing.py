"""The suites of rota.testing pass what is right, and name what is wrong: one mistake per check."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import HERE

import rota
import rota.testing
from rota import rng
from rota.arrays import Array
from rota.engine import ENGINES, Options, Sequential
from rota.estimate import Estimate, FedVarp, Scaffold, Unbiased
from rota.experiment import Experiment
from rota.plan import Chunk, Job, Local, Model, Plan, Seen, State
from rota.sampling import KVib, draw
from rota.testing import engines, samplers
from rota.weights import Weights

SHARES = samplers.SHARES[1]


def refused(words: str) -> Any:
    return pytest.raises(AssertionError, match=re.escape(words))


# --- samplers


@dataclass(frozen=True)
class Mine:
    """A sampler of the user's own: it prefers the clients with large updates, without a bias."""

    budget: float = 3

    sees = frozenset({"norm"})
    unbiased = True

    def init(self, shares: Array, rounds: int) -> State:
        return {"score": np.ones(shares.shape)}

    def chances(self, state: State, shares: Array) -> Array:
        owns = shares > 0
        score = state["score"] * owns
        p = self.budget * score / np.maximum(score.sum(axis=1, keepdims=True), 1e-9)
        return np.clip(p, 0.2, 1.0) * owns

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return draw.independent(self.chances(state, shares), shares, generator)

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        score, ok = state["score"].copy(), seen.ok
        score[plan.model[ok], plan.client[ok]] = np.clip(np.nan_to_num(seen.norm[ok]), 0.1, 10.0)
        return {"score": score}


def test_a_right_sampler_passes_in_three_lines() -> None:
    rota.testing.check_sampler(Mine(budget=3))
    rota.testing.check_sampler(Mine(budget=2), SHARES[:, :4] / SHARES[:, :4].sum(1, keepdims=True))


class NoMethod:
    init, observe = Mine.init, Mine.observe


class UnknownColumn(Mine):
    sees = frozenset({"norms"})


class WatchesNothing(Mine):
    sees = frozenset({"update"})


class WatchesSecretly(KVib):
    watch = see = learn = lambda self, *_: None


class AlsoTheUnreachable(Mine):
    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        everybody = np.ones(shares.shape[1], np.int64)
        return Plan(np.flatnonzero(everybody), 0 * everybody, 1.0 * everybody, 1.0 * everybody)


class Twice(Mine):
    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        plan = super().draw(state, shares, generator)
        return draw.concatenate([plan, plan])


class OwnRandomness(Mine):
    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return super().draw(state, shares, rng.generator(np.random.randint(99)))


class HiddenMemory(Mine):
    rounds = 0

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        object.__setattr__(self, "rounds", self.rounds + 1)
        p = np.clip(self.chances(state, shares) * self.rounds / 10, 0.2, 1.0) * (shares > 0)
        return draw.independent(p, shares, generator)


class ListState(Mine):
    def init(self, shares: Array, rounds: int) -> State:
        return super().init(shares, rounds) | {"names": ["a", "b"]}

    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        return state | super().observe(state, shares, plan, seen)


class TextState(ListState):
    def init(self, shares: Array, rounds: int) -> State:
        return Mine.init(self, shares, rounds) | {"names": np.array(["a", "b"])}


class WritesIntoState(Mine):
    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        state["score"][plan.model[seen.ok], plan.client[seen.ok]] += 0.5
        return state


class WritesWhileDrawing(Mine):
    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        plan = super().draw(state, shares, generator)
        state["score"] *= 1.01
        return plan


class WritesIntoSeen(Mine):
    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        after = super().observe(state, shares, plan, seen)
        seen.norm *= 2
        return after


class WritesIntoShares(Mine):
    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        plan = super().draw(state, shares, generator)
        shares *= 1 + 1e-9
        return plan


class TakesFailuresForReal(Mine):
    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        score = state["score"].copy()
        score[plan.model, plan.client] = seen.norm
        return {"score": score}

    def chances(self, state: State, shares: Array) -> Array:
        chances = super().chances(state, shares)
        return np.where(np.isnan(chances), 1.5, chances)


class Squares(Mine):
    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        with np.errstate(over="ignore"):
            return {"score": state["score"] + (seen.norm[seen.ok] ** 2).sum()}

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        with np.errstate(all="ignore"):
            return super().draw(state, shares, generator)


class LearnsFromLosses(Mine):
    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        score, ok = state["score"].copy(), seen.ok
        score[plan.model[ok], plan.client[ok]] = np.nan_to_num(seen.loss[ok], nan=1.0) + 0.1
        return {"score": score}


class LearnsFromSeconds(Mine):
    def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
        score, ok = state["score"].copy(), seen.ok
        score[plan.model[ok], plan.client[ok]] = 1 / (1 + np.nan_to_num(seen.seconds[ok]))
        return {"score": score}


class Heavier(Mine):
    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        plan = super().draw(state, shares, generator)
        return replace(plan, weight=1.1 * plan.weight)


class PlainMean(Mine):
    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        return draw.mean(super().draw(state, shares, generator))


class WrongChances(Mine):
    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        plan = super().draw(state, shares, generator)
        return replace(plan, probability=0.8 * plan.probability)


class Forgets(Mine):
    def chances(self, state: State, shares: Array) -> Array:
        chances = super().chances(state, shares)
        chances[:, 0] = 0.0
        return chances


@dataclass(frozen=True)
class Rated(KVib):
    """A sampler with rates, which draws by others."""

    budget: float = 3

    def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
        rates = 0.5 * self.rates(state, shares) + 0.25 * (shares > 0)
        return draw.independent(rates, shares, generator)


@dataclass(frozen=True)
class Spendthrift(KVib):
    budget: float = 3

    def rates(self, state: State, shares: Array) -> Array:
        return np.minimum(1.0, 1.2 * super().rates(state, shares))


WRONG: list[tuple[Any, str]] = [
    (NoMethod(), "NoMethod has no method `draw`"),
    (UnknownColumn(), "declares in `sees` the unknown ['norms']"),
    (WatchesNothing(), "must declare 'update' in `sees` if and only if it has the methods"),
    (WatchesSecretly(3), "must declare 'update' in `sees` if and only if it has the methods"),
    (AlsoTheUnreachable(), "has no data for it or cannot be reached"),
    (Twice(), "the sampler drew a client twice for one model"),
    (OwnRandomness(), "draws other plans from the same generator"),
    (HiddenMemory(), "draws another plan after a resume: keep all that it remembers in its state"),
    (ListState(), "state['names'] of ListState is a list: a checkpoint holds only arrays"),
    (TextState(), "state['names'] of TextState has the dtype <U1: a checkpoint holds only numbers"),
    (WritesIntoState(), "of WritesIntoState changed the state that it was given ('score')"),
    (WritesWhileDrawing(), "`draw` of WritesWhileDrawing changed the state that it was given"),
    (WritesIntoSeen(), "`observe` of WritesIntoSeen changed what it was shown ('norm')"),
    (WritesIntoShares(), "WritesIntoShares changed the shares that it was given"),
    (TakesFailuresForReal(), "in a run in which some rows fail"),
    (Squares(), "Squares draws nobody any more after norms and losses infinite"),
    (LearnsFromLosses(), "learns from 'loss', which its `sees` does not name"),
    (LearnsFromSeconds(), "learns from 'seconds', which its `sees` does not name"),
    (Heavier(), "Heavier says that it is unbiased, but the mean weight of client"),
    (PlainMean(), "PlainMean says that it is unbiased, but the mean weight of client"),
    (WrongChances(), "WrongChances states a wrong probability"),
    (Forgets(), "Forgets never draws client 0 for model 0, which has data for it"),
    (Rated(), "does not draw by its `rates` and `procedure`: the variance"),
    (Spendthrift(), "not to its budget"),
]


@pytest.mark.parametrize(("sampler", "words"), WRONG, ids=[type(s).__name__ for s, _ in WRONG])
def test_a_wrong_sampler_is_refused(sampler: Any, words: str) -> None:
    with refused(words):
        rota.testing.check_sampler(sampler, SHARES)


def test_a_sampler_that_says_nothing_of_itself_may_learn_from_everything() -> None:
    class Open:
        def init(self, shares: Array, rounds: int) -> State:
            return {"loss": np.ones(shares.shape)}

        def draw(self, state: State, shares: Array, generator: np.random.Generator) -> Plan:
            p = np.clip(state["loss"], 0.2, 1.0) * (shares > 0)
            return draw.independent(p, shares, generator)

        def observe(self, state: State, shares: Array, plan: Plan, seen: Seen) -> State:
            loss = state["loss"].copy()
            at = (plan.model[seen.ok], plan.client[seen.ok])
            loss[at] = seen.loss[seen.ok] * seen.seconds[seen.ok]
            return {"loss": loss}

    rota.testing.check_sampler(Open())


# --- estimators


def test_a_right_estimator_passes_in_three_lines() -> None:
    @dataclass(frozen=True)
    class Mine(Unbiased):
        pass

    rota.testing.check_estimator(Mine())


class Median:
    """An estimator that is no sum."""

    sees = frozenset({"update"})

    def init(self, models: list[Weights], shares: Array) -> State:
        return {}

    def begin(self, state: State, models: list[Weights], plan: Plan) -> Any:
        return [[[], []] for _ in models]

    def add(self, sums: Any, plan: Plan, chunk: Chunk) -> None:
        came = np.flatnonzero(chunk.ok)
        sums[chunk.model][0].append(chunk.update[came])
        sums[chunk.model][1].append(chunk.buffers[came])

    def finish(self, state: State, sums: Any) -> tuple[list[Estimate], State]:
        return [self._middle(*parts) for parts in sums], state

    def _middle(self, updates: list[torch.Tensor], buffers: list[torch.Tensor]) -> Estimate:
        if not sum(len(part) for part in updates):
            return Estimate(None, None)
        return Estimate(*(torch.cat(part).median(dim=0).values for part in (updates, buffers)))


def test_an_estimator_that_is_no_sum() -> None:
    rota.testing.check_estimator(Median(), exact=False)
    with refused("by Median of full participation for model 0"):
        rota.testing.check_estimator(Median())


class NoFinish:
    init, begin, add = Median.init, Median.begin, Median.add


class SeesLosses(Unbiased):
    sees = frozenset({"loss"})


class OneModel(Unbiased):
    def finish(self, state: State, sums: Any) -> tuple[list[Estimate], State]:
        return super().finish(state, sums)[0][:1], state


class Coarse(Unbiased):
    def _estimate(self, sums: Any) -> Estimate:
        one = super()._estimate(sums)
        return one if one.update is None else one._replace(update=one.update.float())


class Half(Unbiased):
    unbiased = False

    def _estimate(self, sums: Any) -> Estimate:
        one = super()._estimate(sums)
        return one if one.update is None else one._replace(update=one.update / 2)


class LastChunk(Unbiased):
    def add(self, sums: Any, plan: Plan, chunk: Chunk) -> None:
        sums[chunk.model].update *= 0.5
        super().add(sums, plan, chunk)


class FailuresToo(Unbiased):
    def add(self, sums: Any, plan: Plan, chunk: Chunk) -> None:
        super().add(sums, plan, replace(chunk, reason=[""] * len(chunk.rows)))


class AlwaysSteps(Unbiased):
    def _estimate(self, sums: Any) -> Estimate:
        one = super()._estimate(sums)
        return one if one.update is not None else Estimate(sums.update, None)


class Remembers(Unbiased):
    """It counts its rounds in an attribute."""

    rounds = 0

    def begin(self, state: State, models: list[Weights], plan: Plan) -> Any:
        object.__setattr__(self, "rounds", self.rounds + 1)
        return super().begin(state, models, plan)

    def _estimate(self, sums: Any) -> Estimate:
        one = super()._estimate(sums)
        late = one.update is not None and self.rounds > 20
        return one._replace(update=0.9 * one.update) if late else one


class NumbersInState(Unbiased):
    def init(self, models: list[Weights], shares: Array) -> State:
        return {"rounds": 0}


class WritesAtOnce(FedVarp):
    """It changes its memory while a round goes on, so an abandoned round leaves traces."""

    def add(self, sums: Any, plan: Plan, chunk: Chunk) -> Array:
        norms = super().add(sums, plan, chunk)
        sums.state["beta"][chunk.model, plan.client[chunk.rows]] *= 0.9
        return norms


class KeepsChunks(Unbiased):
    def begin(self, state: State, models: list[Weights], plan: Plan) -> Any:
        return [super().begin(state, models, plan), plan, []]

    def add(self, sums: Any, plan: Plan, chunk: Chunk) -> None:
        sums[2].append(chunk)

    def finish(self, state: State, sums: Any) -> tuple[list[Estimate], State]:
        for chunk in sums[2]:
            super().add(sums[0], sums[1], chunk)
        return super().finish(state, sums[0])


class Clips(Unbiased):
    """It looks at single rows, and does not say so."""

    unbiased = False

    def add(self, sums: Any, plan: Plan, chunk: Chunk) -> None:
        super().add(sums, plan, replace(chunk, update=chunk.update.clamp(-1.0, 1.0)))


class OtherNorms(FedVarp):
    def add(self, sums: Any, plan: Plan, chunk: Chunk) -> Array:
        return 2 * super().add(sums, plan, chunk)


class OneVector(Scaffold):
    def local(self, state: State, models: list[Weights], plan: Plan) -> Local:
        shift = super().local(state, models, plan).shift
        assert shift is not None
        return Local(shift=lambda rows: shift(rows).mean(dim=0))


class Claims(Half):
    unbiased = True


WRONG_ESTIMATORS: list[tuple[Any, str]] = [
    (NoFinish(), "NoFinish has no method `finish`"),
    (SeesLosses(), "an estimator can only see 'update'"),
    (OneModel(), "gives 1 estimates for 3 models"),
    (Coarse(), "an update of shape (5,) and torch.float32, not (5,), torch.float64"),
    (Half(), "the update by Half of full participation for model 0"),
    (LastChunk(), "depends on the order of chunks, or on their size"),
    (FailuresToo(), "does not leave failed rows out"),
    (AlwaysSteps(), "gives an estimate for a model that no client trained"),
    (Remembers(), "Remembers"),
    (NumbersInState(), "state['rounds'] of NumbersInState is a int"),
    (WritesAtOnce(), "an abandoned round changed"),
    (KeepsChunks(), "keeps a chunk that was added"),
    (Clips(), "depends on more than weighted sums: declare `sees` = {'update'}"),
    (OtherNorms(), "`residual` and `add` of OtherNorms give different norms"),
    (OneVector(), "`local` of OneVector gives a shift of the shape (5,), not (3, 5)"),
]


@pytest.mark.parametrize(
    ("estimator", "words"), WRONG_ESTIMATORS, ids=[type(e).__name__ for e, _ in WRONG_ESTIMATORS]
)
def test_a_wrong_estimator_is_refused(estimator: Any, words: str) -> None:
    with refused(words):
        rota.testing.check_estimator(estimator)


def test_an_estimator_that_claims_to_be_unbiased() -> None:
    with refused("Claims says that it is unbiased, but the mean of its estimates for model 0"):
        rota.testing.check_estimator(Claims(), exact=False)


# --- engines


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize(
    "check",
    [*engines.CHECKS, engines.check_same, engines.check_local, engines.check_losses],
    ids=lambda check: check.__name__,
)
def test_rotas_own_engines_pass(name: str, check: Any) -> None:
    check(engines.maker(ENGINES[name]))


class Wrapped:
    """The reference engine, with one mistake."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment
        self.plain = Sequential.make(experiment, Options(torch.device("cpu")))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def change(self, chunk: Chunk, job: Job) -> Iterator[Chunk]:
        yield chunk

    def train(self, job: Job) -> Iterator[Chunk]:
        for chunk in self.plain.train(job):
            yield from self.change(chunk, job)


class Drops(Wrapped):
    def change(self, chunk: Chunk, job: Job) -> Iterator[Chunk]:
        if chunk.rows[0]:
            yield chunk


class Repeats(Wrapped):
    def change(self, chunk: Chunk, job: Job) -> Iterator[Chunk]:
        yield chunk
        yield chunk


class Late(Wrapped):
    def change(self, chunk: Chunk, job: Job) -> Iterator[Chunk]:
        yield replace(chunk, now=job.now - 1)


class Narrow(Wrapped):
    def change(self, chunk: Chunk, job: Job) -> Iterator[Chunk]:
        yield replace(chunk, update=chunk.update[:, :-1])


class Strangers(Wrapped):
    def change(self, chunk: Chunk, job: Job) -> Iterator[Chunk]:
        yield replace(chunk, rows=chunk.rows + 1)


class WritesIntoModels(Wrapped):
    def change(self, chunk: Chunk, job: Job) -> Iterator[Chunk]:
        job.models[chunk.model].params.sub_(chunk.update[0])
        yield chunk


class LeavesNoTrace(Wrapped):
    def change(self, chunk: Chunk, job: Job) -> Iterator[Chunk]:
        yield replace(chunk, update=0 * chunk.update)


class DependsOnOthers(Wrapped):
    def change(self, chunk: Chunk, job: Job) -> Iterator[Chunk]:
        yield replace(chunk, update=chunk.update * len(job.plan))


class OneModelPerTask(Wrapped):
    def train(self, job: Job) -> Iterator[Chunk]:
        models = [
            replace(model, weights=self.initial()[model.task].weights) for model in job.models
        ]
        yield from self.plain.train(replace(job, models=models))


class Raises(Wrapped):
    def change(self, chunk: Chunk, job: Job) -> Iterator[Chunk]:
        if chunk.reason[0]:
            raise ValueError(chunk.reason[0])
        yield chunk


class FailsTogether(Wrapped):
    def train(self, job: Job) -> Iterator[Chunk]:
        chunks = list(self.plain.train(job))
        reason = max(chunk.reason[0] for chunk in chunks) if chunks else ""
        for chunk in chunks:
            yield replace(chunk, reason=[reason])


class ScoresAll(Wrapped):
    def evaluate(self, models: list[Model], which: Any = None) -> Any:
        return self.plain.evaluate(models)


class OtherSeed(Wrapped):
    def __init__(self, experiment: Experiment) -> None:
        super().__init__(replace(experiment, seed=experiment.seed))
        self.plain.seed += 1


class NoShift(Wrapped):
    def train(self, job: Job) -> Iterator[Chunk]:
        yield from self.plain.train(replace(job, local=replace(job.local, shift=None)))


class NoAnchor(Wrapped):
    def train(self, job: Job) -> Iterator[Chunk]:
        yield from self.plain.train(replace(job, local=replace(job.local, anchor=None)))


class WrongLosses(Wrapped):
    def losses(self, job: Job, examples: int | None = None) -> Seen:
        seen = self.plain.losses(job, examples)
        return replace(seen, loss=2 * seen.loss)


WRONG_ENGINES: list[tuple[Any, str]] = [
    (Drops, "the engine does not reply for the rows [0]"),
    (Repeats, "the engine replies twice for row 0"),
    (Late, "the engine replies for round 1, not 2"),
    (Narrow, "the update of a chunk has the shape"),
    (Strangers, "the engine replies"),
    (WritesIntoModels, "training changed a model of the job"),
    (LeavesNoTrace, "has trained, but its update is 0"),
    (DependsOnOthers, "trains differently without the other rows"),
    (OneModelPerTask, "two models of one task train as if they were one"),
    (FailsTogether, "fails because another client's training raises"),
    (ScoresAll, "`evaluate` gives 3 scores for two models"),
    (OtherSeed, "trains differently than with the reference engine"),
    (NoShift, "trains differently with shifted gradients than with the reference engine"),
    (NoAnchor, "trains differently with their own anchors than with the reference engine"),
    (WrongLosses, "`losses` gives"),
]


@pytest.mark.parametrize(("engine", "words"), WRONG_ENGINES)
def test_a_wrong_engine_is_refused(engine: Any, words: str) -> None:
    with refused(words):
        rota.testing.check_engine(engine)


def test_an_engine_that_raises_for_a_client() -> None:
    with pytest.raises(ValueError, match="too large"):
        rota.testing.check_engine(Raises)


def test_a_right_engine_passes_in_three_lines() -> None:
    rota.testing.check_engine(Wrapped)
    rota.testing.check_engine(OtherSeed, same=False)
