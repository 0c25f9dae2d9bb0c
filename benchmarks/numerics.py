"""Measures the errors of out, lse, dq, dk and dv in each dtype and head dim, beside dense attention and rivals.

    python -m benchmarks.numerics                  # benchmarks/results/numerics-<device>.json
    python -m benchmarks.numerics --length 1024    # another length
    python -m benchmarks.numerics --jobs 16        # 16 cases at a time, each in a process of its own
    python -m benchmarks.numerics --page           # writes only the page, from all files of results

Causal attention on random inputs is compared with dense attention in float64 on the same, rounded, inputs; an error is
a Frobenius norm over that of the expected array. Outliers are FlashAttention-3's (arXiv:2407.08608, section 4.3):
N(0, 1) + N(0, 100) for one element in a thousand of q, k and v. The exit status is 1 if ours violates FlashAttention's
rule: at most twice the error of dense attention.
"""

import argparse
import functools
import pathlib
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import pallas_fa2 as fa
from benchmarks import jobs, record, rivals
from benchmarks.measure import FACTOR
from benchmarks.shapes import Shape

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "benchmarks" / "numerics.md"
DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (64, 128, 256)
INPUTS = ("normal", "outliers")
RESULTS = ("out", "lse", "dq", "dk", "dv")
OURS = ("hopper", "blockwise", "reference")
# The error that is always allowed in float32, where dense attention may have less by chance.
FLOOR = 2.0**-21


def inputs(shape: Shape, dtype: str, kind: str) -> tuple[jax.Array, ...]:
    """Return query, key, value and the cotangent of the output."""
    rng = np.random.default_rng(0)

    def normal(length: int, heads: int) -> np.ndarray:
        return rng.standard_normal((shape.batch, length, heads, shape.head_dim))

    q = normal(shape.q_len, shape.q_heads)
    k, v = (normal(shape.kv_len, shape.kv_heads) for _ in range(2))
    dout = normal(shape.q_len, shape.q_heads)
    if kind == "outliers":
        for x in (q, k, v):
            x += (rng.random(x.shape) < 1e-3) * 10 * rng.standard_normal(x.shape)
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v, dout))


