"""Quantile regression of the distribution of returns: Dabney, Rowland, Bellemare and Munos 2018, arXiv:1710.10044."""

from __future__ import annotations

from pearl.lazy_torch import functional, torch


def quantile_losses(quantiles: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The losses `(batch, count)` of `quantiles` `(batch, count)` of returns, at `tau_i = (i + 1/2) / count`.

    Each is the mean over the equally likely `targets` `(batch, atoms)` of Huber's loss of `u = target - quantile`,
    weighted by `|tau_i - (1 if u < 0 else 0)|` (paper, Eq. 10, with kappa = 1).
    """
    count = quantiles.shape[1]
    taus = (torch.arange(count, device=quantiles.device, dtype=quantiles.dtype) + 0.5) / count
    distance = targets.unsqueeze(1) - quantiles.unsqueeze(2)
    losses = functional.huber_loss(distance, torch.zeros_like(distance), reduction="none")
    sides = (taus.unsqueeze(1) - (distance.detach() < 0).to(taus.dtype)).abs_()
    return (sides * losses).mean(dim=2)
