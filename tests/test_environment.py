"""What is recorded of the environment, and what is kept out of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import draftline.environment as module
from draftline.environment import environment, provenance, variables


def test_what_a_run_was_made_by_holds_what_a_recording_says_of_its_machine() -> None:
    """One record: a run's log alone tells as much as its recording does."""
    known, made_by = environment(), provenance()
    assert {name: made_by[name] for name in known} == known


def test_only_variables_that_matter_are_kept() -> None:
    kept = variables(
        {
            "PATH": "/bin",
            "AWS_SECRET_ACCESS_KEY": "x",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "PYTORCH_ALLOC_CONF": "",
            "TORCHINDUCTOR_CACHE_DIR": "/data/cache",
            "CUDA_VISIBLE_DEVICES": "2,3",
            "OMP_NUM_THREADS": "1",
        }
    )
    assert kept == {
        "CUDA_VISIBLE_DEVICES": "2,3",
        "OMP_NUM_THREADS": "1",
        "PYTORCH_ALLOC_CONF": "",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCHINDUCTOR_CACHE_DIR": "/data/cache",
    }


def test_secrets_addresses_and_the_home_directory_are_not_written_down() -> None:
    kept = variables(
        {
            "HOME": "/home/ann",
            "TORCH_HOME": "/home/ann/cache:/home/anna/x",
            "TRITON_CACHE_DIR": "/home/ann",
            "TORCHINDUCTOR_REMOTE_CACHE_TOKEN": "abc",
            "TORCHINDUCTOR_REDIS_URL": "redis://u:p@cache",
            "NCCL_COMM_ID": "10.1.2.3:9000",
            "TORCH_TRACE": "https://u:p@host/x",
            "TRITON_DUMP_DIR": "x" * 1000,
        }
    )
    assert kept["TORCH_HOME"] == "~/cache:/home/anna/x"
    assert kept["TRITON_CACHE_DIR"] == "~"
    assert kept["TORCHINDUCTOR_REMOTE_CACHE_TOKEN"] == "(set)"
    assert kept["TORCHINDUCTOR_REDIS_URL"] == "(set)"
    assert kept["NCCL_COMM_ID"] == "(set)"
    assert kept["TORCH_TRACE"] == "https://...@host/x"
    assert len(kept["TRITON_DUMP_DIR"]) == 203


@pytest.mark.parametrize(
    ("files", "cpus", "memory"),
    [
        ({"cpu.max": "150000 100000", "memory.max": "1048576"}, 1.5, 1048576),
        ({"cpu.max": "max 100000", "memory.max": "max"}, None, None),
        (
            {
                "cpu/cpu.cfs_quota_us": "200000",
                "cpu/cpu.cfs_period_us": "100000",
                "memory/memory.limit_in_bytes": "4096",
            },
            2.0,
            4096,
        ),
        (
            {"cpu/cpu.cfs_quota_us": "-1", "memory/memory.limit_in_bytes": str(2**63 - 4096)},
            None,
            None,
        ),
        ({}, None, None),
    ],
)
def test_limits_of_the_control_group(
    files: dict[str, str], cpus: float | None, memory: int | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + "\n")
    assert module._cpu_limit(tmp_path) == cpus
    assert module._memory_limit(tmp_path) == memory


def test_containers_are_recognised(tmp_path: Path) -> None:
    assert module._in_container(tmp_path, {}) is None
    (tmp_path / "proc/1").mkdir(parents=True)
    assert module._in_container(tmp_path, {}) is False
    assert module._in_container(tmp_path, {"KUBERNETES_SERVICE_HOST": "x"}) is True
    (tmp_path / "proc/1/cgroup").write_text("0::/kubepods/burstable/x\n")
    assert module._in_container(tmp_path, {}) is True
    (tmp_path / "proc/1/cgroup").unlink()
    (tmp_path / ".dockerenv").touch()
    assert module._in_container(tmp_path, {}) is True


def test_cuda_of_an_installed_torch_is_read_without_importing_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "__init__.py").write_text("raise AssertionError('imported')")
    version = tmp_path / "version.py"
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: spec)
    version.write_text("cuda: Optional[str] = '13.0'\nhip = None\n")
    assert module._cuda_of_torch() == "13.0"
    version.write_text("cuda = None\ncuda_home = '13.0'\n")
    assert module._cuda_of_torch() is None


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from draftline.environment import environment; environment(); "
        "print({'torch', 'pydantic', 'rich', 'transformers', 'plotly'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_provenance_can_be_written_and_names_the_versions() -> None:
    seen = provenance()
    assert json.loads(json.dumps(seen)) == seen
    assert {"torch", "transformers", "numpy"} <= set(seen["versions"])
    assert seen["cpus"] == len(os.sched_getaffinity(0))
    assert seen["argv"][0] == Path(seen["argv"][0]).name


def git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(directory), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_draftline_and_of_no_other_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "draftline"
    package.mkdir()
    source = package / "environment.py"
    source.write_text("one\n")
    (tmp_path / ".gitignore").write_text("draftline\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".gitignore")
    git(tmp_path, "commit", "-qm", "somebody's project, with draftline installed inside")
    monkeypatch.setattr(module, "__file__", str(source))
    assert (provenance()["commit"], provenance()["modified"]) == (None, None)

    git(tmp_path, "add", "-f", "draftline")
    git(tmp_path, "commit", "-qm", "draftline itself")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert (provenance()["commit"], provenance()["modified"]) == (head, False)
    source.write_text("two\n")
    assert provenance()["modified"] is True


def test_a_machine_without_git_has_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    seen = provenance()
    assert (seen["commit"], seen["modified"]) == (None, None)
