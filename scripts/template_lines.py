"""Writes the table of docs/architecture.md about the size of the templates.

A line counts if it has code; blank lines, comments and docstrings do not count. A template's own modules are named after it.
All others that it imports, directly or through another module, are shared. A function's length counts the lines from its
`def` to its last line, including nested functions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
MARKED = re.compile(r"(<!-- template lines -->\n).*?(<!-- end -->)", re.DOTALL)
PACKAGE = "schedsearch.templates."
TEMPLATES = {  # template -> its module; its other modules are named {module}_...
    name: f"conv2d.{name.removeprefix('conv2d_')}"
    for name in (
        "conv2d_wgmma",
        "conv2d_halo",
        "conv2d_stem",
        "conv2d_tf32x3",
        "conv2d_few_outputs",
        "conv2d_packed",
        "conv2d_reordered",
        "conv2d_tcgen05",
        "conv2d_mma",
        "conv2d_simt",
        "conv2d_cpu",
        "conv2d_cpu_int8",
    )
} | {
    "depthwise_conv2d_planes_cuda": "depthwise_conv2d.cuda_planes",
    "depthwise_conv2d_cuda": "depthwise_conv2d.cuda",
    "depthwise_conv2d_mma": "depthwise_conv2d.cuda_mma",
    "depthwise_conv2d_dw_planes_cuda": "depthwise_conv2d.cuda_dw_planes",
    "depthwise_conv2d_dw_cuda": "depthwise_conv2d.cuda_dw",
    "depthwise_conv2d_dw_mma": "depthwise_conv2d.cuda_dw_mma",
    "data_movement_cuda": "data_movement.cuda",
    "data_movement_cpu": "data_movement.cpu",
    "depthwise_conv2d_both_cuda": "depthwise_conv2d.cuda_both",
    "depthwise_conv2d_cpu": "depthwise_conv2d.cpu",
    "depthwise_conv1d_rows_cuda": "depthwise_conv1d.cuda_rows",
    "depthwise_conv1d_lines_cuda": "depthwise_conv1d.cuda_lines",
    "depthwise_conv1d_any_cuda": "depthwise_conv1d.cuda_any",
    "depthwise_conv1d_cpu": "depthwise_conv1d.cpu",
    "causal_conv1d_token_cuda": "depthwise_conv1d.token",
    "causal_conv1d_update_cuda": "depthwise_conv1d.update",
    "causal_conv1d_update_cpu": "depthwise_conv1d.update",
    "matmul_gemv": "matmul.gemv",
    "matmul_wgmma": "matmul.cuda",
    "matmul_mma": "matmul.cuda",
    "matmul_simt": "matmul.cuda",
    "matmul_tcgen05": "matmul.cuda",
    "matmul_cpu": "matmul.cpu",
    "matmul_cpu_int8": "matmul.cpu",
    "pool2d_planes_cuda": "pool2d.cuda_planes",
    "pool2d_cuda": "pool2d.cuda",
    "pool2d_cpu": "pool2d.cpu",
    "elementwise_cuda": "elementwise.cuda",
    "elementwise_cpu": "elementwise.cpu",
    "softmax_cuda": "softmax.cuda",
    "softmax_cpu": "softmax.cpu",
    "layer_norm_cuda": "layer_norm.cuda",
    "layer_norm_cpu": "layer_norm.cpu",
    "recurrent_cuda": "recurrent.cuda",
    "recurrent_cpu": "recurrent.cpu",
    "squeeze_excite_cuda": "squeeze_excite.cuda",
    "resize_cuda": "resize.cuda",
    "resize_cpu": "resize.cpu",
    "dyn_resize_cuda": "resize.dyn_cuda",
    "dyn_resize_cpu": "resize.dyn_cpu",
    "dyn_strided_slice_cuda": "dyn_strided_slice.cuda",
    "dyn_strided_slice_cpu": "dyn_strided_slice.cpu",
    "gather_cuda": "indexing.cuda",
    "gather_cpu": "indexing.cpu",
    "scatter_cuda": "indexing.cuda",
    "scatter_cpu": "indexing.cpu",
    "topk_cuda": "selection.topk_cuda",
    "topk_cpu": "selection.cpu",
    "nonzero_cuda": "selection.nonzero_cuda",
    "nonzero_cpu": "selection.cpu",
    "arrange_cuda": "arrange.cuda",
    "arrange_cpu": "arrange.cpu",
    "fill_margin_cuda": "arrange.margin",
    "fill_margin_cpu": "arrange.margin",
    "nms_cuda": "detection.cuda",
    "nms_cpu": "detection.cpu",
    "roi_align_cuda": "detection.cuda",
    "roi_align_cpu": "detection.cpu",
    "unique_cuda": "selection.unique_cuda",
    "unique_cpu": "selection.unique_cpu",
    "layout_transform_cuda": "layout_transform.cuda",
    "layout_transform_cpu": "layout_transform.cpu",
}


@dataclass(frozen=True)
class Module:
    """A module of the templates: its lines of code, the templates' modules that it imports, its longest function."""

    name: str
    lines: int
    imports: frozenset[str]
    longest: tuple[int, str]

    @classmethod
    def read(cls, name: str) -> Module:
        text = (ROOT / "templates" / f"{name.replace('.', '/')}.py").read_text()
        tree = ast.parse(text)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        longest = max(((node.end_lineno or 0) - node.lineno + 1, node.name) for node in functions) if functions else (0, "")
        return cls(name, len(set(_lines_of_code(tree))), frozenset(_imports(tree)), longest)


