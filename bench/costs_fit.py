# pyright: basic
"""Coefficients of measured costs."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls


def fitted(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the non-negative coefficients of least relative squares: a small value counts as much as a large one."""
    scale = 1.0 / np.maximum(np.array(values), 1e-12)
    coefficients, _ = nnls(np.array(rows) * scale[:, None], np.array(values) * scale)
    return [float(one) for one in coefficients]
