"""`records export --c`: what the C files do on a driver that takes notes, and what they do not let happen."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from c_export_support import (
    CONV,
    OWN,
    STRICT,
    TESTS,
    add,
    conv_artifact,
    fake_driver,
    make_library,
    need_compiler,
    own_artifact,
    parameter_bytes,
    run_script,
)
from cli_support import schedsearch as command
from records_support import record

from schedsearch.backend import compile_source
from schedsearch.c_export import export_c
from schedsearch.c_export.plan_source import TENSOR_MAP_DTYPES
from schedsearch.config import Config
from schedsearch.launch import Artifact
from schedsearch.records.store import Store
from schedsearch.target import PRESETS
from schedsearch.template import load_template
from schedsearch.workload import Workload

ROOT = Path(__file__).resolve().parents[1]
H200 = PRESETS["h200"]
COMPILED = {
    "conv2d_wgmma": Workload.conv2d(n=32, h=56, w=56, c=64, k=64, r=3, s=3, padding=1, epilogue=("bias", "relu")),
    "data_movement_cuda": Workload("transpose", {"x": (8, 64, 64), "permutation": (0, 2, 1)}),
}


def compiled(template_name: str, workload: Workload) -> Artifact:
    template = load_template(template_name)
    config = template.default(workload, H200, template.space(workload, H200))
    made = compile_source(template.kernel(workload, H200, config), H200).artifact
    steps = tuple(replace(step, entry=f"{template_name}_{step.entry}") for step in made.plan.steps)
    return Artifact(made.code, replace(made.plan, steps=steps))  # the fake driver knows kernels by their entries


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Artifact]]:
    """Two kernels of templates, and two plans that hold whatever a plan can hold."""
    path = tmp_path_factory.mktemp("c") / "records.db"
    cases = [(CONV, conv_artifact()), (OWN, own_artifact())]
    cases += [(workload, compiled(name, workload)) for name, workload in COMPILED.items()]
    with Store.open(path) as store:
        for workload, artifact in cases:
            add(store, workload, artifact)
    return path, [artifact for _, artifact in cases]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_driver(tmp_path_factory.mktemp("driver") / "lib")


@pytest.fixture(scope="module")
def library(database: tuple[Path, list[Artifact]], driver: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of the database, compiled with all warnings as errors."""
    folder = tmp_path_factory.mktemp("exported") / "kernels"
    with Store.open(database[0], readonly=True) as store:
        exported = export_c(store, folder)
    assert len(exported.kernels) == 4 and exported.left_out == ()
    return make_library(folder, driver)


@pytest.fixture
def notes(database: tuple[Path, list[Artifact]], tmp_path: Path) -> dict[str, str]:
    """The environment of the driver."""
    (tmp_path / "params").write_text(parameter_bytes(database[1]))
    return {"FAKE_LOG": str(tmp_path / "log"), "FAKE_PARAMS": str(tmp_path / "params")}


@pytest.mark.long
def test_c_launches_exactly_what_python_launches(
    database: tuple[Path, list[Artifact]], library: Path, driver: Path, notes: dict[str, str]
) -> None:
    """Grids, blocks, shared memory, attributes, and every byte of every parameter, tensor maps included."""
    found = run_script("c_export_calls.py", driver, database[0], library, **notes)
    assert len(found) == 4
    for name, both in found.items():
        assert both["python"]["plain"], name
        for way, launches in both["python"].items():
            assert _launches(both["c"][way]) == _launches(launches), (name, way)
        assert _of("attribute", both["c"]["load"]) == _of("attribute", both["python"]["load"]), name
    (conv,) = [both["c"] for name, both in found.items() if name.startswith("conv2d_2x14")]
    assert [line.split()[1] for line in _launches(conv["plain"])] == ["pack", "main", "finish", "again", "rounded"]
    assert [line.split()[1] for line in _launches(conv["prepare"])] == ["pack"]
    assert [line.split()[1] for line in _launches(conv["prepared"])] == ["main", "finish", "again", "rounded"]
    main = _launches(conv["plain"])[1].split()
    assert main[2:5] == ["124,1,1", "256,1,1", "5000"]  # 31 clusters of 4 at once, although 132 blocks would fit
    (own,) = [both["c"] for name, both in found.items() if name.startswith("own_kernels")]
    assert [line.split()[1] for line in _launches(own["plain"])] == ["restore", "scale"]
    assert [line.split()[1] for line in _launches(own["in place"])] == ["scale"]


