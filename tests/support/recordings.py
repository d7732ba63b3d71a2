"""Made-up recordings in the forms that tools write."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

TRACES = Path(__file__).parents[1] / "data" / "traces"
START_S = 1795959600.0  # 2026-11-29 13:40:00 UTC
MIB = 2.0**20
UUIDS = ("GPU-6f3a1c22-0000-4000-8000-00000000000a", "GPU-6f3a1c22-0000-4000-8000-00000000000b")
BUSES = ("00000000:4F:00.0", "00000000:52:00.0")


def stamp(time_s: float, form: str = "%Y/%m/%d %H:%M:%S") -> str:
    """The moment as nvidia-smi writes it, in UTC, with milliseconds."""
    moment = datetime.fromtimestamp(0, UTC) + timedelta(seconds=time_s)
    return f"{moment:{form}}.{moment.microsecond // 1000:03d}"


def used_mib(query: int, gpu: int = 0) -> int:
    """Memory that tells queries and GPUs apart: a ramp, then a level."""
    return 500 + 40 * min(query, 20) + 1000 * gpu


def query_lines(
    queries: int = 40,
    gpus: int = 1,
    *,
    period_s: float = 0.2,
    columns: str = "timestamp index used util",
) -> list[str]:
    """Rows of `nvidia-smi --query-gpu` without header; `columns` are names as in `HEADERS`."""
    rows = []
    for q in range(queries):
        for g in range(gpus):
            cells = {
                "timestamp": stamp(START_S + q * period_s + 0.002 * g),
                "index": str(g),
                "uuid": UUIDS[g],
                "bus": BUSES[g],
                "name": "NVIDIA H200",
                "used": f"{used_mib(q, g)} MiB",
                "total": "143771 MiB",
                "free": f"{143771 - used_mib(q, g)} MiB",
                "util": f"{(7 * q) % 100} %",
                "memory_util": f"{(7 * q) % 100 // 2} %",
                "power": f"{300 + q / 10:.2f} W",
                "temperature": str(60 + q % 7),
            }
            rows.append(", ".join(cells[name] for name in columns.split()))
    return rows


HEADERS = {
    "timestamp": "timestamp",
    "index": "index",
    "uuid": "uuid",
    "bus": "pci.bus_id",
    "name": "name",
    "used": "memory.used [MiB]",
    "total": "memory.total [MiB]",
    "free": "memory.free [MiB]",
    "util": "utilization.gpu [%]",
    "memory_util": "utilization.memory [%]",
    "power": "power.draw [W]",
    "temperature": "temperature.gpu",
}


def header(columns: str = "timestamp index used util") -> str:
    return ", ".join(HEADERS[name] for name in columns.split())


def query_csv(queries: int = 40, gpus: int = 1, **options: Any) -> str:
    columns = options.get("columns", "timestamp index used util")
    return "\n".join([header(columns), *query_lines(queries, gpus, **options)]) + "\n"


def dmon(samples: int = 30, gpus: int = 1, times: str = "DT") -> str:
    """`nvidia-smi dmon -s mu`, its header again every ten samples; `times` as its option -o."""
    heads = {"D": ("Date       ", "YYYYMMDD   "), "T": ("Time      ", "HH:MM:SS  ")}
    names = "".join(heads[t][0] for t in times) + "gpu     fb   bar1   ccpm     sm    mem"
    units = "".join(heads[t][1] for t in times) + "Idx     MB     MB     MB      %      %"
    lines = []
    for n in range(samples):
        if n % 10 == 0:
            lines += [
                f"#{names}" if times else f"# {names}",
                f"#{units}" if times else f"# {units}",
            ]
        moment = datetime.fromtimestamp(START_S + n, UTC)
        when = {"D": f" {moment:%Y%m%d}   ", "T": f" {moment:%H:%M:%S}  "}
        for g in range(gpus):
            row = f"    {g}   {used_mib(n, g)}      4      -     {n % 100}      0"
            lines.append("".join(when[t] for t in times) + row)
    return "\n".join(lines) + "\n"


def pmon(samples: int = 30, times: str = "") -> str:
    """`nvidia-smi pmon -s m`: two processes on GPU 0, the second from the tenth sample on; GPU 1 idle."""
    first = {"": "# ", "T": "#Time        "}[times]
    lines = [f"{first}gpu         pid   type     fb   ccpm    command"]
    for n in range(samples):
        when = f" {datetime.fromtimestamp(START_S + n, UTC):%H:%M:%S}  " if times else ""
        lines.append(f"{when}    0       4242     C   {used_mib(n)}      0    python train.py")
        if n >= 10:
            lines.append(f"{when}    0       4300   C+G    300      0    other")
        lines.append(f"{when}    1          -     -      -      -    -")
    return "\n".join(lines) + "\n"


def table(
    query: int, gpus: int = 1, *, old: bool = False, mig: bool = False, processes: bool = True
) -> str:
    """What plain `nvidia-smi` prints."""
    moment = datetime.fromtimestamp(START_S + query, UTC)
    lines = [f"{moment:%a %b %e %H:%M:%S %Y}       "]
    lines += [
        "+" + "-" * 89 + "+",
        f"| NVIDIA-SMI 580.95.05{'Driver Version: 580.95.05':>40}    CUDA Version: 13.0      |",
    ]
    lines += [
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |"
    ]
    for g in range(gpus):
        bus = BUSES[g][4:] if old else BUSES[g]
        util = "N/A" if mig else f"{query % 100}%"
        lines.append(
            f"|   {g}  NVIDIA H200                    On  |   {bus} Off |                    0 |"
        )
        lines.append(
            f"| N/A   51C    P0            371W /  700W | {used_mib(query, g):7d}MiB / 143771MiB "
            f"| {util:>7}      Default |"
        )
    if mig:
        lines += ["| MIG devices:                                                                |"]
        lines += ["| GPU  GI  CI  MIG |         Memory-Usage |        Vol|         Shared        |"]
        lines += [
            f"|  0    7   0   0  |    {100 + query}MiB / 20096MiB | 42      0 |  3   0    2    0    0 |"
        ]
        lines += ["|                  |      0MiB / 32767MiB |           |                       |"]
    lines += [
        "| Processes:                                                                              |"
    ]
    if not processes:
        lines.append(
            "|  No running processes found                                                             |"
        )
    elif old:
        lines.append(
            f"|    0      4242      C   python -m train                  {used_mib(query) - 400}MiB |"
        )
    elif mig:
        lines.append(
            "|    0    7    0           4242      C   python                              90MiB |"
        )
    else:
        lines.append(
            f"|    0   N/A  N/A            4242      C   /usr/bin/python a b  {used_mib(query) - 400}MiB |"
        )
        lines.append(
            "|    0   N/A  N/A            4300      G   Xorg                                  N/A |"
        )
    return "\n".join(lines) + "\n"


def step_row(n: int, **changes: object) -> dict[str, object]:
    """A step in the per-step layout: 50 ms, 249 allocations, memory that stands still."""
    row: dict[str, object] = {
        "step": n,
        "t": START_S + 0.05 * n,
        "wall_ms": 49.0,
        "tokens": 4096,
        "allocs": 249 * (n + 1),
        "allocated": 900 << 20,
        "reserved": 2000 << 20,
        "dev_alloc": 40,
        "err": None,
    }
    return row | changes


def json_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def recording_rows(
    steps: int = 60, pid: int = 4242, start_s: float = START_S
) -> list[dict[str, Any]]:
    """Our own recording: a program on the driver's GPU 1, sampled at 5 Hz."""
    rows: list[dict[str, Any]] = [
        {
            "kind": "start",
            "format": 1,
            "time_s": start_s,
            "pid": pid,
            "program": "train.py --lr 1",
            "expects": ["compiled"],
            "devices": {
                "cuda:0": {"index": 1, "uuid": UUIDS[1], "name": "H200", "total_bytes": 1e11}
            },
            "facts": {"torch": "2.11.0"},
        },
        {"kind": "phase", "time_s": start_s, "phase": "run"},
    ]
    for n in range(steps):
        time_s = start_s + 0.05 * (n + 1)
        if n % 4 == 0:
            rows.append(
                {
                    "kind": "device",
                    "time_s": time_s - 0.01,
                    "device": "1",
                    "used_bytes": 3e9,
                    "total_bytes": 1e11,
                    "util_pct": 97.0,
                    "processes": {str(pid): 2.5e9} if n < 40 else None,
                }
            )
        rows.append(
            {
                "kind": "step",
                "time_s": time_s,
                "device": "1",
                "step": n,
                "wall_ms": 50.0,
                "tokens": 4096,
                "allocator_calls": 10 * n,
                "reserved_bytes": 2e9,
            }
        )
    return rows


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Every line of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
