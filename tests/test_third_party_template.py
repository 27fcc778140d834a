"""docs/own-templates.md is correct: exactly its files and commands give a working template in a package of its own."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
from page_support import SCHEDSEARCH, Package, Page

from schedsearch import Config, Workload
from schedsearch.backend import compile_source
from schedsearch.device.detect import detect
from schedsearch.records import Store
from schedsearch.target import PRESETS
from schedsearch.template import KernelSource, load_template

PAGE = Page("own-templates.md")
NAME = "conv2d_1x1_cpu"


def files() -> dict[str, str]:
    uses = [block for block in PAGE.blocks("python") if "pointwise.db" in block]
    return {**PAGE.files(), "use.py": uses[0]}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    package = Package(tmp_path_factory.mktemp("pointwise"), files())
    install, *_ = PAGE.commands()
    package.run_line(install)
    return package


@pytest.fixture(scope="module")
def tuned(package: Package) -> str:
    """Output of the page's `schedsearch tune`."""
    (line,) = [line for line in PAGE.commands() if " tune " in line]
    return package.run_line(line)


def test_the_page_has_all_files_and_commands() -> None:
    assert set(files()) == {"pyproject.toml", "schedsearch_pointwise.py", "pointwise.yaml", "use.py"}
    assert [line.split()[0] for line in PAGE.commands()] == ["pip", "schedsearch", "schedsearch", "python"]


def test_the_template_is_about_sixty_lines_beside_its_imports() -> None:
    lines = [line for line in files()["schedsearch_pointwise.py"].splitlines() if line.strip()]
    assert len([line for line in lines if not re.match(r'(from|import|""")', line)]) <= 68


def test_the_installed_template_is_listed_with_its_package(package: Package) -> None:
    listed = package.run_line("schedsearch templates")
    (line,) = [line for line in listed.splitlines() if line.startswith(NAME)]
    assert "schedsearch_pointwise" in line
    assert "conv2d_cpu " in listed  # beside the built-in ones


def test_without_the_package_the_template_is_unknown(package: Package) -> None:
    assert NAME not in package.run(*SCHEDSEARCH, "templates", installed=False)


@pytest.mark.long
def test_tune_finds_and_records_verified_kernels_of_the_template(package: Package, tuned: str) -> None:
    assert NAME in tuned
    workload = Workload.conv2d(
        n=1, h=28, w=28, c=128, k=200, r=1, s=1, dtype="float32", layout="NHWC", epilogue=("bias", "relu")
    )
    with Store.open(package.folder / "pointwise.db", readonly=True) as store:
        history = store.history(workload=workload, template=NAME)
        best = store.best(workload, detect("cpu").key)
    assert {str(record.measurement.outcome) for record in history} == {"ok"}
    assert len({record.config for record in history}) == 6
    assert best is not None
    assert best.measurement.max_error == 0  # on the integers that verification uses


@pytest.mark.long
def test_compile_deploys_the_kernel_even_where_the_package_is_missing(package: Package, tuned: str) -> None:
    """use.py compares the result with NumPy itself."""
    (line,) = [line for line in PAGE.commands() if line.startswith("python ")]
    for installed in (True, False):
        assert package.run_line(line, installed=installed).split() == [NAME, "exact", "True"]


@pytest.mark.long
def test_awkward_sizes_are_right(package: Package) -> None:
    """The page's own check, which tunes shapes that no tile divides."""
    (check,) = [block for block in PAGE.blocks("python") if "check.db" in block]
    (package.folder / "check.py").write_text(check, encoding="utf-8")
    package.run(sys.executable, "check.py")


@pytest.mark.long
def test_the_template_keeps_the_contract(package: Package) -> None:
    """The page's own test class, run by pytest in the environment with the package."""
    (check,) = [block for block in PAGE.blocks("python") if "TemplateContract" in block]
    (package.folder / "test_pointwise.py").write_text(check, encoding="utf-8")
    ran = package.run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_pointwise.py")
    assert re.search(r"^10 passed", ran, re.MULTILINE), ran


@pytest.mark.long
def test_the_gpu_kernel_of_the_page_compiles() -> None:
    """This needs Numba-CUDA, but no GPU."""
    pytest.importorskip("numba.cuda", reason="needs Numba-CUDA")
    pytest.importorskip("cuda.bindings.nvjitlink", reason="needs nvJitLink, an extra of schedsearch")
    (block,) = [block for block in PAGE.blocks("python") if "multiply_add = device_op" in block]
    scope: dict[str, object] = {"__name__": "page"}
    exec(compile(block, str(PAGE.path), "exec"), scope)
    workload = Workload.conv2d(n=1, h=28, w=28, c=128, k=200, r=1, s=1)
    target = PRESETS["h200"]
    source = scope["kernel"](load_template("conv2d_mma"), workload, target, Config(threads=128))  # type: ignore[operator]
    assert isinstance(source, KernelSource)
    built = compile_source(source, target)
    assert built.resources.spill_bytes == 0
    (step,) = built.artifact.plan.steps
    assert step.grid.work_items == np.ceil(28 * 28 * 200 / 128)
