"""Kinds of option values that several commands take."""

from __future__ import annotations

from typing import Any

import click

from schedsearch.measurement import MODES

mode_option = click.option("--mode", type=click.Choice(MODES), help="How times are taken. Default: the workload file's.")
"""The option of commands that measure, or that read records of one mode."""

kernels_option = click.option(
    "--kernels",
    "kernel_files",
    metavar="FILE.py",
    multiple=True,
    help="Run this Python file, whose kernels the workload file names by op: FILE:KERNEL.",
)


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
