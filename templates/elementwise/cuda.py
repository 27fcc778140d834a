"""elementwise on NVIDIA GPUs: see docs/kernels/bandwidth.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from schedsearch.config import Config
from schedsearch.launch import Grid, Pointer
from schedsearch.launch_rules import MAX_GRID_X
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.ops.elementwise import ElementwiseParams, Read, reads_of, typed_of
from schedsearch.ops.expression_types import is_whole, stored
from schedsearch.space import Columns, ConfigSpace, Constraint, Knob
from schedsearch.target import Target
from schedsearch.template import KernelSource, KernelStep, Template
from schedsearch.templates.elementwise.broadcast import Spread
from schedsearch.templates.elementwise.float32_functions import nearest
from schedsearch.templates.elementwise.programs import program
from schedsearch.templates.parts import ptx, vectors, whole_vectors
from schedsearch.templates.parts.casts import f32, i64, u32, u64
from schedsearch.templates.parts.slices import place_of, vector_limits
from schedsearch.templates.parts.vectors import LEAST_CAPABILITY, MOST_BYTES
from schedsearch.workload import Workload

THREADS = (64, 128, 256, 512)
UNROLLS = (1, 2, 4)
_HELD_WORDS = 64  # registers of loads in flight


class ElementwiseCuda(Template[ElementwiseParams]):
    """A thread loads vectors of every input, computes, and stores a vector."""

    name = "elementwise_cuda"
    version = 1
    op = "elementwise"
    kind = "cuda"

    def validate(self, workload: Workload[ElementwiseParams], target: Target) -> str | None:
        if problem := target.older_than(LEAST_CAPABILITY):
            return problem
        blocks = workload.output.size // THREADS[0]
        return None if blocks < MAX_GRID_X else f"y has {workload.output.size} elements; allowed: less than 2**37"

    def space(self, workload: Workload[ElementwiseParams], target: Target) -> ConfigSpace:
        knobs = (
            Knob("vector", _vectors(workload), "neighbouring elements of y"),
            Knob("unroll", UNROLLS, "vectors of a thread that are loaded before the first is computed"),
            Knob("threads", THREADS, "threads of a block"),
        )
        words = {
            vector: sum(_words_of(read, vector, workload) for read in reads_of(workload.params))
            for vector in _vectors(workload)
        }

        def held_words(k: Columns) -> Any:
            return k["unroll"] * np.array([words[int(vector)] for vector in np.ravel(k["vector"])])

        rules = (
            Constraint(
                f"loads in flight take at most {_HELD_WORDS} registers",
                lambda k: (k["held_words"] <= _HELD_WORDS) | ((k["unroll"] == 1) & (k["vector"] == 1)),
            ),
        )
        return ConfigSpace(knobs, rules, {"held_words": held_words})

    def default(self, workload: Workload[ElementwiseParams], target: Target, space: ConfigSpace) -> Config:
        """Accesses of 16 bytes by most arrays, two vectors of a thread if there are many, blocks of 256 threads."""
        sizes = [spec.dtype for spec in (*workload.signature, workload.output) if spec.size == workload.output.size]
        wanted = MOST_BYTES // max(dtype_of(dtype).nbytes for dtype in sizes)
        vector = max(n for n in _vectors(workload) if n <= max(wanted, 4))
        waves = workload.output.size // (vector * target.sms * target.threads_per_sm)
        for unroll in (2 if waves >= 4 else 1, 1):
            config = Config(vector=vector, unroll=unroll, threads=256 if waves else 128)
            if not space.check(config):
                return config
        return Config(vector=1, unroll=1, threads=256)

    def plain(self, workload: Workload[ElementwiseParams], target: Target, space: ConfigSpace) -> Config | None:
        """One element of y a thread."""
        return Config(vector=1, unroll=1, threads=128)

    def kernel(self, workload: Workload[ElementwiseParams], target: Target, config: Config) -> KernelSource:
        vector, unroll, threads = config["vector"], config["unroll"], config["threads"]
        function = elementwise_kernel(workload, vector, unroll, threads)
        params = (Pointer("y"), *(Pointer(spec.name) for spec in workload.signature))
        step = KernelStep(function, params, Grid(-(-workload.output.size // (vector * unroll * threads))), threads)
        y_bytes = min(vector * dtype_of(workload.params.out_dtype).nbytes, MOST_BYTES)
        alignments = {"y": y_bytes} | {
            read.name: min(Spread.of(read, workload.params.y).pieces(vector)[0] * dtype_of(read.dtype).nbytes, MOST_BYTES)
            for read in reads_of(workload.params)
        }
        return KernelSource("cuda", "native", (step,), alignments=alignments)


def elementwise_kernel(workload: Workload[ElementwiseParams], vector: int, unroll: int, threads: int) -> Callable[..., None]:
    """The kernel (y, *inputs). Vectors of neighbouring threads are neighbours."""
    p = workload.params
    size = workload.output.size
    position = u32 if max(size, *(spec.size for spec in workload.signature)) < 2**31 else u64
    fetch, widen, held = _fetches(workload, vector, position)
    functions = nearest(_nearest_whole, ptx.multiply_f32)
    found = typed_of(p)
    compute = program(stored(found, p.out_dtype), [spec.name for spec in workload.signature], functions)
    whole_out = is_whole(p.out_dtype) or (found.whole and not dtype_of(p.out_dtype).is_float)
    number_out = i64 if whole_out else f32
    words_out, out_bytes, inputs = (
        vectors.words_of(p.out_dtype, vector),
        dtype_of(p.out_dtype).nbytes,
        len(workload.signature),
    )
    pack = whole_vectors.pack(p.out_dtype, vector) if whole_out else vectors.pack(p.out_dtype, vector)
    store = vectors.store(p.out_dtype, vector)
    all_held, numbers, items = held * unroll, vector * inputs, size // vector
    wholes = max(vector * len(found.whole_inputs), 1)
    env, place = _env(workload, vector), place_of(workload.output)

    def apply(y, *arrays) -> None:  # type: ignore[no-untyped-def]
        word = cuda.local.array(all_held, u32)
        number = cuda.local.array(numbers, f32)
        whole = cuda.local.array(wholes, i64)
        result = cuda.local.array(vector, number_out)
        rounded = cuda.local.array(words_out, u32)
        first = position(cuda.blockIdx.x) * position(threads * unroll) + position(cuda.threadIdx.x)
        for i in range(unroll):
            item = position(first + position(i * threads))
            fetch(word, i * held, arrays, position(item * position(vector)), item < position(items))
        for i in range(unroll):
            item = position(first + position(i * threads))
            if item < position(items):
                widen(word, i * held, number, whole)
                for e in range(vector):
                    result[e] = compute(env(number, whole, e))
                pack(result, 0, rounded, 0)
                to = place(u64(u64(item) * u64(vector)))
                store(rounded, 0, y + u64(u64(to) * u64(out_bytes)))

    return apply


def _nearest_whole(x: Any) -> Any:
    """Beyond 2^23 float32 has no fractions."""
    magnitude = f32(abs(x))
    if not magnitude < f32(8388608.0):
        return x
    whole = f32(f32(magnitude + f32(8388608.0)) - f32(8388608.0))
    return f32(-whole) if x < f32(0) else whole


def _fetches(
    p: Workload[ElementwiseParams], vector: int, position: Any
) -> tuple[Callable[..., None], Callable[..., None], int]:
    """`fetch(words, at, arrays, place, valid)` loads a vector of every input, and `widen(words, at, numbers, wholes)` makes
    float32 or integers of it; and how many words the vectors take.
    """
    fetch: Callable[..., None] = _fetch_nothing
    widen: Callable[..., None] = _widen_nothing
    held = 0
    for slot, read in enumerate(reads_of(p.params)):
        spread = Spread.of(read, p.params.y)
        count, pieces = spread.pieces(vector)
        apart = 1 if spread.step == 0 else count * spread.step
        load = _in_pieces(vectors.load(read.dtype, count), pieces, apart * dtype_of(read.dtype).nbytes, read.dtype, count)
        parts = whole_vectors if is_whole(read.dtype) else vectors
        unpack = _of_pieces(parts.unpack(read.dtype, count), pieces, vectors.words_of(read.dtype, count), count)
        fetch = _then_fetch(fetch, slot, held, load, spread.offset(position), read.dtype)
        before = [each for each in reads_of(p.params)[:slot] if is_whole(each.dtype) == is_whole(read.dtype)]
        then = _then_widen_whole if is_whole(read.dtype) else _then_widen
        widen = then(widen, len(before) * vector, held, unpack, 0 if spread.step else vector)
        held += _words_of(read, vector, p)
    return fetch, widen, held


def _in_pieces(load: Any, pieces: int, apart_bytes: int, dtype: str, count: int) -> Any:
    """`load` of vectors that lie apart from one another, such as elements with a stride."""
    words = vectors.words_of(dtype, count)

    def load_pieces(to: Any, at: Any, address: Any, valid: Any) -> None:
        for i in range(pieces):
            load(to, at + i * words, u64(address + i * apart_bytes), valid)

    return load if pieces == 1 else load_pieces


def _of_pieces(unpack: Any, pieces: int, words: int, count: int) -> Any:
    def unpack_pieces(held: Any, at: Any, numbers: Any, to: Any) -> None:
        for i in range(pieces):
            unpack(held, at + i * words, numbers, to + i * count)

    return unpack if pieces == 1 else unpack_pieces


def _fetch_nothing(words: Any, at: Any, arrays: Any, place: Any, valid: Any) -> None:
    pass


def _widen_nothing(words: Any, at: Any, numbers: Any, wholes: Any) -> None:
    pass


def _then_fetch(
    before: Callable[..., None], slot: int, held: int, load: Any, offset: Any, dtype: str
) -> Callable[..., None]:
    element = dtype_of(dtype).nbytes

    def fetch(words: Any, at: Any, arrays: Any, place: Any, valid: Any) -> None:
        before(words, at, arrays, place, valid)
        load(words, at + held, arrays[slot] + u64(u64(offset(place)) * u64(element)), valid)

    return fetch


def _then_widen(before: Callable[..., None], to: int, held: int, unpack: Any, copies: int) -> Callable[..., None]:
    def widen(words: Any, at: Any, numbers: Any, wholes: Any) -> None:
        before(words, at, numbers, wholes)
        unpack(words, at + held, numbers, to)
        for i in range(1, copies):  # of an input that is repeated along the vector
            numbers[to + i] = numbers[to]

    return widen


def _then_widen_whole(before: Callable[..., None], to: int, held: int, unpack: Any, copies: int) -> Callable[..., None]:
    def widen(words: Any, at: Any, numbers: Any, wholes: Any) -> None:
        before(words, at, numbers, wholes)
        unpack(words, at + held, wholes, to)
        for i in range(1, copies):
            wholes[to + i] = wholes[to]

    return widen


def _env(p: Workload[ElementwiseParams], vector: int) -> Callable[[Any, Any, Any], Any]:
    """`env(numbers, wholes, e)`: the tuple of the inputs' numbers for element e of the vector."""
    found: Callable[[Any, Any, Any], Any] = _no_numbers
    floats, wholes = 0, 0
    for read in reads_of(p.params):
        if is_whole(read.dtype):
            found, wholes = _then_whole(found, wholes), wholes + vector
        else:
            found, floats = _then_number(found, floats), floats + vector
    return found


