"""`Net` is one type for callers, whatever is in the file, and opens the files that earlier versions wrote.

The files in tests/data/executables have a network of fixed sizes, one of several sizes, and one whose sizes are computed.
Expected values are NumPy's.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import isolate
from cli_support import schedsearch as command

import schedsearch
from schedsearch.errors import ArgumentError, DatabaseError, DeviceError, UsageError
from schedsearch.executable.net import Net
from schedsearch.executable.ports import Port, Size
from schedsearch.records import trust
from schedsearch.target import Target

FOLDER = Path(__file__).parent / "data" / "executables"
OUTDATED = "computed_v5.ssx"  # has the calls that made a graph
FILES = sorted(path.name for path in FOLDER.glob("*.ssx") if path.name != OUTDATED)
Arrays = dict[str, np.ndarray[Any, Any]]

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the files have code for x86-64")


def target() -> Target:
    """What the files were made for."""
    return replace(schedsearch.detect("cpu"), name="any", sms=1, simd_bits=128)


def stored(name: str, folder: Path) -> Path:
    """A copy of a file that this machine trusts."""
    path = folder / name
    shutil.copy(FOLDER / name, path)
    trust.trust(path)
    return path


def inputs(name: str) -> Arrays:
    rng = np.random.default_rng(0)
    if name.startswith("computed"):
        x = rng.standard_normal((2, 3)).astype(np.float32)
        return {"x": x, "begin": np.array([0, 1]), "end": np.array([2, 3])}
    return {"x": rng.standard_normal((2, 4, 4, 4)).astype(np.float32)}


def expected(name: str, given: Arrays) -> Arrays:
    x = given["x"]
    if name.startswith("computed"):
        bias = np.array([-1, 0, 1], np.float32)
        positive, begin, end = np.maximum(x + bias, 0), given["begin"], given["end"]
        twice = np.concatenate([positive[:, :, None]] * 2, axis=1)
        window = positive[begin[0] : end[0], begin[1] : end[1]]
        return {"window": window, "twice": twice, "rows": np.broadcast_to(bias, x.shape)}
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
    sums = windows.sum(axis=(1, 4, 5), dtype=np.float64)
    return {"y": np.maximum(np.repeat(sums[:, None], 4, axis=1) + 0.5, 0)}


def check(name: str, found: Arrays, given: Arrays) -> None:
    wanted = expected(name, given)
    assert found.keys() == wanted.keys()
    for each, array in found.items():
        np.testing.assert_allclose(array, wanted[each], rtol=1e-5, atol=1e-5)


@pytest.fixture(params=FILES)
def name(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    isolate(tmp_path, monkeypatch)
    file: str = request.param
    return file


@pytest.fixture
def net(name: str, tmp_path: Path) -> Iterator[Net]:
    with schedsearch.load(stored(name, tmp_path), target=target()) as loaded:
        yield loaded


def test_there_is_a_file_of_each_kind() -> None:
    assert {path.partition("_")[0] for path in FILES} == {"fixed", "sizes", "computed"}


def test_a_file_of_an_older_form_names_the_command_that_writes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    isolate(tmp_path, monkeypatch)
    remedy = r"build it again: schedsearch build computed\.onnx --dynamic n=1\.\.3 --run-mode exact -o .*computed_v5\.ssx$"
    with pytest.raises(DatabaseError, match=remedy):
        schedsearch.load(stored(OUTDATED, tmp_path), target=target())


def test_a_file_of_any_kind_and_version_computes_what_it_was_built_for(net: Net, name: str) -> None:
    assert isinstance(net, schedsearch.Net)
    given = inputs(name)
    check(name, net.evaluate(given), given)
    found = net(*given.values())
    several = found if isinstance(found, tuple) else (found,)
    check(name, dict(zip((port.name for port in net.outputs), several)), given)


def test_ports_say_what_the_arrays_look_like(net: Net, name: str) -> None:
    given = inputs(name)
    assert [port.name for port in net.inputs] == list(given)
    for port, array in zip(net.inputs, given.values()):
        assert port.at(port.sizes_of(array.shape)).bound == array.shape and port.dtype == array.dtype.name
    assert net.dimensions == ({} if name.startswith("fixed") else {"n": Size("n", 1, 3)})
    exact = {port.name: port.exact for port in net.outputs}
    assert exact == {each: each == "y" for each in expected(name, given)}


def test_a_bound_net_reads_its_arrays_again_in_every_run(net: Net, name: str) -> None:
    given = inputs(name)
    step = net.bind(**given)
    for _ in range(2):
        step()
        given["x"] += 1
    found = step()
    step.check()
    several = found if len(net.outputs) > 1 else (found,)
    pairs = [each if isinstance(each, tuple) else (each, each.shape) for each in several]
    shown = [array[tuple(map(slice, extents))] for array, extents in pairs]
    check(name, dict(zip((port.name for port in net.outputs), shown)), given)
    step.close()


def test_a_saved_net_is_a_file_that_loads(net: Net, name: str, tmp_path: Path) -> None:
    net.save(tmp_path / "again.ssx")
    with schedsearch.load(tmp_path / "again.ssx", target=target()) as again:
        check(name, again.evaluate(inputs(name)), inputs(name))
        again.save(tmp_path / "third.ssx")
    assert (tmp_path / "third.ssx").read_bytes() == (tmp_path / "again.ssx").read_bytes()


def test_what_a_net_consists_of_and_how_long_it_takes(net: Net, name: str) -> None:
    given = inputs(name)
    one = net.at(dict.fromkeys(net.dimensions, 2))
    assert [step.label for step in one.steps] and all(step.origin.template for step in one.steps)
    assert len(net.kernels) >= 1 and net.summary and net.model in net.explain() and net.model in repr(net)
    times = net.measure(2, given)
    assert times.total_ns > 0
    assert (len(times.calls_ns) == len(one.steps)) != (times.run_modes_ns.keys() == {"exact", "bounded"})


def test_what_depends_on_the_run_says_so(net: Net, name: str) -> None:
    given = inputs(name)
    if name.startswith("computed"):
        positive = np.maximum(given["x"] + np.array([-1, 0, 1], np.float32), 0)
        np.testing.assert_allclose(net.trace(**given)["positive"], positive, rtol=1e-5, atol=1e-5)
        with pytest.raises(UsageError, match=r"give them: measure\(repeat, inputs\)"):
            net.measure()
    else:
        np.testing.assert_allclose(net.trace(**given)["y"], expected(name, given)["y"], rtol=1e-5, atol=1e-5)
        assert net.measure(1).total_ns > 0
    if name.startswith("sizes"):
        with pytest.raises(UsageError, match=r"the calls depend on n; those of one size are net\.at\(n\)\.steps"):
            _ = net.steps


def test_mistakes_of_sizes(net: Net) -> None:
    with pytest.raises(ArgumentError, match=r"no size 'm'; allowed: (none|n=1\.\.3)"):
        net.at({"m": 2})
    with pytest.raises(ArgumentError, match=r"n is 4; the network was built for 1 to 3|this one has none"):
        net.at(4)
    with pytest.raises(UsageError, match="repeat 0 is not possible; allowed: an integer, 1 or more"):
        net.measure(0)


def test_a_net_closes_once(net: Net, name: str) -> None:
    net.close()
    net.close()
    with pytest.raises(UsageError, match="the net was closed; load it again"):
        net(*inputs(name).values())


def test_the_command_line_runs_a_file_of_any_kind(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("schedsearch.executable.file.detect", lambda selector: target())
    path, given = stored(name, tmp_path), inputs(name)
    for each, array in given.items():
        np.save(f"{each}.npy", array)
    files = [word for each in given for word in ("--input", f"{each}={each}.npy")]
    shown = command("run", path.name, *files, "--repeat", 1, "--output", "out", "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["inputs"] == {each: list(array.shape) for each, array in given.items()}
    assert found["outputs"] == {each: list(array.shape) for each, array in expected(name, given).items()}
    assert found["total_ns"] > 0 and found["calls"] and found["model"] == f"{name.partition('_')[0]}.onnx"


def test_a_file_is_for_its_kind_of_device(name: str, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"is for cpu:128:1:any, and this device is .*; build it here: schedsearch build"):
        schedsearch.load(stored(name, tmp_path), target="cpu")


def test_a_port_at_sizes() -> None:
    port = Port("x", (Size("n", 1, 8), 3, Size("h", 2, 4)), "float32", "ABC", "ABC")
    assert str(port) == "x float32 [n=1..8, 3, h=2..4]" and str(replace(port, exact=False)).startswith("x float32 up to [")
    assert port.bound == (8, 3, 4) and port.at({"n": 2}).shape == (2, 3, 4)
    assert port.sizes_of((5, 3, 9)) == {"n": 5} and port.sizes_of((5, 3)) == {}
