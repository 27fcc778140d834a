"""A commented workload file to start from: an example of each operator that is asked for, with every key it takes."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence

from schedsearch.errors import UsageError, did_you_mean
from schedsearch.ops.params import Parameter
from schedsearch.target import Target
from schedsearch.task import Task
from schedsearch.template import load_templates
from schedsearch.typed import JsonMapping
from schedsearch.workload_file.reader import parse

EXAMPLES: Mapping[str, JsonMapping] = {
    "conv2d": {
        "shape": {"n": 1, "h": 28, "w": 28, "c": 128, "k": 128, "r": 3, "s": 3},
        "padding": 1,
        "dtype": "auto",
        "epilogue": ["bias", "relu"],
    },
    "depthwise_conv2d": {"shape": {"n": 1, "h": 56, "w": 56, "c": 96, "r": 3, "s": 3}, "padding": 1, "dtype": "auto"},
    "dense": {"shape": {"m": 16, "n": 1024, "k": 1024}, "dtype": "auto", "epilogue": ["bias"]},
    "batch_matmul": {"shape": {"b": 8, "m": 64, "n": 64, "k": 64}, "dtype": "auto"},
    "pool2d": {"shape": {"n": 1, "h": 56, "w": 56, "c": 64, "r": 3, "s": 3}, "mode": "max", "stride": 2, "dtype": "auto"},
    "softmax": {"shape": {"x": [512, 1000]}, "dtype": "auto"},
    "layer_norm": {"shape": {"x": [512, 768]}, "dtype": "auto"},
    "transpose": {"shape": {"x": [8, 56, 56, 64]}, "permutation": [0, 3, 1, 2], "dtype": "auto"},
    "depth_to_space": {"shape": {"n": 1, "h": 128, "w": 128, "c": 36}, "block": 3, "dtype": "auto"},
}
"""An operator -> the keys of a task of a common size. The first is what a file has if no operator is asked for."""

_WIDTH = 120  # columns
_HEAD = """\
# What schedsearch tunes, for which device and with what budget.
#
#     schedsearch tune {name} --dry-run      check the file; measure nothing
#     schedsearch tune {name}                tune, and print a table
#     schedsearch records best --db {db}
#
# A key behind "#" is not in force, and shows the default or an example: remove the "# " in front of it, and change it.
version: 1
target: auto # a GPU if there is one, else the CPU; here: {device}
db: {db} # every measurement is kept here; run the same command again to go on
budget: {{ trials: 64, time: 60s }} # trials of each task; time of the whole run; the first that is used up ends it
# tuner: {{ name: xgb, seed: 0 }} # or ga, annealing, random, grid
# measure: {{ mode: cold-graph-v1 }} # operands come from memory; hot-graph-v1: from the caches

tasks:
"""


def starter_file(ops: Sequence[str], target: Target, *, name: str, db: str) -> str:
    """The text of a workload file with a task of each operator, which `parse` reads.

    Args:
        ops: names of operators in `EXAMPLES`; () for the first of them.
        target: the device whose knobs the comments name.
        name: of the file, for its comments.
        db: the record store that the file names.

    Raises:
        UsageError: there is no example of an operator.
    """
    unknown = [op for op in ops if op not in EXAMPLES]
    if unknown:
        raise UsageError(
            f"there is no example of {unknown[0]!r}{did_you_mean(unknown[0], EXAMPLES)}; allowed: {', '.join(EXAMPLES)}"
        )
    chosen = list(dict.fromkeys(ops)) or [next(iter(EXAMPLES))]
    head = _HEAD.format(name=name, db=json.dumps(db) if " " in db else db, device=target.name)
    plain = "".join(f"  - {{ op: {op}, {_value(EXAMPLES[op])[2:]}\n" for op in chosen)
    return head + "".join(_task(task, target) for task in parse(head + plain, name).resolve(target).tasks)


def _task(task: Task, target: Target) -> str:
    """The example of the task's operator with all its keys."""
    op = task.workload.op
    given, parameters = EXAMPLES[op], task.workload.definition.parameters()
    sizes = "; ".join(f"{name}: {parameters[name].doc}" for name in given["shape"])
    lines = [f"  - op: {op}", f"    name: my {op}", *_explained(f"shape: {_value(given['shape'])}", sizes)]
    for name, parameter in parameters.items():
        if parameter.size:
            continue
        if name in given:
            lines += _explained(f"{name}: {_value(given[name])}", _meaning(parameter))
        elif "default" in parameter.schema:
            lines += _explained(f"# {name}: {_value(parameter.schema['default'])}", _meaning(parameter))
    lines += _explained("# weight: 1", "how much a gain counts, e.g. how often a network runs the layer")
    fitting = load_templates().matching(task.workload, target)
    knob = max(fitting[0].space(task.workload, target).knobs, key=lambda each: len(each.values))
    names, values = _value([template.name for template in fitting]), _value({knob.name: list(knob.values[:2])})
    lines += _explained(f"# templates: {names}", "those that fit; name some to tune only them")
    lines += _explained(f"# restrict: {values}", "values that a knob may take; `schedsearch space` shows all knobs")
    return "\n".join(lines) + "\n"


def _explained(key: str, comment: str) -> list[str]:
    """A key of a task with its comment: behind it, or above it if the line would be too long."""
    line = f"    {key} # {comment}"
    if len(line) <= _WIDTH:
        return [line]
    return [*(f"    # {part}" for part in textwrap.wrap(comment, _WIDTH - 6)), f"    {key}"]


def _meaning(parameter: Parameter) -> str:
    doc = parameter.doc.partition("; default ")[0]
    allowed = [str(value) for value in parameter.schema.get("enum", ())]
    unnamed = 1 < len(allowed) <= 8 and not all(value in doc for value in allowed)
    return f"{doc}: {', '.join(allowed)}" if unnamed else doc


def _value(value: object) -> str:
    """A value in YAML's flow style, as a person would write it."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key}: {_value(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value) if isinstance(value, bool | int | float) or value is None else str(value)
