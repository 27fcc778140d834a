"""docs/operators.md is correct: exactly its files and commands give a working operator in a package of its own."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from page_support import SCHEDSEARCH, Package, Page

from schedsearch import Workload
from schedsearch.backend import compile_source
from schedsearch.device.detect import detect
from schedsearch.errors import UnknownOperatorError
from schedsearch.records import Store
from schedsearch.target import PRESETS, Target
from schedsearch.template import load_reference, load_template

PAGE = Page("operators.md")
PARAMS = {"rows": 512, "columns": 1000}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    package = Package(tmp_path_factory.mktemp("softmax"), PAGE.files())
    install, *_ = PAGE.commands()
    package.run_line(install)
    return package


@pytest.fixture
def installed(package: Package, monkeypatch: pytest.MonkeyPatch) -> Package:
    """The package is also installed in this process."""
    monkeypatch.syspath_prepend(str(package.site))
    return package


@pytest.fixture(scope="module")
def tuned(package: Package) -> str:
    """Output of the page's `schedsearch tune`."""
    (line,) = [line for line in PAGE.commands() if " tune " in line]
    return package.run_line(line)


def test_the_page_has_all_files_and_commands() -> None:
    modules = {"row_softmax_operator.py", "row_softmax_reference.py", "row_softmax_cpu.py", "row_softmax_cuda.py"}
    assert set(PAGE.files()) == {"pyproject.toml", *modules, "row_softmax.yaml", "use.py"}
    assert [line.split()[0] for line in PAGE.commands()] == ["pip", "schedsearch", "schedsearch", "python"]


def test_the_installed_templates_are_listed_with_their_operator(package: Package) -> None:
    listed = package.run_line("schedsearch templates")
    for name in ("row_softmax_cpu", "row_softmax_cuda"):
        (line,) = [line for line in listed.splitlines() if line.startswith(name)]
        assert "row_softmax" in line.removeprefix(name)


@pytest.mark.long
def test_tune_finds_and_records_verified_kernels_and_shows_their_bandwidth(package: Package, tuned: str) -> None:
    assert "GB/s" in tuned and "GFLOP/s" not in tuned
    check = (
        "import sys; from schedsearch import Workload, detect; from schedsearch.records import Store\n"
        "with Store.open('row_softmax.db', readonly=True) as store:\n"
        f"    history = store.history(workload=Workload('row_softmax', {PARAMS!r}), template='row_softmax_cpu')\n"
        "print({str(r.measurement.outcome) for r in history}, len({r.config for r in history}))\n"
    )
    outcomes, configs = package.run(sys.executable, "-c", check).rsplit(maxsplit=1)
    assert outcomes == "{'ok'}" and int(configs) == 8


@pytest.mark.long
def test_compile_deploys_the_winner(package: Package, tuned: str) -> None:
    """use.py compares the result with NumPy itself."""
    (line,) = [line for line in PAGE.commands() if line.startswith("python ")]
    assert package.run_line(line).split() == ["row_softmax_cpu", "exact", "True"]


def test_a_mistake_in_a_workload_file_is_shown_at_its_place(package: Package) -> None:
    text = PAGE.files()["row_softmax.yaml"].replace("rows: 512", "rows: 0")
    (package.folder / "wrong.yaml").write_text(text)
    ran = subprocess.run(
        [*SCHEDSEARCH, "tune", "wrong.yaml"], cwd=package.folder, env=package.environment(), capture_output=True, text=True
    )
    assert ran.returncode == 2
    assert re.search(r"wrong\.yaml:5:\d+", ran.stderr) and "at least 1, got 0" in ran.stderr and "^" in ran.stderr


def test_without_the_package_the_operator_is_unknown() -> None:
    with pytest.raises(UnknownOperatorError, match=r"unknown operator 'row_softmax'.*allowed: "):
        Workload("row_softmax", PARAMS)


def test_the_operator_imports_nothing_heavy(package: Package) -> None:
    code = (
        "import sys; from schedsearch import Workload\n"
        f"Workload('row_softmax', {PARAMS!r}).signature\n"
        "print([name for name in ('numba', 'numpy', 'llvmlite') if name in sys.modules])"
    )
    assert package.run(sys.executable, "-c", code).strip() == "[]"


@pytest.mark.long
def test_the_operator_keeps_the_contract(package: Package) -> None:
    """The page's own test class, run by pytest in the environment with the package."""
    (package.folder / "test_row_softmax.py").write_text(PAGE.block_with("python", "OpContract"), encoding="utf-8")
    ran = package.run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_row_softmax.py")
    assert re.search(r"^\d+ passed", ran, re.MULTILINE), ran


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (33, 129)])
def test_the_definition_is_that_of_softmax(installed: Package, shape: tuple[int, int]) -> None:
    """Rows of positive numbers that sum to one, in the ratios exp(x_i - x_j)."""
    x = np.random.default_rng(3).integers(-8, 9, shape).astype(np.float32)
    workload = Workload("row_softmax", {"rows": shape[0], "columns": shape[1]})
    y = load_reference("row_softmax").points(workload, {"x": x}, {}, np.arange(x.size), "y").reshape(shape)
    np.testing.assert_allclose(y.sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(np.log(y / y[:, :1]), x - x[:, :1], atol=1e-12)


@pytest.mark.long
def test_awkward_shapes_are_right(installed: Package) -> None:
    """Every value of every knob, in this process, compared with the reference."""
    from schedsearch.device.cpu import CpuDevice
    from schedsearch.verification.verify import verify_once

    template, target = load_template("row_softmax_cpu"), detect("cpu")
    device = CpuDevice(target)
    for rows, columns in ((5, 1), (3, 7), (70, 33)):
        workload = Workload("row_softmax", {"rows": rows, "columns": columns})
        for config in template.space(workload, target).sample(2, np.random.default_rng(0)):
            kernel = device.load(compile_source(template.kernel(workload, target, config), target).artifact)
            assert verify_once(device, workload, kernel) is None, (workload.label, config)
    device.close()


@pytest.mark.long
def test_the_kernels_for_a_gpu_compile_without_one(installed: Package) -> None:
    pytest.importorskip("numba.cuda", reason="needs Numba-CUDA")
    pytest.importorskip("cuda.bindings.nvjitlink", reason="needs nvJitLink, an extra of schedsearch")
    workload, target = Workload("row_softmax", PARAMS), PRESETS["h200"]
    template = load_template("row_softmax_cuda")
    config = template.default(workload, target, template.space(workload, target))
    for source in (template.kernel(workload, target, config), load_reference("row_softmax").kernel(workload, target)):
        assert compile_source(source, target).resources.spill_bytes == 0


@pytest.mark.gpu
@pytest.mark.xdist_group("device")
def test_the_page_tunes_on_a_gpu(installed: Package, tmp_path: Path) -> None:
    from schedsearch import tune

    importlib.invalidate_caches()
    target: Target = detect("cuda")
    workloads = [Workload("row_softmax", {"rows": rows, "columns": columns}) for rows, columns in ((4096, 1000), (3, 7))]
    summary = tune(workloads, tmp_path / "row_softmax.db", target=target, trials=4, workers=2)
    assert all(task.best_ns for task in summary.tasks)
    with Store.open(tmp_path / "row_softmax.db", readonly=True) as store:
        outcomes = {str(record.measurement.outcome) for w in workloads for record in store.history(workload=w)}
    assert outcomes == {"ok"}
