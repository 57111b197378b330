"""The errors that decent_opt raises on purpose. Each message is one sentence a user can act on."""

from __future__ import annotations


class DecentError(RuntimeError):
    """Base class of everything that decent_opt raises on purpose."""


class ConfigError(DecentError, ValueError):
    """A value that a user gave is not allowed; the message names the field, the value and what is allowed."""


class Disagreement(ConfigError):
    """The ranks were configured differently, or one of them refused its configuration; raised on every rank."""


class PeerLost(DecentError):
    """A peer did not take part in an exchange in time, or what came from it cannot be used.

    Attributes:
        rank: the peer's rank in the transport, or None where a collective does not tell who is missing.
        round: the round in which it was missed.
    """

    def __init__(self, message: str, *, rank: int | None, round: int) -> None:
        super().__init__(message)
        self.rank = rank
        self.round = round

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only arguments do not pickle by themselves, and errors cross processes in tests.
        return _rebuild_peer_lost, (str(self), self.rank, self.round)


class NotFinite(DecentError):
    """Parameters were infinite or NaN at a round, and `on_nonfinite="raise"` asks to stop there.

    Attributes:
        names: of this rank's parameters; empty where it is another rank that has them.
        round: the round in which it was found.
    """

    def __init__(self, message: str, names: list[str], round: int) -> None:
        super().__init__(message, names, round)
        self.names, self.round = names, round

    def __str__(self) -> str:
        return str(self.args[0])


def _rebuild_peer_lost(message: str, rank: int | None, round: int) -> PeerLost:
    return PeerLost(message, rank=rank, round=round)
