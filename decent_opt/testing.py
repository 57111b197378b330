"""Run one function on n ranks: real ones (processes, gloo) or virtual ones (threads of this process, loopback).

def work(rank, steps):              # importable: a function of a module, not a lambda
    optimizer = PDSGDM(...)         # finds its transport by itself, the same code in both cases
    return result

results = run_ranks(work, 4, backend="loopback", args=(10,))
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from decent_opt.communication import LoopbackTransport, LoopbackWorld, set_thread_transport

Function = Callable[..., Any]
_rng_lock = threading.Lock()


class RankFailed(RuntimeError):
    """A rank raised, died or did not answer in time.

    Attributes:
        reports: rank -> traceback as text, of every rank that did not return.
    """

    def __init__(self, reports: dict[int, str]) -> None:
        # A rank that lost its peer is a consequence: show causes first.
        ranks = sorted(reports, key=lambda rank: ("PeerLost" in reports[rank], rank))
        summary = [f"rank {rank}: {reports[rank].strip().splitlines()[-1]}" for rank in ranks]
        details = [f"rank {rank}:\n{reports[rank]}" for rank in ranks]
        super().__init__("\n".join([*summary, "", *details]))
        self.reports = reports


def run_ranks(
    function: Function, n: int, backend: str = "gloo", args: Sequence[Any] = (), timeout: float = 120.0
) -> list[Any]:
    """Call `function(rank, *args)` on ranks 0 .. n-1 at once and return their results in rank order.

    Args:
        function: for "gloo" it must be importable by name, and its arguments and result picklable.
        n: number of ranks.
        backend: "gloo" starts n processes with an initialised default process group; "loopback" starts n threads.
        timeout: seconds for the whole call.

    Raises:
        RankFailed: with the traceback of each rank that failed.
        ValueError: unknown backend.
    """
    if backend == "loopback":
        return _run_threads(function, n, args, timeout)
    if backend != "gloo":
        raise ValueError(f'backend: allowed are "gloo" and "loopback", got {backend!r}')
    with RankPool(timeout) as pool:
        return pool.run(function, n, args)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global generator inside the block and restore it afterwards.

    Threads share this generator; the lock lets each virtual rank build the same model.
    """
    with _rng_lock, torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _run_threads(function: Function, n: int, args: Sequence[Any], timeout: float) -> list[Any]:
    world = LoopbackWorld(n, timeout)
    results: list[Any] = [None] * n
    reports = dict.fromkeys(range(n), f"no answer within {timeout:g} s")

    def work(rank: int) -> None:
        set_thread_transport(LoopbackTransport(world, rank))
        try:
            results[rank] = function(rank, *args)
            del reports[rank]
        except BaseException:
            reports[rank] = traceback.format_exc()
            world.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True, name=f"rank {rank}") for rank in range(n)]
    intra_op_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # n ranks share the cores; one worker process has one as well
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        torch.set_num_threads(intra_op_threads)
    if reports:
        raise RankFailed(dict(reports))
    return results


class RankPool:
    """Processes that are started once and run many functions: starting a rank costs seconds, a call milliseconds.

    A call on n ranks sees a world of n ranks. When a call fails or runs out of time, the processes are replaced.

    Args:
        timeout: seconds for one call, unless it gives its own.
        preload: modules that ranks are started with; a heavy one is then imported once, not by each rank. Only the
            first pool of a process can choose.
    """

    def __init__(self, timeout: float = 120.0, preload: Sequence[str] = ()) -> None:
        self.timeout = timeout
        self._context = multiprocessing.get_context("forkserver")
        # Ranks are forked from a clean process that has torch imported already.
        self._context.set_forkserver_preload(["torch.distributed", "decent_opt.testing", "decent_opt", *preload])
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._store: dist.TCPStore | None = None
        self._calls = 0
        self._world: tuple[int, int] | None = None  # (ranks, call that made the process group)
        atexit.register(self.close)

    def run(self, function: Function, n: int, args: Sequence[Any] = (), timeout: float | None = None) -> list[Any]:
        """Call `function(rank, *args)` on n ranks; see `run_ranks`."""
        limit = self.timeout if timeout is None else timeout
        if not all(process.is_alive() for process in self._processes):
            self._stop()
        self._grow(n)
        self._calls += 1
        if self._world is None or self._world[0] != n:
            self._world = (n, self._calls)
        try:
            for pipe in self._pipes[:n]:
                pipe.send((function, args, n, self._world[1], limit))
            results, reports = self._collect(n, limit)
        except BaseException:
            self._stop()  # the answers that are still to come belong to nobody
            raise
        if reports:
            self._stop()
            raise RankFailed(reports)
        return results

    def close(self) -> None:
        """Stop all ranks."""
        self._stop(patience=5.0)
        atexit.unregister(self.close)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grow(self, n: int) -> None:
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(len(self._processes), n):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, theirs, self._store.port), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, n: int, limit: float) -> tuple[list[Any], dict[int, str]]:
        results: list[Any] = [None] * n
        reports: dict[int, str] = {}
        open_ranks = {self._pipes[rank]: rank for rank in range(n)}
        deadline = time.monotonic() + limit
        while open_ranks and (ready := wait(list(open_ranks), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = open_ranks.pop(pipe)
                try:
                    succeeded, answer = pipe.recv()
                except EOFError:
                    self._processes[rank].join(5)
                    succeeded, answer = False, f"died with exit code {self._processes[rank].exitcode}"
                if succeeded:
                    results[rank] = answer
                else:
                    reports[rank] = answer
                    deadline = min(deadline, time.monotonic() + 15.0)  # the others notice soon or never
        reports.update(dict.fromkeys(open_ranks.values(), "no answer within the time limit"))
        return results, reports

    def _stop(self, patience: float = 0.0) -> None:
        for pipe in self._pipes:
            pipe.close()  # an idle rank leaves by itself when it reads the end of its pipe
        deadline = time.monotonic() + patience
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join(10)
            process.close()
        self._processes, self._pipes, self._world = [], [], None


def _serve(rank: int, pipe: Connection, port: int) -> None:
    """Main loop of one process of a pool."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def leave_with_parent() -> None:
        parent.join()
        os._exit(1)

    # A rank may sit in a wait of gloo when its parent is killed.
    threading.Thread(target=leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    current = 0
    while True:
        try:
            function, args, size, world, limit = pipe.recv()
        except EOFError:
            return
        try:
            if world != current:
                if dist.is_initialized():
                    dist.destroy_process_group()
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
                prefixed = dist.PrefixStore(f"world{world}", store)
                limit_delta = timedelta(seconds=limit)
                dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=limit_delta)
                current = world
            pipe.send((True, function(rank, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