def _lines_of_code(tree: ast.Module) -> Iterator[int]:
    docstrings = {
        id(node.body[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and id(node) not in docstrings:
            nested = _lines_of_statements(node)
            yield from range(node.lineno, min(nested, default=(node.end_lineno or node.lineno) + 1))


def _lines_of_statements(node: ast.AST) -> Iterator[int]:
    """The first lines of the statements in a node, without those in other statements."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            yield child.lineno
        else:
            yield from _lines_of_statements(child)


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and f"{node.module}.".startswith(PACKAGE):
            package = f"{node.module}.".removeprefix(PACKAGE)
            for alias in node.names:
                for name in (f"{package}{alias.name}", package.rstrip(".")):
                    if (ROOT / "templates" / f"{name.replace('.', '/')}.py").is_file():
                        yield name
                        break


def closure(name: str, modules: dict[str, Module]) -> set[str]:
    """The names of the module and of all modules that it imports, also indirectly. It adds them to `modules`."""
    found, waiting = set(), [name]
    while waiting:
        current = waiting.pop()
        if current not in found:
            found.add(current)
            if current not in modules:
                modules[current] = Module.read(current)
            waiting += modules[current].imports
    return found


def is_own(module: str, template: str) -> bool:
    return module == TEMPLATES[template] or module.startswith(f"{TEMPLATES[template]}_")


def table() -> str:
    modules: dict[str, Module] = {}
    rows = ["| template | its own lines | shared lines | shared | its longest function |", "|---|---|---|---|---|"]
    for template, module in TEMPLATES.items():
        names = closure(module, modules)
        own = [modules[name] for name in names if is_own(name, template)]
        own_lines, lines = sum(m.lines for m in own), sum(modules[name].lines for name in names)
        length, function = max(m.longest for m in own)
        share = f"{100 * (lines - own_lines) / lines:.0f} %"
        rows.append(f"| `{template}` | {own_lines} | {lines - own_lines} | {share} | {length} (`{function}`) |")
    length, function = max(module.longest for module in modules.values())
    return "\n".join([*rows, "", f"The longest function of all, `{function}`, has {length} lines."])


def main() -> None:
    text = PAGE.read_text()
    PAGE.write_text(MARKED.sub(lambda match: f"{match[1]}{table()}\n{match[2]}", text))


if __name__ == "__main__":
    main()
