"""What a program ran in, as far as it bears on its memory and speed: versions, variables, limits, and
the commit of draftline's own sources. A recording, a run and a checkpoint all hold this one record.

Nothing heavy is imported for it, and what cannot be had is None.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PACKAGES = (
    "draftline",
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "flash-attn",
    "liger-kernel",
    "safetensors",
    "tokenizers",
    "numpy",
)
# Variables that change what PyTorch compiles, allocates or where it runs.
_PREFIXES = (
    "PYTORCH_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TORCHDYNAMO_",
    "TRITON_",
    "NCCL_",
    "CUDA_",
    "CUBLAS_",
    "CUBLASLT_",
    "CUDNN_",
    "MALLOC_",
)
_NAMES = frozenset(
    {
        "NVIDIA_VISIBLE_DEVICES",
        "NVIDIA_TF32_OVERRIDE",
        "OMP_NUM_THREADS",
        "MKL_NUM_THREADS",
        "LD_PRELOAD",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
    }
)
# Said to be set, and no more: secrets, and what names machines of a network.
_UNSAID = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|HOSTID|COMM_ID|REDIS|URL", re.IGNORECASE)
_LONGEST = 200


def environment() -> dict[str, Any]:
    """Versions, variables, CPUs and memory of this process's machine, as plain values that can be
    written as JSON. `None` stands for what is unknown."""
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}",
        "kernel": platform.release() or None,
        "versions": _versions(),
        "cuda": _cuda_of_torch(),
        "variables": variables(os.environ),
        "cpus": _cpus(),
        "cpu_limit": _cpu_limit(Path("/sys/fs/cgroup")),
        "memory_bytes": _memory_bytes(),
        "memory_limit_bytes": _memory_limit(Path("/sys/fs/cgroup")),
        "container": _in_container(Path("/"), os.environ),
    }


def provenance() -> dict[str, Any]:
    """The environment, the source commit with whether it was modified, the command and the time.

    It runs git three times and tells the sources as they lie there now: ask once, at the start.
    """
    tracked = _is_tracked()
    modified = _git("status", "--porcelain", "--untracked-files=no") if tracked else None
    return {
        **environment(),
        "commit": _git("rev-parse", "HEAD") if tracked else None,
        "modified": bool(modified) if tracked else None,
        "argv": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def source_diff() -> str | None:
    """What the sources have that their commit has not, or None where nothing differs."""
    return (_git("diff", "HEAD") or None) if _is_tracked() else None


def _git(*arguments: str) -> str | None:
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _is_tracked() -> bool:
    """Whether the sources belong to the repository they lie in, and not to somebody else's."""
    return bool(_git("ls-files", Path(__file__).name))


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Those of `environ` that bear on memory and speed; the home directory is written as ~, and of a
    value that may be a secret or name a machine only that it is set."""
    home = environ.get("HOME", "").rstrip("/")
    kept = {}
    for name in sorted(environ):
        if name not in _NAMES and not name.startswith(_PREFIXES):
            continue
        value = environ[name]
        if value and _UNSAID.search(name):
            kept[name] = "(set)"
            continue
        value = re.sub(r"(?<=://)[^/@\s]*@", "...@", value)
        if home:
            value = re.sub(rf"(?<![\w.]){re.escape(home)}(?=[/:;,\s]|$)", "~", value)
        kept[name] = value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..."
    return kept


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        # Broken metadata of some package raises what it likes; none of it matters here.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, OSError, ValueError):
            version = importlib.metadata.version(name)
            if version:
                found[name] = version
    return found


def _cuda_of_torch() -> str | None:
    """The CUDA release that the installed PyTorch was built for; None for a CPU build."""
    loaded = getattr(sys.modules.get("torch"), "version", None)
    if loaded is not None:
        cuda = getattr(loaded, "cuda", None)
        return None if cuda is None else str(cuda)
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except (ImportError, OSError, ValueError):
        return None
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def _cpus() -> int | None:
    """CPUs that this process may run on."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count()


def _cpu_limit(root: Path) -> float | None:
    """CPUs' worth of time that the control group grants; None without a limit."""
    quota, _, period = _line(root / "cpu.max").partition(" ")
    if not period:
        quota = _line(root / "cpu/cpu.cfs_quota_us")
        period = _line(root / "cpu/cpu.cfs_period_us")
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return round(int(quota) / int(period), 2)


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _memory_limit(root: Path) -> int | None:
    """Bytes that the control group allows; None without a limit."""
    text = _line(root / "memory.max") or _line(root / "memory/memory.limit_in_bytes")
    if not text.isdigit():
        return None
    limit = int(text)
    # The old interface writes "none" as the largest page-aligned number there is.
    return limit if limit < 1 << 60 else None


def _in_container(root: Path, environ: Mapping[str, str]) -> bool | None:
    """Whether a container runtime left its mark; None where there is nothing to look at."""
    if not (root / "proc").is_dir():
        return None
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return True
    if "container" in environ or "KUBERNETES_SERVICE_HOST" in environ:
        return True
    groups = _line(root / "proc/1/cgroup")
    return any(word in groups for word in ("docker", "containerd", "kubepods", "lxc"))


def _line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""
