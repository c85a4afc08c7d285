"""Temperature scaling: scores are divided by one number, so that their softmax is a calibrated probability.

Guo et al., On calibration of modern neural networks, ICML 2017, https://arxiv.org/abs/1706.04599.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

TEMPERATURES = torch.logspace(-1, 2.5, 141, base=10.0, dtype=torch.float64)  # 0.1 to 316
MIN_SAMPLES = 10


def fit_temperature(scores: Tensor, labels: Tensor, otherwise: float) -> float:
    """The temperature with the smallest cross-entropy on held-out samples; `otherwise` if there are too few of them."""
    if len(labels) < MIN_SAMPLES:
        return otherwise
    losses = [float(cross_entropy(scores.double() / t, labels)) for t in TEMPERATURES]
    return round(float(TEMPERATURES[int(torch.tensor(losses).argmin())]), 6)
