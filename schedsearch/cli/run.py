"""`schedsearch run`: runs a built model, times it, and compares it with the model's own precision."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from schedsearch.cli import given, render
from schedsearch.cli.options import AtLeast
from schedsearch.errors import UsageError, did_you_mean
from schedsearch.typed import Array

if TYPE_CHECKING:
    from schedsearch.executable.compare import LayerError
    from schedsearch.executable.net import Net, Times
    from schedsearch.executable.ports import Port
    from schedsearch.network.given_inputs import Given


@click.command()
@click.argument("executable", metavar="MODEL.ssx", type=click.Path())
@click.option(
    "--input",
    "files",
    metavar="[NAME=]FILE.npy|NAME=VALUE",
    multiple=True,
    help="An input of the model; default: random numbers. NAME=VALUE: numbers, e.g. sr=16000.",
)
@click.option("--output", metavar="FILE", type=click.Path(), help="Write the outputs: one as .npy, several as .npz.")
@click.option(
    "--compare", metavar="onnx|MODEL.onnx", help="Show the error of every layer. onnx: the file that it was built from."
)
@click.option("--repeat", metavar="N", type=AtLeast(0), default=100, help="Runs to time; 0: none.")
@click.option(
    "--size",
    "sizes",
    metavar="NAME=N",
    multiple=True,
    help="A size that callers choose; default: that of the inputs given, otherwise the largest.",
)
@click.option("--target", "selector", metavar="TARGET", default="auto", help="auto, cpu, cuda or cuda:N.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def run(
    executable: str,
    files: tuple[str, ...],
    output: str | None,
    compare: str | None,
    repeat: int,
    sizes: tuple[str, ...],
    selector: str,
    as_json: bool,
) -> None:
    """Run a model that `schedsearch build` wrote: its time, that of each kernel call, and its error.

    The error of a layer is its largest difference from the model in its own precision, divided by the largest magnitude
    there. For integers it also says how many are equal, and by how many steps the others differ at most. ONNX Runtime
    computes the model if it is installed, otherwise ONNX's reference evaluator.

    For a network of computed sizes it prints which calls each call depends on, and the times of an exact and
    of a bounded run.
    """
    from schedsearch.executable.compare import layer_errors, onnxruntime_time
    from schedsearch.executable.explain import check_text
    from schedsearch.executable.file import load
    from schedsearch.progress import shown

    given.require(executable, "executable")
    with contextlib.ExitStack() as opened, shown() as display:
        display.stage(f"loading {Path(executable).name}")
        loaded = opened.enter_context(load(executable, target=selector))
        files, constants = _without_constants(loaded, files) if compare else (files, {})
        at = _sizes(loaded, sizes, files)
        net = loaded.at(at)
        inputs = read_inputs([port.at(at) for port in net.inputs], files, net.index_limits(at))
        display.stage("running the network")
        outputs = net.evaluate(inputs)
        if output is not None:
            write_outputs(Path(output), outputs)
        original = _original(net, Path(executable), compare) if compare else None
        if original:
            display.stage(f"comparing every layer with {original.name}")
        errors = layer_errors(net, original, inputs, constants) if original else []
        display.stage("timing the network and its calls")
        times = net.measure(repeat, inputs) if repeat else None
        if original and repeat:
            display.stage(f"timing {original.name} in ONNX Runtime")
        peer = onnxruntime_time(net, original, inputs, repeat, constants) if original and repeat else None
        display.close()  # what follows are results
        if as_json:
            calls_ns = (times.calls_ns if times else ()) or [None] * len(net.steps)
            render.echo_json(
                {
                    "model": net.model,
                    "target": net.target,
                    "checked": net.checked,
                    "inputs": {name: list(array.shape) for name, array in inputs.items()},
                    "outputs": {name: list(array.shape) for name, array in outputs.items()},
                    "total_ns": times.total_ns if times else None,
                    **{f"{run_mode}_ns": time_ns for run_mode, time_ns in (times.run_modes_ns if times else {}).items()},
                    "calls": [
                        {"name": call.name, "kernel": call.label, "template": call.origin.template, "time_ns": time_ns}
                        for call, time_ns in zip(net.steps, calls_ns)
                    ],
                    "errors": [asdict(each) for each in errors],
                    "peer": asdict(peer) if peer else None,
                }
            )
            return
        if times:
            _say_times(net, times)
        if times and peer:
            ours_ns = times.total_ns or min(times.run_modes_ns.values(), default=0.0)
            ratio = f": {peer.time_ns / ours_ns:.3g} times ours" if ours_ns else ""
            render.say(f"{peer.name} needs {render.duration(peer.time_ns)}{ratio}")
        for name, array in outputs.items():
            render.say(f"{name}: {list(array.shape)}")
        if not net.checked:
            render.note(check_text(""))
        if errors:
            _say_errors(errors)


def _without_constants(net: Net, texts: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, Given]]:
    """Texts without those that give a value to an input of the model that the network does not take, and these values."""
    from schedsearch.network.given_inputs import parsed

    kept: list[str] = []
    constants: dict[str, Given] = {}
    for text in texts:
        name, mark, value = text.partition("=")
        if mark and name not in {port.name for port in net.inputs} and not Path(text).exists():
            with contextlib.suppress(ValueError):
                constants[name] = parsed(value)
        if name not in constants:
            kept.append(text)
    return tuple(kept), constants


def _sizes(net: Net, texts: tuple[str, ...], files: tuple[str, ...]) -> dict[str, int]:
    """The sizes that the user chose with --size NAME=N, or else those of arrays in files."""
    import numpy as np

    limits, found = net.dimensions, dict[str, int]()
    for _, path, port in _named(net.inputs, files):
        try:
            found |= port.sizes_of(np.load(path, mmap_mode="r").shape)
        except (OSError, ValueError, AttributeError):
            continue  # reading the file again says what is wrong
    for text in texts:
        name, _, number = text.partition("=")
        if name not in limits:
            raise UsageError(
                f"--size {text}: no size {name!r}{did_you_mean(name, limits)}; allowed: {', '.join(limits) or 'none'}"
            )
        if not number.isdecimal() or not limits[name].least <= int(number) <= limits[name].most:
            raise UsageError(f"--size {text}: {number!r} is not possible; allowed: {limits[name]}")
        found[name] = int(number)
    return found


def _say_times(net: Net, times: Times) -> None:
    if times.run_modes_ns:
        modes = ", ".join(f"{mode} {render.duration(time_ns)}" for mode, time_ns in times.run_modes_ns.items())
        render.say(f"{net.explain()}\n{modes}, each with its wait")
        return
    together = sum(times.calls_ns)
    rows = [
        (call.name, call.label, call.origin.template, render.duration(time_ns), f"{100 * time_ns / together:.1f} %")
        for call, time_ns in zip(net.steps, times.calls_ns)
    ]
    render.say(render.table(("call", "computes", "kernel", "time", "share"), rows, right=("time", "share")))
    render.say(
        f"total: {render.duration(times.total_ns)} as a whole; {render.duration(together)} if every call runs alone, again "
        "and again"
    )


def _say_errors(errors: Sequence[LayerError]) -> None:
    whole = [each for each in errors if each.equal is not None]
    rows = []
    for each in errors:
        row = (each.value, f"{each.relative:.2e}", f"{each.largest:.3g}")
        if each.equal is not None:
            row = (each.value, f"{each.relative:.2e}", render.counted(int(each.largest), "step"))
        equal = "" if each.equal is None else f"{each.equal} of {each.elements}"
        rows.append((*row, equal) if whole else row)
    headers = ("value", "relative error", "largest difference", *(["equal"] if whole else []))
    render.say(render.table(headers, rows, right=("relative error", "equal")))
    worst = max(errors, key=lambda each: each.relative)
    render.say(f"largest relative error: {worst.relative:.2e}, of {worst.value}; of the output {errors[-1].relative:.2e}")
    differing = [each for each in whole if each.equal != each.elements]
    if differing:
        worst = max(differing, key=lambda each: each.largest)
        render.say(
            f"integers: {len(whole) - len(differing)} of {len(whole)} values equal in every bit; "
            f"the others differ by {render.counted(int(worst.largest), 'step')} at most ({worst.value})"
        )
    elif whole:
        render.say(f"integers: {render.counted(len(whole), 'value')}, equal in every bit")


def read_inputs(wanted: Sequence[Port], files: tuple[str, ...], below: Mapping[str, int] | None = None) -> dict[str, Array]:
    """The inputs by name, in the order wanted, from files or drawn.

    Args:
        wanted: ports of known shapes.
        below: input -> what drawn integers are less than; default: 100.
    """
    import numpy as np

    ports = {port.name: port for port in wanted}
    found: dict[str, Array] = {}
    for name, path, port in _named(wanted, files):
        found[name] = _in_format(_fitting(_array_of(path, port), port, path), port)
    rng = np.random.default_rng(0)
    for name, port in ports.items():
        if name not in found:
            whole = "int" in port.dtype
            numbers = rng.integers(0, (below or {}).get(name, 100), port.bound) if whole else rng.standard_normal(port.bound)
            found[name] = _in_format(np.asarray(numbers, np.int32 if whole else np.float32), port)
    return {name: found[name] for name in ports}


def _named(ports: Sequence[Port], files: tuple[str, ...]) -> Iterator[tuple[str, str, Port]]:
    """Name, file and port of each `[NAME=]FILE`."""
    by_name = {port.name: port for port in ports}
    for number, text in enumerate(files):
        name, mark, path = text.partition("=")
        if not mark or name not in by_name:
            if mark and not Path(text).exists():
                raise UsageError(f"the network has no input {name!r}; it takes {', '.join(map(str, ports))}")
            if number >= len(ports):
                raise UsageError(f"{len(files)} inputs given; the network takes {', '.join(map(str, ports))}")
            name, path = ports[number].name, text
        yield name, path, by_name[name]


def _array_of(text: str, port: Port) -> Array:
    """The array in a file, or of the numbers that a text such as 16000 or 1,2,3 is, if no file has its name."""
    import numpy as np

    from schedsearch.network.given_inputs import parsed

    if not text:
        raise UsageError(f"{port.name}= has no value; give numbers, e.g. {port.name}=1, or a file: {port.name}=FILE.npy")
    if not Path(text).exists():
        with contextlib.suppress(ValueError):
            array = np.asarray(parsed(text))
            return array.reshape(port.bound) if array.size == math.prod(port.bound) else array
    return read_array(Path(text))


def read_array(path: Path) -> Array:
    """An array in a file of NumPy. Raises UsageError if there is none."""
    import numpy as np

    if not path.is_file():
        raise UsageError(
            f"{path} is not a file; give an array that numpy.save wrote, numbers such as 1 or 0.5,2, or leave --input out "
            "for random numbers"
        )
    try:
        array = np.load(path, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"{path} cannot be read as an array ({error}); write it with numpy.save") from error
    except (ValueError, EOFError) as error:  # NumPy's text advises to unpickle a file that is not an array
        raise UsageError(
            f"{path} cannot be read as an array; allowed: numbers in NumPy's format, complete. Write it with numpy.save"
        ) from error
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{path} holds several arrays; give one .npy for each input, as NAME=FILE.npy")
    return array


def _fitting(array: Array, port: Port, path: str) -> Array:
    """The array, unless its numbers are not those of the input's kind. Widths may differ, as far as the numbers fit: NumPy
    lacks some formats, and a number on the command line has none."""
    import numpy as np

    from schedsearch.ops.dtypes import dtype

    row = dtype(port.dtype)
    kind = np.dtype(np.float64) if row.is_float else np.dtype(row.storage)
    whole = array.dtype.kind in "iuO"  # object: whole numbers of the command line that no dtype holds
    if not (whole or np.can_cast(array.dtype, kind, "same_kind")):
        allowed = "whole numbers" if kind.kind in "iu" else "real numbers"
        raise UsageError(f"{path} has numbers of {array.dtype}, but {port.name} is {port.dtype}; allowed: {allowed}")
    if kind.kind in "iu" and array.size:
        limits = np.iinfo(kind)
        if array.min() < limits.min or array.max() > limits.max:
            raise UsageError(
                f"{path} has numbers from {array.min()} to {array.max()}, but {port.name} is {port.dtype}; allowed: "
                f"{limits.min} to {limits.max}"
            )
    return array.astype(kind) if whole else array


def _in_format(array: Array, port: Port) -> Array:
    """An array in the format of an input; its shape is checked by the call."""
    import numpy as np

    from schedsearch.ops.dtypes import dtype, encode

    row = dtype(port.dtype)
    stored = np.ascontiguousarray(encode(array, port.dtype)).reshape(np.shape(array))  # NumPy gives a scalar an axis
    if row.storage == row.library:
        return stored
    try:
        import ml_dtypes
    except ImportError as error:
        raise UsageError(f"{port.name} is {port.dtype}, which NumPy lacks; pip install ml-dtypes") from error
    return stored.view(getattr(ml_dtypes, row.library))


def write_outputs(path: Path, outputs: dict[str, Array]) -> None:
    """Writes arrays of NumPy as FILE."""
    import numpy as np

    from schedsearch.records.output import new_file

    with new_file(path) as file:
        if len(outputs) == 1:
            np.save(file, next(iter(outputs.values())))
        else:
            np.savez(file, **outputs)  # type: ignore[arg-type]  # an output may have the name of a parameter


def _original(net: Net, executable: Path, compare: str) -> Path:
    """The model to compare with."""
    if compare != "onnx":
        return Path(compare)
    places = [executable.parent / net.model, Path(net.model)]
    for path in places:
        if net.model and path.is_file():
            return path
    raise UsageError(
        f"the model file {net.model or '(unknown)'} is neither beside {executable} nor here; give its path: "
        "--compare MODEL.onnx"
    )
