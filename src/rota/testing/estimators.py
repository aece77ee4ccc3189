"""What every estimator must do with the replies of a round.

Each check takes an estimator. It raises AssertionError with a sentence that says what the estimator
did wrong.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rota.arrays import Array
from rota.estimate import Correcting, Estimate, Estimator, Recalling, Tensors
from rota.plan import Chunk, Plan
from rota.policies import EVERYTHING, sees
from rota.sampling.draw import everybody
from rota.testing.replies import chunk
from rota.testing.samplers import arrays_only, name, through_a_checkpoint
from rota.weights import Weights

SHARES = np.array([[0.15, 0.25, 0.1, 0.5], [0.6, 0.4, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
SIZES = ((5, 2), (3, 0), (2, 1))
"""The parameters and buffers of three models."""
CLOSE = 1e-9


class Replies(NamedTuple):
    """What every client would send: for each model, updates and buffers [clients, ...]."""

    update: list[Tensor]
    buffers: list[Tensor]


def check_estimator(estimator: Estimator, exact: bool = True) -> None:
    """Put an estimator through all checks; AssertionError says what it did wrong.

    `exact` is whether its estimate of full participation, in a first round, is the weighted sum of
    all updates: set it to false for an estimator that is no sum, such as a median. The expectation
    of its estimates is checked only if `estimator.unbiased` is true.
    """
    for check in CHECKS:
        check(copy.deepcopy(estimator))
    if exact:
        check_full_participation(estimator)
    if getattr(estimator, "unbiased", False):
        check_unbiased(estimator)
        check_unbiased_failures(estimator)


# --- playing rounds


def models() -> list[Weights]:
    """Three models of different sizes."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for size in SIZES:
        params, buffers = (_random(generator, number) for number in size)
        out.append(Weights(params, buffers))
    return out


def replies(seed: int) -> Replies:
    """Unequal updates and buffers of all clients."""
    generator, clients = torch.Generator().manual_seed(seed), SHARES.shape[1]
    update = [_random(generator, clients, params) + 0.5 for params, _ in SIZES]
    return Replies(update, [_random(generator, clients, buffers) for _, buffers in SIZES])


def some_rows(probability: float = 0.5) -> Plan:
    """A plan with some rows of the first two models, and none of the third."""
    client, model = np.array([3, 0, 1, 1]), np.array([0, 0, 1, 0])
    chance = np.full(4, probability)
    return Plan(client, model, chance, SHARES[model, client] / chance)


def chunks(plan: Plan, sent: Replies, failed: Sequence[int] = ()) -> list[Chunk]:
    """The replies of a plan's rows, one chunk per model."""
    out = []
    for s in np.unique(plan.model).tolist():
        rows = np.flatnonzero(plan.model == s)
        client = torch.from_numpy(plan.client[rows])
        update, buffers = sent.update[s][client].clone(), sent.buffers[s][client].clone()
        reason = ["the test made it fail" if row in failed else "" for row in rows.tolist()]
        for place in np.flatnonzero(np.isin(rows, failed)).tolist():
            update[place] = buffers[place] = torch.nan
        out.append(chunk(rows, s, update, buffers, reason=reason))
    return out


def estimate(
    estimator: Any, state: Tensors, plan: Plan, parts: Sequence[Chunk]
) -> tuple[list[Estimate], Tensors]:
    """The estimates of a round in which these chunks arrive, and the state after it."""
    sums = estimator.begin(state, models(), plan)
    for part in parts:
        estimator.add(sums, plan, part)
    estimates, after = estimator.finish(state, sums)
    return list(estimates), after


def probed(estimator: Any, state: Tensors, sent: Replies, shares: Array = SHARES) -> Tensors:
    """The state after all clients trained before the draw, if the estimator learns from that."""
    if isinstance(estimator, Recalling) and getattr(estimator, "fits", False):
        rows = everybody(shares)
        for part in chunks(rows, sent):
            _, state = estimator.residual(state, rows, part)
    return state


def experienced(estimator: Estimator) -> Tensors:
    """The state after three rounds, in which most pairs have replied."""
    state = estimator.init(models(), SHARES.copy())
    for seed in range(3):
        sent, all_rows = replies(seed), everybody(SHARES)
        plan = all_rows.of(np.arange(len(all_rows))[seed != np.arange(len(all_rows)) % 3])
        state = probed(estimator, state, sent)
        _, state = estimate(estimator, state, plan, chunks(plan, sent))
    return state


# --- the checks


