"""The machine code of a trial as text: SASS of a GPU kernel, assembly of a CPU kernel.

NVIDIA's `nvdisasm` and GNU's `objdump` read it, where they are installed. They get only code that this machine compiled:
programs that parse binary files are no place for the files of strangers.
"""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import tempfile
import threading
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from schedsearch.errors import DeviceError, SchedsearchError, UntrustedDatabaseError
from schedsearch.launch import Artifact
from schedsearch.measure.tools import run_tool
from schedsearch.records.store import Store

MOST_CHARACTERS = 400_000
_TIMEOUT_S = 5.0
_KEPT = 8
_TOOLKITS = ("CUDA_HOME", "CUDA_PATH")


@dataclass(frozen=True)
class Disassembler:
    """A program that turns machine code into text.

    Attributes:
        listing: what its text is called.
        install: how to get it.
    """

    program: str
    options: tuple[str, ...]
    listing: str
    install: str

    def find(self) -> str | None:
        """Its path: on PATH, in the CUDA toolkit, or among the Python packages; None if it is not installed."""
        toolkits = [Path(os.environ[name]) for name in _TOOLKITS if os.environ.get(name)]
        places = [folder / "bin" / self.program for folder in (*toolkits, Path("/usr/local/cuda"), *_wheels())]
        return next((found for place in (self.program, *map(str, places)) if (found := shutil.which(place))), None)


def _wheels() -> list[Path]:
    """Where NVIDIA's wheels for Python put a toolkit, the newest first."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return sorted((toolkit for folder in folders for toolkit in Path(folder).glob("cu*")), reverse=True)


DISASSEMBLERS = {
    "cuda": Disassembler(
        "nvdisasm",
        ("--print-code",),
        "SASS",
        "it comes with the CUDA toolkit, or: pip install nvidia-cuda-nvdisasm",
    ),
    "cpu": Disassembler(
        "objdump",
        ("--disassemble", "--no-show-raw-insn"),
        "Assembly",
        "it is in the package binutils",
    ),
}


@dataclass(frozen=True)
class Listing:
    """A string and its name; or, with an empty text, why there is none in `note`. The note may also say what is missing."""

    name: str = ""
    text: str = ""
    note: str = ""


class Listings:
    """The listings of artifacts in a store; the last ones are kept, so that a page that is drawn again costs nothing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Listing] = OrderedDict()

    def get(self, store: Store, sha256: str, most: int = MOST_CHARACTERS) -> Listing:
        """The listing of stored code, cut after `most` characters. It never raises for what is stored or installed."""
        with self._lock:
            found = self._kept.pop(sha256, None) or _listing_of(store, sha256)
            self._kept[sha256] = found
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return shortened(found, most)


def _listing_of(store: Store, sha256: str) -> Listing:
    try:
        artifact = store.artifact(sha256)
    except UntrustedDatabaseError:
        return Listing(note="Another machine stored the code; only code that was compiled here is disassembled.")
    except SchedsearchError as error:
        return Listing(note=str(error))
    if artifact is None:
        return Listing(note="The code is no longer stored. The command above builds it again.")
    return disassemble(artifact)


def disassemble(artifact: Artifact) -> Listing:
    """Machine code as text, or why there is none."""
    tool = DISASSEMBLERS.get(artifact.plan.kind)
    if tool is None:
        return Listing(note=f"No disassembler is known for code of kind {artifact.plan.kind}.")
    program = tool.find()
    if program is None:
        return Listing(note=f"The code is stored, but {tool.program}, which shows it, is not installed here: {tool.install}")
    try:
        texts = [_run(tool, program, name, code) for name, code in _files(artifact).items()]
    except (DeviceError, OSError, zipfile.BadZipFile) as error:
        return Listing(note=f"The code cannot be shown: {error}")
    return shortened(Listing(tool.listing, "\n\n".join(texts)), MOST_CHARACTERS)


def _files(artifact: Artifact) -> dict[str, bytes]:
    """Name -> ELF file."""
    if artifact.plan.kind == "cuda":
        return {"kernel.cubin": artifact.code}
    with zipfile.ZipFile(io.BytesIO(artifact.code)) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.endswith(".o")}


def _run(tool: Disassembler, program: str, name: str, code: bytes) -> str:
    environment = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8"}
    with tempfile.TemporaryDirectory(prefix="schedsearch-") as folder:
        file = Path(folder, "code")
        file.write_bytes(code)
        command = [program, *tool.options, str(file)]
        status, text = run_tool(tool.program, command, environment, _TIMEOUT_S, if_missing=tool.install)
    text = text.replace(str(file), name).strip()
    if status:
        raise DeviceError(f"{tool.program} failed with exit code {status}: {text[-300:]}")
    return text


def shortened(listing: Listing, most: int) -> Listing:
    """The whole lines among the first `most` characters."""
    if len(listing.text) <= most:
        return listing
    kept = listing.text[: listing.text.rfind("\n", 0, most) + 1]
    shown, total = kept.count("\n"), listing.text.count("\n") + 1
    return Listing(listing.name, kept, f"{listing.name}: the first {shown:,} of {total:,} lines are shown.")
