"""The C export on a GPU: the bytes that Python's launcher computes, prepared weights, CUDA graphs, threads, the example."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from c_export_support import STRICT, TESTS, add, driver_path, make_library, need_compiler, run_operator
from own_kernels_examples import example

import schedsearch
from schedsearch.c_export import export_c
from schedsearch.c_export.chosen import Chosen
from schedsearch.c_export.source import Signature
from schedsearch.device.detect import detect
from schedsearch.records.store import Store
from schedsearch.workload import Workload

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("c_export")]  # one worker of --dist loadgroup builds the libraries
ROOT = Path(__file__).resolve().parents[1]
NO_CONTEXT = -5
CASES = {
    "tensor maps": Workload.conv2d(n=8, h=28, w=28, c=64, k=128, r=3, s=3, padding=1, epilogue=("bias", "relu")),
    "a scalar": Workload.conv2d(n=2, h=9, w=8, c=16, k=24, r=3, s=3, padding=1, epilogue=("bias", "leaky_relu")),
    "depthwise": schedsearch.depthwise_conv2d(n=4, h=28, w=28, c=64, r=3, s=3, padding=1, dtype="float16"),
    "a movement": schedsearch.transpose(x=(8, 96, 160), permutation=(0, 2, 1)),
    "repacked weights": Workload.conv2d(
        n=2, h=14, w=14, c=64, k=64, r=3, s=3, padding=1, dtype="int8", weight_dtype="int8", out_dtype="int32",
        layout="NCHW", weight_layout="OIHW",
    ),
}  # fmt: skip


@dataclass
class Both:
    """A kernel in Python and in C."""

    kernel: schedsearch.Kernel
    chosen: Chosen
    library: Any

    @property
    def signature(self) -> Signature:
        return Signature.of(self.chosen)

    def arrays(self, torch: Any, seed: int = 0) -> dict[str, Any]:
        """Random arguments, and outputs of bytes that no kernel leaves."""
        torch.manual_seed(seed)
        found = {}
        for spec in self.chosen.workload.signature:
            if spec.dtype.startswith("float"):
                values = torch.randn(spec.size, device="cuda").to(getattr(torch, spec.dtype))
            else:
                values = torch.randint(-100, 100, (spec.size,), device="cuda").to(getattr(torch, spec.dtype))
            found[spec.name] = values.view(torch.uint8)
        return found | self.outputs(torch)

    def outputs(self, torch: Any) -> dict[str, Any]:
        return {
            spec.name: torch.full((spec.span_bytes,), 0xA5, dtype=torch.uint8, device="cuda")
            for spec in self.chosen.workload.outputs
        }

    def in_python(self, torch: Any, arrays: dict[str, Any]) -> None:
        scalars = {each.name: each.default for each in self.chosen.workload.scalars}
        addresses = {name: array.data_ptr() for name, array in arrays.items()}
        self.kernel.bind_addresses(addresses, scalars).launch(torch.cuda.current_stream().cuda_stream)

    def in_c(self, torch: Any, suffix: str, arrays: dict[str, Any], names: Any, *memory: Any) -> int:
        function = getattr(self.library, self.chosen.name + suffix)
        pointers = [ctypes.c_void_p(arrays[name].data_ptr()) for name in names]
        scalars = [] if suffix == "_prepare" else [ctypes.c_float(each.default) for each in self.chosen.workload.scalars]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        places = [ctypes.c_void_p(each.data_ptr()) for each in memory]
        return int(function(stream, *pointers, *scalars, *places))

    def memory(self, torch: Any, what: str) -> Any:
        function = getattr(self.library, f"{self.chosen.name}_{what}_bytes")
        function.restype = ctypes.c_size_t
        return torch.full((function() + 256,), 0xA5, dtype=torch.uint8, device="cuda")[:-256]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Both]:
    torch = pytest.importorskip("torch")
    folder, target = tmp_path_factory.mktemp("c"), detect("cuda")
    torch.zeros(1, device="cuda")  # makes the primary context current
    total = example("total").total
    workloads = {**CASES, "several launches": total.workload("100003:float32", "1:float32")}
    kernels = {
        name: schedsearch.compile(workload, folder / "none.db", target=target, allow="default")
        for name, workload in workloads.items()
    }
    with Store.open(folder / "records.db") as store:
        for kernel in kernels.values():
            add(store, kernel.workload, kernel.artifact, target=target.key)
        chosen = {each.workload: each for each in export_c(store, folder / "kernels", torch=True).kernels}
    library = ctypes.CDLL(str(make_library(folder / "kernels", driver_path())))
    return {name: Both(kernel, chosen[kernel.workload], library) for name, kernel in kernels.items()}


@pytest.mark.parametrize("name", [*CASES, "several launches"])
def test_c_computes_the_bytes_that_python_computes(exported: dict[str, Both], name: str) -> None:
    import torch

    both = exported[name]
    workspace = both.memory(torch, "workspace")
    for seed in range(3):
        arrays = both.arrays(torch, seed)
        others = {**arrays, **both.outputs(torch)}
        both.in_python(torch, arrays)
        assert both.in_c(torch, "", others, both.signature.names, workspace) == 0
        torch.cuda.synchronize()
        for output in both.chosen.workload.outputs:
            assert torch.equal(arrays[output.name], others[output.name]), (name, output.name)
            assert not torch.equal(arrays[output.name], torch.full_like(arrays[output.name], 0xA5))


def test_prepared_weights_give_the_same_bytes(exported: dict[str, Both]) -> None:
    import torch

    both = exported["repacked weights"]
    signature, arrays = both.signature, both.arrays(torch)
    assert signature.constants, "the default no longer repacks its weight; choose another workload"
    prepared, workspace = both.memory(torch, "prepared"), both.memory(torch, "workspace")
    assert both.in_c(torch, "_prepare", arrays, signature.constants, prepared) == 0
    workspace.fill_(0x5A)
    others = {**arrays, **both.outputs(torch)}
    assert both.in_c(torch, "_with_prepared", others, signature.remaining, workspace, prepared) == 0
    both.in_python(torch, arrays)
    torch.cuda.synchronize()
    for output in both.chosen.workload.outputs:
        assert torch.equal(arrays[output.name], others[output.name])


def test_a_graph_captures_a_call_in_c(exported: dict[str, Both]) -> None:
    import torch

    both = exported["tensor maps"]
    arrays = both.arrays(torch)
    workspace, others = both.memory(torch, "workspace"), {**arrays, **both.outputs(torch)}
    assert getattr(both.library, f"{both.chosen.name}_load")() == 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        code = both.in_c(torch, "", others, both.signature.names, workspace)
    assert code == 0
    (output,) = both.chosen.workload.outputs
    arrays["x"].copy_(both.arrays(torch, 5)["x"])
    graph.replay()
    both.in_python(torch, arrays)
    torch.cuda.synchronize()
    assert torch.equal(arrays[output.name], others[output.name])


def test_a_thread_without_a_context_gets_a_code(exported: dict[str, Both]) -> None:
    both, codes = exported["depthwise"], []
    load = getattr(both.library, f"{both.chosen.name}_load")
    thread = threading.Thread(target=lambda: codes.append(load()))
    thread.start()
    thread.join()
    assert codes == [NO_CONTEXT]


def test_the_example_runs_every_kernel_without_python(exported: dict[str, Both], tmp_path: Path) -> None:
    folder = Path(next(iter(exported.values())).library._name).parent
    command = ["gcc", "-std=c11", *STRICT.split(), "-o", tmp_path / "program", ROOT / "examples" / "c" / "main.c"]
    libraries = [f"-I{folder}", folder / "libschedsearch_kernels.a", driver_path() / "libcuda.so.1", "-pthread"]
    subprocess.run([*command, *libraries], check=True)
    done = subprocess.run([tmp_path / "program"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == len(exported)
    linked = subprocess.run(["ldd", tmp_path / "program"], capture_output=True, text=True, check=True).stdout
    names = {Path(line.split()[0]).name.split(".so")[0] for line in linked.splitlines() if "=>" in line}
    of_libcuda = {"libdl", "librt", "libm", "libgcc_s"}
    assert names <= {"libcuda", "libc", "libpthread", *of_libcuda}


@pytest.fixture(scope="module")
def operators(exported: dict[str, Both]) -> Any:
    """`torch.ops.schedsearch_c`, built here."""
    import torch

    need_compiler("g++")
    folder = Path(next(iter(exported.values())).library._name).parent
    command = ["make", "-s", "-C", folder, "torch", "CXXFLAGS=-O1", f"TORCH={torch.__path__[0]}"]
    subprocess.run([*command, f"LIBCUDA={driver_path() / 'libcuda.so.1'}"], check=True)
    torch.ops.load_library(str(folder / "libschedsearch_torch.so"))
    return torch.ops.schedsearch_c


def tensors(both: Both, torch: Any) -> list[Any]:
    """The arguments as tensors in their memory's shape."""
    arrays = both.arrays(torch)
    specs = both.chosen.workload.signature
    return [arrays[spec.name].view(getattr(torch, spec.dtype)).reshape(spec.shape) for spec in specs]


