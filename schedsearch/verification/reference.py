"""Asks the reference of an operator, and reports in words how it breaks its contract.

References of users and of other packages are foreign code: they may end the process, hang, or take all memory. The process
that runs them says when it does (`watch`), so that another process can name them.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import numpy as np

from schedsearch.backend import BuildResult
from schedsearch.backend.kept import compile_kept
from schedsearch.errors import OperatorError, SchedsearchError
from schedsearch.launch import Pointer, Scalar
from schedsearch.ops import ArgSpec
from schedsearch.ops.dtypes import dtype
from schedsearch.ops.registry import BUILT_IN, ENTRY_POINT_GROUP, OF_DECORATORS
from schedsearch.plugins import offers
from schedsearch.target import Target
from schedsearch.template import KernelSource, Reference, load_reference, magnitude_of
from schedsearch.text import type_text
from schedsearch.typed import Array
from schedsearch.workload import Workload

_around: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext


def watch(around: Callable[[], AbstractContextManager[None]]) -> None:
    """From now on foreign code of references runs within `around()`, in this process."""
    global _around
    _around = around


class CheckedReference:
    """The reference of a workload's operator, with checks of its answers.

    Every method raises OperatorError if the reference fails or its answer breaks the contract of
    `schedsearch.template.Reference`. If the reference is schedsearch's own, it raises RuntimeError: that is a bug.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._reference: Reference | None = None
        try:
            with self.running("it cannot be made: ", passed=SchedsearchError):
                self._reference = load_reference(workload.op)
        except SchedsearchError as error:
            raise self.failure(str(error)) from error

    def build(self, target: Target) -> BuildResult:
        """The compiled kernel."""
        workload = self._workload
        with self.running("kernel() raised "):
            assert self._reference is not None
            source = self._reference.kernel(workload, target)
        if not isinstance(source, KernelSource):
            raise self.failure(f"kernel() returned {type_text(source)}; allowed: a KernelSource")
        if source.kind != target.kind:
            raise self.failure(f"kernel() returned code for {source.kind}; allowed here: {target.kind}")
        self._check_parameters(source)
        try:
            return compile_kept(source, target)
        except Exception as error:  # any exception of a compiler
            raise self.failure(f"its kernel does not compile: {error}") from error

    @property
    def pointwise(self) -> bool:
        """Whether the reference is a kernel and answers for single elements; otherwise it answers for whole arrays."""
        return self._reference is None or self._reference.pointwise

    def whole(
        self,
        arrays: Mapping[str, Array],
        scalars: Mapping[str, float],
        run: Callable[[KernelSource], Mapping[str, Array]],
        target: Target,
    ) -> Mapping[str, Array]:
        """The truth about whole outputs; see `Reference.truths`."""
        with self.running("it raised "):
            assert self._reference is not None
            return self._reference.truths(self._workload, arrays, scalars, run, target)

    def points(self, arrays: Mapping[str, Array], scalars: Mapping[str, float], indices: Array, output: str) -> Array:
        """The truth at single elements: float64 for a float output, int64 for an integer one; shape (len(indices),)."""
        spec = next(spec for spec in self._workload.outputs if spec.name == output)
        with self.running("points() raised "):
            assert self._reference is not None
            found = np.asarray(self._reference.points(self._workload, arrays, scalars, indices, output))
        if found.shape != indices.shape:
            raise self.failure(
                f"points() returned shape {found.shape} for {len(indices)} elements of {output}; allowed: {indices.shape}"
            )
        if dtype(spec.dtype).is_float or spec.roundings:
            if found.dtype.kind not in "iuf":
                raise self.failure(f"points() returned dtype {found.dtype} for {output}; allowed: float64")
            return found.astype(np.float64)
        if found.dtype.kind not in "iuf" or (found.dtype.kind == "f" and not np.array_equal(found, np.rint(found))):
            raise self.failure(
                f"points() returned {'fractions' if found.dtype.kind == 'f' else found.dtype} for {output}, whose format is "
                f"{spec.dtype}; allowed: integers, rounded and saturated as the operator defines it"
            )
        return found.astype(np.int64)

    def contradiction(self, output: str, indices: Array, kernel: Array, numpy: Array, wrong: Array) -> Exception:
        """The exception for kernel and NumPy that differ at the points where `wrong` is true."""
        worst = int(np.argmax(wrong))
        return self.failure(
            f"its kernel contradicts NumPy at {int(wrong.sum())} of {indices.size} points, first "
            f"{output}.flat[{int(indices[worst])}] = {kernel[worst].item()!r}, NumPy says {numpy[worst].item()!r}"
        )

    def failure(self, what: str) -> Exception:
        """See `failure_of`."""
        return failure_of(self._workload, what)

    @contextlib.contextmanager
    def running(self, what: str, passed: type[Exception] | tuple[()] = ()) -> Iterator[None]:
        """Runs code of the reference; what it raises becomes the exception of `failure`, `sys.exit` included.

        Args:
            what: of the message, before the exception.
            passed: exceptions that stay as they are.
        """
        with contextlib.nullcontext() if self._workload.op in BUILT_IN else _around():
            try:
                yield
            except KeyboardInterrupt:
                raise
            except passed:
                raise
            except BaseException as error:  # `SystemExit` is the reference's failure, too
                raise self.failure(f"{what}{_last_line(error)}") from error

    def _check_parameters(self, source: KernelSource) -> None:
        workload = self._workload
        buffers = {spec.name for spec in (*workload.signature, *workload.outputs)}
        magnitudes = {magnitude_of(spec.name) for spec in workload.outputs if is_rounded(workload, spec)}
        buffers |= magnitudes | set(source.workspaces)
        scalars = {scalar.name for scalar in workload.scalars}
        named: set[str] = set()
        for param in (param for step in source.steps for param in step.params):
            if isinstance(param, Pointer):
                named.add(param.buffer)
                if param.buffer not in buffers and not getattr(param, "optional", False):
                    raise self.failure(f"its kernel takes a pointer {param.buffer!r}; allowed: {', '.join(sorted(buffers))}")
            elif isinstance(param, Scalar) and param.name not in scalars:
                raise self.failure(
                    f"its kernel takes a scalar {param.name!r}; allowed: {', '.join(sorted(scalars)) or 'none'}"
                )
        needed = {spec.name for spec in workload.outputs} | magnitudes
        if missing := sorted(needed - named):
            raise self.failure(
                f"its kernel has no pointer for {', '.join(missing)}; it must write the truth of every output"
            )


