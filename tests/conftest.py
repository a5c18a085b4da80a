"""Triton reads TRITON_INTERPRET when it is first imported, so it is set before anything is."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
