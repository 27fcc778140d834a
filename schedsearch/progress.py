"""What a call that takes long shows while it goes on: in place on a terminal and in a notebook, as lines elsewhere.

Each public function that may take long opens one `shown()`. Calls within it use the same display, so `build`, which tunes,
shows one. `stage` says what the call does now, for code that knows nothing of its caller. Lines that should stay go through
`Display.say`. All of it goes to standard error. rich is loaded when something is drawn, which quick calls never do.

See docs/decisions/193-one-display-for-all-calls.md.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

from schedsearch.text import MESSAGE_LIMIT, printable, shortened

if TYPE_CHECKING:
    from rich.console import Console

_FIRST_S = 0.5  # a shorter call draws nothing
_BEAT_S = 1.0  # between two drawings at most, so that the clock on the screen goes on
_DRAW_EVERY_S = 0.2  # between two drawings at least, however fast results come
_LINE_EVERY_S = 5.0  # between two lines where nothing can be drawn in place


class Clock:
    """The time of a display, and how its thread waits."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return event.wait(seconds)


CLOCK = Clock()


class Panel(Protocol):
    """What a display shows of a run that can say more than a stage."""

    def headline(self) -> str:
        """What happens, how far it is, and how long it will take."""

    def line(self) -> str:
        """All that a log gets."""

    def table(self, width: int) -> Sequence[str]:
        """Lines below the headline, at most `width` characters wide."""


class Screen(Protocol):
    """A place to show progress.

    Attributes:
        every_s: seconds between two drawings at least.
        in_place: whether a drawing replaces the last one.
    """

    every_s: float
    in_place: bool

    def draw(self, lines: Callable[[int], Sequence[str]]) -> None:
        """Shows lines for a width in characters in place of those before; a log appends the first."""

    def say(self, text: str) -> None:
        """Appends a line that stays."""

    def close(self) -> None:
        """Removes what was drawn in place."""


def _to_stderr(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads it, or it is closed; the call goes on
        print(text, file=sys.stderr, flush=True)


class Log:
    """Lines for files, pipes and terminals that cannot draw.

    Args:
        write: takes a line.
    """

    every_s, in_place = _LINE_EVERY_S, False

    def __init__(self, write: Callable[[str], None] = _to_stderr) -> None:
        self._write = write

    def draw(self, lines: Callable[[int], Sequence[str]]) -> None:
        self._write(lines(MESSAGE_LIMIT)[0])

    def say(self, text: str) -> None:
        self._write(text)

    def close(self) -> None:
        pass


def _silent() -> Screen:
    return Log(lambda text: None)


class Terminal:
    """Draws in place with rich."""

    every_s, in_place = _DRAW_EVERY_S, True

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = console or Console(stderr=True)
        # Lines printed meanwhile appear above the drawing. Standard output may be a file, which must get its lines itself.
        together = sys.stdout is not None and sys.stdout.isatty()
        self._live = Live(console=self._console, auto_refresh=False, transient=True, redirect_stdout=together)

    def draw(self, lines: Callable[[int], Sequence[str]]) -> None:
        from rich.text import Text

        self._live.start()
        self._live.update(Text("\n".join(lines(self._console.width)), no_wrap=True), refresh=True)

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


class Notebook:
    """Draws in place in the output of a cell."""

    every_s, in_place = 2 * _DRAW_EVERY_S, True
    _WIDTH = 120

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, lines: Callable[[int], Sequence[str]]) -> None:
        self._show("\n".join(lines(self._WIDTH)))

    def say(self, text: str) -> None:
        print(text)

    def close(self) -> None:
        if self._handle is not None:
            self._show("")

    def _show(self, text: str) -> None:
        from html import escape

        ipython: Any = importlib.import_module("IPython.display")  # a notebook has it
        shown = ipython.HTML(f"<pre>{escape(text)}</pre>" if text else "")
        if self._handle is None:
            self._handle = ipython.display(shown, display_id=True)
        else:
            self._handle.update(shown)


def screen_here() -> Screen:
    """The screen of this process: a notebook, a terminal, or lines on standard error."""
    try:
        if "IPython" in sys.modules:
            from rich.console import Console

            if Console().is_jupyter:
                return Notebook()
        if sys.stderr is not None and sys.stderr.isatty():
            terminal = Terminal()
            if not terminal._console.is_dumb_terminal:
                return terminal
    except ModuleNotFoundError:  # an installation for deployment has no rich
        pass
    return Log()


