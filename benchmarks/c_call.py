"""Host time of calling a kernel from C, beside Python's bound call, and what ResNet-50's layers weigh in a program.

    python benchmarks/c_call.py --out c_call.json

Needs a CUDA device, gcc and make. Kernels are rule-based defaults of small workloads, so the device keeps up with the host.
Times are microseconds per call of a loop that only enqueues (median of rounds). The loop of C calls is in C, and so is that
of `cuLaunchKernelEx` alone with the same arguments, which is the driver's share of a call. The sizes are of the default
kernels of all convolutions of ResNet-50 at batch 32; `--sizes` computes them alone, without a device, and `--times` leaves
them out.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

import schedsearch
from schedsearch.backend import compile_source
from schedsearch.c_export import export_c
from schedsearch.device import cuda_driver
from schedsearch.device.detect import detect
from schedsearch.launch import Artifact
from schedsearch.measurement import Measurement, Outcome, Record
from schedsearch.records.store import Store
from schedsearch.target import PRESETS, Target
from schedsearch.template import load_templates
from schedsearch.workload import Workload

CALLS, ROUNDS = 500, 15  # a device's queue holds 1024 launches
WORKLOADS = {
    "conv2d, tensor maps": Workload.conv2d(n=1, h=8, w=8, c=64, k=64, r=3, s=3, padding=1),
    "depthwise": schedsearch.depthwise_conv2d(n=1, h=8, w=8, c=64, r=3, s=3, padding=1, dtype="float16"),
    "transpose": schedsearch.transpose(x=(1, 64, 64), permutation=(0, 2, 1)),
}
LOOP = """
#include <time.h>
#include "schedsearch_kernels.h"
double loop(const schedsearch_kernel *, CUstream, const void *const *, const schedsearch_scalar *, void *, int);
double loop(const schedsearch_kernel *kernel, CUstream stream, const void *const *pointers,
            const schedsearch_scalar *scalars, void *workspace, int calls)
{
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (int i = 0; i < calls; i++)
        if (schedsearch_run(kernel, stream, pointers, scalars, workspace) != SCHEDSEARCH_OK)
            return -1.0;
    clock_gettime(CLOCK_MONOTONIC, &to);
    return ((double)(to.tv_sec - from.tv_sec) * 1e9 + (double)(to.tv_nsec - from.tv_nsec)) / calls / 1e3;
}
typedef int (*launch_type)(const void *, void *, void **, void **);
double launches(launch_type, const void *, void *, void **, int);
double launches(launch_type launch, const void *config, void *function, void **parameters, int calls)
{
    struct timespec from, to;
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (int i = 0; i < calls; i++)
        if (launch(config, function, parameters, 0))
            return -1.0;
    clock_gettime(CLOCK_MONOTONIC, &to);
    return ((double)(to.tv_sec - from.tv_sec) * 1e9 + (double)(to.tv_nsec - from.tv_nsec)) / calls / 1e3;
}
int encode_map(void *, unsigned long long);
double encodings(int);
double encodings(int calls)
{
    struct timespec from, to;
    unsigned long long map[32];
    clock_gettime(CLOCK_MONOTONIC, &from);
    for (int i = 0; i < calls; i++)
        if (encode_map((void *)(((uintptr_t)map + 63) / 64 * 64), 0x7f0000000000ull) != 0)
            return -1.0;
    clock_gettime(CLOCK_MONOTONIC, &to);
    return ((double)(to.tv_sec - from.tv_sec) * 1e9 + (double)(to.tv_nsec - from.tv_nsec)) / calls / 1e3;
}
#include "schedsearch_driver.h"
int encode_map(void *map, unsigned long long address)
{
    uint64_t dims[] = {64, 64}, strides[] = {128};
    uint32_t box[] = {64, 64}, steps[] = {1, 1};
    return cuTensorMapEncodeTiled((CUtensorMap *)map, 6, 2, (void *)(uintptr_t)address, dims, strides, box, steps,
                                  0, 3, 0, 0);
}
"""


def add(store: Store, workload: Workload, artifact: Artifact, target: Target, template: str) -> None:
    """Makes a kernel the best of its workload; the time stands for none, because the export does not need one."""
    measured = Measurement(Outcome.OK, times_ns=(1.0,))
    given: dict[str, Any] = {"template": template, "template_version": 1, "config": schedsearch.Config({})}
    store.promote(store.append(Record(workload=workload, target=target.key, measurement=measured, **given)), artifact)


def make(folder: Path, libcuda: str) -> Path:
    (folder / "loop.c").write_text(LOOP)
    subprocess.run(["make", "-s", "-C", folder, f"LIBCUDA={libcuda}"], check=True)
    command = ["gcc", "-std=gnu11", "-O2", "-shared", "-fPIC", "-o", folder / "libloop.so", folder / "loop.c", f"-I{folder}"]
    subprocess.run([*command, folder / "libschedsearch_kernels.so", libcuda, "-Wl,-rpath,$ORIGIN"], check=True)
    return folder / "libloop.so"


def host_times(folder: Path) -> Iterator[dict[str, Any]]:
    """Microseconds of the driver's launch, of a call in C and of Python's bound call of each kernel, and of encoding a
    tensor map."""
    target = detect("cuda")
    kernels = {
        name: schedsearch.compile(workload, folder / "none.db", target=target, allow="default")
        for name, workload in WORKLOADS.items()
    }
    with Store.open(folder / "records.db") as store:
        for kernel in kernels.values():
            add(store, kernel.workload, kernel.artifact, target, kernel.provenance.template)
        export_c(store, folder / "kernels")
    import torch

    torch.zeros(1, device="cuda")
    library = ctypes.CDLL(str(make(folder / "kernels", _libcuda())))
    library.loop.restype = library.launches.restype = library.encodings.restype = ctypes.c_double
    library.schedsearch_find.restype = ctypes.c_void_p
    yield {"encode_us": float(library.encodings(10_000))}
    for name, kernel in kernels.items():
        specs = [*kernel.workload.signature, *kernel.workload.outputs]
        arrays = {spec.name: torch.zeros(spec.span_bytes, dtype=torch.uint8, device="cuda") for spec in specs}
        pointers = (ctypes.c_void_p * len(arrays))(*(array.data_ptr() for array in arrays.values()))
        workspace = torch.zeros(
            max(1, sum(kernel.artifact.plan.workspaces.values()) + 4096), dtype=torch.uint8, device="cuda"
        )
        found = ctypes.c_void_p(library.schedsearch_find(kernel.workload.id.encode()))
        stream = torch.cuda.current_stream().cuda_stream
        bound = kernel.bind_addresses({key: array.data_ptr() for key, array in arrays.items()}, {})
        given = (found, ctypes.c_void_p(stream), pointers, None, ctypes.c_void_p(workspace.data_ptr()), CALLS)
        library.loop(*given)
        bound.launch(stream)
        ((config, function, parameters),) = bound.launches
        alone = (cuda_driver.libcuda().cuLaunchKernelEx, ctypes.byref(config), function, parameters, CALLS)
        by_driver, in_c, in_python = [], [], []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            by_driver.append(library.launches(*alone))
            torch.cuda.synchronize()
            in_c.append(library.loop(*given))
            torch.cuda.synchronize()
            started = time.perf_counter()
            for _ in range(CALLS):
                bound.launch(stream)
            in_python.append((time.perf_counter() - started) / CALLS * 1e6)
        torch.cuda.synchronize()
        assert min(*by_driver, *in_c) > 0, name
        times = {"driver_us": by_driver, "c_us": in_c, "python_us": in_python}
        yield {"kernel": name, **{key: statistics.median(found) for key, found in times.items()}}


def _libcuda() -> str:
    ctypes.CDLL("libcuda.so.1")
    return next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libcuda.so" in line)


def resnet50(n: int) -> list[Workload]:
    """The distinct convolutions of ResNet-50 (v1.5: the 3x3 layers have the strides) with bias, relu and residual fused."""

    def conv(size: int, c: int, k: int, r: int, stride: int = 1, epilogue: tuple[str, ...] = ("bias", "relu")) -> Workload:
        return Workload.conv2d(n=n, h=size, w=size, c=c, k=k, r=r, s=r, stride=stride, padding=r // 2, epilogue=epilogue)

    layers, c, size = [conv(224, 3, 64, 7, 2)], 64, 56
    for stage, width in enumerate((64, 128, 256, 512)):
        stride = 1 if stage == 0 else 2
        layers += [
            conv(size, c, width, 1),
            conv(size, width, width, 3, stride),
            conv(size, c, 4 * width, 1, stride, ("bias",)),
        ]
        size //= stride
        c = 4 * width
        layers += [
            conv(size, width, c, 1, 1, ("bias", "residual", "relu")),
            conv(size, c, width, 1),
            conv(size, width, width, 3),
        ]
    return list(dict.fromkeys(layers))


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of machine code, of the sources, and of the object code with the launcher, for the layers of ResNet-50."""
    target = PRESETS["h200"]
    with Store.open(folder / "layers.db") as store:
        for workload in resnet50(32):
            template = load_templates().matching(workload, target)[0]
            config = template.default(workload, target, template.space(workload, target))
            artifact = compile_source(template.kernel(workload, target, config), target).artifact
            add(store, workload, artifact, target, template.name)
        exported = export_c(store, folder / "layers")
    names = sorted(path for path in (folder / "layers").glob("*.c"))
    subprocess.run(["gcc", "-std=c11", "-O2", "-c", *(path.name for path in names)], cwd=folder / "layers", check=True)
    objects = sorted((folder / "layers").glob("*.o"))
    whole = subprocess.run(["size", "-t", *objects], capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    return {
        "kernels": len(exported.kernels),
        "code_bytes": exported.code_bytes,
        "source_bytes": sum(path.stat().st_size for path in names),
        "object_bytes": int(whole.split()[3]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", action="store_true", help="only the sizes, without a device")
    parser.add_argument("--times", action="store_true", help="only the times")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    if options.sizes and options.times:
        parser.error("--sizes and --times leave nothing to do; give one of them, or none")
    rows: list[dict[str, Any]] = []
    data: dict[str, Any] = {"rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        if not options.times:
            data["resnet50"] = sizes(Path(folder))
            print(data["resnet50"], flush=True)
            common.write(options.out, data)
        if not options.sizes:
            for row in host_times(Path(folder)):
                if "kernel" in row:
                    rows.append(row)
                else:
                    data |= row
                print(row, flush=True)
                common.write(options.out, data)
            lines = [(row["kernel"], *(f"{row[key]:.2f}" for key in ("driver_us", "c_us", "python_us"))) for row in rows]
            print(common.table(("kernel", "driver us", "C us", "Python us"), lines))


if __name__ == "__main__":
    main()
