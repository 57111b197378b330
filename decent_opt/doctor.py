"""What is installed and what works on this machine, as plain data; `cli.py` prints it.

Nothing here imports a framework: versions are read from the installed metadata, and an integration counts as
shipped when its module can be found. The live checks run the real thing: two workers average one number.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
import torch.distributed as dist

from decent_opt.communication import connect
from decent_opt.testing import run_ranks

# Distribution -> the lowest version that this package is tested for (None: any).
REQUIRED: dict[str, tuple[int, ...] | None] = {
    "torch": (2, 11),
    "numpy": None,
    "networkx": None,
    "pydantic": (2, 7),
}
# Module of decent_opt.integrations -> the distribution that it serves.
FRAMEWORKS = {
    "ddp": "torch",
    "fsdp": "torch",
    "deepspeed": "deepspeed",
    "horovod": "horovod",
    "accelerate": "accelerate",
    "transformers": "transformers",
}


@dataclass(frozen=True)
class Finding:
    """One row of the report. `problem` is a sentence when something that is needed is missing."""

    name: str
    value: str
    problem: str | None = None


@dataclass(frozen=True)
class Integration:
    """A framework: the version installed here (None: not installed), and whether we ship a module for it."""

    name: str
    distribution: str
    installed: str | None
    shipped: bool


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def packages() -> list[Finding]:
    """Python and the packages that decent_opt cannot do without."""
    findings = [Finding("python", platform.python_version())]
    for name, lowest in REQUIRED.items():
        found = installed_version(name)
        problem = None
        if found is None:
            problem = f"{name} is not installed; run `pip install {name}`"
        elif lowest is not None and _release(found) < lowest:
            wanted = ".".join(map(str, lowest))
            problem = f"{name} {found} is too old, at least {wanted} is needed; run `pip install -U {name}`"
        findings.append(Finding(name, found or "not installed", problem))
    return findings


def devices() -> list[Finding]:
    """The CUDA devices; a machine without one is fine."""
    if not torch.cuda.is_available():
        return [Finding("cuda", "no device, training runs on the CPU")]
    findings = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        findings.append(Finding(f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"))
    return findings


def backends() -> list[Finding]:
    """The backends of torch.distributed in this build of torch: one of gloo and nccl is needed."""
    problem = None
    there: dict[str, bool] = {}
    if not dist.is_available():
        problem = "this build of torch has no torch.distributed, so only one process can train; install another"
    else:
        there = {
            "gloo": dist.is_gloo_available(),
            "nccl": dist.is_nccl_available(),
            "mpi": dist.is_mpi_available(),
        }
        if not (there["gloo"] or there["nccl"]):
            problem = "torch.distributed has neither gloo nor nccl here; install a build of torch with one of them"
    findings = [Finding("torch.distributed", "missing" if problem else "available", problem)]
    return findings + [Finding(name, "yes" if yes else "not in this build") for name, yes in there.items()]


def integrations() -> list[Integration]:
    """Every framework that the design names, with what is installed and what this version ships."""
    return [
        Integration(name, distribution, installed_version(distribution), _ships(name))
        for name, distribution in FRAMEWORKS.items()
    ]


def live_check(backend: str) -> Finding:
    """Let two workers average 0 and 1 over a backend; anything but 0.5 on both is a problem."""
    name = f"2 workers, {backend}"
    try:
        means = run_ranks(average_of_ranks, 2, backend=backend, timeout=60.0)
    except Exception as error:  # whatever went wrong, the report has to go on and name it
        problem = f"averaging over {backend} between 2 workers failed: {_cause(error)}"
        return Finding(name, "failed", problem)
    if means != [0.5, 0.5]:
        return Finding(name, "wrong", f"averaging 0 and 1 over {backend} gave {means}, expected [0.5, 0.5]")
    return Finding(name, "averaged 0 and 1 to 0.5")


def average_of_ranks(rank: int) -> float:
    """Return the mean of all workers' ranks. At module level, so that it pickles into another process."""
    transport = connect(timeout=30.0)
    try:
        number = torch.tensor([float(rank)])
        transport.average_([number])
    finally:
        transport.close()
    return number.item()


def _ships(integration: str) -> bool:
    # Finds the file without running it: the module itself may import a heavy framework.
    return find_spec(f"decent_opt.integrations.{integration}") is not None


def _cause(error: Exception) -> str:
    """One line for a person. The error of a failed rank carries its traceback: skip to what it raised."""
    lines = str(error).splitlines()
    told = (line for line in lines if line and not line.startswith((" ", "rank ", "Traceback")))
    return next(told, type(error).__name__)


def _release(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: "2.13.0+cpu" -> (2, 13), enough to compare with a floor."""
    numbers = []
    for part in text.split("+")[0].split(".")[:2]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
