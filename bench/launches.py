"""Starts small runs with cold compile caches, several at a time, and says how each launch went.

    python bench/launches.py TOPOLOGY [--launches 10] [--together 5] [--ungated] [--out FILE]

TOPOLOGY is `1x3` (all on cuda:0), `2x3` (targets on cuda:0 and cuda:1, drafters on cuda:0, cuda:1,
cuda:1), `1x2` (one GPU per drafter: NCCL), `span` (one target over both GPUs), or `cpu`. With --ungated the
same program runs without the compile gate's order: every worker warms up at once, as if nobody had
thought of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from machine import describe

TOPOLOGIES = {
    "1x3": ("cuda:0", "cuda:0,cuda:0,cuda:0"),
    "2x3": ("cuda:0,cuda:1", "cuda:0,cuda:1,cuda:1"),
    "1x2": ("cuda:0", "cuda:0,cuda:1"),
    "span": ("cuda:0+cuda:1", "cuda:1"),
    "cpu": ("cpu", "cpu,cpu,cpu"),
}
SETTINGS = {
    "target.tap_layers": "[0, 1, 2]",
    "drafter.layers": 1,
    "drafter.head_dim": 64,
    "block_size": 8,
    "token_budget": 2048,
    "max_batch_size": 16,
    "max_anchors": 128,
    "data.max_length": 512,
    "features.source": "online",
    "train.steps": 60,
    "train.log_every": 20,
    "train.checkpoint_every": 60,
    "topology.deadline_s": 240,
    "topology.check_every": 5,
}


def make_target(directory: Path) -> Path:
    """A random Qwen3 of four layers with a small tokenizer."""
    from tests.support.fakes import tiny_target_dir

    return tiny_target_dir(
        directory,
        "qwen3",
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )


def launch(target: Path, scratch: Path, topology: str, number: int, ungated: bool) -> dict:
    """One run in a process of its own, with caches of its own."""
    home = scratch / f"{'un' if ungated else ''}gated-{number}"
    home.mkdir()
    targets, drafters = TOPOLOGIES[topology]
    settings = {
        **SETTINGS,
        "run.dir": home / "run",
        "target.path": target,
        "topology.targets": f"[{targets}]",
        "topology.drafters": f"[{drafters}]",
    }
    config = home / "config.yaml"
    config.write_text("data: {train: ['builtin:demo-train']}\ntrain: {trackers: []}\n")
    arguments = ["train", str(config), *(f"{k}={v}" for k, v in settings.items())]
    program = ["-m", "draftline"]
    if ungated:
        program = [str(Path(__file__).with_name("ungated.py"))]
    caches = {"TORCHINDUCTOR_CACHE_DIR": home / "inductor", "TRITON_CACHE_DIR": home / "triton"}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, *program, *arguments],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, **{k: str(v) for k, v in caches.items()}},
        )
        code, errors = done.returncode, done.stderr
    except subprocess.TimeoutExpired as expired:
        code, errors = None, (expired.stderr or b"").decode()
    events = []
    if (home / "run" / "events.jsonl").exists():
        text = (home / "run" / "events.jsonl").read_text()
        events = [json.loads(line) for line in text.splitlines()]
    first = [e["seconds"] for e in events if e["event"] == "first_step"]
    memory = [e for e in events if e["event"] == "memory"]
    lines = [x for x in errors.splitlines() if "rror" in x or "Timeout" in x]
    return {
        "launch": number,
        "exit": code,
        "first_step_s": first[0] if first else None,
        "whole_s": round(time.perf_counter() - began, 1),
        "flat": all(m["reserved_change_bytes"] == 0 for m in memory) if memory else None,
        "allocator_calls": sum(m["allocator_calls"] for m in memory),
        "finished": any(e["event"] == "end" for e in events),
        "error": lines[-1][:300] if code != 0 and lines else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topology", choices=list(TOPOLOGIES))
    parser.add_argument("--launches", type=int, default=10)
    parser.add_argument("--together", type=int, default=5)
    parser.add_argument("--ungated", action="store_true")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        target = make_target(scratch / "target")
        with ThreadPoolExecutor(arguments.together) as pool:
            found = list(
                pool.map(
                    lambda n: launch(target, scratch, arguments.topology, n, arguments.ungated),
                    range(arguments.launches),
                )
            )
    print(f"{arguments.topology}{' without the gate' if arguments.ungated else ''}")
    for row in found:
        print("  ".join(f"{key} {value}" for key, value in row.items()))
    if arguments.out:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        facts = {"topology": arguments.topology, "ungated": arguments.ungated}
        facts |= {"together": arguments.together, "launches": found, **describe(device)}
        Path(arguments.out).write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
