"""The counts of instructions of the mma.sync kernels: which are in the main loop, and how few there may be."""

import pytest

from tools import sm80_sass
from tools.sm80_sass import Row, Step

SASS = """
        /*0000*/                   LDSM.16.M88.4 R8, [R2] ;
.L_x_0:
        /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R10, R4 ;
        /*0020*/                   @P0 BRA `(.L_x_1) ;
        /*0030*/                   LDGSTS.E.BYPASS.LTC128B.128 [R4], [R6.64] ;
.L_x_1:
        /*0040*/                   @!P1 BRA `(.L_x_2) ;
        /*0050*/                   FSEL R1, R1, R2, P3 ;
        /*0060*/                   ISETP.GE.AND P3, PT, R1, R2, PT ;
.L_x_2:
        /*0070*/              @!P2 MUFU.EX2 R1, R1 ;
        /*0080*/                   STS.64 [R1], R2 ;
        /*0090*/                   STL [R1], R2 ;
        /*00a0*/               @P4 BRA `(.L_x_0) ;
.L_x_3:
        /*00b0*/                   FADD R1, R1, R2 ;
        /*00c0*/               @P4 BRA `(.L_x_3) ;
.L_x_4:
        /*00d0*/                   BRA `(.L_x_4) ;
"""


def test_the_main_loop_is_the_one_that_multiplies():
    full, masked = sm80_sass.main_loop(SASS)
    assert [x.split(".")[0] for x in full] == [
        "HMMA", "BRA", "LDGSTS", "BRA", "MUFU", "STS", "STL", "BRA",
    ]  # fmt: skip
    assert [x for x in masked if x not in full] == ["FSEL", "ISETP.GE.AND"]


def test_a_step_takes_clocks_of_each_unit():
    step = Step.of_opcodes(sm80_sass.main_loop(SASS)[0], warps=8)
    assert step.counts["EX2"] == step.counts["HMMA"] == step.counts["spills"] == 1
    assert step.clocks() == {
        "tensor cores": 2 * 8,
        "shared memory": 8 * (512 + 256) / 128,  # LDGSTS and STS.64
        "issue": 2 * 8,
        "exponentials": 2 * 8,
        "float32": 0,
    }
    unit, most, in_turns = step.bounds()
    assert unit == "shared memory" and most == 312 * 16 / 48 and in_turns == 312 * 16 / 64


def test_the_fewest_instructions_are_those_of_the_paper():
    """By hand, for 32 queries a warp and a block of 64 keys at H = 128, and for 2 x 4 warps of the backward."""
    step = sm80_sass.fewest_forward(128, 64, 128, 4)
    counts = {"HMMA": 256, "LDSM": 80, "LDGSTS": 16, "EX2": 68, "float": 320, "SHFL": 8, "F2FP": 32}
    assert step.counts == counts and step.total == sum(counts.values())
    step = sm80_sass.fewest_backward(64, 128, 128, 8, (2, 4, 2))
    assert step.counts["HMMA"] == 320 and step.counts["RED"] == 32
    assert step.counts["LDSM"] == 64 + 48 + 32  # S and dP, dV and dK, dQ


@pytest.mark.parametrize(
    "registers, smem, warps", [(255, 65536, 2), (128, 65536, 2), (128, 8192, 4)]
)
def test_registers_and_shared_memory_say_how_many_warps_there_are(registers, smem, warps):
    step = Step({}, 4, 0)
    row = Row(64, "full", "ampere", (128, 64), step, registers=registers, smem_bytes=smem)
    assert row.resident_warps == warps


def test_the_page_has_every_kernel():
    text = sm80_sass.PAGE.read_text()
    for dim, mask in sm80_sass.VARIANTS:
        assert text.count(f"\n| {dim} | {mask} | ampere |") == 4
    rows = [line for line in text.splitlines() if "FA2, fewest" in line and line.startswith("|")]
    assert len(rows) == 12
