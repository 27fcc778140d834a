"""Arguments of `optimize_` and options of the backend: what is wrong raises before anything is done to a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch: make test-integrations installs it")

from torch_support import Clock, db, image, optimize, small  # noqa: E402, F401

import schedsearch.torch as sst  # noqa: E402
from schedsearch.errors import ArgumentError, DatabaseError, UsageError  # noqa: E402
from schedsearch.torch.compiler import backend  # noqa: E402
from schedsearch.torch.layers import tuning  # noqa: E402

pytestmark = pytest.mark.integrations
nn = torch.nn


@pytest.fixture(autouse=True)
def _nothing_is_tuned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without autograd, and where tuning would fail the test."""
    monkeypatch.setattr(tuning, "missing", lambda *given: pytest.fail("something was tuned"))
    with torch.no_grad():
        yield
    torch._dynamo.reset()


# What both take: the argument, its value, the error and its text.
COMMON = [
    ("trials", "64", TypeError, "trials is '64' (str); allowed: an integer, 1 or more"),
    ("trials", True, TypeError, "trials is True (bool); allowed: an integer, 1 or more"),
    ("trials", 2.5, TypeError, "trials is 2.5 (float); allowed: an integer, 1 or more"),
    ("trials", 0, UsageError, "trials 0 is not possible; allowed: an integer, 1 or more"),
    ("trials", -3, UsageError, "trials -3 is not possible; allowed: an integer, 1 or more"),
    ("tune_s", None, TypeError, "tune_s is None (NoneType); allowed: a number of seconds, more than 0"),
    ("tune_s", -1.0, UsageError, "tune_s -1.0 is not possible; allowed: a number of seconds, more than 0"),
    ("tune_s", float("nan"), UsageError, "tune_s nan is not possible; allowed: a number of seconds, more than 0"),
    ("tune", 1, TypeError, "tune is 1 (int); allowed: True or False"),
    ("db", 3, TypeError, "db is 3 (int); allowed: the path of a database, as a string or a pathlib.Path"),
    ("db", b"records.db", TypeError, "db is b'records.db' (bytes); allowed: the path of a database"),
    ("db", "", UsageError, "db is empty; allowed: the path of a database"),
    (
        "allow",
        ("exacd",),
        UsageError,
        "unknown fallback level 'exacd' (did you mean 'exact'?); allowed: exact, other_mode",
    ),
    ("allow", (), UsageError, "allow is empty, so that no kernel may be found; allowed: one level or more"),
    ("allow", None, TypeError, "allow is None (NoneType); allowed: names of levels"),
    ("timer", 1.5, TypeError, "timer is 1.5 (float); allowed: an object with a method ns(runs), or None"),
]
FOR_OPTIMIZE = [
    ("networks", "yes", TypeError, "networks is 'yes' (str); allowed: True or False"),
    ("filter_fn", "conv1", TypeError, "filter_fn is 'conv1' (str); allowed: a function of a module and its name, or None"),
    (
        "filter_fn",
        lambda module, name: re.match("0", name),
        TypeError,
        "filter_fn returns <re.Match object; span=(0, 1), match='0'> (Match) for '0'; allowed: True (the layer may be "
        "swapped) or False; bool(...) makes one of them",
    ),
    ("filter_fn", lambda module, name: None, TypeError, "filter_fn returns None (NoneType) for '0'; allowed: True"),
]
FOR_BACKEND = [
    ("trails", 5, UsageError, "unknown option 'trails' (did you mean 'trials'?); allowed: db, tune, trials"),
    ("networks", True, UsageError, "unknown option 'networks' (did you mean 'network'?); allowed: db"),
    ("mode", "max-autotun", UsageError, "unknown mode 'max-autotun' (did you mean 'max-autotune'?); allowed: default"),
    ("mode", 3, TypeError, "mode is 3 (int); allowed: default, reduce-overhead, max-autotune"),
    ("layers", None, TypeError, "layers is None (NoneType); allowed: True or False"),
    ("network", "off", TypeError, "network is 'off' (str); allowed: True or False"),
    ("report", [], TypeError, "report is [] (list); allowed: a function that takes a Report, or None"),
]


@pytest.mark.parametrize(("name", "value", "kind", "text"), COMMON + FOR_OPTIMIZE)
def test_arguments_of_optimize(optimize: Any, name: str, value: Any, kind: Any, text: str) -> None:
    model = small()
    before, facts = dict(vars(model)), {key: each.clone() for key, each in model.state_dict().items()}
    with pytest.raises(kind, match=re.escape(text)):
        optimize(model, image(), **{"tune": True, name: value})
    assert vars(model) == before
    assert all(torch.equal(each, facts[key]) for key, each in model.state_dict().items())


