"""The paper's reading of URRL as expectation-maximisation, in figures per epoch: one can watch what the theory claims.

E-step: every item belongs to the cluster H(c) of its likeliest candidate, c = argmax over S of f. M-step: with
embeddings that follow a von Mises-Fisher distribution around the mean directions of the clusters, the bound of the
likelihood is, up to constants, kappa times the compactness; and the alignment term of L_pc pulls to the same means.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from urrl.distributed import summed
from urrl.labels import Rows, own_blocks
from urrl.nets import Out


@torch.no_grad()
def em_figures(out: Out, S: Tensor | Rows, l: Tensor | Rows, z: Tensor, tau: float) -> dict[str, float]:
    """From the outputs for all items (of several processes, for its share), S and l (n, C) and the prototypes z (C, d):

    em_compactness  sum over c of n_c/n ||delta_c||, delta_c the mean of q over H(c): 1 where every cluster is a point
    em_alignment    mean over i of -q_i . p_i / tau, p_i = sum over c of l_ic z_c: the first term of L_pc
    em_bound        mean over i of log(psi p(x_i, y_i)), y_i the cluster of i: psi = 1 (rates that do not depend on the
                    class), p(y) = 1/C, p(x|y) von Mises-Fisher with the kappa that fits the compactness
    """
    n, C = S.shape
    d = out.q.shape[1]
    sums, aligned = out.q.new_zeros(C, d), out.q.new_zeros(())
    for rows, places in own_blocks(S):
        q = out.q[places]
        cluster = out.logits[places].masked_fill(~S[rows], -torch.inf).argmax(1)
        sums.index_add_(0, cluster, q)  # n_c delta_c
        aligned += ((q @ z.T) * l[rows]).sum()
    compactness = float(summed(sums).norm(dim=1).sum() / n)
    mean_length = min(max(compactness, 1e-6), 1 - 1e-6)
    kappa = mean_length * (d - mean_length**2) / (1 - mean_length**2)  # Banerjee et al. 2005
    bound = kappa * compactness + log_vmf_normaliser(d, kappa) - math.log(C)
    return {"em_bound": bound, "em_alignment": float(-summed(aligned) / n / tau), "em_compactness": compactness}


def log_vmf_normaliser(d: int, kappa: float) -> float:
    """log c_d(kappa): the density c_d(kappa) exp(kappa m . x) on the unit sphere of R^d integrates to 1."""
    order = d / 2 - 1
    return order * math.log(kappa) - d / 2 * math.log(2 * math.pi) - _log_bessel(order, kappa)


def _log_bessel(order: float, x: float) -> float:
    """log I_order(x)."""
    if order < 20:
        from scipy.special import ive

        return math.log(ive(order, x)) + x
    # Olver's uniform expansion; scipy's own would underflow from an order of some hundreds on.
    ratio = x / order
    root = math.sqrt(1 + ratio**2)
    t = 1 / root
    series = 1 + (3 * t - 5 * t**3) / (24 * order) + (81 * t**2 - 462 * t**4 + 385 * t**6) / (1152 * order**2)
    exponent = order * (root + math.log(ratio / (1 + root)))
    return exponent - 0.5 * math.log(2 * math.pi * order * root) + math.log(series)
