"""What the documentation site has besides docs/: `make docs` builds it with mkdocs.yml.

Pages link to files of the repository, so that they can be read on a code host. On the site each of
these files is a page, too, and the README is the first page.
"""

from __future__ import annotations

import ast
import json
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
LINK = re.compile(r"(?<=\]\()([^()\s#]+)(?=[#)])")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".c": "c", ".sh": "sh"}
places: dict[str, str] = {}
"""Address of a page -> the path in the repository that it comes from."""


def address(path: str) -> str:
    """Where a file of the repository lies on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path == "README.md":
        return "index.md"
    if path.endswith(".md"):
        return f"repository/{path}"
    return f"repository/{path}/index.md" if (ROOT / path).is_dir() else f"repository/{path}.md"


def relinked(text: str, path: str, at: str) -> str:
    """The text of a file with its links to other files changed to those of the site."""

    def change(found: re.Match[str]) -> str:
        if re.match(r"\w+:", found[1]):
            return found[1]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[1]))
        return posixpath.relpath(address(target), posixpath.dirname(at) or ".")

    parts = FENCED.split(text)
    return "".join(part if i % 2 else LINK.sub(change, part) for i, part in enumerate(parts))


def targets(text: str, path: str) -> list[str]:
    """The files of the repository that a text links to."""
    prose = FENCED.sub("", text)
    found = [each for each in LINK.findall(prose) if not re.match(r"\w+:", each)]
    return [posixpath.normpath(posixpath.join(posixpath.dirname(path), each)) for each in found]


def content(path: str) -> str:
    """A file of the repository as a page: Markdown as it is, everything else as code."""
    file = ROOT / path
    if file.is_dir():
        return _folder(file)
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    if file.suffix == ".ipynb":
        return notebook(text)
    return f"# {path}\n\n````{LANGUAGES.get(file.suffix, 'text')}\n{text}````\n"


def notebook(text: str) -> str:
    """A notebook's cells as Markdown."""
    cells = [("".join(cell["source"]), cell["cell_type"]) for cell in json.loads(text)["cells"]]
    return "\n\n".join(f"```python\n{s}\n```" if kind == "code" else s for s, kind in cells) + "\n"


def _folder(folder: Path) -> str:
    """The modules of a folder, each with the first line of its docstring."""
    lines = [f"# {folder.relative_to(ROOT).as_posix()}", ""]
    for file in sorted(folder.glob("*.py")):
        about = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").split("\n")
        lines.append(f"- `{file.name}`: {about[0]}" if about[0] else f"- `{file.name}`")
    return "\n".join(lines) + "\n"


def on_config(config: Any) -> Any:
    """List the pages of results."""
    pages = sorted((ROOT / "docs" / "results").glob("*.md"))
    for part in config.nav:
        if "Results" in part:
            part["Results"] = [{page.stem: f"results/{page.name}"} for page in pages]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/ and are linked to."""
    from mkdocs.structure.files import File

    places.clear()
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting.append("README.md")
    while waiting:
        path = waiting.pop()
        at = address(path)
        if at in places:
            continue
        places[at] = path
        text = content(path) if path.endswith(".md") else ""
        waiting += [t for t in targets(text, path) if (ROOT / t).exists() and not _kept(t)]
        if not path.startswith("docs/"):
            files.append(File.generated(config, at, content=content(path)))
    return files


def _kept(path: str) -> bool:
    """Whether mkdocs has this file as it is: pictures and tables in docs/."""
    return path.startswith("docs/") and not path.endswith(".md")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with links as they are on the site."""
    at = page.file.src_uri
    return relinked(markdown, places[at], at)
