"""The pictures of the docs: python -m rota_lab.pictures docs/pictures.

It runs the commands of the tour (docs/tour.md) in a temporary folder, opens what they make in
Chromium, and photographs it. Chromium and its driver must be installed, and the extras ui and dev.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WIDE, NARROW = 1400, 390
"""The widths of a desk's window and of a phone, in pixels."""
COMPARE = (
    *("compare", "fedavg-digits", "--vary", "sampler.budget=2,5,20", "--seeds", "3"),
    *("--set", "rounds=60", "--out", "runs/budgets"),
)
GROWING = ("run", "fedavg-digits", "--set", "rounds=100000", "--out", "runs/going-on")


@contextmanager
def chromium(aside: Path) -> Iterator[Any]:
    """A browser without a window."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    flags = ["headless", "no-sandbox", "disable-gpu", "no-first-run", "hide-scrollbars"]
    for flag in [*flags, "disable-dev-shm-usage", f"user-data-dir={aside}"]:
        options.add_argument(f"--{flag}")
    window = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver") or ""))
    try:
        yield window
    finally:
        window.quit()


def photograph(window: Any, address: str, width: int, height: int | None, ready: str) -> bytes:
    """A page at this width once a script is true; the whole page if no height is given."""
    import base64

    from selenium.webdriver.support.ui import WebDriverWait

    def size(high: int) -> None:
        shape = {"width": width, "height": high, "deviceScaleFactor": 1, "mobile": False}
        window.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)

    size(height or 900)
    window.get(address)
    WebDriverWait(window, 120).until(lambda _: window.execute_script(f"return {ready}"))
    if height is None:
        size(int(window.execute_script("return document.documentElement.scrollHeight")))
    time.sleep(1.5)  # the charts are drawn to their new size
    return base64.b64decode(window.execute_cdp_cmd("Page.captureScreenshot", {})["data"])


@contextmanager
def running(*words: str, folder: Path) -> Iterator[str]:
    """A rota command in the background, and the first line that it prints."""
    command = [sys.executable, "-m", "rota", *words]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline() if words[0] == "ui" else ""
        finally:
            process.terminate()


def main(out: Path) -> None:
    """Write the pictures into a folder."""
    from PIL import Image

    drawn = "document.querySelectorAll('.main-svg').length > 1"
    pictures: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as name, chromium(Path(name) / "browser") as window:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "rota", *COMPARE], cwd=folder, check=True)
        report = (folder / "runs" / "budgets" / "report.html").as_uri()
        pictures["report"] = photograph(window, report, 1280, 1222, drawn)
        pictures["report-whole"] = photograph(window, report, WIDE, None, drawn)
        pictures["report-phone"] = photograph(window, report, NARROW, None, drawn)
        with (
            running(*GROWING, folder=folder),
            running("ui", "runs", "--port", "0", folder=folder) as line,
        ):
            address = line.split(" at ")[1].split()[0]
            going = "document.querySelector('td.running') !== null"
            ready = f"{drawn} && {going} && Number(document.documentElement.dataset.drawn) > 20"
            pictures["ui"] = photograph(window, address, WIDE, 900, ready)
            pictures["ui-phone"] = photograph(window, address, NARROW, None, ready)
    out.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        (out / f"{name}.png").write_bytes(picture)
        with Image.open(out / f"{name}.png") as image:
            image.convert("P", palette=Image.Palette.ADAPTIVE).save(
                out / f"{name}.png", optimize=True
            )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