def check_declarations(estimator: Estimator) -> None:
    """The methods are there, and `sees` is {"update"} or empty."""
    me = name(estimator)
    for method in ("init", "begin", "add", "finish"):
        assert callable(getattr(estimator, method, None)), f"{me} has no method `{method}`"
    declared = set(sees(estimator))
    assert declared == EVERYTHING or declared <= {"update"}, (
        f"{me} declares {sorted(declared)} in `sees`: an estimator can only see 'update'"
    )


def check_shapes(estimator: Estimator) -> None:
    """The estimates are like the models, and finite."""
    for state in (estimator.init(models(), SHARES.copy()), experienced(estimator)):
        plan, sent = everybody(SHARES), replies(5)
        found, _ = estimate(estimator, probed(estimator, state, sent), plan, chunks(plan, sent))
        assert len(found) == len(SIZES), (
            f"{name(estimator)} gives {len(found)} estimates for {len(SIZES)} models"
        )
        for s, (model, one) in enumerate(zip(models(), found, strict=True)):
            for what, like in (("update", model.params), ("buffers", model.buffers)):
                value = getattr(one, what)
                assert isinstance(value, Tensor), (
                    f"{name(estimator)} gives no {what} for model {s}, which all clients trained"
                )
                assert (value.shape, value.dtype) == (like.shape, like.dtype), (
                    f"{name(estimator)} gives for model {s} an {what} of shape "
                    f"{tuple(value.shape)} and {value.dtype}, not {tuple(like.shape)}, {like.dtype}"
                )
                assert torch.isfinite(value).all(), (
                    f"{name(estimator)} gives for model {s} an {what} that is not finite"
                )


def check_full_participation(estimator: Estimator) -> None:
    """In a first round, full participation with the shares as weights gives the exact sum."""
    plan, sent = everybody(SHARES), replies(5)
    state = probed(estimator, estimator.init(models(), SHARES.copy()), sent)
    found, _ = estimate(estimator, state, plan, chunks(plan, sent))
    for s, one in enumerate(found):
        weight = torch.from_numpy(SHARES[s])
        for what, parts in (("update", sent.update[s]), ("buffers", sent.buffers[s])):
            sentence = f"the {what} by {name(estimator)} of full participation for model {s}"
            _close(getattr(one, what), weight @ parts, sentence, "the sum of share * reply")


def check_order(estimator: Estimator) -> None:
    """The order of chunks, and how rows are cut into chunks, make no difference."""
    plan, sent = some_rows(), replies(6)
    whole = chunks(plan, sent)
    first = whole[0]
    cut = [first.of(np.array([2])), *whole[1:], first.of(np.array([1, 0]))]
    for state in _states(estimator, sent):
        one, two = (
            estimate(estimator, copy.deepcopy(state), plan, parts)[0] for parts in (whole, cut)
        )
        _alike(one, two, f"{name(estimator)} depends on the order of chunks, or on their size")


def check_failures(estimator: Estimator) -> None:
    """Failed rows are left out, whatever they contain."""
    plan, sent = some_rows(), replies(6)
    for failed in ((1,), (0, 1, 3), (0, 1, 2, 3)):
        rest = [
            part.of(np.flatnonzero(part.ok)) for part in chunks(plan, sent, failed) if part.ok.any()
        ]
        for state in _states(estimator, sent):
            one, after = estimate(estimator, copy.deepcopy(state), plan, chunks(plan, sent, failed))
            two, _ = estimate(estimator, copy.deepcopy(state), plan, rest)
            _alike(one, two, f"{name(estimator)} does not leave failed rows out")
            for key, value in after.items():
                same = key in state and torch.isfinite(torch.as_tensor(state[key])).all()
                assert not same or torch.isfinite(torch.as_tensor(value)).all(), (
                    f"a failed row made state['{key}'] of {name(estimator)} infinite or NaN"
                )


def check_no_rows(estimator: Estimator) -> None:
    """A model without replies has no estimate, as long as nothing of it is remembered."""
    plan, sent = some_rows(), replies(6)
    state = probed(estimator, estimator.init(models(), SHARES.copy()), sent)
    for parts, without in (([], (0, 1, 2)), (chunks(plan, sent), (2,))):
        found, _ = estimate(estimator, state, plan, parts)
        for s in without:
            assert found[s].update is None and found[s].buffers is None, (  # noqa: PT018
                f"{name(estimator)} gives an estimate for a model that no client trained: give "
                "Estimate(None, None), which leaves the model as it is"
            )


