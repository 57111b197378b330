"""Under torchrun's elastic restart a run goes on from its last checkpoint, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from decent_opt import checkpoint

ROOT = Path(__file__).resolve().parents[2]


def torchrun(folder: Path, how: str) -> None:
    script = str(Path(__file__).with_name("elastic_run.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--max-restarts", "1", "--monitor-interval", "0.1", script, str(folder), how],
        timeout=100,
        # Without the last one torch 2.13 keeps the addresses of the first life's ranks in the store of the second.
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def test_a_killed_worker_is_started_again_and_all_go_on(tmp_path: Path) -> None:
    torchrun(tmp_path, "straight")
    torchrun(tmp_path, "killed")
    for rank in range(2):
        straight, restarted = (torch.load(tmp_path / f"{how}.{rank}.pt") for how in ("straight", "restarted"))
        assert all(torch.equal(straight[name], restarted[name]) for name in straight)


def test_the_latest_checkpoint_is_the_last_complete_one(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "nowhere") is None
    for step in (9, 10, 11):
        checkpoint.save(tmp_path / str(step), extra=step)
    (tmp_path / "11" / "rank-0-of-1" / ".metadata").unlink()
    (tmp_path / "notes.txt").touch()
    found = checkpoint.latest(tmp_path)
    assert found is not None and checkpoint.load(found) == 10
