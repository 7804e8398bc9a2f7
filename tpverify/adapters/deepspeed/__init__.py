"""DeepSpeed's tensor-parallel layers (AutoTP), its vocabulary-parallel embedding and loss, beside torch's own, on the CPU."""

from __future__ import annotations

import os
from unittest import mock

with mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}):  # is looked up once, at the first import
    from tpverify.adapters.deepspeed import embedding, fused, linear, loss

SUBJECTS = {**linear.SUBJECTS, **fused.SUBJECTS, **embedding.SUBJECTS, **loss.SUBJECTS}
