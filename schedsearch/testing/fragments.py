"""Fragments of mma.sync and products of TF32, as NumPy."""

from __future__ import annotations

import numpy as np

from schedsearch.ops.dtypes import decode
from schedsearch.ops.dtypes import dtype as dtype_of
from schedsearch.typed import Array


def tf32(values: Array) -> Array:
    """Float32 rounded to TF32's 10 stored bits, half away from zero (`cvt.rna.tf32.f32`)."""
    rounded = (values.astype(np.float32).view(np.uint32) + np.uint32(1 << 12)) & np.uint32(0xFFFFE000)
    return rounded.view(np.float32)


def tf32_product(a: Array, b: Array, products: int) -> Array:
    """a x b transposed by 1 or 3 products of TF32, as float32."""

    def exact(left: Array, right: Array) -> Array:
        return np.asarray(left.astype(np.float64) @ right.astype(np.float64).T)

    a_large, b_large = tf32(a), tf32(b)
    total = exact(a_large, b_large)
    if products == 3:
        total += exact(tf32(a - a_large), b_large) + exact(a_large, tf32(b - b_large))
    return total.astype(np.float32)


def fragment(matrices: Array, dtype: str) -> Array:
    """16 rows x 32 bytes of k that `ldmatrix.x4` loads, as the elements of the fragments of mma.sync see them.

    A lane's register q gets 4 bytes of row `lane / 4` of matrix q, whose row r is at the address of lane 8 q + r. By the
    PTX ISA the fragment of A then has in register q, element i of lane (g, t): row g + 8 (q % 2), and with e elements in
    a register, k = t e + i + 4 e (q / 2). This holds for m16n8k8 (e = 1), m16n8k16 (2) and m16n8k32 (4).
    """
    elements = matrices.view(dtype_of(dtype).storage)  # register q, g, t, i
    of_register = elements.shape[3]
    q, g, t, i = np.indices(elements.shape)
    fragment = np.empty((16, 8 * of_register), elements.dtype)
    fragment[g + 8 * (q % 2), t * of_register + i + 4 * of_register * (q // 2)] = elements
    return decode(fragment, dtype)
