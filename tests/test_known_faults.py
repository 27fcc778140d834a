"""A known fault of ptxas is found in machine code: registers that wgmma reads are written before it has read them."""

from __future__ import annotations

import functools
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from schedsearch.backend import ptxas, register_operands
from schedsearch.backend.base import RejectedError
from schedsearch.backend.cuda import _architecture, _link, compile_cuda, ptx_of
from schedsearch.backend.elf import machine_code
from schedsearch.backend.register_operands import count_from_registers, overwritten
from schedsearch.constructors.convolutions import conv2d
from schedsearch.dashboard.machine_code import DISASSEMBLERS
from schedsearch.target import PRESETS
from schedsearch.templates.conv2d.stem import Conv2dStem

H200 = PRESETS["h200"]
TEMPLATE = Conv2dStem()
IMAGE = conv2d(n=1, h=64, w=64, c=3, k=64, r=7, s=7, stride=2, padding=3)
MOV_RZ = 0x0000000000007802, 0x000FE20000000F00  # MOV R0, 0x0
NOP = 0x0000000000007918, 0x000FC00000000000


@functools.cache
def cubin() -> bytes:
    """A kernel whose wgmma takes its first operand from registers."""
    source = TEMPLATE.kernel(IMAGE, H200, TEMPLATE.default(IMAGE, H200, TEMPLATE.space(IMAGE, H200)))
    return _link(ptx_of(source, H200), _architecture(source.arch, H200))[0]


def code() -> bytes:
    return max(machine_code(cubin()).values(), key=lambda code: code.count(struct.pack("<H", 0x7DF0)))


def changed(at: int, low: int, high: int) -> bytes:
    """The cubin with another instruction in this place of the kernel."""
    whole, kernel = cubin(), code()
    start = whole.index(kernel) + 16 * at
    return whole[:start] + struct.pack("<QQ", low, high) + whole[start + 16 :]


def instructions() -> list[tuple[int, int]]:
    return list(struct.iter_unpack("<QQ", code()))


def products() -> list[int]:
    return [at for at, (low, _) in enumerate(instructions()) if low & 0xFFF == 0xDF0]


def operand(at: int) -> int:
    return instructions()[at][0] >> 24 & 0xFF


def move_to(register: int) -> tuple[int, int]:
    return MOV_RZ[0] | register << 16, MOV_RZ[1]


def test_code_of_this_compiler_has_none() -> None:
    assert count_from_registers(cubin()) == len(products()) > 4
    assert overwritten(cubin()) == []
    assert ptxas.fault_of(cubin(), ptxas.linker_version()) == ""


@pytest.mark.parametrize("register", range(4))
def test_a_write_to_any_of_the_four_registers_is_found(register: int) -> None:
    first = products()[0]
    (found,) = overwritten(changed(first + 1, *move_to(operand(first) + register)))
    assert (found.offset, found.register) == (16 * (first + 1), operand(first) + register)


def test_a_write_to_another_register_is_not() -> None:
    first = products()[0]
    assert overwritten(changed(first + 1, *move_to(2))) == []


def test_operands_of_every_product_of_the_group_stay_until_its_wait() -> None:
    """The last product closes the group; the wait after it frees the operands of all."""
    *_, last = products()
    wait = next(at for at in range(last, len(instructions())) if register_operands._groups_left(*instructions()[at]) == 0)
    assert wait == last + 1
    between = products()[1]
    (found,) = overwritten(changed(between + 1, *move_to(operand(products()[0]))))
    assert found.register == operand(products()[0])
    assert overwritten(changed(wait + 1, *move_to(operand(last)))) == []
    assert overwritten(changed(products()[0] - 2, *move_to(operand(last)))) == []


def test_a_wait_that_allows_a_group_frees_those_before() -> None:
    """Two groups of one product each; the wait lets the younger one run on."""
    closes = 0x000FE60008000818  # of the group gsb0
    product = [(0x00E0000400187DF0 | register << 24, closes) for register in (40, 60)]
    wait_for_one = (0x00008000000079C5, 0x000FE40000010100)
    kernel = [*product, wait_for_one, move_to(40), move_to(60)]
    assert list(register_operands._scan(kernel)) == [(4, 60)]


def test_a_loop_that_begins_again_is_read_with_what_is_under_way() -> None:
    """The move comes before the product, but in the next round after it."""
    product = (0x00E0000428187DF0, 0x000FE60008000818)
    back_by_three = 0x0000000000007947 | (0x3FFFFFFF << 34 | (256 - 12) << 16) & 2**64 - 1, 0x000FEA000383FFFF
    assert list(register_operands._scan([move_to(40), product, back_by_three])) == [(0, 40)]
    wait = (0x00008000000079C5, 0x000FE40000010000)
    assert list(register_operands._scan([move_to(40), product, wait, back_by_three])) == []


