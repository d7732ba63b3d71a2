"""--overwrite replaces an export of ours and nothing else; two exports never mix."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftline.errors import ConfigError
from draftline.export.directory import check_replaceable, metadata, replacing
from tests.support.fakes import tiny_target_dir


def write(out: Path, value: float = 1.0) -> None:
    save_file(
        {"norm.weight": torch.full((2,), value)}, out / "model.safetensors", metadata=metadata()
    )
    (out / "config.json").write_text(json.dumps({"dflash_config": {"block_size": 4}}))


def export(out: Path, value: float = 1.0, *, overwrite: bool = False) -> Path:
    with replacing(out, overwrite) as scratch:
        write(scratch, value)
    return out


def model_folder(out: Path) -> None:
    """A target saved by transformers, of which only the two files are kept."""
    tiny_target_dir(out, "llama")
    for path in out.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()


def somebody_elses_drafter(out: Path) -> None:
    """The same layout, downloaded: config and names of tensors are those of an export of ours."""
    export(out)
    save_file({"norm.weight": torch.ones(2)}, out / "model.safetensors", metadata={"format": "pt"})


def with_notes(out: Path) -> None:
    export(out)
    (out / "notes.txt").write_text("which prompts it failed on")


def with_a_folder(out: Path) -> None:
    export(out)
    (out / ".git").mkdir()


def half(out: Path) -> None:
    export(out)
    (out / "config.json").unlink()


def broken(out: Path) -> None:
    export(out)
    (out / "model.safetensors").write_bytes(b"x" * 40)


def deep(out: Path) -> None:
    export(out)
    (out / "config.json").write_text("[" * 200_000)


def no_drafter(out: Path) -> None:
    export(out)
    (out / "config.json").write_text("{}")


def links(out: Path) -> None:
    """As a hub cache looks: the names are right, the files lie elsewhere."""
    export(out)
    blob = out.parent / "blob"
    shutil.move(out / "model.safetensors", blob)
    (out / "model.safetensors").symlink_to(blob)


def link(out: Path) -> None:
    export(out.with_name("real"))
    out.symlink_to("real")


def dangling(out: Path) -> None:
    out.symlink_to("nowhere")


def file(out: Path) -> None:
    out.write_text("a file")


def seen(root: Path) -> dict[str, bytes | str]:
    return {
        str(p.relative_to(root)): os.readlink(p) if p.is_symlink() else p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


@pytest.mark.parametrize(
    "make",
    [
        model_folder,
        somebody_elses_drafter,
        with_notes,
        with_a_folder,
        half,
        broken,
        deep,
        no_drafter,
        links,
        link,
        dangling,
        file,
    ],
)
def test_nothing_but_an_export_is_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    out = tmp_path / "out"
    make(out)
    before = seen(tmp_path)
    with pytest.raises(ConfigError, match=r"out is not an exported drafter of draftline"):
        check_replaceable(out, overwrite=True)
    with pytest.raises(ConfigError, match=r"--overwrite replaces only those"):
        export(out, overwrite=True)
    assert seen(tmp_path) == before


def test_an_export_and_an_empty_directory_are_replaced(tmp_path: Path) -> None:
    out = export(tmp_path / "out")
    with pytest.raises(ConfigError, match="exists; choose another directory or pass --overwrite"):
        export(out, 2.0)
    first = seen(tmp_path)
    export(out, 2.0, overwrite=True)
    assert seen(tmp_path) != first
    assert seen(tmp_path).keys() == first.keys()
    (tmp_path / "empty").mkdir()
    export(tmp_path / "empty", overwrite=True)


def test_two_exports_into_one_directory_do_not_mix(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with replacing(out, overwrite=False) as scratch:
        write(scratch)
        with pytest.raises(ConfigError, match=rf"out is being written by process {os.getpid()} "):
            export(out, 2.0)
    assert sorted(seen(tmp_path)) == ["out/config.json", "out/model.safetensors"]


def test_an_error_leaves_the_old_one_and_no_more(tmp_path: Path) -> None:
    out = export(tmp_path / "out")
    before = seen(tmp_path)

    def unlike() -> None:
        with replacing(out, overwrite=True) as scratch:
            write(scratch, 2.0)
            raise ValueError("not equal")

    with pytest.raises(ValueError, match="not equal"):
        unlike()
    assert seen(tmp_path) == before


def test_what_a_killed_export_left_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / ".out.tmp"
    left.mkdir()
    (left / "optimizer.bin").write_bytes(b"half")
    export(tmp_path / "out")
    assert sorted(seen(tmp_path)) == ["out/config.json", "out/model.safetensors"]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o007])
def test_files_are_for_whom_the_umask_lets(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        out = export(tmp_path / "new" / "out")
    finally:
        os.umask(before)
    assert {p.stat().st_mode & 0o777 for p in out.iterdir()} == {0o666 & ~mask}
    assert out.stat().st_mode & 0o777 == out.parent.stat().st_mode & 0o777 == 0o777 & ~mask
