"""Does ptxas overwrite registers that wgmma still reads? Kernels of conv2d_stem, linked by several versions of nvJitLink.

    python benchmarks/register_operands.py --out FILE.json                              the installed version
    python benchmarks/register_operands.py FOLDER/libnvJitLink.so.13 OTHER/libnvJitLink.so.12 --out FILE.json

The libraries come from wheels, e.g. pip download --no-deps nvidia-nvjitlink==13.0.88. Every version gets the same PTX, with
the number of its own PTX version. For each version it prints how many kernels have wgmma instructions that read registers,
and how many of these show the fault (`schedsearch.backend.register_operands`). It needs no GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import common
import numpy as np

from schedsearch.backend.cuda import ptx_of
from schedsearch.backend.register_operands import count_from_registers, overwritten
from schedsearch.constructors.convolutions import conv2d
from schedsearch.target import PRESETS
from schedsearch.templates.conv2d.stem import Conv2dStem

PTX_INPUT = 2  # nvJitLinkInputType
ARCH = "sm_90a"
PTX_VERSIONS = {(12, 9): "8.8", (13, 0): "9.0", (13, 1): "9.1", (13, 2): "9.2", (13, 3): "9.3", (13, 4): "9.4"}
IMAGES = ((224, 3, 64, 7, 2, 3), (224, 3, 32, 3, 2, 1), (299, 3, 32, 3, 2, 0), (224, 4, 64, 7, 2, 3), (64, 3, 64, 3, 1, 1))
KINDS: tuple[dict[str, Any], ...] = ({}, {"dtype": "bfloat16"}, {"dtype": "int8"}, {"epilogue": ["bias", "relu"]})


class Linker:
    """nvJitLink from a file."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        major, minor = ctypes.c_uint(), ctypes.c_uint()
        self._check(self._library.nvJitLinkVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = major.value, minor.value

    def link(self, texts: list[str]) -> bytes:
        """Raises RuntimeError if ptxas refuses the text."""
        options = (ctypes.c_char_p * 2)(f"-arch={ARCH}".encode(), b"-O3")
        handle, size = ctypes.c_void_p(), ctypes.c_size_t()
        self._check(self._library.nvJitLinkCreate(ctypes.byref(handle), 2, options))
        try:
            for text in texts:
                data = self._own_version(text).encode()
                self._check(self._library.nvJitLinkAddData(handle, PTX_INPUT, data, ctypes.c_size_t(len(data)), b"step"))
            self._check(self._library.nvJitLinkComplete(handle))
            self._check(self._library.nvJitLinkGetLinkedCubinSize(handle, ctypes.byref(size)))
            cubin = ctypes.create_string_buffer(size.value)
            self._check(self._library.nvJitLinkGetLinkedCubin(handle, cubin))
        finally:
            self._library.nvJitLinkDestroy(ctypes.byref(handle))
        return cubin.raw

    def _own_version(self, text: str) -> str:
        known = PTX_VERSIONS.get(self.version)
        return re.sub(r"^\.version [\d.]+", f".version {known}", text, flags=re.MULTILINE) if known else text

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"nvJitLink returned {status}")


def kernels(layers: int, configurations: int) -> list[list[str]]:
    """The PTX of the stem's kernels: for each of the first layers the default and some random configurations."""
    template, target, found = Conv2dStem(), PRESETS["h200"], []
    for n, image, kind in list(itertools.product((32, 1), IMAGES, KINDS))[:layers]:
        h, c, k, r, stride, padding = image
        workload = conv2d(n=n, h=h, w=h, c=c, k=k, r=r, s=r, stride=stride, padding=padding, **kind)
        space, rng = template.space(workload, target), np.random.default_rng(len(found))
        for config in [template.default(workload, target, space), *space.sample(configurations, rng)]:
            found.append(ptx_of(template.kernel(workload, target, config), target))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", type=Path, help="default: the installed one")
    parser.add_argument("--layers", type=int, default=40, help="at most 40")
    parser.add_argument("--configurations", type=int, default=4, help="random ones of each layer, beside the default")
    parser.add_argument("--out", help="also write the data here")
    options = parser.parse_args()
    libraries = options.libraries
    if not libraries:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        libraries = [Path(load_nvidia_dynamic_lib("nvJitLink").abs_path)]
    texts = kernels(options.layers, options.configurations)
    rows = []
    for path in libraries:
        linker, counts = Linker(path), Counter[str]()
        for text in texts:
            try:
                cubin = linker.link(text)
            except RuntimeError:
                counts["refused"] += 1
                continue
            reads = count_from_registers(cubin) > 0
            counts["read registers"] += reads
            counts["show the fault"] += reads and bool(overwritten(cubin))
        rows.append({"version": list(linker.version), "kernels": len(texts), **counts})
        print(f"CUDA {linker.version[0]}.{linker.version[1]}: {len(texts)} kernels, {dict(counts)}", flush=True)
    common.write(options.out, {"rows": rows})


if __name__ == "__main__":
    main()
