"""Text that came from files, databases, candidates and other processes, made fit for databases, messages and terminals.

A terminal obeys control characters and escape sequences, and bidirectional overrides change the order in which a line is
read. Foreign text is therefore never printed as it is. It can also be arbitrarily long. Standard library only.
"""

from __future__ import annotations

MESSAGE_LIMIT = 10_000  # characters of the text of an exception, and of a message on a terminal
VALUE_LIMIT = 120  # characters of a value that a message quotes
_NOTE_CHARACTERS = 60  # room for the note about what was left out


def printable(text: str, *, lines: bool = False) -> str:
    r"""Escapes all characters that do not show as themselves: "\x1b[2J" becomes r"\x1b[2J".

    These are the characters for which `str.isprintable` is false: controls, surrogates, private and unassigned code points,
    formatting such as bidirectional overrides, and blanks other than the space.

    Args:
        text: from anywhere.
        lines: keep line breaks and tabs.
    """
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters of a text. The middle is left out, because remedies stand at the end of a message."""
    if len(text) <= limit:
        return text
    gap = f" [... {len(text) - limit:,} characters or more left out ...] "
    room = max(limit - len(gap), 0)
    tail = room // 3
    return (text[: room - tail] + gap + text[len(text) - tail :])[:limit]


def quoted(value: object, limit: int = VALUE_LIMIT) -> str:
    """A value as a message quotes it: as `repr` shows it, escaped and at most `limit` characters long.

    >>> quoted("conv\\x1b[2J")
    "'conv\\\\x1b[2J'"
    """
    if isinstance(value, str) and len(value) > limit:
        value = shortened(value, limit)  # `repr` of a long text takes as long as the text
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than sys.get_int_max_str_digits()
        text = f"<{type(value).__name__} too long to show>"
    return shortened(printable(text), limit + 2)


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
