"""The command line: output, exit statuses, progress, completion, and Ctrl-C in a real process."""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import rota
from rota import cli, data, engine, loop, recipe
from rota.cli import app as commands
from rota.cli import output as cli_output
from rota.cli import progress
from rota.recipe import registry
from rota.running import choices
from rota_lab import reproduce
from rota_lab.reproduce import Result, over_seeds

PROGRAM = Path(sys.executable).with_name("rota")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
COMMANDS = ["run", "list", "compare", "report", "reproduce", "bench", "doctor"]
COMMANDS += ["demo", "serve", "client", "keys"]
SMALL = ("fedavg-digits", "--set", "rounds=2")


@dataclass(frozen=True)
class Outcome:
    status: int
    out: str
    err: str


def call(*words: object) -> Outcome:
    """One command, in this process."""
    arguments = [str(word) for word in words]
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(sys, "argv", ["rota", *arguments]),
    ):
        status = commands.status(arguments)
    return Outcome(status, out.getvalue(), err.getvalue())


def lines(folder: Path) -> list[dict[str, object]]:
    """The whole lines of a run's rounds.jsonl."""
    text = (folder / "rounds.jsonl").read_text() if (folder / "rounds.jsonl").exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run's folder."""
    folder = tmp_path_factory.mktemp("runs") / "done"
    outcome = call("run", *SMALL, "--out", folder)
    assert outcome.status == 0, outcome.err
    return folder


def test_a_run_says_how_it_ended_and_where_its_report_is(done: Path) -> None:
    outcome = call("run", *SMALL, "--out", done, "--resume")
    result, own, report = outcome.out.splitlines()
    last = lines(done)[-1]
    assert outcome.status == 0
    assert own.startswith(f"clients on their own test sets: mean {last['own_mean']:.2%}, worst ")
    assert result == f"accuracy {last['accuracy']:.2%}, loss {last['loss']:.4f} after 2 rounds"
    assert report == f"report: {done / 'report.html'}"
    assert (done / "report.html").read_text().startswith("<!doctype html>")
    assert {"config.toml", "rounds.jsonl", "summary.json", "checkpoint", "report.html"} <= {
        path.name for path in done.iterdir()
    }


def test_a_finished_run_takes_more_rounds(done: Path, tmp_path: Path) -> None:
    folder = tmp_path / "more"
    shutil.copytree(done, folder)
    resume = ["run", folder / "config.toml", "--out", folder, "--resume"]
    outcome = call(*resume, "--set", "rounds=3")
    assert outcome.status == 0
    assert "after 3 rounds" in outcome.out
    assert lines(folder)[:2] == lines(done)
    assert len(lines(folder)) == 3
    assert tomllib.loads((folder / "config.toml").read_text())["rounds"] == 3
    assert call(*resume).status == 0, "config.toml is what resumes it"
    outcome = call(*resume, "--set", "rounds=2")
    assert outcome.status == 2
    assert "rounds is 2, but the run has already played 3: set rounds to at least 3" in outcome.err


def test_json_is_alone_on_standard_output(tmp_path: Path) -> None:
    outcome = call("run", *SMALL, "--out", tmp_path / "a", "--json")
    summary = json.loads(outcome.out)
    assert outcome.status == 0
    assert summary["rounds"] == 2
    assert summary["folder"] == str(tmp_path / "a")
    assert (
        summary["accuracy"] == json.loads((tmp_path / "a" / "summary.json").read_text())["accuracy"]
    )
    assert "round 2/2" in outcome.err


