"""`schedsearch extract`: the layers of a model file as a workload file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from schedsearch.cli import given, render
from schedsearch.errors import UsageError

_SHAPE = re.compile(r"(.+)=([1-9][0-9]*(?:,[1-9][0-9]*)*)")


def _shapes(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for text in texts:
        match = _SHAPE.fullmatch(text)
        if not match:
            raise click.BadParameter(f"{text!r}; allowed: INPUT=EXTENT,..., e.g. input=1,3,224,224")
        if match[1] in found:
            raise click.BadParameter(f"{match[1]} is given twice; give the shape of each input once")
        found[match[1]] = [int(extent) for extent in match[2].split(",")]
    return found


SHAPE_OPTION = click.option(
    "--shape",
    "shapes",
    metavar="INPUT=N,...",
    multiple=True,
    callback=_shapes,
    help="Shape of an input with dynamic extents.",
)


def _inputs(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, Any]:
    from schedsearch.cli.run import read_array
    from schedsearch.network.given_inputs import parsed

    found: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.rpartition("=")
        if not separator or not name:
            raise click.BadParameter(f"{text!r}; allowed: INPUT=VALUE, e.g. sr=16000")
        if name in found:
            raise click.BadParameter(f"{name} is given twice; give the value of each input once")
        if value.endswith(".npy"):
            found[name] = read_array(Path(value))
            continue
        try:
            found[name] = parsed(value)
        except ValueError:
            raise click.BadParameter(
                f"{text!r}; allowed: a number, true, false, numbers with commas, or a file of NumPy, e.g. sr=16000"
            ) from None
    return found


INPUT_OPTION = click.option(
    "--input",
    "inputs",
    metavar="INPUT=VALUE",
    multiple=True,
    callback=_inputs,
    help="The value that an input always has, e.g. sr=16000, or a .npy file; the network does not take it.",
)


@click.command()
@click.argument("model", metavar="MODEL.onnx", type=click.Path(dir_okay=False))
@click.option("--output", "-o", metavar="FILE", help="Workload file to write; default, and '-': standard output.")
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    help="Format of layers in floating point; default: the model's own.",
)
@click.option(
    "--layout", "layouts", metavar="LAYOUT", multiple=True, default=("NHWC",),
    help="Of images: NHWC, NCHW, NCHW32c ...; may be given several times.",
)  # fmt: skip
@SHAPE_OPTION
@INPUT_OPTION
def extract(
    model: str,
    output: str | None,
    dtype: str | None,
    layouts: tuple[str, ...],
    shapes: dict[str, list[int]],
    inputs: dict[str, Any],
) -> None:
    """Write every distinct layer of an ONNX model as a task of a workload file, with how often it occurs as its weight.

    Layers are convolutions and matrix products with what can be fused into them, pools, chains of element-wise nodes and
    data movements. Nodes without an operator are listed on standard error.
    """
    from schedsearch.network.layers import extract as layers_of
    from schedsearch.network.model import listed, read_model
    from schedsearch.records.output import new_file
    from schedsearch.workload_file import dump

    given.require(model, "model")
    found = layers_of(read_model(model, shapes, inputs), dtype=dtype, layouts=layouts)
    tasks = found.tasks()
    others = [f"{op} {len(names)}" for op, names in sorted(found.others.items())]
    if not tasks:
        reasons = "".join(f". {op}: {reason}" for op, reason in sorted(found.reasons.items()))
        raise UsageError(
            f"{model} has no layer that schedsearch has an operator for; its nodes are {listed(others)}{reasons}"
        )
    comment = (
        f"Layers of {Path(model).name}: {len(tasks)} distinct ones of {len(found.layers)}. weight: how often each occurs."
    )
    text = dump(tasks, comment=comment)
    if output in (None, "-"):
        render.say(text.rstrip("\n"))
    else:
        assert output is not None
        with new_file(Path(output)) as file:
            file.write(text.encode())
    flops = sum(task.weight * task.workload.flops for task in tasks) / len(layouts)
    layers, distinct = render.counted(len(found.layers), "layer"), render.counted(len(tasks), "distinct task")
    render.note(f"{layers}, {distinct}, {flops / 1e9:.4g} GFLOP")
    if others:
        render.note(f"left out: {', '.join(others)}")
    for op, reason in sorted(found.reasons.items()):
        render.note(f"  {op}: {reason}")
