"""Prints the time of each kernel of an implementation, forward and backward together.

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

MAX_NAME = 100  # characters that are printed of a kernel's name; names of templates have a thousand


def kernel_medians(
    times: Iterable[list[tuple[str, float]]], min_fraction: float = 0.01
) -> list[tuple[str, float]]:
    """Return the median microseconds of each kernel in the order of first launches, given milliseconds by iteration.

    Kernels of one name are added up, and those below a fraction of the total are "others".
    """
    totals: list[dict[str, float]] = []
    for iteration in times:
        by_name: dict[str, float] = {}
        for name, ms in iteration:
            by_name[name] = by_name.get(name, 0.0) + ms * 1e3
        totals.append(by_name)
    medians = {name: statistics.median(x[name] for x in totals) for name in totals[0]}
    small = {name for name, time in medians.items() if time < min_fraction * sum(medians.values())}
    large = [(name, time) for name, time in medians.items() if name not in small]
    return [*large, ("others", sum(medians[name] for name in small))] if small else large


def table(shape: str, implementation: str, times: list[tuple[str, float]]) -> str:
    lines = [f"{shape}, {implementation}: {sum(t for _, t in times):.0f} us"]
    return "\n".join(lines + [f"{time:10.1f}  {name[:MAX_NAME]}" for name, time in times])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "shapes", type=run.names_among(SHAPES), help="names in benchmarks/shapes.py"
    )
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
                text = table(
                    name, label, kernel_medians(kernel_times(fn, args, options.iterations))
                )
            except Exception as e:  # noqa: BLE001 - other implementations may support the shape
                text = f"{name}, {label}: {measure.describe_failure(e, args)}"
            print(text, flush=True)


if __name__ == "__main__":
    main()
