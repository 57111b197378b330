"""Optimizers: `Decentralized` around any torch optimizer, `PDSGDM`, `CPDSGDM`, `LocalAdamW`."""

from decent_opt.optim.cpdsgdm import CPDSGDM
from decent_opt.optim.decentralized import Decentralized
from decent_opt.optim.local_adamw import LocalAdamW
from decent_opt.optim.pdsgdm import PDSGDM

__all__ = ["CPDSGDM", "PDSGDM", "Decentralized", "LocalAdamW"]
