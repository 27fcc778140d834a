"""Caches of Kernel Tuner whose run did not finish: it writes the closing brackets in the end, and needs none to go on."""

from __future__ import annotations

import re

from schedsearch.typed import JsonObject

_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|["{}\[\]]', re.DOTALL)
_CACHE = re.compile(rb'"cache"\s*:\s*$')
_BEFORE = 200  # bytes in which the name of the cache is looked for


class Unfinished(JsonObject):
    """A cache as far as it was written.

    Attributes:
        cut: how many entries were begun and are left off.
    """

    def __init__(self, data: JsonObject, cut: int) -> None:
        super().__init__(data)
        self.cut = cut


def closed(data: bytes) -> tuple[bytes, int] | None:
    """The text of an unfinished cache up to its last complete entry, with closing brackets.

    Returns:
        The text, and how many entries were begun after it; None if the text is not an unfinished cache.
    """
    depth, end, inside = 0, 0, False
    for found in _TOKEN.finditer(data):
        token = found[0]
        if token == b'"':  # a string that does not end
            break
        if token in (b"{", b"["):
            depth += 1
            if depth == 2 and token == b"{" and _CACHE.search(data, max(0, found.start() - _BEFORE), found.start()):
                end, inside = found.end(), True
        elif token in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return None
            if inside and depth <= 2:
                end, inside = found.end(), depth == 2
    if not end:
        return None
    rest = data[end:].strip(b" \t\r\n,\0")
    if rest and not (inside and rest.startswith(b'"')):
        return None
    return data[:end] + (b"}}" if inside else b"}"), int(bool(rest))
