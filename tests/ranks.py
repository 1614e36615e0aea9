"""torchrun for tests: its agent starts a program in several processes, which are forked, see forked.py.

This file is also the program of the agent.
"""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import forked


def run(count: int, *words: object, cwd: Path | str = ".") -> subprocess.CompletedProcess[str]:
    """Run `torchrun --standalone --nproc-per-node COUNT` with these words to its end."""
    return forked.run(__file__, count, *words, cwd=cwd)


def main(count: int, *words: str) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        monitor_interval=0.005,  # seconds; who died first is seen before others fail for it
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="fork",
    )
    elastic_launch(config, forked.act_as_python)(words)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
