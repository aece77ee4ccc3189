"""Find which numbers of an example a function uses as indices, and into tables of what size.

The function runs once on a few real examples, and a torch function mode watches it. For every
tensor that only moves the examples' numbers around (a slice, a transpose, `.long()`), the mode
knows which place of the example each entry comes from. When such a tensor indexes a table, the
numbers in those places must be inside the table, in every example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rota.models.text import OneHot


@dataclass(frozen=True)
class Lookup:
    """A table that is indexed with an example's numbers; they must be in low..size-1."""

    places: Tensor
    """Which numbers of a flattened example are used: int64."""
    low: int
    size: int
    table: str
    """The table in words: "embedding of 80"."""


@dataclass(frozen=True)
class Found:
    """All lookups that were seen."""

    lookups: list[Lookup]
    traced: bool
    """False if a table was indexed with numbers computed from the example, as in x + 1."""


def find(function: Callable[[Tensor], Any], examples: Tensor) -> Found:
    """Watch function(examples). An exception ends the watching and keeps what was seen so far."""
    mode = _Watch(examples)
    hooks = [
        module.register_forward_pre_hook(mode.one_hot)
        for module in (function.modules() if isinstance(function, nn.Module) else ())
        if isinstance(module, OneHot)
    ]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), mode:
            function(examples)
    except Exception:  # the checks run the function once more, without a mode, and report it
        mode.traced = False
    finally:
        for hook in hooks:
            hook.remove()
    return Found(mode.lookups, mode.traced)


