"""Fixtures that every test may use."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import drawn_cases
import hypothesis
import pytest
from kept_compilers import KeptCompilers

from schedsearch.device import open_device
from schedsearch.device.cpu import CpuDevice
from schedsearch.device.detect import detect
from schedsearch.errors import DeviceError
from schedsearch.processes import builder
from schedsearch.runtime import ahead
from schedsearch.target import Target

# Compilers make many objects that live until the kernel is done: looking for cycles as often as by default takes a twentieth
# of the time.
gc.set_threshold(100_000, 50, 100)

# A job in the background of a shell ignores SIGINT, and one of nohup SIGHUP; schedsearch leaves ignored signals ignored.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

_AVAILABLE_CORES = builder.available_cores

# The machine may be busy with something else, so that drawing an example takes seconds. What fails prints how it runs again.
hypothesis.settings.register_profile(
    "untimed", deadline=None, print_blob=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _own_state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the machine's key and trust marks out of the user's folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDSEARCH_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_shipped_records() -> Iterator[None]:
    """What is tuned for this machine's devices by chance must not decide what tests find."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDSEARCH_TUNED_DIR", "")
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_build_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A build cache that is empty at first, so that the processes of this run compile everything only once."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "builds"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCHEDSEARCH_BUILD_CACHE", str(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def _kept_compilers(_own_state_folder: None, _no_shipped_records: None, _own_build_cache: None) -> Iterator[None]:
    """The same processes compile ahead for all tests of this worker, unless one asks for `own_compilers`. They are as many
    as this worker's share of the cores, and so are those of a tuning run."""
    cores = max(1, _AVAILABLE_CORES() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
    kept = KeptCompilers(cores)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ahead, "Builder", kept)
        for module in (ahead, builder):
            patch.setattr(module, "available_cores", lambda: cores)
        yield
    kept.close()


@pytest.fixture
def own_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled ahead as outside of tests: by new processes, one for each core."""
    monkeypatch.setattr(ahead, "Builder", builder.Builder)
    for module in (ahead, builder):
        monkeypatch.setattr(module, "available_cores", _AVAILABLE_CORES)


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """The workers use all cores: threads of BLAS that wait for one only burn its time."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    drawn_cases.add_options(parser)


def pytest_report_header(config: pytest.Config) -> str | None:
    return drawn_cases.report(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return drawn_cases.is_of_no_use(collection_path, config.option.markexpr) or None


@pytest.fixture(scope="session")
def some_of(request: pytest.FixtureRequest) -> Callable[[Sequence[Any], int], list[Any]]:
    """`some_of(choices, number)`: the share --gpu-share of them, one at least. Each number begins at another choice."""
    share = request.config.getoption("--gpu-share")
    return lambda choices, number: drawn_cases.some_of(choices, share, number)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if {"torch", "kernel_tuner_package"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("integrations")
        if getattr(item, "originalname", None) == drawn_cases.COMPILES:
            item.add_marker("long")
    drawn_cases.mark_long(items)
    drawn_cases.check_files(items)
    drawn_cases.leave_out(config, items)
    if any(item.get_closest_marker("gpu") for item in items) and not _has_gpu():
        skip = pytest.mark.skip(reason="needs a CUDA device, and there is none")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    gc.freeze()  # what the files of tests made stays, and a test that calls `gc.collect` need not look at it


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


@pytest.fixture(scope="module")
def _gpu_context() -> Iterator[None]:
    opened = open_device(detect("cuda"))
    yield
    with contextlib.suppress(DeviceError):  # a test may have broken the context
        opened.close()


@pytest.fixture(autouse=True)
def _same_gpu_context(request: pytest.FixtureRequest) -> None:
    """Keeps the GPU's context for the next test of the module: making it anew takes as long as compiling a small kernel."""
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("_gpu_context")


@pytest.fixture(scope="session")
def hopper() -> Target:
    """A GPU of compute capability 9.0."""
    target = detect("cuda")
    if target.compute_capability != (9, 0):
        pytest.skip(f"needs compute capability 9.0, found {target.compute_capability}")
    return target
