"""What tpverify keeps for each thread: the rank that runs there, whoever follows it, and the group that it should use."""

from __future__ import annotations

import threading
from typing import Any


class _ThreadState(threading.local):
    session: Any = None
    recorder: Any = None
    group: Any = None


thread_state = _ThreadState()
