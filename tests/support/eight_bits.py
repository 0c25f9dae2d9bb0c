"""Operations of keys and values of 8 bits, and their copies by cp.async, in the interpreter.

Operations are called as those of `meetings`.
"""

import numpy as np

from tests.support import accesses, shared
from tests.support.shared import the_memory


def _read(thread, array, source_info):
    return np.ascontiguousarray(accesses.read_from_device(thread, array, source_info))


def _load_piece(thread, array, index, row, end, *, offset, source_info):
    """Return 16 bytes as four int32, so many bytes behind a piece of each thread, if its row is before the end; else
    zeros."""
    exists, whole = row < end, _read(thread, array, source_info).view(np.uint8)
    assert np.all(index[exists] >= 0)
    found = whole.reshape(-1, 16)[np.where(exists, index + offset // 16, 0)]
    return list(np.where(exists[:, None], found, np.uint8(0)).view(np.int32).T)


def _load_scale(thread, scales, index, row, end, *, source_info):
    """Return the bits of an element of each thread whose row is before the end; else zeros."""
    exists, whole = row < end, _read(thread, scales, source_info).view(np.uint16)
    assert np.all(index[exists] >= 0)
    return [np.where(exists, whole.reshape(-1)[np.where(exists, index, 0)], 0).astype(np.int32)]


def _copy_piece(thread, target, array, *where, offset, source_info):
    """Leave 16 bytes of each thread to land when it waits for their group."""
    words = _load_piece(thread, array, *where, offset=offset, source_info=source_info)
    _find_copies_to(target, thread)
    shared.current.copies[thread][-1].append((target, np.stack(words, -1).reshape(-1)))


def _commit_group(thread, *, source_info):
    if bulk := the_memory().bulk:
        return bulk.commit_group(thread)
    shared.current.copies[thread].append([])


def _wait_groups(thread, *, pending, source_info):
    """Let all groups of copies land but the last ones."""
    if bulk := the_memory().bulk:
        return bulk.wait_groups(thread, pending)
    groups = shared.current.copies[thread]
    while len(groups) - 1 > pending:
        for copy in groups.popleft():
            accesses.write(thread, *copy, source_info)


def _find_copies_to(target, thread):
    """Report copies of a thread to this memory that are under way."""
    key, access = target
    for other, _ in (copy for group in shared.current.copies[thread] for copy in group):
        if other[0] == key and all(map(shared.meet, access.range, other[1].range)):
            raise shared.RaceDetected([f"{access.range} is used while cp.async copies to it"])


def _share_scales(thread, scales, scale, *, source_info):
    accesses.write(thread, scales, _twice(scale), source_info)


def _twice(halves):
    return (halves.view(np.uint32) << 16 | halves.view(np.uint32)).view(np.int32)


def _store_staged(thread, buffer, pieces, scales, *, dtype, targets, first_row, source_info):
    """Store the numbers of all threads times their rows' scales."""
    memory = the_memory()
    _find_copies_to(pieces, thread)
    value, pieces, scales = (
        memory.get_buffer_content(*ref, thread)[0] for ref in (buffer, pieces, scales)
    )
    scales = scales[first_row:]
    for target, words in zip(targets, pieces, strict=True):
        own_row, _ = target.band.own_row_and_piece(np.arange(128))
        _put_piece(value, target, dtype, words.reshape(-1, 4), scales[target.row + own_row])
    accesses.write(thread, buffer, value, source_info)


def _store_pieces(thread, buffer, *values, dtype, targets, source_info):
    """Store the numbers of all threads times their scales."""
    value, _, _ = the_memory().get_buffer_content(*buffer, thread)
    for target, (*words, scale) in zip(targets, zip(*[iter(values)] * 5, strict=True), strict=True):
        _put_piece(value, target, dtype, np.stack(words, -1), _twice(scale))
    accesses.write(thread, buffer, value, source_info)


def _put_piece(value, target, dtype, words, scale):
    """Put pieces of all threads where they belong in a buffer."""
    own_row, own_piece = target.band.own_row_and_piece(np.arange(128))
    columns = target.band.start + 16 * own_piece[:, None] + np.arange(16)
    scales = (scale.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        numbers = words.view(dtype).astype(np.float32) * scales[:, None]
        value[target.row + own_row[:, None], columns] = numbers.astype(value.dtype)


# By the names of inline operations.
OPERATIONS = {
    "commit_group": _commit_group,
    "copy_piece": _copy_piece,
    "load_piece": _load_piece,
    "load_scale": _load_scale,
    "share_scales": _share_scales,
    "store_pieces": _store_pieces,
    "store_staged": _store_staged,
    "wait_groups": _wait_groups,
}
