"""The message of one bucket: a 40-byte header and the payload, in one uint8 buffer.

The header is five int64: (magic, round, payload bytes, sender, checksum). A receive buffer that is longer than what
arrives is filled in part without an error by the backends, so the length has to be said and checked. The next number
after the magic marks an empty update: its sender had values that are not finite, and keeps them to itself.

The checksum is the sum of the payload's 8-byte words, modulo 2^64, on the CPU: no flipped bit escapes it, and it costs
less than a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decent_opt.errors import PeerLost

HEADER_BYTES = 40
_MAGIC = 0x4445434E54_02  # "DECNT", version 2 of the format
_EMPTY = _MAGIC + (1 << 48)


def payload(message: Tensor) -> Tensor:
    """Return the uint8 view behind the header."""
    return message[HEADER_BYTES:]


def stamp(message: Tensor, round: int, sender: int) -> None:
    """Write the header of a message that is about to be filled; `seal` ends it."""
    values = torch.tensor([_MAGIC, round, message.numel() - HEADER_BYTES, sender, 0], dtype=torch.int64)
    message[:HEADER_BYTES].view(torch.int64).copy_(values)


def seal(message: Tensor) -> None:
    """Write the checksum of a payload that is complete; on the CPU, where it is looked at."""
    if message.device.type == "cpu":
        message[HEADER_BYTES - 8 : HEADER_BYTES].view(torch.int64).fill_(_checksum(message))


def _checksum(message: Tensor) -> int:
    body = payload(message)
    words = body.numel() // 8 * 8
    # Sums of int64 wrap around, and so does what is left over, which is less than a word.
    return int(body[:words].view(torch.int64).sum()) ^ int(body[words:].sum())


def flag_empty(message: Tensor, empty: Tensor) -> None:
    """Mark a stamped message as an empty update where `empty`, (0-d, bool), holds; the host is not stopped."""
    if empty.device.type != "cpu" or empty:
        message[:8].view(torch.int64).add_(empty.to(torch.int64), alpha=_EMPTY - _MAGIC)


def flagged_empty(message: Tensor) -> Tensor:
    """The same as `is_empty`, as a tensor, (), bool: the host is not stopped."""
    return message[:8].view(torch.int64)[0] == _EMPTY


def is_empty(message: Tensor) -> bool:
    """Is this an empty update? On an accelerator the answer is no, and its zeros are decoded like all others."""
    return message.device.type == "cpu" and int(message[:8].view(torch.int64)) == _EMPTY


def check(message: Tensor, round: int, sender: int, me: int) -> None:
    """Raise `PeerLost` unless this is the expected message of `sender` in `round`.

    Only on the CPU: on an accelerator a look at the bytes would stop the host at every bucket, and NCCL itself
    refuses a message of another length.
    """
    if message.device.type != "cpu":
        return
    magic, got_round, got_bytes, got_sender, checksum = message[:HEADER_BYTES].view(torch.int64).tolist()
    expected = message.numel() - HEADER_BYTES
    if magic not in (_MAGIC, _EMPTY):
        problem = "is not a decent-opt message of this version"
    elif got_round != round:
        problem = f"belongs to round {got_round}: the ranks are out of step"
    elif got_bytes != expected:
        problem = f"carries {got_bytes} bytes, expected {expected}: the ranks mix different parameters"
    elif got_sender != sender:
        problem = f"was sent by rank {got_sender}"
    elif checksum != _checksum(message):
        problem = "was damaged on its way: its checksum does not fit"
    else:
        return
    raise PeerLost(f"rank {me}: what came from rank {sender} in round {round} {problem}", rank=sender, round=round)
