"""Temperature scaling: scores are divided by one number, so that their softmax is a calibrated probability.

Guo et al., On calibration of modern neural networks, ICML 2017, https://arxiv.org/abs/1706.04599.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import nll_loss

TEMPERATURES = torch.logspace(-1, 2.5, 141, base=10.0, dtype=torch.float64)  # 0.1 to 316
MIN_SAMPLES = 10


def fit_temperature(scores: Tensor, labels: Tensor, otherwise: float) -> float:
    """The temperature with the smallest cross-entropy on held-out samples; `otherwise` if there are too few of them.

    One more sample is assumed, which is as certain as the others on average and is wrong. So n samples that are all
    right give a probability of about 1 - 1/n instead of 1.
    """
    if len(labels) < MIN_SAMPLES:
        return otherwise
    losses = [_loss(scores.double() / t, labels) for t in TEMPERATURES]
    return round(float(TEMPERATURES[int(torch.tensor(losses).argmin())]), 6)


def _loss(scores: Tensor, labels: Tensor) -> float:
    log_p = scores.log_softmax(1)
    others = log_p.scatter(1, log_p.argmax(1, keepdim=True), -torch.inf)
    return float(nll_loss(log_p, labels, reduction="sum") - others.logsumexp(1).mean())
