"""Mutations of YAML files: of their nodes, and of their bytes.

A document is a tree of `Node`. Unlike plain data it can have duplicate keys, anchors, aliases, merge keys and tags, and
scalars are text that is written as it is.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

ODD_SCALARS = (
    "~", "null", "''", "true", "no", "0", "-1", "1e3", "1.5", ".nan", ".inf", "-.inf", "0x10", "0o17", "1_000", "0b101",
    "9" * 20, "9" * 400, "-" + "9" * 5000, "1e400", "1e-400", "2147483647", "2147483648", "9223372036854775808", "1e308",
    "4294967296", "65536", "1:30", "2024-01-01", "2024-01-01T00:00:00Z", "!!int three", "!!python/object:os.system x",
    "!!python/name:os.system", "!!binary aGVsbG8=", "!!float 1", "!!str 1", "!!null x", "!!bool maybe", "!!set {a, b}",
    "!!omap [a: 1]",
    "!!timestamp x", "!<tag:yaml.org,2002:int> 0x", "!local x", '"\\ud800"', '"\\0"', '"\\e[31mred\\e[0m"', '"\\u202e"',
    '"\\x7f"', "'a\u2028b'", '"\\U0010ffff"', "é", "\u00a0", "😀", "|\n  block\n  text", ">-\n  folded", "[]", "{}", "[[]]",
    "__import__('os')", "${HOME}", "%s%s%n", "../../../etc/passwd", "/dev/zero", "cpu", "cuda", "cuda:99", "h200", "auto",
    "float16", "float32", "float64", "int8", "bfloat16", "NHWC", "NCHW", "conv2d", "matmul", "foreign", "xgb", "random",
    "grid",
    "conv2d_cpu", "conv2d_wgmma", "relu", "bias", "clip", "residual", "2h", "10m", "-5s", "1e99h", "0s", "inf", "90000h",
    "cold-graph-v1", "same", "*a", "*missing", "&a", "<<", "=", "?", "- x", "#", "@", "`", "%", "!", "&a &b x", "x: y: z",
)  # fmt: skip


@dataclass
class Node:
    """A scalar (`value` is its text), a list (of nodes) or a map (list of pairs of nodes), or an alias (`value` starts
    with *).
    """

    value: Any
    anchor: str = ""
    tag: str = ""

    @property
    def is_map(self) -> bool:
        return isinstance(self.value, list) and bool(self.value) and isinstance(self.value[0], tuple)

    @property
    def is_list(self) -> bool:
        return isinstance(self.value, list) and not self.is_map

    def copy(self) -> Node:
        if self.is_map:
            return Node([(key.copy(), value.copy()) for key, value in self.value], self.anchor, self.tag)
        if self.is_list:
            return Node([item.copy() for item in self.value], self.anchor, self.tag)
        return Node(self.value, self.anchor, self.tag)


def scalar(value: Any) -> Node:
    return Node("~" if value is None else str(value).lower() if isinstance(value, bool) else _quoted(str(value)))


def _quoted(text: str) -> str:
    plain = text and all(c.isalnum() or c in "_. -/" for c in text) and text.strip() == text and text[0] not in "-. "
    return text if plain else "'" + text.replace("'", "''") + "'"


def from_data(value: Any) -> Node:
    """The tree of plain data, as a YAML reader gives it."""
    if isinstance(value, dict):
        return Node([(scalar(key), from_data(item)) for key, item in value.items()]) if value else Node("{}")
    if isinstance(value, list):
        return Node([from_data(item) for item in value])
    return Node(repr(value)) if type(value) in (int, float) else scalar(value)


def to_text(node: Node, flow: bool, indent: int = 0) -> str:
    """The YAML text of a tree, in block style, or in flow style below some depth."""
    head = "".join(f"{mark}{name} " for mark, name in (("&", node.anchor), ("", node.tag)) if name)
    if node.is_map and flow:
        return head + "{" + ", ".join(f"{to_text(key, True)}: {to_text(item, True)}" for key, item in node.value) + "}"
    if (node.is_list and flow) or not node.value:
        return (
            head + "[" + ", ".join(to_text(item, True) for item in node.value) + "]"
            if isinstance(node.value, list)
            else head
        )
    pad = "\n" + "  " * indent
    if node.is_map:
        deep = indent > 8
        return head + "".join(f"{pad}{to_text(key, True)}: {to_text(item, deep, indent + 1)}" for key, item in node.value)
    if node.is_list:
        return head + "".join(f"{pad}- {to_text(item, indent > 8, indent + 1)}" for item in node.value)
    return head + str(node.value)


def places(node: Node) -> Iterator[tuple[Node, int]]:
    """Every (collection, index) of a tree."""
    stack = [node]
    while stack:
        at = stack.pop()
        if isinstance(at.value, list):
            for index, item in enumerate(at.value):
                yield at, index
                stack += item if isinstance(item, tuple) else (item,)


def mutate(root: Node, others: list[Node], rng: random.Random) -> Node:
    """A copy of a tree with one random change."""
    root = root.copy()
    found = list(places(root))
    if not found:
        return random_node(rng)
    at, index = rng.choice(found)
    change: Callable[..., None] = rng.choice(_CHANGES)
    change(at, index, root, others, rng)
    return root


def mutated(trees: list[Node], rng: random.Random) -> bytes:
    """The text of one of the trees after a few changes."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)  # trees may be as deep as a reader should refuse
    try:
        tree = rng.choice(trees)
        for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
            tree = mutate(tree, trees, rng)
        return to_text(tree, flow=rng.random() < 0.3).encode("utf-8", "replace") + b"\n"
    finally:
        sys.setrecursionlimit(before)


