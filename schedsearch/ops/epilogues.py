"""An operator's epilogue: the list of its stages, from the user's words to operands, call-time scalars and the output.

`stages.STAGES` says what each stage is. Operators that take an epilogue call the functions here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from schedsearch.errors import ArgumentError, Problem, did_you_mean
from schedsearch.ops.checks import Domain
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.params import Parameter, judge, missing_parameters, plain, unknown_parameters
from schedsearch.ops.pixel_shuffle import PixelShuffle, shuffle_problem
from schedsearch.ops.specs import ArgSpec, ScalarSpec
from schedsearch.ops.stages import STAGES, Stage, stage_kind, stage_names
from schedsearch.typed import ParamsByName

MAX_STAGES = 64  # each is compiled into the kernel
ACTIVATIONS = ("relu", "sigmoid", "silu", "hard_swish", "gelu", "relu6", "leaky_relu", "clip")
_FLOATS = ("float32", "float16", "bfloat16")
T = TypeVar("T")


class Epilogue(NamedTuple, Generic[T]):
    """What becomes of an operator's sums: activation(sums * scale + bias + residual), as one value.

    In a workload an operand is True, or None if there is none. In a call of `schedsearch.torch` it is the tensor. A workload
    also takes a list of stages, in any order.

    Attributes:
        bias: one number for each output channel.
        scale: the same, multiplied before the bias is added, which must be there; of 8-bit factors see `out_dtype`.
        residual: like the output; added before the activation.
        activation: relu, relu6, leaky_relu, clip, sigmoid, silu, hard_swish, gelu, or None.
        negative_slope: of leaky_relu; given when a kernel is called.
        low, high: of clip; given when a kernel is called.
        residual_last: the residual is added behind the activation.
        pixel_shuffle: the factor of a torch.nn.PixelShuffle behind everything else; 1 if there is none.
        out_dtype: what the sums of 8-bit factors become. int32: activation(sums + bias + residual). int8 or uint8: the same
            times `scale`, rounded, plus `y_zero_point`; with `output_scale` activation(sums * scale + bias + residual) /
            output_scale, rounded, plus `y_zero_point`. float32, float16 or bfloat16: activation(sums * scale + bias +
            residual). Sums of floats leave it None.
        output_scale: one number for each output channel.
        y_zero_point: of the output; given when a kernel is called.

    Example:
        >>> from schedsearch import conv2d
        >>> conv2d(n=1, h=8, w=8, c=64, k=64, r=1, s=1, epilogue=Epilogue(bias=True, activation="relu")).label
        'conv2d 1x8x8x64 k64 1x1 f16 NHWC+bias+relu'
    """

    bias: T | None = None
    scale: T | None = None
    residual: T | None = None
    activation: str | None = None
    negative_slope: float = 0.01
    low: float = 0.0
    high: float = 6.0
    residual_last: bool = False
    pixel_shuffle: int = 1
    out_dtype: str | None = None
    output_scale: T | None = None
    y_zero_point: int = 0

    @property
    def text(self) -> str:
        """The stages in their order, e.g. "bias,clip,requantise:uint8"; see `stage_of`.

        Raises:
            ArgumentError: there is no such activation, or a scale without a bias.
        """
        if self.activation is not None and self.activation not in ACTIVATIONS:
            allowed = f"allowed: {', '.join(ACTIVATIONS)} or None"
            if not isinstance(self.activation, str):
                raise ArgumentError(f"activation is {self.activation!r}; {allowed}")
            hint = did_you_mean(self.activation, ACTIVATIONS)
            raise ArgumentError(f"there is no activation {self.activation!r}{hint}; {allowed}")
        if self.out_dtype is None and self.scale is not None and self.bias is None:
            raise ArgumentError("there is a scale without a bias; give torch.zeros_like(scale) as the bias")
        shifted = self.scale is not None and self.out_dtype is None
        sums = "scale_shift" if shifted else "" if self.bias is None else "bias"
        added = "" if self.residual is None else "residual"
        then = "clip" if self.activation == "relu6" else self.activation or ""
        words = ["", sums, then, added, ""] if self.residual_last else ["", sums, added, then, ""]
        if self.output_scale is not None:
            words[0], words[-1] = "dequantise:float32", f"quantise:{self.out_dtype}"
        elif self.out_dtype in _FLOATS:
            words[0] = f"dequantise:{self.out_dtype}"
        elif self.out_dtype not in (None, "int32"):
            words[-1] = f"requantise:{self.out_dtype}"
        words += [f"depth_to_space:{self.pixel_shuffle}"] if self.pixel_shuffle != 1 else []
        return ",".join([word for word in words if word])

    @property
    def limits(self) -> tuple[float, ...]:
        """The numbers of the activation that are given at call time, two if there are any."""
        if self.activation == "relu6":
            return 0.0, 6.0
        if self.activation == "clip":
            return self.low, self.high
        return (self.negative_slope, 0.0) if self.activation == "leaky_relu" else ()

    def as_parameter(self) -> list[Any]:
        """The value of a workload's parameter `epilogue`."""
        return [stage_of(word) for word in self.text.split(",") if word]


