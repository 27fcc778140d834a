"""Builds one configuration for the sizes of a range that share its machine code. Runs in the builder's child process."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from schedsearch.backend import BuildResult, RejectedError, compile_source
from schedsearch.backend.relaunch import relaunched
from schedsearch.config import Config
from schedsearch.launch_sizes import SizedPlan
from schedsearch.space import ConfigSpace, closest_legal
from schedsearch.target import Target
from schedsearch.template import KernelSource, Template
from schedsearch.typed import JsonObject
from schedsearch.workload import Workload, WorkloadRange


@dataclass(frozen=True)
class RangeTask:
    """A configuration to build for many sizes.

    Attributes:
        template: 'module:Class' of a stateless template.
        config: None: the template's rule-based configuration for the size `origin`.
        origin: the size that the machine code must serve.
        restrict: knob -> the only values that are allowed.
    """

    token: int
    template: str
    of_range: WorkloadRange
    config: Config | None
    origin: int
    restrict: Mapping[str, Sequence[int | str | bool]] = field(default_factory=dict)


@dataclass(frozen=True)
class RangeResult:
    """Machine code of a configuration, with the launch plan of each size that shares it.

    `config` is a dictionary, because messages of builders are plain values; `plan`: `SizedPlan.to_json`.
    """

    result: BuildResult
    config: JsonObject
    plan: str


def build_range(task: RangeTask, target: Target) -> RangeResult:
    """Compiles the kernels of all sizes that share their machine code with that of `task.origin`.

    Raises:
        RejectedError: the configuration is not legal for the origin, or serves no range.
        CompileError: as `compile_source`.
    """
    template, spaces = _template_and_spaces(task.template, task.of_range, target)
    workloads = {size: task.of_range.at(size) for size in task.of_range.sizes}
    return build_shared(template, workloads, spaces, target, task.config, task.origin, task.restrict)


def build_shared(
    template: Template,
    workloads: Mapping[int, Workload],
    spaces: Callable[[int], ConfigSpace | None],
    target: Target,
    config: Config | None,
    origin: int,
    restrict: Mapping[str, Sequence[int | str | bool]] = MappingProxyType({}),
) -> RangeResult:
    """As `build_range`, for any workloads of several sizes.

    Args:
        workloads: size -> workload.
        spaces: gives the space of a size; None if the template cannot run it.
    """
    from schedsearch.backend.run_time import shared_code  # with the compiler, which importers of this module need not have

    at_origin = workloads[origin]
    if (space := spaces(origin)) is None:
        raise RejectedError(f"{template.name} cannot run {at_origin.label}")
    if config is None:
        default = default_for_sizes(template, workloads, spaces, target, origin)
        config = closest_legal(template.restricted(space, restrict), default) if restrict else default
    config = template.current(config)
    if problems := space.check(config):
        raise RejectedError(f"illegal configuration: {'; '.join(problems)}")
    sources: dict[int, KernelSource] = {}
    sources[origin] = template.kernel(at_origin, target, config)
    for size, workload in workloads.items():
        with contextlib.suppress(Exception):  # the template's: the configuration then serves the other sizes
            space = spaces(size)
            if space is not None and not space.check(config):
                sources[size] = template.kernel(workload, target, config)
    group = next(each for each in shared_code(dict(sorted(sources.items()))) if origin in each)
    made = compile_source(group[origin], target)
    launched = {size: relaunched(made.artifact, group[origin], source) for size, source in group.items()}
    try:
        sized = SizedPlan.of({size: artifact.plan for size, artifact in launched.items() if artifact is not None})
    except ValueError as error:
        raise RejectedError(f"the configuration serves no range of sizes: {error}") from error
    return RangeResult(made, dict(config), sized.to_json())


def default_for_sizes(
    template: Template,
    workloads: Mapping[int, Workload],
    spaces: Callable[[int], ConfigSpace | None],
    target: Target,
    origin: int,
) -> Config:
    """The rule-based configuration for the size `origin`, which the template can run.

    It may have values that no other size has, such as all rows of its images. Those are then replaced by the next smaller
    ones that the size before has, too, so that the machine code serves a range.
    """
    space = spaces(origin)
    assert space is not None
    default = template.default(workloads[origin], target, space)
    others = {size: found for size in workloads if size != origin and (found := spaces(size)) is not None}
    before = max((size for size in others if size < origin), default=None)
    if before is None or any(not other.check(default) for other in others.values()):
        return default
    values = dict(default)
    for name, value in default.items():
        allowed = set(space.values[name]) & set(others[before].values.get(name, ()))
        if value not in allowed and isinstance(value, int):
            values[name] = max((n for n in allowed if isinstance(n, int) and n <= value), default=value)
    shared = Config(values)
    return default if space.check(shared) else shared


class Spaces:
    """The space of each size, made when it is first asked for; None if the template cannot run that size."""

    def __init__(self, template: Template, workload_of: Callable[[int], Workload], target: Target) -> None:
        self._template, self._workload_of, self._target = template, workload_of, target
        self._known: dict[int, ConfigSpace | None] = {}

    def __call__(self, size: int) -> ConfigSpace | None:
        if size not in self._known:
            workload = self._workload_of(size)
            refused = self._template.validate(workload, self._target)
            self._known[size] = None if refused else self._template.space(workload, self._target)
        return self._known[size]


@functools.lru_cache(maxsize=4)
def _template_and_spaces(path: str, of_range: WorkloadRange, target: Target) -> tuple[Template, Spaces]:
    module, _, name = path.partition(":")
    template: Template = getattr(importlib.import_module(module), name)()
    return template, Spaces(template, of_range.at, target)
