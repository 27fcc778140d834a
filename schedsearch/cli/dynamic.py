"""What `build` and `run` do with networks whose sizes are known at run time only."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from schedsearch.cli import render
from schedsearch.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from schedsearch.dynamic.executable import DynamicExecutable, DynamicPort, Way
    from schedsearch.dynamic.program import Call, Size
    from schedsearch.executable.net import Net
    from schedsearch.executable.sized import SizedNet

_BOUNDS = re.compile(r"\s*([^=,]+?)\s*=\s*(-?\d{1,20})\s*\.\.\s*(-?\d{1,20})\s*")


class Sizes(click.ParamType["dict[str, tuple[int, int]]"]):
    """Names of dimensions with their bounds: n=1..64,h=480..800."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, tuple[int, int]]:
        from schedsearch.ops.base import MAX_INT

        found: dict[str, tuple[int, int]] = {}
        for text in str(value).split(","):
            match = _BOUNDS.fullmatch(text)
            if match is None:
                self.fail(
                    f"{text!r} is not a dimension with bounds; write NAME=LEAST..MOST, e.g. n=1..64,h=480..800", param, ctx
                )
            name, least, most = match[1], int(match[2]), int(match[3])
            if least > most:
                self.fail(
                    f"{name}={least}..{most} is reversed; write the smaller bound first: {name}={most}..{least}", param, ctx
                )
            if least < 0 or most > MAX_INT:
                self.fail(f"{name}={least}..{most} is not possible; allowed: sizes from 0 to {MAX_INT}", param, ctx)
            if most == 0:
                self.fail(f"{name}={least}..{most} has no size but 0; allowed: a largest size of 1 or more", param, ctx)
            if name in found:
                self.fail(f"{name} is given twice; give each dimension once", param, ctx)
            found[name] = (least, most)
        return found


def build(
    model: str, path: Path, sizes: dict[str, tuple[int, int]], way: Way | None, explained: bool, options: dict[str, Any]
) -> None:
    """Builds an executable, and says what it is."""
    from schedsearch.dynamic.build import build_dynamic
    from schedsearch.executable.sized import SizedNet

    with build_dynamic(model, sizes, way=way, out=path, say=render.note, **options) as net:
        if explained:
            render.say(net.explain())
        if isinstance(net, SizedNet):
            untuned, kernels = net.untuned
            what = "a table of kernels"
        else:
            untuned = sum(kernel.origin.rung != "exact" for kernel in net.parts.kernels.values())
            kernels = len(net.parts.kernels)
            what = f"{render.counted(sum(len(each.calls) for each in net.program.segments), 'call')}, runs {net.parts.way}"
        if untuned:
            render.note(
                f"{untuned} of {render.counted(kernels, 'kernel')} have no record and use default configurations; "
                "measure them: --tune 10m"
            )
        size = render.size_bytes(path.stat().st_size)
        render.say(f"{path}: {what}, {size}, takes {', '.join(map(str, net.inputs))}")


def run(
    net: DynamicExecutable, files: tuple[str, ...], texts: tuple[str, ...], output: str | None, repeat: int, as_json: bool
) -> None:
    """Runs an executable once on files or random numbers, checks it, and times it in both ways."""
    from schedsearch.cli.run import read_inputs, write_outputs

    limits = {each.name: each for port in net.inputs for each in port.shape if not isinstance(each, int)}
    sizes = chosen(texts, limits)
    drawn = [Drawn(port, sizes) for port in net.inputs]
    given = read_inputs(drawn, files, _index_limits(net, sizes))
    arrays = [_on_device(array, net.net.device.target.kind) for array in given.values()]
    outputs = net.net(*arrays)
    net.check()
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    named = {port.name: _on_host(array) for port, array in zip(net.outputs, outputs)}
    if output is not None:
        write_outputs(Path(output), named)
    exact_ns = _time_ns(lambda: net.net(*arrays), net, repeat) if repeat else None
    bound = net.bind(*arrays)
    try:
        bound.step()
        bound.check()
        bounded_ns = _time_ns(bound.step, net, repeat) if repeat else None
    finally:
        bound.close()
    shapes = {name: list(array.shape) for name, array in named.items()}
    if as_json:
        found = {"model": net.parts.model, "target": net.parts.target, "exact_ns": exact_ns, "bounded_ns": bounded_ns}
        render.echo_json({**found, "inputs": {name: list(each.shape) for name, each in given.items()}, "outputs": shapes})
        return
    render.say(net.explain())
    for name, shape in shapes.items():
        render.say(f"{name}: {shape}")
    if exact_ns is not None and bounded_ns is not None:
        render.say(f"exact {render.duration(exact_ns)}, bounded {render.duration(bounded_ns)}, each with its wait")


