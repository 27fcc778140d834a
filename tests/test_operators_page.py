"""docs/networks.md lists every operator of models that networks take, and no other one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from schedsearch.network.contributed import TAKEN as CONTRIBUTED  # noqa: E402
from schedsearch.network.control.sequences import MAKES, READS  # noqa: E402
from schedsearch.network.lower import TAKEN  # noqa: E402
from schedsearch.network.rewrites import REWRITES  # noqa: E402

CONTROL = {"If", "Loop", "Scan", *MAKES, *READS}
CONSTANTS = {"Constant", "ConstantOfShape", "EyeLike", "Range", "Shape", "Size"}  # where shapes are known
PAGE = Path(__file__).parents[1] / "docs" / "networks.md"


def listed(domain: str) -> list[str]:
    (line,) = re.findall(rf"^{re.escape(domain)}: (.*?)\n\n", PAGE.read_text() + "\n", re.MULTILINE | re.DOTALL)
    return re.findall(r"`(\w+)`", line)


@pytest.mark.parametrize(
    ("domain", "taken"),
    [("ONNX", TAKEN | REWRITES.keys() | CONTROL | CONSTANTS), ("com.microsoft", CONTRIBUTED)],
    ids=["onnx", "contributed"],
)
def test_the_page_lists_the_operators_that_networks_take(domain: str, taken: frozenset[str]) -> None:
    assert listed(domain) == sorted(taken), ", ".join(f"`{name}`" for name in sorted(taken))


def test_operators_of_onnx_exist() -> None:
    assert all(onnx.defs.has(name) for name in listed("ONNX"))
