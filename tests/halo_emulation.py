"""conv2d_halo's kernels in the emulator: what stands in for their epilogue, and y beside the expected y."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cluster_emulator import ClusterEmulator
from conv2d_numpy import convolve, integers, to_bits
from hopper_emulator import HopperEmulator

import schedsearch.templates.conv2d.halo as module
import schedsearch.templates.conv2d.halo_kernel as kernel_module
import schedsearch.templates.conv2d.halo_parts as parts_module
import schedsearch.templates.conv2d.halo_split as split_module
import schedsearch.templates.conv2d.halo_store as store_module
import schedsearch.templates.conv2d.halo_weights as halo_weights
from schedsearch.config import Config
from schedsearch.launch import Pointer
from schedsearch.target import PRESETS
from schedsearch.templates.parts import gather, pipeline, sharing, store, store_channels, walk, wgmma
from schedsearch.templates.parts.epilogue_fragments import TileRows
from schedsearch.testing.emulator import Memory
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
TEMPLATE = module.Conv2dHalo()

# The modules that the kernels are made of.
MODULES = (
    kernel_module, split_module, parts_module, store_module, halo_weights, gather, pipeline, sharing, store, store_channels,
    walk, wgmma,
)  # fmt: skip


def emulator_of(memory: Memory, config: dict[str, Any], late: bool) -> HopperEmulator:
    kind = HopperEmulator if config["split_k"] == 1 else ClusterEmulator
    return kind(memory, lambda value, *_: value, late)


class StandInEpilogue:
    """Adds k % 5, and the residual if there is one. `outputs` counts those of one group, even if groups are merged."""

    def __init__(self, emulator: HopperEmulator, workload: Workload, outputs: int) -> None:
        self.emulator, self.workload, self.outputs, self.alignments = emulator, workload, outputs, {}
        self.identity = not workload.epilogue
        zeros: tuple[Any, ...] = tuple(SimpleNamespace(kind="i64", value=0) for _ in range(7))
        residual = (Pointer("residual"),) if "residual" in map(str, workload.epilogue) else zeros[3:4]
        self.params = (*zeros[:3], *residual, *zeros[4:])

    def index(self, name: str) -> int:
        return {"residual": 3}[name]

    def transposed(self, octets: int, tile: TileRows) -> Any:
        k_all, (_, _, out_w, _) = self.workload.k, self.workload.output.shape
        assert (tile.row_elements, tile.pixel_elements) == (out_w * k_all, k_all)

        def fuse(
            acc: list[Any],
            channels: int,
            rows: int,
            columns: int,
            position: int,
            staged: int,
            k: int,
            offset: int,
            *params: Any,
        ) -> None:
            assert channels <= self.outputs and (k + channels) % self.outputs == 0
            assert position == self.emulator.thread.number % 4 * 2
            for octet in range(octets):
                values = [0.0] * 4
                if "residual" not in map(str, self.workload.epilogue):
                    pass
                elif self.workload.out_dtype == "float32":
                    for i in range(4):
                        row, column = divmod(8 * octet + position + i % 2, tile.patch_w)
                        if row < rows and column < columns and 8 * (i // 2) < channels:
                            element = offset + row * tile.row_elements + column * tile.pixel_elements + 8 * (i // 2)
                            values[i] = self.emulator.memory.at(params[3] + 4 * element, 4).view(np.float32)[0]
                else:
                    words = self.emulator.ldmatrix_trans(staged + octet * 1024, 2)
                    values = np.array(words, np.uint32).view(np.float16).astype(np.float32).tolist()
                for i in range(4):
                    acc[4 * octet + i] += (k + 8 * (i // 2)) % 5 + values[i]

        return fuse


def store_as_float32(memory: Memory, octets: int, tile: TileRows, accumulator: str) -> Any:
    assert accumulator == "float32"

    def store(acc: list[Any], y: int, channels: int, rows: int, columns: int, position: int, offset: int) -> None:
        for i in range(4 * octets):
            row, column = divmod(8 * (i // 4) + position + i % 2, tile.patch_w)
            if row < rows and column < columns and 8 * (i // 2 % 2) < channels:
                element = offset + row * tile.row_elements + column * tile.pixel_elements + 8 * (i // 2 % 2)
                memory.at(y + 4 * element, 4).view(np.float32)[0] = acc[i]

    return store


def emulate(
    monkeypatch: pytest.MonkeyPatch, workload: Workload, config: dict[str, Any], sms: int, late: bool
) -> tuple[Any, Any]:
    """y of one configuration and the expected y, with the stand-in for every epilogue."""
    memory = Memory()
    emulator = emulator_of(memory, config, late)
    emulator.stand_in(monkeypatch, *MODULES)
    outputs = workload.k // workload.groups * config.get("merged", 1)
    monkeypatch.setattr(module, "Epilogue", lambda w: StandInEpilogue(emulator, w, outputs))
    monkeypatch.setattr(store_module, "store_transposed", functools.partial(store_as_float32, memory))
    arrays = integers(workload, np.random.default_rng(0))
    out_type = np.float32 if workload.out_dtype == "float32" else np.float16
    y = np.full(workload.output.shape, np.nan, out_type)
    residual = arrays.get("residual", np.zeros(1)).astype(out_type)
    source = TEMPLATE.kernel(workload, dataclasses.replace(H200, sms=sms), Config(config))
    tensors = {
        "x": arrays["x"].astype(np.float16),
        "weight": arrays["weight"].astype(np.float16),
        "residual": residual,
        "y": y,
    }
    pointers = {name: memory.add(tensors[name]) for name in ("weight", "residual", "y")}
    views = {p.buffer: tensors[p.buffer].reshape(p.dims[::-1]) for p in source.steps[0].params if p.kind == "tensor_map"}
    emulator.run(source.steps[0], pointers, sms, views)
    reference = convolve(workload, arrays["x"], arrays["weight"])
    if workload.epilogue:
        reference += (np.arange(workload.k) % 5 + arrays.get("residual", 0)).astype(np.float32)
    return to_bits(y, workload.out_dtype), to_bits(reference, workload.out_dtype)
