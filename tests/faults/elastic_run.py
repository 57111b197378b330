"""A training script that is started by torchrun; in its first life rank 1 is killed in the middle."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn

from decent_opt import CPDSGDM, checkpoint


def main(folder: str, killed: bool) -> None:
    dist.init_process_group("gloo")
    rank, first_life = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    optimizer = CPDSGDM(model.parameters(), lr=0.05, model=model, period=2, timeout=5)
    begin = 0
    if (found := checkpoint.latest(f"{folder}/saved")) is not None:
        begin = checkpoint.load(found, model=model, optimizer=optimizer)["step"]
        assert not first_life and begin == 6
    for step in range(begin, 14):
        if killed and first_life and rank == 1 and step == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        data = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        if killed and step + 1 == 6:
            checkpoint.save(f"{folder}/saved/{step + 1}", model=model, optimizer=optimizer, extra={"step": step + 1})
            dist.barrier()  # so that both have saved when rank 1 dies
    optimizer.close()
    torch.save(model.state_dict(), f"{folder}/{'restarted' if killed else 'straight'}.{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "killed")
