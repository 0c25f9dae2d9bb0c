"""Which kernels the time of an implementation goes to, forward and backward together.

    python -m benchmarks.kernels d128_s4096_f,d128_s4097_f --rivals fa3

Microseconds by CUPTI on one GPU, the median over `--iterations`, of each kernel that takes 1 % or more.
Results are not checked: `benchmarks.run` does that.
"""

import argparse
import functools
import statistics
from collections.abc import Iterable

import jax

from benchmarks import measure, rivals, run
from benchmarks.shapes import SHAPES
from pallas_fa2.planning.autotune import kernel_times

NAME = 100  # characters of a kernel's; those of templates have a thousand


def shares(
    found: Iterable[list[tuple[str, float]]], least: float = 0.01
) -> list[tuple[str, float]]:
    """Microseconds of each kernel, in the order of their first launches; those of one name together, and
    those below a share of all of them as "others"."""
    totals: list[dict[str, float]] = []
    for iteration in found:
        by_name: dict[str, float] = {}
        for name, ms in iteration:
            by_name[name] = by_name.get(name, 0.0) + ms * 1e3
        totals.append(by_name)
    times = {name: statistics.median(x[name] for x in totals) for name in totals[0]}
    small = {name for name, time in times.items() if time < least * sum(times.values())}
    large = [(name, time) for name, time in times.items() if name not in small]
    return [*large, ("others", sum(times[name] for name in small))] if small else large


def table(shape: str, implementation: str, times: list[tuple[str, float]]) -> str:
    lines = [f"{shape}, {implementation}: {sum(t for _, t in times):.0f} us"]
    return "\n".join(lines + [f"{time:10.1f}  {name[:NAME]}" for name, time in times])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", type=run.names_among(SHAPES), help="of benchmarks/shapes.py")
    parser.add_argument("--rivals", type=run.names_among(rivals.IMPLEMENTATIONS), default=[])
    parser.add_argument("--iterations", type=int, default=10)
    options = parser.parse_args(argv)
    implementations, _ = rivals.importable(("ours", *options.rivals))
    for name in options.shapes:
        shape, args = SHAPES[name], measure.inputs(SHAPES[name])
        for label, implementation in implementations.items():
            attention = functools.partial(implementation.attention, shape)
            fn = jax.jit(measure.with_gradients(attention))
            try:
                text = table(name, label, shares(kernel_times(fn, args, options.iterations)))
            except Exception as e:  # noqa: BLE001 - what one of them does not take, others may
                text = f"{name}, {label}: {measure.cause(e, args)}"
            print(text, flush=True)


if __name__ == "__main__":
    main()
