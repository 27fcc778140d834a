"""Writes the tables of knobs in docs/templates.md and docs/kernels/ from the docs of the templates' knobs.

A table has the knobs that a template's spaces have for some typical workloads. Knobs that a template takes over from another
one, as those of the kernel that it runs on other arguments, are one row.
"""

from __future__ import annotations

import re
from pathlib import Path

import schedsearch
from schedsearch import (
    dense,
    depthwise_conv1d,
    depthwise_conv2d,
    dyn_strided_slice,
    elementwise,
    layer_norm,
    layout_transform,
    pool2d,
    recurrent,
    resize,
    softmax,
    squeeze_excite,
    transpose,
)
from schedsearch.space import ConfigSpace
from schedsearch.target import PRESETS, Target
from schedsearch.template import Template, load_template
from schedsearch.workload import Workload

PAGE = Path(__file__).resolve().parents[1] / "docs" / "templates.md"
KERNELS = PAGE.parent / "kernels"
MARKED = re.compile(  # the table of a page about a kernel
    r"(?<=<!-- knobs of )(?P<of>\w+)(?P<rest>(?:, as in (?P<inner>\w+))? -->\n).*?(?=<!-- end -->)", re.DOTALL
)
FEW = 6  # values that a table lists
SECTION = re.compile(r"^### `(\w+)`$.*?(?=^#|\Z)", re.DOTALL | re.MULTILINE)
TABLE = re.compile(r"(?<=\| knob \| meaning \|\n\|---\|---\|\n)(\| .*\n)*")
PARTS = {
    "dx_": "dx",
    "dw_": "dw",
    "pack_": "packing",
    "unpack_": "unpacking",
}  # prefix of knobs of a part -> its docs' label
LEAST = 3  # knobs that are worth a row "as in"
CPU = Target("cpu", "a CPU", sms=4, simd_bits=256, l2_bytes=32 << 20)
Docs = dict[str, str]  # of knobs

_INTEGERS = (
    dict(dtype="int8", weight_dtype="int8", out_dtype="int32"),
    dict(groups=32, dtype="int8", weight_dtype="int8", out_dtype="int32"),
    dict(c=24, k=24, dtype="int8", weight_dtype="int8", out_dtype="int32", layout="NCHW24c", weight_layout="OIHW24o24i"),
)


INDEXED = {
    "gather": [schedsearch.gather(x=(1000, 64), indices=(32,))],
    "causal_conv1d_update": [schedsearch.causal_conv1d_update(n=32, c=4096, t=1, taps=4, length=4)],
    "nms": [schedsearch.nms(n=1, classes=3, boxes=100, max_output=10)],
    "roi_align": [schedsearch.roi_align(n=1, c=64, h=32, w=32, rois=10, oh=7, ow=7)],
    "unique": [schedsearch.unique(x=(1000,))],
    "topk": [schedsearch.topk(x=(1, 100_000), k=100)],
    "arange": [schedsearch.arange(bound=100_000)],
    "nonzero": [schedsearch.nonzero(x=(1000, 64))],
    "scatter": [schedsearch.scatter(x=(1000, 64), indices=(32, 1), by="tuples")],
    "dyn_resize": [schedsearch.dyn_resize(n=8, c=64, h=32, w=32, oh=64, ow=64)],
    "fill_margin": [schedsearch.fill_margin(x=(8, 32, 32, 64), margin=(0, 1, 1, 0))],
}


