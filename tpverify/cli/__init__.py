"""The command line; commands import torch only when they run, so that help and usage errors are instant."""

from __future__ import annotations

from tpverify.cli.app import main

__all__ = ["main"]
