"""``umem kernels``: what it says of the cache, and the archives that it refuses."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from software_programs import needs_compiler, needs_cupy

from umem.cli import main
from umem.host_cuda import MANIFEST, TARGET_VARIABLE, Toolchain, kernel_folder

SOURCE = "int f(void) { return 7; }"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return kernel_folder()


@pytest.fixture
def archive(cache: Path, tmp_path: Path) -> Path:
    """An archive of one kernel, which is no longer in the cache."""
    path = Toolchain().shared_object(SOURCE, "c")
    (cache / "not of umem.so").write_bytes(b"x")
    assert kernels("export", str(tmp_path / "a.zip")).exit_code == 0
    path.unlink()
    return tmp_path / "a.zip"


def kernels(*words: str) -> Result:
    return CliRunner().invoke(main, ["kernels", *words])


def changed(archive: Path, change: Callable[[dict[str, bytes]], None]) -> str:
    """The error that importing an archive gives once its files were changed."""
    with zipfile.ZipFile(archive) as found:
        files = {name: found.read(name) for name in found.namelist()}
    change(files)
    with zipfile.ZipFile(archive, "w") as made:
        for name, content in files.items():
            made.writestr(name, content)
    return refused(archive)


def refused(archive: Path) -> str:
    folder = kernel_folder()
    before = sorted(folder.glob("*"))
    result = kernels("import", str(archive))
    assert result.exit_code == 1 and sorted(folder.glob("*")) == before
    assert not isinstance(result.exception, Exception) or isinstance(result.exception, SystemExit)
    return result.output


@needs_compiler
def test_a_cache_is_listed_trimmed_and_cleared(cache: Path) -> None:
    assert "0 kernels" in kernels("list").output
    path = Toolchain().shared_object(SOURCE, "c")
    (cache / "0123.so").write_bytes(bytes(100))
    lines = kernels("list").output.splitlines()
    assert "2 kernels" in lines[0] and "of at most 2.0 GiB" in lines[0]
    assert any("native, compiler " in line and ": 1 kernels" in line for line in lines)
    assert any("from earlier versions of umem: 1 kernels, 100 B" in line for line in lines)
    os.utime(path, (1000, 1000))
    os.utime(cache / "0123.so", (2000, 1000))
    assert "Removed 1 files" in kernels("trim", "200").output
    assert [*cache.iterdir()] == [cache / "0123.so"]
    assert kernels("trim", "little").exit_code == 2
    (cache / "left.alone").touch()
    assert "Removed 100 B" in kernels("clear").output
    assert [*cache.iterdir()] == [cache / "left.alone"]


@needs_compiler
def test_kernels_go_to_another_cache(archive: Path, cache: Path) -> None:
    assert "Added 1 kernels" in kernels("import", str(archive)).output
    before = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    path = Toolchain().shared_object(SOURCE, "c")
    assert before[path] == path.stat().st_mtime_ns  # not compiled again
    assert "Added 0 kernels" in kernels("import", str(archive)).output


@needs_compiler
def test_kernels_of_another_target_say_how_they_are_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TARGET_VARIABLE, "portable")
    Toolchain().shared_object(SOURCE, "c")
    assert kernels("export", str(tmp_path / "a.zip")).exit_code == 0
    monkeypatch.setenv(TARGET_VARIABLE, "native")
    assert "UMEM_KERNEL_TARGET=portable" in kernels("import", str(tmp_path / "a.zip")).output
    refusal = kernels("export", str(tmp_path / "b.zip"))
    assert refusal.exit_code == 1 and "no kernels of this compiler and target" in refusal.output


@needs_compiler
@pytest.mark.parametrize("name", ["../x.so", "/x.so", "a/b.so", "native-0-0.so", "x.sh"])
def test_files_with_other_names_are_refused(archive: Path, name: str) -> None:
    said = changed(archive, lambda files: files.update({name: b"x"}))
    assert f"it contains {name}, which is not a kernel's name" in said


@needs_compiler
@pytest.mark.parametrize(
    ("entry", "value", "said"),
    [
        ("umem", "0.1", "its kernels are of umem 0.1, but this is umem"),
        ("compiler", "cc 1", "its kernels are of the compiler cc 1, but "),
        ("label", "native-00000000", "another processor, by the same compiler"),
        ("target", "avx10", "native or portable, not avx10"),
        ("target", 5, "its manifest is invalid"),
        ("kernels", {}, "its files differ from its manifest"),
        ("kernels", None, "its manifest names no kernels"),
    ],
)
def test_archives_of_others_are_refused_by_name(
    archive: Path, entry: str, value: object, said: str
) -> None:
    def change(files: dict[str, bytes]) -> None:
        manifest = {**json.loads(files[MANIFEST]), entry: value}
        if entry == "compiler":
            manifest["label"] = "native-00000000"
        files[MANIFEST] = json.dumps(manifest).encode()

    assert said in " ".join(changed(archive, change).split())


@needs_compiler
def test_damaged_archives_are_refused(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(files: dict[str, bytes]) -> None:
        (name,) = {*files} - {MANIFEST}
        files[name] = files[name][:-1] + b"?"

    content = archive.read_bytes()
    assert "is damaged: its checksum differs" in changed(archive, damage)
    archive.write_bytes(content[: len(content) // 2])
    assert "damaged" in refused(archive)
    archive.write_bytes(content[:200] + bytes(50) + content[250:])
    assert "damaged" in refused(archive)
    assert "there is no such file" in refused(tmp_path / "none.zip")
    assert changed_without_manifest(archive, content)
    archive.write_bytes(content)
    monkeypatch.setenv("UMEM_KERNEL_CACHE_SIZE", "100")
    assert "larger than the cache may be" in refused(archive)


def changed_without_manifest(archive: Path, content: bytes) -> bool:
    archive.write_bytes(content)
    return "damaged" in changed(archive, lambda files: files.pop(MANIFEST) and None)


@needs_compiler
@needs_cupy
@pytest.mark.slow
def test_kernels_are_compiled_ahead(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(cache))
    result = kernels("warm", "--dtype", "bool", "--jobs", "2")
    assert result.exit_code == 0, result.output
    count = int(result.output.split()[1])
    assert count > 20
    again = kernels("warm", "--dtype", "bool", "--jobs", "1")
    assert again.output.startswith("Compiled 0 kernels")
    monkeypatch.setenv("CXX", "/bin/false")
    failed = kernels("warm", "--dtype", "bool", "--jobs", "1")
    assert failed.exit_code == 1
