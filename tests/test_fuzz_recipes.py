"""Mutated recipes and --set words: each is one sentence, or a run that repeats itself."""

from __future__ import annotations

import copy
import os
import random
import signal
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tomli_w
from test_cli import call

from rota import loop, recipe
from rota.engine import make
from rota.errors import BadInput
from rota.policies import KINDS
from rota.recipe import registry
from rota.recipe.config import parse
from rota.running.check import check

RECIPES = ["fedavg-digits", "mmfl-digits", "kvib-synthetic"]
CASES = int(os.environ.get("ROTA_CASES", "2000"))
"""How many configurations `make test-faults` tries."""
SECONDS = 60
"""The most of a processor's time that one configuration may take."""
VALUES: list[Any] = [
    *(0, 1, 2, -1, 3, 5, 7, 64, 10**6, 10**9, 10**12, 2**31, 2**62, 2**63 - 1, 2**63, 10**30),
    *(0.0, 0.5, 1.0, 1.5, -0.5, 1e-9, 1e-300, 5e-324, 1e300, 1.7e308, 1e30, -0.0),
    *(float("nan"), float("inf"), float("-inf"), True, False, "", "a", "all", "x" * 300, "\0", "é"),
    *([], [1], [0.5, 0.5], [[1]], ["a"], [1, 2, 3], {}, {"name": "a"}, {"a": {"b": 1}}),
    *(
        "builtins:dict",
        "os:system",
        "math:sin",
        "json:loads",
        ":",
        "a:b",
        "..:x",
        "torch.nn:Linear",
    ),
    *(
        "../../etc/passwd",
        "-1",
        "1e400",
        "nan",
        "[",
        "{",
        '"',
        "=",
        "task",
        "0",
        "a.b",
        " ",
        "None",
    ),
]


def names() -> list[str]:
    return [name for members in registry.kinds().values() for name in members]


def keys() -> list[str]:
    """Every key that a recipe can have, and some that none can."""
    found = [*recipe.top_keys(), "nothing", "", "a b", "task"]
    for key, kind in KINDS.items():
        for member in kind.members.values():
            found += [
                f"{key}.{option}" for option in registry.options(registry.listed(key), member)
            ]
    found += [f"task.{key}" for key in recipe.TASK_KEYS]
    for key, listed in registry.FIELDS.items():
        for member in registry.members(listed).values():
            found += [f"task.{key}.{option}" for option in registry.options(listed, member)]
    return [*found, *(key.replace("task.", "task.0.") for key in found)]


KEYS, NAMES = sorted(set(keys())), names()


def word(chance: random.Random) -> str:
    """A --set word."""
    key, value = chance.choice(KEYS), chance.choice([*VALUES, *NAMES])
    if chance.random() < 0.3:
        naming = ["sampler", "estimator", "server", "task.model", "task.data", "task.partition"]
        key, value = chance.choice(naming), chance.choice(NAMES)
    if chance.random() < 0.05:
        return "".join(chance.choice("ab.=[]{}\"'01,:+-\n\0 ") for _ in range(chance.randrange(12)))
    if isinstance(value, str):
        return f"{key}={value}"
    return f"{key}={tomli_w.dumps({'v': value})[4:].strip()}"


