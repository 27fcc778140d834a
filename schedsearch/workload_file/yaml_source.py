"""YAML text as plain values with their places, so that a message can show where a mistake is.

The text is composed into ruamel.yaml's node graph, not constructed: nodes know the line and column of keys as well as of
values, and the graph still has duplicate keys. Only maps, lists, text, numbers, booleans and null are accepted. All work is
counted (`limits.Steps`), so that no text takes long.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer, MaxDepthExceededError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from schedsearch.errors import Problem, WorkloadError
from schedsearch.reading import open_input
from schedsearch.typed import JsonObject
from schedsearch.workload_file.limits import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_FILE_BYTES,
    MAX_PROBLEMS,
    MAX_SCALAR_CHARACTERS,
    MERGE_STEPS,
    NODE_STEPS,
    VALUE_STEPS,
    Steps,
    TooMuchWork,
)

MAX_MESSAGE_CHARACTERS = 800

PathKey = tuple["str | int", ...]

_LINE_BREAK = re.compile(r"\r\n|[\n\r\x85\u2028\u2029]")  # the line ends of YAML 1.1 and of ruamel.yaml's marks
_TAG = "tag:yaml.org,2002:"
_TOO_DEEP = "maps, lists and merge keys are nested too deeply; a workload file needs five levels"


@dataclass(frozen=True)
class Span:
    """A stretch of one line; `line` and `column` count from 1, `length` in characters."""

    line: int = 1
    column: int = 1
    length: int = 1


@dataclass(frozen=True)
class LocatedProblem(Problem):
    """A mistake in a file; `key` is "file:line:column"."""

    span: Span = Span()


class WorkloadFileError(WorkloadError):
    """A workload file is wrong. `problems` lists every mistake in the order of the file.

    `str` is one line; `render` shows each mistake under its line of the file.
    """

    problems: tuple[LocatedProblem, ...]

    def __init__(self, problems: Sequence[LocatedProblem], lines: Sequence[str] = ()) -> None:
        self._lines = tuple(lines)
        ordered = sorted(problems, key=lambda problem: (problem.span.line, problem.span.column))
        super().__init__(list[Problem](ordered))

    def render(self) -> str:
        """All mistakes, each as "file:line:column: message" with its line of the file and a caret below."""
        return "\n".join(text for problem in self.problems for text in (str(problem), *self._excerpt(problem.span)))

    def _excerpt(self, span: Span) -> list[str]:
        if not 1 <= span.line <= len(self._lines):
            return []
        start = max(span.column - 80, 1)  # a very long line is shown only around the mistake
        line = self._lines[span.line - 1][start - 1 :][:160]
        line = "".join("\N{REPLACEMENT CHARACTER}" if _is_unprintable(c) and c != "\t" else c for c in line)
        before = line[: span.column - start]
        blank = "".join("\t" if c == "\t" else " " * (2 if unicodedata.east_asian_width(c) in "WF" else 1) for c in before)
        carets = "^" * max(1, min(span.length, len(line) - len(before)))
        return [f"{span.line:6} | {line}", f"       | {blank}{carets}"]


class _CountingComposer(Composer):
    """Counts the nodes while it composes them, so that parsing stops where the budget ends.

    It tells its YAML object where it has arrived, because the reader has forgotten that when an error comes out of it.
    """

    def __init__(self, loader: object) -> None:
        super().__init__(loader)
        self.warn_double_anchors = False  # YAML 1.2 allows it: an alias means the last anchor of its name

    def compose_node(self, parent: object, index: object) -> Node:
        self.loader.arrived = self.parser.peek_event().start_mark
        self.loader.steps.take(NODE_STEPS)
        node: Node = super().compose_node(parent, index)
        return node


class _CountedYaml(YAML):
    """A parser that counts its steps.

    Attributes:
        arrived: the mark of the node at which the parser has arrived; None at the beginning.
    """

    def __init__(self, steps: Steps) -> None:
        super().__init__(typ="safe", pure=True)
        self.max_depth = MAX_DEPTH
        self.Composer: Any = _CountingComposer
        self.steps = steps
        self.arrived: Any = None

    @property
    def span(self) -> Span:
        return Span(self.arrived.line + 1, self.arrived.column + 1) if self.arrived else Span()


class YamlSource:
    """One document of YAML 1.2.

    Attributes:
        name: the name of the file in messages.
        value: the document as dicts, lists, str, int, float, bool and None; None if it is empty.
        problems: duplicate keys, and values of an impossible kind; the caller adds its own.
        steps: the work so far; see `take`.

    Raises:
        WorkloadFileError: the text is not YAML, or reading it takes too much work.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.lines = _LINE_BREAK.split(text)
        self.problems: list[LocatedProblem] = []
        self.value: Any = None
        self.steps = Steps()
        self._spans: dict[PathKey, tuple[Span, Span]] = {}  # path -> of its key (or list item), of its value
        self._span_of: dict[int, Span] = {}  # by the id of a node, which `_root` keeps, as below
        self._entries_of: dict[int, dict[str, tuple[Node, Node]]] = {}
        if len(text) > MAX_FILE_BYTES:
            raise _file_error(name, _too_large())
        yaml = _CountedYaml(self.steps)
        self._scalars = yaml.constructor
        self._root = self._compose(yaml, text)
        if self._root is not None:
            self._record((), self._root, self._root)
            self.value = self._build(self._root, (), ())

    def _compose(self, yaml: _CountedYaml, text: str) -> Node | None:
        """The root of the node graph; None for an empty document."""
        try:
            node: Node | None = yaml.compose(text)
            return node
        except TooMuchWork as error:
            raise self.error(yaml.span, str(error)) from None
        except (MaxDepthExceededError, RecursionError):
            raise self.error(yaml.span, _TOO_DEEP) from None
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            began = f" that begins in line {error.context_mark.line + 1}" if error.context_mark else ""
            context = f" ({error.context}{began})" if error.context else ""
            span = Span(mark.line + 1, mark.column + 1) if mark else Span()
            raise self.error(span, f"this is not YAML: {_plain(error.problem or 'syntax error')}{context}") from None
        except ReaderError as error:
            before = _LINE_BREAK.split(text[: error.position])
            span = Span(len(before), len(before[-1]) + 1)
            raise self.error(span, f"YAML does not allow the character {text[error.position]!a}; remove it") from None
        except YAMLError as error:
            raise self.error(Span(), f"this is not YAML: {error}") from None
        except Exception as error:  # the parser itself fails, e.g. OverflowError for "\\UFFFFFFFF"
            what = f"the parser stops here with {type(error).__name__}: {error}"
            raise self.error(yaml.span, f"this is not YAML: {what}") from None

    def take(self, steps: int, path: PathKey) -> None:
        """Counts steps of work that a value of the file causes.

        Raises:
            WorkloadFileError: the file takes too many; the error points at the value.
        """
        try:
            self.steps.take(steps)
        except TooMuchWork as error:
            raise self.error(self.span(path), str(error)) from None

    def _take(self, steps: int, node: Node) -> None:
        try:
            self.steps.take(steps)
        except TooMuchWork as error:
            raise self.error(self._node_span(node), str(error)) from None

    @classmethod
    def read(cls, path: str | Path) -> YamlSource:
        """Reads a file.

        Raises:
            WorkloadFileError: the file is missing, a directory, a pipe without a writer, unreadable, too large, not UTF-8 or
                not YAML.
        """
        name = str(path)
        if Path(name).suffix.partition(":")[0] == ".py":
            own = "a kernel of your own is tuned from Python, by its method tune"
            raise _file_error(name, f"this is Python; give the path of a workload file, which is YAML ({own})")
        try:
            with open_input(path) as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            raise _file_error(name, "there is no such file; give the path of a workload file") from None
        except IsADirectoryError:
            raise _file_error(name, "this is a directory; give the path of a workload file in it") from None
        except (OSError, ValueError) as error:
            raise _file_error(name, f"the file cannot be read: {getattr(error, 'strerror', None) or error}") from None
        if len(data) > MAX_FILE_BYTES:
            raise _file_error(name, _too_large())
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            before = error.object[: error.start]
            span = Span(before.count(b"\n") + 1, len(before) - before.rfind(b"\n"))
            message = f"byte 0x{error.object[error.start]:02x} is not UTF-8; save the file as UTF-8 text"
            raise WorkloadFileError([_located(name, span, message)]) from None
        return cls(name, text)

    def span(self, path: PathKey, *, key: bool = False) -> Span:
        """The place of a value, or with `key` that of its key. If the value does not exist, the place of the one around
        it.
        """
        while path not in self._spans:
            if not path:
                return Span()
            path, key = path[:-1], False
        return self._spans[path][0 if key else 1]

    def report(self, path: PathKey, message: str, *, key: bool = False) -> None:
        """Adds a problem, unless the same one is already there.

        Raises:
            WorkloadFileError: there are MAX_PROBLEMS of them.
        """
        self._add(self.span(path, key=key), message)

    def _add(self, span: Span, message: str) -> None:
        problem = _located(self.name, span, message)
        if problem in self.problems:
            return
        self.problems.append(problem)
        if len(self.problems) == MAX_PROBLEMS:
            last = max(self.problems, key=lambda each: (each.span.line, each.span.column))
            self.problems.append(_located(self.name, last.span, f"{MAX_PROBLEMS} mistakes; the rest is not looked at"))
            self.raise_problems()

    def error(self, span: Span, message: str) -> WorkloadFileError:
        return WorkloadFileError([_located(self.name, span, message)], self.lines)

    def raise_problems(self) -> None:
        """Raises WorkloadFileError with all reported problems, if there are any."""
        if self.problems:
            raise WorkloadFileError(self.problems, self.lines)

    def _record(self, path: PathKey, key: Node, value: Node) -> None:
        nothing = isinstance(value, ScalarNode) and not value.value and value.style is None  # `key:` with no value after it
        self._spans[path] = (self._node_span(key), self._node_span(key if nothing else value))

    def _node_span(self, node: Node) -> Span:
        if id(node) not in self._span_of:
            self._span_of[id(node)] = self._measured_span(node)
        return self._span_of[id(node)]

    def _measured_span(self, node: Node) -> Span:
        start, end = node.start_mark, node.end_mark
        if isinstance(node, MappingNode) and not node.flow_style and node.value:
            start, end = node.value[0][0].start_mark, node.value[0][0].end_mark  # a block map: its first key
        line = self.lines[start.line] if start.line < len(self.lines) else ""
        stop = end.column if end.line == start.line else len(line.rstrip())
        return Span(start.line + 1, start.column + 1, max(1, stop - start.column))

    def _refuse(self, node: Node, message: str) -> None:
        self._add(self._node_span(node), message)

    def _build(self, node: Node, path: PathKey, parents: tuple[int, ...]) -> Any:
        self._take(VALUE_STEPS, node)
        if len(parents) >= MAX_DEPTH:  # aliases nest deeper than the text does
            raise self.error(self._node_span(node), _TOO_DEEP)
        if id(node) in parents:
            self._refuse(node, f"the anchor &{node.anchor} contains itself; write the value out")
            return None
        parents = (*parents, id(node))
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        if not isinstance(node, (SequenceNode, MappingNode)) or str(node.tag) not in (_TAG + "map", _TAG + "seq"):
            self._refuse(node, f"the tag {node.tag} is not possible in a workload file; remove it")
            return None
        if isinstance(node, SequenceNode):
            values = []
            for index, item in enumerate(node.value):
                self._record((*path, index), item, item)
                values.append(self._build(item, (*path, index), parents))
            return values
        result: JsonObject = {}
        for name, (key, value) in self._entries(node, parents).items():
            self._record((*path, name), key, value)
            result[name] = self._build(value, (*path, name), parents)
        return result

    def _entries(self, node: MappingNode, parents: tuple[int, ...]) -> dict[str, tuple[Node, Node]]:
        """The entries of a map by key: its own, then those that `<<` merges in (YAML 1.1, "Merge Key").

        A map that many others merge is looked at once.
        """
        if id(node) in self._entries_of:
            return self._entries_of[id(node)]
        if len(parents) > MAX_DEPTH:
            raise self.error(self._node_span(node), _TOO_DEEP)
        own: dict[str, tuple[Node, Node]] = {}
        merged: dict[str, tuple[Node, Node]] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                self._refuse(key, "a key must be text, not a map or list")
            elif str(key.tag) == _TAG + "merge":
                for other in value.value if isinstance(value, SequenceNode) else [value]:
                    if not isinstance(other, MappingNode):
                        self._refuse(other, "<< must name a map, or a list of maps, by alias; e.g. <<: *common")
                    elif id(other) in parents:
                        self._refuse(other, f"the anchor &{other.anchor} merges itself; write the value out")
                    else:
                        found = self._entries(other, (*parents, id(other)))
                        self._take(MERGE_STEPS * (1 + len(found) + len(merged)), key)
                        merged = {**found, **merged}
            elif key.value in own:
                first = own[key.value][0].start_mark
                self._refuse(
                    key,
                    f"duplicate key {key.value!r}: first given at line {first.line + 1}; keep one",
                )
            elif self._text(key) is not None:
                own[key.value] = (key, value)  # the text as written: under %YAML 1.1 a plain `n` would be a boolean
        entries = {**merged, **own}
        self._entries_of[id(node)] = entries
        return entries

    def _text(self, node: ScalarNode) -> str | None:
        """The text of a key or value; None after refusing one that is too long or that no table could show."""
        text: str = node.value
        if len(text) > MAX_SCALAR_CHARACTERS:
            self._refuse(node, f"this value is {len(text):,} characters long; at most {MAX_SCALAR_CHARACTERS} make sense")
            return None
        if bad := next((c for c in text if _is_unprintable(c)), None):
            self._refuse(node, f"this text contains the character {bad!a}, which cannot be shown; remove it")
            return None
        return text

    def _scalar(self, node: ScalarNode) -> Any:
        tag = str(node.tag).removeprefix(_TAG)
        text = self._text(node)
        if text is None:
            return None
        if tag in ("str", "timestamp"):  # 2024-01-01 is text here, e.g. as a name
            return text
        if tag not in ("int", "float", "bool", "null"):
            self._refuse(node, f"the tag {node.tag} is not possible in a workload file; remove it")
            return None
        if tag == "int" and len(text) > MAX_DIGITS:
            self._refuse(node, f"this number has {len(text)} digits; at most {MAX_DIGITS} make sense")
            return None
        try:
            return getattr(self._scalars, f"construct_yaml_{tag}")(node)
        except (ValueError, KeyError, IndexError):  # an explicit tag on text of another kind, e.g. !!int three
            self._refuse(node, f"{text!r} does not have the kind of its tag !!{tag}")
            return None


