"""One pool of real ranks for the whole session: starting a rank costs seconds, a call milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from decent_opt.testing import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    with RankPool(timeout=100, preload=["transformers.models.gpt2.modeling_gpt2"]) as pool:
        yield pool


def pytest_configure() -> None:
    # Two cores are shared by up to eight ranks; and sums keep one order, whatever the machine.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
