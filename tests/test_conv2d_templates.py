"""Properties of every template for convolutions, on random layers."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from schedsearch.target import PRESETS
from schedsearch.template import load_templates
from schedsearch.workload import Workload

H200 = PRESETS["h200"]
TEMPLATES = load_templates()
EPILOGUES = ((), ("bias", "relu"), ("bias", "residual", "relu"), ("scale_shift", "leaky_relu"), ("residual", "clip"))


def draw(seed: int) -> Workload:
    """Sizes 7 to 224, 16 to 1024 channels in multiples of 8, batch 1 to 64, kernels 1 to 7; also groups, and few channels.

    Some are float32, all others have 16 bits; one reads NCHW and writes NHWC.
    """
    rng = random.Random(seed)
    kernel = rng.choice((1, 3, 5, 7))
    h, w = rng.randint(7, 224), rng.randint(7, 224)
    c, k, groups = 8 * rng.randint(2, 128), 8 * rng.randint(2, 128), 1
    if seed % 3 == 1:
        groups = rng.choice([divisor for divisor in range(1, c + 1) if math.gcd(c, k) % divisor == 0])
    if seed % 6 == 2:
        c, k, w = rng.choice((1, 2, 3, 4)), min(k, 256), 8 * rng.randint(1, 28)
    strides = (1, 2)
    if seed % 6 == 3:
        kernel, c, k, strides = 3, 16 * rng.randint(1, 3), rng.randint(1, 16), (1,)
    dtype = rng.choice(("float16", "bfloat16"))
    dtype = "float32" if seed % 6 == 5 else dtype
    return Workload.conv2d(
        n=rng.randint(1, 64), h=h, w=w, c=c, k=k, r=kernel, s=kernel, stride=rng.choice(strides),
        padding=rng.choice((0, kernel // 2, 9)), groups=groups, dtype=dtype, out_dtype=rng.choice((dtype, "float32")),
        epilogue=rng.choice(EPILOGUES), **({"layout": "NCHW", "output_layout": "NHWC"} if seed == 8 else {}),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.mostly_long(3)
def test_every_template_of_a_random_layer_has_a_legal_default_and_finite_features(seed: int) -> None:
    workload = draw(seed)
    for template in TEMPLATES.matching(workload, H200):
        space, default = template.space(workload, H200), template.default(workload, H200, template.space(workload, H200))
        assert space.check(default) == [], template.name
        rows = np.concatenate([space.indices([default]), space.sample_indices(50, np.random.default_rng(seed))])
        assert np.isfinite(space.encode(rows)).all(), template.name
        if "predicted_cycles" in space.derived:
            predicted = 2 ** space.encode(rows)[:, space.feature_names.index("predicted_cycles")] - 1
            assert predicted.min() > 0, template.name
        (*_, step) = template.kernel(workload, H200, default).steps
        assert step.dynamic_shared_bytes <= H200.shared_bytes_per_block, template.name
        assert step.block_threads <= 1024, template.name


def test_the_layers_that_are_drawn_reach_every_template() -> None:
    cards = H200, PRESETS["b200"]
    reached = {each.name for seed in range(12) for card in cards for each in TEMPLATES.matching(draw(seed), card)}
    assert reached == {name for name, each in TEMPLATES.items() if (each.kind, each.op) == ("cuda", "conv2d")}
