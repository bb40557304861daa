"""The cache folder is ours alone, and nothing that stands in it stops or stalls a program."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from te_core import cache, env
from te_core.backends.cuda import gemm_tune
from te_core.kernels import compiler

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache folder, not there yet; what was warned of is forgotten, and masks are as loose as they come."""
    monkeypatch.setenv("TE_CORE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(env, "_told", set())
    before = os.umask(0)
    yield tmp_path / "cache"
    os.umask(before)


def warned(run: Callable[[], object]) -> list[str]:
    """The warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_are_their_owners_alone(folder: Path) -> None:
    place = cache.place("kernels", "a.bin")
    assert cache.read(place) is None and cache.write(place, b"one") and cache.read(place) == b"one"
    assert mode(folder) == mode(folder / "kernels") == 0o700 and mode(place) == 0o600
    assert cache.write(place, b"two") and cache.read(place) == b"two"
    assert [p.name for p in place.parent.iterdir()] == ["a.bin"]


@pytest.mark.parametrize("loose", ["the cache", "below it"])
@pytest.mark.parametrize("bits", [0o777, 0o770, 0o1777, 0o702])
def test_a_folder_that_others_may_write_to_is_ignored(folder: Path, loose: str, bits: int) -> None:
    """With one warning, which says how to mend it; nothing is read and nothing written."""
    place = cache.place("kernels", "a.bin")
    cache.write(place, b"one")
    at = folder if loose == "the cache" else place.parent
    at.chmod(bits)

    def use() -> None:
        assert cache.read(place) is None
        assert not cache.write(place, b"two") and not cache.write(cache.place("kernels", "b.bin"), b"two")

    said = warned(use)
    assert len(said) == 1 and str(at) in said[0] and "others may write" in said[0] and "chmod" in said[0]
    assert not warned(use) and str(at) in cache.fault(place.parent)
    at.chmod(0o755)  # who reads what is ours does no harm
    assert cache.read(place) == b"one" and not cache.fault(place.parent)


def test_a_folder_of_somebody_else_is_ignored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = cache.place("a.bin")
    cache.write(place, b"one")
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1000)
    if me == 0:  # what root put there may be trusted, so it is given away
        os.chown(folder, 4242, -1)
    said = warned(lambda: (cache.read(place), cache.write(place, b"two")))
    assert len(said) == 1 and f"the user {4242 if me == 0 else me} owns it" in said[0]
    monkeypatch.undo()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_a_file_of_somebody_else_is_ignored(folder: Path) -> None:
    place = cache.place("a.bin")
    cache.write(place, b"one")
    os.chown(place, 4242, -1)
    assert len(warned(lambda: cache.read(place))) == 1 and cache.read(place) is None


def test_a_file_that_others_may_write_to_is_ignored(folder: Path) -> None:
    place = cache.place("a.bin")
    cache.write(place, b"one")
    place.chmod(0o666)
    said = warned(lambda: cache.read(place))
    assert len(said) == 1 and str(place) in said[0] and cache.read(place) is None
    assert cache.write(place, b"two") and cache.read(place) == b"two" and mode(place) == 0o600


def fifo(path: Path) -> None:
    os.mkfifo(path, 0o600)


def deep(path: Path) -> None:
    (path / "more").mkdir(parents=True, mode=0o700)
    path.chmod(0o700)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def nothing(path: Path) -> None:
    path.symlink_to(path.parent / "not there")


STRANGE = {"a FIFO": fifo, "a folder": deep, "a device": device, "a link to nothing": nothing}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_file_neither_hangs_nor_stops(folder: Path, kind: str) -> None:
    place = cache.place("kernels", "a.bin")
    cache.write(cache.place("kernels", "other"), b"")
    STRANGE[kind](place)
    result: list[object] = []

    def use() -> None:
        result.append((cache.read(place), compiler.read_cache(place), cache.read_json(place, lambda _: True)))

    thread = threading.Thread(target=use, daemon=True)
    said = warned(lambda: (thread.start(), thread.join(20)))
    assert not thread.is_alive(), "it waits for a writer"
    assert result == [(None, None, None)]
    assert len(said) == (kind != "a link to nothing") and (not said or str(place) in said[0])
    compiler.write_cache(place, b"image")  # replaced, but for a folder
    assert compiler.read_cache(place) == (None if kind == "a folder" else b"image")
    assert sorted(p.name for p in place.parent.iterdir()) == ["a.bin", "other"]


def test_nothing_raises_where_nothing_can_be(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for where in (str(tmp_path / "file" / "below"), "/proc/no/such", "a\udcff", "x" * 5000, "\n"):
        monkeypatch.setenv("TE_CORE_CACHE_DIR", where if where.startswith("/") else str(tmp_path / where))
        place = cache.place("kernels", "a.bin")
        written = cache.write(place, b"one")
        assert cache.read(place) == (b"one" if written else None)


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers: a folder of the user's own where temporary files are."""
    for name in ("TE_CORE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert env.cache_dir().name == f"te-runtime-{os.getuid()}"


# ------------------------------------------------------------------------------------------------------- JSON


DAMAGED = {
    "cut": b'{"a": {"alg',
    "empty": b"",
    "no text": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
    "deep objects": b'{"a":' * 50_000,
    "a number": b"3",
    "a list": b"[]",
    "null": b"null",
    "another entry": b'{"a": 3}',
    "no algorithm": b'{"a": {"ms": 3}}',
    "a short algorithm": b'{"a": {"algorithm": "abcd"}}',
    "no hexadecimal": json.dumps({"a": {"algorithm": "x" * 128}}).encode(),
    "a huge number": b'{"a": ' + b"9" * 10_000 + b"}",
}


def test_damaged_choices_of_gemms_cost_one_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for damage, data in DAMAGED.items():
        monkeypatch.setattr(gemm_tune, "_store", None)
        monkeypatch.setattr(env, "_told", set())
        cache.write(gemm_tune.store_path(), data)
        said = warned(lambda: (gemm_tune._read_store(), gemm_tune._read_store(), gemm_tune._stored()))
        assert len(said) == 1 and "gemm.json" in said[0], damage
        assert gemm_tune._stored() == {}, damage
        whole = {"a": {"algorithm": "0a" * 64, "ms": 1.0, "heuristic_ms": 2.0}}
        cache.write(gemm_tune.store_path(), json.dumps(whole).encode())
        assert gemm_tune._read_store() == whole, damage


def test_a_choice_that_cannot_be_kept_is_no_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only home, in the middle of a GEMM."""
    folder.write_text("")
    monkeypatch.setattr(gemm_tune, "_store", None)
    gemm_tune._remember("a GEMM", {"algorithm": "07" * 64, "ms": 1.0})
    assert gemm_tune._stored()["a GEMM"]["algorithm"] == "07" * 64


def test_the_doctor_says_that_a_cache_is_ignored(folder: Path) -> None:
    folder.mkdir(mode=0o777)
    ran = subprocess.run(
        [sys.executable, "-m", "te_core.doctor"], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert f"cache: {folder} (IGNORED: {folder}: others may write to it (mode 777))" in ran.stdout
