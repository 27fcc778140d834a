"""All exceptions that schedsearch raises on purpose.

::

    SchedsearchError                 .exit_code
    ├── UsageError (ValueError)          2   the caller asked for something impossible
    │   ├── WorkloadError                2   a workload or a workload file is wrong; carries `problems`
    │   │   └── UnknownOperatorError     2   no operator of that name is installed, or it cannot be imported
    │   ├── ConfigError                  2   a configuration, knob or restriction is illegal
    │   ├── ArgumentError                2   an array given to a kernel has the wrong dtype, shape, strides or device
    │   │   └── IndexRangeError          2   an index that was computed or given at run time is out of range
    │   ├── PlanError                    2   a launch plan breaks a rule, or does not fit its workload
    │   └── UnsupportedError             2   no template can run the workload on this target
    ├── OperatorError                    2   an operator or its reference breaks its contract, or cannot judge a workload
    ├── NoValidConfigError               1   every configuration that was tried failed
    ├── DeviceError                      3   no usable device, driver or toolkit
    │   └── DeviceBusyError              3   another run holds the device
    ├── PreparationError                 3   no process can make the inputs and the reference of a workload
    ├── WrongResultError                 1   a kernel was built for deployment and computes wrong values on this device
    ├── WrongNetworkError                1   a network was built that computes something else than its model
    ├── NoRecordError                    4   deployment found no record and was not allowed to go on
    │   └── UnusableRecordError          1   there is a record, but neither it nor another way gives a kernel here
    ├── RegressionError                  5   a record no longer reaches its time
    ├── DatabaseError                    6   the record store cannot be used
    │   ├── DatabaseLockedError          6
    │   ├── SchemaVersionError           6
    │   └── UntrustedDatabaseError       6
    └── Interrupted                    130   the user stopped the run; what was measured is saved

A candidate's failure is not an exception: it is a `Measurement` whose outcome is not ok. A bug of
schedsearch itself is never caught and shows its traceback.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from schedsearch.text import MESSAGE_LIMIT, printable, shortened


class SchedsearchError(Exception):
    """Base class of all errors. The command line prints its text in one line and exits with `exit_code`.

    Messages quote foreign values, which can have any length and any characters. Their text is cut to `MESSAGE_LIMIT`
    characters, and those that a terminal obeys are escaped.
    """

    exit_code = 1

    def __init__(self, *args: object) -> None:
        super().__init__(*(_fit_for_messages(each) if isinstance(each, str) else each for each in args))


def _fit_for_messages(text: str) -> str:
    return printable(shortened(text, MESSAGE_LIMIT), lines=True)


@dataclass(frozen=True)
class TaskPart:
    """The place of a mistake: the index of the task, the part of it (restrict, templates, weight or ""), and the key of a
    knob or the index of a template in this part."""

    index: int
    part: str = ""
    item: str | int | None = None

    @property
    def path(self) -> tuple[str | int, ...]:
        return tuple(each for each in (self.part, self.item) if each not in ("", None))


class UsageError(SchedsearchError, ValueError):
    """`where` says which task of a list is wrong, for callers that can point at its place in a file."""

    exit_code = 2

    def __init__(self, *args: object, where: TaskPart | None = None) -> None:
        super().__init__(*args)
        self.where = where


class SeveralErrors(UsageError):
    """Several mistakes of one call, in `each`."""

    def __init__(self, message: str, each: Sequence[UsageError] = ()) -> None:
        super().__init__(message)
        self.each = tuple(each)

    @classmethod
    def of(cls, each: Sequence[UsageError]) -> SeveralErrors:
        return cls("; ".join(map(str, each)), each)


_PROBLEM_LIMIT = 2_000  # characters of one of several mistakes


@dataclass(frozen=True)
class Problem:
    """One mistake in a mapping of parameters: `key` says where, `message` says what, got, allowed and remedy.

    `path` leads further into the value of `key`: indices of lists and keys of mappings. `at_key`: the last key itself is
    wrong, not its value.
    """

    key: str
    message: str
    path: tuple[str | int, ...] = field(default=(), kw_only=True)
    at_key: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        text = f"{self.key}: {self.message}" if self.key else self.message
        return shortened(text, _PROBLEM_LIMIT)


class WorkloadError(UsageError):
    """A workload is impossible. `problems` lists every mistake, not only the first."""

    def __init__(self, problems: Iterable[Problem] | str) -> None:
        self.problems = (Problem("", problems),) if isinstance(problems, str) else tuple(problems)
        super().__init__("; ".join(map(str, self.problems)))


class UnknownOperatorError(WorkloadError):
    """The operator `op` is not available: it is not installed, its package fails to import, or two packages claim the
    name.
    """

    def __init__(self, problems: Iterable[Problem] | str, op: str = "") -> None:
        super().__init__(problems)
        self.op = op

    def __reduce__(self) -> tuple[object, ...]:
        return UnknownOperatorError, (self.problems, self.op)


class ConfigError(UsageError):
    pass


class ArgumentError(UsageError):
    pass


class IndexRangeError(ArgumentError):
    """An index of a gather or scatter is out of range. A kernel noted it while it ran; see `schedsearch.ops.wrong_index`."""


class BranchError(ArgumentError):
    """The inputs of a network take a branch of the model that cannot be computed for arrays of their shapes."""


class PlanError(UsageError):
    pass


class UnsupportedError(UsageError):
    pass


class OperatorError(SchedsearchError):
    """An operator of another package, or its reference, fails or breaks its contract. The text names both."""

    exit_code = 2


class NoValidConfigError(SchedsearchError):
    """`summary` is the `schedsearch.session.summary.RunSummary` of the run, if a run of tuning raised the error."""

    exit_code = 1

    def __init__(self, message: str, summary: Any = None) -> None:
        self.summary = summary
        super().__init__(message)


class OutOfTimeError(SchedsearchError):
    """A time limit was over before there was a result."""

    exit_code = 1


class DeviceError(SchedsearchError):
    exit_code = 3


class DeviceMemoryError(DeviceError):
    """A device, or the system for a CPU, has no memory of the size that is asked for."""


class SubgraphError(DeviceError):
    """ONNX Runtime failed in a subgraph of a network, such as for an index that is out of range."""


class DeviceBusyError(DeviceError):
    """Another run has the device.

    Attributes:
        holder: who, in words; "" if that is all that is known.
    """

    def __init__(self, message: str, *, holder: str = "") -> None:
        super().__init__(message)
        self.holder = holder


class LostError(DeviceError):
    """The last device, or the last builder, of a fleet is away for longer than a run waits. What was measured is saved."""


class AwayError(DeviceError):
    """The worker that had a call is gone. Its device may come back with another worker, so the call may be repeated.

    Attributes:
        begun: whether a worker had the call; otherwise none was there to take it.
    """

    def __init__(self, message: str, *, begun: bool = True) -> None:
        super().__init__(message)
        self.begun = begun


class PreparationError(SchedsearchError):
    """No process can make the inputs and the reference of a workload on this device: each is killed or takes too long, or
    there is too little memory."""

    exit_code = 3


class WrongResultError(SchedsearchError):
    exit_code = 1


class WrongNetworkError(SchedsearchError):
    """A network was built that computes something else than the model that it was made from. Nothing was written."""


class NoRecordError(SchedsearchError):
    exit_code = 4


class UnusableRecordError(NoRecordError):
    """There is a record of the workload, but its kernel cannot run here, and no other way is left. Whoever goes on without
    a kernel if there is no record does so here, too."""

    exit_code = 1


class RegressionError(SchedsearchError):
    exit_code = 5


class DatabaseError(SchedsearchError):
    exit_code = 6


class DatabaseLockedError(DatabaseError):
    pass


class DatabaseLostError(DatabaseError):
    """The connection to a database server was lost, or it cannot be reached any more."""


class SchemaVersionError(DatabaseError):
    pass


class UntrustedDatabaseError(DatabaseError):
    pass


class Interrupted(SchedsearchError):
    """`summary` is the `schedsearch.session.summary.RunSummary` of the run up to the interruption."""

    exit_code = 130

    def __init__(self, message: str, summary: Any = None) -> None:
        self.summary = summary
        super().__init__(message)


class UntunedWarning(UserWarning):
    """A kernel is called with arrays that it was not tuned for."""


def warn_user(text: str, category: type[Warning]) -> None:
    """Warns at the line outside of schedsearch that led here."""
    depth, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "schedsearch":
        depth, frame = depth + 1, frame.f_back
    warnings.warn(text, category, stacklevel=depth)


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its type's name if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def root_cause(error: BaseException) -> BaseException:
    """The error from which another one was raised, and so on, down to the first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


