"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from schedsearch.device import open_device
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.target import Target

# Compilers make many objects that live until the kernel is done: looking for cycles as often as by default takes a twentieth
# of the time.
gc.set_threshold(100_000, 50, 100)

# A job in the background of a shell ignores SIGINT, and one of nohup SIGHUP; schedsearch leaves ignored signals ignored.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

hypothesis.settings.register_profile("untimed", deadline=None)  # the machine may be busy with something else
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the machine's key and trust marks out of the user's folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_build_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A build cache that is empty at first, so that the processes of this run compile everything only once."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "builds"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDSEARCH_BUILD_CACHE", str(folder))
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder beside the project with operator cases, recorded spaces and tools. Skips the test if it is missing."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("needs the folder shared/ beside the project, which is missing here")
    return folder


def _has_gpu() -> bool:
    try:
        from cuda.bindings import driver
    except ImportError:
        return False
    try:
        return driver.cuInit(0)[0] == 0 and driver.cuDeviceGetCount()[1] > 0
    except RuntimeError:  # the bindings raise if libcuda itself is missing
        return False


# Modules that compile, emulate or tune for many seconds; so does test_candidates_compile, of the contract of templates.
LONG = {
    "test_cheating_kernels", "test_detection", "test_detector_benchmark", "test_dyn_strided_slice",
    "test_dynamic_detection", "test_dynamic_model", "test_dynamic_net", "test_dynamic_nodes", "test_front_end",
    "test_gather_scatter", "test_network_int8", "test_network_weights", "test_range_choice", "test_record_space",
    "test_selection", "test_size_ranges", "test_third_party_operator", "test_third_party_template", "test_unique",
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if {"torch", "kernel_tuner_package"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("integrations")
        if getattr(item, "originalname", None) == "test_candidates_compile" or item.path.stem in LONG:
            item.add_marker("long")
    if any(item.get_closest_marker("gpu") for item in items) and not _has_gpu():
        skip = pytest.mark.skip(reason="needs a CUDA device, and there is none")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


@pytest.fixture(scope="session")
def torch() -> Any:
    """PyTorch, on any device. Tests that take it are integrations."""
    return pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")


@pytest.fixture(scope="session")
def kernel_tuner_package() -> Any:
    """The package kernel_tuner. Tests that take it are integrations."""
    return pytest.importorskip("kernel_tuner", reason="needs kernel_tuner: make test-integrations installs it")


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    """This machine's CPU, on which a test runs kernels."""
    opened = CpuDevice(detect("cpu"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    """The first GPU, on which a test runs kernels."""
    opened = open_device(detect("cuda"))
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def hopper() -> Target:
    """A GPU of compute capability 9.0."""
    target = detect("cuda")
    if target.compute_capability != (9, 0):
        pytest.skip(f"needs compute capability 9.0, found {target.compute_capability}")
    return target
