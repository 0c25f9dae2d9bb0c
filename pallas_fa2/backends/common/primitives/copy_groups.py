"""Groups of a thread's copies by cp.async (PTX ISA)."""

from pallas_fa2.backends.common.inline import asm, inline_op


@inline_op("commit_group")
def commit_group(_) -> None:
    """Make a group of the thread's copies since the last one."""
    asm("cp.async.commit_group;", "")


def wait_groups(pending: int) -> None:
    """Wait until all but the last `pending` of the thread's groups have landed."""

    @inline_op("wait_groups", pending=pending)
    def wait(_) -> None:
        asm(f"cp.async.wait_group {pending};", "")

    wait()