def stage_of(word: str) -> str | dict[str, ParamsByName]:
    """A stage as workload files have it, from a word: its name, and behind a colon its parameter if it has one.

    Raises:
        ArgumentError: there is no such stage.
    """
    name, _, value = word.partition(":")
    if name not in STAGES:
        raise ArgumentError(f"epilogue names {name!r}{did_you_mean(name, STAGES)}; allowed: {', '.join(STAGES)}")
    if name == "depth_to_space":
        if not value.isdecimal():
            raise ArgumentError(f"epilogue has {word!r}; write depth_to_space:2 for blocks of 2 x 2 pixels")
        return {name: {"block": int(value), "mode": "CRD"}}
    return {name: {"to": value}} if value else name


def epilogue_parameter(stages: Sequence[str] | None = None, *, moves: bool = False) -> Parameter:
    """The parameter `epilogue` of an operator that takes these stages; default: all, with `moves` also `depth_to_space`."""
    names = stage_names(moves) if stages is None else list(stages)
    words = [name for name in names if not stage_kind(name).parameters]
    items: ParamsByName = {"enum": words}
    if len(words) < len(names):
        items = {"anyOf": [items, *(stage_kind(name).schema() for name in names if name not in words)]}
    repeat = ", ".join(name for name in names if stage_kind(name).repeatable)
    doc = f"stages applied in order, each at most once except {repeat}: {', '.join(names)}; default none"
    if not repeat:
        doc = doc.replace(" except ", "")
    return Parameter(doc, {"type": "array", "items": items, "default": []})


def parse_epilogue(
    value: object, allowed: Sequence[str] | None = None, *, moves: bool = False
) -> tuple[tuple[Stage, ...], list[Problem]]:
    """Stages of the value of a parameter `epilogue`, and every mistake in it.

    Args:
        value: a list whose items are words, {name: {parameter: value}}, or `Stage`s.
        allowed: names that the operator takes; default: all stages.
        moves: by default also those that only move elements; such an operator asks `moving_problem`, too.
    """
    names = stage_names(moves) if allowed is None else list(allowed)
    if isinstance(value, str | Mapping) or not isinstance(value, Sequence):
        return (), [Problem("epilogue", f"epilogue must be a list of stages, got {value!r}; e.g. [bias, relu]")]
    if len(value) > MAX_STAGES:
        return (), [Problem("epilogue", f"epilogue has {len(value):,} stages; at most {MAX_STAGES} are possible")]
    stages: list[Stage] = []
    problems: list[Problem] = []
    seen: set[str] = set()
    for place, item in enumerate(value):
        stage, found = _parse_stage(item, names)
        problems += [replace(each, key="epilogue", path=(place, *each.path)) for each in found]
        if stage is None:
            continue
        stages.append(stage)
        if stage.name in seen and not stage.kind.repeatable:
            repeat = ", ".join(name for name in names if stage_kind(name).repeatable)
            message = f"stage {stage.name!r} occurs more than once; only {repeat or 'none'} may"
            problems.append(Problem("epilogue", message, path=(place,)))
        else:
            problems += _shared_operands(stages, place)
        seen.add(stage.name)
    return tuple(stages), problems


def _shared_operands(stages: Sequence[Stage], place: int) -> list[Problem]:
    """A problem if the last stage reads an array that an earlier one reads."""
    names = {operand.name for operand in stages[-1].kind.operands}
    for earlier in stages[:-1]:
        if earlier.name != stages[-1].name and (shared := names & {operand.name for operand in earlier.kind.operands}):
            message = f"stages {earlier} and {stages[-1]} both read {', '.join(sorted(shared))}; allowed: one of the two"
            return [Problem("epilogue", message, path=(place,))]
    return []


def _parse_stage(item: object, names: Sequence[str]) -> tuple[Stage | None, list[Problem]]:
    """A stage, or the problems with it; their paths are relative to the item."""
    name: Any
    params: Any
    if isinstance(item, Stage):
        name, params = item.name, dict(item.params)
    elif isinstance(item, Mapping) and len(item) == 1:
        ((name, params),) = item.items()
    else:
        name, params = item, {}
    if name not in names:
        hint = did_you_mean(name, names) if isinstance(name, str) else ""
        return None, [Problem("", f"epilogue {name!r} is not possible{hint}; allowed: {', '.join(names)}")]
    if not isinstance(params, Mapping):
        known = ", ".join(stage_kind(name).parameters)
        takes = f"a mapping of {known}" if known else "no parameters"
        return None, [Problem("", f"stage {name} takes {takes}, got {params!r}", path=(name,))]
    known_parameters = stage_kind(name).parameters
    problems = [
        Problem("", problem.message, path=(name, problem.key), at_key=True)
        for problem in unknown_parameters(f"stage {name}", params, known_parameters)
    ]
    required = {key: known_parameters[key] for key in known_parameters if key not in stage_kind(name).defaults()}
    problems += [
        Problem("", f"stage {name}: {problem.message}", path=(name,)) for problem in missing_parameters(params, required)
    ]
    values = {key: plain(params[key]) for key in params if key in known_parameters}
    for key, each in values.items():
        if complaint := judge(each, known_parameters[key].schema):
            problems.append(Problem("", f"{key} of stage {name} {complaint}", path=(name, key)))
    return (None if problems else Stage(name, values)), problems


