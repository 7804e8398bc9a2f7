"""What the command line keeps from stderr: torch's own logs of what a rank's exception says as well."""

from __future__ import annotations

import logging


def hush_torch() -> None:
    """Raise the level of torch's log handlers; call it once torch is imported."""
    for handler in logging.getLogger("torch").handlers:
        handler.setLevel(logging.CRITICAL)
