"""`schedsearch build`: a model as one file that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from schedsearch.cli import given, render
from schedsearch.cli.extract import INPUT_OPTION, SHAPE_OPTION
from schedsearch.cli.options import Sizes, all_sizes
from schedsearch.cli.tune import Duration
from schedsearch.measurement import DEFAULT_DB, MODES


@click.command()
@click.argument("model", metavar="MODEL.onnx", type=click.Path(dir_okay=False))
@click.option("--db", metavar="FILE", default=DEFAULT_DB, help="Record store to read, and to tune into.")
@click.option(
    "--output", "-o", metavar="FILE", type=click.Path(dir_okay=False), help="Written. Default: MODEL.ssx, in this folder."
)
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    help="Floating-point dtype; default: the model's own.",
)
@click.option("--layout", type=click.Choice(["auto", "NHWC", "NCHW"]), default="auto", help="Of all images.")
@click.option(
    "--io-layout",
    type=click.Choice(["NCHW", "NHWC"]),
    default="NCHW",
    help="Of images that the caller gives and takes. NHWC: no conversion for callers with channels-last images.",
)
@click.option(
    "--weights",
    type=click.Choice(["inside", "reference"]),
    default="inside",
    help="reference: those that the model's file has as they are stay there; it is needed to load.",
)
@click.option(
    "--fallback",
    type=click.Choice(["onnxruntime"]),
    help="Nodes that no kernel computes run there, and it is needed to load the file; default: they are refused.",
)
@click.option("--target", "selector", metavar="TARGET", default="auto", help="auto, cpu, cuda or cuda:N.")
@click.option(
    "--mode",
    type=click.Choice(MODES),
    help="How the records' times were taken. Default: chain-graph-v1 on cards whose kernels begin early, else cold-graph-v1",
)
@click.option(
    "--tune",
    "tune_s",
    metavar="TIME",
    type=Duration(),
    help="Measure kernels without a record. The whole build takes TIME, e.g. 90s, 10m.",
)
@click.option("--strict", is_flag=True, help="Refuse kernels without a record of exactly their workload and device.")
@click.option(
    "--no-check",
    "check",
    is_flag=True,
    flag_value=False,
    default=True,
    show_default=False,
    help="Do not compare the network with the model, for models that neither ONNX Runtime nor onnx's evaluator runs.",
)
@click.option("--explain", "explained", is_flag=True, help="Print the plan: every kernel call, its kernel and its layouts.")
@SHAPE_OPTION
@INPUT_OPTION
@click.option(
    "--dynamic",
    "dynamic_sizes",
    metavar="NAME=LEAST..MOST,...",
    type=Sizes(),
    multiple=True,
    callback=all_sizes,
    help="Dimensions that calls choose, with bounds.",
)
@click.option(
    "--run-mode",
    "--way",
    "run_mode",
    type=click.Choice(["exact", "bounded"]),
    help="A graph with computed sizes: the host reads them (exact), or they stay on the device (bounded).",
)
def build(
    model: str,
    db: str,
    output: str | None,
    dtype: str | None,
    layout: str,
    io_layout: str,
    weights: str,
    fallback: str | None,
    selector: str,
    mode: str | None,
    tune_s: float | None,
    strict: bool,
    check: bool,
    explained: bool,
    shapes: dict[str, list[int]],
    inputs: dict[str, Any],
    dynamic_sizes: dict[str, tuple[int, int]] | None,
    run_mode: Literal["exact", "bounded"] | None,
) -> None:
    """Write a model as one file that runs on this machine's device, with its weights and the best recorded kernels.

    Kernels without a record take default configurations, unless --tune measures them first. A program loads the file with
    schedsearch.load(FILE); `schedsearch run` tries it. Exits with 4 when --strict refuses kernels.

    The network is compared once with the model, on inputs drawn from a seed. If it computes something else, nothing is
    written, and the command exits with 1.

    With --dynamic n=1..64 callers choose the size of the dimension n of the model's inputs. Give --run-mode for models that
    compute sizes from values.
    """
    from schedsearch.executable.build import build as build_
    from schedsearch.executable.program import RECORDED
    from schedsearch.progress import shown

    given.require(model, "model")
    path = Path(output or f"{Path(model).stem}.ssx")
    options: dict[str, Any] = {
        "dtype": dtype, "layout": layout, "io_layout": io_layout, "weights": weights, "db": db, "out": path,
        "target": selector, "tune_s": tune_s, "strict": strict, "mode": mode, "check": check,
        "inputs": inputs,
    }  # fmt: skip
    with shown():  # the last lines are those below
        net = build_(model, fallback=fallback, shapes=shapes, dynamic=dynamic_sizes, run_mode=run_mode, **options)
    with net:
        if explained:
            render.say(net.explain())
        untuned = sum(kernel.level not in RECORDED for kernel in net.kernels)
        if untuned:
            lack = "has no record and uses its" if untuned == 1 else "have no record and use their"
            kernels = render.counted(len(net.kernels), "kernel")
            render.note(f"{untuned} of {kernels} {lack} default configuration; to measure: --tune 10m")
        size = render.size_bytes(path.stat().st_size)
        render.say(f"{path}: {net.summary}, {size}, takes {', '.join(map(str, net.inputs))}")
