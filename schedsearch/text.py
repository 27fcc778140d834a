"""Text of foreign code (messages of candidates, names) in a form that can be stored and shown."""

from __future__ import annotations

_NOTE_CHARACTERS = 60  # room for the note about what was left out


def storable_text(text: str, limit: int) -> str:
    """Text in a form that a database can hold and a person wants to read.

    Unpaired surrogates and NUL characters become escapes (`\\udc80`, `\\x00`). A text of more than `limit` characters keeps
    its first fifth and its end; a note between them says how many characters were left out. Other text, and every result of
    this function, is returned unchanged.

    Example:
        >>> storable_text("half a pair: \\udc80", 100)
        'half a pair: \\\\udc80'
    """
    escaped = _shortened(text, limit).encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    return _shortened(escaped, limit)


def is_storable(text: str) -> bool:
    """Whether the text has neither unpaired surrogates nor NUL characters."""
    return storable_text(text, len(text) + 1) == text


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head, tail = text[: limit // 5], text[len(text) - (limit - limit // 5 - _NOTE_CHARACTERS) :]
    return f"{head}\n... ({len(text) - len(head) - len(tail)} characters left out)\n{tail}"
