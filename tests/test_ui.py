"""The live page: what it says about runs, who may ask, and what a browser shows."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import httpx
import pytest
from test_cli import call
from test_report import browser as browser  # a fixture

import rota
from rota.errors import BadInput
from rota.running.folder import locked
from rota.ui.runs import Runs
from rota.ui.server import build

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(rota.__file__).parents[1])}
RUN = ("run", "fedavg-digits", "--set", "rounds=3", "--set", "task.steps=1")


class Page:
    """The page's addresses, asked without a network."""

    def __init__(self, root: Path, **options: Any) -> None:
        host = options.get("host", "127.0.0.1")
        transport = httpx.ASGITransport(app=build(root, **options))
        self.client = httpx.AsyncClient(transport=transport, base_url=f"http://{host}:8765")

    def request(self, method: str, path: str, **more: Any) -> Any:
        return asyncio.run(self.client.request(method, path, **more))

    def get(self, path: str, **more: Any) -> Any:
        return self.request("GET", path, **more)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs, one of them in a folder of its own."""
    root = tmp_path_factory.mktemp("runs")
    assert call(*RUN, "--out", root / "first").status == 0
    more = ("--set", "sampler.budget=2", "--set", "seed=4")
    assert call(*RUN, *more, "--out", root / "deep" / "second").status == 0
    return root


def copied(runs: Path, to: Path) -> Path:
    return Path(shutil.copytree(runs, to / "copy"))


def listed(page: Page) -> dict[str, Any]:
    return {run["name"]: run for run in page.get("/api/runs").json()["runs"]}


def test_what_the_list_says(runs: Path) -> None:
    page = Page(runs)
    told = page.get("/api/runs").json()
    assert set(told["keys"]) == {"seed", "sampler.budget"}
    first = listed(page)["first"]
    summary = json.loads((runs / "first" / "summary.json").read_text())
    assert (first["state"], first["round"], first["rounds"]) == ("finished", 3, 3)
    assert first["last"]["accuracy"] == summary["accuracy"]
    assert first["last"]["client_seconds"] == pytest.approx(summary["client_seconds"])
    assert listed(page)["deep/second"]["config"] == {"seed": 4, "sampler.budget": 2.0}
    rows = page.get("/api/rows", params={"run": "first"}).json()["rows"]
    later = page.get("/api/rows", params={"run": "first", "after": 2}).json()["rows"]
    assert [row[0] for row in rows] == [1, 2, 3]
    assert later == rows[2:]
    details = page.get("/api/details", params={"run": "first"}).json()
    assert sum(details["sampled"]["digits"]) == 15
    assert told["common"]["task.steps"] == 1
    assert not set(told["common"]) & set(told["keys"])
    last = json.loads((runs / "first" / "rounds.jsonl").read_text().splitlines()[-1])
    for key in ("seconds", "bytes_up", "bytes_down", "server_bytes"):
        assert details["costs"][key] == last[key]
    assert details["costs"]["client_seconds"] == pytest.approx(summary["client_seconds"])
    assert [line["round"] for line in details["log"]] == [1, 2, 3]
    log = {"round": 3, "score": last["accuracy"], "loss": last["loss"], "drawn": 5, "failed": 0}
    assert details["log"][-1] == {**log, "seconds": last["seconds"]}
    assert details["text"] == (runs / "first" / "config.toml").read_text()


def test_the_report_of_ticked_runs(runs: Path) -> None:
    page = Page(runs)
    both = page.get("/report", params={"run": ["first", "deep/second"]})
    assert both.status_code == 200
    assert "<title>" in both.text
    assert page.get("/report", params={"run": ["first", "none"]}).status_code == 404
    assert page.get("/report").status_code == 404


def test_states(runs: Path, tmp_path: Path) -> None:
    """Finished, running while the folder is locked, stopped, diverged, damaged, resumed, gone."""
    root = copied(runs, tmp_path)
    first, page = root / "first", Page(root)
    (first / "summary.json").rename(tmp_path / "summary.json")
    assert listed(page)["first"]["state"] == "stopped"
    with locked(first):
        assert listed(page)["first"]["state"] == "running"
    assert listed(page)["first"]["state"] == "stopped"
    lines = (first / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (first / "rounds.jsonl").write_bytes(lines[0] + lines[1][:50])
    assert listed(page)["first"]["round"] == 1
    (first / "rounds.jsonl").write_bytes(b"".join(lines[:2]))
    assert listed(page)["first"]["round"] == 2
    told = json.loads((tmp_path / "summary.json").read_text())
    told["models"]["digits"]["loss"] = None
    (first / "summary.json").write_text(json.dumps(told))
    assert listed(page)["first"]["state"] == "diverged"
    (first / "rounds.jsonl").write_bytes(lines[0] + b'{"round": []}\n')
    assert listed(page)["first"]["state"] == "damaged"
    assert "TypeError" in listed(page)["first"]["problem"]
    (root / "deep" / "second" / "config.toml").write_text("no = [")
    fresh = listed(Page(root))["deep/second"]
    assert "config.toml cannot be read" in fresh["problem"]
    shutil.rmtree(root / "deep")
    time.sleep(2.1)  # runs are looked for again after two seconds
    assert list(listed(page)) == ["first"]


def strictly(text: str) -> Any:
    """A value of JSON as browsers read it, without NaN."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


