"""Model folders: what they hold, whether they are whole, and how they are made.

No torch here; `checkpoint`, which reads tensors, is imported by name where it is
needed. `gguf` and `fetch` are too, for the packages that they bring in.
"""

from orca_dist.weights.describe import describe
from orca_dist.weights.headers import (
    Headers,
    TensorHeader,
    check_folder,
    check_headers,
    read_headers,
)
from orca_dist.weights.names import model_tensors, stage_tensors, tensor_shapes

__all__ = [
    "Headers",
    "TensorHeader",
    "check_folder",
    "check_headers",
    "describe",
    "model_tensors",
    "read_headers",
    "stage_tensors",
    "tensor_shapes",
]
