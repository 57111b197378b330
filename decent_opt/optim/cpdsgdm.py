"""CPD-SGDM: PD-SGDM that sends compressed differences to public copies (arXiv 2008.10435), ready to use.

m_k <- mu m_k + g_k;   x_k <- x_k - eta m_k                     every step, on every worker by itself
x_k <- x_k + gamma sum_j w_kj (xhat_j - xhat_k)                 every p-th step, with the old copies
q_k = Q(x_k - xhat_k), sent;   xhat_j <- xhat_j + q_j           arrives during the next p steps
"""

from __future__ import annotations

from typing import Any, ClassVar

from decent_opt.optim.pdsgdm import PDSGDM


class CPDSGDM(PDSGDM):
    """`PDSGDM` with `algorithm="cpd"`: the sign of a difference is 1/32 of its bytes.

    Args:
        params, lr, momentum, weight_decay, nesterov, dampening: as in `torch.optim.SGD`.
        period, topology, options: as in `Decentralized`, in particular compressor ("sign"), order ("paper") and gamma
            (what suits the compressor). The topology has one symmetric W for all rounds.
    """

    config_defaults: ClassVar[dict[str, Any]] = {"algorithm": "cpd"}
