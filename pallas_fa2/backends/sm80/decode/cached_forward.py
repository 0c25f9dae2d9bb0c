"""The forward of `cached_attention` by mma.sync."""

from pallas_fa2.backends.common.decode.cached_forward import make
from pallas_fa2.backends.sm80.decode.config import choose
from pallas_fa2.backends.sm80.decode.kernel import decode
from pallas_fa2.backends.sm80.decode.support import unsupported_reason

CACHED_FORWARD = make(unsupported_reason, choose, decode)
