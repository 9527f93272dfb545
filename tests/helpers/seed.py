"""One call that puts every random stream a test can draw from at a known place."""

import random

import numpy as np
import torch


def seed_everything(seed: int = 0) -> None:
    """Seed Python, NumPy and PyTorch on all devices.

    Lightning's function of this name also writes to the environment and logs a line; a test wants neither.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