def _is_unprintable(character: str) -> bool:
    """Whether it is a control character, a line separator, or half of a surrogate pair, which no text file can hold."""
    return unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp")


def _too_large() -> str:
    return (
        f"the file is larger than {MAX_FILE_BYTES >> 10} KiB, the limit of a workload file (about 1,000 tasks); "
        "is it one? If so, split it"
    )


def _located(name: str, span: Span, message: str) -> LocatedProblem:
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = f"{message[: MAX_MESSAGE_CHARACTERS // 2]} ... {message[-MAX_MESSAGE_CHARACTERS // 2 :]}"
    return LocatedProblem(f"{name}:{span.line}:{span.column}", message, span)


def _file_error(name: str, message: str) -> WorkloadFileError:
    return WorkloadFileError([LocatedProblem(name, message)])


def _plain(problem: str) -> str:
    """ruamel.yaml's wording of common slips, with the remedy."""
    if "'\\t'" in problem:
        return "a tab is used for indentation; use spaces"
    if "another document" in problem:
        return "a second document begins here; put all tasks under one `tasks:` and remove the `---`"
    if "undefined alias" in problem:
        return f"{problem}; define it above with &name"
    if "mapping values are not allowed" in problem:
        return "this line has a second ': '; put quotes around text that contains ': ', or start a new line"
    return problem
