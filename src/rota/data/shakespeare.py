"""Shakespeare's plays by role, after LEAF (Caldas et al. 2018), from Jon Bosak's XML edition."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

import numpy as np
import torch

from rota.arrays import Array
from rota.data import files
from rota.data.federation import Examples, Federation, Partition
from rota.data.owners import federate_owned
from rota.errors import BadInput

FOLDER = "shakespeare"
# MD5 sum, file name, and the longer name under which some copies of the edition keep it
PLAYS = """
d2ff15ce12f1fe15fbd47121b81f93dd a_and_c
3c990a4bb9d3d7adf46ca702b2fa66c0 all_well alls_well
127080ab96b8279838d1c22f4a3cd64a as_you
9a187d943226735ae8b2a31f72d2ab6c com_err comedy
7bd6d7619a2c7062c7fa923ff5c3dbf5 coriolan coriolanus
8ea8c797d15ab36a60e14e5dc85a1a82 cymbelin cymbeline
cffda697bf588dd78ea9989bf0f9c95a dream
5bdaa35b07c700e26781f0113f74bd71 hamlet
1c4b79a6f7bcb738dfd06595dc47c80c hen_iv_1 henry_iv_1
31f514f20e4182705c547dd2f4b7665d hen_iv_2 henry_iv_2
b68bd99e97a831097a34750adac630b8 hen_v henry_v
7fc9b219cf4bfcf30aec1d1cfc76b45b hen_vi_1 henry_vi_1
ab7a13aa5f6474a7e25a94a825fd0fc2 hen_vi_2 henry_vi_2
7889c68557fad38a773a023ff2a7fc12 hen_vi_3 henry_vi_3
408a21a2b5f86eab4b8df84e51fa8b07 hen_viii henry_viii
89bfa69eaeae2e237e8649e092b6a734 j_caesar julius_caesar
1ef9577f438bb2003b19a82e4434f246 john
90ab9afb826150a26012927db6856eb8 lear
ca81162640e0c45f8e4074ab057a3293 lll loves_labor
bbdfd3783a469750d8e6ad94069f086d m_for_m
d92560e3189998a4e85e14b42fa90436 m_wives merry_wives
9ac38d0fcf9dcdafea2448349a7ff7ae macbeth
999016f72bab001c97638909deaf41fd merchant
2d1f7ab7b8c19223b49ccdef032bccfd much_ado
7dd2133a6e6104d79e017cd7062aa939 othello
e0bc7258b18fa1af1127ac0b3fafeb6a pericles
1bab390c7f6ea5a12e9425785e07b184 r_and_j
36b084c1fec0a9b59b070fea70e73f1f rich_ii richard_ii
96ce2a2962f104d916b59b8450856008 rich_iii richard_iii
f2af463b704b6ace58f3e08b70e8d7b8 t_night twelfth_night
f4db99947894692de7fc78aaf135d931 taming
2f52252119993977b30777348b1466f3 tempest
3bf73c0cb96379b9a159523236864739 timon
ce3736574a477abef6173bee6e9161f2 titus
580e9db963b5eae15a4a97a04bf6265c troilus
089f6bfdaaca677dc37039cdea01b1c0 two_gent two_gentlemen
b9eeaaf8c59fbe231977b77e720af99d win_tale winters_tale
"""
FILES = tuple(
    files.Remote(
        f"{name}.xml",
        (md5,),
        (f"https://www.ibiblio.org/xml/examples/shakespeare/{name}.xml",),
        tuple(f"{alias}.xml" for alias in aliases),
    )
    for md5, name, *aliases in (line.split() for line in PLAYS.split("\n") if line)
)
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""LEAF's 80 letters, in its order."""
LENGTH = 80


def shakespeare(
    partition: Partition | None = None,
    stride: int = 80,
    least: int = 1,
    matched_test: bool = False,
    seed: int = 0,
) -> Federation:
    """Shakespeare's plays: 80 characters in, the next one out; the larger roles are the clients.

    x is int64 [n, 80] and y int64 [n], both indices into LEAF's 80 letters. A role's speeches, in
    the order of the play, are one text. The first 80 % of it are for training, and the rest is the
    client's own test set, so no test character was seen in training. Examples start every `stride`
    characters of both. LEAF takes stride 1, which makes 3 GB of x that overlap in 79 of 80
    characters. With stride 80 each character is read once per epoch, and x takes 30 MB. Roles with
    fewer than `least` training examples, or without test examples, are left out.
    """
    if stride < 1 or least < 1:
        raise BadInput(
            f"shakespeare: stride is {stride} and least is {least}, but both must be at least 1"
        )
    paths = files.find(FOLDER, FILES)
    texts = roles(paths[file.name].read_bytes() for file in FILES)
    pairs = [_cut(text, stride) for text in texts.values()]
    pairs = [(train, test) for train, test in pairs if len(train) >= least and len(test)]
    if not pairs:
        raise BadInput(f"shakespeare: no role has {least} training examples: lower least or stride")
    parts = _examples([train for train, _ in pairs]), _examples([test for _, test in pairs])
    return federate_owned(
        "shakespeare", *parts, partition, classes=len(LETTERS), matched_test=matched_test, seed=seed
    )


def roles(plays: Iterable[bytes]) -> dict[tuple[int, str], str]:
    """Collect what each role says: (number of the play, speaker) -> text, one line per speech.

    Upper and lower case name the same speaker. A speech of several speakers counts for the first
    one named, and a speech without a name (a few prologues) for none. Stage directions are no
    speech.
    """
    # The plays' MD5 sums were checked, so no forged XML gets here, and ElementTree fetches no
    # external entities.
    speeches: dict[tuple[int, str], list[str]] = {}
    for number, play in enumerate(plays):
        for speech in ElementTree.fromstring(play).iter("SPEECH"):
            speaker = (speech.findtext("SPEAKER") or "").strip().upper()
            lines = [_words(line) for line in speech.iter("LINE")]
            if speaker:
                speeches.setdefault((number, speaker), []).append(" ".join(" ".join(lines).split()))
    return {role: "\n".join(own) for role, own in speeches.items()}


def _words(line: ElementTree.Element) -> str:
    return (line.text or "") + "".join(child.tail or "" for child in line)


def encode(text: str) -> Array:
    """Turn letters into indices. A character that is not among LEAF's letters becomes a space."""
    table = np.full(128, LETTERS.index(" "), np.int64)
    table[[ord(letter) for letter in LETTERS]] = np.arange(len(LETTERS))
    return table[np.frombuffer(text.encode("ascii", "replace"), np.uint8)]


def _cut(text: str, stride: int) -> tuple[Array, Array]:
    """A role's training and test windows of 81 characters."""
    codes = encode(text)
    cut = len(codes) * 4 // 5
    return _windows(codes[:cut], stride), _windows(codes[cut:], stride)


def _windows(codes: Array, stride: int) -> Array:
    if len(codes) <= LENGTH:
        return np.empty((0, LENGTH + 1), np.int64)
    return np.lib.stride_tricks.sliding_window_view(codes, LENGTH + 1)[::stride]


def _examples(windows: list[Array]) -> Examples:
    rows = torch.from_numpy(np.concatenate(windows))
    owners = np.repeat(np.arange(len(windows)), [len(own) for own in windows])
    return Examples(rows[:, :LENGTH].contiguous(), rows[:, LENGTH].contiguous(), owners)
