"""Text that came from files, databases, candidates and other processes, made fit for databases, messages and terminals.

A terminal obeys control characters and escape sequences, and bidirectional overrides change the order in which a line is
read. Foreign text is therefore never printed as it is. It can also be arbitrarily long. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

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
    """At most `limit` characters of a string. The middle is left out, because remedies stand at the end of a message.

    Args:
        head: the share of what is kept that comes from the beginning.
    """
    if len(text) <= limit:
        return text
    note = " [... {:,} characters left out ...] "
    room = max(limit - len(note.format(len(text))), 0)
    start = int(room * head)
    return (text[:start] + note.format(len(text) - room) + text[len(text) - (room - start) :])[:limit]


def counted(number: int, noun: str) -> str:
    """E.g. "1 kernel", "2,000 kernels"; for nouns whose plural takes an s, or es after one."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


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


def type_text(value: object) -> str:
    """The type of a value with its article, e.g. "an int", "a Tensor"; "None" for None."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in set('aeiou') else 'a'} {name}"


def duration(time_ns: float | None) -> str:
    """A time in the most readable unit, with three or four digits; '-' for None."""
    if time_ns is None:
        return "-"
    for unit, scale in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if time_ns >= scale:
            return f"{time_ns / scale:.4g} {unit}"
    return f"{time_ns:.4g} ns"


def seconds(time_s: float) -> str:
    """A wait: '8 s', '2 min 5 s', '1 h 20 min'."""
    whole = max(1, round(time_s))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def counts(outcomes: Mapping[str, int]) -> str:
    """'3 rejected, 1 wrong_answer', most frequent first; '-' if there are none."""
    ranked = sorted(outcomes.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {name}" for name, count in ranked if count) or "-"


def rate_text(rate: float | None) -> str:
    """A rate with sensible digits, without its unit; '-' for None."""
    return "-" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


_CELL_LIMIT = 1_000  # characters


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], right: Iterable[str] = ()) -> str:
    """Columns under headers, separated by two blanks; those named in `right` are aligned to the right."""
    cells = [[printable(shortened(str(cell), _CELL_LIMIT)) for cell in row] for row in rows]
    widths = [
        max(len(header), *(len(row[i]) for row in cells)) if cells else len(header) for i, header in enumerate(headers)
    ]
    to_right = set(right)

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if header in to_right else cell.ljust(width)
            for header, cell, width in zip(headers, row, widths)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(headers), line(["-" * width for width in widths]), *map(line, cells)])


def html_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plain HTML table of strings. Foreign text is escaped and cannot become markup."""
    from html import escape

    head = "".join(f"<th>{escape(printable(header))}</th>" for header in headers)
    body = "".join("<tr>" + "".join(f"<td>{escape(printable(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def storable_text(text: str, limit: int) -> str:
    """Text in a form that a database can hold and a person wants to read.

    Unpaired surrogates and NUL characters become escapes (`\\udc80`, `\\x00`). A string longer than `limit` characters keeps
    its first fifth and its end; a note between them says how many characters were left out. Other text, and every result of
    this function, is returned unchanged.

    Examples:
        >>> storable_text("half a pair: \\udc80", 100)
        'half a pair: \\\\udc80'
    """
    escaped = shortened(text, limit, head=_STORED_HEAD).encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")
    return shortened(escaped, limit, head=_STORED_HEAD)


def is_storable(text: str) -> bool:
    """Whether the text has neither unpaired surrogates nor NUL characters."""
    return storable_text(text, len(text) + 1) == text