def spaces_of(template_name: str) -> list[ConfigSpace]:
    """The knobs for some workloads that the template supports: convolutions with many channels, small groups, or few
    channels; changes of layout that transpose, and that copy."""
    template = load_template(template_name)
    target = CPU if template.kind == "cpu" else PRESETS["h200"]
    if template.op == "layout_transform":
        images = layout_transform(n=8, c=64, h=32, w=32, layout="NHWC", to="NCHW")
        return [template.space(workload, target) for workload in (images, images.replace(to="NCHW32c"))]
    if "transpose" in template.ops:
        crossing = transpose(x=(8, 64, 64), permutation=(0, 2, 1))
        return [template.space(workload, target) for workload in (crossing, crossing.replace(permutation=(1, 0, 2)))]
    dtype = "float32" if template.kind == "cpu" else "float16"
    if "dense" in template.ops:
        products = [dense(m=m, n=128, k=128, dtype=each) for m in (2, 64) for each in (dtype, "float32", "int8")]
        return _spaces(template, products, target)
    if template.op == "depthwise_conv2d":
        depthwise = depthwise_conv2d(n=8, h=32, w=32, c=64, r=3, s=3, padding=1, dtype=dtype)
        directions = [depthwise.replace(direction=each) for each in ("forward", "grad_input", "grad_weight", "grad_both")]
        directions += [depthwise.replace(layout="NCHW", direction=each) for each in ("forward", "grad_weight", "grad_both")]
        directions.append(depthwise.replace(dtype="int8", weight_dtype="int8"))
        directions += [depthwise.replace(r=7, s=7, padding=3, direction=each) for each in ("forward", "grad_weight")]
        return [template.space(workload, target) for workload in directions if template.validate(workload, target) is None]
    if template.op == "depthwise_conv1d":
        sequences = depthwise_conv1d(n=8, c=64, t=1024, taps=4, dtype=dtype)
        orders = sequences, sequences.replace(layout="NCT")
        wanted = [each.replace(direction=way) for each in orders for way in ("forward", "backward")]
        return [template.space(workload, target) for workload in wanted if template.validate(workload, target) is None]
    if template.op == "pool2d":
        pools = pool2d(n=8, h=32, w=32, c=64, r=3, s=3, padding=1), pool2d(n=8, h=7, w=7, c=64, r=7, s=7, mode="average")
        return [template.space(workload, target) for workload in pools]
    if template.op == "elementwise":
        return [template.space(elementwise(y=(8, 32, 32, 64), expression="relu(a + b)"), target)]
    if template.op == "softmax":
        rows = softmax(x=(64, 1000), dtype=dtype), softmax(x=(8, 80, 64), axis=1, dtype=dtype)
        return [template.space(workload, target) for workload in rows]
    if template.op == "layer_norm":
        return [template.space(layer_norm(x=(64, 1000), dtype=dtype), target)]
    if template.op == "recurrent":
        return [template.space(recurrent(cell="lstm", t=50, n=8, hidden=128, dtype="float32"), target)]
    if template.op == "squeeze_excite":
        return [template.space(squeeze_excite(n=1, c=960, h=7, w=7, squeezed=240), target)]
    if template.op == "resize":
        return [template.space(resize(n=1, c=64, h=32, w=32, oh=64, ow=64), target)]
    if template.op == "dyn_strided_slice":
        return [template.space(dyn_strided_slice(x=(64, 1024)), target)]
    if template.op in INDEXED:
        return [template.space(workload, target) for workload in INDEXED[template.op]]
    many = Workload.conv2d(n=8, h=32, w=32, c=128, k=128, r=3, s=3, padding=1, dtype=dtype)
    others = [many.replace(groups=32), many.replace(c=3), many.replace(c=16, k=16)]
    others += [many.replace(dtype="float32"), many.replace(k=255)]
    others += [many.replace(layout="NCHW", weight_layout="OIHW")]
    others += [each.replace(layout="NCHW", weight_layout="OIHW", output_layout="NHWC") for each in (many, many.replace(c=3))]
    others += [many.replace(**change) for change in _INTEGERS]
    return _spaces(template, [many, *others], target)


def _spaces(template: Template, workloads: list[Workload], target: Target) -> list[ConfigSpace]:
    """Those of the workloads that the template supports on a target, or else on a card with tensor memory."""
    for card in (target, PRESETS["b200"]):
        if taken := [workload for workload in workloads if template.validate(workload, card) is None]:
            return [template.space(workload, card) for workload in taken]
    raise AssertionError(f"no workload for {template.name}")


