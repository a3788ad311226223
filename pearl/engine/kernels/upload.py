"""From an array on the host to a tensor on a device, without waiting for what the device is doing. Owns nothing else."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def on_device(array: np.ndarray, device: torch.device | None) -> Tensor:
    """The array as a tensor there. It goes to a GPU from page-locked memory: any other copy waits for what is queued."""
    made = torch.from_numpy(array)
    return made if device is None or device.type == "cpu" else made.pin_memory().to(device, non_blocking=True)
