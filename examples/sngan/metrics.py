"""How good are conditional samples? Numbers from the features and logits of a classifier.

All of them are NumPy: features and logits have been collected over replicas by `trainer.predict`.
"""

import numpy as np


def frechet_distance(real, generated):
    """Returns the Fréchet distance between two sets of features, each taken as a normal one.

    |m1 - m2|^2 + trace(C1 + C2 - 2 (C1 C2)^(1/2)); Heusel et al. 2017, arXiv 1706.08500, with the
    features of a classifier of these data in the place of Inception's.

    Args:
        real: array `[rows, features]`.
        generated: array `[rows, features]`.
    """
    (mean_1, covariance_1), (mean_2, covariance_2) = _moments(real), _moments(generated)
    # The trace of (C1 C2)^(1/2) is that of the symmetric (C1^(1/2) C2 C1^(1/2))^(1/2).
    values, vectors = np.linalg.eigh(covariance_1)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    cross = np.linalg.eigvalsh(root @ covariance_2 @ root)
    return float(
        np.sum((mean_1 - mean_2) ** 2)
        + np.trace(covariance_1)
        + np.trace(covariance_2)
        - 2 * np.sum(np.sqrt(np.maximum(cross, 0)))
    )


def inception_score(logits):
    """Returns exp(mean KL(p(y|x) || p(y))) (Salimans et al. 2016, arXiv 1606.03498).

    Args:
        logits: array `[rows, classes]` of the classifier.
    """
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    p = np.exp(log_p)
    divergence = np.sum(p * (log_p - np.log(p.mean(axis=0) + 1e-16)), axis=1)
    return float(np.exp(divergence.mean()))


def recognition(logits, labels, num_classes):
    """Returns the share of samples that the classifier takes for the class they were drawn for.

    Args:
        logits: array `[rows, classes]`.
        labels: array `[rows]`, with at least one row of every class.
        num_classes: number of classes.

    Returns:
        `(share, shares)`: over all samples, and an array with one share per class.
    """
    right = np.argmax(logits, axis=1) == labels
    shares = np.array([right[labels == label].mean() for label in range(num_classes)])
    return float(right.mean()), shares


def _moments(features):
    features = np.asarray(features, "float64")
    return features.mean(axis=0), np.cov(features, rowvar=False)
