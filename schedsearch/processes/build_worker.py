"""The builder's child process: candidates in, machine code out, until the pipe closes."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from schedsearch.backend import BuildResult, CompileError, RejectedError, compile_source
from schedsearch.backend.front_ends import front_end
from schedsearch.backend.sharing import InWorkError, share_through, without_waiting
from schedsearch.backend.shipping import unpack
from schedsearch.config import Config
from schedsearch.measurement import MESSAGE_CHARACTERS, Outcome
from schedsearch.processes.canary import changes, process_state
from schedsearch.processes.channel import ChildEnd
from schedsearch.processes.range_build import RangeResult, RangeTask, build_range
from schedsearch.space import ConfigSpace
from schedsearch.target import Target
from schedsearch.template import Template
from schedsearch.text import storable_text
from schedsearch.verification.reference import CheckedReference
from schedsearch.workload import Workload

# Compiling yields to processes that feed the device or are being timed.
_NICENESS = 10
# Compilers make many objects that live until the kernel is done. Looking for cycles as often as by default takes a tenth
# of the time.
_GC_THRESHOLDS = 100_000, 50, 100


@dataclass(frozen=True)
class BuildTask:
    """`template` is 'module:Class' of a stateless template."""

    token: int
    template: str
    workload: Workload
    config: Config


@dataclass(frozen=True)
class ReferenceTask:
    """The reference kernel of a workload, which the runner would compile otherwise while the device waits."""

    token: int
    workload: Workload


@dataclass(frozen=True)
class CallTask:
    """`make` is a packed function: target -> BuildResult or RangeResult."""

    token: int
    make: bytes


Task = BuildTask | RangeTask | ReferenceTask | CallTask


@dataclass(frozen=True)
class Order:
    """A task for a worker. `waits`: whether it waits for pieces that other workers are making, or postpones the task."""

    task: Task
    waits: bool


@dataclass(frozen=True)
class BuilderReady:
    """Sent once, when the compiler is imported."""


@dataclass(frozen=True)
class BuildStarted:
    """Sent before any code of the candidate runs: from here on, what happens to the process is the candidate's doing."""

    token: int


@dataclass(frozen=True)
class BuildFinished:
    """Either a result, or the reason why there is none.

    Attributes:
        worn: what the candidate changed in the process, which must not build another one then; "" for nothing.
    """

    token: int
    result: BuildResult | RangeResult | None
    outcome: Outcome
    message: str
    build_s: float
    worn: str = ""


@dataclass(frozen=True)
class BuildPostponed:
    """Sent instead of `BuildFinished`: another worker is making a piece of this candidate. Meanwhile this one can build
    others. `worn` as there."""

    token: int
    worn: str


def serve_builds(conn: ChildEnd, target: Target, shared_folder: Path) -> None:
    """Builds one task after another for `target`; the builders of a run share work through the folder."""
    with contextlib.suppress(OSError):
        os.nice(_NICENESS)
    gc.set_threshold(*_GC_THRESHOLDS)
    _import_compiler(target, shared_folder)
    conn.send(BuilderReady())
    while True:
        order: Order = conn.recv()
        task = order.task
        conn.send(BuildStarted(task.token))
        started = time.monotonic()
        if isinstance(task, BuildTask):
            with contextlib.suppress(BaseException):  # the build below meets it again
                _template_and_space(task.template, task.workload, target)
        before = process_state()
        try:
            with contextlib.nullcontext() if order.waits else without_waiting():
                result, outcome, message = _build(task, target)
        except InWorkError:
            conn.send(BuildPostponed(task.token, changes(before)))
            continue
        build_s = time.monotonic() - started
        try:
            conn.send(BuildFinished(task.token, result, outcome, message, build_s, changes(before)))
        except OSError:
            raise
        except BaseException:  # pickling runs code of the candidate, too
            text = f"its result cannot be sent to the run:\n{_traceback()}"
            conn.send(BuildFinished(task.token, None, Outcome.COMPILE_ERROR, text, build_s, changes(before)))


def _import_compiler(target: Target, shared_folder: Path) -> None:
    """Imports the compiler before the first candidate, so that the second this takes is in no candidate's build time."""
    share_through(shared_folder)
    if target.kind == "cuda":
        front_end()
    else:
        importlib.import_module("numba")


@functools.lru_cache(maxsize=16)
def _template_and_space(path: str, workload: Workload, target: Target) -> tuple[Template, ConfigSpace]:
    """The result is cached: a template may take tens of milliseconds for a space, and a builder gets many candidates of it.

    Raises:
        RejectedError: the template cannot run the workload.
    """
    module, _, name = path.partition(":")
    template: Template = getattr(importlib.import_module(module), name)()
    if problem := template.validate(workload, target):
        raise RejectedError(f"{template.name} cannot run {workload.label}: {problem}")
    return template, template.space(workload, target)


def _build(task: Task, target: Target) -> tuple[BuildResult | RangeResult | None, Outcome, str]:
    try:
        if isinstance(task, CallTask):
            return _called(task, target)
        if isinstance(task, RangeTask):
            return build_range(task, target), Outcome.OK, ""
        if isinstance(task, ReferenceTask):
            reference = CheckedReference(task.workload)
            if not reference.pointwise:
                return None, Outcome.REJECTED, "the reference works on whole arrays"
            return reference.build(target), Outcome.OK, ""
        template, space = _template_and_space(task.template, task.workload, target)
        # Tuners propose nothing illegal, but other callers may, and an illegal kernel can hang the device.
        config = template.current(task.config)
        if problems := space.check(config):
            return None, Outcome.REJECTED, f"illegal configuration: {'; '.join(problems)}"
        source = template.kernel(task.workload, target, config)
        return compile_source(source, target), Outcome.OK, ""
    except RejectedError as error:
        return None, Outcome.REJECTED, _text(error)
    except CompileError as error:
        return None, Outcome.COMPILE_ERROR, _text(error)
    except InWorkError:
        raise
    except BaseException:  # the template's code is part of the candidate: SystemExit and the like are its failure, too
        return None, Outcome.COMPILE_ERROR, _traceback()


def _called(task: CallTask, target: Target) -> tuple[BuildResult | RangeResult | None, Outcome, str]:
    """What the compiler refuses is rejected; any other exception may be due to this process."""
    make = unpack(task.make)
    try:
        return make(target), Outcome.OK, ""
    except (CompileError, RejectedError) as error:
        return None, Outcome.REJECTED, _text(error)


def _text(error: Exception) -> str:
    try:
        return storable_text(str(error), MESSAGE_CHARACTERS)
    except BaseException:  # a template may raise a class of its own
        return _traceback()


def _traceback() -> str:
    return storable_text(traceback.format_exc(), MESSAGE_CHARACTERS)
