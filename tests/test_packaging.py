"""The installation: packages, data files, public names, and the choice of the CUDA extra."""

from __future__ import annotations

import configparser
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points, version
from pathlib import Path
from types import ModuleType

import pytest

import schedsearch

ROOT = Path(__file__).resolve().parents[1]
TOP_FOLDERS = ("schedsearch", "templates", "tuner", "records")
PUBLIC = [
    "ArgumentError",
    "Config",
    "ConfigError",
    "DatabaseError",
    "DatabaseLockedError",
    "DeviceBusyError",
    "DeviceError",
    "DynamicExecutable",
    "Epilogue",
    "Interrupted",
    "Kernel",
    "KernelCache",
    "Launch",
    "Net",
    "NoRecordError",
    "NoValidConfigError",
    "Observer",
    "OperatorError",
    "PlanError",
    "PreparationError",
    "RangeKernel",
    "RegressionError",
    "RunSummary",
    "SchedsearchError",
    "SchemaVersionError",
    "SizedNet",
    "Target",
    "Task",
    "Template",
    "Tunable",
    "UnknownOperatorError",
    "UnsupportedError",
    "UntrustedDatabaseError",
    "UntunedWarning",
    "UnusableRecordError",
    "UsageError",
    "Workload",
    "WorkloadError",
    "WorkloadRange",
    "WrongResultError",
    "arange",
    "batch_matmul",
    "build",
    "build_dynamic",
    "causal_conv1d_update",
    "compile",
    "concat",
    "conv1d",
    "conv2d",
    "coverage",
    "dense",
    "depth_to_space",
    "depthwise_conv1d",
    "depthwise_conv2d",
    "detect",
    "dyn_concat",
    "dyn_resize",
    "dyn_strided_slice",
    "elementwise",
    "expand",
    "explain",
    "fill_margin",
    "folded",
    "gather",
    "layer_norm",
    "layout_transform",
    "load",
    "load_templates",
    "nms",
    "nonzero",
    "own_kernel",
    "pack",
    "pad",
    "plan_tasks",
    "pool2d",
    "recurrent",
    "reshape",
    "resize",
    "roi_align",
    "scatter",
    "softmax",
    "space_to_depth",
    "squeeze_excite",
    "strided_slice",
    "topk",
    "transpose",
    "tunable",
    "tune",
    "unfolded",
    "unique",
    "unpack",
    "where",
]


def _setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _packages() -> dict[str, str]:
    """Package -> folder, of every `__init__.py` in the tree."""
    found = {}
    for top in TOP_FOLDERS:
        for path in (ROOT / top).rglob("__init__.py"):
            folder = path.parent.relative_to(ROOT).as_posix()
            found[folder.replace("/", ".") if top == "schedsearch" else "schedsearch." + folder.replace("/", ".")] = folder
    return found


def test_setup_cfg_lists_every_package() -> None:
    assert sorted(_lines(_setup_cfg()["options"]["packages"])) == sorted(_packages())


def test_setup_cfg_maps_every_package_to_its_folder() -> None:
    """setuptools derives the folder of an unnamed package from its parent's, so packages in other places must be named."""
    named = dict(re.split(r"\s*=\s*", line) for line in _lines(_setup_cfg()["options"]["package_dir"]))

    def folder(package: str) -> str:
        parent, _, name = package.rpartition(".")
        return named[package] if package in named else f"{folder(parent)}/{name}"

    assert {package: folder(package) for package in _packages()} == _packages()


def test_the_public_names_are_these_and_all_resolve() -> None:
    assert schedsearch.__all__ == PUBLIC
    assert [name for name in PUBLIC if getattr(schedsearch, name, None) is None] == []
    assert set(PUBLIC) <= set(dir(schedsearch))


def test_an_author_of_templates_imports_from_one_module() -> None:
    import schedsearch.template as template

    assert [name for name in template.__all__ if getattr(template, name, None) is None] == []
    wanted = {"Knob", "Constraint", "ConfigSpace", "Grid", "Pointer", "Int32", "Int64", "Float32", "Scalar", "TensorMap"}
    assert wanted | {"KernelSource", "KernelStep", "Template", "Reference", "device_op"} <= set(template.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tuen'"):
        _ = schedsearch.tuen


def test_the_version_is_one_string_everywhere() -> None:
    declared = _setup_cfg()["metadata"]["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", declared)
    assert version("schedsearch") == declared
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1] == declared


def test_the_changelog_groups_changes_and_keeps_versions_short() -> None:
    unreleased, *versions = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1:]
    assert set(re.findall(r"^### (.+)$", unreleased, re.MULTILINE)) == {"Added", "Changed", "Fixed"}
    assert all(len(version.splitlines()) <= 40 for version in versions)