def failure_of(workload: Workload, what: str) -> Exception:
    """The exception that says what is wrong, which operator's reference failed, and who should correct it."""
    op, label = workload.op, workload.label
    text = f"the reference of {op} ({workload.definition.reference}) cannot judge {label}: {what}"
    if op in BUILT_IN:
        return RuntimeError(f"{text}; this is a bug of schedsearch")
    if op in OF_DECORATORS:
        compared = workload.params.get("verified_by") == "default"
        who = "the kernel's default configuration" if compared else "`reference=` of the decorator"
        return OperatorError(f"the reference of {label} cannot judge it: {what}; correct {who}")
    packages = [offer.package for offer in offers(ENTRY_POINT_GROUP).get(op, ())]
    return OperatorError(f"{text}; correct it in {packages[0] if packages else op}, see docs/operators.md")


def is_rounded(workload: Workload, output: ArgSpec) -> bool:
    """Whether an output may be rounded; otherwise it must equal the reference's."""
    if output.roundings:
        return True
    return dtype(output.dtype).is_float and workload.definition.equality(workload.params) == "rounded"


def _last_line(error: BaseException) -> str:
    """The exception and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} (line {frame.lineno} of {frame.filename.rsplit('/', 1)[-1]})"


def reference_name(workload: Workload) -> str:
    """The name of a reference's machine code in a `CodeCache`."""
    return f"reference {workload.id}"
