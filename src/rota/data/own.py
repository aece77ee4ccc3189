"""Your own data: a federation from arrays or tensors, one pair per client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rota.data.federation import Examples, Federation, Part
from rota.errors import BadInput, first_line


def from_clients(
    train: Iterable[tuple[Any, Any] | None],
    test: tuple[Any, Any] | Iterable[tuple[Any, Any] | None],
    *,
    classes: int | None = None,
    name: str = "own",
    ids: Sequence[str] = (),
    validation: tuple[Any, Any] | None = None,
) -> Federation:
    """Make a federation from your own data: a list with one (x, y) pair per client.

    A pair holds tensors, arrays or pandas objects; None is a client without data. Bytes (uint8) are
    taken for pixels and divided by 255. `test` is one (x, y) pair that all clients share, or a list
    with one pair per client. `classes` defaults to the largest integer label + 1; real-valued
    targets have none. `ids` are the clients' names, if they have some. `validation` is one (x, y)
    pair of the server's own examples, for groupings that need some.
    """
    packed = _concat(_pairs(train, "train"), "train")
    packed_test = _concat([test] if isinstance(test, tuple) else _pairs(test, "test"), "test")
    if packed_test.clients not in (1, packed.clients):
        raise BadInput(
            f"test has {packed_test.clients} pairs and train {packed.clients}: give one that all "
            "share, or one per client"
        )
    for what, mine, theirs in (
        ("examples", packed_test.x, packed.x),
        ("targets", packed_test.y, packed.y),
    ):
        if _form(mine) != _form(theirs):
            raise BadInput(f"test {what} are {_form(mine)}, but training {what} {_form(theirs)}")
    # whole numbers of two widths are the same tokens
    widest = torch.promote_types(packed.x.dtype, packed_test.x.dtype)
    packed = Part(packed.x.to(widest), packed.y, packed.offsets)
    packed_test = Part(packed_test.x.to(widest), packed_test.y, packed_test.offsets)
    if classes is None:
        labels = not packed.y.is_floating_point()
        classes = int(max(packed.y.max(), packed_test.y.max())) + 1 if labels else 0
    kept = None
    if validation is not None:
        held = _concat([validation], "validation")
        if _form(held.x) != _form(packed.x) or _form(held.y) != _form(packed.y):
            raise BadInput(
                f"validation examples are {_form(held.x)} with targets {_form(held.y)}, but "
                f"training examples {_form(packed.x)} with {_form(packed.y)}"
            )
        kept = Examples(held.x.to(widest), held.y)
    return Federation(name, packed, packed_test, classes, ids, kept)


def _pairs(given: Any, part: str) -> list[Any]:
    """One value per client, which should be a pair."""
    takes = "give a list with one (x, y) pair per client"
    if part == "test":
        takes += ", or one pair (a tuple) that all share"
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
        what = "None" if given is None else f"a {type(given).__name__}"
        raise BadInput(f"{part} is {what}: {takes}")
    pairs = list(given)
    if not pairs:
        raise BadInput(f"{part} is empty: {takes}")
    if len(pairs) == 2 and not any(isinstance(pair, list | tuple | None) for pair in pairs):
        raise BadInput(f"{part} is one pair instead of a list: {takes}")
    return pairs


def _concat(pairs: Sequence[Any], part: str) -> Part:
    """All clients' pairs, one after the other. An empty pair has no shape to agree on."""
    sizes: list[int] = []
    held: list[tuple[Tensor, Tensor]] = []
    first = 0
    for client, pair in enumerate(pairs):
        alone = part == "test" and len(pairs) == 1
        x, y = _tensors(pair, part if alone else f"{part} client {client}")
        sizes.append(len(y))
        if not len(y):
            continue
        if x.dtype == torch.uint8:  # pixels
            x = x / 255
        x = x.float() if x.is_floating_point() else x.long() if x.dtype in _WIDE else x
        y = y.float() if y.is_floating_point() else y.long()
        if not held:
            first = client
        held.append((x, y))
        like_x, like_y = held[0]
        if x.shape[1:] != like_x.shape[1:]:
            raise BadInput(
                f"{part} client {client} has examples of shape {tuple(x.shape[1:])}, but those of "
                f"client {first} have shape {tuple(like_x.shape[1:])}"
            )
        if _form(y) != _form(like_y):
            raise BadInput(
                f"{part} client {client} has targets that are {_form(y)}, but those of client "
                f"{first} are {_form(like_y)}"
            )
    if not held:
        raise BadInput(
            f"{part} has no examples: all of its {len(sizes)} pairs are empty, and at least one "
            "client must have some"
        )
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Part(torch.cat([x for x, _ in held]), torch.cat([y for _, y in held]), offsets)


_WIDE = (torch.uint16, torch.uint32, torch.uint64)
"""Number types that many of torch's operators do not take."""


def _form(values: Tensor) -> str:
    """The kind and shape of the rows, in words."""
    if values.is_complex():
        kind = "complex numbers"
    else:
        kind = "real numbers" if values.is_floating_point() else "whole numbers"
    return f"{kind} of shape {tuple(values.shape[1:])}"


def _tensors(pair: Any, whose: str) -> tuple[Tensor, Tensor]:
    """A client's examples and targets, the same number of each."""
    if pair is None:
        return torch.zeros(0), torch.zeros(0)
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        many = isinstance(pair, list | tuple)
        kind = f"{len(pair)} things" if many else f"a {type(pair).__name__}"
        raise BadInput(f"{whose} is {kind}: give a pair (x, y), or None if it has no data")
    x, y = _tensor(pair[0], f"{whose}: x"), _tensor(pair[1], f"{whose}: y")
    if len(x) != len(y):
        raise BadInput(f"{whose} has {len(x)} examples but {len(y)} targets")
    return x, y


def _tensor(values: Any, what: str) -> Tensor:
    if hasattr(values, "to_numpy"):  # pandas
        values = values.to_numpy()
    if isinstance(values, np.ndarray) and not values.flags.writeable:  # torch would warn
        values = values.copy()
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        if _texts(values):
            raise BadInput(f"{what} holds texts: give numbers (classes count from 0)") from error
        raise BadInput(
            f"{what} is no array of numbers ({first_line(error)}): give one row per example, all "
            "of one shape"
        ) from error
    if not tensor.dim():
        raise BadInput(f"{what} is a single number: give one row per example")
    return tensor


def examples_of(x: Any, y: Any, whose: str, groups: Any = None) -> Examples:
    """One pair of arrays as examples."""
    part = _concat([(x, y)], whose)
    return Examples(part.x, part.y, groups)


def _texts(values: Any) -> bool:
    """Whether an array holds a text, or lists of any depth do."""
    if isinstance(values, np.ndarray):
        objects = values.dtype.kind == "O" and any(isinstance(each, str) for each in values.flat)
        return values.dtype.kind in "US" or objects
    if isinstance(values, list | tuple):
        return any(map(_texts, values))
    return isinstance(values, str)