_LONGEST_SLIP = 80  # characters of a name that somebody may have mistyped; comparing takes time quadratic in it
_MOST_NAMES = 500


# What other libraries and papers call a dtype.
_DTYPES = {
    "float32": ("fp32", "f32", "float", "single"),
    "float16": ("fp16", "f16", "half"),
    "bfloat16": ("bf16", "brain"),
    "int8": ("i8", "s8", "char"),
    "uint8": ("u8", "byte"),
    "int32": ("i32", "s32", "int"),
    "int64": ("i64", "s64", "long"),
    "float64": ("fp64", "f64", "double"),
    "float8_e4m3": ("fp8", "fp8_e4m3", "e4m3", "float8", "float8_e4m3fn"),
    "float8_e5m2": ("fp8_e5m2", "e5m2"),
}
_OTHER_NAMES = {other: name for name, others in _DTYPES.items() for other in others} | {"gpu": "cuda"}


def did_you_mean(got: str, allowed: Iterable[str]) -> str:
    """Returns ' (did you mean X?)' for the closest of `allowed`, or ''. Looks at short names only, and at the first 500."""
    if len(got) > _LONGEST_SLIP:
        return ""
    import difflib

    names = [name for name in itertools.islice(allowed, _MOST_NAMES) if len(name) <= _LONGEST_SLIP]
    if (known := _OTHER_NAMES.get(got.casefold())) in names:
        return f" (did you mean {known!r}?)"
    close = difflib.get_close_matches(got, names, n=1, cutoff=0.6) or [n for n in names if n.casefold() == got.casefold()]
    return f" (did you mean {close[0]!r}?)" if close else ""