def test_a_run_of_several_models_says_how_each_of_them_does(done: Path, tmp_path: Path) -> None:
    outcome = call(
        "run", "mmfl-digits", "--set", "rounds=4", "--set", "evaluate=2", "--out", tmp_path / "a"
    )
    assert outcome.status == 0, outcome.err
    mean, each, _ = outcome.out.splitlines()
    untested, tested = lines(tmp_path / "a")[2:]
    accuracies = {name: model["accuracy"] for name, model in tested["models"].items()}
    worst, spread = min(accuracies.values()), np.std(list(accuracies.values()))
    assert (tested["worst_accuracy"], tested["accuracy_spread"]) == (worst, pytest.approx(spread))
    assert untested["worst_accuracy"] is untested["accuracy_spread"] is None
    assert mean.endswith("on average over 3 models after 4 rounds")
    assert (
        each
        == ", ".join(f"{name} {value:.2%}" for name, value in accuracies.items())
        + f"; worst {worst:.2%}, spread {spread:.2%}"
    )
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert (summary["worst_accuracy"], summary["accuracy_spread"]) == (worst, pytest.approx(spread))
    alone = json.loads((done / "summary.json").read_text())
    assert {"worst_accuracy", "accuracy_spread"}.isdisjoint({*alone, *lines(done)[-1]})


def test_a_comparison_says_which_seeds_run_cannot_begin(tmp_path: Path) -> None:
    settings = [
        "rounds=1",
        "seed=1",
        "task.partition.missing=0.3",
        "sampler.processors=1",
        "sampler.budget=29",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    outcome = call(
        "compare",
        "mmfl-digits",
        *words,
        "--vary",
        "sampler=mmfl-kvib",
        "--seeds",
        2,
        "--out",
        tmp_path / "a",
    )
    assert (outcome.status, outcome.out) == (2, "")
    said = outcome.err.splitlines()[-1]
    which, _, why = said.partition(": sampler.budget is ")
    assert which == "rota: the run 'mmfl-kvib-seed2'"
    assert why.startswith("29 draws per round, but clients can do 28")


@pytest.mark.parametrize("name", ["mmfl-digits", "mmfl-fashion"])
def test_the_recipes_of_several_models_have_tasks_of_their_own_on_the_same_clients(
    name: str,
) -> None:
    config = recipe.resolve(recipe.read(name))
    if not data.at_hand(config["task"][0]["data"]["name"]):
        pytest.skip("the data are not on this machine: set ROTA_DATA to the folder that holds them")
    seeds = [recipe.build({**config, "seed": seed}) for seed in range(5)]
    experiment, shares = seeds[0], seeds[0].shares
    assert all(
        (each.shares > 0).any(axis=0).all() and each.shares.tolist() != shares.tolist()
        for each in seeds[1:]
    )
    clients, large = (
        shares.shape[1],
        round(config["task"][0]["partition"]["high"] * shares.shape[1]),
    )
    assert len(shares) == 3
    lacking = (shares == 0).sum(axis=0)
    assert lacking.max() == 1  # some lack one model, none two
    assert 0.05 < (lacking > 0).mean() < 0.25
    for row in shares:
        assert (
            row[: clients - large].max() < row[clients - large :][row[clients - large :] > 0].min()
        )
    labels = [task.data.train.label_counts(10) > 0 for task in experiment.tasks]
    assert max(counts.sum(axis=1).max() for counts in labels) == 3
    assert not any((labels[0] == other).all(axis=1).mean() > 0.2 for other in labels[1:])


def test_numbers_that_json_does_not_have_become_null(capsys: pytest.CaptureFixture[str]) -> None:
    cli_output.print_json({"loss": float("nan"), "bound": [float("inf"), 1.5], "name": "NaN"})
    assert json.loads(capsys.readouterr().out) == {
        "loss": None,
        "bound": [None, 1.5],
        "name": "NaN",
    }


def test_a_run_without_out_gets_a_folder_named_after_the_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("run", *SMALL).status == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"fedavg-digits-\d{8}-\d{6}", folder.name)
    assert call("run", folder / "config.toml").status == 0
    assert len(list((tmp_path / "runs").glob(f"{folder.name}-*"))) == 1