def item_of(at: Node, index: int) -> Node:
    item = at.value[index]
    node: Node = item[1] if isinstance(item, tuple) else item
    return node


def _put(at: Node, index: int, node: Node) -> None:
    at.value[index] = (at.value[index][0], node) if isinstance(at.value[index], tuple) else node


def random_node(rng: random.Random, depth: int = 0) -> Node:
    kind = rng.random()
    if depth > 3 or kind < 0.7:
        return Node(rng.choice(ODD_SCALARS) if rng.random() < 0.8 else str(rng.randrange(-10, 1 << rng.randrange(1, 70))))
    if kind < 0.85:
        return Node([random_node(rng, depth + 1) for _ in range(rng.randrange(4))])
    return Node([(random_node(rng, 9), random_node(rng, depth + 1)) for _ in range(rng.randrange(1, 4))])


def _delete(at: Node, index: int, root: Node, others: list[Node], rng: random.Random) -> None:
    del at.value[index]


def _duplicate(at: Node, index: int, root: Node, others: list[Node], rng: random.Random) -> None:
    item = at.value[index]
    copy = tuple(part.copy() for part in item) if isinstance(item, tuple) else item.copy()
    for _ in range(rng.choice((1, 1, 1, 2, 30))):
        at.value.insert(rng.randrange(len(at.value) + 1), copy)


def _replace(at: Node, index: int, root: Node, others: list[Node], rng: random.Random) -> None:
    _put(at, index, random_node(rng))


def _swap(at: Node, index: int, root: Node, others: list[Node], rng: random.Random) -> None:
    other, place = rng.choice(list(places(root)))
    first, second = item_of(at, index).copy(), item_of(other, place).copy()
    _put(at, index, second)
    _put(other, place, first)


def _graft(at: Node, index: int, root: Node, others: list[Node], rng: random.Random) -> None:
    _put(at, index, item_of(*rng.choice(list(places(rng.choice(others))))).copy())


def _rename(at: Node, index: int, root: Node, others: list[Node], rng: random.Random) -> None:
    item = at.value[index]
    target = item[0] if isinstance(item, tuple) else item
    text = str(target.value)
    place = rng.randrange(len(text) + 1)
    target.value = rng.choice(
        (
            lambda: text[:place] + text[place + 1 :],
            lambda: text[:place] + rng.choice("abxyz_01 -.é\u200b") + text[place:],
            lambda: text.upper(),
            lambda: text + "s",
            lambda: rng.choice(ODD_SCALARS),
            lambda: text[::-1],
            lambda: text * rng.choice((2, 100, 3000)),
        )
    )()


def _nest(at: Node, index: int, root: Node, others: list[Node], rng: random.Random) -> None:
    inner = item_of(at, index).copy()
    for _ in range(rng.choice((1, 1, 2, 5, 40))):
        inner = Node([inner]) if rng.random() < 0.7 else Node([(Node("a"), inner)])
    _put(at, index, inner)


def _unnest(at: Node, index: int, root: Node, others: list[Node], rng: random.Random) -> None:
    inner = item_of(at, index)
    if isinstance(inner.value, list) and inner.value:
        _put(at, index, item_of(inner, rng.randrange(len(inner.value))).copy())


def _alias(at: Node, index: int, root: Node, others: list[Node], rng: random.Random) -> None:
    """An anchor somewhere, and an alias to it somewhere else: perhaps inside itself, or before it."""
    name = rng.choice("abc")
    item_of(*rng.choice(list(places(root)))).anchor = name
    _put(at, index, Node(f"*{name} "))


def _merge(at: Node, index: int, root: Node, others: list[Node], rng: random.Random) -> None:
    """A merge key: of an anchored map, of itself, of a list, or of something that is no map."""
    name = rng.choice("abc")
    target = item_of(*rng.choice(list(places(root)))) if rng.random() < 0.8 else at
    target.anchor = name
    merged = Node(f"*{name} ") if rng.random() < 0.6 else Node([Node(f"*{name} ")] * rng.choice((1, 2, 9)))
    if at.is_map:
        at.value.insert(rng.randrange(len(at.value) + 1), (Node("<<"), merged))
    else:
        _put(at, index, Node([(Node("<<"), merged), (Node("n"), Node("1"))]))


