"""Where te_core's library in C is found, and what is said where it is not."""

from __future__ import annotations

import pytest

from te_core import c_library
from te_core.errors import LibraryError
from tests.core.c_library import built
from tools.wheels import LIBRARY


def test_named_library_is_loaded_once(monkeypatch):
    monkeypatch.setenv("TE_CORE_LIBRARY", str(built() / "libte_core.so"))
    found = c_library.library("te_error", "te_program_run")
    assert found is c_library.library()
    assert found.te_synchronize(None, None) != 0  # a runtime is asked for


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TE_CORE_LIBRARY", str(built() / "libstub.so"))
    with pytest.raises(LibraryError, match=r"libstub\.so without te_error.*make -C bindings/c"):
        c_library.library("te_error")
    monkeypatch.setenv("TE_CORE_LIBRARY", str(tmp_path / "away.so"))  # the tree's own is not taken in its place
    with pytest.raises(LibraryError, match=r"away\.so"):
        c_library.library()
    (tmp_path / "away.so").write_text("no library")
    with pytest.raises(LibraryError, match="load te_core's library in C"):
        c_library.library()


def test_wheel_comes_before_the_tree(monkeypatch, tmp_path):
    monkeypatch.delenv("TE_CORE_LIBRARY", raising=False)
    monkeypatch.setattr(c_library, "_HERE", tmp_path / "te_core")
    assert c_library.found() is None
    with pytest.raises(LibraryError, match="none"):
        c_library.library()
    places = [tmp_path / "bindings/c/build/libte_core.so", tmp_path / LIBRARY]
    for place in places:
        place.parent.mkdir(parents=True)
        place.touch()
        assert c_library.found() == place