def dense(shape: Shape, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute attention as in plain jnp: every product in the inputs' dtype, the softmax in float32."""
    k, v = (jnp.repeat(x, shape.q_heads // shape.kv_heads, 2) for x in (k, v))
    product = functools.partial(jnp.einsum, precision="highest")
    s = product("btnh,bsnh->bnts", q, k).astype(jnp.float32) * shape.head_dim**-0.5
    s = jnp.where(jnp.tri(shape.q_len, shape.kv_len, dtype=bool)[None, None], s, -jnp.inf)
    p = jax.nn.softmax(s, -1).astype(q.dtype)
    return product("bnts,bsnh->btnh", p, v), jax.nn.logsumexp(s, -1)


def ours(name: Any, shape: Shape, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    mask, align = rivals.mask_of(shape), rivals.align_of(shape)
    return fa.flash_attention(q, k, v, mask=mask, align=align, return_lse=True, implementation=name)


def all_implementations() -> dict[str, Callable]:
    """Return functions (shape, q, k, v) -> out and lse, or out alone, without rivals that cannot be imported."""
    available, _ = rivals.importable(n for n in rivals.IMPLEMENTATIONS if n != "ours")
    backends = {name: functools.partial(ours, name) for name in OURS}
    return {"dense": dense, **backends, **{name: x.attention for name, x in available.items()}}


def values_and_gradients(attention: Callable, shape: Shape, args: tuple) -> dict[str, np.ndarray]:
    @jax.jit
    def run(q: Any, k: Any, v: Any, dout: Any) -> dict[str, Any]:
        def split(*qkv: Any) -> tuple:
            results = attention(shape, *qkv)
            return results if isinstance(results, tuple) else (results, None)

        out, vjp, lse = jax.vjp(split, q, k, v, has_aux=True)
        return dict(zip(RESULTS, (out, lse, *vjp(dout)), strict=True))

    return {n: np.asarray(x, np.float64) for n, x in run(*args).items() if x is not None}


def expected_results(shape: Shape, args: tuple) -> dict[str, np.ndarray]:
    wide = [np.asarray(x, np.float64) for x in args]
    with jax.enable_x64(True):
        attention = functools.partial(ours, "reference")
        return values_and_gradients(attention, shape, tuple(map(jnp.asarray, wide)))


def row(attention: Callable, shape: Shape, args: tuple, expected: dict) -> dict[str, Any]:
    """Return the error of each result, or the reason why there is none."""
    try:
        results = values_and_gradients(attention, shape, args)
    except Exception as e:  # noqa: BLE001 - a rival without this shape must not end the run
        return {"refused": f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"}
    norm = np.linalg.norm
    pairs = {n: (results[n], expected[n]) for n in RESULTS if n in results}
    return {n: float(f"{norm(x - y) / norm(y):.3g}") for n, (x, y) in pairs.items()}


def excessive(rows: dict[str, dict], name: str) -> list[str]:
    """Return the results in which an implementation has more than twice the error of dense attention."""
    errors = {result: e for result, e in rows[name].items() if result in RESULTS}
    limits = {result: max(FACTOR * rows["dense"][result], FLOOR) for result in errors}
    return [
        result for result, e in errors.items() if not e <= limits[result]
    ]  # `e > limit` is False for NaN


def measure_case(case: str, length: int) -> dict[str, Any]:
    """Return a row for each implementation; a case is inputs, a dtype and a head dim, such as normal,bfloat16,64."""
    kind, dtype, dim = case.split(",")
    shape = Shape(1, length, length, 4, 2, int(dim), causal=True)
    args = inputs(shape, dtype, kind)
    expected = expected_results(shape, args)
    rows = {name: row(x, shape, args, expected) for name, x in all_implementations().items()}
    return {"inputs": kind, "dtype": dtype, "head_dim": int(dim), "rows": rows}


def measure(length: int, processes: int) -> list[dict[str, Any]]:
    cases = [f"{kind},{dtype},{dim}" for kind in INPUTS for dtype in DTYPES for dim in HEAD_DIMS]
    done = jobs.run_all(functools.partial(measure_case, length=length), cases, processes)
    results = dict(tqdm(done, total=len(cases), disable=None))
    return [results[case] for case in cases]


def violations(measured: dict[str, Any]) -> list[str]:
    """Return the cases and results in which ours violates the rule."""
    return [
        f"{name}, {case['dtype']}, H = {case['head_dim']}, {case['inputs']}: {result}"
        for case in measured["results"]
        for name in OURS
        if name in case["rows"]
        for result in excessive(case["rows"], name)
    ]


def table(results: list[dict]) -> str:
    """Return a Markdown table, bold where the error is more than twice that of dense attention."""
    lines = [f"| H | | {' | '.join(RESULTS)} |", "|---" * (2 + len(RESULTS)) + "|"]
    for result in results:
        rows = result["rows"]
        for name in (n for n, errors in rows.items() if "refused" not in errors):
            bold = excessive(rows, name)
            cells = [f"{rows[name][p]:.2g}" if p in rows[name] else "" for p in RESULTS]
            cells = [f"**{c}**" if p in bold else c for p, c in zip(RESULTS, cells, strict=True)]
            lines.append(f"| {result['head_dim']} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def section(measured: dict[str, Any]) -> str:
    setup, results = measured["setup"], measured["results"]
    kinds = dict.fromkeys((r["inputs"], r["dtype"]) for r in results)
    run = f"T = {measured['length']}, {measured['date']}, commit {measured['commit']}"
    known = {n: setup[n] for n in ("driver", "jax", "jaxlib")} | setup["implementations"]
    versions = ", ".join(f"{n} {x}" for n, x in known.items() if x != "unknown")
    paragraphs = [f"## {setup['device']}", f"{run}; {versions}."]
    for kind, dtype in kinds:
        paragraphs.append(f"### {dtype}, {kind}")
        paragraphs.append(table([r for r in results if (r["inputs"], r["dtype"]) == (kind, dtype)]))
    return "\n\n".join(paragraphs)


INTRODUCTION = """# Numerics

Causal attention with four query heads and two key heads against dense attention in float64 of the same
rounded inputs: Frobenius norms of the errors over those of the truth. `dense` forms every product in
the inputs' dtype and the softmax in float32. Bold is more than twice its error (or 2^-21), which
FlashAttention's rule does not allow. `outliers` are N(0, 1) + N(0, 100) for one number in a thousand of
q, k and v. `python -m benchmarks.numerics` measures a device and writes this page from
`benchmarks/results/numerics-*.json`, which say why some have no row."""


def max_ratio(
    measured: dict[str, Any], kind: str, rival: str, names: tuple[str, ...]
) -> float | None:
    """Return the largest error of the Hopper kernels over a rival's, None if there is none."""
    ratios = [
        rows["hopper"][name] / rows[rival][name]
        for rows in (case["rows"] for case in measured["results"] if case["inputs"] == kind)
        for name in names
        if all(name in rows.get(x, {}) for x in ("hopper", rival))
    ]
    return max(ratios, default=None)


def conclusions(measured: dict[str, Any]) -> str | None:
    """Return in three sentences how the Hopper kernels compare, None where they did not run."""
    lse_errors = [r["rows"].get("hopper", {}).get("lse") for r in measured["results"]]
    lse = [x for x in lse_errors if x is not None]
    names = tuple(name for name in RESULTS if name != "lse")
    ratios = [
        [max_ratio(measured, kind, rival, names) for kind in INPUTS] for rival in ("fa3", "dense")
    ]
    if not lse or any(x is None for row in ratios for x in row):
        return None
    fa3, dense = ratios
    return (
        f"On the {measured['setup']['device']}, the errors of the Hopper kernels in out, dq, dk and dv are at most "
        f"{fa3[0]:.2f} of FlashAttention-3's for normal inputs and {fa3[1]:.2f} of them with outliers. They are at "
        f"most {dense[0]:.2f} and {dense[1]:.2f} of those of dense attention, where FlashAttention's rule allows "
        f"{FACTOR:.0f}. The logsumexp is off by at most {max(lse):.2g}."
    )


def page() -> str:
    measured = [record.load(file) for file in sorted(record.RESULTS.glob("numerics-*.json"))]
    concluded = [textwrap.fill(text, 100) for x in measured if (text := conclusions(x))]
    title, introduction = INTRODUCTION.split("\n\n", 1)
    return "\n\n".join([title, *concluded, introduction, *map(section, measured)]) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, help="tokens: 4096 on a GPU, else 512")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument(
        "--commit", help="the name of the commit, where the files are no git checkout"
    )
    args = parser.parse_args(argv)
    failed = []
    if not args.page:
        jobs.share_memory()
        length = args.length or (4096 if jax.default_backend() == "gpu" else 512)
        named, missing = rivals.importable(rivals.IMPLEMENTATIONS)
        for name, why in missing.items():
            print(f"without {name}: {why}", file=sys.stderr)
        setup = record.setup(named, iterations=1)
        measured = {
            "setup": setup,
            **record.stamp(args.commit),
            "length": length,
            "results": measure(length, args.jobs),
        }
        default = record.default_path(setup["device"])
        record.write(record.RESULTS / f"numerics-{default.name}", measured)
        failed = violations(measured)
        print("\n".join(failed) or "ours keeps FlashAttention's rule everywhere")
    PAGE.write_text(page())
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