def _of(kind: str, lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(kind)]


def _launches(lines: list[str]) -> list[str]:
    return _of("launch", lines)


def test_what_is_wrong_with_a_call_is_a_code_with_text(library: Path, driver: Path, notes: dict[str, str]) -> None:
    found = run_script("c_export_errors.py", driver, library, CONV.id, OWN.id, **notes)
    codes = {what: result[0] for what, result in found.items() if isinstance(result, list) and isinstance(result[1], str)}
    assert codes == {
        "no context": -5, "no context, load": -5, "cuLibraryLoadData": 1, "cuKernelSetAttribute": 1, "cuTensorMapEncode": 1,
        "cuLaunchKernelEx": 1, "another card": -7, "sound": 0, "null": -1, "null output": -1, "misaligned": -2,
        "aligned enough": 0, "no pointers": -1, "no workspace": -3, "misaligned workspace": -2, "no scalars": -4,
        "stream of another context": -6, "a stream": 0, "no kernel": -10, "nothing to prepare": -9, "no prepared memory": -3,
        "unknown": -1000, "unknown of the driver": 999, "unload": 0, "load in the first context": 0,
        "run in the first context": 0, "load in the second context": 0, "run in the second context": 0,
    }  # fmt: skip
    texts = {what: found[what][1] for what in codes}
    assert texts["cuLaunchKernelEx"] == "invalid argument"  # the driver's own text
    assert "does not run on this GPU" in texts["another card"]
    assert "no current CUDA context" in texts["no context"]
    assert texts["unknown"] == texts["unknown of the driver"] == "an unknown code"
    assert not found["found on another card"] and not found["unknown workload"]
    assert found["by text"] == found["by id"]
    # loads of the library, kernels brought into the context, launches
    assert (found["first context"], found["second context"]) == ([1, 2, 2], [0, 2, 2])


def test_a_tensor_map_is_encoded_once_for_an_address(library: Path, driver: Path, notes: dict[str, str]) -> None:
    """At least the last four of a map are kept. The map of the packed weight stays the same."""
    found = run_script("c_export_errors.py", driver, library, CONV.id, OWN.id, **notes)
    assert found["encodings"] == [1] * 4 + [0] * 4 + [1, 0] * 40


def test_threads_with_arrays_of_their_own_do_not_mix_tensor_maps(
    library: Path, driver: Path, notes: dict[str, str], tmp_path: Path
) -> None:
    """Under gcc's thread sanitizer, which ends the program with a code where two threads race."""
    folder, program = library.parent, tmp_path / "program"
    command = ["gcc", "-std=c11", "-O1", "-g", "-fsanitize=thread", "-o", program, TESTS / "c_export_threads.c"]
    command += [*folder.glob("*.c"), f"-I{folder}", driver / "libcuda.so.1", "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True)
    if "libtsan" in done.stderr:
        pytest.skip("gcc has no thread sanitizer here")
    assert done.returncode == 0, done.stderr
    environment = {"LD_LIBRARY_PATH": str(driver), "FAKE_PARAMS": notes["FAKE_PARAMS"]}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=800)
    assert (done.returncode, done.stdout) == (0, "0 threads failed\n"), done.stderr


