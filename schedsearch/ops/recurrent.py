"""recurrent: the recurrence of LSTM, GRU and RNN of ONNX over `t` steps, after the product of x and the input weights.

`gates` holds that product with the biases, for every step, row and gate; the operator adds the product of the state and `r`
at each step. With s for a step, in the order of time or against it, and @ for a product with a transposed matrix of `r`:

| cell | gates, in this order | a step |
|---|---|---|
| lstm | i, o, f, c | i = f(gi + h @ ri + pi c), f = f(gf + h @ rf + pf c), c = f c + i g(gc + h @ rc), o = f(go + h @ ro + po c), h = o h(c) |
| gru | z, r, h | z = f(gz + h @ rz), r = f(gr + h @ rr), n = g(gh + (r h) @ rh), h = (1 - z) n + z h |
| rnn | h | h = f(gh + h @ rh) |

With `linear_before_reset` the n of gru is g(gh + r (h @ rh + bias)). With `input_forget` the f of lstm is 1 - i. States are
float32 while the kernel runs, whatever the format of the arrays.

A row that has only `sequence_lens` steps keeps its state after them, and its y is zero there. Against the order of time a
row begins at its last step. Of a row without steps everything is zero, whatever its first state is, as in ONNX Runtime. A
length below 0 or above t is an `IndexRangeError`; kernels take 0 or t for it.

Source: ONNX, operators LSTM, GRU and RNN; Hochreiter and Schmidhuber, "Long Short-Term Memory", 1997.
"""  # noqa: E501  (a table)

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from schedsearch.errors import Problem
from schedsearch.ops.base import Op
from schedsearch.ops.checks import FP32_ROUNDOFF, Domain, Rounding
from schedsearch.ops.data_movement import too_large
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.params import Parameter, Params, declared
from schedsearch.ops.specs import ArgSpec, Work
from schedsearch.typed import GivenParams, ParamsByName

DTYPES = ("float16", "bfloat16", "float32")
MOST_HIDDEN = 1 << 15


class Cell(NamedTuple):
    """A kind of recurrence.

    Attributes:
        gates: how many matrices `r` has for each direction.
        functions: its activations by default.
        optional: arguments that it may have.
        results: what it can give.
    """

    gates: int
    functions: tuple[str, ...]
    optional: tuple[str, ...]
    results: tuple[str, ...]


CELLS: Mapping[str, Cell] = {
    "lstm": Cell(
        4, ("sigmoid", "tanh", "tanh"), ("initial_h", "initial_c", "peepholes", "sequence_lens"), ("y", "y_h", "y_c")
    ),
    "gru": Cell(3, ("sigmoid", "tanh"), ("bias", "initial_h", "sequence_lens"), ("y", "y_h")),
    "rnn": Cell(1, ("tanh",), ("initial_h", "sequence_lens"), ("y", "y_h")),
}
OPTIONAL = ("bias", "initial_h", "initial_c", "peepholes", "sequence_lens")
RESULTS = ("y", "y_h", "y_c")
DIRECTIONS = ("forward", "reverse", "bidirectional")


class Function(NamedTuple):
    """An activation.

    Attributes:
        alpha, beta: their defaults in ONNX; None if it has none.
    """

    alpha: float | None = None
    beta: float | None = None


FUNCTIONS: Mapping[str, Function] = {
    "sigmoid": Function(),
    "tanh": Function(),
    "relu": Function(),
    "softsign": Function(),
    "softplus": Function(),
    "affine": Function(1.0, 0.0),
    "leaky_relu": Function(0.01),
    "thresholded_relu": Function(1.0),
    "scaled_tanh": Function(1.0, 1.0),
    "hard_sigmoid": Function(0.2, 0.5),
    "elu": Function(1.0),
}
"""relu, sigmoid, tanh, softsign x / (1 + |x|), softplus log(1 + e^x), affine alpha x + beta, leaky_relu x or alpha x below
0, thresholded_relu x from alpha on, scaled_tanh alpha tanh(beta x), hard_sigmoid alpha x + beta within 0 to 1, elu x or
alpha (e^x - 1) below 0."""


class Activation(NamedTuple):
    """An activation with its numbers."""

    name: str
    alpha: float
    beta: float


def _names(doc: str, allowed: Sequence[str], default: Sequence[str]) -> Parameter:
    items = {"enum": list(allowed)}
    return Parameter(doc, {"type": "array", "items": items, "maxItems": len(allowed), "default": list(default)})


_NUMBERS = {"type": "array", "items": {"type": "number", "minimum": -1e30, "maximum": 1e30}, "maxItems": 6}