def test_no_arguments_is_a_question_for_help() -> None:
    assert call("--help").out.startswith("Usage: rota")
    with (
        mock.patch.object(sys, "argv", ["rota"]),
        mock.patch.object(cli.signal, "signal"),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    assert ended.value.code == 0


@pytest.mark.parametrize(
    "command",
    [[], *([command] for command in COMMANDS)],
    ids=lambda words: " ".join(words) or "rota",
)
def test_help_fits_80_columns_and_keeps_its_examples_apart(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    outcome = call(*command, "-h")
    text = outcome.out.splitlines()
    assert outcome.status == 0
    assert outcome.err == ""
    assert max(map(len, text)) <= 80
    if not command:
        assert all(any(line.startswith(f"  {name} ") for line in text) for name in COMMANDS)
        assert "..." not in outcome.out.replace("[ARGS]...", "")  # no summary is cut off
        return
    start = text.index("  Examples:") + 1
    examples = text[start : text.index("", start)]
    assert examples
    for example in examples:
        program, name, *_ = shlex.split(example)
        assert (program, name) == ("rota", *command)


@pytest.mark.parametrize(
    ("words", "current", "offered"),
    [
        ("rota run fed", "fed", {"fedavg-digits", "fedavg-mnist", "fedprox-synthetic"}),
        ("rota compare heart", "heart", {"heart-hospitals"}),
        ("rota list samp", "samp", {"samplers"}),
        ("rota reproduce gd", "gd", {"gd-bound"}),
        ("rota run fedavg-digits --engine seq", "seq", {"sequential"}),
        ("rota comp", "comp", {"compare"}),
    ],
)
def test_the_shell_completes(
    words: str, current: str, offered: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_ROTA_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as ended:
        commands.status([])
    assert ended.value.code == 0
    found = set(out.getvalue().split())
    assert offered <= found
    assert all(word.startswith(current) for word in found)


SCRIPT = """
source <(_ROTA_COMPLETE=source_bash rota)
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_rota_completion rota
printf '%s\\n' "${COMPREPLY[@]}"
"""
"""What bash does when somebody presses the tab key; it splits words at "="."""


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("fedavg-digits --set sampler.b", ["sampler.budget=", "sampler.budget=5"]),
        ("fedavg-digits --set sampler = kvi", ["kvib", "kvib-full"]),
        ("fedavg-digits --set sampler = kvib --set sampler.g", ["sampler.gamma="]),
        ("fedavg-digits --set task.0.opt", ["task.0.optimizer=", "task.0.optimizer=sgd"]),
        ("fedavg-digits --set task.optimizer = ", ["sgd", "adam", "adamw"]),
        ("fedavg-digits --set task.nesterov = t", ["true"]),
        ("fedavg-digits --engine = seq", ["sequential"]),
        ("none.toml --set round", ["rounds="]),
        ("fedavg-digits --vary estimator = unbiased,fedav", ["unbiased,fedavg"]),
        ("fedavg-digits --vary estimator = fedavg,fedav", []),
        (
            "fedavg-digits --vary task.partition.c",
            ["task.partition.clients=", "task.partition.clients=20"],
        ),
    ],
)
def test_bash_completes_settings_without_torch(
    words: str, offered: list[str], tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch is loaded')\n")
    path = f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}"
    command = "compare" if "--vary" in words else "run"
    done = subprocess.run(
        ["bash", "-c", SCRIPT, "bash", "rota", command, *words.split(" ")],
        env=in_front(tmp_path) | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stderr == ""
    found = done.stdout.split()
    assert found[: len(offered)] == offered
    assert bool(found) == bool(offered)


def test_an_engine_is_one_entry_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(engine.ENGINES) == list(choices.ENGINES)
    known = f"--engine {'|'.join(['auto', *engine.ENGINES])}"
    assert known in call("run", "--help").out
    assert "'third' is not one of auto, " in call("run", *SMALL, "--engine", "third").err
    monkeypatch.setitem(choices.ENGINES, "third", choices.ENGINES["sequential"])
    monkeypatch.setitem(
        engine.ENGINES, "third", mock.Mock(make=mock.Mock(side_effect=ValueError("it ran")))
    )
    assert "ValueError: it ran" in call("run", *SMALL, "--engine", "third").err


def test_completion_works_in_a_process_of_its_own() -> None:
    more = {"_ROTA_COMPLETE": "complete_bash", "COMP_WORDS": "rota run fedp", "COMP_CWORD": "2"}
    done = subprocess.run(
        [PROGRAM], env=ENVIRONMENT | more, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["fedprox-synthetic"], "")


def test_the_package_is_a_command_too() -> None:
    words = [sys.executable, "-m", "rota", "--help"]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, call("--help").out, "")


def test_list_names_every_member_of_every_kind() -> None:
    tables = json.loads(call("list", "--json").out)
    options = {entry["name"]: entry.get("options") for table in tables.values() for entry in table}
    assert options["digits"] == ["matched_test", "validation", "seed", "split"]
    assert {"seed", "split"}.isdisjoint(options["folder"])
    assert options["uniform"] == ["budget", "procedure", "fraction"]
    assert "fraction" not in options["full"]
    assert list(tables) == ["recipes", *registry.kinds()]
    assert [entry["name"] for entry in tables["recipes"]] == recipe.names()
    for kind, members in registry.kinds().items():
        assert [entry["name"] for entry in tables[kind]] == list(members)
        assert json.loads(call("list", kind, "--json").out) == tables[kind]
    assert all(entry["summary"] for entries in tables.values() for entry in entries)
    budget = {entry["name"]: entry["options"] for entry in tables["samplers"]}
    assert "budget" in budget["uniform"]
    first = call("list", "samplers").out.splitlines()[1]
    assert first.split(maxsplit=1) == ["uniform", tables["samplers"][0]["summary"]]


def test_list_shows_what_a_member_takes() -> None:
    """Every member and every recipe by its name: the docstring, the facts, the options."""
    for kind, members in registry.kinds().items():
        for name, member in members.items():
            if name == kind:  # a kind with one member
                continue
            found = json.loads(call("list", name, "--json").out)
            (mine,) = (each for each in found if each["kind"] == kind)
            assert mine["text"] == inspect.getdoc(member)
            assert [each["name"] for each in mine["options"]] == [*registry.options(kind, member)]
    shown = call("list", "kvib").out
    assert shown.startswith("kvib (samplers)\n  K-Vib: learns from the update norms")
    assert "unbiased; needs norms of the drawn clients" in shown
    assert re.search(r"budget +default 10; takes a number", shown)
    assert re.search(r"fraction +instead of budget; takes a share of the clients", shown)
    assert re.search(r"file +required; takes a string or a path", call("list", "trace").out)
    assert '[sampler]\n  name = "full"' in call("list", "fluid-digits").out
    assert call("list", "kvip").err == "rota: unknown kind or name 'kvip': did you mean 'kvib'?\n"


def test_the_version() -> None:
    assert call("--version").out == f"rota {rota.__version__}\n"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{shlex.quote(str(PROGRAM))} list | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout == "recipes\n0\n"
    assert done.stderr == ""


def test_progress_that_nobody_reads_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with contextlib.redirect_stderr(Closed()):
        assert commands.status(["run", *SMALL, "--out", str(tmp_path / "a"), "--json"]) == 0


def test_doctor_says_what_is_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = json.loads(call("doctor", "--json").out)
    assert found["packages"]["rota"] == rota.__version__
    assert found["data"]["digits"] == "at hand"
    assert call("doctor").out.startswith("machine\n")
    monkeypatch.setenv("ROTA_DATA", str(tmp_path / "nowhere"))
    outcome = call("doctor")  # a doctor examines; that something is wrong is its result
    assert outcome.status == 0
    assert "nowhere, which is not a folder" in outcome.out


# --- report


@pytest.mark.parametrize("state", ["half a line", "no summary", "no rounds"])
def test_a_run_that_was_cut_off_can_be_reported_on(done: Path, tmp_path: Path, state: str) -> None:
    folder = tmp_path / "cut"
    folder.mkdir()
    for name in ("config.toml", "data.json", "rounds.jsonl"):
        (folder / name).write_bytes((done / name).read_bytes())
    if state == "half a line":
        text = (folder / "rounds.jsonl").read_text()
        (folder / "rounds.jsonl").write_text(text[:-20])
    if state == "no rounds":
        (folder / "rounds.jsonl").unlink()
    outcome = call("report", folder)
    assert (outcome.status, outcome.out) == (0, f"{folder / 'report.html'}\n"), outcome.err
    assert (folder / "report.html").stat().st_size > 10_000


def test_report_of_several_folders_goes_where_it_is_told(done: Path, tmp_path: Path) -> None:
    outcome = call("report", done, done.parent, "--out", tmp_path / "both.html")
    assert (outcome.status, outcome.out) == (0, f"{tmp_path / 'both.html'}\n"), outcome.err
    assert (tmp_path / "both.html").exists()


# --- reproduce


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reproduction that takes no time."""

    def small(quick: bool) -> Result:
        """Two numbers of nobody's paper."""
        rows = [
            over_seeds("rounds to 97 %", 87, [80, 90, 85]),
            over_seeds("accuracy", None, [0.5] if quick else [0.5, 0.7]),
        ]
        return Result(
            "planted",
            "Planted",
            "Some text.",
            rows,
            checks={"it works": True, "it flies": False},
            quick=quick,
        )

    monkeypatch.setitem(reproduce.REPRODUCTIONS, "planted", small)


@pytest.mark.usefixtures("planted")
def test_reproduce_prints_paper_against_measured(tmp_path: Path) -> None:
    outcome = call("reproduce", "planted", "--out", tmp_path)
    table = [re.split(r"\s{2,}", line.strip()) for line in outcome.out.splitlines()]
    assert outcome.status == 0
    assert table[0] == ["paper", "measured", "low", "high", "seeds", "quantity"]
    assert table[1] == ["87", "85", "80", "90", "3", "rounds to 97 %"]
    assert table[2] == ["-", "0.6", "0.5", "0.7", "2", "accuracy"]
    assert outcome.out.splitlines()[3:] == [
        "yes: it works",
        "NO: it flies",
        f"page: {tmp_path / 'planted.md'}",
    ]
    assert (tmp_path / "planted.md").exists()


@pytest.mark.usefixtures("planted")
def test_reproduce_prints_json_for_machines(tmp_path: Path) -> None:
    outcome = call("reproduce", "planted", "--quick", "--json", "--out", tmp_path)
    assert json.loads(outcome.out) == [
        {
            "quantity": "rounds to 97 %",
            "paper": 87,
            "measured": 85.0,
            "low": 80.0,
            "high": 90.0,
            "seeds": 3,
        },
        {
            "quantity": "accuracy",
            "paper": None,
            "measured": 0.5,
            "low": 0.5,
            "high": 0.5,
            "seeds": 1,
        },
    ]
    listed = json.loads(call("reproduce", "--json").out)
    assert {"name": "planted", "summary": "Two numbers of nobody's paper."} in listed
    assert {entry["name"] for entry in listed} == set(reproduce.REPRODUCTIONS)
    assert re.search("^planted +Two numbers", call("reproduce").out, re.M)


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["planted", "--only", "2nn"], "--only is not for planted: leave it out"),
        (["planted", "--minutes", "3"], "--minutes is not for planted: leave it out"),
        (["planted", "--estimate"], "--estimate is not for planted, which is short: leave it out"),
        (
            ["fedavg-table1", "--only", "2n"],
            "--only names '2n', which is in no cell's name: did you mean '2nn'?",
        ),
        (["plantd"], "unknown reproduction 'plantd': did you mean 'planted'?"),
    ],
)
def test_reproduce_refuses_what_it_does_not_take(
    words: list[str], complaint: str, tmp_path: Path
) -> None:
    outcome = call("reproduce", *words, "--out", tmp_path / "a")
    assert (outcome.status, outcome.out, outcome.err) == (2, "", f"rota: {complaint}\n")


