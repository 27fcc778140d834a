"""A network on arrays that stay: what `Net.bind` gives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from schedsearch.executable.noted import Notes
from schedsearch.executable.run import Calls
from schedsearch.runtime.repeated import announcer
from schedsearch.runtime.streams import current_stream, raw_stream


class Bound:
    """A network on fixed arrays.

    Args:
        calls: on these arrays.
        inputs: kept, so that their memory stays.
        library: of the first input, whose current stream a run takes.
        written: what PyTorch is told that a run changes, by name.
        device: (cpu or cuda, ordinal).
        lock: of the network, whose runs come one at a time.
        notes: of what kernels found wrong.
        check: `Net.check`, which keeps the network alive.

    Attributes:
        outputs: the arrays that it writes.
    """

    def __init__(
        self,
        calls: Calls,
        outputs: tuple[object, ...],
        inputs: tuple[object, ...],
        library: str,
        written: Sequence[tuple[str, Any]],
        *,
        device: tuple[str, int],
        lock: threading.Lock,
        notes: Notes,
        check: Callable[[], None],
    ) -> None:
        self._calls, self._library, self._device, self._lock, self._notes = calls, library, device, lock, notes
        self._check = check
        self._current_stream = current_stream(library, device)
        self.outputs = outputs
        self._result = outputs[0] if len(outputs) == 1 else outputs
        self._inputs = inputs
        self._announce = announcer(written)  # to PyTorch, which tracks changes of outputs
        self._is_complete = device[0] == "cpu"  # when a launch returns

    def __call__(self, stream: Any = None) -> Any:
        """Runs the network on a stream (default: the library's current one) and returns its outputs.

        Raises:
            IndexRangeError: as a call of the network; on a GPU ask `Net.check`.
            ArgumentError: PyTorch refuses that an output is written.
        """
        if self._announce is not None:
            self._announce()
        if stream is None:
            stream = self._current_stream()
        elif type(stream) is not int:
            stream = raw_stream(stream, self._library, self._device)
        with self._lock:
            self._calls.launch(stream)
            if self._is_complete:
                self._notes.check()
        return self._result

    def check(self) -> None:
        """As `Net.check`."""
        self._check()

    def close(self) -> None:
        """Frees the graph. The net must still be open."""
        self._calls.close()
