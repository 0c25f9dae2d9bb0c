"""Makes the library plan for an H200 on a machine without one."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from pallas_fa2.spec import Device

H200 = Device("gpu", "NVIDIA H200", "9.0", 132)


@contextlib.contextmanager
def planned_for_h200(cores: int = H200.cores) -> Iterator[None]:
    """What is traced inside may be interpreted or compiled, not run."""
    device = H200._replace(cores=cores)
    with mock.patch("pallas_fa2.api.device_of", lambda array: device):
        yield
