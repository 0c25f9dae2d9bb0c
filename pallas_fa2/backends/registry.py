"""The backends, fastest first. A new backend is a folder of its own and a line here."""

from pallas_fa2.backends import reference
from pallas_fa2.backends.protocol import Backend
from pallas_fa2.backends.sm80 import backend as sm80
from pallas_fa2.backends.sm90 import backend as sm90
from pallas_fa2.backends.xla import blockwise

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (sm90.BACKEND, sm80.BACKEND, blockwise.BACKEND, reference.BACKEND)
}
FUSED = tuple(name for name, backend in BACKENDS.items() if backend.is_fused)
