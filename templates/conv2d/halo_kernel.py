"""The kernel of conv2d_halo: each pixel is loaded once a tile, a tap is a shift of the operand's address.

A tile of y is a rectangle of one image. TMA loads the rectangle of x that it depends on, halo and padding included, as one
patch of rows of 64 channels. Numbered row by row, the pixels that tap (r, s) reads are those of tap (0, 0) shifted by
r * dilation_h * patch_w + s * dilation_w positions, so each tap is the same wgmma operand at another start address. Between
the rows of a tile lie the patch's halo columns: they are multiplied too, and never stored.

With a stride the patch is loaded as several, the phases: phase (a, b) has every stride_h-th row from a on, of these every
stride_w-th pixel from b on. A tap reads one phase, and there is a shift as before.

wgmma's 64 rows are output channels and its columns are positions: y^T = weight * x^T. So with few channels, too, an
instruction is wide enough that tensor cores are not held up by shared memory, which at 64 x 64 they are.

A block has consumer warpgroups that multiply and store, and a producer warpgroup of which one thread loads patches and
another weights, each into a ring of buffers with two mbarriers a buffer: `full` (the bytes have landed) and `empty` (every
consumer has read them). docs/kernels/conv2d_halo.md tells more.

Of several groups a tile has output channels of one, and loads that one's input channels. Groups of few channels are merged:
several count as one, with weights of zero where input and output channel are of different groups. These weights stay in
shared memory, where each block writes them before its first tile.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" and "Data Movement: cp.async.bulk.tensor".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from numba import cuda, types

from schedsearch.backend.ops import shared_base
from schedsearch.templates.conv2d.halo_sizes import CHUNK, WGMMA_CHANNELS, Geometry, loads_residual, weight_piece
from schedsearch.templates.conv2d.maps import ROW_BYTES
from schedsearch.templates.parts import hopper, ptx
from schedsearch.templates.parts.epilogue import Epilogue, TileRows, store_transposed
from schedsearch.templates.parts.hopper import BARRIER_BYTES, ELEMENT_BYTES, SWIZZLE_ROWS, WARPGROUP
from schedsearch.workload import Workload

# Of what the kernel captures; see `KernelStep`.
SHAPED_BY = frozenset({"accumulators", "fused", "grouped", "in_turn", "merged", "resident", "residual_index", "staged"})


def build_kernel(workload: Workload, plan: Mapping[str, Any], epilogue: Epilogue) -> Callable[..., None]:
    """The kernel function for one configuration; `plan` is what `evaluate` returns."""
    geometry = Geometry.of(workload, plan["merged"])
    out_h, out_w, out_channels = geometry.out_h, geometry.out_w, workload.k
    group_outputs = geometry.outputs
    grouped = geometry.groups > 1
    (stride_h, stride_w), (dilation_h, dilation_w) = workload.stride, workload.dilation
    period_h, period_w = geometry.period_h, geometry.period_w
    phases, phases_w = geometry.phases, geometry.phases_w
    top, left = workload.padding[:2]
    taps, chunks, kernel_w = geometry.taps, geometry.chunks, workload.s
    tile_h, tile_w, positions, block_rows = plan["tile_h"], plan["tile_w"], plan["positions"], plan["block_rows"]
    patch_w, bn, groups, channel_groups = plan["patch_w"], plan["bn"], plan["groups"], plan["channel_groups"]
    row_tiles, strips, column_tiles = plan["row_tiles"], plan["strips"], plan["column_tiles"]
    group_tiles = plan["group_tiles"]
    patches, stages, turns = plan["patches"], plan["stages"], plan["turns"]
    resident = plan["weight_stages"] == 0
    # Where weights stay, a block has all its tiles in one column of output channels, and its neighbours the others.
    block_columns, tiles = (column_tiles, plan["pixel_tiles"]) if resident else (1, plan["tiles"])
    in_turn = turns > 1

    # Shared memory: the patches, the stages of weights, y of each consumer group, the barriers. All matrices are rows of
    # 128 bytes, swizzled by address. A group in turn stages its y in the patch that it was computed from. The last positions
    # may reach past a patch into what follows: their columns are never stored.
    loaded_patch_bytes = phases * patch_w * plan["patch_h"] * ROW_BYTES
    phase_bytes, patch_bytes, stage_bytes = plan["phase_bytes"], plan["patch_bytes"], bn * ROW_BYTES
    weights_offset = patches * patch_bytes
    staged = workload.out_dtype != "float32"
    in_place = staged and in_turn
    y_offset = weights_offset + stages * stage_bytes
    group_y_bytes = positions * ROW_BYTES if staged and not in_turn else 0
    patch_full_offset = y_offset + groups * group_y_bytes
    patch_empty_offset = patch_full_offset + turns * patches * BARRIER_BYTES
    weight_full_offset = patch_empty_offset + patches * BARRIER_BYTES
    weight_empty_offset = weight_full_offset + stages * BARRIER_BYTES
    residual_full_offset = weight_empty_offset + stages * BARRIER_BYTES  # one for each group
    staged_residual = loads_residual(workload)
    assert residual_full_offset + groups * BARRIER_BYTES * staged_residual == plan["shared_bytes"]
    # In turn, each group has `full` barriers of its own: of a shared one it would miss phases, and parities be ambiguous.
    # A patch is handed back when its group is at its next tile, if enough others are on their way by then: the
    # next tile's last chunk but one must not need it.
    late_release = in_place and patches >= (turns - 1) * chunks + 2

    descriptor = hopper.matrix_descriptor(ROW_BYTES)  # the swizzle is one of addresses: an operand may start at any row
    accumulators = positions // 2
    multiply = ptx.wgmma_steps(positions, geometry.k_steps[0], workload.dtype)
    multiply_last = ptx.wgmma_steps(positions, geometry.k_steps[1], workload.dtype)
    whole_chunks = chunks if geometry.k_steps[0] == geometry.k_steps[1] else chunks - 1
    wait_previous, wait_all = ptx.wgmma_wait(1, positions), ptx.wgmma_wait(0, positions)
    group_patch_bytes = 0 if in_turn else tile_h * patch_w * ROW_BYTES

    # Weights that are merged are copied in pieces: no more than a row of zeros, or of one group's weights, has.
    merged = geometry.merged > 1
    inputs, outputs = workload.c // workload.groups, workload.k // workload.groups
    piece = weight_piece(workload)
    piece_bytes = piece * ELEMENT_BYTES
    tile_pieces = group_outputs * taps * inputs // piece
    copy, wait_copies = ptx.cp_async(piece_bytes), ptx.cp_async_wait(0)
    tap_chunks = group_outputs * ROW_BYTES // 16  # of rows that are stored

    blocks_of_8 = positions // 8
    pack = ptx.pack_pair(workload.out_dtype if staged else "float16")
    tile_rows = TileRows(patch_w, out_w * out_channels, out_channels)
    fuse, store = epilogue.transposed(blocks_of_8, tile_rows), store_transposed(blocks_of_8, tile_rows)
    fused, residual_index = not epilogue.identity, epilogue.index("residual")
    consumers = groups * WARPGROUP
    group_barrier, all_consumers = ptx.group_barrier(groups, WARPGROUP), ptx.group_barrier(1, consumers)

    def kernel(xmap, weight, y, *operands) -> None:  # type: ignore[no-untyped-def]
        residual = operands[residual_index]
        own_column = types.uint32(types.uint32(cuda.blockIdx.x) % types.uint32(block_columns))

        def tile_origin(tile: Any) -> Any:
            """(image, first row, first column, group, first channel of it): channels fastest, or the block's, then a row."""
            tile = types.uint32(tile)
            column_tile = own_column
            if not resident:
                rest = types.uint32(tile // types.uint32(column_tiles))
                column_tile = types.uint32(tile - rest * types.uint32(column_tiles))
                tile = rest
            group = types.uint32(column_tile // types.uint32(group_tiles))
            channel = types.int32((column_tile - group * types.uint32(group_tiles)) * bn)
            rest = types.uint32(tile // types.uint32(strips))
            column = types.int32((tile - rest * types.uint32(strips)) * tile_w)
            image = types.uint32(rest // types.uint32(row_tiles))
            row = types.int32((rest - image * types.uint32(row_tiles)) * block_rows)
            return types.int32(image), row, column, types.int32(group), channel

        def load_pixels(
            to: Any, tensor: Any, channel: Any, group: Any, column: Any, row: Any, image: Any, barrier: Any
        ) -> None:
            if grouped:
                ptx.tma_load_5d(to, tensor, channel, group, column, row, image, barrier)
            else:
                ptx.tma_load_4d(to, tensor, channel, column, row, image, barrier)

        def load_residual(
            barrier: Any, to: Any, rows: Any, channel: Any, group: Any, column: Any, row: Any, image: Any
        ) -> None:
            """One thread loads a tile's residual to where its y will be staged; nothing where there is nothing of y."""
            rows = types.int32(max(rows, 0) if channel < group_outputs else 0)
            ptx.mbarrier_expect_bytes(barrier, rows * (tile_w * ROW_BYTES))
            for tile_row in range(rows):
                load_pixels(
                    to + tile_row * (patch_w * ROW_BYTES), residual, channel, group, column, row + tile_row, image, barrier
                )

        shared = shared_base()
        patch_full = types.uint32(shared + patch_full_offset)
        patch_empty = types.uint32(shared + patch_empty_offset)
        weight_full = types.uint32(shared + weight_full_offset)
        weight_empty = types.uint32(shared + weight_empty_offset)
        thread = types.int32(cuda.threadIdx.x)
        first_tile = types.int32(types.uint32(cuda.blockIdx.x) // types.uint32(block_columns))
        next_tile = types.int32(types.uint32(cuda.gridDim.x) // types.uint32(block_columns))
        if thread == 0:
            for buffer in range(turns * patches):
                ptx.mbarrier_init(patch_full + buffer * BARRIER_BYTES, 1)
            for buffer in range(patches):
                ptx.mbarrier_init(patch_empty + buffer * BARRIER_BYTES, groups // turns)
            for stage in range(stages):
                ptx.mbarrier_init(weight_full + stage * BARRIER_BYTES, 1)
                ptx.mbarrier_init(weight_empty + stage * BARRIER_BYTES, groups)
            if staged_residual:
                for number in range(groups):
                    ptx.mbarrier_init(shared + (residual_full_offset + number * BARRIER_BYTES), 1)
            ptx.mbarrier_init_fence()
        cuda.syncthreads()

        if thread >= consumers:
            tile = first_tile
            if thread == consumers:
                # ---- load patches
                buffer = types.uint32(0)
                parity = types.uint32(1)  # of the phase before the first: every buffer starts empty
                turn_full = patch_full
                while tile < tiles:
                    image, row, column, channel_group, _ = tile_origin(tile)
                    row, column = types.int32(row * stride_h - top), types.int32(column * stride_w - left)
                    for chunk in range(chunks):
                        ptx.mbarrier_wait(patch_empty + buffer * BARRIER_BYTES, parity)
                        barrier = types.uint32(turn_full + buffer * BARRIER_BYTES)
                        ptx.mbarrier_expect_bytes(barrier, loaded_patch_bytes)
                        patch = types.uint32(shared + buffer * patch_bytes)
                        for phase in range(phases):
                            phase_h = types.uint32(types.uint32(phase) // types.uint32(phases_w))
                            phase_w = types.uint32(phase - phase_h * phases_w)
                            from_row = types.int32(row + types.uint32(phase_h * dilation_h) % types.uint32(stride_h))
                            from_column = types.int32(column + types.uint32(phase_w * dilation_w) % types.uint32(stride_w))
                            load_pixels(patch, xmap, chunk * CHUNK, channel_group, from_column, from_row, image, barrier)
                            patch = types.uint32(patch + phase_bytes)
                        buffer = types.uint32(buffer + 1)
                        if buffer == patches:
                            buffer = types.uint32(0)
                            parity = types.uint32(parity ^ 1)
                    if in_turn:
                        turn_full = types.uint32(turn_full + patches * BARRIER_BYTES)
                        if turn_full == patch_empty:
                            turn_full = patch_full
                    tile = types.int32(tile + next_tile)
            elif not merged and thread == consumers + 32:
                # ---- load weights: all of them once, or those of every tile
                stage = types.uint32(0)
                parity = types.uint32(1)
                while tile < tiles:
                    _, _, _, channel_group, channel = tile_origin(tile)
                    channel = types.int32(channel_group * group_outputs + channel)
                    for chunk in range(chunks):
                        for tap in range(taps):
                            ptx.mbarrier_wait(weight_empty + stage * BARRIER_BYTES, parity)
                            barrier = types.uint32(weight_full + stage * BARRIER_BYTES)
                            ptx.mbarrier_expect_bytes(barrier, stage_bytes)
                            weights = types.uint32(shared + weights_offset + stage * stage_bytes)
                            ptx.tma_load_3d(weights, weight, chunk * CHUNK, tap, channel, barrier)
                            stage = types.uint32(stage + 1)
                            if stage == stages:
                                stage = types.uint32(0)
                                parity = types.uint32(parity ^ 1)
                    tile = types.int32(tiles if resident else tile + next_tile)
        else:
            group = thread >> 7
            lane = thread & 31
            leader = (thread & 127) == 0
            row_group = types.int32(group // channel_groups)
            group_channel = types.int32((group - row_group * channel_groups) * WGMMA_CHANNELS)
            group_row = types.int32(0 if in_turn else row_group * tile_h)
            weights_start = types.uint32(shared + weights_offset + group_channel * ROW_BYTES)
            patch_start = types.uint32(shared + (0 if in_turn else row_group * group_patch_bytes))
            group_y = types.uint32(shared + y_offset + group * group_y_bytes)

            # Of every 8 positions a thread holds two neighbours, 2 * (lane % 4), in the channels lane / 4 and 8 further of
            # its warp's 16. A row of staged y, one position, is 8 chunks of 8 channels: chunk ^= position % 8.
            warp_channel = types.int32(((thread >> 5) & 3) * 16)
            warp_chunk = types.uint32(warp_channel >> 3)
            matrix_row = types.uint32(lane & 7)  # stmatrix: lane 8 q + i has the address of row i of matrix q
            matrix_chunk = types.uint32(warp_chunk + ((lane >> 3) & 1))
            matrix_offset = types.uint32(
                (lane >> 4) * (SWIZZLE_ROWS * ROW_BYTES) + matrix_row * ROW_BYTES + ((matrix_chunk ^ matrix_row) << 4)
            )

            if merged:
                # ---- write the weights of the block's groups: zeros, and what each group has for its own input channels
                zero = types.uint32(0)
                for chunk in range(thread, taps * tap_chunks, consumers):
                    tap = types.uint32(types.uint32(chunk) // types.uint32(tap_chunks))
                    to = types.uint32(shared + weights_offset + tap * (stage_bytes - tap_chunks * 16) + chunk * 16)
                    ptx.store_shared_v4(to, zero, zero, zero, zero)
                all_consumers(0)
                tile_weights = types.uint64(weight + types.uint64(own_column) * types.uint64(tile_pieces * piece_bytes))
                for number in range(thread, tile_pieces, consumers):
                    element = types.uint32(number * piece)
                    weight_row = types.uint32(element // types.uint32(inputs))
                    output = types.uint32(weight_row // types.uint32(taps))
                    tap = types.uint32(weight_row - output * types.uint32(taps))
                    own_group = types.uint32(output // types.uint32(outputs))
                    byte = types.uint32((own_group * inputs + element - weight_row * types.uint32(inputs)) * ELEMENT_BYTES)
                    to = types.uint32(shared + weights_offset + tap * stage_bytes + output * ROW_BYTES)
                    copy(to + (byte ^ ((output & 7) << 4)), tile_weights + number * piece_bytes, piece_bytes)
                ptx.cp_async_commit()
                wait_copies()
                ptx.fence_async_shared()
                all_consumers(0)

            acc = cuda.local.array(accumulators, types.float32)
            if in_turn:
                patch_full = types.uint32(patch_full + row_group * (patches * BARRIER_BYTES))
            patch_parities = types.uint32(0)  # a bit for each buffer
            buffer = types.uint32(row_group * chunks if in_turn else 0) % types.uint32(patches)
            previous_buffer = buffer
            stage = types.uint32(0)
            previous_stage = stage
            weight_parity = types.uint32(0)
            residual_full = types.uint32(shared + residual_full_offset + group * BARRIER_BYTES)
            residual_parity = types.uint32(0)
            held = types.int32(0)  # whether the last tile's patch is still to be handed back
            tile = first_tile
            if in_turn:
                tile = types.int32(tile + row_group * next_tile)
            while tile < tiles:
                image, row, column, channel_group, channel = tile_origin(tile)
                row = types.int32(row + group_row)
                channel = types.int32(channel + group_channel)
                rows_left = types.int32(min(tile_h, out_h - row))

                # ---- multiply; a buffer is handed back when the next step has been issued and its own has finished
                step = types.int32(0)
                for chunk in range(chunks):
                    ptx.mbarrier_wait(patch_full + buffer * BARRIER_BYTES, (patch_parities >> buffer) & types.uint32(1))
                    patch_parities = types.uint32(patch_parities ^ (types.uint32(1) << buffer))
                    patch = types.uint32(patch_start + buffer * patch_bytes)
                    tap_h = types.uint32(0)
                    tap_w = types.uint32(0)
                    for tap in range(taps):
                        if not merged:
                            ptx.mbarrier_wait(weight_full + stage * BARRIER_BYTES, weight_parity)
                        a = types.uint32(weights_start + stage * stage_bytes)
                        phase = types.uint32(tap_h % types.uint32(period_h) * phases_w + tap_w % types.uint32(period_w))
                        shift_h = types.uint32(types.uint32(tap_h * dilation_h) // types.uint32(stride_h))
                        shift_w = types.uint32(types.uint32(tap_w * dilation_w) // types.uint32(stride_w))
                        b = types.uint32(patch + phase * phase_bytes + (shift_h * patch_w + shift_w) * ROW_BYTES)
                        descriptor_a = types.uint64(descriptor) | types.uint64(a >> 4)
                        descriptor_b = types.uint64(descriptor) | types.uint64(b >> 4)
                        if chunk < whole_chunks:
                            multiply(acc, descriptor_a, descriptor_b, types.int32(step > 0))
                        else:
                            multiply_last(acc, descriptor_a, descriptor_b, types.int32(step > 0))
                        wait_previous(acc)
                        if leader:
                            if not resident and step > 0:
                                ptx.mbarrier_arrive(weight_empty + previous_stage * BARRIER_BYTES)
                            if patches > 1 and tap == 0 and chunk > 0:
                                ptx.mbarrier_arrive(patch_empty + previous_buffer * BARRIER_BYTES)
                            if late_release and held != 0 and step == 0:
                                ptx.bulk_wait_read_all()
                                ptx.mbarrier_arrive(patch_empty + previous_buffer * BARRIER_BYTES)
                            if staged_residual and not in_place and step == 0:
                                ptx.bulk_wait_read_all()  # the previous tile's stores have read group_y
                                load_residual(residual_full, group_y, rows_left, channel, channel_group, column, row, image)
                        tap_w = types.uint32(tap_w + 1)
                        if tap_w == kernel_w:
                            tap_w = types.uint32(0)
                            tap_h = types.uint32(tap_h + 1)
                        step = types.int32(step + 1)
                        previous_stage = stage
                        stage = types.uint32(stage + 1)
                        if stage == stages:
                            stage = types.uint32(0)
                            if not resident:
                                weight_parity = types.uint32(weight_parity ^ 1)
                    previous_buffer = buffer
                    buffer = types.uint32(buffer + 1)
                    if buffer == patches:
                        buffer = types.uint32(0)
                    if patches == 1 and chunk < chunks - 1:  # the next chunk needs this one's buffer
                        wait_all(acc)
                        if leader:
                            ptx.mbarrier_arrive(patch_empty)
                wait_all(acc)
                if leader:
                    if not resident:
                        ptx.mbarrier_arrive(weight_empty + previous_stage * BARRIER_BYTES)
                    if not in_place:
                        ptx.mbarrier_arrive(patch_empty + previous_buffer * BARRIER_BYTES)

                # ---- epilogue and store
                columns_left = types.int32(min(tile_w, out_w - column))
                if in_place:
                    group_y = types.uint32(shared + previous_buffer * patch_bytes)
                    group_barrier(group)  # all warps have read the patch
                    if staged_residual and leader:
                        load_residual(residual_full, group_y, rows_left, channel, channel_group, column, row, image)
                elif staged and not staged_residual:
                    if leader:
                        ptx.bulk_wait_read_all()  # the previous tile's stores have read group_y
                    group_barrier(group)
                if staged_residual:
                    ptx.mbarrier_wait(residual_full, residual_parity)
                    residual_parity = types.uint32(residual_parity ^ 1)
                k = types.int32(channel + warp_channel + (lane >> 2))  # in its group, then of all
                channels_left, position = types.int32(group_outputs - k), types.int32((lane & 3) * 2)
                k = types.int32(k + channel_group * group_outputs)
                offset = types.int64(types.int64((image * out_h + row) * out_w + column) * out_channels + k)
                if fused:
                    fuse(
                        acc, channels_left, rows_left, columns_left, position, group_y + matrix_offset, k, offset,
                        *operands,
                    )  # fmt: skip
                if staged:
                    for pair in range(blocks_of_8 // 2):
                        ptx.stmatrix_x4_trans(
                            group_y + matrix_offset + pair * (2 * SWIZZLE_ROWS * ROW_BYTES),
                            pack(acc[8 * pair], acc[8 * pair + 1]),
                            pack(acc[8 * pair + 2], acc[8 * pair + 3]),
                            pack(acc[8 * pair + 4], acc[8 * pair + 5]),
                            pack(acc[8 * pair + 6], acc[8 * pair + 7]),
                        )
                    if blocks_of_8 % 2 == 1:
                        ptx.stmatrix_x2_trans(
                            group_y + matrix_offset + (blocks_of_8 - 1) * (SWIZZLE_ROWS * ROW_BYTES),
                            pack(acc[accumulators - 4], acc[accumulators - 3]),
                            pack(acc[accumulators - 2], acc[accumulators - 1]),
                        )
                else:
                    store(acc, y, channels_left, rows_left, columns_left, position, offset)
                if staged:
                    ptx.fence_async_shared()
                    group_barrier(group)
                    if leader:
                        if channel < group_outputs:
                            for tile_row in range(rows_left):
                                from_y = types.uint32(group_y + tile_row * (patch_w * ROW_BYTES))
                                if grouped:
                                    ptx.tma_store_5d(y, from_y, channel, channel_group, column, row + tile_row, image)
                                else:
                                    ptx.tma_store_4d(y, from_y, channel, column, row + tile_row, image)
                        ptx.bulk_commit()
                        if in_place and not late_release:
                            ptx.bulk_wait_read_all()
                            ptx.mbarrier_arrive(patch_empty + previous_buffer * BARRIER_BYTES)
                held = types.int32(1)
                if in_turn:
                    buffer = types.uint32(buffer + (turns - 1) * chunks) % types.uint32(patches)
                tile = types.int32(tile + next_tile * turns)
            if staged and leader:
                ptx.bulk_wait_read_all()  # shared memory must outlive the stores that read it

    return kernel
