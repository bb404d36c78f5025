"""Stands in for an agent of a raylet: tells it that the agent's services are not in use, and ends when it does.

    python -I -S agent_stand_in.py SESSION_FOLDER NODE_ID PORT_NAME...

It imports neither Ray nor this package: it must start in a moment.
"""

from __future__ import annotations

import os
import sys
import time


def main() -> None:
    """Write -1 in place of each port, as Ray's own agent does without its optional dependencies, and wait."""
    raylet = os.getppid()
    folder, node, *names = sys.argv[1:]
    for name in names:
        path = os.path.join(folder, f"{name}_{node}")
        with open(f"{path}.tmp", "w") as file:
            file.write("-1")
        os.replace(f"{path}.tmp", path)
    while os.getppid() == raylet:
        time.sleep(1.0)


if __name__ == "__main__":
    main()
