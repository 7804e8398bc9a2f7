"""``python -m tpverify`` is ``tpverify``."""

from __future__ import annotations

from tpverify.cli import main

if __name__ == "__main__":
    main()