def _index_limits(net: DynamicExecutable, sizes: Mapping[str, int]) -> dict[str, int]:
    """Input that a call reads as indices -> what they must be less than, as far as it follows from the sizes."""
    found: dict[str, int] = {}
    for call in (call for segment in net.program.segments for call in segment.calls):
        for spec in call.workload.signature:
            value = net.program.values.get(call.inputs.get(spec.name, ""))
            if spec.below is not None and value is not None and (name := value.view_of or value.name) in net.program.inputs:
                found[name] = min(spec.below, *_extents_in_use(net, call, sizes), found.get(name, spec.below))
    return found


def _extents_in_use(net: DynamicExecutable, call: Call, sizes: Mapping[str, int]) -> list[int]:
    """The extents that indices count along, if the call reads them and they follow from the sizes of inputs; 1 for none."""
    from schedsearch.ops.index_map import index_map

    if not call.workload.params.get("dynamic_x") or (known := net.program.values[call.inputs["x"]].known) is None:
        return []
    extents = [known[axis] for axis in index_map(call.workload.params).axes]
    return [max(1, n if isinstance(n, int) else n.at(sizes)) for n in extents]


def at_size(net: SizedNet, texts: tuple[str, ...], files: tuple[str, ...]) -> Net:
    """The network of the size that the user chose, or that the first file has, or of the largest."""
    import numpy as np

    from schedsearch.dynamic.program import Size

    found = chosen(texts, {net.name: Size(net.name, net.sizes[0], net.sizes[-1])})
    if found or not files:
        return net.at(found.get(net.name, net.sizes[-1]))
    name, mark, path = files[0].partition("=")
    ports = {port.name: port for port in net.inputs}
    port = ports[name] if mark and name in ports else net.inputs[0]
    try:
        shape = np.load(path if mark else files[0], mmap_mode="r").shape
    except (OSError, ValueError):
        return net.at(net.sizes[-1])  # reading the file again says what is wrong
    sizes = [n for n, each in zip(shape, port.shape) if isinstance(each, str)]
    return net.at(sizes[0] if sizes else net.sizes[-1])


def chosen(texts: tuple[str, ...], limits: Mapping[str, Size]) -> dict[str, int]:
    """The sizes that the user chose with --size NAME=N."""
    found = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in limits:
            raise UsageError(
                f"--size {text}: no size {name!r}{did_you_mean(name, limits)}; allowed: {', '.join(limits) or 'none'}"
            )
        size = limits[name]
        if not number.isdecimal() or not size.least <= int(number) <= size.most:
            raise UsageError(f"--size {text}: {number!r} is not possible; allowed: {name}={size.least}..{size.most}")
        found[name] = int(number)
    return found


class Drawn:
    """An input as `run` draws it: its sizes are the largest, or those that the user chose."""

    def __init__(self, port: DynamicPort, sizes: dict[str, int]) -> None:
        self.name, self.dtype, self._text = port.name, port.dtype, str(port)
        self.shape = tuple(n if isinstance(n, int) else sizes.get(n.name, n.most) for n in port.shape)

    def __str__(self) -> str:
        return self._text


def _time_ns(action: Any, net: DynamicExecutable, repeat: int) -> float:
    """The median time of a run until its results are complete."""
    times = []
    for _ in range(repeat):
        start = time.perf_counter_ns()
        action()
        net.net.device.synchronize()
        times.append(time.perf_counter_ns() - start)
    return float(sorted(times)[len(times) // 2])


def _on_device(array: Any, kind: str) -> Any:
    if kind == "cpu":
        return array
    try:
        import torch
    except ImportError as error:
        raise UsageError("running on a GPU needs arrays of a library there; install PyTorch: pip install torch") from error
    return torch.from_numpy(array).cuda()


def _on_host(array: Any) -> Any:
    return array.cpu().numpy() if hasattr(array, "cpu") else array