class Display:
    """Shows what a call does. Any thread may use it.

    A thread draws at least once in `_BEAT_S`, whatever the call does. This takes half a millisecond of a core with 16 tasks,
    so that it does not show in the times of a CPU.

    Args:
        screen: makes the place to draw, when something is first drawn or said.
        clock: its time.

    Attributes:
        lock: to be held by whoever changes what a panel shows.
    """

    def __init__(self, screen: Callable[[], Screen], clock: Clock | None = None) -> None:
        self._make_screen, self._clock = screen, clock or CLOCK
        self._screen: Screen | None = None
        self.lock = threading.RLock()
        self._stage = ""
        self._panel: Panel | None = None
        self._began_s = self._clock.now()
        self._next_s = self._began_s + _FIRST_S
        self._over = threading.Event()
        self._heart: threading.Thread | None = None

    def stage(self, text: str) -> None:
        """Says what the call does from now on, e.g. "reading model.onnx"."""
        with self.lock:
            self._stage, self._panel = text, None
            self._beat()
        self.refresh()

    def show(self, panel: Panel) -> None:
        """Shows a panel in place of a stage, until the next stage."""
        with self.lock:
            self._panel = panel
            self._beat()
        self.refresh()

    def say(self, text: str) -> None:
        """Shows a line that stays."""
        with self.lock:
            self._where().say(printable(shortened(text, MESSAGE_LIMIT), lines=True))

    def wait(self, text: str) -> None:
        """Says what the call waits for, in a line that stays and as its stage."""
        self.say(text)
        self.stage(text)

    def refresh(self) -> None:
        """Draws what has changed, unless the last drawing was a moment ago."""
        with self.lock:
            now = self._clock.now()
            if now < self._next_s or self._over.is_set() or not (self._panel or self._stage):
                return
            screen = self._where()
            if self._panel is None and not screen.in_place and now - self._began_s < screen.every_s:
                return  # a mistake that is found soon is one line in a log
            self._next_s = now + screen.every_s
            screen.draw(self._lines(screen.in_place))

    def close(self) -> None:
        """Ends the drawing; lines that stayed remain."""
        with self.lock:
            self._over.set()
            if self._screen is not None:
                self._screen.close()
        if self._heart is not None:
            self._heart.join()

    @property
    def elapsed_s(self) -> float:
        return self._clock.now() - self._began_s

    def _lines(self, in_place: bool) -> Callable[[int], Sequence[str]]:
        panel = self._panel
        if panel is None:
            return lambda width: [cut(printable(f"{self.elapsed_s:.0f} s: {self._stage}"), width)]
        if not in_place:
            return lambda width: [printable(panel.line())]
        return lambda width: [cut(printable(panel.headline()), width), *panel.table(width)]

    def _where(self) -> Screen:
        if self._screen is None:
            self._screen = self._make_screen()
        return self._screen

    def _beat(self) -> None:
        if self._heart is None and not self._over.is_set():
            self._heart = threading.Thread(target=self._keep_drawing, name="progress", daemon=True)
            self._heart.start()

    def _keep_drawing(self) -> None:
        wait_s = _FIRST_S
        while not self._clock.wait(self._over, wait_s):
            self.refresh()
            wait_s = _BEAT_S


_current: ContextVar[Display | None] = ContextVar("schedsearch_display", default=None)


@contextlib.contextmanager
def shown(progress: bool = True, say: Callable[[str], None] | None = None) -> Iterator[Display]:
    """The display of a call of the public API. Within another call that has one, that one goes on.

    Args:
        progress: False: nothing is shown, whatever the calls within say.
        say: takes all lines, in place of a screen.
    """
    outer = _current.get()
    if outer is not None:
        yield outer
        return
    display = Display(_silent if not progress else screen_here if say is None else lambda: Log(say))
    token = _current.set(display)
    try:
        yield display
    finally:
        _current.reset(token)
        display.close()


def is_shown() -> bool:
    """Whether a call is under way that has a display, so that calls within it leave the result to it."""
    return _current.get() is not None


def stage(text: str) -> None:
    """Says what is done from now on, if a call is under way that has a display."""
    display = _current.get()
    if display is not None:
        display.stage(text)


def say(text: str) -> None:
    """Shows a line that stays, if a call is under way that has a display."""
    display = _current.get()
    if display is not None:
        display.say(text)


def cut(text: str, width: int) -> str:
    """At most `width` characters, the last an ellipsis if there are more."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"
