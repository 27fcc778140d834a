"""Device operations of the templates on tensor cores, generated as PTX: bands of filters, products of windows, pixels.

Source: PTX ISA, "Warp Level Matrix Instructions" (fragments of m16n8k16), "Data Movement: prmt".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from schedsearch.backend.ops import device_op
from schedsearch.templates.depthwise_conv2d.cuda_mma_strips import (
    ELEMENT_BYTES,
    STEP_COLUMNS,
    STRIP_COLUMNS,
    STRIPS,
    WORD_BYTES,
    Reach,
    StagedPlanes,
    StripBlocks,
)
from schedsearch.templates.depthwise_conv2d.ptx_text import VECTOR, Text
from schedsearch.templates.parts.warp_tiles import (
    LOAD_MATRICES,
    LOAD_MATRICES_TRANSPOSED,
    LOAD_TWO_MATRICES_TRANSPOSED,
    mma_text,
)

SUM_BYTES = 4
LANE_ROWS = (0, 1, 8, 9)  # of a fragment of B, from row 2 * (lane % 4) on
LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632  # selectors of prmt: a word of the lower, or upper, halves of two words


def band_words(blocks: StripBlocks) -> int:
    """Registers of a thread's bands: two for each row of the filter and product of a window."""
    return 2 * blocks.down_reach.taps * blocks.steps


def load_bands(blocks: StripBlocks, steps: tuple[int, int]) -> Callable[..., None]:
    """The bands of one filter: (bands[band_words], address, first).

    Lane (g, t) has rows 2t, 2t + 1, 2t + 8 and 2t + 9 of column g: what these columns of the window add to target g.
    `address` (u64) is that of the filter's first tap in memory, `first` (i32) the distance from the first source of target g
    to column 2t, which may be negative. Where the distance is not that of a tap, the band is zero.

    Args:
        steps: elements of the weight from a row, and from a column, to the next.

    The loads are not those of the non-coherent path; see `held`.
    """
    text, rows, columns = Text(), blocks.down_reach, blocks.across_reach
    column_bytes = (-steps[1] if columns.turned else steps[1]) * ELEMENT_BYTES
    first_tap = columns.tap(0) * steps[1] * ELEMENT_BYTES
    for step in range(blocks.steps):
        places = [_tap_place(text, columns, STEP_COLUMNS * step + lane_row, column_bytes) for lane_row in LANE_ROWS]
        for row in range(rows.taps):
            halves = text.new("b16", len(LANE_ROWS))
            offset = first_tap + rows.tap(row) * steps[0] * ELEMENT_BYTES
            for half, (exists, at) in zip(halves, places):
                text.add(f"mov.b16 {half}, 0;", f"@{exists} ld.global.b16 {half}, [{at}+{offset}];")
            for word in range(2):
                to = f"$bands[{2 * (row * blocks.steps + step) + word}]"
                text.add(f"mov.b32 {to}, {{{halves[2 * word]}, {halves[2 * word + 1]}}};")
    inout = {"bands": ("u32", band_words(blocks))}
    return device_op("load_bands", text.block(), inout=inout, ins={"address": "u64", "first": "i32"})


def _tap_place(text: Text, columns: Reach, further: int, tap_bytes: int) -> tuple[str, str]:
    """Whether there is a tap at `$first + further` (a predicate), and the register with its address."""
    distance, number, exists, at = text.one("b32"), text.one("b32"), text.one("pred"), text.one("b64")
    text.add(f"add.s32 {distance}, $first, {further};")
    if columns.step == 1:
        text.add(f"mov.b32 {number}, {distance}; setp.lt.u32 {exists}, {number}, {columns.taps};")
    else:
        back, whole = text.one("b32"), text.one("pred")
        text.add(f"div.u32 {number}, {distance}, {columns.step}; mul.lo.s32 {back}, {number}, {columns.step};")
        text.add(f"setp.eq.s32 {whole}, {back}, {distance};")
        text.add(f"setp.lt.and.u32 {exists}, {number}, {columns.taps}, {whole};")
    text.add(f"mad.wide.s32 {at}, {number}, {tap_bytes}, $address;")
    return exists, at


