"""The line that goes on top of every result: device, driver, versions, commit."""

from __future__ import annotations

import os
import subprocess

import torch
import transformers

from draftline.environment import provenance


def describe(device: torch.device) -> dict[str, object]:
    """Device, versions and commit of this run; `DRAFTLINE_COMMIT` names the commit where the
    sources travel without their history."""
    facts: dict[str, object] = {
        "commit": os.environ.get("DRAFTLINE_COMMIT") or provenance()["commit"],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return facts