def check_state(estimator: Estimator) -> None:
    """The state is a dict of tensors, and holds all that the estimator remembers."""
    me, fresh, sent, plan = name(estimator), copy.deepcopy(estimator), replies(6), some_rows()
    state = experienced(estimator)
    arrays_only(me, state)
    resumed = through_a_checkpoint(state)
    one, _ = estimate(estimator, probed(estimator, state, sent), plan, chunks(plan, sent))
    two, _ = estimate(fresh, probed(fresh, resumed, sent), plan, chunks(plan, sent))
    _alike(one, two, f"{me} estimates something else after a resume", 0.0)


def check_an_abandoned_round(estimator: Estimator) -> None:
    """A round that is abandoned and played again gives the same as if it had been played once."""
    plan, sent, me = some_rows(), replies(6), name(estimator)
    for state in _states(estimator, sent):
        untouched = copy.deepcopy(state)
        estimate(estimator, state, plan, chunks(plan, replies(7)))
        one, after = estimate(estimator, state, plan, chunks(plan, sent))
        two, other = estimate(estimator, untouched, plan, chunks(plan, sent))
        _alike(one, two, f"an abandoned round changed the state that {me} was given", 0.0)
        again, _ = estimate(estimator, after, plan, chunks(plan, replies(8)))
        twice, _ = estimate(estimator, other, plan, chunks(plan, replies(8)))
        _alike(again, twice, f"an abandoned round changed what {me} remembers", 0.0)


def check_chunks_are_not_kept(estimator: Estimator) -> None:
    """An engine may use the memory of a chunk again."""
    plan, sent = some_rows(), replies(6)
    for state in _states(estimator, sent):
        found = []
        for spoil in (False, True):
            mine = copy.deepcopy(state)
            sums = estimator.begin(mine, models(), plan)
            for part in chunks(plan, sent):
                estimator.add(sums, plan, part)
                if spoil:
                    part.update.fill_(torch.nan)
                    part.buffers.fill_(torch.nan)
            one, after = estimator.finish(mine, sums)
            two, _ = estimate(estimator, after, plan, chunks(plan, replies(7)))
            found.append([*one, *two])
        sentence = f"{name(estimator)} keeps a chunk that was added: copy what it needs"
        _alike(found[0], found[1], sentence, 0.0)


def check_sees(estimator: Estimator) -> None:
    """An estimator that sees nothing of single rows depends only on weighted sums."""
    if "update" in set(sees(estimator)):
        return
    plan, sent = some_rows(), replies(6)
    state = experienced(estimator)
    other = Replies([u.clone() for u in sent.update], [b.clone() for b in sent.buffers])
    for s in (0, 1):
        rows = np.flatnonzero(plan.model == s)
        if len(rows) < 2:
            continue
        one, two = rows[:2]
        for values in (other.update[s], other.buffers[s]):
            if values.shape[1]:  # the weighted sum stays as it is
                values[plan.client[one]] += 3.0
                values[plan.client[two]] -= 3.0 * plan.weight[one] / plan.weight[two]
    first, second = (estimate(estimator, state, plan, chunks(plan, r))[0] for r in (sent, other))
    sentence = (
        f"{name(estimator)} depends on more than weighted sums: declare `sees` = {{'update'}}"
    )
    _alike(first, second, sentence, 1e-8)


def check_norms(estimator: Any) -> None:
    """Before the draw, `residual` gives the norms of what `add` weighs."""
    if not isinstance(estimator, Recalling):
        return
    sent, plan = replies(6), everybody(SHARES)
    for state in _states(estimator, sent):
        sums = estimator.begin(state, models(), plan)  # type: ignore[attr-defined]
        for part in chunks(plan, sent):
            before, _ = estimator.residual(state, plan, part)
            norms = estimator.add(sums, plan, part)  # type: ignore[attr-defined]
            assert np.allclose(before, norms, rtol=1e-6, atol=1e-12), (
                f"`residual` and `add` of {name(estimator)} give different norms for the same rows"
            )


def check_local(estimator: Any) -> None:
    """The vectors of local work have one row for each row that they are asked for."""
    if not isinstance(estimator, Correcting):
        return
    me, plan = name(estimator), some_rows()
    for state in _states(estimator, replies(6)):
        local = estimator.local(state, models(), plan)
        for s in (0, 1):
            rows, size = np.flatnonzero(plan.model == s), SIZES[s]
            vectors = {"anchor": local.anchor, "shift": local.shift}
            found = {what: f(rows) for what, f in vectors.items() if f is not None}
            if local.start is not None:
                start = local.start(rows)
                found["start"] = start.params
                assert tuple(start.buffers.shape) == (len(rows), size[1]), (
                    f"`local` of {me} starts rows with buffers of the shape "
                    f"{tuple(start.buffers.shape)}, not {(len(rows), size[1])}"
                )
            for what, values in found.items():
                assert tuple(values.shape) == (len(rows), size[0]), (
                    f"`local` of {me} gives a {what} of the shape {tuple(values.shape)}, not "
                    f"{(len(rows), size[0])}"
                )


