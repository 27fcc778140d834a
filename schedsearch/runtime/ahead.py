"""Compiles several pieces of machine code at once: whoever needs more than a few kernels asks here before the first.

`compile_ahead` fills a `CodeCache`, where the process that loads and verifies the kernels finds them. It compiles nothing
itself then: it may drive a device, and it would compile one piece after the other.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from schedsearch.backend import BuildResult
from schedsearch.backend.code_cache import CodeCache
from schedsearch.backend.kept import compile_kept
from schedsearch.backend.sharing import NotKeptError, only_kept
from schedsearch.closing import Closing
from schedsearch.config import Config
from schedsearch.deadline import NEVER, Deadline
from schedsearch.errors import DeviceError, UsageError
from schedsearch.identity import sha256_hex
from schedsearch.launch import Artifact
from schedsearch.measurement import Measurement, Outcome
from schedsearch.processes.builder import Builder, Built, available_cores, built_by
from schedsearch.processes.range_build import RangeResult
from schedsearch.progress import stage
from schedsearch.target import Target
from schedsearch.template import Template, load_reference
from schedsearch.text import counted
from schedsearch.verification.compare import BETWEEN, WORDS, Comparison
from schedsearch.verification.reference import CheckedReference, is_rounded, reference_name
from schedsearch.workload import Workload

# Far longer than any compiler takes, and than a search waits, which has other candidates. Then the piece is refused.
_TIMEOUT_S = 600.0
_REFUSED = Outcome.REJECTED, Outcome.COMPILE_TIMEOUT, Outcome.WORKER_LOST


Made = TypeVar("Made", BuildResult, RangeResult)


@dataclass(frozen=True)
class Recipe(Generic[Made]):
    """How a piece of code is made.

    Attributes:
        name: of the piece in a `CodeCache`.
        make: compiles it for a target, in any process; it is sent with everything that it captures. Raises CompileError or
            RejectedError if the compiler refuses it.
        kind: equal for pieces that probably share a run of Numba.
        is_short: whether it takes a fraction of what kernels of templates take.
    """

    name: str
    make: Callable[[Target], Made]
    kind: str = ""
    is_short: bool = False

    def artifact(self: Recipe[BuildResult], code: CodeCache, target: Target) -> Artifact:
        """From the cache, or made now. Raises what `make` raises, and RejectedError for what could not be made ahead."""
        return code.get(self.name, lambda: self.make(target).artifact)


def kernel_recipe(template: Template, workload: Workload, config: Config) -> Recipe[BuildResult]:
    """A kernel of a template. The configuration must be legal; its knobs may have earlier names."""
    config = template.current(config)
    name = f"{template.name} {template.version} {sha256_hex(config.json)} {workload.id}"
    # Stages of an epilogue are functions of the kernel, so that another epilogue needs its own run of Numba.
    kind = f"{template.name} {config.json} {workload.params.get('epilogue', ())}"
    return Recipe(name, functools.partial(_kernel, template, workload, config), kind)


def verifying_recipes(workload: Workload, target: Target) -> list[Recipe[BuildResult]]:
    """The kernels with which `verify_once` judges a kernel of a workload.

    Raises:
        SchedsearchError: the operator's reference cannot be imported.
    """
    recipes = []
    if load_reference(workload.op).pointwise:
        reference = functools.partial(_reference, workload)
        recipes.append(Recipe(reference_name(workload), reference, f"reference {workload.op}", is_short=True))
    if target.kind == "cuda":
        comparisons = [WORDS]
        for spec in workload.outputs:
            comparisons.append(Comparison.of(spec.dtype, is_rounded(workload, spec), spec.partial))
            comparisons += [BETWEEN] if spec.slice_of else []
        recipes += [Recipe(each.name, each.build, is_short=True) for each in dict.fromkeys(comparisons)]
    return recipes


class Compilers(Closing):
    """Compiler processes for one `compile_ahead`. Starting one takes seconds, so that whoever reads or plans a large network
    before may start them first. Not thread-safe.

    Args:
        most: processes; default: one for each core.
    """

    def __init__(self, target: Target, most: int | None = None) -> None:
        self._target, self._most = target, most
        self._opened = contextlib.ExitStack()
        self._started: Builder | None = None

    def start(self, pieces: int) -> None:
        """Starts what so many pieces of code will need, up to a process for each core, and does not wait. Does nothing the
        second time, or if none can start: it may turn out that nothing has to be compiled."""
        if self._started is not None:
            return
        with contextlib.suppress(DeviceError, UsageError):
            self._started = self._opened.enter_context(self._builder(pieces))
            self._started.warm_up(pieces)

    @contextlib.contextmanager
    def take(self, pieces: int) -> Iterator[Builder]:
        """The processes that were started, or others, which start when they have work; they end with the context."""
        if self._started is None:
            with self._builder(pieces) as builder:
                yield builder
            return
        with self:
            yield self._started

    def close(self) -> None:
        """Ends the processes that were started."""
        self._started = None
        self._opened.close()

    def _builder(self, pieces: int) -> Builder:
        # Nothing is timed meanwhile, and this process only waits: it needs no core for itself.
        workers = min(self._most or available_cores(), pieces)
        # A process that has a long piece must not keep a second one waiting.
        return Builder(self._target, workers, timeout_s=_TIMEOUT_S, tasks_per_worker=1)


def compile_ahead(
    recipes: Iterable[Recipe[Any]],
    code: CodeCache,
    target: Target,
    deadline: Deadline = NEVER,
    compilers: Compilers | None = None,
) -> dict[str, Built]:
    """Compiles what `code` lacks, in one process for each core.

    Args:
        deadline: what is not compiled by then is left out, and in work no longer.
        compilers: processes that may have been started already.

    Returns:
        Name -> what was compiled now, or came from the build cache. `code` knows it, and what the compiler refused, crashed
        with or did not finish: that could end this process. Anything else that went wrong is left to `Recipe.artifact`, as
        what cannot be sent to another process.

    Raises:
        DeviceError: no compiler process can start.
    """
    missing = {each.name: each for each in recipes if each.name not in code}
    built: dict[str, Built] = {}
    for each in missing.values():
        if (kept := _kept(each, target)) is None:
            break  # then the others are looked for where they can be compiled as well
        built[each.name] = kept
    missing = {name: each for name, each in missing.items() if name not in built}
    if missing:
        built |= _compiled(missing, code, compilers or Compilers(target), target, deadline)
    code.learn({name: each.artifact for name, each in built.items()})
    return built


def _kept(recipe: Recipe[Any], target: Target) -> Built | None:
    """From the build cache, if nothing has to be compiled."""
    try:
        with only_kept():
            return built_by(recipe.make(target), 0.0)
    except (Exception, NotKeptError):  # a compiler process meets it again
        return None


def _compiled(
    missing: Mapping[str, Recipe[Any]], code: CodeCache, compilers: Compilers, target: Target, deadline: Deadline
) -> dict[str, Built]:
    built, lost = {}, {}
    with compilers.take(len(missing)) as builder:
        workers = builder.workers
        names = {}
        for each in _spread(list(missing.values())):
            with contextlib.suppress(UsageError):
                names[builder.submit_call(each.make)] = each.name
        stage(f"compiling {counted(len(names), 'kernel')} with {counted(workers, 'process')}")
        for done, (token, made) in enumerate(builder.drain(deadline), 1):
            stage(f"compiling kernels: {done} of {len(names)} are done")
            name = names[token]
            if not isinstance(made, Measurement):
                built[name] = made
            elif made.outcome is Outcome.WORKER_LOST and workers > 1:
                lost[name] = missing[name]
            elif made.outcome in _REFUSED:
                code.refuse(name, made.message)
    if lost:  # perhaps for want of memory: now one after the other
        built |= _compiled(lost, code, Compilers(target, most=1), target, deadline)
    return built


def _spread(recipes: list[Recipe[Any]]) -> list[Recipe[Any]]:
    """In another order: first one of each kind, then the second of each. While a process runs Numba for a kind, others that
    have a piece of that kind wait, each with a core. Short pieces come last, so that in the end no process works alone at a
    long one."""
    seen: dict[str, int] = {}
    places = []
    for each in recipes:
        kind = each.kind or each.name
        seen[kind] = seen.get(kind, 0) + 1
        places.append(seen[kind])
    return [each for _, each in sorted(zip(places, recipes), key=lambda pair: (pair[1].is_short, pair[0]))]


def _kernel(template: Template, workload: Workload, config: Config, target: Target) -> BuildResult:
    return compile_kept(template.kernel(workload, target, config), target)


def _reference(workload: Workload, target: Target) -> BuildResult:
    return CheckedReference(workload).build(target)
