"""What is recorded of the environment, and what is kept out of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftline.signal import environment as module
from draftline.signal.environment import environment, variables
from draftline.signal.recorder.nvml import Device, Unavailable


class FakeSource:
    def __init__(self) -> None:
        self.closed = False

    def devices(self) -> list[Device]:
        return [Device("0", "GPU-a", "NVIDIA H200", 10), Device("MIG-1", "MIG-1", "", None)]

    def close(self) -> None:
        self.closed = True


class NvmlError(Exception):
    pass


def refuse() -> None:
    raise NvmlError("uninitialised")


def use_nvml(monkeypatch: pytest.MonkeyPatch, **functions: object) -> FakeSource:
    source = FakeSource()
    monkeypatch.setattr(module, "open_source", lambda: source)
    nvml = SimpleNamespace(NVMLError=NvmlError, **functions)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return source


def test_gpus_and_driver_come_from_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    source = use_nvml(
        monkeypatch,
        nvmlSystemGetDriverVersion=lambda: b"580.159.04",
        nvmlSystemGetCudaDriverVersion=lambda: 12040,
    )
    facts = environment()
    assert facts["driver"] == "580.159.04"
    assert facts["driver_cuda"] == "12.4"
    assert facts["gpus"] == [
        {"index": "0", "uuid": "GPU-a", "name": "NVIDIA H200", "total_bytes": 10},
        {"index": "MIG-1", "uuid": "MIG-1", "name": "", "total_bytes": None},
    ]
    assert source.closed
    assert json.loads(json.dumps(facts)) == facts


def test_a_driver_that_tells_no_version_leaves_the_gpus_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_nvml(monkeypatch, nvmlSystemGetDriverVersion=refuse)
    facts = environment()
    assert facts["driver"] is None
    assert len(facts["gpus"]) == 2


def test_without_a_driver_the_gpus_are_unknown_and_not_none_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> FakeSource:
        raise Unavailable("no driver")

    monkeypatch.setattr(module, "open_source", missing)
    facts = environment()
    assert facts["gpus"] is None
    assert facts["driver"] is None
    assert facts["python"] == sys.version.split()[0]
    assert facts["versions"]["torch"].startswith("2.")
    assert facts["cpus"] >= 1


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
        "import sys; from draftline.signal.environment import environment; environment(); "
        "print({'torch', 'pydantic', 'rich', 'transformers', 'plotly'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
