"""Text that came from files, databases, candidates and other processes, made fit for databases, messages and terminals.

A terminal obeys control characters and escape sequences, and bidirectional overrides change the order in which a line is
read. Foreign text is therefore never printed as it is. It can also be arbitrarily long. Standard library only.
"""

from __future__ import annotations

MESSAGE_LIMIT = 10_000  # characters of the text of an exception, and of a message on a terminal
VALUE_LIMIT = 120  # characters of a value that a message quotes
_STORED_HEAD = 0.2  # of a long text in a database: a compiler's output ends with the error


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


def shortened(text: str, limit: int, *, head: float = 2 / 3) -> str:
    """At most `limit` characters of a text. The middle is left out, because remedies stand at the end of a message.

    Args:
        head: the share of what is kept that comes from the beginning.
    """
    if len(text) <= limit:
        return text
    note = " [... {:,} characters left out ...] "
    room = max(limit - len(note.format(len(text))), 0)
    start = int(room * head)
    return (text[:start] + note.format(len(text) - room) + text[len(text) - (room - start) :])[:limit]


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
    escaped = shortened(text, limit, head=_STORED_HEAD).encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    return shortened(escaped, limit, head=_STORED_HEAD)


def is_storable(text: str) -> bool:
    """Whether the text has neither unpaired surrogates nor NUL characters."""
    return storable_text(text, len(text) + 1) == text
