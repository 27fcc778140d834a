"""Recurrences over steps in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

from schedsearch.constructors import made
from schedsearch.ops.recurrent import RECURRENT, RecurrentParams
from schedsearch.workload import Workload


class CellOptions(TypedDict, total=False):
    """What a step computes; see `recurrent`."""

    activations: Sequence[str] | None
    alpha: Sequence[float] | None
    beta: Sequence[float] | None
    clip: float
    linear_before_reset: bool
    input_forget: bool


def recurrent(
    *,
    cell: str,
    t: int,
    n: int,
    hidden: int,
    direction: str = "forward",
    optional: Sequence[str] = (),
    results: Sequence[str] = ("y",),
    batch_first: bool = False,
    dtype: str = "float32",
    **options: Unpack[CellOptions],
) -> Workload[RecurrentParams]:
    """The recurrence of an LSTM, GRU or RNN of ONNX, behind the product of its input and the input weights.

    Its arguments are `gates` (t, n, directions * gates * hidden), that product with all biases that only add; `r`
    (directions, gates * hidden, hidden), ONNX's R; and those of `optional` in ONNX's shapes. Gates are in ONNX's order.

    Args:
        cell: "lstm", "gru" or "rnn".
        t, n, hidden: steps, rows of the batch, numbers of a state.
        direction: "forward", "reverse" or "bidirectional".
        optional: further arguments: "initial_h", "initial_c" (lstm), "peepholes" (lstm), "sequence_lens" (int32), and "bias"
            (directions, hidden), that of the hidden gate's recurrence (gru with `linear_before_reset`).
        results: "y" (t, directions, n, hidden), "y_h" and "y_c" (directions, n, hidden).
        batch_first: rows come before steps and directions: gates (n, t, ...), y (n, t, directions, hidden), states
            (n, directions, hidden).
        dtype: of all arrays but sequence_lens: float32, float16 or bfloat16. States are float32 between steps.
        activations: of each direction, one after the other, or once for all: sigmoid, tanh, relu, softsign, softplus,
            affine, leaky_relu, thresholded_relu, scaled_tanh, hard_sigmoid or elu; default: the cell's.
        alpha, beta: a number of each activation; default: ONNX's.
        clip: sums of gates are limited to -clip to clip; default 0: they are not.
        linear_before_reset: of gru: the product with the state comes before the reset; default: behind it.
        input_forget: of lstm: the forget gate is 1 - i; default: it has weights of its own.

    Raises:
        WorkloadError: parameters are missing, unknown or impossible; the error lists all mistakes.

    Examples:
        >>> lstm = recurrent(cell="lstm", t=50, n=1, hidden=128, direction="bidirectional", results=("y", "y_h"))
        >>> [output.shape for output in lstm.outputs]
        [(50, 2, 1, 128), (2, 1, 128)]
    """
    return made(RECURRENT, locals())
