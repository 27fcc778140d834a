"""`records export --c DIR --torch`: operators of PyTorch in C++, built against torch's stable ABI.

test_c_export_gpu.py runs them.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from c_export_support import (
    CONV,
    OWN,
    add,
    conv_artifact,
    fake_driver,
    make_library,
    need_compiler,
    own_artifact,
    run_operator,
    run_script,
)

from schedsearch.c_export import export_c
from schedsearch.records.store import Store

pytestmark = pytest.mark.integrations

SCRIPT = """
import json, sys
import torch

torch.ops.load_library(sys.argv[1])
conv, own = (getattr(torch.ops.schedsearch_c, name) for name in sys.argv[2:])
found = {"schema": [str(conv.default._schema), str(own.default._schema)]}
half = {"dtype": torch.float16, "device": "meta"}
x, weight = torch.empty(2, 14, 14, 64, **half), torch.empty(64, 3, 3, 64, **half)
bias = torch.empty(64, **half)
y = conv(x, weight, bias)
found["plain"] = [str(y.device), str(y.dtype), list(y.shape), list(y.stride())]
y = conv(x.permute(0, 3, 1, 2), weight, bias, leaky_relu_slope=0.5)
found["channels_last"] = [list(y.shape), y.is_contiguous(memory_format=torch.channels_last)]
vector = torch.empty(30, device="meta")
numbers = [True, 1, 2, 3, 4, 5, 6, 7, 8, 0.5, 0.25]
found["two outputs"] = [list(each.shape) for each in own(vector, vector, *numbers)]


def refused(*arguments):
    return refused_number(conv, *arguments)


def refused_number(operator, *arguments):
    try:
        operator(*arguments)
    except (RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0]


found["shape"] = refused(torch.empty(1, 14, 14, 64, **half), weight, bias)
found["strides"] = refused(torch.empty(2, 64, 14, 14, **half), weight, bias)
found["dtype"] = refused(x.float(), weight, bias)
found["number"] = refused_number(own, vector, vector, True, 128)
found["cpu"] = refused(torch.zeros(2, 14, 14, 64, dtype=torch.float16), weight, bias)


class Model(torch.nn.Module):
    def forward(self, x, weight, bias):
        return conv(x, weight, bias) * 2


graph = torch.export.export(Model(), tuple(torch.zeros(e.shape, dtype=e.dtype, device="meta") for e in (x, weight, bias)))
found["exported"] = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[str]]:
    """The folder of an export with its operators built, that of the fake driver, and the names of the kernels."""
    torch, tmp_path = pytest.importorskip("torch"), tmp_path_factory.mktemp("torch")
    need_compiler("g++", "make")
    driver = fake_driver(tmp_path / "driver")
    with Store.open(tmp_path / "records.db") as store:
        add(store, CONV, conv_artifact())
        add(store, OWN, own_artifact())
        names = [each.name for each in export_c(store, tmp_path / "kernels", torch=True).kernels]
    make_library(tmp_path / "kernels", driver)
    strict = "CXXFLAGS=-Wall -Wextra -Werror -O1"
    command = ["make", "-s", "-C", tmp_path / "kernels", "torch", f"TORCH={torch.__path__[0]}", strict]
    done = subprocess.run([*command, f"LIBCUDA={driver / 'libcuda.so.1'}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tmp_path / "kernels", driver, names


def test_operators_are_loaded_and_exported_without_a_gpu(built: tuple[Path, Path, list[str]], tmp_path: Path) -> None:
    folder, driver, names = built
    (tmp_path / "script.py").write_text(SCRIPT)
    found: dict[str, Any] = run_script(str(tmp_path / "script.py"), driver, folder / "libschedsearch_torch.so", *names)
    assert found["schema"][0] == (
        f"schedsearch_c::{names[0]}(Tensor x, Tensor weight, Tensor bias, float leaky_relu_slope=0.01) -> Tensor"
    )
    assert found["schema"][1].endswith(
        "(Tensor x, Tensor y, bool a_bool=True, int a_int8=1, int a_uint8=1, int a_int16=1, int a_uint16=1, int a_int32=1, "
        "int a_uint32=1, int a_int64=1, int a_uint64=1, float a_float32=1., float a_float64=1.) -> (Tensor, Tensor)"
    )
    assert found["plain"] == ["meta", "torch.float16", [2, 14, 14, 64], [12544, 896, 64, 1]]
    assert found["channels_last"] == [[2, 64, 14, 14], True]
    assert found["two outputs"] == [[30], [30]]
    assert "x has shape (1, 14, 14, 64) with strides (12544, 896, 64, 1); allowed: shape (2, 14, 14, 64)" in found["shape"]
    assert "or shape (2, 64, 14, 14) with strides (12544, 1, 896, 64)" in found["strides"]
    assert "x has another dtype than the kernel takes" in found["dtype"]
    assert "a_int8 is 128; allowed: -128 to 127" in found["number"]
    assert found["cpu"] is not None
    assert found["exported"][0] == f"schedsearch_c.{names[0]}.default"
    assert json.loads((folder / "MANIFEST.json").read_text())["files"]["schedsearch_torch.cpp"]


def test_a_program_without_python_calls_an_operator(built: tuple[Path, Path, list[str]]) -> None:
    import torch

    folder, driver, names = built
    needed = subprocess.run(
        ["readelf", "-d", folder / "libschedsearch_torch.so"], capture_output=True, text=True, check=True
    )
    assert "libtorch_cpu" in needed.stdout and "python" not in needed.stdout
    shapes = [spec.shape for spec in CONV.signature]
    assert run_operator(torch, folder, names[0], "meta", shapes, LD_LIBRARY_PATH=str(driver)) == [2, 14, 14, 64]