def test_the_command_is_installed() -> None:
    assert _lines(_setup_cfg()["options.entry_points"]["console_scripts"]) == ["schedsearch = schedsearch.cli.console:run"]
    (point,) = entry_points(group="console_scripts", name="schedsearch")
    script = f"import sys; sys.argv = ['schedsearch', '--version']; import {point.module} as m; m.{point.attr}()"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert result.stdout.split()[-1] == _setup_cfg()["metadata"]["version"], result.stderr


@pytest.mark.parametrize(("missing", "arguments"), [("click", "--help"), ("pydantic", "workload-schema")])
def test_the_command_names_the_missing_package_of_a_slim_installation(missing: str, arguments: str) -> None:
    script = f"""
import sys
sys.modules[{missing!r}] = None
sys.argv = ['schedsearch', {arguments!r}]
from schedsearch.cli.console import run
run()
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(
        f"schedsearch: this command needs {missing}, which is not installed; install schedsearch"
    )
    assert result.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the tracked and new files, built without the network by the setuptools of the dev extra."""
    tree = tmp_path_factory.mktemp("tree")
    for name in (*TOP_FOLDERS, "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "records*.db"))
        elif source.exists():
            shutil.copy(source, tree / name)
    out = tree / "dist"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", out, "."]
    result = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_the_shipped_records_the_type_marker_and_the_schema(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    expected = {"schedsearch/py.typed", "schedsearch/workload_file/workload.schema.json"}
    expected |= {f"schedsearch/tuned/{path.name}" for path in (ROOT / "schedsearch" / "tuned").glob("*.db")}
    for top in TOP_FOLDERS:
        for path in (ROOT / top).rglob("*.py"):
            relative = path.relative_to(ROOT).as_posix()
            expected.add(relative if top == "schedsearch" else f"schedsearch/{relative}")
    assert expected - names == set()
    assert [name for name in names if name.split("/")[0] in ("templates", "tuner", "records", "tests")] == []
    assert any(name.endswith("LICENSE") for name in names)
    for extra in ("cu12", "cu13", "torch", "dev"):
        assert f"Provides-Extra: {extra}" in metadata


def test_the_wheel_works_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import schedsearch, schedsearch.records, schedsearch.templates, schedsearch.tuner\n"
        f"for module in [m for n, m in sys.modules.items() if n.split('.')[0] == 'schedsearch']:\n"
        f"    assert module.__file__.startswith({str(tmp_path)!r}), module\n"
        "print(schedsearch.Workload.conv2d(n=1, h=8, w=8, c=16, k=16, r=3, s=3).label)"
    )
    # -S leaves out the import hook of the editable install; PYTHONPATH provides numpy and the rest.
    paths = [path for path in sys.path if path.endswith("site-packages")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
    result = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, env=environment, timeout=240)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("conv2d 1x8x8x16")


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_make_dist_tries_every_extra_or_says_that_it_is_large() -> None:
    dist = _script("dist")
    assert set(dist.IMPORTS) - {""} == set(_setup_cfg()["options.extras_require"])
    assert set(dist.LARGE) <= set(dist.IMPORTS)


def test_package_data_names_every_file_in_the_packages_that_is_no_module() -> None:
    assert _script("dist").unmatched_files() == []


@pytest.fixture
def detect_extra() -> ModuleType:
    return _script("detect_extra")


@pytest.mark.parametrize(
    ("driver", "extra"),
    [("580.65.06", "cu13"), ("595.10", "cu13"), ("1000.1", "cu13"), ("575.57.08", "cu12"), ("535.183.01", "cu12"), ("", "")],
)
def test_the_extra_follows_the_driver(detect_extra: ModuleType, driver: str, extra: str) -> None:
    assert detect_extra.extra(driver) == extra


def test_the_driver_is_asked_through_nvidia_smi(
    detect_extra: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two cards the answer has two lines. A driver that does not work answers with an error."""
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    smi.write_text("#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
    smi.chmod(0o755)
    assert detect_extra.driver_version() == "580.65.06"
    smi.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    if not Path("/proc/driver/nvidia/version").exists():
        assert detect_extra.driver_version() == ""


def test_make_installs_the_extra_that_is_found_and_no_other() -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("needs make")

    def plan(goal: str, extra: str) -> str:
        command = [make, "-n", "-B", goal, f"EXTRA={extra}", "VENV=none-here"]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "--editable '.'" in plan("quickstart", "")
    assert "--editable '.[cu12]'" in plan("quickstart", "cu12")
    assert "--editable '.[dev,dashboard,cu12]'" in plan("test", "cu12")
    if sys.platform == "linux":  # the compiler wheels are needed to compile for a GPU that is not here
        assert "--editable '.[dev,dashboard,cu13]'" in plan("test", "")