def computing(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages without those that only move elements."""
    return tuple(stage for stage in stages if not stage.kind.moves)


def pixel_shuffle(stages: Sequence[Stage], channels: int) -> PixelShuffle | None:
    """The depth_to_space at the end of the stages, or None.

    Args:
        channels: extent of K.
    """
    last = stages[-1] if stages else None
    if last is None or not last.kind.moves:
        return None
    return PixelShuffle(channels, last.params["block"], last.params["mode"])


def moving_problem(stages: Sequence[Stage], value: ArgSpec) -> Problem | None:
    """A stage that moves elements where it cannot: before another one, or of an output that does not divide.

    Args:
        value: the output before the epilogue.
    """
    for place, stage in enumerate(stages):
        if not stage.kind.moves:
            continue
        if place + 1 < len(stages):
            after = ", ".join(str(each) for each in stages[place + 1 :])
            return Problem("epilogue", f"stage {stage.name} must be the last, got {after} after it", path=(place,))
        if problem := shuffle_problem(value, stage.params["block"]):
            return Problem("epilogue", f"stage {stage.name} {problem}", path=(place,))
    return None


def epilogue_arguments(
    stages: Sequence[Stage], accumulator: ArgSpec, channels: int, input_dtype: str
) -> tuple[ArgSpec, ...]:
    """The operands of all stages, in order.

    Args:
        accumulator: the output before the first stage, with the output's dtype.
        channels: extent of K.
        input_dtype: the dtype of the operator's input; see `Operand`.
    """
    float8 = dtype_of(input_dtype).is_float and dtype_of(input_dtype).nbytes == 1
    output, found, vector = accumulator, [], "float32" if float8 else input_dtype
    for stage in stages:
        kind = stage.kind
        output = kind.output(output, stage.params)
        if not dtype_of(input_dtype).is_float:
            vector = "float32" if dtype_of(output.dtype).is_float else output.dtype
        for operand in kind.operands:
            known = {"vector": vector, "output": output.dtype, **stage.params}
            dtype = str(known.get(operand.dtype, operand.dtype))
            axes, shape = ("K", (channels,)) if operand.axes == "K" else (output.axes, output.shape)
            aliases = output.name if operand.aliases else None
            spec = ArgSpec(operand.name, axes, shape, dtype, operand.role, operand.constant, aliases)
            found.append(replace(spec, positive=operand.positive))
    return tuple(found)


def epilogue_output(stages: Sequence[Stage], accumulator: ArgSpec) -> ArgSpec:
    """The output after all stages."""
    output, floats = accumulator, 0
    for stage in stages:
        output = stage.kind.output(output, stage.params)
        if stage.kind.moves:
            continue
        floats += stage.name == "dequantise" or "int" not in stage.kind.takes or floats > 0
    # A stage of floats rounds twice at most (scale_shift), and dequantise once more, when it makes a float of a sum.
    computed = computing(stages)
    roundings = 2 * floats + 1 if computed and computed[-1].name == "quantise" else 0
    return replace(output, name=accumulator.name, roundings=roundings)


def epilogue_scalars(stages: Sequence[Stage]) -> tuple[ScalarSpec, ...]:
    """The call-time scalars of all stages, in order. `number` may be a parameter of the stage, whose value it then is."""
    return tuple(
        replace(scalar, number=stage.params.get(scalar.number, scalar.number))
        for stage in stages
        for scalar in stage.kind.scalars
    )


def epilogue_check_scalars(stages: Sequence[Stage], spread: float) -> dict[str, float]:
    """Values of the call-time scalars for verification; see `Op.check_scalars`."""
    values = {scalar.name: scalar.default for scalar in epilogue_scalars(stages)}
    for stage in stages:
        if stage.kind.check is not None:
            values |= stage.kind.check(spread)
    return values


def epilogue_check_inputs(stages: Sequence[Stage], spread: float) -> dict[str, Domain]:
    """What to draw for operands whose stage does not leave it to their role; see `Op.check_inputs`."""
    domains: dict[str, Domain] = {}
    for stage in stages:
        if stage.kind.check_inputs is not None:
            domains |= stage.kind.check_inputs(spread)
    return domains