def test_reproduce_can_write_what_is_there_and_say_what_is_missing(tmp_path: Path) -> None:
    outcome = call("reproduce", "fedavg-table1", "--minutes", 0, "--json", "--out", tmp_path)
    assert outcome.status == 0
    assert outcome.err == "the time is up: finished parts are kept\n"
    assert json.loads(outcome.out)[0]["measured"] == 0
    assert (tmp_path / "fedavg-table1.md").exists()
    lines = call(
        "reproduce", "fedavg-table1", "--estimate", "--only", "2nn-iid-B10-C0.5"
    ).out.splitlines()
    assert lines[1].split()[:3] == ["2nn-iid-B10-C0.5", "75", "225,000"]


# --- progress


def record(round_: int, accuracy: float | None = 0.5, failures: int = 0) -> dict[str, object]:
    loss = None if accuracy is None else 1.25
    model = {} if accuracy is None else {"accuracy": accuracy, "loss": loss}
    whole = {"accuracy": accuracy, "loss": loss, "models": {"a": model}}
    return {"round": round_, **whole, "cohort": {"a": [1, 2]}, "failures": [{}] * failures}


def test_plain_progress_counts_the_time_left_from_what_this_process_did(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.rounds("title", 100) as watch:
        for round_ in range(
            51, 101
        ):  # resumed at round 50; a second a round, and 3 more for the first
            now += 4 if round_ == 51 else 1
            watch(record(round_, None if round_ % 2 else 0.5, failures=round_ == 53))
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "title: round 51/100  2 clients"
    assert (
        shown[1]
        == "title: round 53/100  accuracy 50.00%  loss 1.2500  2 clients, 1 failed  47 s left"
    )
    assert shown[-1] == "title: round 100/100  accuracy 50.00%  loss 1.2500  2 clients"
    assert len(shown) == 26  # every two seconds, and the last


def test_progress_says_the_scores_of_models_that_are_not_alike() -> None:
    apart = {
        "accuracy": None,
        "loss": None,
        "models": {"a": {"accuracy": 0.5}, "b": {"accuracy": -172.25}, "c": {"accuracy": None}},
    }
    assert progress.scores(apart) == "a 0.5  b -172.2  c not finite"
    assert (
        progress.scores({"accuracy": -3.5, "loss": 3.5, "models": {"a": {"accuracy": -3.5}}})
        == "score -3.5  loss 3.5000"
    )
    assert progress.scores({"accuracy": None, "loss": None, "models": {"a": {"trained": 3}}}) == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (99.4, "99 s"), (100, "2 min"), (5900, "98 min"), (6060, "1 h 41 min")],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert progress.duration(seconds) == words


