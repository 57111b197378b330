"""PD-SGDM: periodic decentralised momentum SGD (arXiv 2008.10435), ready to use.

    m_k <- mu m_k + g_k;   x_k <- x_k - eta m_k            every step, on every worker by itself
    x_k <- sum_j w_kj x_j                                  every p-th step

The momentum is never sent and never reset (`momentum_sync="local"`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from decent_opt.config import given
from decent_opt.optim.decentralized import Decentralized


class PDSGDM(Decentralized):
    """`torch.optim.SGD` with a round of gossip every `period` steps.

    Args:
        params, lr, momentum, weight_decay, nesterov, dampening: as in `torch.optim.SGD`.
        period, topology, options: as in `Decentralized`; None: from `config`, else 8 and "ring".
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        dampening: float = 0.0,
        *,
        period: Any = None,
        topology: Any = None,
        **options: Any,
    ) -> None:
        base = torch.optim.SGD(
            params,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=nesterov,
            dampening=dampening,
        )
        super().__init__(base, **given(period=period, topology=topology), **options)
