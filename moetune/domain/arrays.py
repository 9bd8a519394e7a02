"""Types of arrays."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Sizes = float | Floats
"""A number or an array of numbers, as the argument of a function that returns an array."""