def test_waiting_says_so_only_once_it_takes_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with progress.waiting("thinking"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with progress.waiting("thinking"):
        time.sleep(0.2)
    assert capsys.readouterr().err == "thinking ...\n"


def on_a_terminal(columns: int, *words: object) -> tuple[int, list[str]]:
    """Run a command in a terminal: its status, and the lines that it showed over one another."""
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [str(word) for word in words], env=ENVIRONMENT, stdin=inside, stdout=inside, stderr=inside
    )
    os.close(inside)
    shown = b""
    with contextlib.suppress(OSError):  # how a terminal says that nobody is left inside
        while block := os.read(terminal, 4096):
            shown += block
    os.close(terminal)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    return process.wait(timeout=120), [
        line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()
    ]


def test_a_person_at_a_terminal_sees_the_rounds_go_by(tmp_path: Path) -> None:
    status, shown = on_a_terminal(
        80, PROGRAM, "run", "fedavg-digits", "--set", "rounds=60", "--out", tmp_path / "a"
    )
    assert status == 0
    assert shown[0] == "loading the data ..."
    assert shown[-1] == f"report: {tmp_path / 'a' / 'report.html'}"
    live = [line for line in shown if line.startswith("fedavg-digits round")]
    assert any(
        re.fullmatch(
            r"fedavg-digits round \d+/60 accuracy [\d.]+%  loss [\d.]+  5 clients \d+ s left", line
        )
        for line in live
    )
    assert re.fullmatch(
        r"fedavg-digits round 60/60 accuracy [\d.]+%  loss [\d.]+  5 clients", live[-1]
    )
    assert max(map(len, live)) <= 80


