"""Counts the instructions of the mma.sync kernels as ptxas compiles them for an A100, and writes
docs/design/portable-sass.md.

    python tools/sm80_sass.py            # 12 kernels, about a minute; needs the compilers of the group `gate`
    python tools/sm80_sass.py --print    # the page on standard output

Beside the counts are the fewest instructions that FlashAttention-2's tiles allow, and what either bounds on an A100.
"""

import argparse
import collections
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/design/portable-sass.md"
# Calls of tests/support/portable_gate.py by head dim and mask.
VARIANTS = {
    (64, "full"): "full",
    (64, "causal"): "h64_64",
    (128, "full"): "full_128",
    (128, "causal"): "h128_128",
    (256, "full"): "full_256",
    (256, "causal"): "h256_256",
}
# A multiply-add of mma.sync.m16n8k16 and of ldmatrix.x4: products, and elements of 16 bits that it loads.
HMMA_PRODUCTS, LDSM_ELEMENTS, WARP = 16 * 8 * 16, 4 * 8 * 8, 32

# Clocks of an A100 (NVIDIA A100 whitepaper; CUDA C++ Programming Guide, "Arithmetic Instructions", compute capability
# 8.0).
SUB_CORES = 4  # of a multiprocessor, each with a scheduler that issues one instruction a clock
HMMA_CLOCKS = 8  # of a sub-core's tensor core: 256 multiply-adds a clock
EX2_CLOCKS = 8  # of a sub-core: 4 exponentials a clock
FLOAT_CLOCKS = 2  # of a sub-core: 16 float32 operations a clock
SMEM_BYTES = 128  # that shared memory reads or writes in a clock, for the whole multiprocessor
PEAK = 312  # TFLOP/s of bfloat16 products
# Of a multiprocessor; a CTA takes registers in eights a thread, and a kilobyte of shared memory more than it asks for.
SM_REGISTERS, SM_SMEM_BYTES, CTA_SMEM_BYTES = 65_536, 167_936, 1024
# Bytes that a warp's instruction moves from or to shared memory.
SMEM_TRAFFIC = {"LDSM": 512, "LDGSTS": 512, "STS": 128, "STS.64": 256, "STS.128": 512,
                "LDS": 128, "LDS.64": 256, "LDS.128": 512}  # fmt: skip

COLUMNS = ("HMMA", "LDSM", "LDGSTS", "EX2", "float", "STS", "RED", "spills")
FLOATS = ("FFMA", "FADD", "FMUL", "FMNMX", "FSEL")

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)(.*)")
LABEL = re.compile(r"\s*(\.L_x_\d+):")


@dataclasses.dataclass(frozen=True)
class Step:
    """What a warp executes in one step of a main loop: a block of keys in the forward, of queries in the backward."""

    counts: Mapping[str, float]  # by opcode, or by a name of COLUMNS
    warps: int  # of a CTA
    total: float

    @classmethod
    def of_opcodes(cls, opcodes: list[str], warps: int) -> "Step":
        counts: collections.Counter = collections.Counter()
        for opcode in opcodes:
            base, *modifiers = opcode.split(".")
            counts[base] += 1
            if base in ("STS", "LDS"):
                width = next((m for m in modifiers if m in ("64", "128")), "")
                counts[f"{base}.{width}" if width else f"{base}.32"] += 1
            counts["EX2"] += opcode.startswith("MUFU.EX2")
            counts["float"] += base in FLOATS
            counts["spills"] += base in ("LDL", "STL")
        return cls(counts, warps, len(opcodes))

    def clocks(self) -> dict[str, float]:
        """Return the clocks that a CTA's step takes of each unit of a multiprocessor, all else being hidden."""
        n, each = self.counts, self.warps / SUB_CORES
        widths = {"STS.32": "STS", "LDS.32": "LDS"}
        traffic = {"LDSM": 0, "LDGSTS": 0, **dict.fromkeys(("STS.32", "LDS.32"), 0)}
        names = (*traffic, "STS.64", "STS.128", "LDS.64", "LDS.128")
        smem = sum(n.get(name, 0) * SMEM_TRAFFIC[widths.get(name, name)] for name in names)
        return {
            "tensor cores": n["HMMA"] * HMMA_CLOCKS * each,
            "shared memory": smem * self.warps / SMEM_BYTES,
            "issue": self.total * each,
            "exponentials": n["EX2"] * EX2_CLOCKS * each,
            "float32": n["float"] * FLOAT_CLOCKS * each,
        }

    def bounds(self) -> tuple[str, float, float]:
        """Return the unit that bounds the loop, its TFLOP/s on an A100, and those if nothing hid behind products.

        The first holds if the warps of a multiprocessor hide everything but the busiest unit; the second if products
        and all else took turns.
        """
        clocks = self.clocks()
        unit = max(clocks, key=lambda name: clocks[name])
        tensor = clocks.pop("tensor cores")
        most = PEAK * tensor / max(tensor, *clocks.values())
        clocks["issue"] -= self.counts["HMMA"] * self.warps / SUB_CORES
        return unit, most, PEAK * tensor / (tensor + max(clocks.values()))


