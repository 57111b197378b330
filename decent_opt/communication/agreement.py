"""All ranks configured alike, or a named error on every rank, before anything can wait.

with agreement(transport) as claims:
    claims["period"] = 8            # compared between the ranks when the block ends
    ...                             # an error raised in here reaches every rank too
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

from decent_opt.communication.transport import Transport
from decent_opt.errors import Disagreement


@contextmanager
def agreement(transport: Transport) -> Iterator[dict[str, str]]:
    """Collect claims (field -> value as text) and raise `Disagreement` on every rank unless all are equal.

    An exception inside the block is not raised at once: a rank that left alone would let the others wait for it.
    It is exchanged first; then the failing rank raises its own exception and the others name that rank.
    """
    claims: dict[str, str] = {}
    failure: Exception | None = None
    try:
        yield claims
    except Exception as error:
        failure = error
    report = f"{type(failure).__name__}: {failure}" if failure else None
    answers = cast(list[tuple[str | None, dict[str, str]]], transport.gather((report, claims)))
    if failure is not None:
        raise failure
    for rank, (other_report, other_claims) in enumerate(answers):
        if other_report is not None:
            raise Disagreement(f"rank {rank} refused its configuration: {other_report}")
        _compare(claims, other_claims, transport.rank, rank)


def _compare(mine: Mapping[str, str], theirs: Mapping[str, str], my_rank: int, their_rank: int) -> None:
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if mine.get(name) != theirs.get(name):
            raise Disagreement(
                f"{name}: rank {my_rank} has {mine.get(name, 'nothing')}, "
                f"rank {their_rank} has {theirs.get(name, 'nothing')}; every rank needs the same"
            )
