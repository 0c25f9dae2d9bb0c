"""Prints the kernels' hashes and the cache keys of calls, by this process: `python -m tests.support.program_keys NAME
...`.

The calls are lowered for an H200 in the order of the names, and printed as JSON.
"""

import json
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import jax

import pallas_fa2 as fa
from tests.support import compile_gate
from tests.support.hopper import arrays, attend_and_differentiate, planned_for_h200


def forward(q: Any, k: Any, v: Any, _: Any) -> Any:
    return fa.flash_attention(q, k, v, mask=fa.Causal(), implementation="hopper")


def scoped(*args: Any) -> Any:
    with jax.named_scope("layer"):
        return attend_and_differentiate(fa.Causal())(*args)


CALLS: dict[str, Callable] = {
    "forward": forward,
    "both": attend_and_differentiate(fa.Causal()),
    "scoped": scoped,
    "full": attend_and_differentiate(None),
}


def program_keys(run: Callable, length: int = 64) -> tuple[list[str], str]:
    """Return the hash of each kernel of a call with its backward, and the key by which JAX's cache knows all."""
    with planned_for_h200():
        text, key = compile_gate.program_for_h200(run, *arrays(length, length, (64, 64)))
    return _hashes(text), key


def kernel_hashes(lowered: jax.stages.Lowered) -> list[str]:
    """Return the hash of each kernel of a program, in order."""
    return _hashes(lowered.as_text())


def _hashes(text: str) -> list[str]:
    return re.findall(r'kernel_hash = "(.*?)", module = "', text)


if __name__ == "__main__":
    keys = {name: program_keys(CALLS[name]) for name in sys.argv[1:]}
    print(json.dumps({"package": str(pathlib.Path(fa.__file__).parent), **keys}))
