"""Builds the wheel and the sdist in dist/, checks both, and tries each extra in an environment of its own.

    python scripts/dist.py                  # every extra but those that bring PyTorch or another CUDA compiler
    python scripts/dist.py network torch    # these extras

The wheel is built from the sdist, so what it holds was in the sdist.
"""

from __future__ import annotations

import configparser
import fnmatch
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
LARGE = ("cu12", "cu13-pinned", "mlir", "torch", "dev")  # gigabytes, or what the environment of the tests has anyway
# extra -> an import that fails without it
IMPORTS = {
    "": "schedsearch.tune, schedsearch.compile",
    "cu12": "import numba_cuda",
    "cu13": "import numba_cuda",
    "cu13-pinned": "import numba_cuda",
    "dashboard": "import schedsearch.dashboard.server, starlette, uvicorn",
    "dev": "import hypothesis, jsonschema, mypy, pytest, xdist",
    "fallback": "import onnxruntime",
    "fleet": "import distributed, schedsearch.fleet.client, schedsearch.fleet.preload",
    "kernel-tuner": "import kernel_tuner, schedsearch.integrations.kernel_tuner",
    "mlir": "import numba_cuda_mlir",
    "network": "import onnx, onnx_ir, onnxscript; schedsearch.build",
    "postgres": "import psycopg, schedsearch.records.postgresql",
    "testing": "import greenlet, schedsearch.testing.op_contract",
    "torch": "import schedsearch.torch; schedsearch.torch.optimize_",
}


def configuration() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    return config


def run(*command: object, cwd: Path = ROOT) -> str:
    """The output of a command.

    Raises:
        SystemExit: the command failed; with its output.
    """
    result = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed with {result.returncode}:\n{result.stdout}{result.stderr}")
    return result.stdout


def build() -> tuple[Path, Path]:
    """The sdist and the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST)
    run(sys.executable, "-m", "twine", "check", "--strict", *DIST.iterdir())
    (sdist,), (wheel,) = DIST.glob("*.tar.gz"), DIST.glob("*.whl")
    return sdist, wheel


def sources(*folders: str) -> list[str]:
    """The files of folders of the repository, by their paths in it; what programs leave there is not among them."""
    files = (file for folder in folders for file in sorted((ROOT / folder).rglob("*")) if file.is_file())
    names = (file.relative_to(ROOT).as_posix() for file in files)
    return [name for name in names if "__pycache__" not in name and not name.endswith((".db", ".pyc"))]


def missing_files(sdist: Path, wheel: Path) -> list[str]:
    """Files of the repository that an installation needs and the archives lack."""
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    patterns = [word.strip() for word in configuration()["options.package_data"]["schedsearch"].split(",")]
    missing = []
    for file in sources("schedsearch", "templates", "tuner", "records"):
        name = file if file.startswith("schedsearch/") else f"schedsearch/{file}"
        of_package = name.removeprefix("schedsearch/")
        if file.endswith(".py") or any(fnmatch.fnmatch(of_package, pattern) for pattern in patterns):
            missing += [f"{name} in {wheel.name}"] * (name not in in_wheel)
            missing += [f"{file} in {sdist.name}"] * (file not in in_sdist)
    missing += [f"{file} in {sdist.name}" for file in ("LICENSE", "README.md", "setup.cfg") if file not in in_sdist]
    return missing


def unmatched_files() -> list[str]:
    """Files in the packages that are no modules and that no pattern of package_data names."""
    patterns = [word.strip() for word in configuration()["options.package_data"]["schedsearch"].split(",")]
    names = [file.removeprefix("schedsearch/") for file in sources("schedsearch") if not file.endswith((".py", ".md"))]
    return [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def try_extra(wheel: Path, extra: str, folder: Path) -> str:
    """Installs the wheel with an extra, imports what it brings, and runs the command; the versions that it printed."""
    run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wanted)
    run(python, "-m", "pip", "check")
    away = folder / "empty"  # not in the repository, whose folders could be imported instead
    away.mkdir()
    run(python, "-c", f"import schedsearch; {IMPORTS[extra]}", cwd=away)
    if "tune" not in run(folder / "bin" / "schedsearch", "--help", cwd=away):
        sys.exit(f"schedsearch --help of [{extra}] does not list tune")
    return run(folder / "bin" / "schedsearch", "--version", cwd=away).strip()


def main() -> None:
    extras = sorted(configuration()["options.extras_require"])
    wanted = sys.argv[1:] or ["", *(extra for extra in extras if extra not in LARGE)]
    if unknown := [extra for extra in wanted if extra not in IMPORTS]:
        sys.exit(f"unknown extras: {', '.join(unknown)}; allowed: {', '.join(extras)}")
    sdist, wheel = build()
    if wrong := [*missing_files(sdist, wheel), *(f"{name} in package_data of setup.cfg" for name in unmatched_files())]:
        sys.exit("missing: " + ", ".join(wrong))
    print(f"{sdist.name} and {wheel.name}: metadata and files are complete")
    for extra in wanted:
        with tempfile.TemporaryDirectory() as folder:
            print(f"[{extra}]: {try_extra(wheel, extra, Path(folder) / 'env')}", flush=True)


if __name__ == "__main__":
    main()
