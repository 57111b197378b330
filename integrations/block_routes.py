"""The two ways of block-sparse gradients: everybody's chosen values to all, or to a server that sends their sum back.

Both are asynchronous, and nothing waits for a collective inside a callback: gloo has two threads for these, and they
would wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from decent_opt.integrations.bucket_layout import unwrap
from decent_opt.integrations.hook_state import all_gather
from decent_opt.monitoring.ranges import phase

HEADER = 8  # bytes before the values, up and down: the step as int64
OUT_OF_STEP = -1
Gradient = torch.futures.Future[Tensor]


class Exchange(Protocol):
    """One bucket on its way."""

    rank: int
    size: int
    step: int
    v: Tensor

    def sum(self, messages: Tensor) -> Tensor:
        """S, (numel,), of the messages of all workers, (n, length)."""
        ...

    def gradient(self, total: Tensor) -> Tensor:
        """The bucket with the gradient that is made of S."""
        ...

    def check_steps(self, steps: Tensor) -> None:
        """Raise unless all messages belong to this step."""
        ...


class Route(Protocol):
    """A way."""

    def start(self, exchange: Exchange, message: Tensor) -> tuple[Gradient, int, int]:
        """The gradient to come, and the bytes that this worker sends and receives for it."""
        ...


class ThroughAll:
    """All-gather: (n - 1) messages out, as many in."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def start(self, exchange: Exchange, message: Tensor) -> tuple[Gradient, int, int]:
        """See `Route`."""
        gathered = message.new_empty(exchange.size * message.numel())
        work = all_gather(gathered, message, group=self.group, async_op=True)

        def finish(future: torch.futures.Future[Any]) -> Tensor:
            future.wait()  # it is done; this raises what went wrong
            with phase("decode"), torch.no_grad():
                return exchange.gradient(exchange.sum(gathered.view(exchange.size, -1)))

        total = message.nbytes * (exchange.size - 1)
        return work.get_future().then(finish), total, total


class ThroughServer:
    """Gather to rank 0, broadcast back: one message out, S in. Rank 0 sends S to all others.

    Each direction has a group of its own: what belongs together is found by the order of calls on a group, and the
    server calls its broadcasts later, between gathers, than the others do.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        members = None if group is None else dist.get_process_group_ranks(group)
        alone = members is not None  # only the members take part in making these
        self.up = dist.new_group(members, use_local_synchronization=alone)
        self.down = dist.new_group(members, use_local_synchronization=alone)
        self._line = _Line()

    def start(self, exchange: Exchange, message: Tensor) -> tuple[Gradient, int, int]:
        """See `Route`."""
        answer = message.new_zeros(HEADER + exchange.v.nbytes)
        others = exchange.size - 1
        if exchange.rank == 0:
            return self._serve(exchange, message, answer), answer.nbytes * others, message.nbytes * others
        sending = dist.gather(message, None, group=self.up, group_dst=0, async_op=True)
        return self._receive(exchange, answer, sending), message.nbytes, answer.nbytes

    def _receive(self, exchange: Exchange, answer: Tensor, *alive: object) -> Gradient:
        """Post the broadcast of S; its end makes the gradient."""
        work = dist.broadcast(answer, group=self.down, group_src=0, async_op=True)

        def finish(future: torch.futures.Future[Any], alive: object = (work, *alive)) -> Tensor:
            future.wait()
            use_stream(answer)
            exchange.check_steps(answer[:HEADER].view(torch.int64))
            with phase("decode"), torch.no_grad():
                return exchange.gradient(answer[HEADER:].view(exchange.v.dtype))

        gradient: Gradient = work.get_future().then(finish)
        return gradient

    def _serve(self, exchange: Exchange, message: Tensor, answer: Tensor) -> Gradient:
        gathered = message.new_empty(exchange.size * message.numel())
        rows = list(gathered.view(exchange.size, -1).unbind())
        work = dist.gather(message, rows, group=self.up, group_dst=0, async_op=True)
        devices: list[int | str | torch.device] = [message.device] if message.is_cuda else []
        outcome: torch.futures.Future[Tensor | Exception] = torch.futures.Future(devices=devices)
        number = self._line.number()

        def announce() -> None:
            try:
                self._receive(exchange, answer, work).add_done_callback(lambda done: _settle(outcome, done.value))
            except Exception as error:
                _settle(outcome, error)

        def summed(future: torch.futures.Future[Any]) -> None:
            try:
                future.wait()
                use_stream(answer)
                answer[:HEADER].view(torch.int64).fill_(OUT_OF_STEP)  # what the others see if the next line raises
                with phase("decode"), torch.no_grad():
                    answer[HEADER:].view(exchange.v.dtype).copy_(exchange.sum(gathered.view(exchange.size, -1)))
                answer[:HEADER].view(torch.int64).fill_(exchange.step)
            except Exception as error:
                _settle(outcome, error)
            self._line.put(number, announce)

        work.get_future().add_done_callback(summed)
        return outcome.then(unwrap)


def _settle(outcome: torch.futures.Future[Tensor | Exception], value: Exception | Callable[[], Tensor]) -> None:
    """Give a future an error, or what `value` returns or raises; the first time counts."""
    if outcome.done():
        return
    try:
        outcome.set_result(value if isinstance(value, Exception) else value())
    except Exception as error:
        outcome.set_result(error)


class _Line:
    """Runs actions in the order of their numbers, each as soon as it and those before it are ready; nobody waits.

    The server may have a later bucket's blocks together first; the others expect the sums in the order of the buckets.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: dict[int, Callable[[], object]] = {}
        self._numbers = self._next = 0

    def number(self) -> int:
        """The next number."""
        self._numbers += 1
        return self._numbers - 1

    def put(self, number: int, action: Callable[[], object]) -> None:
        """This one is ready."""
        with self._lock:
            self._ready[number] = action
            while self._next in self._ready:
                self._ready.pop(self._next)()
                self._next += 1


def use_stream(*tensors: Tensor) -> None:
    """Callbacks run on another stream than the one on which these were allocated."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
