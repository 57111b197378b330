"""The sum of m/n blocks over the workers, and the bytes it takes.

    S = sum_i (v_i)_{U_i}                  (v)_U is v on the blocks U and zero elsewhere

A message is the chosen values, one block after the other: everybody draws everybody's U_i from the seed, so no index
is sent. All workers add in the order of the ranks, so S has the same bits on all of them, by both ways:

    gather      the values to all others: (n - 1) tau d out and in, per worker
    server      the values to rank 0, tau d, which sends S back, d:  the master and workers of "99% of Distributed
                Optimization is a Waste of Time" (arXiv 1901.09437)

It waits for the others: for gradients that are sent while a backward pass runs see `block_sparse_hook`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from decent_opt.communication import Traffic, Transport
from decent_opt.errors import ConfigError
from decent_opt.sparsification.sampler import BlockSampler

Aggregation = Literal["gather", "server"]
SERVER = 0


class BlockExchange:
    """Sums of m/n blocks over a transport. Every method is collective.

    Args:
        transport: to the other workers. In a world of one, nothing is sent, and S = (v)_U.
        aggregation: "gather" or "server"; see the module.

    Attributes:
        traffic: of the last sum: bytes by peer, out and in.

    Raises:
        ConfigError: an aggregation that does not exist.
    """

    def __init__(self, transport: Transport, aggregation: Aggregation = "gather") -> None:
        check_aggregation(aggregation)
        self.transport, self.aggregation = transport, aggregation
        self.traffic = Traffic()

    def sum(self, sampler: BlockSampler, v: Tensor, step: int, sent: Tensor | None = None) -> Tensor:
        """S, (d,), a new tensor.

        Args:
            sampler: of all workers' draws, over d elements; the same on all.
            v: (d,), float32 or float64, contiguous; left as it is.
            step: which draws; the same on all workers.
            sent: (d,), to be overwritten with (v)_U of this worker, where that is wanted.

        Raises:
            ConfigError: a dtype or a shape that cannot be summed.
            PeerLost: a worker does not take part in time.
        """
        return self.sum_and_gather(sampler, v, step, v.new_empty(0), sent)[0]

    def sum_and_gather(
        self, sampler: BlockSampler, v: Tensor, step: int, along: Tensor, sent: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """S, (d,), and what all workers sent along, (n, c), in the order of their ranks.

        Args:
            sampler, v, step, sent: as for `sum`.
            along: (c,), a few numbers that every worker is to know of all others; c is the same on all.
        """
        _check(v, along)
        chosen = [sampler.chosen(step, rank) for rank in range(self.transport.size)]
        rooms = [sampler.blocks.room(blocks) for blocks in chosen]
        rank, count = self.transport.rank, len(along)
        message = v.new_empty(rooms[rank] + count)
        sampler.blocks.pack(v, chosen[rank], message[: rooms[rank]])
        message[rooms[rank] :].copy_(along)
        if sent is not None:
            sampler.blocks.add_(sent.zero_(), chosen[rank], message[: rooms[rank]])

        def combine(messages: list[Tensor]) -> Tensor:
            """S and the numbers sent along, in one: (d + n c,)."""
            total = v.new_zeros(len(v) + len(messages) * count)
            numbers = total[len(v) :].view(len(messages), count)
            for worker, (room, blocks) in enumerate(zip(rooms, chosen, strict=True)):
                sampler.blocks.add_(total[: len(v)], blocks, messages[worker][:room])
                numbers[worker].copy_(messages[worker][room:])
            return total

        self.traffic = Traffic()
        if self.aggregation == "gather" or len(rooms) == 1:
            total = combine(self._to_all(message, [room + count for room in rooms], step))
        elif rank == SERVER:
            total = combine(self._to_server(message, [room + count for room in rooms], step))
            self._post({peer: total for peer in range(len(rooms)) if peer != rank}, {}, step)
        else:
            total = v.new_empty(len(v) + len(rooms) * count)
            # One after the other: over NCCL a batch of both would be one that the server answers with two.
            self._post({SERVER: message}, {}, step)
            self._post({}, {SERVER: total}, step)
        return total[: len(v)], total[len(v) :].view(len(rooms), count)

    def _to_all(self, message: Tensor, sizes: list[int], step: int) -> list[Tensor]:
        """Every worker's message, on every worker."""
        messages = self._room_for(message, sizes)
        others = {peer: m for peer, m in enumerate(messages) if peer != self.transport.rank}
        self._post(dict.fromkeys(others, message), others, step)
        return messages

    def _to_server(self, message: Tensor, sizes: list[int], step: int) -> list[Tensor]:
        """Every worker's message, on the server."""
        messages = self._room_for(message, sizes)
        self._post({}, {peer: m for peer, m in enumerate(messages) if peer != self.transport.rank}, step)
        return messages

    def _room_for(self, message: Tensor, sizes: list[int]) -> list[Tensor]:
        return [message if i == self.transport.rank else message.new_empty(size) for i, size in enumerate(sizes)]

    def _post(self, sends: dict[int, Tensor], receives: dict[int, Tensor], step: int) -> None:
        """Send, receive and wait; messages of no length are not sent."""
        out = {peer: tensor.view(torch.uint8) for peer, tensor in sends.items() if len(tensor)}
        into = {peer: tensor.view(torch.uint8) for peer, tensor in receives.items() if len(tensor)}
        new, all_so_far = self.transport.post(out, into, step).wait(), self.traffic
        all_so_far.sent.update(new.sent)
        all_so_far.received.update(new.received)
        for peer, seconds in new.wait_seconds.items():
            all_so_far.wait_seconds[peer] = all_so_far.wait_seconds.get(peer, 0.0) + seconds


def check_aggregation(aggregation: str) -> None:
    """Raise a ConfigError for a way that does not exist."""
    if aggregation not in get_args(Aggregation):
        raise ConfigError(f"aggregation: allowed are {', '.join(get_args(Aggregation))}, got {aggregation!r}")


def _check(v: Tensor, along: Tensor) -> None:
    if v.dim() != 1 or not v.is_contiguous() or v.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            "v: has to be flat, contiguous, and float32 or float64, "
            f"got shape {tuple(v.shape)}, strides {v.stride()} and {v.dtype}"
        )
    if along.dtype != v.dtype or along.dim() != 1:
        raise ConfigError(f"along: has to be flat and {v.dtype}, got shape {tuple(along.shape)} and {along.dtype}")
