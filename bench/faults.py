"""Records every fault and every healthy run of the corpus on a small model; see docs/signal.md.

    python bench/faults.py --out DIR [--only NAME ...] [--gpus 0,1] [--seconds-per 8] [--deadline S]
        [--neighbour WORDS]
    python bench/faults.py --out DIR --split

Each recording is DIR/NAME-K/{signal.jsonl,nvidia-smi.csv,label.json}: draftline's counters, a real
nvidia-smi beside it, and what happened. At the end DIR/split.json and DIR/corpus.tar.xz hold those
whose program proved its fault, without what tells machines apart; `--split` makes these two alone and
leaves on its side what an earlier split.json in DIR names. One of each fault comes first, so that a
run that `--deadline` ends is a balanced one. Without --gpus and without a GPU it runs on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fault_corpus import FILES, MAX_BYTES, pack
from fault_run import PROGRAMS

from draftline.environment import provenance

KILL_S = 45.0
# What a recording needs besides its seconds: a device context, a model, its compilation.
START_S = 14.0
SHOWN = (
    *("steps", "reserved_mib", "allocated_mib", "inactive_mib", "foreign_mib_total"),
    *("device_allocations", "device_frees", "retries", "ooms", "frames_total", "frames_ok_total"),
    *("breaks_total", "graphs", "limits_total", "capture_skips_total", "graph_replays", "captures"),
    "pauses",
)


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    k: int
    environment: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.name}-{self.k}"


def jobs_of(only: list[str]) -> list[Job]:
    """The first recording of each program, then the second ones, then the third; `only` names
    programs or single recordings. Faults and healthy ones take turns."""
    jobs = [
        Job(program.name, k, variant.environment)
        for k in range(3)
        for program in _mixed()
        for variant in program.variants[k : k + 1]
    ]
    return [job for job in jobs if not only or job.name in only or str(job) in only]


def _mixed() -> list[Any]:
    faults = [program for program in PROGRAMS if program.alarm]
    healthy = [program for program in PROGRAMS if not program.alarm]
    order = [
        (i / len(group), program) for group in (faults, healthy) for i, program in enumerate(group)
    ]
    return [program for _, program in sorted(order, key=lambda pair: pair[0])]


class Worker:
    """A process that will record one job and has imported what it needs, or is about to have."""

    def __init__(self, job: Job, out: Path, gpu: str | None, seconds: float) -> None:
        self.job, self.gpu, self.out = job, gpu, out / str(job)
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        environment = os.environ | dict(job.environment)
        if gpu is not None:
            environment |= {"CUDA_VISIBLE_DEVICES": gpu, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        command = [sys.executable, str(Path(__file__).with_name("fault_run.py")), job.name]
        command += [str(job.k), str(self.out), "--seconds", str(seconds)]
        command += ["--device", "cpu" if gpu is None else "cuda:0"]
        self._output = (self.out / "output.txt").open("wb")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        """Returns once it has imported everything, or has died, or a minute has passed."""
        path, end = self.out / "output.txt", time.monotonic() + 60.0
        while self.process.poll() is None and time.monotonic() < end:
            if b"ready\n" in path.read_bytes():
                return
            time.sleep(0.02)

    def record(self) -> dict[str, Any]:
        """Lets it run and returns its label; it is killed after 45 s."""
        self.wait_ready()
        with _nvidia_smi(self.gpu, self.out / "nvidia-smi.csv"):
            began, why = time.monotonic(), None
            try:
                self.process.communicate(b"go\n", timeout=KILL_S)
            except subprocess.TimeoutExpired:
                why = f"killed after {KILL_S:g} s"
            self.stop()
        path = self.out / "label.json"
        lost = {"name": self.job.name, "ok": False, "seconds": round(time.monotonic() - began, 1)}
        lost["why"] = why or f"exited with {self.process.returncode}"
        return json.loads(path.read_text()) if path.exists() else lost

    def stop(self) -> None:
        """Ends the process and what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._output.close()

    def output(self) -> str:
        lines = (self.out / "output.txt").read_text(errors="replace").splitlines()
        return "\n".join(f"    {line[:200]}" for line in lines[-12:])


@contextlib.contextmanager
def _nvidia_smi(gpu: str | None, path: Path) -> Iterator[None]:
    """A real nvidia-smi that samples the device into `path`, from before the body to after it."""
    if gpu is None:
        yield
        return
    # It may hold its lines back where it does not write to a terminal.
    query = ["stdbuf", "-oL"] if shutil.which("stdbuf") else []
    query += ["nvidia-smi", "--query-gpu=timestamp,index,memory.used,utilization.gpu"]
    query += ["--format=csv", "-lms", "200", "-i", gpu]
    with path.open("wb") as file, subprocess.Popen(query, stdout=file) as process:
        end = time.monotonic() + 3.0
        while path.stat().st_size < 100 and time.monotonic() < end:  # its header and a first line
            time.sleep(0.02)
        yield
        time.sleep(0.4)
        process.terminate()


