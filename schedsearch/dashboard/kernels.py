"""The kernels of trials, made again from their records by the installed templates: how they launch, and their PTX.

A record says which template made its kernel, for which workload, device and configuration. The template describes the same
kernel again in a millisecond. Only the PTX needs the compiler.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from schedsearch.dashboard import loose
from schedsearch.errors import SchedsearchError, UsageError
from schedsearch.measurement import Resources
from schedsearch.records.rows import RecordRow
from schedsearch.space import ConfigSpace
from schedsearch.target import PRESETS, Target
from schedsearch.template import KernelSource, Template
from schedsearch.template.registry import load_template
from schedsearch.typed import JsonMapping, JsonObject
from schedsearch.workload import Workload

_SPACES = 32  # of templates and tasks that are kept, the last ones
_WARP = 32
_REGISTERS_AT_ONCE = 256  # of a warp, since compute capability 3
_RESERVED_SHARED_BYTES = 1024  # of a block, since compute capability 8
_BLOCKS_PER_SM = 32


class NoKernelError(SchedsearchError):
    """The kernel of a record cannot be described here; the text says why."""


@dataclass(frozen=True)
class Occupancy:
    """How many blocks of a kernel a multiprocessor holds at once.

    Attributes:
        block_threads: threads of a block.
        blocks_per_sm: as registers, shared memory and threads limit them.
        share: of the threads that the device allows; 1 is full.
    """

    block_threads: int
    blocks_per_sm: int
    share: float


class Kernels:
    """Describes the kernels of records. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spaces: OrderedDict[tuple[str, str, str], tuple[Template, ConfigSpace] | NoKernelError] = OrderedDict()

    def source(self, record: RecordRow, target: Target) -> KernelSource:
        """The kernel of a record, as its template describes it.

        Raises:
            NoKernelError: the template or operator is not installed, has another version, or cannot make this kernel.
        """
        if record.problem or record.op == "foreign":
            raise NoKernelError(record.problem or "another program made the kernel")
        template, space = self._template(record, target)
        if template.version != record.template_version:
            raise NoKernelError(
                f"version {record.template_version} of {template.name} made the kernel, and version {template.version} is "
                "installed"
            )
        try:
            config = template.current(record.config)
            if problems := space.check(config):  # a template may rely on its rules, also to end in time
                raise NoKernelError(f"the configuration is not legal here: {problems[0]}")
            return template.kernel(record.workload, target, config)
        except NoKernelError:
            raise
        except Exception as error:  # templates are code of others
            raise NoKernelError(f"{template.name} cannot describe the kernel: {type(error).__name__}: {error}") from error

    def _template(self, record: RecordRow, target: Target) -> tuple[Template, ConfigSpace]:
        key = record.template, record.workload_id, target.key
        with self._lock:
            found = self._spaces.pop(key, None) or _template_and_space(record.template, record.workload, target)
            self._spaces[key] = found
            while len(self._spaces) > _SPACES:
                self._spaces.popitem(last=False)
        if isinstance(found, NoKernelError):
            raise found
        return found


def _template_and_space(name: str, workload: Workload, target: Target) -> tuple[Template, ConfigSpace] | NoKernelError:
    try:
        template = load_template(name)
        if reason := template.validate(workload, target):
            return NoKernelError(f"{name} does not run the workload here: {reason}")
        return template, template.space(workload, target)
    except UsageError as error:
        return NoKernelError(str(error).partition("; known:")[0])
    except Exception as error:  # templates are code of others
        return NoKernelError(f"{name} cannot be used: {type(error).__name__}: {error}")


def target_of(record: RecordRow, runs: Iterable[JsonMapping]) -> Target:
    """The device of a record, by what its run noted about it, or by the data sheets that schedsearch knows.

    Args:
        runs: rows of `Store.runs`.

    Raises:
        NoKernelError: neither describes the device.
    """
    described = sorted(runs, key=lambda run: run["id"] != record.run)  # other runs may have had the same device
    for run in described:
        found = _target(loose.mapping(loose.mapping(run["info"]).get("device")))
        if found is not None and found.key == record.target:
            return found
    for preset in PRESETS.values():
        if preset.key == record.target:
            return preset
    raise NoKernelError("the record does not say what the device can hold")


def _target(facts: Mapping[str, object]) -> Target | None:
    """The device of these `Target.facts`; None if they lack something."""
    values: JsonObject = {}
    for field in fields(Target):
        value = facts.get(field.name, "" if field.name == "host" else None)  # older runs name no host
        if field.name == "compute_capability":
            value = tuple(loose.sequence(value))
            if len(value) != 2 or not all(type(part) is int for part in value):
                return None
        elif type(value) is not (str if field.name in ("kind", "name", "uuid", "host") else int):
            return None
        values[field.name] = value
    return Target(**values)


def occupancy(block_threads: int, resources: Resources, target: Target) -> Occupancy:
    """How many blocks of a kernel fit into a multiprocessor.

    Of several steps, give the most threads: `resources` are the largest too, so no step has less occupancy than this.

    Raises:
        NoKernelError: the device is a CPU, its limits are not known, or the kernel was not built.

    Source: CUDA C++ Best Practices Guide, "Calculating Occupancy".
    """
    if target.kind != "cuda":
        raise NoKernelError("a CPU has no multiprocessors")
    if not (target.registers_per_sm and target.shared_bytes_per_sm and target.threads_per_sm):
        raise NoKernelError("the limits of the device are not known")
    if block_threads < 1 or resources.registers < 1:
        raise NoKernelError("the kernel was not built")
    warps = -(-block_threads // _WARP)
    of_warp = -(-resources.registers * _WARP // _REGISTERS_AT_ONCE) * _REGISTERS_AT_ONCE
    blocks = min(
        _BLOCKS_PER_SM,
        target.threads_per_sm // (warps * _WARP),
        target.registers_per_sm // (of_warp * warps),
        target.shared_bytes_per_sm // (resources.shared_bytes + _RESERVED_SHARED_BYTES),
    )
    return Occupancy(block_threads, blocks, blocks * warps * _WARP / target.threads_per_sm)


def ptx(record: RecordRow, target: Target) -> str:
    """The PTX of all steps of a GPU kernel, compiled now by the installed compiler.

    Raises:
        NoKernelError: the kernel cannot be described here, or is not one of a GPU.
        UsageError: numba-cuda is not installed.
        CompileError: the compiler refused the kernel.
    """
    from schedsearch.backend.cuda import ptx_of

    source = Kernels().source(record, target)
    if source.kind != "cuda":
        raise NoKernelError(f"a kernel of kind {source.kind} has no PTX")
    return "\n\n".join(ptx_of(source, target))