# --- failure and interruption


def test_a_run_that_fails_says_what_where_and_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "apply", lambda *_: 1 / 0)
    outcome = call("run", *SMALL, "--out", tmp_path / "a b", "--device", "cpu")
    what, again = outcome.err.splitlines()[-2:]
    assert outcome.status == 1
    assert outcome.out == ""
    assert re.match(
        r"rota: the run failed: ZeroDivisionError: division by zero \(test_cli.py, line \d+\)", what
    )
    folder = f"{tmp_path}/a b"
    command = f"rota run '{folder}/config.toml' --out '{folder}' --device cpu --resume"
    assert again == f"rota: to resume: {command}"
    assert "Traceback" not in outcome.err


def test_a_run_that_is_stuck_is_not_to_be_resumed(tmp_path: Path) -> None:
    for resume in ([], ["--resume"]):
        outcome = call(
            "run",
            *SMALL,
            "--set",
            "task.lr=1e30",
            "--out",
            tmp_path / "a",
            "--device",
            "cpu",
            *resume,
        )
        nothing = r"no client's update could be used in \d rounds? \(.*\)"
        help = "a lower lr for 'digits' may help"
        said = rf"rota: the run failed: round \d: {nothing}: {help}"
        assert outcome.status == 1
        assert re.match(said, outcome.err.splitlines()[-1])
        assert "to resume" not in outcome.err