def look(page: Page) -> dict[str, Any]:
    """Ask every address; what the list says."""
    told = strictly(page.get("/api/runs").text)
    for run in told["runs"]:
        for path in ("/api/rows", "/api/details"):
            found = page.get(path, params={"run": run["name"]})
            assert found.status_code == 200
            strictly(found.text)
        assert page.get("/report", params={"run": run["name"]}).status_code in (200, 409)
    assert page.get("/").status_code == 200
    return {run["name"]: run for run in told["runs"]}


LINES = {
    "a round beyond all": {"round": float("inf")},
    "time beyond all": {"client_seconds": 10**400},
    "time that overflows": {"client_seconds": float("inf")},
    "no number": {"seconds": float("nan"), "bytes_up": 10**400},
    "a client of words": {"cohort": {"digits": ["x", 1, -3, 10**30]}},
    "half a character": {"failures": [{"client": float("nan"), "reason": "\ud800"}]},
    "failures of another kind": {"failures": [3]},
    "nothing": {"models": None},
}


@pytest.mark.parametrize("name", LINES)
def test_a_damaged_line_is_that_lines_trouble(runs: Path, tmp_path: Path, name: str) -> None:
    """The other lines and the other runs are shown, and no line is counted twice."""
    root = copied(runs, tmp_path)
    path, page = root / "first" / "rounds.jsonl", Page(root)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[1] = {**lines[1], **LINES[name]}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for _ in range(3):
        told = look(page)
        assert told["deep/second"]["state"] == "finished"
        assert told["first"]["round"] == 3
        assert told["first"]["tests"] in (2, 3)


def test_odd_files_are_no_trouble(runs: Path, tmp_path: Path) -> None:
    """Not for the other runs: pipes, links, settings that JSON has no words for, odd names."""
    root = copied(runs, tmp_path)
    odd = "[task]\nlr = nan\nwhen = 2020-01-01\nwide = 0x" + "f" * 6000 + "\nmany = [[inf]]\n"
    for name in ("odd", "linked", "piped", os.fsdecode(b"\xff")):
        (root / name).mkdir()
    (root / "odd" / "config.toml").write_text(odd)
    (root / os.fsdecode(b"\xff") / "config.toml").write_text("seed = 3")
    (root / "linked" / "config.toml").symlink_to(root / "odd" / "config.toml")
    os.mkfifo(root / "piped" / "config.toml")
    for name in ("rounds.jsonl", "summary.json"):
        os.mkfifo(root / "odd" / name)
    told = look(Page(root))
    assert set(told) == {"first", "deep/second", "odd", "\ufffd"}
    assert told["first"]["state"] == "finished"


