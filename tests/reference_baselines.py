"""The compared methods as slow literal loops, written from their papers: the oracle for the fast code.

Everything is float64; S_i is a set of classes, f_i a softmax output, q unit-norm embeddings, z (C, d) prototypes.
"""

import math

import numpy as np

from tests.reference import dot, kl, l_sup, normalize, softmax


def cross_entropy(f_i, target):
    return -sum(target[c] * math.log(f_i[c]) for c in range(len(f_i)) if target[c] > 0)


def renormalised(f_i, S_i):
    """PRODEN's and RC's weights: f_j / sum over k in S of f_k."""
    total = sum(f_i[k] for k in S_i)
    return np.array([f_i[j] / total if j in S_i else 0.0 for j in range(len(f_i))])


def cc(f_i, S_i):
    return -math.log(sum(f_i[j] for j in S_i))


def rabs(f_i, S_i, loss, q=0.7, alpha=0.1, beta=1.0, A=-4.0):
    """1/|S| sum over j in S of loss(f, e_j)."""
    total = 0.0
    for j in S_i:
        e = [1.0 if c == j else 0.0 for c in range(len(f_i))]
        if loss == "mae":
            total += sum(abs(f_i[c] - e[c]) for c in range(len(e)))
        elif loss == "mse":
            total += sum((f_i[c] - e[c]) ** 2 for c in range(len(e)))
        elif loss == "gce":
            total += (1 - f_i[j] ** q) / q
        else:
            reverse = -sum(f_i[c] * (A if e[c] == 0 else math.log(e[c])) for c in range(len(e)))
            total += alpha * cross_entropy(f_i, e) + beta * reverse
    return total / len(S_i)


def cr_dpll(fs, S_i, l_i, weight):
    """fs: outputs of the weak view and of the strong ones."""
    return l_sup(fs[0], S_i) + weight * sum(kl(l_i, f) for f in fs)


def cr_dpll_labels(fs, S_i):
    product = [math.prod(f[c] ** (1 / len(fs)) for f in fs) for c in range(len(fs[0]))]
    return renormalised(product, S_i)


def moco(q_i, k_i, queue, tau):
    own = math.exp(dot(q_i, k_i) / tau)
    return -math.log(own / (own + sum(math.exp(dot(q_i, k) / tau) for k in queue)))


def supcon(i, q, k, labels, queue, queue_labels, tau, positives=None):
    """PiCO's contrastive loss of query i; A is everything but the query, P what has its label in A (or `positives`,
    places in A as (query 0..B-1, key B..2B-1, queue 2B..))."""
    everything = [*q, *k, *queue]
    all_labels = [*labels, *labels, *queue_labels]
    A = [a for a in range(len(everything)) if a != i]
    P = [a for a in A if all_labels[a] == labels[i]] if positives is None else [a for a in positives if a != i]
    total = sum(math.exp(dot(q[i], everything[a]) / tau) for a in A)
    return -sum(math.log(math.exp(dot(q[i], everything[p]) / tau) / total) for p in P) / len(P)


def move_prototypes(z, q, labels, decay):
    """One item after the other, then normalised."""
    z = np.array(z)
    for i in range(len(q)):
        z[labels[i]] = decay * z[labels[i]] + (1 - decay) * q[i]
    return np.array([normalize(row) if dot(row, row) > 0 else row for row in z])


def argmax(values, among):
    return max(among, key=lambda c: values[c])


def pico_target(l_i, q_i, z, S_i, phi):
    nearest = argmax([dot(q_i, z_c) for z_c in z], sorted(S_i))
    return np.array([phi * l_i[c] + (1 - phi) * (c == nearest) for c in range(len(l_i))])


def alim_target(w_i, q_i, z, S_i, phi, lam, tau):
    score = softmax([dot(q_i, z_c) / tau for z_c in z])
    weighted = [score[c] * (1.0 if c in S_i else lam) for c in range(len(z))]
    best = argmax(weighted, range(len(z)))
    return np.array([phi * w_i[c] + (1 - phi) * (c == best) for c in range(len(w_i))])


def alim_ratio(q_i, z, S_i, tau):
    score = softmax([dot(q_i, z_c) / tau for z_c in z])
    outside = [score[c] for c in range(len(z)) if c not in S_i]
    return max(score[c] for c in S_i) / max(outside) if outside else math.inf


def irnet_correction(q_i, q2_i, z, S_i, lead):
    """(label, its score) that enters S_i, or None."""
    found = []
    for query in (q_i, q2_i):
        p = softmax([dot(query, z_c) for z_c in z])
        outside = [c for c in range(len(z)) if c not in S_i]
        if not outside:
            return None
        best = argmax(p, outside)
        if p[best] <= max(p[c] for c in S_i) + lead:
            return None
        found.append((best, p[best]))
    return found[0] if found[0][0] == found[1][0] else None


def pico_plus_reliable(distance, share):
    order = sorted(range(len(distance)), key=lambda i: distance[i])
    return set(order[: int(share * len(distance))])


def nearest_places(i, q, k, queue, count):
    """The places in A of the `count` most similar to query i."""
    everything = [*q, *k, *queue]
    others = [a for a in range(len(everything)) if a != i]
    return sorted(others, key=lambda a: -dot(q[i], everything[a]))[:count]