class _Watch(TorchFunctionMode):
    def __init__(self, examples: Tensor) -> None:
        super().__init__()
        shape = examples.shape[1:]
        places = torch.arange(math.prod(shape)).view(shape).expand(examples.shape)
        # By id. The tensors are held as well, so that no id is used twice.
        self.places: dict[int, tuple[Tensor, Tensor]] = {id(examples): (examples, places)}
        self.derived: dict[int, Tensor] = {id(examples): examples}
        self.lookups: list[Lookup] = []
        self.traced = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _TABLES:
            names, table = _TABLES[func]
            given = dict(zip(names, args, strict=False)) | kwargs
            for index, size, low, words in table(given):
                self.note(index, size, low, words)
        out = func(*args, **kwargs)
        self._follow(func, args, kwargs, out)
        return out

    def one_hot(self, module: nn.Module, args: Any) -> None:
        """Watch rota's own one-hot layer, which compares instead of indexing."""
        size = int(module.classes)  # type: ignore[arg-type]
        self.note(args[0], size, 0, f"one-hot code of {size}")

    def note(self, index: Tensor, size: int, low: int, words: str) -> None:
        """Note that a table of this size is indexed."""
        if id(index) in self.places:
            places = torch.unique(self.places[id(index)][1])
            self.lookups.append(Lookup(places[places >= 0], low, size, words))
        elif id(index) in self.derived:
            self.traced = False

    def _follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Mark results as derived from the examples, and carry places along where they move."""
        derived = [t for t in _tensors([*args, *kwargs.values()]) if id(t) in self.derived]
        if not derived or func in _BLANKS:
            return
        results = _tensors([out])
        moves = func in _COPIES or func in _MOVES
        same = bool(results and args) and results[0] is args[0] and not moves
        if same or func is Tensor.__setitem__:
            self.places.clear()  # args[0] changed in place, and all that shares its memory
            results += [args[0]] if args[0]._base is None else [args[0], args[0]._base]
        self.derived |= {id(result): result for result in results}
        moved = self._moved(func, args, kwargs)
        for result, places in zip(results, moved, strict=False):
            if places.shape == result.shape:
                self.places[id(result)] = (result, places)

    def _moved(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
        """The places of each result of a function that moves numbers around; else nothing."""
        if not args:
            return []
        first = args[0]
        if func in _JOINS:
            computed = [t for t in first if id(t) in self.derived and id(t) not in self.places]
            parts = [self._places(t) for t in first]
            return [] if computed else _tensors([func(parts, *args[1:], **kwargs)])
        if not isinstance(first, Tensor) or id(first) not in self.places:
            return []
        places = self.places[id(first)][1]
        if func in _COPIES:
            return [places]
        if func in _MOVES and not any(id(t) in self.derived for t in _tensors(args[1:])):
            return _tensors([func(places, *args[1:], **kwargs)])
        return []

    def _places(self, tensor: Tensor) -> Tensor:
        """Where each entry comes from; -1 where it is not the example's."""
        known = self.places.get(id(tensor))
        return known[1] if known else torch.full(tensor.shape, -1)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """All tensors in values, and in lists among them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _functions(names: str) -> set[Any]:
    """Functions of torch, and methods of tensors, by name."""
    homes = (torch, Tensor)
    return {getattr(home, name) for home in homes for name in names.split() if hasattr(home, name)}


_COPIES = _functions("clone contiguous cpu cuda detach int long short to type")
_MOVES = _functions(
    "t __getitem__ chunk diagonal expand expand_as flatten flip movedim moveaxis narrow permute "
    "ravel repeat reshape roll rot90 select split squeeze swapaxes swapdims "
    "take_along_dim tensor_split transpose unbind unflatten unfold unsqueeze view"
) | {getattr(Tensor, name).__get__ for name in ("T", "mT")}
_BLANKS = _functions(
    "empty_like full_like ones_like zeros_like new_empty new_full new_ones new_zeros"
)
_JOINS = _functions("cat concat concatenate stack hstack vstack")

Indexed = Iterable[tuple[Tensor, int, int, str]]
Given = dict[str, Any]


def _embedding(given: Given) -> Indexed:
    size = len(given["weight"])
    yield given["input"], size, 0, f"embedding of {size}"


def _one_hot(given: Given) -> Indexed:
    size = given.get("num_classes", -1)
    if size > 0:
        yield given["input"], size, 0, f"one-hot code of {size}"


def _along(given: Given) -> Indexed:
    """An index along one dimension of a tensor."""
    dim = given.get("dim")
    if isinstance(dim, int):
        size = given["input"].shape[dim]
        yield given["index"], size, 0, f"table of {size}"


def _take(given: Given) -> Indexed:
    size = given["input"].numel()
    yield given["index"], size, -size, f"table of {size}"


def _item(given: Given) -> Indexed:
    """table[x], table[:, x] and the like."""
    keys = given["index"] if isinstance(given["index"], tuple) else (given["index"],)
    for dim, key in enumerate(keys):
        if key is None or key is Ellipsis:
            return
        if isinstance(key, Tensor) and key.dtype in (torch.int64, torch.int32):
            size = given["input"].shape[dim]
            yield key, size, -size, f"table of {size}"


def _classes(given: Given) -> Indexed:
    """The targets of a loss over classes."""
    outputs, target = given["input"], given["target"]
    if not target.is_floating_point():
        size = outputs.shape[1 if outputs.dim() > 1 else 0]
        yield target, size, 0, f"{size} classes"


_TABLES: dict[Any, tuple[tuple[str, ...], Callable[[Given], Indexed]]] = {
    F.embedding: (("input", "weight"), _embedding),
    F.embedding_bag: (("input", "weight"), _embedding),
    F.one_hot: (("input", "num_classes"), _one_hot),
    F.cross_entropy: (("input", "target"), _classes),
    F.nll_loss: (("input", "target"), _classes),
    Tensor.__getitem__: (("input", "index"), _item),
    **dict.fromkeys(_functions("take"), (("input", "index"), _take)),
    **dict.fromkeys(_functions("gather index_select"), (("input", "dim", "index"), _along)),
    **dict.fromkeys(_functions("take_along_dim"), (("input", "index", "dim"), _along)),
}