CHECKS: tuple[Callable[[Any], None], ...] = (
    check_declarations,
    check_shapes,
    check_order,
    check_failures,
    check_no_rows,
    check_state,
    check_an_abandoned_round,
    check_chunks_are_not_kept,
    check_sees,
    check_norms,
    check_local,
)
"""The checks that every estimator must pass."""


def check_unbiased(estimator: Estimator) -> None:
    """Over all draws of independent coins, the mean estimate is full participation's, exactly."""
    shares = SHARES[:2]
    pairs = everybody(shares)
    chance = np.linspace(0.3, 0.8, len(pairs))
    sent = replies(9)
    for state in (estimator.init(models(), SHARES.copy()), experienced(estimator)):
        known = probed(estimator, state, sent)
        mean = [torch.zeros(params, dtype=torch.float64) for params, _ in SIZES[:2]]
        for coins in itertools.product([False, True], repeat=len(pairs)):
            drawn = np.flatnonzero(coins)
            weight = pairs.weight / chance
            plan = replace(pairs, probability=chance, weight=weight).of(drawn)
            found, _ = estimate(estimator, copy.deepcopy(known), plan, chunks(plan, sent))
            likely = float(np.prod(np.where(coins, chance, 1 - chance)))
            for s in range(len(mean)):
                update = found[s].update
                mean[s] += likely * (0.0 if update is None else update)
        for s, value in enumerate(mean):
            _close(
                value,
                torch.from_numpy(shares[s]) @ sent.update[s],
                f"{name(estimator)} says that it is unbiased, but the mean of its estimates for "
                f"model {s} over all draws",
                "full participation's",
            )


def check_unbiased_failures(estimator: Estimator) -> None:
    """Over all ways to fail, with equal chances, the mean is the estimate if no row fails.

    A model without any row that succeeded has no estimate, so these cases do not count.
    """
    plan, sent, chance = some_rows(), replies(9), 0.6
    for state in _states(estimator, sent):
        right, _ = estimate(estimator, copy.deepcopy(state), plan, chunks(plan, sent))
        mean = [torch.zeros(params, dtype=torch.float64) for params, _ in SIZES[:2]]
        total = np.zeros(len(mean))
        for ok in itertools.product([False, True], repeat=len(plan)):
            failed = np.flatnonzero(~np.array(ok)).tolist()
            found, _ = estimate(estimator, copy.deepcopy(state), plan, chunks(plan, sent, failed))
            likely = float(np.prod(np.where(ok, chance, 1 - chance)))
            for s in np.unique(plan.model[list(ok)]).tolist():
                mean[s] += likely * found[s].update
                total[s] += likely
        for s, value in enumerate(mean):
            expected = right[s].update
            assert isinstance(expected, Tensor), f"{name(estimator)} gives no update for model {s}"
            _close(
                value / total[s],
                expected,
                f"{name(estimator)} says that it is unbiased, but the mean of its estimates for "
                f"model {s} over who fails",
                "the one in which nobody fails",
            )


# --- small tools


def _states(estimator: Any, sent: Replies) -> list[Tensors]:
    """The states that a round may begin from: the first one, and one after some rounds."""
    first = estimator.init(models(), SHARES.copy())
    return [probed(estimator, state, sent) for state in (first, experienced(estimator))]


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _close(value: Any, expected: Tensor, what: str, which: str) -> None:
    assert isinstance(value, Tensor), f"{what} is {value}, not a tensor"
    away = float((value - expected).abs().max()) if expected.numel() else 0.0
    assert away <= CLOSE * (1 + float(expected.abs().max() if expected.numel() else 0.0)), (
        f"{what} is {value.tolist()}, and {which} is {expected.tolist()}"
    )


def _alike(
    one: Sequence[Estimate], two: Sequence[Estimate], sentence: str, within: float = CLOSE
) -> None:
    """Refuse estimates that differ; `within` 0 means to the bit."""
    for first, second in zip(one, two, strict=True):
        for what in ("update", "buffers"):
            mine, other = getattr(first, what), getattr(second, what)
            same = (mine is None) == (other is None)
            if same and mine is not None and other is not None and mine.numel():
                same = bool(((mine - other).abs() <= within * (1 + mine.abs())).all())
            assert same, f"{sentence}: {mine} became {other}"