def test_nothing_but_reading(runs: Path, tmp_path: Path) -> None:
    """No request leaves the folder, writes or runs anything."""
    root = copied(runs, tmp_path)
    secret = tmp_path / "secret"
    shutil.copytree(runs / "first", secret)
    (root / "link").symlink_to(secret, target_is_directory=True)
    page = Page(root)

    def state() -> dict[Path, tuple[int, float]]:
        found = [each for each in root.rglob("*") if not each.is_symlink()]
        return {each: (each.stat().st_size, each.stat().st_mtime) for each in found}

    before = state()
    assert set(listed(page)) == {"first", "deep/second"}
    for name in ("../secret", "link", str(secret), "first/../../secret", "", "first\0"):
        for path in ("/api/rows", "/api/details", "/report"):
            assert page.get(path, params={"run": name}).status_code == 404, name
    for path in ("/../secret/config.toml", "/first/config.toml", "/..%2fsecret", "/docs", "/api"):
        assert page.get(path).status_code == 404, path
    for path in ("/", "/api/runs", "/api/rows", "/report"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert page.request(method, path).status_code == 405
    page.get("/api/rows", params={"run": "first", "after": "-1"})
    page.get("/api/rows", params={"run": "first", "after": "9" * 5000})
    page.get("/report", params={"run": "first"})
    assert state() == before


def test_only_who_names_this_machine_may_ask(runs: Path) -> None:
    page = Page(runs)
    for host in ("evil.example", "evil.example:8765", "127.0.0.1.evil.example", ""):
        assert page.get("/api/runs", headers={"host": host}).status_code == 403, host
    for host in ("127.0.0.1:8765", "localhost:8765", "[::1]:8765"):
        assert page.get("/api/runs", headers={"host": host}).status_code == 200, host
    policy = page.get("/").headers["content-security-policy"]
    assert "script-src 'self';" in policy
    assert page.get("/api/runs").headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in page.get("/api/runs").headers


def test_other_hosts_need_a_token(runs: Path) -> None:
    with pytest.raises(BadInput, match="give a --token"):
        build(runs, "0.0.0.0")
    page = Page(runs, host="0.0.0.0", token="open sesame")
    for path in ("/", "/api/runs", "/api/events", "/page.js", "/report"):
        assert page.get(path).status_code == 403
        assert page.get(path, params={"token": "open"}).status_code == 403
    assert page.get("/api/runs", params={"token": "open sesame"}).status_code == 200
    assert page.get("/api/runs").status_code == 403
    page.get("/", params={"token": "open sesame"})  # the browser then has a cookie
    assert page.get("/api/runs").status_code == 200
    assert page.get("/").status_code == 200


def test_mistakes(runs: Path, tmp_path: Path) -> None:
    assert call("ui", tmp_path / "none").err == (
        f"rota: {tmp_path / 'none'} is not a folder: name one that holds runs\n"
    )
    assert "give a --token" in call("ui", runs, "--host", "0.0.0.0", "--port", "0").err
    assert "cannot listen on" in call("ui", runs, "--port", "70000").err


# the page in a browser


@contextmanager
def served(root: Path) -> Iterator[str]:
    """The page's address, from a real process."""
    words = [sys.executable, "-m", "rota", "ui", str(root), "--port", "0"]
    with subprocess.Popen(words, stdout=PIPE, stderr=PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield line.split(" at ")[1].split()[0]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.stderr is not None
            said = process.stderr.read()
    assert process.returncode == 130
    assert said == "rota: interrupted\n"


def seen(browser: Any, script: str) -> Any:
    return browser.execute_script(f"return {script}")


def wait(browser: Any, script: str, seconds: float = 60) -> float:
    """Wait until a script is true, and say how long that took."""
    from selenium.webdriver.support.ui import WebDriverWait

    began = time.monotonic()
    WebDriverWait(browser, seconds, 0.02).until(lambda _: seen(browser, script))
    return time.monotonic() - began


def test_the_page_follows_a_run(browser: Any, tmp_path: Path) -> None:
    """A page that is open shows a run that begins, its curves, and its last round at once."""
    (tmp_path / "runs").mkdir()
    words = [sys.executable, "-m", "rota", "run", "fedavg-digits", "--out", "runs/new"]
    words += ["--set", "rounds=60", "--set", "task.epochs=3"]
    with served(tmp_path / "runs") as address:
        browser.get(address)
        wait(browser, "document.getElementById('live').className === 'on'")
        with subprocess.Popen(
            words, cwd=tmp_path, stderr=subprocess.DEVNULL, env=ENVIRONMENT
        ) as process:
            wait(browser, "document.querySelector('[data-run=\"new\"]')")
            browser.execute_script("document.querySelector('[data-run=\"new\"] input').click()")
            assert process.wait(120) == 0
        state = "document.querySelector('[data-run=\"new\"]').children"
        late = wait(browser, f"{state}[2].textContent === 'finished'", 20)
        late += wait(browser, "document.documentElement.dataset.drawn === '60'", 20)
        assert late < 6, "two seconds on an idle machine"
        assert seen(browser, f"{state}[3].textContent") == "60 / 60"
        points = "document.getElementById('accuracy').data[0].x.length"
        assert seen(browser, points) == 60
        browser.execute_script("document.querySelector('[data-run=\"new\"] button').click()")
        wait(browser, "document.getElementById('sampled').data")
        assert sum(seen(browser, "document.getElementById('sampled').data[0].y")) == 300
        log = seen(browser, "document.getElementById('log').textContent").splitlines()
        assert log[0].startswith("round 60  score 0.")
        assert len(log) == 50
        assert "sent up" in seen(browser, "document.getElementById('facts').textContent")
        assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []


def test_many_runs_stay_usable(browser: Any, runs: Path, tmp_path: Path) -> None:
    """200 runs of 1,000 rounds: the list is there at once, filters and sorts."""
    first, root = runs / "first", tmp_path / "many"
    config = (first / "config.toml").read_text()
    lines = [json.loads(line) for line in (first / "rounds.jsonl").read_text().splitlines()]
    rounds = [json.dumps({**lines[k % 3], "round": k + 1}) + "\n" for k in range(1000)]
    text = "".join(rounds)
    for number in range(200):
        folder = root / f"run{number}"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_text(config.replace("seed = 0", f"seed = {number}"))
        (folder / "rounds.jsonl").write_text(text)
        os.utime(folder / "rounds.jsonl", (number, number))
    began = time.monotonic()
    known = Runs(root)
    known.update()
    assert len(known.runs) == 200
    assert time.monotonic() - began < 30  # it is read once, and then only what is new
    browser.get("about:blank")
    browser.get_log("browser")  # forget what earlier pages said when their servers ended
    with served(root) as address:
        browser.get(address)
        wait(browser, "document.querySelectorAll('#rows tr').length === 200")
        paint = "performance.getEntriesByType('paint')[0].startTime"
        assert seen(browser, paint) < 6000, "two seconds on an idle machine"
        wait(browser, "document.documentElement.dataset.drawn === '1000'")
        script = (
            "const box = document.getElementById('filter'); box.value = 'seed=17';"
            "box.dispatchEvent(new Event('input'));"
            "return [...document.querySelectorAll('#rows tr')].map((row) => row.dataset.run)"
        )
        found = browser.execute_script(script)
        assert found[0] == "run179"
        assert len(found) == 11
        same = script.replace("seed=17", "task.steps=1 budget=5 seed=3")
        assert len(browser.execute_script(same)) == 11  # the first two are alike in all runs
        assert not browser.execute_script(script.replace("seed=17", "task.steps=2"))
        assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []


def test_a_telephone_shows_whole_charts(browser: Any, runs: Path) -> None:
    """Nothing is wider than the page, and a chart says what is measured."""
    narrow = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
    try:
        with served(runs) as address:
            browser.get(address)
            wait(browser, "document.documentElement.dataset.drawn > 0")
            assert seen(browser, "document.documentElement.scrollWidth") <= 390
            drawn = "document.querySelector('#accuracy .main-svg').getBoundingClientRect().right"
            wait(browser, f"{drawn} <= 390", 10)
            title = "document.getElementById('accuracy').layout.title.text"
            assert seen(browser, title) == "test accuracy"
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
