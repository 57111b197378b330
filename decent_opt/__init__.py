"""Communication-efficient, decentralised optimizers for PyTorch."""

from decent_opt._version import __version__
from decent_opt.config import DecentConfig
from decent_opt.errors import ConfigError, DecentError, Disagreement, NotFinite, PeerLost
from decent_opt.monitoring import JsonLines, Monitor, RoundRecord
from decent_opt.optim import CPDSGDM, IASGD, ISAGA, PDSGDM, Decentralized, LocalAdamW

__all__ = [
    "CPDSGDM",
    "IASGD",
    "ISAGA",
    "PDSGDM",
    "ConfigError",
    "DecentConfig",
    "DecentError",
    "Decentralized",
    "Disagreement",
    "JsonLines",
    "LocalAdamW",
    "Monitor",
    "NotFinite",
    "PeerLost",
    "RoundRecord",
    "__version__",
]
