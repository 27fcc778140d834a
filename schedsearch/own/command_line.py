"""A tunable kernel named on a command line: `kernels.py:matmul`, with the shapes of its arrays as text."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from schedsearch.errors import SchedsearchError, UsageError, did_you_mean
from schedsearch.own.decorator import Tunable
from schedsearch.processes.trial_run import RUN_LIMIT_S, raised_text, trial_run
from schedsearch.workload import Workload

Argument: TypeAlias = str | int | float | bool
_NAMED = re.compile(r"(.+\.py):([^:/]+)")


def is_kernel(text: str) -> bool:
    """Whether a string has the form FILE.py:NAME."""
    return _NAMED.fullmatch(text) is not None


def load_kernel(text: str, limit_s: float = RUN_LIMIT_S) -> Tunable:
    """Runs the file of `FILE.py:NAME`, and returns its tunable NAME.

    The file may import modules beside it. It is run in a process of its own first, because it may end the process or hang.

    Args:
        limit_s: wall seconds that running the file may take.

    Raises:
        UsageError: the file cannot be read or run, or has no such tunable; the text names those that it has.
    """
    match = _NAMED.fullmatch(text)
    assert match is not None, text
    path, name = Path(match[1]), match[2]
    if not path.is_file():
        raise UsageError(f"{path} is not a file; give the Python file that defines {name}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if problem := trial_run(lambda: _run(path), limit_s, ["numba.cuda"]):
        raise UsageError(f"{path} {problem}; correct the file")
    try:
        module = _run(path)
    except SchedsearchError:
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # any exception of the user's code, `sys.exit` included
        raise UsageError(f"{path} cannot be run: {raised_text(error)}; correct the file") from error
    kernels = sorted(key for key, value in vars(module).items() if isinstance(value, Tunable))
    found = vars(module).get(name)
    if isinstance(found, Tunable):
        return found
    what = f"is of type {type(found).__name__}, not a tunable" if name in vars(module) else "does not exist"
    has = f"its kernels: {', '.join(kernels)}" if kernels else "decorate a kernel there with schedsearch.tunable"
    raise UsageError(f"{name} in {path} {what}{did_you_mean(name, kernels)}; {has}")


def _run(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"schedsearch_kernels_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # functions are sent to compiler processes by the name of their module
    spec.loader.exec_module(module)
    return module


class KernelFiles:
    """The Python files that a command line names by --kernels. Each is run when a task first needs it.

    Calling it with the operator of a task, such as "kernels:matmul", and its arguments by name makes the workload.

    Raises:
        UsageError: two files have the same name, or a file does not end in .py.
    """

    def __init__(self, files: Sequence[str], limit_s: float = RUN_LIMIT_S) -> None:
        """`limit_s`: wall seconds that running one file may take."""
        self._limit_s = limit_s
        self._files = {Path(file).stem: file for file in files}
        if wrong := [file for file in files if not file.endswith(".py")]:
            raise UsageError(f"--kernels {wrong[0]!r} is not a Python file; allowed: FILE.py")
        if len(self._files) != len(files):
            raise UsageError(f"two of the files {', '.join(files)} have the same name; rename one of them")
        self._kernels: dict[str, Tunable] = {}

    def __call__(self, op: str, shape: Mapping[str, Argument]) -> Workload:
        """Raises UsageError if no such file was named, it has no such kernel, or the arguments do not fit."""
        stem, _, name = op.partition(":")
        if stem not in self._files:
            known = f"--kernels names {', '.join(self._files.values())}" if self._files else "none is named"
            raise UsageError(
                f"{op!r} is a kernel of your own in {stem}.py; a Python file is run only if you name it ({known}): add "
                f"--kernels {stem}.py"
            )
        if op not in self._kernels:
            self._kernels[op] = load_kernel(f"{self._files[stem]}:{name}", self._limit_s)
        kernel = self._kernels[op]
        names = kernel.definition.parameters
        if unknown := [each for each in shape if each not in names]:
            hint = did_you_mean(unknown[0], names)
            raise UsageError(f"{name} has no argument {unknown[0]!r}{hint}; it takes {', '.join(names)}")
        if missing := [each for each in names if each not in shape]:
            raise UsageError(f"shape lacks {', '.join(missing)}; {name} takes {', '.join(names)}")
        return kernel.task(*(shape[each] for each in names)).workload


def arguments_of_options(kernel: Tunable, shapes: Sequence[str], scalars: Sequence[str]) -> tuple[Argument, ...]:
    """The arguments of `Tunable.tune` from strings like "a=4096x4096:float32" and "n=5", in the order of the kernel's.

    Raises:
        UsageError: an argument is missing, unknown or given twice, or a number cannot be read.
    """
    names = kernel.definition.parameters
    given: dict[str, Argument] = {}
    for option, texts in (("--shape", shapes), ("--scalar", scalars)):
        example = "a=4096x4096:float32" if option == "--shape" else "n=5"
        for text in texts:
            name, equals, value = text.partition("=")
            if not equals or not value:
                raise UsageError(f"{option} {text!r} has no name and value; write it like {option} {example}")
            if name not in names:
                raise UsageError(
                    f"{option} names {name!r}{did_you_mean(name, names)}; {kernel.__name__} takes {', '.join(names)}"
                )
            if name in given:
                raise UsageError(f"{name} is given twice; give each argument of {kernel.__name__} once")
            given[name] = value if option == "--shape" else _number(name, value)
    if missing := [name for name in names if name not in given]:
        raise UsageError(
            f"{kernel.__name__} needs {', '.join(names)}; {', '.join(missing)} not given: write "
            f"--shape {missing[0]}=4096x4096:float32 for an array, --scalar {missing[0]}=5 for a number"
        )
    return tuple(given[name] for name in names)


def _number(name: str, text: str) -> Argument:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    raise UsageError(f"--scalar {name}={text!r} is not a number; allowed: integers, floats, true and false")
