"""Trains a small drafter with 5 + 3 workers on two GPUs for some minutes, then stops it with Ctrl-C.

    python bench/soak.py [--seconds 600] [--within S] [--out FILE]

The run is `draftline train` on random weights with checkpoints and logs; device memory is read beside
it once a second with nvidia-smi. Prints whether anything moved between the seal and the end.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from launches import SETTINGS, make_target
from machine import describe

TOPOLOGY = {
    "topology.targets": "[cuda:0,cuda:0,cuda:0,cuda:1,cuda:1]",
    "topology.drafters": "[cuda:0,cuda:1,cuda:1]",
    "token_budget": 8192,
    "max_anchors": 512,
    "drafter.layers": 2,
    "train.steps": 10_000_000,
    "train.log_every": 200,
    "train.checkpoint_every": 2000,
    # Other programs may use the same GPUs; what moved is in the result.
    "signal.on_volatile": "warn",
}
ON_CPU = {"topology.targets": "[cpu,cpu]", "topology.drafters": "[cpu,cpu]", "train.log_every": 2}


def device_mib() -> list[int]:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(x) for x in subprocess.run(query, capture_output=True, text=True).stdout.split()]


def lines(path: Path) -> list[dict]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _mean(metrics: list[dict], name: str) -> float | None:
    return statistics.mean(m[name] for m in metrics) if metrics else None


def soak(scratch: Path, seconds: float, within: float, cuda: bool) -> dict:
    end = time.time() + within
    target = make_target(scratch / "target")
    run = scratch / "run"
    settings = SETTINGS | (TOPOLOGY if cuda else ON_CPU | {"train.steps": 10_000})
    settings |= {"run.dir": run, "target.path": target}
    config = scratch / "config.yaml"
    config.write_text("data: {train: ['builtin:demo-train']}\ntrain: {trackers: []}\n")
    command = [sys.executable, "-m", "draftline", "train", str(config)]
    command += [f"{key}={value}" for key, value in settings.items()]
    errors = scratch / "errors.txt"
    with errors.open("w") as file:
        process = subprocess.Popen(command, stderr=file, stdout=subprocess.DEVNULL)
    samples: list[tuple[float, list[int]]] = []
    sealed: float | None = None
    while process.poll() is None:
        now = time.time()
        if sealed is None and any(e["event"] == "first_step" for e in lines(run / "events.jsonl")):
            sealed = now
        if cuda:
            samples.append((now, device_mib()))
        if now > end or (sealed is not None and now - sealed > seconds):
            process.send_signal(signal.SIGINT)
            break
        time.sleep(1.0)
    process.wait(timeout=120)
    events, metrics = lines(run / "events.jsonl"), lines(run / "metrics.jsonl")
    # The first seconds are left out: a checkpoint's first pinned copy, kernels loaded lazily.
    settled = [mib for at, mib in samples if sealed is not None and at > sealed + 5]
    settled = settled[:-3]
    return {
        "exit": process.returncode,
        "steps": metrics[-1]["step"] if metrics else 0,
        "seconds": metrics[-1]["seconds"] if metrics else 0,
        "tokens_per_s": statistics.median(m["tokens_per_s"] for m in metrics) if metrics else None,
        "targets_waited_pct": _mean(metrics, "targets_waited_pct"),
        "drafters_waited_pct": _mean(metrics, "drafters_waited_pct"),
        "loss_first_last": [metrics[0]["loss"], metrics[-1]["loss"]] if metrics else None,
        "checkpoints": sum(e["event"] == "checkpoint" for e in events),
        "memory": [e for e in events if e["event"] == "memory"],
        "nvidia_smi_mib_least_most": [[min(c), max(c)] for c in zip(*settled, strict=True)],
        "nvidia_smi_samples": len(settled),
        "last_lines": errors.read_text().splitlines()[-6:],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--within", type=float, default=1e9, help="seconds with the warm-up")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as name:
        found = soak(Path(name), arguments.seconds, arguments.within, cuda)
    found |= describe(torch.device("cuda", 0) if cuda else torch.device("cpu"))
    print(json.dumps(found, indent=1))
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
