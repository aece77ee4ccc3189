"""The API page: it is up to date, and what it lists is what the packages call public."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import rota
from rota_lab import api, words

ROOT = Path(__file__).parents[1]


def test_the_page_is_up_to_date() -> None:
    written = (ROOT / "docs" / "api.md").read_text()
    assert written == api.page(), "run: python -m rota_lab.api > docs/api.md"


def test_what_the_shell_completes_is_up_to_date() -> None:
    written = (ROOT / "src" / "rota" / "cli" / "words.json").read_text()
    assert written == words.page(), "run: python -m rota_lab.words > src/rota/cli/words.json"


@pytest.mark.parametrize("name", api.MODULES)
def test_a_public_module_says_what_is_public(name: str) -> None:
    module = importlib.import_module(name)
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        thing = getattr(module, public)
        assert not public.startswith("_")
        if isinstance(thing, ModuleType):
            assert thing.__name__ in api.MODULES, f"{thing.__name__} is not on the page"
        elif inspect.isclass(thing) or inspect.isroutine(thing):
            own = str(getattr(thing, "__module__", "")).startswith("rota")
            assert not own or thing.__doc__, f"{name}.{public} has no docstring"


def test_every_public_name_is_on_the_page() -> None:
    page = api.page()
    headings = set(re.findall(r"^### ([\w.]+)$", page, re.M))
    for name in rota.__all__:
        if not isinstance(getattr(rota, name), ModuleType):
            assert f"rota.{name}" in headings
    assert {f"## {name}" for name in api.MODULES} <= set(page.splitlines())


def example(first: int, second: str = "a", *rest: float, key: list[int] | None = None) -> bool:
    """The summary.

    More words.
    """
    return bool(first and second and rest and key)


class Example:
    """A class."""

    def __init__(self, size: int = 3) -> None:
        self.size = size

    def grow(self, by: int) -> None:
        """Make it
        larger."""

    def undocumented(self) -> None:
        pass

    @property
    def large(self) -> bool:
        """Whether it is large."""
        return self.size > 3


def test_what_an_entry_says() -> None:
    module = ModuleType("some.place", "A place.\n\nNot its summary.")
    vars(module).update(example=example, Example=Example, TABLE={"a": 1, "b": 2}, Kind=list[int])
    vars(module).update(again=example, __all__=["TABLE", "Kind", "example", "Example", "again"])
    text = "\n".join(api.section(module, {}))
    assert (
        text
        == """## some.place

A place.

Described elsewhere: `again` (`some.place.example`).

- `TABLE`: `a`, `b`
- `Kind`: `list[int]`

### some.place.example

```python
example(first: int, second: str = 'a', *rest: float, key: list[int] | None = None) -> bool
```

The summary.

More words.

### some.place.Example

```python
class Example(size: int = 3)
```

A class.

- `grow(by: int) -> None`: Make it larger.
- `large`: Whether it is large.
"""
    )
