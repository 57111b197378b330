"""One round of CPD-SGDM: only a compressed difference to a public copy travels (arXiv 2008.10435; Choco-SGD).

    mix:      x_k    <- x_k + gamma z_k,       z_k = sum_j w_kj (xhat_j - xhat_k)
    send:     q_k     = Q(x_k - xhat_k);       xhat_k <- xhat_k + q_k;     post q_k
    absorb:   z_k    <- z_k + sum_j w_kj q_j - (1 - w_kk) q_k              when the neighbours' q_j are there

The paper mixes with the copies of the last round: absorb, mix, send; so its messages are on their way during the p
local steps until the next round. The fresh order of Choco-SGD is send, absorb, mix.

Everybody knows everybody's public copy xhat in principle; what a worker needs of its neighbours' is the pull z alone.
So the state is two vectors, xhat and z, whatever the degree; W has to be the same in every round. Since W is symmetric
and doubly stochastic, sum_k z_k = 0, and mixing keeps the workers' average.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decent_opt.communication import Pending, Transport
from decent_opt.compression import Compressor, Key, Layout, row_of
from decent_opt.gossip.buckets import Bucket, flatten, make_buckets
from decent_opt.gossip.exchange import Mixing
from decent_opt.gossip.message import HEADER_BYTES, check, flag_empty, is_empty, payload, seal, stamp
from decent_opt.monitoring.ranges import phase
from decent_opt.topology import Topology


@dataclass(frozen=True)
class Mixable:
    """One parameter and what belongs to it, all of its shape.

    Attributes:
        x: the parameter.
        copy: its public copy xhat, float32 at least.
        pull: z, of the same dtype.
        compressor: Q.
        remainder: what a 16-bit x lacks to its float32 value, or None.
    """

    x: Tensor
    copy: Tensor
    pull: Tensor
    compressor: Compressor
    remainder: Tensor | None = None


@dataclass
class Part:
    """One bucket of parameters with their copies and pulls cut in the same way."""

    bucket: Bucket
    layout: Layout
    compressor: Compressor
    copies: list[Tensor]
    pulls: list[Tensor]

    @property
    def place(self) -> int:
        """A number that no other bucket of the round has, and that all ranks find: where it begins."""
        index, start, _ = self.bucket.spans[0]
        return (index << 40) + start


@dataclass
class _Posted:
    """A bucket's messages on their way."""

    part: Part
    message: Tensor
    incoming: dict[int, Tensor]
    pending: Pending


class _Rooms:
    """Room for one bucket at a time, allocated once for all buckets of a kind and all rounds.

    A fresh one for each bucket would grow the process by the size of the model, and one for each round by two buckets:
    the messages, which stay, are put into the holes that it leaves, and the next does not fit any more.
    """

    def __init__(self) -> None:
        self._rooms: dict[object, Tensor] = {}

    def provide(self, parts: Sequence[Part]) -> None:
        """Make room for the largest of these buckets."""
        for part in sorted(parts, key=lambda part: part.bucket.numel, reverse=True):
            bucket = part.bucket
            if bucket.kind not in self._rooms or len(self._rooms[bucket.kind]) < bucket.numel:
                self._rooms[bucket.kind] = torch.empty(bucket.numel, dtype=bucket.wide, device=bucket.device)

    def of(self, part: Part) -> Tensor:
        """A flat tensor of the bucket's length, of any content."""
        return self._rooms[part.bucket.kind][: part.bucket.numel]