def main_loop(sass: str) -> tuple[list[str], list[str]]:
    """Return the opcodes of the innermost loop with most products, without and with what masks add to a step.

    Instructions behind a branch forward belong to masks unless they copy (the last step copies nothing).
    """
    lines = sass.splitlines()
    labels = {m[1]: i for i, line in enumerate(lines) if (m := LABEL.match(line))}
    parsed = {i: m.groups() for i, line in enumerate(lines) if (m := INSTRUCTION.search(line))}
    jumps = [
        (i, labels[m[0]], guard)
        for i, (guard, opcode, operands) in parsed.items()
        if opcode == "BRA" and (m := re.search(r"\.L_x_\d+", operands)) and m[0] in labels
    ]
    loops = [range(target, i + 1) for i, target, _ in jumps if target < i]

    def products(loop: range) -> tuple[int, int]:
        return sum(parsed[i][1].startswith("HMMA") for i in loop if i in parsed), -len(loop)

    loop = max(loops, key=products)
    masks: set[int] = set()
    for i, target, guard in jumps:
        skipped = range(i + 1, target)
        if i in loop and guard and target in loop and skipped:
            opcodes = {parsed[j][1].split(".")[0] for j in skipped if j in parsed}
            if not opcodes & {"LDGSTS", "HMMA"}:
                masks.update(skipped)
    full = [parsed[i][1] for i in loop if i in parsed and i not in masks]
    return full, [parsed[i][1] for i in loop if i in parsed]


def fewest_forward(rows: int, keys: int, dim: int, warps: int) -> Step:
    """Return the fewest instructions of Algorithm 1 for a CTA of `rows` queries and a block of keys, H = Hv.

    A warp has rows / warps queries. Each fragment of Q, K and V is loaded once, each score takes a multiply-add, an
    exponential, a maximum and an addition, and O is rescaled once.
    """
    own = rows // warps
    scores, outputs = own * keys / WARP, own * dim / WARP
    counts = {
        "HMMA": 2 * own * keys * dim / HMMA_PRODUCTS,
        "LDSM": (own + 2 * keys) * dim / LDSM_ELEMENTS,
        "LDGSTS": 2 * keys * dim / 8 / (WARP * warps),
        "EX2": scores + own / 8,
        "float": 3 * scores + outputs,
        "SHFL": 2 * own / 8,
        "F2FP": scores / 2,
    }
    return Step(collections.Counter(counts), warps, sum(counts.values()))


def fewest_backward(queries: int, keys: int, dim: int, warps: int, layout: tuple) -> Step:
    """Return the fewest instructions of Algorithm 2 for a block of queries and a CTA of `keys` keys, H = Hv.

    `layout` says among how many warps S and dP divide the queries, dV and dK the keys, and dQ the queries; other warps
    divide the other axis. P and dS go through shared memory, and dQ is added 4 bytes a thread at a time.
    """
    s_rows, dv_rows, dq_rows = layout
    scores = queries * keys / (WARP * warps)

    def fragments(m: int, n: int, k: int, row_warps: int) -> float:
        """The elements that a warp loads for a product of [m, k] and [k, n]."""
        return (m / row_warps + n * row_warps / warps) * k

    loaded = (
        2 * fragments(queries, keys, dim, s_rows)
        + 2 * fragments(keys, dim, queries, dv_rows)
        + fragments(queries, dim, keys, dq_rows)
    )
    stored = 2 * scores / 2
    counts = {
        "HMMA": 5 * queries * keys * dim / HMMA_PRODUCTS / warps,
        "LDSM": loaded / LDSM_ELEMENTS,
        "LDGSTS": 2 * queries * dim / 8 / (WARP * warps),
        "EX2": scores,
        "float": 3 * scores,
        "F2FP": scores,
        "STS.32": stored,
        "RED": queries * dim / (WARP * warps),
    }
    total = sum(counts.values())
    return Step(collections.Counter({**counts, "STS": stored}), warps, total)


