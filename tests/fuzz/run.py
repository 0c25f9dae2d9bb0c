"""Random calls against the dense definition, and one failed call again.

    python -m tests.fuzz 1000                  # cases 0 to 999 of seed 0; --start goes on from there
    python -m tests.fuzz --gpu 200             # on JAX's own device, by the implementation it chooses
    python -m tests.fuzz --gpu --implementation ampere 200    # by this one, where it takes the call
    python -m tests.fuzz --caches 500          # those among the cases that are calls on caches
    python -m tests.fuzz "Case(q_len=33)"      # the line that a failure has printed

Case n of a seed is the same everywhere, whatever ran before it. A failure is shrunk, printed as one
line and does not stop the run; the exit status says whether there was one.
"""

import argparse
import concurrent.futures
import functools
import multiprocessing
import os
import random
import time
from collections import Counter

import jax

from pallas_fa2.backends.registry import BACKENDS
from tests.fuzz import cached, decoding, masks, scores
from tests.fuzz import case as calls
from tests.fuzz.cached import Cached
from tests.fuzz.case import Case
from tests.fuzz.check import Checked, Wrong, implementations
from tests.fuzz.check import check as check_call
from tests.fuzz.decoding import Decoding
from tests.support import numpy_threads

ATTEMPTS = 60  # to shrink a case: each compiles a program or two


def _prepare(gpu: bool) -> None:
    """Configure JAX as tests/conftest.py does, in a process without pytest."""
    if not gpu:
        jax.config.update("jax_platforms", "cpu")
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


AnyCase = Case | Cached | Decoding
DECODINGS = 5  # one in so many cases is a layer that decodes, and one a step on a cache


def nth(seed: int, n: int, gpu: bool) -> AnyCase:
    pick = random.Random(f"{seed}/{n}").choice
    if not gpu and n % DECODINGS == DECODINGS - 1:
        return decoding.draw(pick)
    if n % DECODINGS == DECODINGS - 2:
        return cached.draw(pick, for_kernels=gpu)
    return calls.draw(pick, for_hopper=gpu)


def check(case: AnyCase, *names: str | None, draws: int = 1) -> Checked:
    """Raises `Wrong`. A layer that decodes runs by the implementation that the case says."""
    if isinstance(case, Case):
        return check_call(case, *names, draws=draws)
    ran = {f"{case.layer} decoding"} if isinstance(case, Decoding) else set()
    try:
        if isinstance(case, Cached):
            ran = {f"{cached.check(case, name)} on caches" for name in names}
        else:
            decoding.check(case)
    except Exception as e:
        raise Wrong(
            case, str(e) if isinstance(e, AssertionError) else f"{type(e).__name__}: {e}"
        ) from e
    return Checked(0.0, ran)


def parse(line: str) -> AnyCase:
    """The case of a line that a failure has printed."""
    known = (calls, cached, decoding, masks, scores)
    names = {n: x for m in known for n, x in vars(m).items() if isinstance(x, type)}
    case = eval(line, {"__builtins__": {}, "float": float, **names})
    if not isinstance(case, AnyCase):
        raise TypeError(f"a case looks like Case(q_len=33, mask=Causal()), not {line!r}")
    return case


def simpler(case: AnyCase) -> list:
    if isinstance(case, Cached):
        return cached.simpler(case)
    return calls.simpler(case) if isinstance(case, Case) else decoding.simpler(case)


def fault(case: AnyCase, gpu: bool, preferred: str | None = None) -> Wrong | None:
    try:
        check(case, *implementations(gpu, preferred))
    except Wrong as e:
        return e
    return None


def shrink(wrong: Wrong, gpu: bool, preferred: str | None = None) -> Wrong:
    """The simplest case that still fails, as far as so many attempts go."""
    smaller = iter(simpler(wrong.case))
    for _ in range(ATTEMPTS):
        candidate = next(smaller, None)
        if candidate is None:
            break
        failure = fault(candidate, gpu, preferred)
        if failure is not None:
            wrong, smaller = failure, iter(simpler(failure.case))
    return wrong


def run(n: int, seed: int, gpu: bool, preferred: str | None = None) -> tuple[set[str], str | None]:
    """The implementations that ran case n, or why one of them is wrong."""
    if n % 50 in (0, DECODINGS - 2):
        jax.clear_caches()  # no program is met again for long
    try:
        return check(nth(seed, n, gpu), *implementations(gpu, preferred)).ran, None
    except Wrong as e:
        print(f"case {n} of seed {seed} is wrong, and will be shrunk: {e}", flush=True)
        return set(), str(shrink(e, gpu, preferred))


def cases_of_caches(numbers: range) -> range:
    """The numbers of the cases that are calls on caches, of which these are the first, the second and so on."""
    return range(*(DECODINGS * n + DECODINGS - 2 for n in (numbers.start, numbers.stop)), DECODINGS)


def fuzz(
    count: int,
    seed: int,
    start: int,
    jobs: int,
    gpu: bool,
    preferred: str | None = None,
    caches: bool = False,
) -> int:
    """Runs the cases in `jobs` processes; the number of failures."""
    failures, passed, begun, end = 0, Counter(), time.time(), start + count
    numbers = cases_of_caches(range(start, end)) if caches else range(start, end)
    numpy_threads.use_one()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, spawn, _prepare, (gpu,)) as pool:
        function = functools.partial(run, seed=seed, gpu=gpu, preferred=preferred)
        results = zip(numbers, pool.map(function, numbers), strict=True)
        for n, (number, (ran, why)) in enumerate(results, start):
            passed.update(ran)
            if why is not None:
                failures += 1
                print(f"case {number} of seed {seed}: {why}", flush=True)
            if (n + 1 - start) % 20 == 0 or n + 1 == end:
                by = ", ".join(f"{n} by {name}" for name, n in sorted(passed.items()))
                print(
                    f"{n + 1 - start} cases, {failures} failed; passed {by}; "
                    f"{time.time() - begun:.0f} s; go on with --seed {seed} --start {n + 1}",
                    flush=True,
                )
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("what", help="how many cases, or one case")
    parser.add_argument("--gpu", action="store_true", help="JAX's device; cases that kernels run")
    parser.add_argument(
        "--implementation", choices=BACKENDS, help="with --gpu: what runs a case that it supports"
    )
    parser.add_argument("--caches", action="store_true", help="calls on caches alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the first case")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    if options.implementation and not options.gpu:
        parser.error("--implementation needs --gpu: on a CPU reference and blockwise run all cases")
    _prepare(options.gpu)
    if options.what.isdigit():
        count = int(options.what)
        jobs, preferred = options.jobs, options.implementation
        given = options.start, jobs, options.gpu, preferred, options.caches
        return fuzz(count, options.seed, *given) > 0
    failure = fault(parse(options.what), options.gpu, options.implementation)
    print("passed" if failure is None else failure)
    return failure is not None