@pytest.mark.parametrize("name", CASES)
def test_an_operator_of_torch_computes_what_the_kernel_computes(
    exported: dict[str, Both], operators: Any, name: str
) -> None:
    import torch

    both = exported[name]
    given = tensors(both, torch)
    operator = getattr(operators, both.chosen.name)
    assert torch.equal(operator(*given), both.kernel(*given))
    on_thread: list[Any] = []
    thread = threading.Thread(target=lambda: on_thread.append(operator(*given)))
    thread.start()
    thread.join()
    assert torch.equal(on_thread[0], both.kernel(*given))


def test_an_operator_takes_channels_last_and_is_compiled_whole(exported: dict[str, Both], operators: Any) -> None:
    import torch

    both = exported["tensor maps"]
    x, weight, bias = tensors(both, torch)
    operator = getattr(operators, both.chosen.name)

    def model(x: Any) -> Any:
        return operator(x, weight, bias) + 1

    logical = x.permute(0, 3, 1, 2)
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(logical)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, both.kernel(logical, weight, bias) + 1)


def test_a_program_without_python_calls_an_operator(exported: dict[str, Both], operators: Any) -> None:
    import torch

    both = exported["tensor maps"]
    folder = Path(both.library._name).parent
    shapes = [spec.shape for spec in both.chosen.workload.signature]
    assert run_operator(torch, folder, both.chosen.name, "cuda", shapes) == [8, 28, 28, 128]


