"""Optimizers: `Decentralized` around any torch optimizer, `PDSGDM`, `CPDSGDM`, `LocalAdamW`; and without gossip, for
gradients made of m/n blocks, `IASGD`, `ISAGA` and `proximal` steps after any of them.
"""

from decent_opt.optim.cpdsgdm import CPDSGDM
from decent_opt.optim.decentralized import Decentralized
from decent_opt.optim.iasgd import IASGD
from decent_opt.optim.isaga import ISAGA
from decent_opt.optim.local_adamw import LocalAdamW
from decent_opt.optim.pdsgdm import PDSGDM
from decent_opt.optim.proximal import L1, L2, Box, Regularizer, proximal

__all__ = [
    "CPDSGDM",
    "IASGD",
    "ISAGA",
    "L1",
    "L2",
    "PDSGDM",
    "Box",
    "Decentralized",
    "LocalAdamW",
    "Regularizer",
    "proximal",
]
