"""The command line: `schedsearch COMMAND ...`. It parses, calls and prints. A failure is one line and an exit code.

Commands are imported when they are looked up, and import their dependencies when they run. `schedsearch --help` is therefore
quick and needs none of the heavy dependencies.
"""

from __future__ import annotations

import errno
import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import click

from schedsearch.cli.damaged import raise_for_damage
from schedsearch.errors import SchedsearchError

# In the order of `--help`.
COMMANDS = {
    "tune": "schedsearch.cli.tune:tune",
    "space": "schedsearch.cli.inspect:space",
    "templates": "schedsearch.cli.inspect:templates",
    "records": "schedsearch.cli.records:records",
    "compile": "schedsearch.cli.deploy:compile_",
    "explain": "schedsearch.cli.deploy:explain",
    "profile": "schedsearch.cli.profile:profile",
    "replay": "schedsearch.cli.replay:replay",
    "doctor": "schedsearch.cli.doctor:doctor",
    "workload-schema": "schedsearch.cli.inspect:workload_schema",
}


class Failure(click.ClickException):
    """An error as the command line shows it: on standard error, without a traceback, with its documented exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click declares it for the class, and reads it from the instance

    def show(self, file: Any = None) -> None:
        click.echo(f"schedsearch: {self.format_message()}", file=file or sys.stderr)


@contextmanager
def _failures(ctx: click.Context | None = None) -> Iterator[None]:
    """Turns every expected error into a `Failure`; a bug of schedsearch keeps its traceback."""
    try:
        yield
    except SchedsearchError as error:
        render = getattr(error, "render", None)  # a workload file shows each mistake under its line
        text = render() if render else "; ".join(str(error).splitlines())
        if "\n" in text:
            text = f"the workload file is wrong\n{text}"
        raise Failure(text, error.exit_code) from error
    except click.exceptions.NoArgsIsHelpError:  # a group without a command shows its help
        raise
    except click.UsageError as error:
        at = error.ctx or ctx
        command = at.command_path if at else "schedsearch"
        raise Failure(f"{error.format_message().rstrip('.')}; see: {command} --help", 2) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        raise Failure(f"cannot write the output: {error.strerror}; free some space and run it again", 2) from error
    except KeyboardInterrupt:
        raise Failure("interrupted; nothing that was saved is lost", 130) from None


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Makes SIGTERM act like Ctrl-C, also before a tuning run installs its own handler."""
    if threading.current_thread() is not threading.main_thread():  # which alone may handle signals
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class LazyGroup(click.Group):
    """A group whose commands are given by location and imported when they are first needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _failures():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _failures(ctx), _terminated_as_interrupted():
            result = super().invoke(ctx)
            raise_for_damage(ctx)
            return result


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="schedsearch")
def main() -> None:
    """Find fast schedules of GPU and CPU kernels by measuring them, keep them, and serve the best.

    \b
    Exit codes: 0 ok, 1 some task has no valid configuration (or a record is wrong), 2 usage or
    bad workload, 3 no usable device, 4 no record, 5 regression, 6 database, 130 interrupted
    with everything measured saved.
    """
