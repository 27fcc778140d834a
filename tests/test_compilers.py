"""Which compiler makes kernels, and what is said of one that cannot."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from schedsearch.backend import BuildResult, compilers, cuda, kept, other_versions, sharing, toolchain
from schedsearch.backend.build_cache import BuildCache
from schedsearch.cli.doctor import _compiler_problems
from schedsearch.errors import UsageError
from schedsearch.launch import Artifact, Grid, Pointer
from schedsearch.measurement import Resources
from schedsearch.processes.builder import Builder
from schedsearch.target import PRESETS, Target
from schedsearch.template import KernelSource, KernelStep

BOTH = {"numba-cuda": "0.30.4", "numba-cuda-mlir": "0.6.0"}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(compilers.ENVIRONMENT_VARIABLE, raising=False)
    compilers._chosen.cache_clear()
    yield
    compilers._chosen.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, packages: dict[str, str]) -> None:
    """From now on just these packages are installed, of those that make PTX."""
    own = importlib.metadata.version

    def version(name: str) -> str:
        if name in BOTH and name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return packages.get(name) or own(name)

    monkeypatch.setattr(compilers, "version", version)


@pytest.mark.parametrize(
    ("installed", "asked", "taken"),
    [
        (BOTH, "", "numba-cuda"),
        ({"numba-cuda-mlir": "0.6.0"}, "", "numba-cuda-mlir"),
        (BOTH, "numba-cuda-mlir", "numba-cuda-mlir"),
        (BOTH, "numba-cuda", "numba-cuda"),
    ],
)
def test_numba_cuda_is_preferred_unless_the_user_asks_for_another(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], asked: str, taken: str
) -> None:
    install(monkeypatch, installed)
    monkeypatch.setenv(compilers.ENVIRONMENT_VARIABLE, asked)
    assert compilers.usable().package == taken
    made_by = toolchain("cuda")
    assert made_by[taken] == installed[taken] and set(BOTH) & set(made_by) == {taken}


@pytest.mark.parametrize(
    ("installed", "asked", "said"),
    [
        ({}, "", r"needs the package numba-cuda, which is not installed: pip install 'schedsearch\[cu13\]'"),
        (
            {"numba-cuda": "0.30.4"},
            "numba-cuda-mlir",
            r"=numba-cuda-mlir: .*not installed: pip install 'schedsearch\[mlir\]'; or .*=numba-cuda, which is installed$",
        ),
        (
            {"numba-cuda": "0.31.0"},
            "numba-cuda-mlir",
            r"COMPILER=numba-cuda-mlir: .*not installed: pip install 'schedsearch\[mlir\]'$",
        ),
        ({"numba-cuda": "0.31.0"}, "", r"numba-cuda is 0\.31\.0; supported: 0\.30\.\*; pip install"),
        (
            {"numba-cuda": "0.31.0", "numba-cuda-mlir": "0.6.0"},
            "",
            r"numba-cuda is 0\.31\.0; .*; or SCHEDSEARCH_COMPILER=numba-cuda-mlir, which is installed$",
        ),
        ({"numba-cuda-mlir": "0.60.1"}, "", r"numba-cuda-mlir is 0\.60\.1; supported: 0\.6\.\*; pip install"),
        (BOTH, "mlir", r"SCHEDSEARCH_COMPILER is 'mlir'; allowed: numba-cuda, numba-cuda-mlir; unset it"),
    ],
)
def test_a_compiler_that_cannot_be_used_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], asked: str, said: str
) -> None:
    install(monkeypatch, installed)
    monkeypatch.setenv(compilers.ENVIRONMENT_VARIABLE, asked)
    with pytest.raises(UsageError, match=said) as raised:
        Builder(PRESETS["h200"])
    assert "\n" not in str(raised.value)


def test_a_record_of_the_other_compiler_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, BOTH)
    recorded = {"numba-cuda-mlir": "0.6.0", "driver": "580.65"}
    assert other_versions("cuda", recorded) == [
        "numba-cuda-mlir 0.6.0 (now numba-cuda 0.30.4; SCHEDSEARCH_COMPILER=numba-cuda-mlir takes the other)"
    ]
    assert other_versions("cuda", {"numba-cuda": "0.30.3"}) == ["numba-cuda 0.30.3 (now 0.30.4)"]
    assert other_versions("cuda", toolchain("cuda")) == []


def test_doctor_names_the_compilers_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compilers.ENVIRONMENT_VARIABLE, "nvcc")
    assert any("is 'nvcc'; allowed: numba-cuda, numba-cuda-mlir" in each for each in _compiler_problems())
    install(monkeypatch, {"numba-cuda": "0.30.4"})
    monkeypatch.setenv(compilers.ENVIRONMENT_VARIABLE, "numba-cuda-mlir")
    assert any("COMPILER=numba-cuda-mlir: " in each and "not installed: pip" in each for each in _compiler_problems())


def test_both_compilers_share_a_build_cache_but_no_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, BOTH)
    monkeypatch.setattr(sharing, "user_cache", lambda: BuildCache(tmp_path))
    made = list[str]()

    def compiled(source: KernelSource, target: Target) -> BuildResult:
        made.append(compilers.chosen().package)
        return BuildResult(Artifact(made[-1].encode(), cuda.launch_plan(source, target)), Resources(), "", 0.0)

    monkeypatch.setattr(kept, "compile_source", compiled)
    source = KernelSource("cuda", "native", (KernelStep(nothing, (Pointer("y"),), Grid(1), 32),))
    for asked in ("numba-cuda", "numba-cuda-mlir", "numba-cuda", "numba-cuda-mlir"):
        monkeypatch.setenv(compilers.ENVIRONMENT_VARIABLE, asked)
        assert kept.compile_kept(source, PRESETS["h200"]).artifact.code == asked.encode()
    assert made == ["numba-cuda", "numba-cuda-mlir"]


def nothing(y: Any) -> None:
    pass
