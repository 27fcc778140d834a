"""Einsum: for each pair of arrays a product of batches, of arrays with their letters in another order.

A letter that both arrays and what follows have is one of the batch; one of a single array counts rows or columns; one of
both that nothing else has is summed. Letters of one array that nothing else has are summed before. Without a letter to sum
the product is one of elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from schedsearch.network.compositions.composition import Composition, Rewrite, rewrite, shape_of
from schedsearch.network.facts import FLOATS, dtype_of
from schedsearch.network.product_rules import letters_of

if TYPE_CHECKING:
    import onnx_ir as ir


def _einsum(c: Composition) -> str | None:
    arrays = [value for value in c.node.inputs if value is not None]
    if dtype_of(arrays[0]) not in FLOATS:
        return f"reads {dtype_of(arrays[0])}; allowed: {', '.join(FLOATS)}"
    equation = c.node.attributes.get_string("equation", "")
    found = letters_of(equation, [shape_of(each) for each in arrays])
    if isinstance(found, str):
        return found
    terms, result = found
    extents: dict[str, int] = {}
    for array, term in zip(arrays, terms):
        for letter, extent in zip(term, shape_of(array)):
            extents[letter] = max(extents.get(letter, 1), extent)
    named = [_Named(c, array, term).without_repeats().without_ones(extents) for array, term in zip(arrays, terms)]
    while len(named) > 1:
        first, second, *rest = named
        kept = {*result, *(letter for each in rest for letter in each.letters)}
        named = [first.times(second, kept), *rest]
    (last,) = named
    c.finish(last.summed(set(result)).ordered(result, extents))
    return None


class _Named:
    """An array and the letters of its dimensions."""

    def __init__(self, c: Composition, value: ir.Value, letters: str) -> None:
        self.c, self.value, self.letters = c, value, letters

    def _with(self, value: ir.Value, letters: str) -> _Named:
        return _Named(self.c, value, letters)

    def without_repeats(self) -> _Named:
        """The diagonal along letters that occur twice: every (n + 1)-th of n * n numbers."""
        found = self
        while repeated := [letter for letter in found.letters if found.letters.count(letter) > 1]:
            letter = repeated[0]
            first = found.letters.index(letter)
            second = found.letters.index(letter, first + 1)
            others = [place for place in range(len(found.letters)) if place not in (first, second)]
            c = self.c
            moved = c.transpose(found.value, [*others, first, second])
            *rest, rows, columns = shape_of(moved)
            flat = c.reshape(moved, [*rest, rows * columns])
            value = c.slice(flat, len(rest), 0, rows * columns, columns + 1 if rows > 1 else 1)
            found = self._with(value, "".join(found.letters[place] for place in others) + letter)
        return found

    def without_ones(self, extents: Mapping[str, int]) -> _Named:
        """Without dimensions of 1 that are repeated to the extent of their letter elsewhere."""
        shape = shape_of(self.value)
        kept = [place for place, letter in enumerate(self.letters) if shape[place] == extents[letter]]
        letters = "".join(self.letters[place] for place in kept)
        return self._with(self.c.reshape(self.value, [shape[place] for place in kept]), letters)

    def summed(self, kept: set[str]) -> _Named:
        """Without letters that nothing else has."""
        gone = [place for place, letter in enumerate(self.letters) if letter not in kept]
        if not gone:
            return self
        c = self.c
        others = [place for place in range(len(self.letters)) if place not in gone]
        moved = c.transpose(self.value, [*others, *gone])
        shape = shape_of(moved)
        flat = c.reshape(moved, [*shape[: len(others)], int(np.prod(shape[len(others) :]))])
        value = c.reshape(c.last_axis("ReduceSum", flat), shape[: len(others)])
        return self._with(value, "".join(self.letters[place] for place in others))

    def ordered(self, letters: str, extents: Mapping[str, int] | None = None) -> ir.Value:
        """The array with its letters in this order; one that it lacks is a dimension of 1, or repeated."""
        own = [letter for letter in letters if letter in self.letters]
        moved = self.c.transpose(self.value, [self.letters.index(letter) for letter in own])
        sizes = dict(zip(own, shape_of(moved)))
        found = self.c.reshape(moved, [sizes.get(letter, 1) for letter in letters])
        wanted = [] if extents is None else [extents[letter] for letter in letters]
        if extents is None or shape_of(found) == wanted:
            return found
        return self.c.add("Mul", [found, self.c.constant(np.ones(wanted), found)], wanted)

    def times(self, other: _Named, kept: set[str]) -> _Named:
        """The product with another array, summed over letters that nothing else has."""
        first = self.summed(kept | set(other.letters))
        second = other.summed(kept | set(first.letters))
        both = [letter for letter in first.letters if letter in second.letters]
        batch = "".join(letter for letter in both if letter in kept)
        summed = "".join(letter for letter in both if letter not in kept)
        rows = "".join(letter for letter in first.letters if letter not in both)
        columns = "".join(letter for letter in second.letters if letter not in both)
        c, every = self.c, batch + rows + columns
        if not summed:
            return self._with(c.add("Mul", [first.ordered(every), second.ordered(every)]), every)
        one, two = first.ordered(batch + rows + summed), second._as_columns(batch, summed, columns)
        sizes = dict(zip(batch + rows + summed, shape_of(one))) | dict(zip(second.letters, shape_of(second.value)))
        length = int(np.prod([sizes[letter] for letter in summed]))
        leading = [sizes[letter] for letter in batch]
        matrix = c.reshape(one, [*leading, int(np.prod([sizes[letter] for letter in rows])), length])
        y = c.matmul(matrix, two)
        return self._with(c.reshape(y, [sizes[letter] for letter in every]), every)

    def _as_columns(self, batch: str, summed: str, columns: str) -> ir.Value:
        """Matrices [batch, summed, columns]; written as transposed ones where columns come first, which products read as
        they are."""
        c, sizes = self.c, dict(zip(self.letters, shape_of(self.value)))
        leading = [sizes[letter] for letter in batch]
        counts = [int(np.prod([sizes[letter] for letter in letters])) for letters in (summed, columns)]
        if self.letters.startswith(batch + columns):
            return c.swap(c.reshape(self.ordered(batch + columns + summed), [*leading, counts[1], counts[0]]))
        return c.reshape(self.ordered(batch + summed + columns), [*leading, *counts])


REWRITTEN: Mapping[str, Rewrite] = {"Einsum": rewrite(_einsum)}