def multiply_strips(blocks: StripBlocks, dtype: str) -> Callable[..., None]:
    """upper, lower = the targets of a warp's strips: (upper[2 * height], lower[2 * height], bands, windows).

    Lane (g, t) gets columns 2t and 2t + 1 of all rows of strip g in `upper`, of strip g + 8 in `lower`, in the order (row,
    column). `windows` (u32) is a lane's shared address for ldmatrix: that of column lane / 16 * 8 of the first row of the
    window of strip lane % 16.
    """
    text, height, steps = Text(), blocks.height, blocks.steps
    zero = text.one("f32")
    text.add(f"mov.f32 {zero}, 0f00000000;")
    for windows, meetings in _rows_of_windows(text, blocks, LOAD_MATRICES):
        for step, a in enumerate(windows):
            for target, number in meetings:
                first = 2 * (number * steps + step)
                sums = [f"${half}[{2 * target + i}]" for half in ("upper", "lower") for i in range(2)]
                before = [zero] * 4 if number == step == 0 else sums
                text.add(mma_text(dtype, sums, a, [f"$bands[{first}]", f"$bands[{first + 1}]"], before))
    return device_op(
        "multiply_strips", text.block(),
        inout={"upper": ("f32", 2 * height), "lower": ("f32", 2 * height), "bands": ("u32", band_words(blocks))},
        ins={"windows": "u32"}, convergent=True,
    )  # fmt: skip


def _rows_of_windows(
    text: Text, blocks: StripBlocks, load: str
) -> Iterator[tuple[list[list[str]], list[tuple[int, int]]]]:  # fmt: skip
    """For each row of sources the registers of its windows, four for each product, and the (row of targets, row of the
    filter) that it meets. The windows of the next row are loaded before those of one are given."""
    rows, row_bytes = blocks.down_reach, blocks.sources.pitches[0] * WORD_BYTES
    found = list[tuple[int, list[tuple[int, int]]]]()
    for source in range(blocks.height + rows.extent - 1):
        pairs = [(source - number * rows.step, number) for number in range(rows.taps)]
        if inside := [(target, number) for target, number in pairs if 0 <= target < blocks.height]:
            found.append((source, inside))

    def loaded(source: int) -> list[list[str]]:
        windows = [text.new("b32", 4) for _ in range(blocks.steps)]
        for step, registers in enumerate(windows):
            offset = source * row_bytes + step * STEP_COLUMNS * ELEMENT_BYTES
            text.add(f"{load} {{{', '.join(registers)}}}, [$windows+{offset}];")
        return windows

    ahead = loaded(found[0][0])
    for (_, meetings), following in zip(found, [*found[1:], None]):
        windows, ahead = ahead, loaded(following[0]) if following else []
        yield windows, meetings


# ---- the gradient of bands


def band_sums(blocks: StripBlocks) -> int:
    """Sums of a thread: four of a band's 16 x 8 for each row of the filter and product of a window."""
    return 4 * blocks.down_reach.taps * blocks.steps


def add_to_bands(blocks: StripBlocks, dtype: str) -> Callable[..., None]:
    """sums += windows transposed x targets, over the strips of a warp and their rows: (sums[band_sums], windows, targets,
    low_strips, high_strips).

    The sums are the gradients of the filter's bands. `windows` (u32) is a lane's shared address for ldmatrix: of column
    lane / 8 % 2 * 8 of the first row of the window of strip lane / 16 * 8 + lane % 8; `targets` (u32) that of the first row
    of strip lane % 16. Lane (g, t) has the targets of strips 2t and 2t + 1 in the halves of a word, and those of strips
    2t + 8 and 2t + 9 in another one. With fewer than 16 strips, `low_strips` and `high_strips` (u32) have ones for those
    that exist.
    """
    text, height, steps = Text(), blocks.height, blocks.steps
    row_bytes, all_exist = blocks.targets.pitches[0] * WORD_BYTES, blocks.strips == STRIPS
    targets = dict[int, list[str]]()
    for windows, meetings in _rows_of_windows(text, blocks, LOAD_MATRICES_TRANSPOSED):
        for target, _ in meetings:
            if target not in targets:
                targets[target] = text.new("b32", 2)
                group = f"{{{', '.join(targets[target])}}}"
                text.add(f"{LOAD_TWO_MATRICES_TRANSPOSED} {group}, [$targets+{target * row_bytes}];")
                for word, strips in zip(targets[target], () if all_exist else ("low_strips", "high_strips")):
                    text.add(f"and.b32 {word}, {word}, ${strips};")
        for step, a in enumerate(windows):
            for target, number in meetings:
                first = 4 * (number * steps + step)
                sums = [f"$sums[{first + i}]" for i in range(4)]
                text.add(mma_text(dtype, sums, a, targets[target], sums))
    assert len(targets) == height
    return device_op(
        "add_to_bands", text.block(), inout={"sums": ("f32", band_sums(blocks))},
        ins=dict.fromkeys(("windows", "targets", "low_strips", "high_strips"), "u32"), unused=("low_strips", "high_strips"),
        convergent=True,
    )  # fmt: skip


