"""A worker that uses more and more memory."""

from __future__ import annotations

import time

STEP_MIB = 50


class Eater:
    """Allocates memory in steps and holds it."""

    def eat(self, mib: int) -> int:
        kept = []
        for _ in range(mib // STEP_MIB):
            kept.append(b"x" * (STEP_MIB << 20))
            time.sleep(0.05)  # Ray checks several times a second
        time.sleep(300)
        return len(kept)
