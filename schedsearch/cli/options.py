"""Kinds of option values that several commands take."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click

from schedsearch.measurement import MODES
from schedsearch.target import PRESETS

CARDS = ", ".join(PRESETS)
"""Targets for commands that need no device."""

_BOUNDS = re.compile(r"\s*([^=,]+?)\s*=\s*(-?\d{1,20})\s*\.\.\s*(-?\d{1,20})\s*")

mode_option = click.option("--mode", type=click.Choice(MODES), help="How times are taken. Default: the workload file's.")
"""The option of commands that measure, or that read records of one mode."""

kernels_option = click.option(
    "--kernels",
    "kernel_files",
    metavar="FILE.py",
    multiple=True,
    help="Run this Python file, whose kernels the workload file names by op: FILE:KERNEL.",
)


_FLEET_OPTIONS = (
    click.option("--tls", metavar="FOLDER", help="For tls://: a folder with ca.pem, cert.pem and key.pem."),
    click.option("--trust-network", is_flag=True, help="Use tcp:// of another machine: trusted people alone reach it."),
)


def fleet_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of commands that talk to a scheduler."""
    for option in reversed(_FLEET_OPTIONS):
        command = option(command)
    return command


class AtLeast(click.ParamType["int"]):
    """An integer with a lower limit, e.g. a number of trials."""

    name = "integer"

    def __init__(self, least: int) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is not an integer; allowed: {self.least} or more", param, ctx)
        if number < self.least:
            self.fail(f"{number} is too small; allowed: {self.least} or more", param, ctx)
        return number


class Sizes(click.ParamType["dict[str, tuple[int, int]]"]):
    """Names of dimensions with their bounds: n=1..64,h=480..800."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, tuple[int, int]]:
        from schedsearch.ops.params import MAX_INT

        found: dict[str, tuple[int, int]] = {}
        for text in str(value).split(","):
            match = _BOUNDS.fullmatch(text)
            if match is None:
                self.fail(
                    f"{text!r} is not a dimension with bounds; write NAME=LEAST..MOST, e.g. n=1..64,h=480..800", param, ctx
                )
            name, least, most = match[1], int(match[2]), int(match[3])
            if least > most:
                self.fail(
                    f"{name}={least}..{most} is reversed; write the smaller bound first: {name}={most}..{least}", param, ctx
                )
            if least < 0 or most > MAX_INT:
                self.fail(f"{name}={least}..{most} is not possible; allowed: sizes from 0 to {MAX_INT}", param, ctx)
            if most == 0:
                self.fail(f"{name}={least}..{most} has no size but 0; allowed: a largest size of 1 or more", param, ctx)
            if name in found:
                self.fail(f"{name} is given twice; give each dimension once", param, ctx)
            found[name] = (least, most)
        return found


def all_sizes(
    context: click.Context, parameter: click.Parameter, given: tuple[dict[str, tuple[int, int]], ...]
) -> dict[str, tuple[int, int]] | None:
    """The dimensions of an option that may be repeated; None if it is not given."""
    found: dict[str, tuple[int, int]] = {}
    for sizes in given:
        for name in sizes.keys() & found.keys():
            raise click.BadParameter(f"{name} is given twice; give each dimension once")
        found |= sizes
    return found or None