@dataclass(frozen=True, eq=False, kw_only=True)
class RecurrentParams(Params):
    """See `recurrent`."""

    cell: str = declared(Parameter("lstm, gru or rnn", {"enum": list(CELLS)}))
    t: int = declared(Parameter.count("steps"))
    n: int = declared(Parameter.count("rows of a batch"))
    hidden: int = declared(Parameter("numbers of a state", {"type": "integer", "minimum": 1, "maximum": MOST_HIDDEN}, True))
    direction: str = declared(Parameter.choice("order of the steps; default forward", DIRECTIONS))
    optional: tuple[str, ...] = declared(_names(f"arguments besides gates and r, of {', '.join(OPTIONAL)}", OPTIONAL, ()))
    results: tuple[str, ...] = declared(_names(f"outputs, of {', '.join(RESULTS)}; default y", RESULTS, ("y",)))
    activations: tuple[str, ...] = declared(
        Parameter(
            "those of each direction, one after the other, or those of all; default: the cell's",
            {"type": "array", "items": {"enum": list(FUNCTIONS)}, "maxItems": 6},
        )
    )
    alpha: tuple[float, ...] = declared(Parameter("a number of each activation; default: ONNX's", dict(_NUMBERS)))
    beta: tuple[float, ...] = declared(Parameter("a number of each activation; default: ONNX's", dict(_NUMBERS)))
    clip: float = declared(
        Parameter(
            "sums of gates are limited to -clip to clip; default 0: not limited",
            {"type": "number", "minimum": 0, "maximum": 1e30, "default": 0.0},
        )
    )
    linear_before_reset: bool = declared(
        Parameter("of gru: multiply before the reset; default false", {"type": "boolean", "default": False})
    )
    input_forget: bool = declared(
        Parameter("of lstm: the forget gate is 1 - i; default false", {"type": "boolean", "default": False})
    )
    batch_first: bool = declared(
        Parameter(
            "rows come before steps and directions in every array; default false", {"type": "boolean", "default": False}
        )
    )
    dtype: str = declared(Parameter.choice("of all arrays but sequence_lens; default float32", DTYPES, "float32"))

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    @property
    def gates(self) -> int:
        return CELLS[self.cell].gates

    def functions(self, direction: int) -> tuple[Activation, ...]:
        """The activations of a direction."""
        count = len(CELLS[self.cell].functions)
        every = [Activation(*each) for each in zip(self.activations, self.alpha, self.beta)]
        return tuple(every[direction * count : (direction + 1) * count])