def test_a_program_starts_with_a_driver_that_is_too_old(library: Path, notes: dict[str, str], tmp_path: Path) -> None:
    old = fake_driver(tmp_path / "old", "-DFAKE_OLD")
    found = run_script("c_export_errors.py", old, library, CONV.id, OWN.id, "--old-driver", LD_BIND_NOW="1", **notes)
    assert found["old driver"] == [-8, "the NVIDIA driver is older than CUDA 12.0; install a newer one"]


def test_threads_load_a_kernel_once(library: Path, driver: Path, notes: dict[str, str]) -> None:
    found = run_script("c_export_errors.py", driver, library, CONV.id, OWN.id, **notes)
    assert found["threads"] == [0] * 8
    assert (found["loads"], found["launches"]) == (1, 8 * 5)


def test_the_example_is_linked_with_libcuda_and_libc_alone(
    library: Path, driver: Path, notes: dict[str, str], tmp_path: Path
) -> None:
    folder, program = library.parent, tmp_path / "program"
    command = ["gcc", "-std=c11", *STRICT.split(), "-o", program, ROOT / "examples" / "c" / "main.c", f"-I{folder}"]
    subprocess.run([*command, folder / "libschedsearch_kernels.a", driver / "libcuda.so.1"], check=True)
    environment = {"LD_LIBRARY_PATH": str(driver), **notes}
    done = subprocess.run([program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4
    linked = subprocess.run(["ldd", program], env=environment, capture_output=True, text=True, check=True).stdout
    names = {line.split()[0].split(".so")[0] for line in linked.splitlines() if "/" in line and "=>" in line}
    assert names <= {"libcuda", "libc", "libpthread"}


def test_the_program_of_the_page_runs(library: Path, driver: Path, notes: dict[str, str], tmp_path: Path) -> None:
    page = (ROOT / "docs" / "c.md").read_text()
    (block,) = re.findall(r"^```c\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "program.c").write_text(block)
    command = ["gcc", "-std=c11", *STRICT.split(), "-o", tmp_path / "program", tmp_path / "program.c", f"-I{library.parent}"]
    link = [f"-L{library.parent}", "-l:libschedsearch_kernels.a", f"-L{driver}", "-l:libcuda.so.1", "-pthread"]
    subprocess.run([*command, *link], check=True)
    environment = {"LD_LIBRARY_PATH": str(driver), **notes}
    done = subprocess.run([tmp_path / "program"], env=environment, capture_output=True, text=True)
    description, error = done.stdout.splitlines()
    assert (done.returncode, error) == (0, "no error")
    assert json.loads(description)["workload_id"] == COMPILED["conv2d_wgmma"].id


def test_headers_and_sources_are_cpp_too(library: Path, tmp_path: Path) -> None:
    need_compiler("g++")
    (tmp_path / "all.cpp").write_text('#include "schedsearch_kernels.h"\n#include "schedsearch_code.h"\nint main() {}\n')
    strict = ["g++", "-std=c++17", *STRICT.split(), "-fsyntax-only", f"-I{library.parent}", "-x", "c++"]
    sources = [path for path in library.parent.glob("*.c") if path.stat().st_size < 100_000]
    subprocess.run([*strict, tmp_path / "all.cpp", *sources], check=True)


def test_cmake_and_pkg_config_know_the_library(driver: Path, tmp_path: Path) -> None:
    need_compiler("cmake", "make", "pkg-config")
    with Store.open(tmp_path / "records.db") as store:
        add(store, CONV, conv_artifact())
        export_c(store, tmp_path / "kernels")
    folder = tmp_path / "kernels"
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.17)\nproject(program C)\nadd_subdirectory(kernels)\n"
        f"add_executable(program {ROOT / 'examples' / 'c' / 'main.c'})\n"
        "target_link_libraries(program PRIVATE schedsearch_kernels)\n"
    )
    options = [f"-DCMAKE_LIBRARY_PATH={driver}", "-DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON"]
    subprocess.run(["cmake", "-S", tmp_path, "-B", tmp_path / "build", *options], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", tmp_path / "build"], check=True, capture_output=True)
    assert (tmp_path / "build" / "program").exists()
    environment = {**os.environ, "PKG_CONFIG_PATH": str(folder)}
    asked = ["pkg-config", "--cflags", "--libs", "schedsearch_kernels"]
    flags = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True).stdout.split()
    assert flags == [f"-I{folder}", f"-L{folder}", "-lschedsearch_kernels", "-lcuda", "-pthread"]


def test_the_same_database_gives_the_same_bytes(
    database: tuple[Path, list[Artifact]], library: Path, tmp_path: Path
) -> None:
    with Store.open(database[0], readonly=True) as store:
        export_c(store, tmp_path / "again")
    again = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert again == {name: (library.parent / name).read_bytes() for name in again}
    manifest = json.loads(again["MANIFEST.json"])
    assert set(manifest["files"]) | {"MANIFEST.json"} == set(again)
    (kernel,) = [each for each in manifest["kernels"] if each["workload_id"] == CONV.id]
    assert kernel["measured"]["on"] == "cuda:sm_90:132:NVIDIA H200" and kernel["measured"]["host"] == "node7"
    assert kernel["trust"].startswith("measured, verified and signed by machine ")
    assert [each["alignment"] for each in kernel["arguments"]] == [16, 1, 1]
    assert (kernel["workspace_bytes"], kernel["prepared_bytes"], kernel["workspace_alignment"]) == (75776, 73728, 1024)


TWO_EXPORTS = """
#include <stdio.h>
#include "schedsearch_kernels.h"
#include "net_kernels.h"
int cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
int main(void)
{
    const void *arrays[8];
    schedsearch_scalar scalars[1] = {{0}};
    net_scalar others[1] = {{0}};
    void *context, *workspace = (void *)(1ull << 40);
    cuDevicePrimaryCtxRetain(&context, 0);
    cuCtxSetCurrent(context);
    for (int i = 0; i < 8; i++)
        arrays[i] = workspace;
    printf("%d %d\\n", schedsearch_run(schedsearch_kernels[0], NULL, arrays, scalars, workspace),
           net_run(net_kernels[0], NULL, arrays, others, workspace));
    printf("%s\\n%s\\n", schedsearch_kernels[0]->name, net_kernels[0]->name);
    return schedsearch_kernel_count != 1 || net_kernel_count != 2 || NET_NO_KERNEL != net_run(NULL, NULL, NULL, NULL, NULL);
}
"""


def test_a_program_holds_two_exports_with_different_prefixes(driver: Path, notes: dict[str, str], tmp_path: Path) -> None:
    """The same kernel is in both; a string in a record that looks like a name stays as it is."""
    with Store.open(tmp_path / "records.db") as store:
        add(store, CONV, conv_artifact())
        add(store, OWN, own_artifact(), template="schedsearch_template")
        first = export_c(store, tmp_path / "schedsearch", workloads=[CONV.id])
        second = export_c(store, tmp_path / "net", prefix="net", torch=True)
    for exported in (first, second):
        make_library(exported.folder, driver)
    (tmp_path / "program.c").write_text(TWO_EXPORTS)
    command = ["gcc", "-std=c11", *STRICT.split(), "-o", tmp_path / "program", tmp_path / "program.c"]
    command += [f"-I{exported.folder}" for exported in (first, second)]
    command += [tmp_path / "schedsearch" / "libschedsearch_kernels.a", tmp_path / "net" / "libnet_kernels.a"]
    subprocess.run([*command, driver / "libcuda.so.1", "-pthread"], check=True)
    environment = {"LD_LIBRARY_PATH": str(driver), **notes}
    done = subprocess.run([tmp_path / "program"], env=environment, capture_output=True, text=True)
    name = first.kernels[0].name
    assert (done.returncode, done.stdout.splitlines()) == (0, ["0 0", name, f"net_{name}"])
    assert all(each.name.startswith("net_") for each in second.kernels)
    ours = {path.name: path.read_text() for path in (tmp_path / "net").iterdir() if path.suffix not in (".o", ".a", ".so")}
    assert [file for file in ours if file.startswith("schedsearch")] == []
    code = "".join(re.sub(r'"(\\.|[^"\\])*"', "", text) for file, text in ours.items() if file != "MANIFEST.json")
    assert not re.search("schedsearch(_|::)", code, re.IGNORECASE)
    assert any("schedsearch_template" in ours[f"{each.name}.c"] for each in second.kernels)


HOSTILE = 'evil"; int main() { abort(); } /* */ // ??/\\\n#include "/etc/passwd" \u202e ../../name %s'


def test_texts_of_records_cannot_become_code(tmp_path: Path, driver: Path) -> None:
    """A kernel's name, its template, a knob and the host are anybody's strings."""
    workload = Workload("own_kernel", {**OWN.params, "kernel": HOSTILE})
    measured = replace(record(1000.0).measurement, host=HOSTILE)
    with Store.open(tmp_path / "hostile.db") as store:
        add(store, workload, own_artifact(), template=HOSTILE, config=Config({HOSTILE: HOSTILE}), measurement=measured)
        exported = export_c(store, tmp_path / "kernels")
    library = make_library(tmp_path / "kernels", driver)
    (kernel,) = exported.kernels
    assert re.fullmatch(r"[a-z0-9_]+", kernel.name)
    assert {path.parent for path in (tmp_path / "kernels").rglob("*")} == {tmp_path / "kernels"}
    for path in (tmp_path / "kernels").glob("*.[ch]"):
        lines = path.read_text().splitlines()
        included = [line for line in lines if line.lstrip().startswith("#include")]
        assert [line for line in included if not re.fullmatch(r'#include [<"][\w.]+[">]( /\* [^*/]* \*/)?', line)] == []
    symbols = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    assert not re.search(r"\b(main|abort)\b", symbols)
    script = f"""
import ctypes, json
ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
describe = getattr(ctypes.CDLL({str(library)!r}), {kernel.name!r} + "_describe")
describe.restype = ctypes.c_char_p
print(json.dumps(json.loads(describe().decode())))
"""
    (tmp_path / "describe.py").write_text(script)
    told = run_script(str(tmp_path / "describe.py"), driver)
    assert told["workload"]["params"]["kernel"] == told["template"] == told["measured"]["host"] == HOSTILE
    assert told["config"] == {HOSTILE: HOSTILE}


def test_the_command_says_what_it_wrote_and_what_it_left_out(tmp_path: Path) -> None:
    with Store.open(tmp_path / "records.db") as store:
        add(store, CONV, conv_artifact())
        add(store, CONV.replace(n=3), None)
    database = ["--db", str(tmp_path / "records.db")]
    done = command("records", "export", "--c", str(tmp_path / "kernels"), *database)
    assert done.exit_code == 0 and "1 kernel, 128 B of machine code" in done.stdout
    assert "left out: conv2d 3x14x14x64" in done.stderr and "no machine code" in done.stderr
    listed = command("records", "export", "--c", str(tmp_path / "kernels"), *database, "--workload", CONV.id[:10], "--json")
    (kernel,) = json.loads(listed.stdout)["kernels"]
    assert (tmp_path / "kernels" / f"{kernel['name']}.c").exists()
    for words, message in (
        ([], "give a FILE to write, or --c DIR"),
        (["file", "--c", "kernels"], r"it does not go with FILE (file)"),
        (["--c", "kernels", "--deploy"], "it does not go with --deploy"),
        (["file", "--mode", "cold-graph-v1"], "--mode is for --c"),
        (["file", "--torch"], "--torch is for --c DIR"),
        (["file", "--prefix", "net"], "--prefix is for --c DIR"),
        (["--c", "kernels", "--prefix", "2nd"], "'2nd' cannot begin the names of an export; allowed: a lower-case letter"),
        (["--c", "kernels", "--prefix", "schedsearch_b"], "begins with 'schedsearch'"),
        (["--c", "kernels", "--prefix", "string"], "string.h is a header of the system"),
    ):
        refused = command("records", "export", *words, *database)
        assert refused.exit_code == 2 and message in refused.stderr


INTERFACE = """
#include <cstddef>
#include <cstdio>
#include <type_traits>
#define TEXT_(name) #name
#define TEXT(name) TEXT_(name)
template <class F> struct Shown;
template <class R, class... A> struct Shown<R(A...)> {
    static void print(const char *name)
    {
        std::printf("%s %zu", name, sizeof(R));
        ((std::printf(" %zu%s", sizeof(A), std::is_pointer<A>::value ? "*" : "")), ...);
        std::puts("");
    }
};
#define FUNCTION(name) Shown<decltype(name)>::print(TEXT(name));
#define FIELD(name) std::printf(#name " %zu\\n", offsetof(CUlaunchConfig, name));
int main()
{
    FUNCTIONS
    FIELD(gridDimX) FIELD(gridDimZ) FIELD(blockDimX) FIELD(blockDimZ) FIELD(sharedMemBytes) FIELD(hStream) FIELD(attrs)
    FIELD(numAttrs)
    std::printf("%zu %zu\\n%zu\\n", sizeof(CUlaunchConfig), sizeof(CUtensorMap), alignof(CUtensorMap));
}
"""


def test_the_declared_functions_and_structures_are_those_of_cuda_h(tmp_path: Path) -> None:
    """Names of symbols, sizes of parameters and results, places of fields."""
    need_compiler("g++")
    found = sorted(Path(sys.prefix).glob("lib/python*/site-packages/nvidia/cu*/include/cuda.h"))
    if not found:
        pytest.skip("the headers of CUDA are not installed here")
    ours = ROOT / "schedsearch" / "c_export" / "runtime" / "schedsearch_driver.h"
    functions = re.findall(r"^CUresult (\w+)\(", ours.read_text(), re.MULTILINE)
    assert len(functions) == 14
    told = []
    for header in (ours, found[0]):
        program = tmp_path / "program"
        calls = " ".join(f"FUNCTION({name})" for name in functions)
        (tmp_path / "program.cpp").write_text(f'#include "{header}"\n{INTERFACE.replace("FUNCTIONS", calls)}')
        subprocess.run(
            ["g++", "-std=c++17", "-w", "-o", program, tmp_path / "program.cpp", f"-I{header.parent}"], check=True
        )
        told.append(subprocess.run([program], capture_output=True, text=True, check=True).stdout)
    (*mine, own_alignment), (*theirs, alignment) = (text.splitlines() for text in told)
    assert mine == theirs and len(mine) == 14 + 8 + 1
    assert int(own_alignment) % int(alignment) == 0  # it grew with CUDA 13


def test_the_numbers_of_the_driver_are_those_of_its_bindings() -> None:
    """The launcher declares what it uses of cuda.h by itself."""
    driver = pytest.importorskip("cuda.bindings.driver")
    for name, value in TENSOR_MAP_DTYPES.items():
        assert int(getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name}")) == value
    header = (ROOT / "schedsearch" / "c_export" / "runtime" / "schedsearch_driver.h").read_text()
    declared = dict(re.findall(r"^    (CU\w+) = (\d+),?$", header, re.MULTILINE))
    assert len(declared) == 10
    kinds = {
        "CUDA_": driver.CUresult, "CU_DEVICE": driver.CUdevice_attribute, "CU_FUNC": driver.CUfunction_attribute,
        "CU_TENSOR_MAP_INTERLEAVE": driver.CUtensorMapInterleave, "CU_TENSOR_MAP_FLOAT": driver.CUtensorMapFloatOOBfill,
    }  # fmt: skip
    for name, value in declared.items():
        (kind,) = [kind for prefix, kind in kinds.items() if name.startswith(prefix)]
        assert int(getattr(kind, name)) == int(value), name