def store_bands(blocks: StripBlocks) -> Callable[..., None]:
    """Writes the gradients of a warp's bands to shared memory, 8 float32 a row: (sums[band_sums], shared). `shared` (u32) is
    the address of row lane / 4 and column lane % 4 * 2 of the first one."""
    lines = []
    for band in range(blocks.down_reach.taps * blocks.steps):
        for half in range(2):
            offset = (STEP_COLUMNS * band + 8 * half) * STRIP_COLUMNS * SUM_BYTES
            first = 4 * band + 2 * half
            lines.append(f"st.shared.v2.f32 [$shared+{offset}], {{$sums[{first}], $sums[{first + 1}]}};")
    inout = {"sums": ("f32", band_sums(blocks))}
    return device_op("store_bands", "\n".join(lines), inout=inout, ins={"shared": "u32"})


# ---- pixels of NHWC


def pixel_words(staged: StagedPlanes) -> int:
    """Registers of two neighbouring pixels of an access to NHWC."""
    return 2 * max(staged.of_copy // 2, 1)


def load_pixels(staged: StagedPlanes, column_bytes: int) -> Callable[..., None]:
    """Loads some channels of two neighbouring pixels: (pixels[pixel_words], address, first_inside, second_inside).

    Pixels that are not inside are zeros."""
    text, count = Text(), pixel_words(staged) // 2
    for pixel, name in enumerate(("first", "second")):
        words = [f"$pixels[{count * pixel + i}]" for i in range(count)]
        inside = text.one("pred")
        text.add(f"setp.ne.s32 {inside}, ${name}_inside, 0;", *(f"mov.b32 {word}, 0;" for word in words))
        kind, group = _access(staged, words)
        text.add(f"@{inside} ld.global.nc{kind} {group}, [$address+{pixel * column_bytes}];")
    ins = {"address": "u64", "first_inside": "i32", "second_inside": "i32"}
    return device_op("load_pixels", text.block(), inout={"pixels": ("u32", 2 * count)}, ins=ins)


def _access(staged: StagedPlanes, words: list[str]) -> tuple[str, str]:
    """How an access to one pixel ends, and its registers."""
    if staged.of_copy == 1:
        return ".u16", words[0]
    return f"{VECTOR[len(words)]}.b32", f"{{{', '.join(words)}}}" if len(words) > 1 else words[0]


def spread_pixels(staged: StagedPlanes) -> Callable[..., None]:
    """Writes two pixels to the planes of their channels, as a word of each: (pixels[pixel_words], staged)."""
    text, count = Text(), pixel_words(staged) // 2
    plane_bytes = staged.pitches[2] * WORD_BYTES
    for channel in range(staged.of_copy):
        word, both = text.one("b32"), (f"$pixels[{channel // 2}]", f"$pixels[{count + channel // 2}]")
        text.add(f"prmt.b32 {word}, {both[0]}, {both[1]}, {HIGH_HALVES if channel % 2 else LOW_HALVES:#x};")
        text.add(f"st.shared.b32 [$staged+{channel * plane_bytes}], {word};")
    return device_op(
        "spread_pixels", text.block(), inout={"pixels": ("u32", 2 * count)}, ins={"staged": "u32"}
    )  # fmt: skip


def gather_pixels(staged: StagedPlanes, column_bytes: int) -> Callable[..., None]:
    """The way back: two pixels from the planes of their channels to global memory, those inside: (address, staged,
    first_inside, second_inside)."""
    text, count = Text(), pixel_words(staged) // 2
    plane_bytes = staged.pitches[2] * WORD_BYTES
    planes = text.new("b32", staged.of_copy)
    text.add(*(f"ld.shared.b32 {word}, [$staged+{channel * plane_bytes}];" for channel, word in enumerate(planes)))
    for pixel, name in enumerate(("first", "second")):
        words, inside = text.new("b32", count), text.one("pred")
        for i, word in enumerate(words):
            low, high = planes[2 * i], planes[min(2 * i + 1, staged.of_copy - 1)]
            text.add(f"prmt.b32 {word}, {low}, {high}, {HIGH_HALVES if pixel else LOW_HALVES:#x};")
        kind, group = _access(staged, words)
        text.add(f"setp.ne.s32 {inside}, ${name}_inside, 0;")
        text.add(f"@{inside} st.global{kind} [$address+{pixel * column_bytes}], {group};")
    ins = {"address": "u64", "staged": "u32", "first_inside": "i32", "second_inside": "i32"}
    return device_op("gather_pixels", text.block(), ins=ins)
