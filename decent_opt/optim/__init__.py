"""Optimizers: `Decentralized` around any torch optimizer, `PDSGDM`, `LocalAdamW`."""

from decent_opt.optim.decentralized import Decentralized
from decent_opt.optim.local_adamw import LocalAdamW
from decent_opt.optim.pdsgdm import PDSGDM

__all__ = ["PDSGDM", "Decentralized", "LocalAdamW"]
