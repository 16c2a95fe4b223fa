"""Scores of drawn images, from the outputs of a classifier: NumPy only.

The statistics of the literature, on features and class probabilities of any network.
Values of different networks, or of different numbers of images, do not compare.
"""

import numpy as np
from scipy.spatial.distance import cdist

from replicator.errors import ArgumentError

_CHUNK = 1024  # rows of a table of distances


def frechet_distance(features_a: np.ndarray, features_b: np.ndarray) -> float:
    """Return the squared Fréchet distance of two sets, each taken as a Gaussian.

    Heusel et al. 2017, "GANs trained by a two time-scale update rule converge to a
    local Nash equilibrium", eq. 6: |m_a − m_b|² + Tr(C_a + C_b − 2 (C_a C_b)^½). With
    the features of the Inception network it is the FID.

    With C = RᵀR, R of a QR decomposition, the trace of the root is the sum of the
    singular values of R_a R_bᵀ: no root is taken of what rounding left of a zero, and
    nothing is ever complex, also where features are fewer than their dimensions.

    Args:
      features_a: [n, d], n at least 2.
      features_b: [m, d], m at least 2.

    Returns:
      The distance, at least 0; computed in float64.

    Raises:
      ArgumentError: The arrays are not of these shapes, or hold NaN or infinity.

    >>> frechet_distance(np.array([[-1.0], [1.0]]), np.array([[2.0], [4.0]]))
    9.0
    """
    _check_features(features_a, features_b)
    mean_a, root_a = _mean_and_root(features_a)
    mean_b, root_b = _mean_and_root(features_b)
    shared = np.linalg.svd(root_a @ root_b.T, compute_uv=False).sum()
    spread = np.sum(root_a**2) + np.sum(root_b**2) - 2 * shared
    return float(np.sum((mean_a - mean_b) ** 2) + max(spread, 0.0))


def inception_score(probabilities: np.ndarray) -> float:
    """Return how sure and how varied the classes of images are, 1 to `classes`.

    Salimans et al. 2016, "Improved techniques for training GANs", §4: exp of the mean
    over images of KL(p(y|x) ‖ p(y)), over all images at once.

    Args:
      probabilities: [n, classes], each row sums to 1.

    Returns:
      The score; the number of classes if each image is surely of one, all alike often.

    Raises:
      ArgumentError: Rows are no probabilities.

    >>> inception_score(np.eye(4))
    4.0
    """
    each = np.asarray(probabilities, np.float64)
    if each.ndim != 2 or not each.size or not _are_distributions(each):
        raise ArgumentError(
            "`probabilities` must be [n, classes] whose rows sum to 1, got "
            f"{each.shape}. Apply a softmax."
        )
    of_all = np.broadcast_to(each.mean(axis=0), each.shape)
    here = each > 0  # 0 log 0 is 0
    nats = np.sum(each[here] * np.log(each[here] / of_all[here])) / len(each)
    return float(np.exp(nats))


def nearest_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the Euclidean distance of each of `a` to its nearest in `b`.

    Small ones hint at copies: compare drawn images, and real ones held out, with those
    that were trained on.

    Args:
      a: [n, ...], images or features.
      b: [m, ...], of the same shape but for m, at least 1.

    Returns:
      Distances, float64 [n]; exactly 0 for what is in both.

    Raises:
      ArgumentError: `b` is empty, or its images have another shape.

    >>> nearest_distances(np.array([[0.0, 0.0], [3.0, 4.0]]), np.zeros((1, 2))).tolist()
    [0.0, 5.0]
    """
    if not len(b) or a.shape[1:] != b.shape[1:]:
        raise ArgumentError(
            f"`b` must hold one or more of the shape of those in `a`, {a.shape[1:]}, "
            f"got {b.shape}. Resize them."
        )
    rows, others = (each.reshape(len(each), -1).astype(np.float64) for each in (a, b))
    chunks = [rows[start : start + _CHUNK] for start in range(0, len(rows), _CHUNK)]
    return np.concatenate([cdist(each, others).min(axis=1) for each in chunks])


def accuracy_by_class(
    predictions: np.ndarray, labels: np.ndarray, num_classes: int
) -> np.ndarray:
    """Return the share of each class that was predicted right.

    Args:
      predictions: Classes, int [n].
      labels: The true ones, int [n], below `num_classes`.
      num_classes: Number of classes.

    Returns:
      Accuracies, float64 [num_classes]; NaN for a class that no label names.

    Raises:
      ArgumentError: There are not as many predictions as labels.

    >>> accuracy_by_class(np.array([0, 1, 1]), np.array([0, 0, 1]), 2).tolist()
    [0.5, 1.0]
    """
    if predictions.shape != labels.shape:
        raise ArgumentError(
            f"`predictions` must be as many as labels, {labels.shape}, got "
            f"{predictions.shape}. Take the argmax over classes."
        )
    counts = np.bincount(labels, minlength=num_classes)
    right = np.bincount(labels[predictions == labels], minlength=num_classes)
    return np.divide(right, counts, out=np.full(num_classes, np.nan), where=counts > 0)


def _check_features(a: np.ndarray, b: np.ndarray) -> None:
    is_table = a.ndim == b.ndim == 2 and min(len(a), len(b)) >= 2
    if not is_table or a.shape[1] != b.shape[1]:
        raise ArgumentError(
            "`features_a` and `features_b` must be [n, d] and [m, d] with n and m at "
            f"least 2, got {a.shape} and {b.shape}. Pass features of more images."
        )
    for name, features in (("features_a", a), ("features_b", b)):
        if odd := np.sum(~np.isfinite(features).all(axis=1)):
            raise ArgumentError(
                f"`{name}` must be finite, got NaN or infinity in {odd} of "
                f"{len(features)} rows. Look at the images: their network may have "
                "diverged."
            )


def _mean_and_root(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean, and an R whose RᵀR is the unbiased covariance."""
    features = np.asarray(features, np.float64)
    mean = features.mean(axis=0)
    root = np.linalg.qr(features - mean, mode="r")
    return mean, root / np.sqrt(len(features) - 1)


def _are_distributions(rows: np.ndarray) -> bool:
    # Softmax in float32 sums to 1 within 1e-6 or so.
    return bool(np.all(rows >= 0) and np.all(np.abs(rows.sum(axis=1) - 1) < 1e-3))