def _no_numbers(numbers: Any, wholes: Any, e: Any) -> Any:
    return ()


def _then_number(before: Callable[[Any, Any, Any], Any], at: int) -> Callable[[Any, Any, Any], Any]:
    def env(numbers: Any, wholes: Any, e: Any) -> Any:
        return before(numbers, wholes, e) + (numbers[at + e],)  # noqa: RUF005 - Numba knows no *

    return env


def _then_whole(before: Callable[[Any, Any, Any], Any], at: int) -> Callable[[Any, Any, Any], Any]:
    def env(numbers: Any, wholes: Any, e: Any) -> Any:
        return before(numbers, wholes, e) + (wholes[at + e],)  # noqa: RUF005 - Numba knows no *

    return env


def _vectors(workload: Workload[ElementwiseParams]) -> tuple[int, ...]:
    """Elements of y of a thread: powers of two that divide every run of y along which an input has equal steps, up to 16
    bytes of the narrowest array."""
    inners = [Spread.of(read, workload.params.y).inner for read in reads_of(workload.params)]
    narrowest = min(dtype_of(spec.dtype).nbytes for spec in (*workload.signature, workload.output))
    widest = math.gcd(MOST_BYTES // narrowest, *vector_limits(workload.output), *inners)
    return tuple(1 << i for i in range(widest.bit_length()))


def _words_of(read: Read, vector: int, workload: Workload[ElementwiseParams]) -> int:
    """Words that the elements of an input for a vector of y take."""
    count, pieces = Spread.of(read, workload.params.y).pieces(vector)
    return vectors.words_of(read.dtype, count) * pieces
