"""The command line: `schedsearch COMMAND ...`. It parses, calls and prints. A failure is one line and an exit code.

Commands are imported when they are looked up, and import their dependencies when they run. `schedsearch --help` is therefore
quick and needs none of the heavy dependencies.
"""

from __future__ import annotations

import errno
import importlib
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click

from schedsearch import plugins
from schedsearch.cli import process, render
from schedsearch.cli.damaged import raise_for_damage
from schedsearch.errors import SchedsearchError, UsageError, did_you_mean
from schedsearch.text import MESSAGE_LIMIT, shortened


class Command(NamedTuple):
    """A command: where it is, and its line in `schedsearch --help`, which imports no command."""

    location: str
    summary: str


# In the order of `--help`.
GROUPS = {
    "Tune and look": {
        "init": Command("schedsearch.cli.init:init", "Write a commented workload file to start from."),
        "tune": Command("schedsearch.cli.tune:tune", "Search for fast configurations and record them."),
        "space": Command("schedsearch.cli.inspect:space", "Show the knobs of each task and legal configurations."),
        "worker": Command("schedsearch.cli.worker:worker", "Lend this machine to the runs of a fleet."),
        "runs": Command("schedsearch.cli.runs:runs", "List tuning runs, or compare two of them."),
        "dashboard": Command("schedsearch.cli.dashboard:dashboard", "Show tuning runs in a browser."),
        "report": Command("schedsearch.cli.dashboard:report", "Write the dashboard, or a table, to one file."),
        "profile": Command("schedsearch.cli.profile:profile", "Read performance counters of the best GPU kernels."),
        "replay": Command("schedsearch.cli.replay:replay", "Repeat a search over recorded spaces, without a device."),
    },
    "Records": {
        "records": Command("schedsearch.cli.records:records", "List, move, verify and prune measurements."),
    },
    "Networks": {
        "build": Command("schedsearch.cli.build:build", "Write an ONNX model as one file that runs here."),
        "run": Command("schedsearch.cli.run:run", "Run such a file: time, layers, error against ONNX."),
        "extract": Command("schedsearch.cli.extract:extract", "Write the layers of an ONNX model as a workload file."),
    },
    "Deploy": {
        "compile": Command("schedsearch.cli.deploy:compile_", "Write the best kernels to a small file for deployment."),
        "explain": Command("schedsearch.cli.deploy:explain", "Show which kernel deployment would use, and why."),
    },
    "Help": {
        "doctor": Command("schedsearch.cli.doctor:doctor", "Show devices, versions, the database, and problems."),
        "templates": Command("schedsearch.cli.inspect:templates", "List the kernel templates."),
        "workload-schema": Command("schedsearch.cli.inspect:workload_schema", "Print the JSON Schema of workload files."),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


class Failure(click.ClickException):
    """An error as the command line shows it: on standard error, without a traceback, with its documented exit code."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]  # click declares it for the class, and reads it from the instance

    def show(self, file: object = None) -> None:
        render.say(f"schedsearch: {shortened(self.format_message(), MESSAGE_LIMIT)}", err=True)


# What the system lacks or forbids; an OSError of another kind is a bug of schedsearch.
_SYSTEM_FAILURES = {
    getattr(errno, name)
    for name in (
        "EACCES", "EAGAIN", "EDQUOT", "EFBIG", "EIO", "ELOOP", "EMFILE", "ENAMETOOLONG", "ENFILE", "ENOMEM", "ENOSPC",
        "EPERM", "EROFS", "ESTALE",
    )
}  # fmt: skip


@contextmanager
def _failures(ctx: click.Context | None = None) -> Iterator[None]:
    """Turns every expected error into a `Failure`; a bug of schedsearch keeps its traceback."""
    try:
        yield
    except SchedsearchError as error:
        render_lines = getattr(error, "render", None)  # a workload file shows each mistake under its line
        text = render_lines() if render_lines else "; ".join(str(error).splitlines())
        if "\n" in text:
            text = f"the workload file is wrong\n{text}"
        raise Failure(text, error.exit_code) from error
    except SystemExit as error:  # of other people's code; commands raise click's own
        raise Failure(f"{_place(error)} calls sys.exit({error.code!r}); correct it", 2) from error
    except click.exceptions.NoArgsIsHelpError:  # a group without a command shows its help
        raise
    except click.UsageError as error:
        at = error.ctx or ctx
        command = at.command_path if at else "schedsearch"
        raise Failure(f"{error.format_message().rstrip('.')}; see: {command} --help", 2) from error
    except BrokenPipeError:  # of a pipe that is not a standard stream; those never raise (see `schedsearch.cli.process`)
        raise click.exceptions.Exit(process.READER_GONE) from None
    except (OSError, MemoryError, RuntimeError) as error:
        if _lacks_memory(error):
            raise Failure("not enough memory; free some, or raise the limit (ulimit -v)", process.SYSTEM_FAILED) from error
        if not isinstance(error, OSError) or error.errno not in _SYSTEM_FAILURES:
            raise
        raise Failure(_system_failure(error), process.SYSTEM_FAILED) from error
    except KeyboardInterrupt:
        raise Failure("interrupted; nothing that was saved is lost", process.INTERRUPTED) from None


def _trial(load: Callable[[], object]) -> str:
    """What is wrong with loading a package. It is tried in a copy of this process, if it has one thread."""
    from schedsearch.processes.trial_run import trial_run

    return trial_run(load) if threading.active_count() == 1 else ""


def _lacks_memory(error: BaseException | None) -> bool:
    """Whether there was no memory for an object, for the stack of a thread, or to load a library."""
    return error is not None and (
        isinstance(error, MemoryError)
        or any(text in str(error) for text in ("can't start new thread", "failed to map segment from shared object"))
        or _lacks_memory(error.__cause__ or error.__context__)
    )


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"line {frame.lineno} of {frame.filename}"


def _system_failure(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename is not None else ""
    remedies = {
        errno.EMFILE: "; raise the limit (ulimit -n)",
        errno.EFBIG: "; raise the limit (ulimit -f)",
        errno.ENOSPC: "; free some space and run it again",
        errno.EDQUOT: "; free some space and run it again",
    }
    return f"the system refused: {where}{error.strerror}{remedies.get(error.errno or 0, '')}"


class LazyGroup(click.Group):
    """A group whose commands are given by location and imported when they are first needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[name].location.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, COMMANDS))
        for group, commands in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(width), command.summary) for name, command in commands.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"No such command {name!r}{did_you_mean(name, COMMANDS)}")
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _failures():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _failures(ctx):
            _require_working_folder()
            plugins.try_first(_trial)
            result = super().invoke(ctx)
            raise_for_damage(ctx)
            return result


def _require_working_folder() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(
            "the current folder is gone or not accessible; change to another one (cd) and run it again"
        ) from error


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="schedsearch")
def main() -> None:
    """Find fast schedules of GPU and CPU kernels by measuring them, keep them, and serve the best.

    \b
    Exit codes: 0 ok, 1 some task has no valid configuration (or a record is wrong), 2 usage or
    bad workload, 3 no usable device, 4 no record, 5 regression, 6 database, 70 a bug of
    schedsearch, 74 the system refused space, memory or files, 130 interrupted with everything
    measured saved, 141 nobody reads standard output.
    """