def _facts(gpu: str | None) -> dict[str, Any]:
    facts: dict[str, Any] = {"driver": None, "device": "cpu"}
    if gpu is not None:
        query = [
            "nvidia-smi",
            "--query-gpu=name,driver_version",
            "--format=csv,noheader",
            "-i",
            gpu,
        ]
        name, driver = subprocess.run(query, capture_output=True, text=True).stdout.split(",")
        facts = {"driver": driver.strip(), "device": name.strip()}
    return facts | {"commit": os.environ.get("DRAFTLINE_COMMIT") or provenance()["commit"]}


class Corpus:
    """Records jobs, one at a time on each GPU, until none is left or the deadline nears."""

    def __init__(self, out: Path, seconds: float, end: float, neighbour: str | None = None) -> None:
        self.out, self.seconds, self.end, self.neighbour = out, seconds, end, neighbour
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.failed = 0

    def run(self, jobs: list[Job], gpus: list[str | None]) -> None:
        for job in jobs:
            self._jobs.put(job)
        threads = [threading.Thread(target=self._serve, args=(gpu,)) for gpu in gpus]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _next(self, gpu: str | None) -> Worker | None:
        if time.monotonic() > self.end - 2 * (self.seconds + START_S):
            return None
        try:
            return Worker(self._jobs.get_nowait(), self.out, gpu, self.seconds)
        except queue.Empty:
            return None

    def _serve(self, gpu: str | None) -> None:
        facts, worker = _facts(gpu), self._next(gpu)
        while worker is not None:
            following = self._next(gpu)
            if time.monotonic() > self.end - self.seconds - START_S:
                worker.stop()
                shutil.rmtree(worker.out)
            else:
                label = worker.record() | facts | {"neighbour": self.neighbour}
                (worker.out / "label.json").write_text(json.dumps(label, indent=1) + "\n")
                self._tell(worker, label)
            worker = following

    def _tell(self, worker: Worker, label: Mapping[str, Any]) -> None:
        evidence = label.get("evidence", {})
        shown = " ".join(f"{name} {evidence[name]:g}" for name in SHOWN if name in evidence)
        line = f"{worker.job!s:22} {worker.gpu or 'cpu'} {label['seconds']:5.1f} s "
        line += f"{'ok' if label['ok'] else 'NOT OK: ' + str(label['why'])}  {shown}"
        with self._lock:
            self.failed += not label["ok"]
            sys.stdout.write(line + "\n")
            if not label["ok"]:
                sys.stdout.write(worker.output() + "\n")
            sys.stdout.flush()


def _gpus() -> list[str | None]:
    if shutil.which("nvidia-smi") is None:
        return [None]
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    return [*subprocess.run(query, capture_output=True, text=True).stdout.split()] or [None]


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="programs, or NAME-K")
    parser.add_argument("--gpus", help="nvidia-smi's indices with commas between; all of them")
    parser.add_argument("--seconds-per", type=float, default=8.0)
    parser.add_argument("--deadline", type=float, default=3600.0, help="in all; none starts later")
    parser.add_argument("--neighbour", metavar="WORDS", help="what else is on the GPUs, for labels")
    parser.add_argument("--split", action="store_true", help="only split and pack what DIR holds")
    options = parser.parse_args()
    corpus = Corpus(options.out, options.seconds_per, began + options.deadline, options.neighbour)
    if not options.split:
        jobs = jobs_of(options.only)
        if not jobs:
            parser.error(f"no recording is called {options.only}")
        gpus = options.gpus.split(",") if options.gpus else _gpus()
        corpus.run(jobs, gpus)
    archive = pack(options.out)
    size = archive.stat().st_size
    sides = json.loads((options.out / "split.json").read_text())
    sys.stdout.write(
        f"{archive.name}: {size / 2**20:.2f} MiB, {len(sides['tuning'])} recordings for tuning and "
        f"{len(sides['test'])} for the test, {', '.join(FILES)} each; {corpus.failed} not ok; "
        f"{time.monotonic() - began:.0f} s\n"
    )
    if size > MAX_BYTES:
        sys.exit(f"the archive is larger than {MAX_BYTES >> 20} MiB")


if __name__ == "__main__":
    main()
