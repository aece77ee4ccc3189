"""A client that replies something else than its work.

python rogue.py MODE client --data DIR ...
"""

from __future__ import annotations

import os
import sys
from typing import Any

from rota import cli
from rota.flower import inside, records
from rota.flower.letter import OWN, Letter

MODE = sys.argv.pop(1)
LARGE = 100 << 20
honest, push = records.answer, inside.Member.push


def answer(letter: Letter, to: Any) -> Any:
    """The reply, spoilt, if it is one to a request for training."""
    if "rows" not in letter.head:
        return honest(letter, to)
    own = letter.parts[OWN]
    if MODE == "noise":
        own = os.urandom(len(own))
    if MODE == "large":
        own += bytes(LARGE)
    if MODE == "torn":
        own = own[: len(own) // 2]
    if MODE == "others":  # a row and an update of somebody else in place of each of its own
        from rota.flower.codec import pack, unpack

        rows = {each["row"]: (each["row"] + 1) % 6 for each in letter.head["rows"]}
        for each in letter.head["rows"]:
            each["row"] = rows[each["row"]]
        names = {name: name.split(".") for name in unpack(own)}
        own = pack(
            {
                ".".join([words[0], str(rows[int(words[1])]), *words[2:]]): unpack(own)[name] + 1e3
                for name, words in names.items()
            }
        )
    if MODE == "nothing":
        from flwr.app import ArrayRecord, Message, RecordDict

        return Message(RecordDict({"arrays": ArrayRecord([])}), reply_to=to)
    return honest(Letter(letter.kind, letter.head, {OWN: own}), to)


def spoilt_push(self: Any, reply: Any, seconds: float) -> None:
    """Send a reply, or its announcement alone, or it and another one."""
    if MODE == "announced" and reply.has_content() and "own" in reply.content:
        inside.push_objects = lambda *_, **__: None
    push(self, reply, seconds)
    if MODE == "twice":
        other = inside.Message(reply.content, reply_to=LAST[0])
        push(self, other, seconds)


LAST: list[Any] = []


def remember(message: Any) -> bytes:
    LAST[:] = [message]
    return kept(message)


kept = inside.remember
inside.remember = remember
records.answer = answer
inside.Member.push = spoilt_push  # type: ignore[method-assign]

if __name__ == "__main__":
    cli.main()
