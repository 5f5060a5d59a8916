"""Files: what can be written is known beforehand, long names and open files among it; what names no file is told."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphs import InputError
from graphs.files import check_readable, check_writable, descriptor_of, read_text, write_whole

LONG = 300 * "a"


@pytest.mark.parametrize("length", [1, 245, 246, 255])
def test_a_name_may_be_as_long_as_the_file_system_takes(length: int, tmp_path: Path) -> None:
    path = tmp_path / (length * "b")
    for content in ("first", "second"):
        check_writable(path)
        write_whole(path, content)
        assert read_text(path) == content
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_larger_than_the_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_much(_: bytes) -> bytes:
        raise MemoryError

    path = tmp_path / "bomb.gz"
    write_whole(path, "much")
    monkeypatch.setattr("gzip.decompress", too_much)
    with pytest.raises(InputError, match=f"{path} is larger than the memory that is left"):
        read_text(path)


@pytest.mark.parametrize("name", [LONG, f"{LONG}/x", f"new/{LONG}", f"new/{LONG}/x"])
def test_a_name_that_is_too_long_is_told(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"cannot write {tmp_path / name}: File name too long"):
        check_writable(tmp_path / name)
    with pytest.raises(InputError, match=f"cannot read {tmp_path / LONG}: File name too long"):
        check_readable(tmp_path / LONG)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_may_not_be_entered_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat, locked = os.stat, str(tmp_path / "locked")

    def refused(path: Any, **more: Any) -> os.stat_result:
        if str(path).startswith(f"{locked}/"):
            raise PermissionError(13, "Permission denied", path)
        return stat(path, **more)

    os.mkdir(locked)
    monkeypatch.setattr(os, "stat", refused)
    for check, what in ((check_writable, "write"), (check_readable, "read")):
        with pytest.raises(InputError, match=f"cannot {what} {locked}/x: Permission denied"):
            check(f"{locked}/x")


@pytest.mark.skipif(not Path("/proc/version").exists(), reason="no /proc here")
@pytest.mark.parametrize("path", ["/proc/version", "/proc/nowhere/x"])
def test_a_folder_that_takes_no_new_file_is_told_also_where_the_file_is_there(path: str) -> None:
    """Nobody may make files there, not even who may write to the folder: root."""
    with pytest.raises(InputError, match=f"cannot write {path}: "):
        check_writable(path)


def test_a_file_that_only_its_owner_may_remove_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o1777)
    (tmp_path / "theirs").touch()
    check_writable(tmp_path / "theirs")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    check_writable(tmp_path / "new")
    with pytest.raises(InputError, match="theirs: Operation not permitted"):
        check_writable(tmp_path / "theirs")


def test_links_that_lead_nowhere_and_devices(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "later").symlink_to("new/file")
    with pytest.raises(InputError, match="loop: Too many levels of symbolic links"):
        check_writable(tmp_path / "loop")
    with pytest.raises(InputError, match="loop: Too many levels of symbolic links"):
        write_whole(tmp_path / "loop", "")
    with pytest.raises(InputError, match="Is a directory"):
        check_writable(tmp_path)
    for fine in (tmp_path / "later", "/dev/null"):
        check_writable(fine)
    write_whole("/dev/null", "text")
    assert (tmp_path / "loop").is_symlink() and (tmp_path / "later").is_symlink() and Path("/dev/null").is_char_device()


def test_an_open_file_is_written_to_where_it_is_and_not_replaced(tmp_path: Path) -> None:
    path, link = tmp_path / "log", tmp_path / "link"
    with path.open("w") as log:
        number = log.fileno()
        link.symlink_to(f"/dev/fd/{number}")
        log.write("before ")
        for name in (f"/dev/fd/{number}", link):
            assert descriptor_of(name) == number
            log.flush()
            check_writable(name)
            write_whole(name, "here ")
        log.write("after")
    assert path.read_text() == "before here here after" and link.is_symlink()
    assert descriptor_of(path) is descriptor_of(tmp_path / "17") is descriptor_of("/dev/null") is None
    assert descriptor_of("/dev/stdout") == 1
    with path.open() as log, pytest.raises(InputError, match="Bad file descriptor"):
        check_writable(f"/dev/fd/{log.fileno()}")
    with pytest.raises(InputError, match="No such file or directory"):
        check_writable(f"/dev/fd/{number}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a\0b", r"no file can have the name 'a\\x00b'"),
        ("\ud800", r"no file can have the name '\\ud800'"),
        (None, "a file is named by a str or a Path, not by a NoneType"),
        (5, "a file is named by a str or a Path, not by an int"),
        (b"a", "a file is named by a str or a Path, not by a bytes"),
    ],
)
@pytest.mark.parametrize("use", [check_writable, check_readable, read_text, lambda name: write_whole(name, "")])
def test_what_names_no_file_is_told(use: Callable[[Any], object], name: object, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}$"):
        use(name)