class Recurrent(Op[RecurrentParams]):
    params_type: ClassVar[type[Params]] = RecurrentParams
    name: ClassVar[str] = "recurrent"
    reference: ClassVar[str] = "schedsearch.templates.recurrent.reference:RecurrentReference"
    constructor: ClassVar[str] = "schedsearch:recurrent"

    def defaults(self, params: GivenParams) -> GivenParams:
        found = dict(super().defaults(params))
        cell = CELLS.get(params["cell"]) if isinstance(params.get("cell"), str) else None
        if cell is None:
            return found
        repeats = 2 if params.get("direction") == "bidirectional" else 1
        usual = found["activations"] = cell.functions * repeats
        given = params.get("activations")
        names: Sequence[object] = given if isinstance(given, list | tuple) else usual
        if len(names) == len(cell.functions):
            names = [*names] * repeats
        kinds = [FUNCTIONS.get(name, Function()) if isinstance(name, str) else Function() for name in names]
        found |= {"alpha": tuple(kind.alpha or 0.0 for kind in kinds), "beta": tuple(kind.beta or 0.0 for kind in kinds)}
        return found

    def normalise(self, params: Mapping[str, object]) -> tuple[ParamsByName, list[Problem]]:
        """Lists have one order, and every direction has its activations; numbers that these do not have are 0."""
        found, problems = super().normalise(params)
        if problems:
            return found, problems
        found["optional"] = tuple(name for name in OPTIONAL if name in found["optional"])
        found["results"] = tuple(name for name in RESULTS if name in found["results"])
        repeats = 2 if found["direction"] == "bidirectional" else 1
        if len(found["activations"]) == len(CELLS[found["cell"]].functions):
            found["activations"] = found["activations"] * repeats
        for name in ("alpha", "beta"):
            numbers = found[name]
            if len(numbers) * repeats == len(found["activations"]):
                numbers = numbers * repeats
            kinds = [FUNCTIONS[each] for each in found["activations"]]
            found[name] = tuple(0.0 if getattr(kind, name) is None else float(each) for kind, each in zip(kinds, numbers))
        return found, problems

    def problems(self, params: RecurrentParams) -> Iterable[Problem]:
        p, cell = params, CELLS[params.cell]
        found = []
        for name, given, allowed in (("optional", p.optional, cell.optional), ("results", p.results, cell.results)):
            if wrong := [each for each in given if each not in allowed]:
                found.append(Problem(name, f"{name} has {wrong[0]!r}, which {p.cell} lacks; allowed: {', '.join(allowed)}"))
        if not p.results:
            found.append(Problem("results", f"results is empty; allowed: at least one of {', '.join(cell.results)}"))
        if "bias" in p.optional and not p.linear_before_reset:
            found.append(Problem("optional", "optional has 'bias', which belongs to linear_before_reset; add it to gates"))
        counts = sorted({len(cell.functions), p.directions * len(cell.functions)})
        allowed_counts = " or ".join(map(str, counts))
        for name in ("activations", "alpha", "beta"):
            if (count := len(p[name])) not in counts:
                found.append(
                    Problem(name, f"{name} has {count} entries; allowed for {p.cell}, {p.direction}: {allowed_counts}")
                )
        for name, of in (("linear_before_reset", "gru"), ("input_forget", "lstm")):
            if p[name] and p.cell != of:
                found.append(Problem(name, f"{name} belongs to {of}, but cell is {p.cell}; leave it out"))
        return found or too_large("gates", self._gates(p), dtype_of(p.dtype).nbytes)

    def _gates(self, p: RecurrentParams) -> tuple[int, ...]:
        first = (p.n, p.t) if p.batch_first else (p.t, p.n)
        return (*first, p.directions * p.gates * p.hidden)

    def _state(self, p: RecurrentParams) -> tuple[int, ...]:
        first = (p.n, p.directions) if p.batch_first else (p.directions, p.n)
        return (*first, p.hidden)

    def arguments(self, params: RecurrentParams) -> tuple[ArgSpec, ...]:
        p = params
        d, h = p.directions, p.hidden
        constants = {
            "bias": ArgSpec("bias", "AB", (d, h), p.dtype, constant=True),
            "peepholes": ArgSpec("peepholes", "AB", (d, 3 * h), p.dtype, constant=True),
            "sequence_lens": ArgSpec("sequence_lens", "A", (p.n,), "int32", role="index", below=p.t + 1),
        }
        states = {name: ArgSpec(name, "ABC", self._state(p), p.dtype) for name in ("initial_h", "initial_c")}
        return (
            ArgSpec("gates", "ABC", self._gates(p), p.dtype),
            ArgSpec("r", "ABC", (d, p.gates * h, h), p.dtype, role="factor", constant=True),
            *((constants | states)[name] for name in p.optional),
        )

    def outputs(self, params: RecurrentParams) -> tuple[ArgSpec, ...]:
        """y has the axes (steps, directions, rows, numbers), or (rows, steps, directions, numbers)."""
        p = params
        shape = (p.n, p.t, p.directions, p.hidden) if p.batch_first else (p.t, p.directions, p.n, p.hidden)
        found = {name: ArgSpec(name, "ABC", self._state(p), p.dtype) for name in ("y_h", "y_c")}
        found["y"] = ArgSpec("y", "ABCD", shape, p.dtype)
        return tuple(found[name] for name in p.results)

    def work(self, params: RecurrentParams) -> Work:
        p = params
        flops = 2 * p.t * p.n * p.directions * p.gates * p.hidden**2
        return Work(flops, super().work(p).nbytes, p.hidden)

    def rounding(self, params: RecurrentParams) -> Rounding:
        """An error of a sum passes through activations, and on to later steps, where gates damp it: on numbers for
        verification it grows to a few times its own size. Activations add some roundoffs of float32."""
        return Rounding(additions=FP32_ROUNDOFF * (4 + 64 / params.hidden))

    def exact_step(self, params: RecurrentParams) -> float | None:
        return None

    def equality(self, params: RecurrentParams) -> Literal["exact", "rounded"]:
        return "rounded"

    def check_inputs(self, params: RecurrentParams) -> Mapping[str, Domain]:
        """Numbers near 1 whose products with a state sum up to less than about 1, so that states neither grow nor vanish."""
        p = params
        share = min(1.0, 4.0 / p.hidden)  # about four products of a sum are not zero
        found = {
            "gates": Domain(tuple(number / 8 for number in range(-16, 17))),
            "r": Domain((-0.5, -0.25, 0.25, 0.5), density=share),
            "bias": Domain((-0.5, -0.25, 0.25, 0.5)),
            "peepholes": Domain((-0.5, -0.25, 0.0, 0.25, 0.5)),
            "initial_h": Domain(tuple(number / 8 for number in range(-8, 9))),
            "initial_c": Domain(tuple(number / 8 for number in range(-8, 9))),
            "sequence_lens": Domain(range(p.t + 1)),
        }
        return {spec.name: found[spec.name] for spec in self.arguments(p)}

    def timing_inputs(self, params: RecurrentParams) -> Mapping[str, Domain]:
        """All steps of all rows."""
        return {"sequence_lens": Domain((params.t,))} if "sequence_lens" in params.optional else {}

    def wrong_index(self, params: RecurrentParams, place: int, index: int, names: Mapping[str, str]) -> str:
        name = names.get("sequence_lens", "sequence_lens")
        return f"{name}[{place}] is {index}, but a sequence has {params.t} steps; allowed: 0 to {params.t}"

    def label(self, params: RecurrentParams) -> str:
        p = params
        words = [f"{p.cell} t{p.t} n{p.n} h{p.hidden}", *([p.direction] if p.direction != "forward" else [])]
        functions = [name for name in p.activations if name not in CELLS[p.cell].functions]
        words += [*p.optional, *(["+".join(p.results)] if p.results != ("y",) else []), *functions]
        words += [name for name in ("linear_before_reset", "input_forget", "batch_first") if p[name]]
        words += [f"clip {p.clip:g}"] if p.clip else []
        return " ".join([*words, dtype_of(p.dtype).short])


RECURRENT = Recurrent()
