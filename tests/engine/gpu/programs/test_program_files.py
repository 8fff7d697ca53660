"""A folder of programs: whole files or none, of this user alone, no more than the limit."""

import os

import pytest

from clipline.engine.gpu.programs.program_files import ProgramCacheWarning, ProgramFiles, cache_folder

posix = pytest.mark.skipif(os.name != "posix", reason="needs owners and modes of files")


@pytest.fixture
def files(tmp_path):
    return ProgramFiles(tmp_path / "cache" / "programs")


@posix
def test_what_is_written_can_be_read_by_its_owner_alone(files):
    assert files.read("a") is None
    files.write("a", b"code")
    assert files.read("a") == b"code"
    assert files.read("b") is None
    assert files.folder.stat().st_mode & 0o777 == 0o700
    (path,) = files.folder.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_where_programs_are_stored(monkeypatch, tmp_path):
    monkeypatch.setenv("CLIPLINE_CACHE_DIR", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own" / "programs"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLIPLINE_CACHE_DIR", "~/own")
    assert cache_folder() == tmp_path / "own" / "programs"
    monkeypatch.delenv("CLIPLINE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "clipline" / "programs"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the standard
    assert cache_folder() == tmp_path / ".cache" / "clipline" / "programs"

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.home", homeless)
    assert cache_folder() is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"!"),
        lambda path: path.write_bytes(b""),
        lambda path: path.rename(path.with_name("b.program")),
    ],
)
def test_a_damaged_or_renamed_file_is_deleted_with_a_sentence_and_can_be_written_again(files, spoil):
    files.write("a", b"code")
    spoil(files.folder / "a.program")
    name = "a" if (files.folder / "a.program").exists() else "b"
    with pytest.warns(ProgramCacheWarning, match=f"'.*{name}.program' is damaged: it was deleted and is compiled anew"):
        assert files.read(name) is None
    assert not list(files.folder.iterdir())
    files.write(name, b"code")
    assert files.read(name) == b"code"


def writable_folder(files):
    files.folder.chmod(0o777)


def writable_file(files):
    (files.folder / "a.program").chmod(0o620)


def link_to_a_file(files):
    path = files.folder / "a.program"
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def link_to_a_folder(files):
    elsewhere = files.folder.with_name("elsewhere")
    files.folder.rename(elsewhere)
    files.folder.symlink_to(elsewhere)


def open_folder_above(files):
    files.folder.parent.chmod(0o777)


@posix
@pytest.mark.parametrize(
    "opened", [writable_folder, writable_file, link_to_a_file, link_to_a_folder, open_folder_above]
)
def test_what_others_could_have_written_is_not_run(files, opened):
    files.write("a", b"code")
    opened(files)
    with pytest.warns(ProgramCacheWarning, match="programs are not stored .*CLIPLINE_CACHE_DIR"):
        assert files.read("a") is None
    assert files.read("a") is None  # without another warning
    files.write("b", b"code")
    assert not list(files.folder.glob("b*"))


@posix
def test_a_folder_of_another_user_is_not_used(files, monkeypatch):
    files.write("a", b"code")
    monkeypatch.setattr(os, "getuid", lambda: files.folder.stat().st_uid + 1)
    with pytest.warns(ProgramCacheWarning, match="belongs to another user"):
        assert files.read("a") is None


def test_where_nothing_can_be_written_training_goes_on(tmp_path):
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    files = ProgramFiles(tmp_path / "file" / "programs")
    with pytest.warns(ProgramCacheWarning, match="not stored"):
        files.write("a", b"code")
    assert files.read("a") is None


def test_beyond_the_limit_the_files_that_were_not_used_for_longest_go(tmp_path):
    files = ProgramFiles(tmp_path / "programs", limit=700)
    for age, name in ((30, "a"), (20, "b"), (10, "c")):
        files.write(name, bytes(150))  # about 200 with mark and checksum
        past = files.folder.joinpath(f"{name}.program").stat().st_mtime - age
        os.utime(files.folder / f"{name}.program", (past, past))
    unfinished = ".unfinished-program-1"
    (files.folder / unfinished).write_bytes(bytes(900))  # another process is writing it
    assert files.read("a") is not None  # which makes it the newest
    files.write("d", bytes(150))
    assert {path.name for path in files.folder.iterdir()} == {"a.program", "c.program", "d.program", unfinished}
    os.utime(files.folder / unfinished, (0, 0))
    files.write("e", bytes(10_000))  # itself beyond the limit, and the newest
    assert {path.name for path in files.folder.iterdir()} == {"e.program"}


def test_files_that_are_not_ours_are_left_alone(tmp_path):
    """As where CLIPLINE_CACHE_DIR is a folder in which somebody keeps programs of another kind."""
    files = ProgramFiles(tmp_path / "programs", limit=100)
    files.folder.mkdir(mode=0o700)
    for name in ("mine.py", ".gitignore"):
        (files.folder / name).write_bytes(bytes(900))
        os.utime(files.folder / name, (0, 0))
    files.write("a", bytes(150))
    files.write("b", bytes(150))
    assert {path.name for path in files.folder.iterdir()} == {"mine.py", ".gitignore", "b.program"}
