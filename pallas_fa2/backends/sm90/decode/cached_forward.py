"""The forwards of `cached_attention`, and of `flash_attention` with few queries, on Hopper."""

from pallas_fa2.backends.common.decode.cached_forward import make
from pallas_fa2.backends.common.decode.flash_forward import FlashForward
from pallas_fa2.backends.sm90.decode.config import choose
from pallas_fa2.backends.sm90.decode.kernel import decode
from pallas_fa2.backends.sm90.decode.support import unsupported_reason

CACHED_FORWARD = make(unsupported_reason, lambda spec, device: choose(spec, device.num_sms), decode)
FLASH_FORWARD = FlashForward(CACHED_FORWARD)
