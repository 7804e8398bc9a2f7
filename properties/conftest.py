"""Hypothesis profiles of the CPU tier: dev, ci and nightly, chosen by HYPOTHESIS_PROFILE or by CI."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

# A case runs several simulated ranks: it is slow by nature, and slower on a busy machine. Neither says that anything is wrong.
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large], "print_blob": True}

settings.register_profile("dev", max_examples=30, **COMMON)
settings.register_profile("ci", max_examples=50, derandomize=True, **COMMON)
settings.register_profile("nightly", max_examples=2000, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev"))

# Tensors are tiny: more threads only compete with pytest-xdist's processes.
torch.set_num_threads(1)
