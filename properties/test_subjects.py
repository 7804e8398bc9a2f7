"""Every built-in subject is still the same model: all checks, every TP degree, generated cases."""

from __future__ import annotations

import tpverify as tpv
from tpverify.verification import builtin_subjects

for _name, _subject in builtin_subjects().items():
    globals()[f"test_{_name}"] = tpv.property_test(_subject)