def test_a_comparison_goes_on_without_runs_that_are_stuck(tmp_path: Path) -> None:
    words = [
        "compare",
        *SMALL,
        "--vary",
        "task.lr=1e30,0.1",
        "--out",
        tmp_path / "a",
        "--device",
        "cpu",
    ]
    for resume in ([], ["--resume"]):
        outcome = call(*words, *resume)
        assert outcome.status == 1
        assert "0.1" in outcome.out
        assert "1e" not in outcome.out.replace(str(tmp_path), "")
        assert "rota: 1 of 2 runs failed and are left out: 1e_30-seed0" in outcome.err
    assert (
        call(
            "compare",
            *SMALL,
            "--vary",
            "task.lr=1e30,9e29",
            "--out",
            tmp_path / "b",
            "--device",
            "cpu",
        ).status
        == 1
    )


def test_an_unforeseen_error_is_a_sentence_or_a_traceback_for_those_who_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recipe, "names", lambda: 1 / 0)
    outcome = call("list", "recipes")
    assert outcome.status == 1
    what = r"ZeroDivisionError: division by zero \(test_cli.py, line \d+\)"
    assert re.fullmatch(rf"rota: it failed: {what}; set ROTA_DEBUG=1 for .*\n", outcome.err)
    monkeypatch.setenv("ROTA_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        commands.status(["list", "recipes"])


@pytest.mark.parametrize("place", ["rota.recipe.build", "rota.running.run.make"])
@pytest.mark.parametrize("lost", [False, True], ids=["itself", "as an import's error"])
def test_ctrl_c_before_the_first_round_is_130_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, lost: bool
) -> None:
    def stop(*_: object) -> None:
        if lost:
            raise ImportError("initialization failed") from KeyboardInterrupt()
        raise KeyboardInterrupt

    monkeypatch.setattr(place, stop)
    outcome = call("run", *SMALL, "--out", tmp_path / "a")
    said = outcome.err.removeprefix("loading the data ...\n")  # if that took over two seconds
    assert (outcome.status, outcome.out, said) == (130, "", "rota: interrupted\n")