def docs_of(template_name: str) -> Docs:
    """The knobs of the spaces, in order, with the values that a doc explains marked as code."""
    found: Docs = {}
    for knob in (knob for space in spaces_of(template_name) for knob in space.knobs):
        values = "|".join(value for value in knob.values if isinstance(value, str))
        found.setdefault(knob.name, re.sub(rf"(?<!`)\b({values})(?=:)", r"`\1`", knob.doc) if values else knob.doc)
    return found


def values_of(template_name: str) -> dict[str, str]:
    """The values of the knobs of the spaces, as a table shows them."""
    found: dict[str, dict[int | str | bool, None]] = {}
    for knob in (knob for space in spaces_of(template_name) for knob in space.knobs):
        found.setdefault(knob.name, {}).update(dict.fromkeys(knob.values))
    listed = {name: _listed([*values]) for name, values in found.items()}
    if load_template(template_name).kind == "cpu" and "threads" in listed:
        listed["threads"] = "up to the CPU's"
    return listed


def _listed(values: list[int | str | bool]) -> str:
    if all(isinstance(value, bool) for value in values):
        return "false, true"
    if all(isinstance(value, str) for value in values):
        return ", ".join(f"`{value}`" for value in values[:FEW]) + (", ..." if len(values) > FEW else "")
    ordered = sorted(int(value) for value in values)
    return ", ".join(map(str, ordered)) if len(ordered) <= FEW else f"{ordered[0]} to {ordered[-1]}"


def marked(text: str) -> str:
    """A page about kernels with the tables of today, which have the values of the knobs, too."""

    def table(match: re.Match[str]) -> str:
        values, docs = values_of(match["of"]), docs_of(match["of"])
        inner = docs_of(match["inner"]) if match["inner"] else {}
        shared = [f"`{name}`" for name in docs if name in inner]
        lines = [f"| {', '.join(shared)} | | as in `{match['inner']}` |"] if shared else []
        lines += [f"| `{name}` | {values[name]} | {doc} |" for name, doc in docs.items() if name not in inner]
        return "\n".join([match["of"] + match["rest"] + "| knob | values | meaning |", "|---|---|---|", *lines, ""])

    return MARKED.sub(table, text)


def pages() -> dict[Path, str]:
    """The pages with tables, as they should be."""
    found = {PAGE: page(PAGE.read_text(encoding="utf-8"))}
    return found | {path: marked(path.read_text(encoding="utf-8")) for path in sorted(KERNELS.glob("*.md"))}


def rows(template_name: str, earlier: dict[str, Docs]) -> list[str]:
    """The rows of a template's table. `earlier` are the templates whose tables come before."""
    own = docs_of(template_name)
    found: dict[str, str] = {}  # knob -> the row that it is in
    for other, docs in earlier.items():
        for prefix, label in {"": "", **PARTS}.items():
            doc_of = {prefix + name: f"{label}: {doc}" if label else doc for name, doc in docs.items()}
            shared = [name for name, doc in own.items() if name not in found and doc_of.get(name) == doc]
            part = [name for name in own if name.startswith(prefix)]
            if len(shared) >= LEAST and (len(shared) >= len(docs) - 2 or len(shared) == len(part)):  # two may be rare
                meaning = f"{label}: as in `{other}`" if label else f"as in `{other}`"
                found |= dict.fromkeys(shared, f"| {', '.join(f'`{name}`' for name in shared)} | {meaning} |")
    return list(dict.fromkeys(found.get(name, f"| `{name}` | {doc} |") for name, doc in own.items()))


def page(text: str) -> str:
    """The page with the tables of today."""
    earlier: dict[str, Docs] = {}

    def section(match: re.Match[str]) -> str:
        table = "".join(f"{row}\n" for row in rows(match[1], earlier))
        earlier[match[1]] = docs_of(match[1])
        return TABLE.sub(lambda _: table, match[0], count=1)

    return SECTION.sub(section, text)


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
