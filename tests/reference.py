"""The paper as slow literal loops, written from its equations: the oracle for the fast code.

Only the slips that PAPER-NOTES of the project name are mended: the sign of L_CR, and l = 0 outside S.
Everything is float64; S is a list of sets, l and f are (n, C), q is (n, d), z is (C, d).
"""

import math

import numpy as np


def softmax(v):
    e = [math.exp(x - max(v)) for x in v]
    return np.array([x / sum(e) for x in e])


def dot(a, b):
    return sum(x * y for x, y in zip(a, b))


def normalize(v):
    return np.array(v) / math.sqrt(dot(v, v))


def l_sup(f_i, S_i):
    """Eq. sup: -sum_{j not in S_i} log(1 - f_j)."""
    total = 0.0
    for j in range(len(f_i)):
        if j not in S_i:
            total -= math.log(1 - f_i[j])
    return total


def prototypes(q, l):
    """Eq. proto: z_c = Normalize(1/n sum_i q_i l_i^c)."""
    n, C = l.shape
    z = []
    for c in range(C):
        mean = np.zeros(q.shape[1])
        for i in range(n):
            mean = mean + q[i] * l[i, c] / n
        z.append(normalize(mean))
    return np.array(z)


def l_pc(q_i, l_i, z, tau):
    """-log( exp(q . p / tau) / sum_c exp(q . z_c / tau) ) with p = sum_c z_c l_c."""
    p = sum(z[c] * l_i[c] for c in range(len(z)))
    return -math.log(math.exp(dot(q_i, p) / tau) / sum(math.exp(dot(q_i, z[c]) / tau) for c in range(len(z))))


def l_m(q_mixed, l_i, l_j, lam, z, tau):
    return lam * l_pc(q_mixed, l_i, z, tau) + (1 - lam) * l_pc(q_mixed, l_j, z, tau)


def kl(p, f):
    return sum(p[c] * math.log(p[c] / f[c]) for c in range(len(p)) if p[c] > 0)


def l_cr(l_i, f_weak, f_strong):
    return kl(l_i, f_weak) + kl(l_i, f_strong)


def knn(q, i, K):
    """Indices of the K most similar other items."""
    others = [j for j in range(len(q)) if j != i]
    return sorted(others, key=lambda j: -dot(q[i], q[j]))[:K]


def pi(i, f, q, l, K, tau):
    """pi_i = 1/2 f(x_i) + 1/2 sum_j w_ij l_j."""
    near = knn(q, i, K)
    weights = [math.exp(dot(q[i], q[j]) / tau) for j in near]
    vote = sum(w / sum(weights) * l[j] for w, j in zip(weights, near))
    return f[i] / 2 + vote / 2


def correct(S, f, q, l, K, tau, phi):
    """Eq. PLR_1 for every item: the new sets."""
    new = []
    for i in range(len(S)):
        p = pi(i, f, q, l, K, tau)
        c = int(np.argmax(p))
        new.append(S[i] | {c} if c not in S[i] and p[c] > phi else set(S[i]))
    return new


def disambiguate(f_weak, f_strong, S_i):
    """Eq. PLR_2: l_i."""
    product = [math.sqrt(f_weak[c]) * math.sqrt(f_strong[c]) for c in range(len(f_weak))]
    total = sum(product[j] for j in S_i)
    return np.array([product[c] / total if c in S_i else 0.0 for c in range(len(product))])
