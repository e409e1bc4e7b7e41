"""One thread for the whole test process: its forked ranks hang otherwise, and sums come out alike everywhere."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import torch

torch.set_num_threads(1)
