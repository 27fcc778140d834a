"""What callers give `build` and `build_dynamic`, checked before anything is read."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schedsearch.deadline import Deadline
from schedsearch.device.detect import detect
from schedsearch.errors import UsageError
from schedsearch.measurement import CHAIN_GRAPH, COLD_GRAPH, DEFAULT_DB, MODES, check_mode
from schedsearch.network.facts import FLOATS
from schedsearch.network.given_inputs import Inputs
from schedsearch.records.executables import check_writable
from schedsearch.records.location import require_file
from schedsearch.target import Target
from schedsearch.text import quoted

_CHECK = 0.2  # of the time that a build took until now: what its comparison with the model is taken to need
LAYOUT_CHOICES = ("auto", "NHWC", "NCHW")
IO_LAYOUTS = ("NCHW", "NHWC")
WEIGHTS = ("inside", "reference")


@dataclass(frozen=True)
class BuildOptions:
    """How a model becomes a network: arguments of `schedsearch.build`, checked.

    Attributes:
        deadline: of the whole build.
        tunes: whether kernels without a record are measured.
        patient: whether the network is built however long that takes.
        inputs: input of an ONNX file -> the value that it always has.
        started: `time.monotonic()` when the build began.
    """

    target: Target
    db: Path
    out: Path | None
    deadline: Deadline
    dtype: str | None = None
    layout: str = "auto"
    io_layout: str = "NCHW"
    weights: str = "inside"
    tunes: bool = False
    strict: bool = False
    mode: str = COLD_GRAPH
    check: bool = True
    patient: bool = False
    inputs: Inputs = field(default_factory=dict)
    say: Callable[[str], None] = lambda text: None
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def of(
        cls,
        deadline: Deadline,
        *,
        target: str | Target = "auto",
        db: str | os.PathLike[str] = DEFAULT_DB,
        out: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> BuildOptions:
        """Finds the target, and checks the options.

        Raises:
            UsageError: a choice is not one of those that are allowed, here or on the target, or `out` cannot be written.
            DeviceError: there is no such device.
        """
        for name, allowed in _CHOICES.items():
            if name in options:
                check_choice(name, options[name], allowed, optional=name in ("dtype", "mode"))
        if options.get("weights") == "reference" and out is None:
            raise UsageError(NEEDS_FILES)
        if out is not None:
            check_writable(Path(out))
        target = detect(target) if isinstance(target, str) else target
        options["mode"] = options.get("mode") or network_mode(target)
        check_mode(options["mode"], target.kind)
        return cls(target, require_file(db), None if out is None else Path(out), deadline, **options)

    def needed_by(self, compared_s: float | None) -> Deadline:
        """The deadline of what comes before the comparison of the network with its model, which needs its time, too.

        Args:
            compared_s: how long it took to compare the model with a torch module: this takes as long again; 0 if that was
                not done. None: nothing is compared.
        """
        share_s = _CHECK * (time.monotonic() - self.started)
        return self.deadline.before(0.0 if compared_s is None else compared_s or share_s)


_LEAST_CHAINED = (9, 0)  # compute capability


def network_mode(target: Target) -> str:
    """How the kernels of a network of fixed sizes are timed: in a chain, on cards whose kernels may begin before the one in
    front of them ends."""
    chained = target.kind == "cuda" and target.compute_capability >= _LEAST_CHAINED
    return CHAIN_GRAPH if chained else COLD_GRAPH


_CHOICES = {"mode": MODES, "weights": WEIGHTS, "layout": LAYOUT_CHOICES, "io_layout": IO_LAYOUTS, "dtype": FLOATS}
NEEDS_FILES = "weights='reference' needs an ONNX file for `model`, and `out`, the file to write"


def check_choice(name: str, value: object, allowed: Sequence[str], *, optional: bool = False) -> None:
    """Raises UsageError if an option has none of the allowed values; with `optional`, None is one of them."""
    if (optional and value is None) or (isinstance(value, str) and value in allowed):
        return
    choices = f"{', '.join(allowed)}{', or None' if optional else ''}"
    raise UsageError(f"{name} {quoted(value)} is not possible; allowed: {choices}")


def check_tune_s(value: Any) -> None:
    """Raises UsageError if a time to tune is neither None nor a finite number of seconds above 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value < math.inf):
        raise UsageError(f"tune_s is {quoted(value)}; allowed: a number of seconds above 0, or None")
