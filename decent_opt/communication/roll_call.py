"""Who is still there after a peer was lost: survivors find each other without the group that failed.

Every rank runs a store of its own from the start, so that any of them may die, the one with torch's store too. After a
loss everybody answers in the store of the lowest rank that can be reached, its host closes the list, and all read it.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import closing, suppress
from datetime import timedelta

import torch.distributed as dist

from decent_opt.communication.transport import Transport
from decent_opt.errors import PeerLost

LINGER = 0.5  # seconds that the last one may come later than the others


class RollCall:
    """One rank's store and the addresses of all; construction is collective.

    Args:
        transport: of all ranks.
        timeout: seconds after which a wait for a peer fails. Those who are no neighbours of the lost one notice that
            late, so the list is closed after 1.5 times that, or as soon as all but one are there.
    """

    def __init__(self, transport: Transport, timeout: float) -> None:
        self.rank, self.timeout, self.generation = transport.rank, timeout, 0
        self.reach = min(2.0, timeout / 4)  # seconds to reach a store; a process that was stopped lets one wait for it
        address = _own_address()
        self.store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self._bell = socket.create_server((address, 0))
        threading.Thread(target=self._answer_the_bell, name="decent_opt roll call", daemon=True).start()
        gathered = transport.gather((address, self.store.port, self._bell.getsockname()[1]))
        self.addresses = dict[int, tuple[str, int, int]](enumerate(gathered))  # type: ignore[arg-type]
        self.members = sorted(self.addresses)

    def survivors(self, error: PeerLost) -> tuple[list[int], dist.Store]:
        """The ranks, as they were numbered at the start, that go on together, and a store that all of them reach.

        Raises:
            PeerLost: this rank is not among them, or they are no majority of those who were there before.
        """
        self.generation += 1
        for leader in self.members:
            store = self.store if leader == self.rank else self._reach(leader)
            if store is None:
                continue
            try:
                listed = self._answer(dist.PrefixStore(f"{self.generation}", store), leader)
            except RuntimeError:  # it has died since
                continue
            if self.rank not in listed:
                raise PeerLost(f"rank {self.rank}: the others went on without this one", rank=None, round=error.round)
            if 2 * len(listed) < len(self.members) or (
                2 * len(listed) == len(self.members) and self.members[0] not in listed
            ):
                raise PeerLost(
                    f"rank {self.rank}: only {len(listed)} of {len(self.members)} are left here; the others may go on",
                    rank=error.rank,
                    round=error.round,
                )
            self.members = listed
            return listed, dist.PrefixStore(f"group of {self.generation}", store)
        raise error

    def close(self) -> None:
        """Nobody can ask for this rank any more."""
        with suppress(OSError):
            self._bell.shutdown(socket.SHUT_RDWR)
        self._bell.close()

    def _answer_the_bell(self) -> None:
        with suppress(OSError):  # closed
            while True:
                visitor, _ = self._bell.accept()
                with closing(visitor), suppress(OSError):
                    visitor.sendall(b"here")

    def _reach(self, leader: int) -> dist.Store | None:
        host, port, bell = self.addresses[leader]
        try:
            # A store's client tries again and again where nobody listens, and waits for ever for a process that was
            # stopped. So ring first: nobody there is refused at once, and who is stopped does not answer.
            with closing(socket.create_connection((host, bell), timeout=self.reach)) as door:
                if not door.recv(4):
                    return None
            limit = timedelta(seconds=self.reach)
            return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
        except (OSError, RuntimeError):
            return None

    def _answer(self, store: dist.Store, leader: int) -> list[int]:
        store.set(str(self.rank), "here")
        if leader == self.rank:
            store.set("list", json.dumps(self._present(store)))
        store.wait(["list"], timedelta(seconds=2 * self.timeout + self.reach))
        listed: list[int] = json.loads(store.get("list"))
        return listed

    def _present(self, store: dist.Store) -> list[int]:
        closed = time.monotonic() + 1.5 * self.timeout
        while True:
            present = [member for member in self.members if store.check([str(member)])]
            now = time.monotonic()
            if len(present) == len(self.members) or now > closed:
                return present
            if len(present) == len(self.members) - 1:
                closed = min(closed, now + LINGER)
            time.sleep(0.02)


def _own_address() -> str:
    """The address under which the host of torch's store, and so everybody, reaches this rank."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 1))  # sends nothing
        address: str = probe.getsockname()[0]
        return address
