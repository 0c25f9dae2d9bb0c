"""Makes the library plan for an H200 on a machine without one."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from pallas_fa2.spec import Device

H200 = Device("gpu", "NVIDIA H200", "9.0", 132)


@contextlib.contextmanager
def planned_for_h200() -> Iterator[None]:
    """What is traced inside may be interpreted or compiled, not run."""
    with mock.patch("pallas_fa2.api.device_of", lambda array: H200):
        yield
