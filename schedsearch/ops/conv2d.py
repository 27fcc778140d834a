"""conv2d: y[n,p,q,k] = epilogue(sum over r,s,c of x[n, p*stride-pad+r*dilation, ..., c] * weight[k,r,s,c]).

Padding order (top, left, bottom, right) is that of ONNX Conv's `pads`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from schedsearch.errors import Problem, did_you_mean
from schedsearch.ops.base import ArgSpec, ScalarSpec

DTYPES = ("float16", "bfloat16", "float32")
WEIGHT_LAYOUTS = {"NHWC": "OHWI", "NCHW": "OIHW"}

# Stage -> the array arguments it adds (name, axes) and the call-time scalars (name, default), all float32 arithmetic.
EPILOGUE_STAGES: dict[str, tuple[tuple[tuple[str, str], ...], tuple[ScalarSpec, ...]]] = {
    "bias": ((("bias", "K"),), ()),
    "scale_shift": ((("scale", "K"), ("shift", "K")), ()),
    "residual": ((("residual", "y"),), ()),
    "relu": ((), ()),
    "leaky_relu": ((), (ScalarSpec("leaky_relu_slope", 0.01),)),
    "clip": ((), (ScalarSpec("clip_min", 0.0), ScalarSpec("clip_max", 6.0))),
}

_REQUIRED = {
    "n": "batch",
    "h": "input height",
    "w": "input width",
    "c": "input channels",
    "k": "output channels",
    "r": "kernel height",
    "s": "kernel width",
}
_OPTIONAL = {
    "stride": "one number or [vertical, horizontal]; default 1",
    "padding": "one number, [vertical, horizontal] or [top, left, bottom, right]; default 0",
    "dilation": "one number or [vertical, horizontal]; default 1",
    "groups": "divides c and k; default 1",
    "dtype": "float16, bfloat16 or float32 of x, weight and per-channel vectors; default float16",
    "out_dtype": "of y and the residual; default: dtype",
    "layout": "axes of x and y in memory: NHWC or NCHW; default NHWC",
    "weight_layout": "OHWI or OIHW; default: the one that belongs to layout",
    "epilogue": f"stages applied in order, each at most once but relu: {', '.join(EPILOGUE_STAGES)}; default none",
}


def _plain(value: Any) -> Any:
    """NumPy's whole numbers, alone or in a list, as Python's; they are equal, but not in JSON."""
    if isinstance(value, list | tuple):
        plain = [_plain(each) for each in value]
        return plain if isinstance(value, list) else tuple(plain)
    return value if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Conv2d:
    name = "conv2d"
    version = 1

    def parameters(self) -> Mapping[str, str]:
        return {**_REQUIRED, **_OPTIONAL}

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
        problems: list[Problem] = []
        params = {key: _plain(value) for key, value in params.items()}
        known = self.parameters()
        for key in params:
            if key not in known:
                problems.append(
                    Problem(
                        key, f"conv2d has no parameter {key!r}{did_you_mean(str(key), known)}; allowed: {', '.join(known)}"
                    )
                )
        for key, meaning in _REQUIRED.items():
            if key not in params:
                problems.append(Problem(key, f"{key} ({meaning}) is missing; give a whole number of at least 1"))
        out = {**self.defaults(params), **{key: params[key] for key in known if key in params}}
        for key in (*_REQUIRED, "groups"):
            if key in out and not (_is_int(out[key]) and out[key] >= 1):
                problems.append(Problem(key, f"{key} must be a whole number of at least 1, got {out[key]!r}"))
        out["stride"] = self._numbers("stride", out["stride"], 1, problems)
        out["dilation"] = self._numbers("dilation", out["dilation"], 1, problems)
        out["padding"] = self._numbers("padding", out["padding"], 0, problems, four=True)
        if self._one_of("dtype", out["dtype"], DTYPES, problems) or "out_dtype" in params:
            self._one_of("out_dtype", out["out_dtype"], ("float32",) if out["dtype"] == "float32" else DTYPES, problems)
        if self._one_of("layout", out["layout"], tuple(WEIGHT_LAYOUTS), problems):
            self._one_of("weight_layout", out["weight_layout"], tuple(WEIGHT_LAYOUTS.values()), problems)
        out["epilogue"] = self._epilogue(out["epilogue"], problems)
        if not problems:
            self._geometry(out, problems)
        return out, problems

    @staticmethod
    def _numbers(key: str, value: Any, least: int, problems: list[Problem], four: bool = False) -> tuple[int, ...]:
        values = [value, value] if _is_int(value) else list(value) if isinstance(value, Sequence) else []
        if len(values) not in ((2, 4) if four else (2,)) or not all(_is_int(v) and v >= least for v in values):
            shape = "[vertical, horizontal]" + (" or [top, left, bottom, right]" if four else "")
            problems.append(Problem(key, f"{key} must be a whole number >= {least} or {shape}, got {value!r}"))
            return (least,) * (4 if four else 2)
        return tuple(values * 2 if four and len(values) == 2 else values)

    @staticmethod
    def _one_of(key: str, value: Any, allowed: Sequence[str], problems: list[Problem]) -> bool:
        if value in allowed:
            return True
        problems.append(
            Problem(
                key, f"{key} {value!r} is not possible{did_you_mean(str(value), allowed)}; allowed: {', '.join(allowed)}"
            )
        )
        return False

    def _epilogue(self, value: Any, problems: list[Problem]) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            problems.append(Problem("epilogue", f"epilogue must be a list of stages, got {value!r}; e.g. [bias, relu]"))
            return ()
        for stage in value:
            self._one_of("epilogue", stage, tuple(EPILOGUE_STAGES), problems)
        for stage in EPILOGUE_STAGES:
            if stage != "relu" and list(value).count(stage) > 1:
                problems.append(Problem("epilogue", f"stage {stage!r} stands more than once; only relu may"))
        return tuple(value)

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
        weight = {"O": p["k"], "I": p["c"] // p["groups"], "H": p["r"], "W": p["s"]}
        image = {"N": p["n"], "C": p["c"], "H": p["h"], "W": p["w"]}
        args = [
            ArgSpec("x", p["layout"], tuple(image[a] for a in p["layout"]), p["dtype"]),
            ArgSpec("weight", p["weight_layout"], tuple(weight[a] for a in p["weight_layout"]), p["dtype"]),
        ]
        for stage in dict.fromkeys(p["epilogue"]):
            for name, axes in EPILOGUE_STAGES[stage][0]:
                if axes == "K":
                    args.append(ArgSpec(name, "K", (p["k"],), p["dtype"]))
                else:
                    y = self.output(p)
                    args.append(ArgSpec(name, y.axes, y.shape, y.dtype))
        return tuple(args)

    def output(self, p: Mapping[str, Any]) -> ArgSpec:
        out_h, out_w = self.output_hw(p)
        image = {"N": p["n"], "C": p["k"], "H": out_h, "W": out_w}
        return ArgSpec("y", p["layout"], tuple(image[a] for a in p["layout"]), p["out_dtype"])

    def scalars(self, p: Mapping[str, Any]) -> tuple[ScalarSpec, ...]:
        return tuple(scalar for stage in dict.fromkeys(p["epilogue"]) for scalar in EPILOGUE_STAGES[stage][1])

    def flops(self, p: Mapping[str, Any]) -> int:
        out_h, out_w = self.output_hw(p)
        multiply_adds: int = p["n"] * out_h * out_w * p["k"] * (p["c"] // p["groups"]) * p["r"] * p["s"]
        return 2 * multiply_adds

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
        short = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
        words.append(short[p["dtype"]] + ("" if p["out_dtype"] == p["dtype"] else f"->{short[p['out_dtype']]}"))
        words.append(p["layout"])
        return " ".join(words) + "".join(f"+{stage}" for stage in p["epilogue"])


CONV2D = Conv2d()
