"""conv2d: y[n,p,q,k] = epilogue(sum over r,s,c of x[n, p*stride-pad+r*dilation, ..., c] * weight[k,r,s,c]).

Padding order (top, left, bottom, right) is that of ONNX Conv's `pads`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from schedsearch.errors import Problem
from schedsearch.ops.base import (
    MAX_INT,
    ArgSpec,
    Op,
    Parameter,
    ScalarSpec,
    Work,
    is_int,
    missing_parameters,
    one_of,
    plain,
    unknown_parameters,
)
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.layout import Layout
from schedsearch.ops.stages import (
    Stage,
    epilogue_arguments,
    epilogue_check_scalars,
    epilogue_output,
    epilogue_parameter,
    epilogue_scalars,
    parse_epilogue,
)

if TYPE_CHECKING:
    from schedsearch.workload import Workload

# What x and weight may be, and y for each.
OUT_DTYPES = {
    "float16": ("float16", "bfloat16", "float32"),
    "bfloat16": ("float16", "bfloat16", "float32"),
    "float32": ("float32",),
}
DTYPES = tuple(OUT_DTYPES)
WEIGHT_LAYOUTS = {"NHWC": "OHWI", "NCHW": "OIHW"}


def _number_or_list(least: int, *lengths: int, default: int) -> dict[str, Any]:
    number = {"type": "integer", "minimum": least, "maximum": MAX_INT}
    lists = [{"type": "array", "items": number, "minItems": n, "maxItems": n} for n in lengths]
    return {"anyOf": [number, *lists], "default": default}


_PARAMETERS = {
    "n": Parameter.count("batch"),
    "h": Parameter.count("input height"),
    "w": Parameter.count("input width"),
    "c": Parameter.count("input channels"),
    "k": Parameter.count("output channels"),
    "r": Parameter.count("kernel height"),
    "s": Parameter.count("kernel width"),
    "stride": Parameter("one number or [vertical, horizontal]; default 1", _number_or_list(1, 2, default=1)),
    "padding": Parameter(
        "one number, [vertical, horizontal] or [top, left, bottom, right]; default 0", _number_or_list(0, 2, 4, default=0)
    ),
    "dilation": Parameter("one number or [vertical, horizontal]; default 1", _number_or_list(1, 2, default=1)),
    "groups": Parameter("divides c and k; default 1", {"type": "integer", "minimum": 1, "maximum": MAX_INT, "default": 1}),
    "dtype": Parameter.choice("float16, bfloat16 or float32 of x, weight and per-channel vectors; default float16", DTYPES),
    "out_dtype": Parameter("of y and the residual; default: dtype", {"enum": list(DTYPES)}),
    "layout": Parameter.choice("axes of x and y in memory: NHWC or NCHW; default NHWC", tuple(WEIGHT_LAYOUTS)),
    "weight_layout": Parameter(
        "OHWI or OIHW; default: the one that belongs to layout", {"enum": list(WEIGHT_LAYOUTS.values())}
    ),
    "epilogue": epilogue_parameter(),
}
_SIZES = {name: parameter for name, parameter in _PARAMETERS.items() if parameter.size}


_MOST_TAPS = 64  # that bounds look at; more would only raise them


@dataclass(frozen=True)
class _Reach:
    """What a convolution touches along one axis at least; padding is not touched.

    Attributes:
        outputs: output positions with an input.
        inputs: input positions that some output reads.
        taps: taps of the kernel that read an input for some output.
    """

    outputs: int
    inputs: int
    taps: int


class Conv2d(Op):
    name: ClassVar[str] = "conv2d"
    reference: ClassVar[str] = "schedsearch.templates.conv2d.reference:Conv2dReference"
    constructor: ClassVar[str] = "schedsearch:conv2d"
    peers: ClassVar[Mapping[str, str]] = {"torch": "schedsearch.integrations.torch_peer:conv2d"}

    def parameters(self) -> Mapping[str, Parameter]:
        return _PARAMETERS

    def defaults(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "stride": (1, 1),
            "padding": (0, 0, 0, 0),
            "dilation": (1, 1),
            "groups": 1,
            "dtype": "float16",
            "out_dtype": params.get("dtype", "float16"),
            "layout": "NHWC",
            "weight_layout": WEIGHT_LAYOUTS.get(str(params.get("layout", "NHWC")), "OHWI"),
            "epilogue": (),
        }

    def normalise(self, params: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
        params = {key: plain(value) for key, value in params.items()}
        problems = unknown_parameters(self.name, params, _PARAMETERS) + missing_parameters(params, _SIZES)
        out = {**self.defaults(params), **{key: params[key] for key in _PARAMETERS if key in params}}
        for key in (*_SIZES, "groups"):
            if key in out and not (is_int(out[key]) and out[key] >= 1):
                problems.append(Problem(key, f"{key} must be a whole number of at least 1, got {out[key]!r}"))
            elif key in out and out[key] > MAX_INT:
                problems.append(Problem(key, f"{key} must be at most {MAX_INT}, got {out[key]}"))
        out["stride"] = self._numbers("stride", out["stride"], 1, problems)
        out["dilation"] = self._numbers("dilation", out["dilation"], 1, problems)
        out["padding"] = self._numbers("padding", out["padding"], 0, problems, four=True)
        wrong = one_of("dtype", out["dtype"], DTYPES)
        if not wrong or "out_dtype" in params:
            wrong = wrong + one_of("out_dtype", out["out_dtype"], OUT_DTYPES.get(str(out["dtype"]), DTYPES))
        problems += wrong
        problems += one_of("layout", out["layout"], tuple(WEIGHT_LAYOUTS))
        problems += one_of("weight_layout", out["weight_layout"], tuple(WEIGHT_LAYOUTS.values()))
        out["epilogue"], wrong = parse_epilogue(out["epilogue"])
        problems += wrong
        if not problems:
            self._geometry(out, problems)
        return out, problems

    @staticmethod
    def _numbers(key: str, value: Any, least: int, problems: list[Problem], four: bool = False) -> tuple[int, ...]:
        values = [value, value] if is_int(value) else list(value) if isinstance(value, Sequence) else []
        if len(values) not in ((2, 4) if four else (2,)) or not all(is_int(v) and v >= least for v in values):
            shape = "[vertical, horizontal]" + (" or [top, left, bottom, right]" if four else "")
            problems.append(Problem(key, f"{key} must be a whole number >= {least} or {shape}, got {value!r}"))
            return (least,) * (4 if four else 2)
        if max(values) > MAX_INT:
            problems.append(Problem(key, f"{key} must be at most {MAX_INT}, got {value}"))
        return tuple(values * 2 if four and len(values) == 2 else values)

    def _geometry(self, p: Mapping[str, Any], problems: list[Problem]) -> None:
        for key, meaning in (("c", "input"), ("k", "output")):
            if p[key] % p["groups"]:
                problems.append(Problem(key, f"{key}={p[key]} {meaning} channels do not divide into groups={p['groups']}"))
        top, left, bottom, right = p["padding"]
        for axis, size, kernel, dilation, before, after in (
            ("r", p["h"], p["r"], p["dilation"][0], top, bottom),
            ("s", p["w"], p["s"], p["dilation"][1], left, right),
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

    def output_hw(self, p: Mapping[str, Any]) -> tuple[int, int]:
        """Output height and width."""
        top, left, bottom, right = p["padding"]
        return (
            (p["h"] + top + bottom - (p["r"] - 1) * p["dilation"][0] - 1) // p["stride"][0] + 1,
            (p["w"] + left + right - (p["s"] - 1) * p["dilation"][1] - 1) // p["stride"][1] + 1,
        )

    def arguments(self, p: Mapping[str, Any]) -> tuple[ArgSpec, ...]:
        image = {"N": p["n"], "C": p["c"], "H": p["h"], "W": p["w"]}
        weight = {"O": p["k"], "I": p["c"] // p["groups"], "H": p["r"], "W": p["s"]}
        weight_shape = Layout.parse(p["weight_layout"]).shape(weight)
        return (
            ArgSpec("x", p["layout"], Layout.parse(p["layout"]).shape(image), p["dtype"], role="factor"),
            ArgSpec("weight", p["weight_layout"], weight_shape, p["dtype"], role="factor", constant=True),
            *epilogue_arguments(p["epilogue"], self._accumulator(p), p["k"], p["dtype"]),
        )

    def outputs(self, p: Mapping[str, Any]) -> tuple[ArgSpec, ...]:
        return (epilogue_output(p["epilogue"], self._accumulator(p)),)

    def _accumulator(self, p: Mapping[str, Any]) -> ArgSpec:
        """y before the epilogue."""
        out_h, out_w = self.output_hw(p)
        image = {"N": p["n"], "C": p["k"], "H": out_h, "W": out_w}
        return ArgSpec("y", p["layout"], Layout.parse(p["layout"]).shape(image), p["out_dtype"])

    def scalars(self, p: Mapping[str, Any]) -> tuple[ScalarSpec, ...]:
        return epilogue_scalars(p["epilogue"])

    def check_scalars(self, p: Mapping[str, Any], spread: float = 1.0) -> Mapping[str, float]:
        return epilogue_check_scalars(p["epilogue"], spread)

    def work(self, p: Mapping[str, Any]) -> Work:
        out_h, out_w = self.output_hw(p)
        reduction = p["c"] // p["groups"] * p["r"] * p["s"]
        flops = 2 * p["n"] * out_h * out_w * p["k"] * reduction
        rows, columns = (self._reach(p, axis) for axis in (0, 1))
        channels = p["c"] // p["groups"]
        least_flops = 2 * p["n"] * rows.outputs * columns.outputs * p["k"] * channels
        read = p["n"] * p["c"] * rows.inputs * columns.inputs + p["k"] * channels * rows.taps * columns.taps
        written = p["n"] * out_h * out_w * p["k"]
        least_bytes = read * dtype_of(p["dtype"]).nbytes + written * dtype_of(p["out_dtype"]).nbytes
        return Work(flops, super().work(p).nbytes, reduction, least_flops, least_bytes)

    def _reach(self, p: Mapping[str, Any], axis: int) -> _Reach:
        """Along h (axis 0) or w (axis 1). Algorithms such as Winograd's and the FFT may save all taps except one."""
        size, taps = (p["h"], p["r"]) if axis == 0 else (p["w"], p["s"])
        out, stride, dilation = self.output_hw(p)[axis], p["stride"][axis], p["dilation"][axis]
        used, most = 0, 0
        most_of_phase: dict[int, int] = {}  # taps of one phase may read the same inputs, those of two phases never do
        for tap in range(min(taps, _MOST_TAPS)):
            first_input = tap * dilation - p["padding"][axis]
            first = max(0, -(first_input // stride))
            last = min(out - 1, (size - 1 - first_input) // stride)
            count = max(0, last - first + 1)
            used, most = used + (count > 0), max(most, count)
            phase = tap * dilation % stride
            most_of_phase[phase] = max(most_of_phase.get(phase, 0), count)
        return _Reach(most, sum(most_of_phase.values()), used)

    def label(self, p: Mapping[str, Any]) -> str:
        words = [f"conv2d {p['n']}x{p['h']}x{p['w']}x{p['c']} k{p['k']} {p['r']}x{p['s']}"]
        if p["stride"] != (1, 1):
            words.append("s" + "x".join(map(str, dict.fromkeys(p["stride"]))))
        if any(p["padding"]):
            words.append(
                "p" + ",".join(map(str, dict.fromkeys(p["padding"]) if len(set(p["padding"])) == 1 else p["padding"]))
            )
        if p["dilation"] != (1, 1):
            words.append("d" + "x".join(map(str, dict.fromkeys(p["dilation"]))))
        if p["groups"] != 1:
            words.append(f"g{p['groups']}")
        short, out_short = dtype_of(p["dtype"]).short, dtype_of(p["out_dtype"]).short
        words.append(short if short == out_short else f"{short}->{out_short}")
        words.append(p["layout"])
        return " ".join(words) + "".join(f"+{stage}" for stage in p["epilogue"])


CONV2D = Conv2d()


def conv2d(
    *,
    n: int,
    h: int,
    w: int,
    c: int,
    k: int,
    r: int,
    s: int,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    dtype: str = "float16",
    out_dtype: str | None = None,
    layout: str = "NHWC",
    weight_layout: str | None = None,
    epilogue: Sequence[str | Stage | Mapping[str, Any]] = (),
) -> Workload:
    """A 2-d convolution (cross-correlation, as in every deep-learning library).

    Args:
        n, h, w, c: input batch, height, width, channels.
        k: output channels.
        r, s: kernel height and width.
        stride, dilation: one number, or (vertical, horizontal).
        padding: one number, (vertical, horizontal), or (top, left, bottom, right).
        groups: divides c and k.
        dtype: float16, bfloat16 or float32 of x, weight and the per-channel vectors.
        out_dtype: of y and the residual; default: the input's.
        layout: axes of x and y in memory, NHWC or NCHW.
        weight_layout: OHWI or OIHW; default: the one that belongs to `layout`.
        epilogue: stages applied to the accumulator in order; see `schedsearch.ops.STAGES`.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Example:
        >>> conv2d(n=1, h=14, w=14, c=64, k=64, r=3, s=3, padding=1, epilogue=["bias", "relu"]).output.shape
        (1, 14, 14, 64)
    """
    from schedsearch.workload import Workload

    params: dict[str, Any] = {
        "n": n, "h": h, "w": w, "c": c, "k": k, "r": r, "s": s,
        "stride": stride, "padding": padding, "dilation": dilation, "groups": groups,
        "dtype": dtype, "layout": layout, "epilogue": epilogue,
    }  # fmt: skip
    optional = {"out_dtype": out_dtype, "weight_layout": weight_layout}
    return Workload("conv2d", params | {name: value for name, value in optional.items() if value is not None})
