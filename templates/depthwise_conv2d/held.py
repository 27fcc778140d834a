"""What a thread reads before it waits for the kernel in front: its filters and the epilogue's operands, held in registers.

They stay as they lie in memory until they are used, so that no thread waits for them here. The loads are not those of the
non-coherent path, in front of which ptxas would move the wait (`schedsearch.backend.early_launch`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from schedsearch.backend.ops import device_op
from schedsearch.templates.depthwise_conv2d.patches import Patch, filter_pieces
from schedsearch.templates.depthwise_conv2d.ptx_text import VECTOR, WORD_BYTES
from schedsearch.templates.parts.epilogue import Epilogue

MOST_HELD = 8  # registers for operands of the channels of a thread


@dataclass(frozen=True)
class FilterLoad:
    """An access to the filters of a thread in global memory.

    Attributes:
        first, length: elements.
        word: the first register that it fills.
    """

    first: int
    length: int
    word: int
    nbytes: int

    @property
    def words(self) -> int:
        return max(self.length * self.nbytes // WORD_BYTES, 1)


def filter_loads(patch: Patch, steps: tuple[int, int, int]) -> list[FilterLoad]:
    """A load for each tap, if its filters are neighbours in memory; else the taps of a filter are."""
    of_filter, of_row, of_column = steps
    taps = [(row, column) for row in range(patch.tap_h) for column in range(patch.tap_w)]
    places = [(row * of_row + column * of_column, patch.vector) for row, column in taps]
    if of_filter > 1:
        places = [(piece.first, piece.length) for piece in filter_pieces(patch)]
    found, word = list[FilterLoad](), 0
    for first, length in places:
        found.append(FilterLoad(first, length, word, patch.nbytes))
        word += found[-1].words
    return found


def filter_words(patch: Patch, steps: tuple[int, int, int]) -> int:
    """The registers of 32 bits that the filters of a thread fill, as they lie in memory."""
    last = filter_loads(patch, steps)[-1]
    return last.word + last.words


def load_filters(patch: Patch, steps: tuple[int, int, int]) -> Callable[..., None]:
    """Loads the filters of a thread: (filters[filter_words], address of the first one)."""
    lines = []
    for load in filter_loads(patch, steps):
        words = [f"$filters[{load.word + i}]" for i in range(load.words)]
        names = f"{{{', '.join(words)}}}" if len(words) > 1 else words[0]
        kind = {1: "u8", 2: "u16"}.get(load.length * patch.nbytes, "b32")
        lines.append(f"ld.global{VECTOR[len(words)]}.{kind} {names}, [$weights+{load.first * patch.nbytes}];")
    inout = {"filters": ("u32", filter_words(patch, steps))}
    return device_op("load_filters", "\n".join(lines), inout=inout, ins={"weights": "u64"})


def held_operands(patch: Patch, epilogue: Epilogue | None) -> int:
    """The registers that `load_operands` fills with what an epilogue reads for the channels of a thread; 0: too many, or
    none. `finish` then loads them."""
    words = epilogue.stages_of_patch(patch.vector, patch.target).words if epilogue else 0
    return words if words <= MOST_HELD else 0


def load_operands(patch: Patch, epilogue: Epilogue | None) -> Callable[..., None]:
    """Loads what the epilogue reads for the channels of a thread: (words[held_operands], first channel, *operands). Nothing
    is loaded if there are no held operands, and there is one word."""
    words = held_operands(patch, epilogue)
    stages = epilogue.stages_of_patch(patch.vector, patch.target) if epilogue else None
    ins = {"k": "i32", **(dict(stages.ins) if stages else {})}
    text, unused = "\n".join(stages.load_words) if stages and words else "", ins if words else {**ins, "words": ""}
    return device_op("load_operands", text, inout={"words": ("u32", max(words, 1))}, ins=ins, unused=unused)
