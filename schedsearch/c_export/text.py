"""Names and strings from databases, made fit for C: nothing in them can end a string, a comment or a line of code."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from schedsearch.errors import UsageError

PREFIX = "schedsearch"  # of the names in the runtime and in what is generated
_LONGEST_NAME = 72
_LONGEST_PREFIX = 32
# A string literal, or the prefix in a name, in that of a header or library (lib, -l), or in an option of cmake (-D).
_PREFIXED = re.compile(rf'"(?:[^"\\\n]|\\.)*"|(#include "|\b(?:lib|l|D)?)({PREFIX}|{PREFIX.upper()})(?=_|\.h)')
_HEADERS = frozenset(
    {
        "assert", "complex", "ctype", "cuda", "errno", "fenv", "float", "inttypes", "iso646", "limits", "locale", "math",
        "pthread", "setjmp", "signal", "stdalign", "stdarg", "stdatomic", "stdbool", "stddef", "stdint", "stdio", "stdlib",
        "stdnoreturn", "string", "tgmath", "threads", "time", "uchar", "unistd", "wchar", "wctype",
    }
)  # fmt: skip
_LINE = 100  # characters of a string literal
# Words that a parameter must not be called: keywords of C and C++, and macros of the usual headers and compilers.
_RESERVED = frozenset(
    {
        "alignas", "alignof", "and", "and_eq", "asm", "assert", "auto", "bitand", "bitor", "bool", "break", "case",
        "catch", "char", "char8_t", "char16_t", "char32_t", "class", "compl", "concept", "const", "consteval",
        "constexpr", "constinit", "const_cast", "continue", "co_await", "co_return", "co_yield", "decltype", "default",
        "delete", "do", "double", "dynamic_cast", "else", "enum", "errno", "explicit", "export", "extern", "false",
        "float", "for", "friend", "goto", "i386", "if", "inline", "int", "linux", "long", "mutable", "namespace", "new",
        "noexcept", "not", "not_eq", "nullptr", "operator", "or", "or_eq", "private", "protected", "public", "register",
        "reinterpret_cast", "requires", "restrict", "return", "short", "signed", "sizeof", "static", "static_assert",
        "static_cast", "stderr", "stdin", "stdout", "struct", "switch", "template", "this", "thread_local", "throw",
        "true", "try", "typedef", "typeid", "typename", "typeof", "union", "unix", "unsigned", "using", "virtual", "void",
        "volatile", "wchar_t", "while", "xor", "xor_eq",
    }
)  # fmt: skip


def identifier(text: str) -> str:
    """The beginning of a C name for a string: lower-case letters, digits and underscores.

    Examples:
        >>> identifier("conv2d 1x14x14x64 k64 3x3 p1 f16 NHWC")
        'conv2d_1x14x14x64_k64_3x3_p1_f16_nhwc'
    """
    name = re.sub(r"[^a-z0-9]+", "_", text.lower())[:_LONGEST_NAME].strip("_")
    return name if name[:1].isalpha() else f"kernel_{name}".rstrip("_")


def check_prefix(prefix: str) -> None:
    """Raises UsageError if the names of an export cannot begin so."""
    if prefix == PREFIX:
        return
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", prefix) or len(prefix) > _LONGEST_PREFIX:
        raise UsageError(
            f"{prefix!r:.80} cannot begin the names of an export; allowed: a lower-case letter, then letters, digits and "
            f"single underscores, {_LONGEST_PREFIX} characters at most"
        )
    if prefix.startswith(PREFIX):
        raise UsageError(f"{prefix!r} begins with {PREFIX!r}, as the names of exports without a prefix do; choose another")
    if prefix in _HEADERS:
        raise UsageError(f"{prefix}.h is a header of the system; choose another prefix than {prefix!r}")


def with_prefix(text: str, prefix: str) -> str:
    """Lets the names in a file of an export begin with another prefix. What stands in string literals stays.

    Examples:
        >>> with_prefix('int schedsearch_run(void); /* see schedsearch.h */', "net")
        'int net_run(void); /* see net.h */'
    """

    def replaced(match: re.Match[str]) -> str:
        before, found = match.groups()
        if found is None:
            return match[0]
        return before + (prefix if found == PREFIX else prefix.upper())

    return text if prefix == PREFIX else _PREFIXED.sub(replaced, text)


def parameter_names(names: Iterable[str], taken: Collection[str]) -> list[str]:
    """A C name for each name of an argument: itself where possible, else with underscores appended.

    Args:
        taken: names that the function uses otherwise.
    """
    found: list[str] = []
    for name in names:
        made = re.sub(r"[^A-Za-z0-9_]", "_", name)
        if made.startswith("_") or not made or not made[0].isalpha():
            made = f"a{made}"  # a leading underscore is the compiler's
        if made.isupper():
            made = f"{made}_"  # macros are in capitals
        while made in _RESERVED or made in taken or made in found:
            made += "_"
        found.append(made)
    return found


def string(text: str) -> str:
    """A string literal, in several lines if it is long.

    All but plain ASCII is written as octal escapes, and so is the question mark, which begins trigraphs.
    """
    pieces: list[str] = []
    line = ""
    for byte in text.encode(errors="surrogateescape"):
        character = chr(byte)
        line += character if " " <= character <= "~" and character not in '"\\?' else f"\\{byte:03o}"
        if len(line) >= _LINE:
            pieces.append(line)
            line = ""
    if line or not pieces:
        pieces.append(line)
    return "\n    ".join(f'"{piece}"' for piece in pieces)


def comment(text: str) -> str:
    """What of a string may stand in a comment."""
    return re.sub(r"[^A-Za-z0-9 .,:;=+_()-]", "_", text)[:200]


def words(code: bytes) -> str:
    """Bytes as an initialiser of uint64_t in little-endian order; the last word is filled with zeros.

    A compiler reads one number for eight bytes, and a word of zeros takes two characters.
    """
    padded = code + bytes(-len(code) % 8)
    numbers = [int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8)]
    texts = [f"{number:#x}" if number else "0" for number in numbers]
    lines, line = [], ""
    for text in texts:
        if len(line) + len(text) > _LINE + 20:
            lines.append(line)
            line = ""
        line += f"{text},"
    return "\n".join([*lines, line])
