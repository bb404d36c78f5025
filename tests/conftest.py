from __future__ import annotations

import torch

torch.set_num_threads(1)  # tiny tensors: a second thread only waits, and two busy ones get in each other's way
