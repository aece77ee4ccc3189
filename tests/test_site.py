"""The documentation site: it builds, and its links lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rota_lab import site

ROOT = Path(__file__).parents[1]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """In strict mode a link to a page or a heading that is not there is an error."""
    words = [sys.executable, "-m", "mkdocs", "build", "--site-dir", tmp_path / "site"]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(words, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    home = (tmp_path / "site" / "index.html").read_text()
    assert 'href="repository/src/rota/loop.py/"' in home
    assert "results/kvib-theory/" in home
    asked = {address for page in (tmp_path / "site").rglob("*.html") for address in asks(page)}
    assert not asked, "a page asks another machine for something"


def asks(page: Path) -> list[str]:
    """The addresses elsewhere from which a page loads something."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r'<(?:script|img|iframe)[^>]* src="?(https?:[^" >]+)', text) + re.findall(
        r'<link[^>]* rel="?stylesheet"?[^>]* href="?(https?:[^" >]+)', text
    )


@pytest.mark.parametrize(
    ("text", "path", "at", "changed"),
    [
        ("[a](docs/data.md#x)", "README.md", "index.md", "[a](data.md#x)"),
        ("[a](../README.md)", "docs/data.md", "data.md", "[a](index.md)"),
        (
            "[a](../../src/rota/loop.py)",
            "docs/howto/gpu.md",
            "howto/gpu.md",
            "[a](../repository/src/rota/loop.py.md)",
        ),
        ("[a](src/rota/plan)", "README.md", "index.md", "[a](repository/src/rota/plan/index.md)"),
        ("![a](gap.svg)", "docs/results/b.md", "results/b.md", "![a](gap.svg)"),
        ("[a](https://flower.ai)", "README.md", "index.md", "[a](https://flower.ai)"),
        ("```\n[a](b.md)\n```", "README.md", "index.md", "```\n[a](b.md)\n```"),
    ],
)
def test_links_of_pages_become_links_of_the_site(
    text: str, path: str, at: str, changed: str
) -> None:
    assert site.relinked(text, path, at) == changed


def test_a_notebook_and_a_folder_are_pages() -> None:
    page = site.content("examples/first_run.ipynb")
    assert page.startswith("# A first run\n")
    assert "```python\nimport rota\n" in page
    assert "- `draw.py`: " in site.content("src/rota/sampling")
