"""The window that slides over an image, for conv2d and depthwise_conv2d: its size r x s, stride, padding and dilation.

The output position p reads the rows p * stride - top + i * dilation for i in 0 ... r - 1. Columns work alike.
Padding order (top, left, bottom, right) is that of ONNX Conv's `pads`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from schedsearch.errors import Problem
from schedsearch.ops.params import MAX_INT, Parameter, Params, is_int
from schedsearch.typed import GivenParams, ParamsByName

_MOST_TAPS = 64  # that bounds look at; more would only raise them


def _number_or_list(least: int, *lengths: int, default: int) -> ParamsByName:
    number = {"type": "integer", "minimum": least, "maximum": MAX_INT}
    lists = [{"type": "array", "items": number, "minItems": n, "maxItems": n} for n in lengths]
    return {"anyOf": [number, *lists], "default": default}


WINDOW_PARAMETERS: Mapping[str, Parameter] = {
    "stride": Parameter("one number or [vertical, horizontal]; default 1", _number_or_list(1, 2, default=1)),
    "padding": Parameter(
        "one number, [vertical, horizontal] or [top, left, bottom, right]; default 0", _number_or_list(0, 2, 4, default=0)
    ),
    "dilation": Parameter("one number or [vertical, horizontal]; default 1", _number_or_list(1, 2, default=1)),
}
Pair = tuple[int, int]
Padding = tuple[int, int, int, int]
WINDOW_DEFAULTS: GivenParams = {"stride": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1)}


class WindowParams(Params):
    h: int
    w: int
    r: int
    s: int
    stride: Pair
    padding: Padding
    dilation: Pair


@dataclass(frozen=True)
class Reach:
    """What a window touches along one axis at least; padding is not touched.

    Attributes:
        outputs: output positions with an input.
        inputs: input positions that some output reads.
        taps: taps of the kernel that read an input for some output.
    """

    outputs: int
    inputs: int
    taps: int


def counts_of(p: GivenParams, names: Sequence[str]) -> list[Problem]:
    """A problem for each of the given parameters that is not an integer of at least 1."""
    problems = []
    for key in (name for name in names if name in p):
        if not (is_int(p[key]) and p[key] >= 1):
            problems.append(Problem(key, f"{key} must be an integer of at least 1, got {p[key]!r}"))
        elif p[key] > MAX_INT:
            problems.append(Problem(key, f"{key} must be at most {MAX_INT}, got {p[key]}"))
    return problems


def spread_window(p: ParamsByName) -> list[Problem]:
    """Writes stride, dilation and padding out in full, and says which of them are impossible."""
    problems: list[Problem] = []
    for key, least, lengths in (("stride", 1, (2,)), ("dilation", 1, (2,)), ("padding", 0, (2, 4))):
        p[key] = _numbers(key, p[key], least, lengths, problems)
    return problems


def _numbers(key: str, value: Any, least: int, lengths: Sequence[int], problems: list[Problem]) -> tuple[int, ...]:
    values = [value, value] if is_int(value) else list(value) if isinstance(value, Sequence) else []
    four = 4 in lengths
    if len(values) not in lengths or not all(is_int(v) and v >= least for v in values):
        shape = "[vertical, horizontal]" + (" or [top, left, bottom, right]" if four else "")
        problems.append(Problem(key, f"{key} must be an integer >= {least} or {shape}, got {value!r}"))
        return (least,) * max(lengths)
    if max(values) > MAX_INT:
        problems.append(Problem(key, f"{key} must be at most {MAX_INT}, got {value}"))
    return tuple(values * 2 if four and len(values) == 2 else values)


def window_problems(p: WindowParams) -> list[Problem]:
    """A kernel that is larger than the padded input, so that the output would be empty."""
    problems = []
    top, left, bottom, right = p.padding
    for axis, size, kernel, dilation, before, after in (
        ("r", p.h, p.r, p.dilation[0], top, bottom),
        ("s", p.w, p.s, p.dilation[1], left, right),
    ):
        extent = (kernel - 1) * dilation + 1
        if extent > size + before + after:
            side = "h" if axis == "r" else "w"
            problems.append(
                Problem(
                    axis,
                    f"the kernel spans {extent} ({axis}={kernel}, dilation {dilation}) but the padded input has only "
                    f"{size + before + after} ({side}={size}, padding {before}+{after}); enlarge the padding or "
                    "shrink the kernel",
                )
            )
    return problems


def output_hw(p: WindowParams) -> tuple[int, int]:
    """Output height and width."""
    top, left, bottom, right = p.padding
    return (
        (p.h + top + bottom - (p.r - 1) * p.dilation[0] - 1) // p.stride[0] + 1,
        (p.w + left + right - (p.s - 1) * p.dilation[1] - 1) // p.stride[1] + 1,
    )


def reach(p: WindowParams, axis: int) -> Reach:
    """Along h (axis 0) or w (axis 1). Algorithms such as Winograd's and the FFT may save all taps except one."""
    size, taps = (p.h, p.r) if axis == 0 else (p.w, p.s)
    out, stride, dilation = output_hw(p)[axis], p.stride[axis], p.dilation[axis]
    used, most = 0, 0
    most_of_phase: dict[int, int] = {}  # taps of one phase may read the same inputs, those of two phases never do
    for tap in range(min(taps, _MOST_TAPS)):
        first_input = tap * dilation - p.padding[axis]
        first = max(0, -(first_input // stride))
        last = min(out - 1, (size - 1 - first_input) // stride)
        count = max(0, last - first + 1)
        used, most = used + (count > 0), max(most, count)
        phase = tap * dilation % stride
        most_of_phase[phase] = max(most_of_phase.get(phase, 0), count)
    return Reach(most, sum(most_of_phase.values()), used)


def window_words(p: WindowParams) -> list[str]:
    """Stride, padding and dilation for labels, as s2, p1 and d2; nothing for those at their default."""
    words = []
    if p.stride != (1, 1):
        words.append("s" + "x".join(map(str, dict.fromkeys(p.stride))))
    if any(p.padding):
        words.append("p" + ",".join(map(str, dict.fromkeys(p.padding) if len(set(p.padding)) == 1 else p.padding)))
    if p.dilation != (1, 1):
        words.append("d" + "x".join(map(str, dict.fromkeys(p.dilation))))
    return words
