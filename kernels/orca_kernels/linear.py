"""The matmul of the flat batch in torch, packed for oneDNN on CPUs."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

MIN_PACKED_ROWS = 2  # oneDNN takes another kernel, with other rounding, for a single row


class TorchLinear:
    """y = x W^T + b, with W packed once for oneDNN on CPU."""

    def __init__(self, weight_FK: torch.Tensor, bias_F: torch.Tensor | None = None) -> None:
        self.packed = _can_pack(weight_FK)
        self.nbytes = weight_FK.nbytes + (0 if bias_F is None else bias_F.nbytes)
        self.bias = bias_F
        self.weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight_FK, None) if self.packed else weight_FK
        )

    def keeps(self, weight_FK: torch.Tensor) -> bool:
        """Unless it was packed."""
        return self.weight is weight_FK

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        """[T, K] -> [T, F]."""
        if not self.packed:
            return linear(x_TK, self.weight, self.bias)
        num_rows = x_TK.shape[0]
        if num_rows < MIN_PACKED_ROWS:
            x_TK = x_TK.expand(MIN_PACKED_ROWS, -1).contiguous()
        y_TF = torch.ops.mkldnn._linear_pointwise(x_TK, self.weight, self.bias, "none", [], "")
        return y_TF[:num_rows]


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32
