"""The type of NumPy arrays whose shape and element type are given in words."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