@pytest.mark.timeout(560)
def test_a_package_of_aotinductor_holds_an_operator(exported: dict[str, Both], operators: Any, tmp_path: Path) -> None:
    import torch

    both = exported["tensor maps"]
    x, weight, bias = tensors(both, torch)
    torch.save([x, weight, bias], tmp_path / "given.pt")

    def packed(name: str) -> str:
        """Packs and runs a model; what went wrong, if anything did."""
        library = Path(both.library._name).parent / "libschedsearch_torch.so"
        given, package, y = (str(tmp_path / each) for each in ("given.pt", f"{name}model.pt2", f"{name}y.pt"))
        for task, words in (("pack", [name, given, package]), ("run", [package, given, y])):
            command = [sys.executable, "-X", "faulthandler", TESTS / "c_export_package.py", task, library, *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=140)
            if done.returncode:
                return f"{task} ended with {done.returncode}: {done.stderr[-3000:]}"
        return ""

    # PyTorch needs minutes for a package. Where it cannot run any, that of our operator is not made.
    if without := packed(""):
        pytest.skip(f"PyTorch {torch.__version__} cannot run a package here, even without our operator. {without}")
    if problem := packed(both.chosen.name):
        pytest.fail(problem)
    assert torch.equal(torch.load(tmp_path / f"{both.chosen.name}y.pt"), both.kernel(x, weight, bias) * 2)
