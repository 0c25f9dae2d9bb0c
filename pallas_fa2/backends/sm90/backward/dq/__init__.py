"""Ways to sum dQ over the blocks of keys, and which one a launch takes."""

from pallas_fa2.backends.sm90.backward.dq.atomic import AtomicDq
from pallas_fa2.backends.sm90.backward.dq.first_store import FirstStoreDq
from pallas_fa2.backends.sm90.backward.dq.head_per_cta import HeadPerCtaDq
from pallas_fa2.backends.sm90.backward.dq.ordered import OrderedDq
from pallas_fa2.backends.sm90.backward.dq.strategy import DqRequest, DqStrategy

# The first one that suits is taken (docs/design/backward.md).
STRATEGIES: tuple[type[DqStrategy], ...] = (HeadPerCtaDq, OrderedDq, FirstStoreDq, AtomicDq)


def choose(request: DqRequest) -> DqStrategy:
    """Return the strategy of a launch, with its schedule."""
    return next(strategy for strategy in STRATEGIES if strategy.suits(request)).choose(request)
