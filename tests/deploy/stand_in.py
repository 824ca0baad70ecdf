"""A cluster of small stand-in processes under the real supervisor, run as a program of its own by test_up.py.

    python -m tests.deploy.stand_in RUN_DIR [--broken NAME]

A stand-in prints the ready line, starts a grandchild in a session of its own (as a vLLM engine might), and ignores
nothing.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from deploy.child import ChildSpec, StartFailed
from deploy.local import Cluster, _signals
from deploy.plan import Plan
from deploy.run_dir import RunDir

ROLE = """
import json, os, subprocess, sys, time
name, broken = sys.argv[1], sys.argv[2]
print("starting", name, flush=True)
if broken == name:
    sys.exit("no such model: " + name)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
print('MOONCAKE_READY ' + json.dumps({"role": "r", "name": name, "address": "", "http_url": ""}), flush=True)
time.sleep(600)
"""


class StandIn(Cluster):
    """Without a gateway there is no endpoint to wait for."""

    async def _endpoint_ready(self) -> None:
        return


async def main(path: str, broken: str) -> int:
    run_dir = RunDir(path)

    def spec(name: str, role: str) -> ChildSpec:
        command = [sys.executable, "-c", ROLE, name, broken]
        return ChildSpec(
            name, role, command, run_dir.logs / f"{name}.log", start_timeout_s=20, stop_grace_s=1, family_grace_s=0.2
        )

    stages = [[spec("conductor-0", "conductor")], [spec("prefill-0", "prefill"), spec("decode-0", "decode")]]
    plan = Plan("http://127.0.0.1:9", [], "secret", "tiny", stages)
    try:
        await StandIn(plan, run_dir, _signals()).run()
    except StartFailed as error:
        print(f"cannot start: {error}", file=sys.stderr)
        return 1
    finally:
        run_dir.close()
    return 0


if __name__ == "__main__":
    broken_name = sys.argv[3] if len(sys.argv) > 3 else ""
    sys.exit(asyncio.run(main(str(Path(sys.argv[1])), broken_name)))