def _bomb(at: Node, index: int, root: Node, others: list[Node], rng: random.Random) -> None:
    """Anchors that each name the one before several times: by aliases, or by merge keys of maps.

    They are small enough for any reader; the fuzzer lowers the limit of steps.
    """
    width, depth = rng.choice(((2, 8), (9, 3), (3, 5), (50, 2)))
    merging = rng.random() < 0.6
    levels = [Node([(Node("k0"), Node("1"))] if merging else [Node("1")], anchor="z0")]
    for level in range(1, depth):
        names = [Node(f"*z{level - 1} ") for _ in range(width)]
        value: list[Any] = list(names)
        if merging:
            value = [(Node("<<"), Node(names)), (Node(f"k{level}"), Node("1"))]
        levels.append(Node(value, anchor=f"z{level}"))
    _put(at, index, Node(levels))


def _tag(at: Node, index: int, root: Node, others: list[Node], rng: random.Random) -> None:
    item_of(at, index).tag = rng.choice(
        ("!!int", "!!str", "!!map", "!!seq", "!!set", "!!python/object/apply:os.system", "!x", "!")
    )


def _widen(at: Node, index: int, root: Node, others: list[Node], rng: random.Random) -> None:
    count = rng.choice((3, 30, 300)) if rng.random() < 0.95 else rng.choice((3000, 3000, 120_000))  # these take a second
    _put(at, index, Node([Node(str(number)) for number in range(count)]))


def _tweak(at: Node, index: int, root: Node, others: list[Node], rng: random.Random) -> None:
    """A scalar becomes another one of its kind, so that many files stay right."""
    node = item_of(at, index)
    if isinstance(node.value, list):
        return
    if str(node.value).isdigit():
        node.value = str(rng.choice((1, 2, 3, 4, 7, 8, 9, 16, 31, 64, 100, 4096)))
    else:
        found = [item_of(*place) for place in places(rng.choice(others))]
        node.value = rng.choice([each.value for each in found if not isinstance(each.value, list)])


_CHANGES: tuple[Callable[..., None], ...] = (
    *(_tweak,) * 14,
    *(_delete, _duplicate, _replace, _replace, _replace, _swap, _swap, _graft, _graft, _rename, _rename, _rename),
    *(_nest, _unnest, _alias, _alias, _merge, _merge, _tag, _bomb, _widen),
)  # fmt: skip


def mutate_bytes(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Bytes with one random change."""
    at, stop = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    return rng.choice(_BYTE_CHANGES)(data, at, stop, others, rng)


def _splice(data: bytes, at: int, stop: int, others: list[bytes], rng: random.Random) -> bytes:
    other = rng.choice(others)
    start = rng.randrange(len(other) + 1)
    return data[:at] + other[start : start + rng.randrange(200)] + data[at if rng.random() < 0.5 else stop :]


_PIECES = (
    *(b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\x1b[2J", b"\r", b"\x85", b"\xc2\x85", b"\xe2\x80\xa8", b"\t", b": "),
    *(b"- ", b"{", b"}", b"[", b"]", b"&a ", b"*a ", b"<<: ", b"!", b"|\n", b">\n", b"#", b"'", b'"', b"?", b","),
    *(b"\n---\n", b"\n...\n", b"%YAML 1.1\n---\n"),
)
_HEADS = (b"", b"\xef\xbb\xbf", b"%YAML 1.1\n---\n", b"%TAG ! tag:x,2000:\n---\n", b"---\n---\n")
_ENCODINGS = ("utf-16", "utf-32", "latin-1", "utf-16-be")
_LINE_ENDS = (b"\r\n", b"\r", b"\n\n", b"\n \n", b"\n\t")
# Each gets the bytes, two places in order, other files and the generator.
_BYTE_CHANGES: tuple[Callable[[bytes, int, int, list[bytes], random.Random], bytes], ...] = (
    lambda d, a, s, o, r: d[:a] + bytes([d[a] ^ 1 << r.randrange(8)]) + d[a + 1 :] if a < len(d) else d,
    lambda d, a, s, o, r: d[:a] + bytes([r.randrange(256)]) + d[a + 1 :],
    lambda d, a, s, o, r: d[:a],
    lambda d, a, s, o, r: d[:a] + d[min(s, a + 20) :],
    lambda d, a, s, o, r: d[:a] + r.choice(_PIECES) + d[a:],
    _splice,
    _splice,
    lambda d, a, s, o, r: d[:a] + d[a:s] * r.choice((2, 3, 50)) + d[s:],
    lambda d, a, s, o, r: d.decode("utf-8", "replace").encode(r.choice(_ENCODINGS), "replace"),
    lambda d, a, s, o, r: d.replace(b"\n", r.choice(_LINE_ENDS)),
    lambda d, a, s, o, r: r.choice(_HEADS) + d,
    lambda d, a, s, o, r: d[:a] + b"# a comment of a line\n" * r.choice((1, 50, 500)) + d[a:],
)
