"""What a message is made of: sections of one dtype each, the widest items first, so that none needs padding."""

from __future__ import annotations

import torch
from torch import Tensor


def length(*sections: tuple[int, torch.dtype]) -> int:
    """Bytes of a message with these (count, dtype)."""
    return sum(count * dtype.itemsize for count, dtype in sections)


def cut(message: Tensor, *sections: tuple[int, torch.dtype]) -> list[Tensor]:
    """Views of a message, one for each (count, dtype), in the order asked for."""
    views: list[Tensor] = [message] * len(sections)
    begin = 0
    for i in sorted(range(len(sections)), key=lambda i: -sections[i][1].itemsize):
        count, dtype = sections[i]
        end = begin + count * dtype.itemsize
        views[i] = message[begin:end].view(dtype)
        begin = end
    return views