@pytest.mark.parametrize(("name", "value", "kind", "text"), COMMON + FOR_BACKEND)
def test_options_of_the_backend(tmp_path: Path, name: str, value: Any, kind: Any, text: str) -> None:
    fast = torch.compile(small(), backend=backend.schedsearch, options={"tune": True, "db": tmp_path / "r.db", name: value})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=re.escape(f"{kind.__name__}: {text}")):
        fast(image())
    assert not (tmp_path / "r.db").exists()


def test_the_mode_of_torch_compile_is_checked() -> None:
    fast = torch.compile(small(), backend=backend.schedsearch, mode="max-autotun")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"unknown mode 'max-autotun' \(did you mean"):
        fast(image())


def test_databases_that_cannot_be(optimize: Any, tmp_path: Path) -> None:
    for given, text in (
        (
            {"db": tmp_path / "none.db"},
            r"there is no database .*none.db; give one that schedsearch made, or tune=True to make",
        ),
        ({"db": tmp_path}, r"is a folder; give the file of a database, e.g. .*records.db"),
        ({"db": tmp_path / "no" / "r.db", "tune": True}, r"there is no folder .*no for the database r.db; make it first"),
    ):
        model = small()
        with pytest.raises(DatabaseError, match=text):
            optimize(model, image(), **{"allow": ("exact",), **given})
        fast = torch.compile(model, backend=backend.schedsearch, options=given)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=text):
            fast(image())
        torch._dynamo.reset()
        assert "forward" not in vars(model)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("example", "text"),
    [
        (
            lambda: None,
            "the example has no tensor; got: NoneType; give an input as later calls have it, or a tuple of several",
        ),
        (lambda: (1, 8, 6, 6), "the example has no tensor; got: int"),
        (lambda: image().numpy(), "the example has no tensor; got: ndarray"),
        (lambda: image().to("meta"), "the example is on meta and the model on cpu; give example.to('cpu')"),
        (lambda: image().to_sparse(), "the example is a tensor in the layout sparse_coo; allowed: torch.Tensor, dense"),
        (
            lambda: image(1, 3, 6, 6),
            "to have 8 channels, but got 3 channels instead; the example is float32 [1, 3, 6, 6] on cpu; its parameters are "
            "float32; give an input as later calls have it",
        ),
        (lambda: image().half(), "the example is float16 [1, 8, 6, 6] on cpu; its parameters are float32"),
        (lambda: (image(), image()), "the model fails on the example: Sequential.forward() takes 2 positional arguments"),
    ],
    ids=["none", "shape", "numpy", "device", "sparse", "channels", "dtype", "two"],
)
def test_examples_that_the_model_cannot_take(optimize: Any, example: Any, text: str) -> None:
    model = small()
    before = dict(vars(model))
    with pytest.raises(ArgumentError, match=re.escape(text)):
        optimize(model, example(), tune=True)
    assert vars(model) == before


def test_an_example_of_a_class_of_its_own(optimize: Any) -> None:
    class Picture(torch.Tensor):  # type: ignore[misc, name-defined]
        pass

    with pytest.raises(ArgumentError, match=r"the example is a Picture; allowed: torch.Tensor"):
        optimize(small(), image().as_subclass(Picture))


def test_one_level_may_be_a_text(optimize: Any) -> None:
    assert optimize(small(), image(), allow="default").swapped


def test_a_run_that_fails_leaves_the_model_as_it_was(optimize: Any) -> None:
    class Broken(Clock):
        def ns(self, runs: Any) -> float:
            if self.asked == 2:  # after the layer, when the model is timed with its kernels
                raise KeyboardInterrupt
            return super().ns(runs)

    model = small()
    before = dict(vars(model))
    with pytest.raises(KeyboardInterrupt):
        optimize(model, image(), timer=Broken())
    assert vars(model) == before


def test_only_layers_that_may_be_swapped_are_tuned(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(tuning, "missing", lambda wanted, kernels: asked.extend(name for name, _ in wanted) or [])
    model = nn.Sequential(small(), small()).eval()
    sst.optimize_(
        model, image(), db=db, tune=True, allow=("default",), timer=Clock(), filter_fn=lambda _, name: name == "1.0"
    )
    assert asked == ["1.0"]
