"""``python -m trimegatron`` is the same as ``trimegatron``."""

from __future__ import annotations

import sys

from trimegatron.cli import main

sys.exit(main())