def test_ctrl_c_before_a_command_begins_is_130_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "app", mock.Mock(side_effect=KeyboardInterrupt))
    outcome = call("list")
    assert (outcome.status, outcome.out, outcome.err) == (130, "", "rota: interrupted\n")


def in_front(folder: Path) -> dict[str, str]:
    """An environment in which a folder's modules are found before all others."""
    return {
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
    }


@pytest.mark.parametrize("loaded", ["typer", "rich", "torch"])
def test_ctrl_c_while_something_is_being_loaded_is_a_sentence(tmp_path: Path, loaded: str) -> None:
    (tmp_path / f"{loaded}.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    )
    environment = in_front(tmp_path)
    done = subprocess.run(
        [PROGRAM, "run", *SMALL],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "rota: interrupted\n")


def test_the_names_of_engines_are_completed_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch is loaded')\n")
    words = {"COMP_WORDS": "rota run fedavg-digits --engine ", "COMP_CWORD": "4"}
    environment = in_front(tmp_path) | {"_ROTA_COMPLETE": "complete_bash", **words}
    done = subprocess.run([PROGRAM], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout.split(), done.stderr) == (["auto", *engine.ENGINES], "")


def test_help_does_not_wait_for_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch is loaded')\n")
    for command in ([], *([command] for command in COMMANDS)):
        environment = in_front(tmp_path)
        done = subprocess.run(
            [PROGRAM, *command, "--help"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "terminate"])
def test_an_interrupted_run_prints_the_line_that_finishes_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "a"
    settings = [
        "rounds=300",
        "evaluate=100",
        "sampler.budget=2",
        "task.steps=2",
        "task.model=logistic",
    ]
    options = [*(word for setting in settings for word in ("--set", setting)), "--device", "cpu"]
    process = subprocess.Popen(
        [PROGRAM, "run", "fedavg-digits", *options, "--out", folder],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and len(lines(folder)) < 2:
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert out == ""
    said, again = err.splitlines()[-2:]
    assert said == "rota: interrupted; the checkpoint is written"
    assert (
        again
        == f"rota: to resume: rota run {folder}/config.toml --out {folder} --device cpu --resume"
    )
    so_far = lines(folder)
    assert 2 <= len(so_far) < 300
    assert (folder / "checkpoint" / f"{len(so_far):08d}").is_dir()

    finished = call(*shlex.split(again.partition("to resume: ")[2])[1:])
    assert finished.status == 0, finished.err
    assert "after 300 rounds" in finished.out
    assert lines(folder)[: len(so_far)] == so_far
    if number == signal.SIGINT:  # as if nothing had happened
        assert (
            call(
                "run", folder / "config.toml", "--out", tmp_path / "whole", "--device", "cpu"
            ).status
            == 0
        )
        assert (tmp_path / "whole" / "rounds.jsonl").read_bytes() == (
            folder / "rounds.jsonl"
        ).read_bytes()


def test_a_run_folders_config_names_everything(done: Path) -> None:
    config = tomllib.loads((done / "config.toml").read_text())
    assert config == recipe.resolve(recipe.override(recipe.read("fedavg-digits"), "rounds=2"))


@pytest.mark.parametrize(
    ("option", "value"),
    [("--battery", 101), ("--memory", -1), ("--daily", -1), ("--slow", 0.5), ("--idle", 0)],
)
def test_what_an_owner_cannot_mean(option: str, value: float, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    outcome = call("client", "--data", tmp_path, option, value)
    assert outcome.status == 2
    assert f"{option} is {value:g}: it must be at least" in outcome.err