# FlashAttention-2's tiles on an A100 (csrc/flash_attn/src/flash_fwd_launch_template.h and flash_bwd_launch_template.h).
FA2_FORWARD = {64: (128, 128, 4), 128: (128, 64, 4), 256: (128, 64, 8)}  # queries, keys, warps
FA2_BACKWARD = {  # queries, keys, warps, and how these divide rows of S and dP, of dV and dK, of dQ
    64: (128, 128, 8, (4, 4, 4)),
    128: (64, 128, 8, (2, 4, 2)),
    256: (64, 64, 8, (4, 2, 2)),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A kernel, or the fewest instructions of a tile, in the tables."""

    dim: int
    mask: str
    who: str
    tile: tuple[int, int]  # queries, keys
    step: Step
    masked: float = 0  # instructions of a step with masks
    registers: int | None = None
    spill_bytes: int = 0
    smem_bytes: int = 0

    @property
    def resident_warps(self) -> int:
        """Return how many warps a sub-core of an A100 has at a time, of all CTAs that fit."""
        assert self.registers is not None
        by_registers = SM_REGISTERS // (-(-self.registers // 8) * 8 * WARP * self.step.warps)
        by_smem = SM_SMEM_BYTES // (self.smem_bytes + CTA_SMEM_BYTES)
        return min(by_registers, by_smem) * self.step.warps // SUB_CORES


def compile_rows() -> Iterator[tuple[str, Row]]:
    """Yield ("forward" or "backward", row) for each kernel of VARIANTS, compiled for an A100."""
    os.environ |= {"PALLAS_FA2_GATE": "8.0", "JAX_PLATFORMS": "cpu"}
    import jax
    import jax.numpy as jnp

    from pallas_fa2.backends.sm80 import configs
    from pallas_fa2.parse_call import parse_call
    from tests.support import gpus, portable_gate

    for (dim, mask), name in VARIANTS.items():
        q = jax.ShapeDtypeStruct((1, portable_gate.LENGTH, 4, dim), jnp.bfloat16)
        spec, _ = parse_call(q, q, q, is_causal=mask == "causal")
        config = configs.configure(spec, gpus.device())
        kernels = portable_gate.compile_kernels(name)
        kinds = ("forward", config.forward), ("backward", config.backward)
        for (kind, each), report in zip(kinds, kernels, strict=True):
            assert report.sass_path is not None, "nvdisasm is missing"
            opcodes, with_masks = main_loop(report.sass_path.read_text())
            step = Step.of_opcodes(opcodes, 4 * each.warpgroups)
            yield kind, Row(
                dim, mask, "ampere", (each.block_q, each.block_kv), step, len(with_masks),
                report.registers, report.spill_stores + report.spill_loads, report.smem_bytes,
            )  # fmt: skip


def fewest_rows() -> Iterator[tuple[str, Row]]:
    for dim, (queries, keys, warps) in FA2_FORWARD.items():
        step = fewest_forward(queries, keys, dim, warps)
        yield "forward", Row(dim, "any", "FA2, fewest", (queries, keys), step)
    for dim, (queries, keys, warps, layout) in FA2_BACKWARD.items():
        step = fewest_backward(queries, keys, dim, warps, layout)
        yield "backward", Row(dim, "any", "FA2, fewest", (queries, keys), step)


def table(header: tuple[str, ...], rows: list[tuple]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def counts_table(rows: list[Row]) -> str:
    header = ("H", "mask", "kernel", "tile", "warps", "registers", "spilled bytes", "shared KB",
              "warps a sub-core",
              "instructions", "with mask", *COLUMNS)  # fmt: skip
    cells = []
    for row in rows:
        known = row.registers is not None
        smem = f"{row.smem_bytes / 1024:.0f}"
        limits = (row.registers, row.spill_bytes, smem, row.resident_warps) if known else "----"
        masked = row.masked if known and row.masked != row.step.total else "-"
        counts = (f"{row.step.counts.get(name, 0):.0f}" for name in COLUMNS)
        tile = "{} x {}".format(*row.tile)
        cells.append((row.dim, row.mask, row.who, tile, row.step.warps, *limits,
                      f"{row.step.total:.0f}", masked, *counts))  # fmt: skip
    return table(header, cells)


def bounds_table(rows: list[Row]) -> str:
    units = list(rows[0].step.clocks())
    header = ("H", "mask", "kernel", "instructions per 128 HMMA", "LDSM per 128 HMMA", *units,
              "bound by", "at most", "in turns")  # fmt: skip
    cells = []
    for row in rows:
        step = row.step
        scale = 128 / step.counts["HMMA"]
        unit, most, in_turns = step.bounds()
        clocks = (f"{x:.0f}" for x in step.clocks().values())
        cells.append((row.dim, row.mask, row.who, f"{step.total * scale:.0f}",
                      f"{step.counts['LDSM'] * scale:.0f}", *clocks, unit, f"{most:.0f}",
                      f"{in_turns:.0f}"))  # fmt: skip
    return table(header, cells)


TEXT = """# Instructions of the portable kernels on an A100, and what bounds them

`python tools/sm80_sass.py` writes this page{made}. Nobody has run these kernels on an A100: the
counts are those of the machine code that ptxas makes for compute capability 8.0, and the speeds below
are bounds that follow from the counts, not measurements.

A row is what one warp executes in a step of the main loop: in the forward a block of keys, in the
backward a block of queries. A causal step on a full block skips the mask; "with mask" counts one that
does not. "float" are FFMA, FADD, FMUL, FMNMX and FSEL. "spills" are loads and stores of spilled
registers in the loop (LDL, STL); "spilled bytes" are those of the whole kernel.

## FlashAttention-2's fewest instructions

The rows "FA2, fewest" are derived from the algorithm and from the tiles that FlashAttention-2's CUDA
kernels take on an A100, not from its machine code. For a warp with R rows of a block of C keys:

- products: R C H / 2048 instructions each, since `mma.sync.m16n8k16` multiplies 16 x 8 x 16; two in
  the forward, five in the backward, there over the warps of a CTA;
- `ldmatrix.x4`: one for each 256 elements of an operand that a warp needs; in the forward its own rows
  of Q and all of K and V, in the backward the rows and columns that its part of each product takes;
- `cp.async`: 16 bytes a thread of K and V, or of Q and dO;
- exponentials: one for each score, in the forward another for each row's rescaling;
- float32: in the forward a multiply-add, a maximum and an addition for each score, and a product for
  each element of O; in the backward a multiply-add for the exponent, and two operations for dS;
- conversions of P (and of dS), shuffles for row maxima, and in the backward stores of P and dS to
  shared memory and additions of dQ to device memory.

Addresses, loops, barriers and waits are in none of these counts.

## Forward

{forward_counts}

## Backward

{backward_counts}

## Bounds on an A100

Clocks that a CTA's step takes of each unit of a multiprocessor: {hmma} a sub-core for an HMMA, {ex2} for an
exponential, {floats} for a float32 instruction, one to issue any; shared memory moves {smem} bytes a clock
(512 of an `ldmatrix.x4` or of a warp's `cp.async`). "At most" are the TFLOP/s if the busiest unit is
never idle, of a peak of {peak}; "in turns" those if nothing else happens during products, and no product
while the busiest of the other units works. What is true lies between, the closer to the former the more
warps a sub-core has at a time ("warps a sub-core", by registers and shared memory). Whole calls reach less: prologues, epilogues, masked blocks and the last wave
of CTAs are not in a step, nor are clocks, which sink at the power limit.

### Forward

{forward_bounds}

### Backward

{backward_bounds}

Additions of dQ (RED) are only in the count of issued instructions: how many an A100's L2 takes in a clock
is not known here.

## What would test it

- `python -m benchmarks.run --report` on an A100 has times and the rival's beside them: a forward
  above "at most" refutes the counts, one below "in turns" says that something waits that is no
  instruction (copies, barriers, the L2).
- Nsight Compute's `sm__inst_executed_pipe_tensor.sum` must be HMMA times warps times steps;
  `l1tex__data_pipe_lsu_wavefronts_mem_shared.sum` above the clocks of shared memory means bank
  conflicts; `smsp__issue_active.avg.pct_of_peak_sustained_active` says whether issuing bounds a kernel.
- For the additions of dQ: the backward's time with `accumulate.add_tile` left out (a wrong dQ).
"""


def page(rows: list[tuple[str, Row]], made: str) -> str:
    by_kind = {
        kind: sorted((row for x, row in rows if x == kind), key=lambda row: row.dim)
        for kind in ("forward", "backward")
    }
    tables = {f"{kind}_counts": counts_table(group) for kind, group in by_kind.items()}
    tables |= {f"{kind}_bounds": bounds_table(group) for kind, group in by_kind.items()}
    constants = {"hmma": HMMA_CLOCKS, "ex2": EX2_CLOCKS, "floats": FLOAT_CLOCKS, "smem": SMEM_BYTES, "peak": PEAK}  # fmt: skip
    return TEXT.format(made=made, **tables, **constants)


def made_by() -> str:
    """Return the commit, and the compiler that Mosaic takes, in words."""
    from tests.support import compile_gate

    ptxas = pathlib.Path(compile_gate.cuda_root()) / "bin/ptxas"
    text = subprocess.run([ptxas, "--version"], check=True, capture_output=True, text=True).stdout
    version = re.findall(r"V(\d+\.\d+\.\d+)", text)
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    return f" (commit {commit.strip()}, ptxas {', '.join(version)})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--print", action="store_true", help="write no file")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    text = page([*compile_rows(), *fewest_rows()], made_by())
    if options.print:
        print(text)
    else:
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
