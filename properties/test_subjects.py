"""Every built-in subject is still the same model: all checks, every TP degree, generated cases."""

from __future__ import annotations

import tpverify as tpv
from tpverify.verification import builtin_subjects

# DTensor works out how to shard every operator anew on each rank: its larger subjects take seconds a case on 8 ranks.
SMALLER_WORLDS = {"dtensor_attention": (1, 2, 3, 4), "dtensor_llama": (1, 2, 3, 4)}

for _name, _subject in builtin_subjects().items():
    globals()[f"test_{_name}"] = tpv.property_test(_subject, world_sizes=SMALLER_WORLDS.get(_name))