class CompressedGossip:
    """Mixes parameters with the neighbours of a topology through compressed differences.

    Args:
        transport: this worker's access to the others.
        topology: of one symmetric mixing matrix.
        bucket_bytes: upper limit of the parameters that one message is about.
        seed: of random compressors; the same on all ranks.
    """

    def __init__(self, transport: Transport, topology: Topology, bucket_bytes: int, seed: int = 0) -> None:
        self.transport, self.bucket_bytes, self.seed = transport, bucket_bytes, seed
        self.peers = topology.peers(transport.rank, 0)
        self._posted: list[_Posted] = []
        self._round = -1
        self._mixing = Mixing()
        self._rooms = _Rooms()
        # A round's messages are kept for the next: memory that is given back in pieces is not always found again.
        self._messages: dict[int, list[Tensor]] = {}

    @property
    def in_flight(self) -> int | None:
        """The round whose messages have been posted and not absorbed, if there is one."""
        return self._round if self._posted else None

    def cut(self, mixables: Sequence[Mixable]) -> list[Part]:
        """Cut the parameters into buckets: those of one compressor together, small ones last, so that they adjoin."""
        parts = []
        for compressor in dict.fromkeys(m.compressor for m in mixables):
            mine = [(place, m) for place, m in enumerate(mixables) if m.compressor == compressor]
            mine.sort(key=lambda item: memory_row(item[1].x) == 1)
            rows = [memory_row(m.x) for _, m in mine]
            buckets = make_buckets([m.x for _, m in mine], self.bucket_bytes, [m.remainder for _, m in mine], rows)
            for bucket in buckets:
                runs = [(stop - start, _row(start, stop, rows[i])) for i, start, stop in bucket.spans]
                copies = [flatten(mine[i][1].copy)[0][start:stop] for i, start, stop in bucket.spans]
                pulls = [flatten(mine[i][1].pull)[0][start:stop] for i, start, stop in bucket.spans]
                bucket.spans = [(mine[i][0], start, stop) for i, start, stop in bucket.spans]
                parts.append(Part(bucket, Layout.join(runs), compressor, copies, pulls))
        return parts

    def mix(self, parts: Sequence[Part], gamma: float) -> None:
        """x <- x + gamma z."""
        self._rooms.provide(parts)
        for part in parts:
            bucket = part.bucket
            if bucket.dtype == bucket.wide and not bucket.scattered:
                torch._foreach_add_(bucket.pieces, part.pulls, alpha=gamma)
            else:
                correction = self._rooms.of(part)
                torch.cat(part.pulls, out=correction)
                bucket.add(correction.mul_(gamma))

    def send(self, parts: Sequence[Part], round: int) -> Mixing:
        """q = Q(x - xhat); xhat <- xhat + q; post q to the neighbours. What is returned `absorb` completes."""
        self._round, self._mixing = round, Mixing()
        norms, moved = [], []
        self._rooms.provide(parts)
        self._messages = {part.place: self._buffers(part) for part in parts}
        for part in parts:
            began = time.perf_counter()
            with phase("encode"):
                message, *others = self._messages[part.place]
                stamp(message, round, self.transport.rank)
                norms.append(self._encode(part, message, self._rooms.of(part)))
            self._mixing.encode_seconds += time.perf_counter() - began
            incoming = dict(zip(self.peers.receive, others, strict=True))
            pending = self.transport.post(dict.fromkeys(self.peers.send, message), incoming, round)
            self._posted.append(_Posted(part, message, incoming, pending))
            moved.append(_norm(part.pulls))
        if norms:
            self._mixing.error, self._mixing.scale = torch.stack([n.to(norms[0]) for n in norms]).double().sum(dim=0)
        self._mixing.estimate_spread(moved, self.peers)
        return self._mixing

    def absorb(self) -> Mixing:
        """Wait for the neighbours' messages, and z <- z + sum_j w_kj q_j; return what the round did."""
        for posted in self._posted:
            with phase("wait"):
                self._mixing.count(posted.pending.wait())
            for peer, message in posted.incoming.items():
                check(message, self._round, peer, self.transport.rank)
            began = time.perf_counter()
            with phase("decode"):
                self._decode(posted, self._rooms.of(posted.part))
            self._mixing.decode_seconds += time.perf_counter() - began
        if self._round == 0 and self._mixing.error is not None:
            # Where nobody has moved yet, as in a step with a learning rate of 0, equal messages say nothing.
            self._mixing.identical = bool(self._mixing.error) and all(map(_all_the_same, self._posted))
        self._posted = []
        return self._mixing

    def _buffers(self, part: Part) -> list[Tensor]:
        """Room for the message about a bucket and those of all neighbours."""
        nbytes, device = HEADER_BYTES + part.compressor.nbytes(part.layout, part.bucket.wide), part.bucket.device
        buffers = self._messages.get(part.place)
        if buffers and (buffers[0].numel(), buffers[0].device) == (nbytes, device):
            return buffers
        return [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in range(1 + len(self.peers.receive))]

    def _encode(self, part: Part, message: Tensor, difference: Tensor) -> Tensor:
        """Fill the message and move the public copy; `difference` is room. Return ||x - xhat||^2 and ||x||^2, (2,)."""
        part.bucket.read(difference)
        scale = torch.dot(difference, difference)
        pieces = part.bucket.split(difference)
        torch._foreach_sub_(pieces, part.copies)
        square = torch.dot(difference, difference)
        # A value that is not finite never leaves its worker and never enters a copy: the update is empty then.
        finite = square.isfinite()
        if difference.device.type != "cpu":
            torch.where(finite, difference, torch.zeros_like(difference), out=difference)
            flag_empty(message, ~finite)
        elif not finite:
            difference.zero_()
            flag_empty(message, ~finite)
        key = Key(self.seed, self._round, self.transport.rank, part.place)
        part.compressor.encode(difference, part.layout, payload(message), key)
        seal(message)
        own = difference.zero_()
        part.compressor.decode_add_(own, part.layout, payload(message), part.compressor.damping(part.layout), key)
        torch._foreach_add_(part.copies, pieces)
        torch._foreach_add_(part.pulls, pieces, alpha=self.peers.self_weight - 1.0)
        return torch.stack([square, scale])

    def _decode(self, posted: _Posted, pulled: Tensor) -> None:
        part = posted.part
        pulled.zero_()
        damping = part.compressor.damping(part.layout)
        for peer in sorted(posted.incoming):
            message = posted.incoming[peer]
            if is_empty(message):
                self._mixing.empty_from.append(peer)
                continue
            key = Key(self.seed, self._round, peer, part.place)
            weight = self.peers.receive[peer] * damping
            part.compressor.decode_add_(pulled, part.layout, payload(message), weight, key)
        torch._foreach_add_(part.pulls, part.bucket.split(pulled))


def restart(mixables: Iterable[Mixable]) -> None:
    """xhat <- x, z <- 0; right only where all workers have the same x."""
    for m in mixables:
        m.copy.copy_(m.x.detach())
        if m.remainder is not None:
            m.copy.add_(m.remainder)
        m.pull.zero_()


def memory_row(tensor: Tensor) -> int:
    """Elements of a row as they lie in memory: of one index of the outermost dimension; 1 for small tensors."""
    if tensor.is_complex():
        return 1
    order = sorted(range(tensor.dim()), key=lambda d: tensor.stride(d), reverse=True)
    return row_of([tensor.shape[d] for d in order])


def _row(start: int, stop: int, row: int) -> int:
    # A piece that was cut within a row has nothing to align to.
    return row if start % row == 0 and stop - start >= row else 1


def _all_the_same(posted: _Posted) -> bool:
    """Have all neighbours sent what this worker has? Never so where each has blocks or roundings of its own."""
    own = payload(posted.message)
    return bool(posted.incoming) and all(torch.equal(payload(message), own) for message in posted.incoming.values())


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.dot(t, t) for t in tensors]).sum().sqrt()
