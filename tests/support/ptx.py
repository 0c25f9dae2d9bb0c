"""PTX of inline code, run in NumPy for all threads of a warpgroup."""

import re
from typing import Any

import ml_dtypes
import numpy as np


def halves_as(word: np.ndarray, dtype: Any) -> np.ndarray:
    return word.view(np.uint16).view(dtype).reshape(-1, 2)


def as_word(halves: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(halves).view(np.uint16).view(np.uint32).reshape(-1)


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    pool = np.concatenate([x.view(np.uint8).reshape(-1, 4) for x in (a, b)], 1)
    chosen = pool[:, [int(selector[0]) >> 4 * i & 0xF for i in range(4)]]
    return np.ascontiguousarray(chosen).view(np.uint32).reshape(-1)


def _on_bfloat16(operation: Any) -> Any:
    def run(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        x, y = (halves_as(z, ml_dtypes.bfloat16).astype(np.float32) for z in (a, b))
        return as_word(operation(x, y).astype(ml_dtypes.bfloat16))

    return run


# Instructions of the PTX ISA on words of all threads; registers of 16 bits are words whose upper half is 0.
INSTRUCTIONS: dict[str, Any] = {
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "prmt.b32": _permute,
    "sub.rn.bf16x2": _on_bfloat16(np.subtract),
    "mul.rn.bf16x2": _on_bfloat16(np.multiply),
    "mul.rn.f32": lambda a, b: (a.view(np.float32) * b.view(np.float32)).view(np.uint32),
    "cvt.f32.f16": lambda a: halves_as(a, np.float16)[:, 0].astype(np.float32).view(np.uint32),
    "cvt.rn.f16x2.e4m3x2": lambda a: as_word(
        a.view(np.uint8).reshape(-1, 4)[:, :2].view(ml_dtypes.float8_e4m3fn).astype(np.float16)
    ),
    "cvt.rn.bf16x2.f32": lambda high, low: as_word(
        np.stack([low, high], -1).view(np.float32).astype(ml_dtypes.bfloat16)
    ),
    "setp.lt.s32": lambda a, b: a.view(np.int32) < b.view(np.int32),
    "selp.b32": lambda a, b, p: np.where(p, a, b),
    "mad.wide.u32": lambda a, b, c: a.astype(np.uint64) * b + c,
    "mov.b32": lambda a: a,
}


class Machine:
    """Memory of one warpgroup, and its copies by cp.async, which land when it waits for their group."""

    def __init__(self, size: int = 0):
        self.memory = np.zeros(size, np.uint8)
        self._groups: list[list[tuple[np.ndarray, np.ndarray]]] = [[]]

    def run(self, code: str, results: int, *operands: np.ndarray) -> list[np.ndarray]:
        """Return the results $0, $1, ... of code on words of all threads; other operands follow them."""
        registers = {f"${results + i}": x for i, x in enumerate(operands)}
        count = max((len(x) for x in operands), default=1)

        def value(name: str) -> np.ndarray:
            known = registers.get(name)
            return np.full(count, int(name, 0), np.uint32) if known is None else known

        for line in filter(None, map(str.strip, code.strip("{} ").split(";"))):
            if line.startswith(".reg"):
                continue
            holds = np.full(count, True)
            if line.startswith("@"):
                predicate, _, line = line[1:].partition(" ")
                holds = value(predicate)
            opcode, _, names = line.partition(" ")
            if found := re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", names):  # mov.b32 {a, b}, w
                low, high, word = found.groups()
                registers |= {low: value(word) & 0xFFFF, high: value(word) >> 16}
            elif opcode.startswith(("cp.", "ld.", "st.")):
                at = [
                    (value(base).astype(np.int64) + int(offset or 0))[:, None]
                    for base, offset in re.findall(r"\[([$\w]+)(?: \+ (\d+))?\]", names)
                ]
                words = re.findall(r"[$\w]+", re.sub(r"\[.*?\]", "", names))
                self._access(opcode, at, words, value, holds, registers)
            else:
                target, *sources = names.split(", ")
                registers[target] = INSTRUCTIONS[opcode](*map(value, sources))
        return [registers[f"${i}"] for i in range(results)]

    def _access(
        self,
        opcode: str,
        at: list[np.ndarray],
        words: list[str],
        value: Any,
        holds: np.ndarray,
        registers: dict[str, np.ndarray],
    ) -> None:
        """Run a copy, a load to words, or a store of words, where it holds."""
        memory, bytes_of_piece = self.memory, np.arange(16)
        if opcode == "cp.async.commit_group":
            self._groups.append([])
        elif opcode == "cp.async.wait_group":
            while len(self._groups) - 1 > int(words[0]):
                for places, found in self._groups.pop(0):
                    memory[places] = found
        elif opcode.startswith("cp."):
            target, source = at
            copied = bytes_of_piece < value(words[-1])[:, None]
            found = np.where(copied, memory[np.where(copied, source + bytes_of_piece, 0)], 0)
            self._groups[-1].append((target + bytes_of_piece, found))
        elif opcode.startswith("st."):
            stored = np.stack([value(x) for x in words], -1).view(np.uint8)
            memory[(at[0] + np.arange(4 * len(words)))[holds]] = stored[holds]
        else:
            size = 2 if opcode.endswith("16") else 4
            for i, word in enumerate(words):
                found = np.zeros((len(holds), 4), np.uint8)
                found[:, :size] = memory[
                    np.where(holds[:, None], at[0] + size * i + np.arange(size), 0)
                ]
                loaded = found.view(np.uint32)[:, 0]
                registers[word] = np.where(holds, loaded, registers.get(word, loaded))
