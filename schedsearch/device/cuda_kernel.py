"""Kernels of a CUDA device: loaded, bound to arguments, launched.

A launch is one `cuLaunchKernelEx` per step on an argument block that was packed when the kernel was bound. ctypes makes that
call, which costs less host time than the bindings' own conversion of eleven arguments. It tries the thread's current context
first and pushes ours when the driver refuses that one, e.g. in a thread that never used the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from schedsearch.device import cuda_driver
from schedsearch.device.contract import Workspaces, check_alignment, needed_steps, place_buffers, split_steps
from schedsearch.device.cuda_context import CudaContext
from schedsearch.device.objects import check_elf
from schedsearch.errors import ArgumentError
from schedsearch.launch import TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES, Artifact, LaunchPlan, Step, TensorMap, number_bits
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.target import Target


class CudaKernel:
    """A loaded cubin. See `schedsearch.device.LoadedKernel`."""

    def __init__(self, device: CudaContext, artifact: Artifact) -> None:
        self.artifact = artifact
        self.device = device
        plan = artifact.plan
        check_elf(artifact.code, f"the code for {plan.arch}")
        self.workspaces = Workspaces(device, plan.workspaces)
        with device.current():
            self._module = cuda_driver.call("cuModuleLoadData", artifact.code)
            self.functions = [
                cuda_driver.call("cuModuleGetFunction", self._module, step.entry.encode()) for step in plan.steps
            ]
            limit = cuda_driver.bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            for function, step in zip(self.functions, plan.steps):
                cuda_driver.call("cuFuncSetAttribute", function, limit, step.dynamic_shared_bytes)

    def bind(
        self,
        buffers: Mapping[str, int],
        scalars: Mapping[str, float],
        prepared: Workspaces | None = None,
        *,
        early: bool = False,
    ) -> CudaBoundKernel:
        plan = self.artifact.plan
        steps = needed_steps(plan.steps, buffers) if prepared is None else split_steps(plan)[1]
        return CudaBoundKernel(self, buffers, scalars, steps, prepared, early=early)

    def prepare(self, addresses: Mapping[str, int], stream: int = 0) -> Workspaces:
        plan = self.artifact.plan
        made = Workspaces(self.device, plan.constant_workspaces, addresses)
        made.take(plan.constant_workspaces)
        steps, _ = split_steps(plan)
        CudaBoundKernel(self, addresses, {}, steps, made).launch(stream)
        return made

    def close(self) -> None:
        if self._module is not None:
            self.workspaces.close()
            with self.device.current():
                cuda_driver.call("cuModuleUnload", self._module)
            self._module = None


# What CUlaunchConfig and CUDA_KERNEL_NODE_PARAMS have in common.
GRID_FIELDS = tuple(
    (name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")
)


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver API."""

    _fields_ = (
        *GRID_FIELDS,
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of the driver API, whose value is an integer here."""

    _fields_ = (("id", ctypes.c_uint), ("padding", ctypes.c_uint), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


_EARLY = _LaunchAttribute(6, 0, 1)  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_LEAST_EARLY = (9, 0)  # compute capability

# The configuration, a reference to it, the function as an argument, the parameters, the function's handle.
_Launch = tuple[_LaunchConfig, Any, Any, Any, int]


class CudaBoundKernel:
    """The packed argument blocks of some steps, given by their numbers. Not thread-safe."""

    def __init__(
        self,
        kernel: CudaKernel,
        buffers: Mapping[str, int],
        scalars: Mapping[str, float],
        steps: Sequence[int],
        prepared: Workspaces | None,
        *,
        early: bool = False,
    ) -> None:
        plan, device = kernel.artifact.plan, kernel.device
        self._kernel, self._prepared = kernel, prepared  # keeps the module and the workspaces alive
        self._plan = plan
        self._launch = cuda_driver.libcuda().cuLaunchKernelEx
        self._replace_address = cuda_driver.immediate().cuTensorMapReplaceAddress  # it changes the host's memory
        self._pointers: dict[str, list[ctypes.c_uint64]] = {}
        self._maps: dict[str, list[Any]] = {}  # as arguments
        self._scalars: dict[str, list[tuple[ctypes.c_uint64, str]]] = {}
        self._keep: list[Any] = []
        addresses = place_buffers(plan, [plan.steps[number] for number in steps], buffers, kernel.workspaces, prepared)
        with device.current():
            self._launches = [
                self._pack(kernel.functions[number], plan.steps[number], addresses, scalars, device.target)
                for number in steps
            ]
        if _starts_early(device.target):
            for begins_early, (config, *_) in zip(early_steps(plan, steps, early), self._launches):
                if begins_early:
                    config.attributes, config.attribute_count = ctypes.addressof(_EARLY), 1
        names = {*self._pointers, *self._maps, *plan.alignments}
        self._places = {
            name: (plan.alignments.get(name, 1), self._pointers.get(name, []), self._maps.get(name, [])) for name in names
        }
        self._stream = 0  # of all configurations; most launches are on the stream of the one before

    def _pack(
        self, function: Any, step: Step, addresses: Mapping[str, int], scalars: Mapping[str, float], target: Target
    ) -> _Launch:
        values = [value for param in step.params for value in self._pack_param(param, addresses, scalars)]
        pointers = (ctypes.c_void_p * max(len(values), 1))(*(ctypes.addressof(value) for value in values))
        blocks = step.grid.blocks(target.sms, step.cluster)
        grid = step.grid.shape or (blocks, 1, 1)
        config = _LaunchConfig(*grid, *(step.block_shape or (step.block_threads, 1, 1)), step.dynamic_shared_bytes)
        if step.grid.blocks_per_sm and step.cluster > 1:
            config.grid_x = min(blocks, step.cluster * _clusters_at_once(function, config))
        self._keep += [values, pointers]
        return config, ctypes.byref(config), cuda_driver.argument(int(function)), ctypes.byref(pointers), int(function)

    def _pack_param(self, param: Any, addresses: Mapping[str, int], scalars: Mapping[str, float]) -> list[Any]:
        """The values whose addresses the driver gets for a parameter: one, or several for an array."""
        if param.kind == "pointer":
            return [self._pack_pointer(param.buffer, addresses)]
        if param.kind == "array":
            return [
                self._pack_pointer(param.buffer, addresses) if word is None else ctypes.c_int64(word) for word in param.words
            ]
        if param.kind == "tensor_map":
            storage = _aligned_storage(TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT)
            encoded = _encode(param, addresses[param.buffer])
            ctypes.memmove(storage, encoded.getPtr(), TENSOR_MAP_BYTES)
            self._maps.setdefault(param.buffer, []).append(cuda_driver.argument(ctypes.addressof(storage)))
            return [storage]
        if param.kind == "scalar":
            if param.name not in scalars:
                raise ArgumentError(f"no value for the scalar {param.name!r}; given: {', '.join(scalars) or 'none'}")
            scalar = ctypes.c_uint64(number_bits(scalars[param.name], param.dtype))  # the driver reads as much as it needs
            self._scalars.setdefault(param.name, []).append((scalar, param.dtype))
            return [scalar]
        if param.kind == "number":
            return [ctypes.c_uint64(number_bits(param.value, param.dtype))]
        if param.kind == "literal":
            return [ctypes.c_int64()]  # the kernel ignores it
        kinds = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}
        return [kinds[param.kind](param.value)]

    def _pack_pointer(self, buffer: str, addresses: Mapping[str, int]) -> Any:
        pointer = ctypes.c_uint64(addresses[buffer])
        self._pointers.setdefault(buffer, []).append(pointer)
        return pointer

    @property
    def launches(self) -> list[tuple[_LaunchConfig, int, Any]]:
        """Configuration, function's handle and array of pointers to the parameters of each launch. `set_pointer` and
        `set_scalar` change what these point to."""
        return [(config, function, parameters._obj) for config, _, _, parameters, function in self._launches]

    def launch(self, stream: int = 0) -> None:
        if stream != self._stream:
            for config, *_ in self._launches:
                config.stream = stream
            self._stream = stream
        for launch in self._launches:
            code = self._launch(launch[1], launch[2], launch[3], None)
            if code:
                self._launch_in_context(launch, code)

    def _launch_in_context(self, launch: _Launch, code: int) -> None:
        """Launches again in our context, if another context or none was current when the driver refused with `code`."""
        if not self._kernel.device.is_current:
            _, config_reference, function, parameters, _ = launch
            with self._kernel.device.current():
                code = self._launch(config_reference, function, parameters, None)
        if code:
            cuda_driver.fail("cuLaunchKernelEx", code)

    def set_pointer(self, buffer: str, address: int) -> None:
        """Raises ArgumentError if the address lacks the alignment that the plan requires."""
        if buffer not in self._places:
            return
        alignment, pointers, maps = self._places[buffer]
        if address % alignment:
            check_alignment(self._plan, buffer, address)
        for pointer in pointers:
            pointer.value = address
        if maps:
            self._replace(maps, cuda_driver.argument(address))

    def _replace(self, maps: Sequence[Any], to: Any) -> None:
        for place in maps:
            code = self._replace_address(place, to)
            if code and not self._kernel.device.is_current:  # it wants a context, like a launch
                with self._kernel.device.current():
                    code = self._replace_address(place, to)
            if code:
                cuda_driver.fail("cuTensorMapReplaceAddress", code)

    def set_scalar(self, name: str, value: float) -> None:
        for scalar, dtype in self._scalars.get(name, ()):
            scalar.value = number_bits(value, dtype)


def early_steps(plan: LaunchPlan, steps: Sequence[int], early: bool) -> list[bool]:
    """Which of the steps of a launch, given by their numbers, may begin while the one before them runs.

    Those behind the first may in any case: what is in front of them belongs to the launch, and began when everything before
    it was complete, or has waited itself (docs/decisions/444-further-steps-begin-early.md).

    Args:
        early: the first one may, too.
    """
    found = []
    for place, number in enumerate(steps):
        step, others = plan.steps[number], (plan.steps[other] for other in steps if other != number)
        made = {name for other in others for name in other.buffers if name in plan.workspaces}
        # Another step of the launch may write what is made.
        found.append(step.early and (early or place > 0) and not made.intersection(step.ahead))
    return found


def _starts_early(target: Target) -> bool:
    """Whether the card and the driver (CUDA 12.3 or later) can begin with a kernel before its predecessor ends."""
    return target.compute_capability >= _LEAST_EARLY and hasattr(cuda_driver.libcuda(), "cuGraphAddDependencies_v2")


def _clusters_at_once(function: Any, config: _LaunchConfig) -> int:
    """How many clusters of a kernel run at once. Each runs within one group of multiprocessors, whose size may not be a
    multiple of the cluster's.

    Raises:
        DriverError: the driver refuses the kernel.
    """
    clusters, handle = ctypes.c_int(), ctypes.c_void_p(int(function))
    code = cuda_driver.libcuda().cuOccupancyMaxActiveClusters(ctypes.byref(clusters), handle, ctypes.byref(config))
    if code:
        cuda_driver.fail("cuOccupancyMaxActiveClusters", code)
    return max(clusters.value, 1)  # if none fits, the launch says why


def _aligned_storage(nbytes: int, alignment: int) -> Any:
    """Host memory at a multiple of `alignment`; the view keeps the allocation alive."""
    raw = bytearray(nbytes + alignment)
    start = ctypes.addressof((ctypes.c_char * len(raw)).from_buffer(raw))
    return (ctypes.c_char * nbytes).from_buffer(raw, -start % alignment)


def _encode(param: TensorMap, address: int) -> Any:
    """Encodes a tensor map. Raises DriverError if a field exceeds TMA's limits."""
    driver = cuda_driver.bindings()
    dtype = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{dtype_of(param.dtype).tma}")
    swizzle = getattr(
        driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{f'{param.swizzle_bytes}B' if param.swizzle_bytes else 'NONE'}"
    )
    promotion = getattr(
        driver.CUtensorMapL2promotion,
        "CU_TENSOR_MAP_L2_PROMOTION_" + (f"L2_{param.l2_promotion_bytes}B" if param.l2_promotion_bytes else "NONE"),
    )
    wide = [driver.cuuint64_t(value) for value in param.dims], [driver.cuuint64_t(value) for value in param.strides_bytes]
    element_strides = [driver.cuuint32_t(value) for value in param.element_strides]
    interleave = driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE
    fill = driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
    rank = len(param.dims)
    if param.is_im2col:
        return cuda_driver.call(
            "cuTensorMapEncodeIm2col", dtype, rank, address, *wide, list(param.lower), list(param.upper),
            param.channels_per_pixel, param.pixels_per_column, element_strides, interleave, swizzle, promotion, fill,
        )  # fmt: skip
    box = [driver.cuuint32_t(value) for value in param.box]
    return cuda_driver.call(
        "cuTensorMapEncodeTiled", dtype, rank, address, *wide, box, element_strides, interleave, swizzle, promotion, fill
    )