def places(config: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a nested value."""
    found, waiting = [], [config]
    while waiting:
        each = waiting.pop()
        for key in each if isinstance(each, dict) else range(len(each)):
            found.append((each, key))
            if isinstance(each[key], dict | list):
                waiting.append(each[key])
    return found


def mutated(config: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """The config with some values replaced, removed, doubled, renamed or moved."""
    new = copy.deepcopy(config)
    for _ in range(chance.choice((1, 1, 2, 3))):
        some = places(new)
        if not some:
            return new
        inside, key = chance.choice(some)
        other, more = chance.choice(some)
        match chance.randrange(5):
            case 0 | 1:
                inside[key] = copy.deepcopy(chance.choice([*VALUES, *NAMES]))
            case 2:
                del inside[key]
            case 3:
                inside[key] = copy.deepcopy(other[more]) if more in other else 0
            case _ if isinstance(inside, dict):
                inside[chance.choice(KEYS).rpartition(".")[2]] = inside.pop(key)
            case _:
                inside.append(copy.deepcopy(inside[key]))
    return new


def scribbled(text: str, chance: random.Random) -> str:
    """A TOML text with some characters changed, cut out or doubled."""
    for _ in range(chance.choice((1, 2, 5))):
        at, n = chance.randrange(len(text) + 1), chance.randrange(1, 30)
        match chance.randrange(3):
            case 0:
                text = text[:at] + chance.choice("[]{}=\"'.,#\n0e-_ \0é") + text[at + 1 :]
            case 1:
                text = text[:at] + text[at + n :]
            case _:
                text = text[:at] + text[at : at + n] + text[at:]
    return text


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail if a block computes for longer; waiting for a busy machine does not count."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Tried:
    """Configurations from a seed, and what became of them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.refused = self.accepted = self.played = 0
        self.starts = [recipe.read(name) for name in RECIPES]

    def one(self, play: bool) -> None:
        """Make a configuration, and go as far as it goes."""
        chance = self.chance
        config, words = copy.deepcopy(chance.choice(self.starts)), list[str]()
        config["rounds"] = 2
        kind = chance.randrange(4)
        try:
            if kind == 0:
                config = parse(scribbled(tomli_w.dumps(config), chance), "x.toml")
            elif kind == 1:
                config = mutated(config, chance)
            for _ in range(chance.choice((1, 1, 2, 3)) if kind > 1 else 0):
                words.append(word(chance))
                config = recipe.override(config, words[-1])
            self.run(config, play)
            self.accepted += 1
        except BadInput as mistake:
            self.refused += 1
            text = str(mistake)
            assert 10 < len(text) < 1500, text
            assert "Traceback" not in text
            assert "\n" not in text.strip(), text
        except BaseException as error:
            error.add_note(f"from {config!r:.3000} with {words}")
            raise

    def run(self, config: dict[str, Any], play: bool) -> None:
        resolved = recipe.resolve(config)
        again = tomllib.loads(tomli_w.dumps(resolved))
        assert recipe.resolve(again) == resolved, "config.toml says something else"
        experiment = recipe.build(resolved)
        check(experiment)
        experiment.sampler.init(experiment.shares, experiment.rounds)
        size = sum(
            len(task.federation.train.x) * (task.steps or task.epochs) for task in experiment.tasks
        )
        if play and size < 50_000:
            self.played += 1
            machine = make("sequential", experiment, "cpu")
            state, _ = loop.play(experiment, machine, loop.begin(experiment, machine))
            for model in state.models:
                assert model.params.isfinite().all()


def fuzz(number: int, every: int) -> Tried:
    seed = int(os.environ.get("ROTA_FUZZ", random.randrange(2**32)))
    print(f"seed {seed}: to repeat it, set ROTA_FUZZ={seed}")
    tried = Tried(seed)
    for n in range(number):
        with within(SECONDS):
            tried.one(play=n % every == 0)
    print(f"{tried.refused} refused, {tried.accepted} accepted, {tried.played} played")
    return tried


def test_configurations_at_random() -> None:
    assert fuzz(150, every=10).refused > 50


@pytest.mark.faults
def test_many_configurations_at_random() -> None:
    tried = fuzz(CASES, every=5)
    assert tried.refused > CASES / 2
    assert tried.accepted > CASES / 40
    assert tried.played > CASES / 400


def test_the_command_line_takes_words_at_random(tmp_path: Any) -> None:
    """Through the command line itself: status 2 and one sentence, or a run."""
    seed = int(os.environ.get("ROTA_FUZZ", random.randrange(2**32)))
    print(f"seed {seed}: to repeat it, set ROTA_FUZZ={seed}")
    chance = random.Random(seed)
    for number in range(30):
        chosen = word(chance)
        words = ("fedavg-digits", "--set", "rounds=nothing", "--set", chosen)
        with within(SECONDS):
            outcome = call("run", *words, "--out", tmp_path / str(number))
        assert outcome.status == 2, chosen
        assert outcome.err.startswith("rota: "), chosen
        assert outcome.err.count("\n") == 1, chosen
