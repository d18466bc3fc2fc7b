"""Write entries to the audit log named by `RL_AUDIT_LOG`. Argument: how many."""

from __future__ import annotations

import sys

from rl_distributed.security.audit import audit


def main() -> None:
    for number in range(int(sys.argv[1])):
        audit("test.write", f"entry {number}")


if __name__ == "__main__":
    main()
