"""Letters as Flower's messages, by its stable interface alone."""

from __future__ import annotations

import secrets
from typing import Any

from flwr.app import ConfigRecord, Error, Message, RecordDict

from rota.flower.letter import OWN, VERSION, Letter, Lost, Refused, plain, read_head

LOST = (5, 8)
"""Errors: the node was away, and the node has restarted."""


def to_records(letter: Letter) -> RecordDict:
    """A letter as Flower's records: one for each part, so that a shared part is stored once.

    Flower numbers messages by what is in them, and takes a reply from whoever knows the number. So
    each letter has some random bytes: only the node that gets it can answer it.
    """
    own: dict[str, Any] = {"text": letter.text, "bytes": letter.parts.get(OWN, b"")}
    own["random"] = secrets.token_bytes(16)
    records = {name: ConfigRecord({"bytes": b}) for name, b in letter.parts.items() if name != OWN}
    return RecordDict({OWN: ConfigRecord(own), **records})


def from_message(message: Message) -> Letter:
    """The letter in a message, which may come from anybody."""
    if message.has_error():
        reason = (message.error.reason or "").removeprefix("Error: ")
        raise Refused(reason or f"error {message.error.code}, without a reason")
    own = message.content.get(OWN)
    if not isinstance(own, ConfigRecord):
        raise Refused("the message is no letter of rota")
    head, parts = read_head(own.get("text")), dict[str, bytes]()
    for name, record in message.content.items():
        found = record.get("bytes") if isinstance(record, ConfigRecord) else None
        if not isinstance(found, bytes):
            raise Refused(f"part {name!r:.40} of the letter is not bytes")
        parts[name] = found
    return Letter(message.metadata.message_type, head, parts)


def was_lost(message: Message) -> bool:
    """Whether a reply says that its node has restarted since it was asked."""
    return message.has_error() and message.error.code in LOST


def read(message: Message) -> Letter | str:
    """A reply's letter, or why there is none."""
    try:
        letter = from_message(message)
    except Refused as why:
        return Lost(plain(why)) if was_lost(message) else plain(why)
    refused = letter.head.get("refused")
    return letter if refused is None else plain(refused)


def refusal(why: Refused) -> Letter:
    """The reply of a node that does not do the work."""
    return Letter("reply", {"version": VERSION, "refused": str(why)[:1000]})


def answer(letter: Letter, to: Message) -> Message:
    """A reply with a letter."""
    return Message(to_records(letter), reply_to=to)


def error(reason: str, to: Message) -> Message:
    """A reply that says what went wrong."""
    return Message(Error(code=8, reason=reason), reply_to=to)