def test_an_instruction_that_is_not_known_writes_four_registers() -> None:
    product = (0x00E0000428187DF0, 0x000FE60008000818)
    unknown = (0x1FD | 37 << 16, NOP[1])
    assert list(register_operands._scan([product, unknown])) == [(1, 40)]


def test_a_call_may_write_everything() -> None:
    product = (0x00E0000428187DF0, 0x000FE60008000818)
    call = (0x0000000000007944, 0x000FEA0003C00000)
    assert [register for _, register in register_operands._scan([product, call])] == [40, 41, 42, 43]


def test_such_a_kernel_is_rejected_with_the_reason_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    first = products()[0]
    broken = changed(first + 1, *move_to(operand(first)))
    monkeypatch.setattr("schedsearch.backend.cuda._link", lambda texts, arch: (broken, ""))
    monkeypatch.setattr(ptxas, "linker_version", lambda: (13, 0))
    source = TEMPLATE.kernel(IMAGE, H200, TEMPLATE.default(IMAGE, H200, TEMPLATE.space(IMAGE, H200)))
    wanted = rf"ptxas of CUDA 13.0 overwrites R{operand(first)} at .* before 13.3: pip install 'nvidia-nvjitlink>=13.3'"
    with pytest.raises(RejectedError, match=wanted):
        compile_cuda(source, H200)


def test_versions_whose_code_was_never_compared_are_excluded_as_a_whole() -> None:
    assert "this is 12.8" in ptxas.fault_of(cubin(), (12, 8))
    assert [ptxas.fault_of(cubin(), version) for version in ((12, 9), (13, 0), (13, 2), (13, 3), (14, 0))] == [""] * 5


def test_what_a_version_excludes_is_said_until_it_is_fixed() -> None:
    assert ptxas.exclusions(None) == ptxas.exclusions((13, 3)) == ptxas.exclusions((13, 5)) == []
    (text,) = ptxas.exclusions((13, 2))
    assert "CUDA 13.2" in text and "conv2d_stem" in text and "nested divergence" in text
    (text,) = ptxas.exclusions((12, 8))
    assert "(conv2d_stem) are left out;" in text


@pytest.mark.parametrize(
    ("nvvm", "linker", "wrong"), [("13.5.1", "13.3.9", True), ("13.3.9", "13.5.1", False), ("13.3.1", "13.3.9", False)]
)
def test_nvvm_must_not_be_newer_than_the_linker(
    monkeypatch: pytest.MonkeyPatch, nvvm: str, linker: str, wrong: bool
) -> None:
    monkeypatch.setattr(ptxas, "version", {"nvidia-nvvm": nvvm, "nvidia-nvjitlink": linker}.__getitem__)
    assert ("of CUDA 13.5 and writes PTX that nvJitLink of CUDA 13.3" in ptxas.mismatch()) is wrong


def test_the_disassembler_reads_the_same(tmp_path: Path) -> None:
    """Which register each instruction writes, how wide loads are, where branches lead, and what closes a group."""
    program = DISASSEMBLERS["cuda"].find() or shutil.which("nvdisasm")
    if program is None:
        pytest.skip("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    (tmp_path / "kernel.cubin").write_bytes(cubin())
    text = subprocess.run(
        [program, "-hex", "--print-code", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    listing = re.findall(
        r"/\*([0-9a-f]{4,})\*/ +(?:@!?U?P\w+ +)?(\S+) ?([^;]*);\s+/\* 0x(\w{16}) \*/\s+/\* 0x(\w{16}) \*/", text
    )
    assert len(listing) > 300
    for _, name, operands, low, high in listing:
        words = int(low, 16), int(high, 16)
        target = re.match(r"R(\d+)\b", operands)
        writes = register_operands._written(*words)
        if "GMMA" in name:
            assert (words[1] >> 20 & 7 != 7) == ("gsb0" in operands)
        elif target and not name.startswith(("ST", "RED")):
            wide = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name or name == "CS2R" else 1
            assert writes == set(range(int(target[1]), int(target[1]) + wide)), (name, operands)
        elif "DEPBAR.LE" in name and "gsb0" in operands:
            assert register_operands._groups_left(*words) == int(operands.split(",")[1], 16)
        else:
            assert not writes or name.startswith(("SYNCS", "CALL", "RET", "BRX")), (name, operands)
