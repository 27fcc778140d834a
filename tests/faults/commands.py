"""Calls the command line in this process, and says what every answer of it must look like."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from schedsearch.cli.main import main
from schedsearch.errors import SchedsearchError

from .fuzzing import Broken

EXIT_CODES = range(7)
MAX_MESSAGE_CHARACTERS = 12_000
MAX_OUTPUT_CHARACTERS = 4 << 20


@dataclass(frozen=True)
class Answer:
    """What a command wrote and how it ended."""

    code: int
    out: str
    err: str

    @property
    def word(self) -> str:
        return "ok" if self.code == 0 else f"exit {self.code}"


def call(
    *arguments: str | Path,
    names: tuple[str, ...] = (),
    codes: tuple[int, ...] = (0, 2, 6),
    longest: int = MAX_MESSAGE_CHARACTERS,
) -> Answer:
    """Runs a command and checks its answer.

    Args:
        arguments: as a shell would give them.
        names: a failure must name one of these, e.g. the file at fault.
        codes: the exit codes that are possible.
        longest: characters of the longest message.

    Raises:
        Broken: another exit code, no message or a bad one, output that a terminal would obey.
        Exception: what the command let through, which would be a traceback.
    """
    texts = [str(argument) for argument in arguments]
    ran = CliRunner().invoke(main, texts)
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    answer = Answer(ran.exit_code, ran.stdout, ran.stderr)
    said = f"schedsearch {' '.join(texts)}: exit {answer.code}"
    if answer.code not in codes:
        raise Broken(f"{said} is not one of {codes}: {answer.err[-500:]!r}")
    if answer.code:
        check_message(answer.err, names, said, longest)
        if not answer.err.splitlines()[-1].startswith("schedsearch: ") and "schedsearch: " not in answer.err:
            raise Broken(f"{said}: standard error is {answer.err[:500]!r}")
    check_text(answer.out, said, MAX_OUTPUT_CHARACTERS)
    check_text(answer.err, said, MAX_OUTPUT_CHARACTERS)
    if "--json" in texts and not answer.code:
        for line in [answer.out] if answer.out.startswith(("[", "{\n")) else answer.out.splitlines():
            json.loads(line, parse_constant=_no_constant)
    return answer


def check_error(error: SchedsearchError, names: tuple[str, ...], said: str) -> None:
    """Checks the text of an error that a call raised, as `check_message`."""
    if error.exit_code not in EXIT_CODES:
        raise Broken(f"{said}: exit code {error.exit_code}")
    check_message(str(error), names, said)


def check_message(text: str, names: tuple[str, ...], said: str, longest: int = MAX_MESSAGE_CHARACTERS) -> None:
    """Raises Broken unless a message is short, has something to say, names the file and nothing that a terminal obeys."""
    if not text.strip():
        raise Broken(f"{said}, but the message is empty")
    check_text(text, said, longest)
    if names and not any(name in text for name in names):
        raise Broken(f"{said}, and the message names none of {', '.join(names)}: {text[:500]!r}")
    if "Traceback" in text:
        raise Broken(f"{said}: a traceback: {text[-500:]!r}")


def check_text(text: str, said: str, longest: int) -> None:
    """Raises Broken if a string is too long or has characters that a terminal obeys or that cannot be encoded."""
    if len(text) > longest:
        raise Broken(f"{said}: a string of {len(text):,} characters, {text[:200]!r} ...")
    for character in set(text) - {"\n", "\t"}:
        if unicodedata.category(character) in ("Cc", "Cs"):
            at = text.index(character)
            raise Broken(f"{said}: the character {character!a} in {text[max(at - 100, 0) : at + 40]!a}")


def _no_constant(name: str) -> Any:
    raise Broken(f"--json printed {name}, which is not JSON")
