"""Stored cuDNN plans: which of them are run, and by whose word."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from te_core import env
from te_core.backends.cuda import attention_graph, cudnn
from tests.core.test_cudnn_plans import again


@pytest.mark.parametrize("file", [attention_graph, cudnn], ids=["makes the graph", "keeps it"])
def test_a_stored_plan_is_of_our_sources_of_now(fake, monkeypatch, tmp_path, file):
    """One that an older te_core described otherwise is not run under a newer one: it is built anew."""
    rt, _ = fake
    monkeypatch.setenv("TE_CORE_CACHE_DIR", str(tmp_path / "cache"))
    changed = tmp_path / "changed.py"
    changed.write_bytes(Path(file.__file__).read_bytes() + b"\n# another way to describe it\n")
    assert again(rt) == (1, 0) and again(rt) == (1, 1)
    with monkeypatch.context() as newer:
        newer.setattr(file, "__file__", str(changed))
        assert again(rt) == (2, 1) and again(rt) == (2, 2)
    assert again(rt) == (2, 3)
    assert len(list((tmp_path / "cache" / "attention").iterdir())) == 2


@pytest.mark.parametrize("trouble", ["others may write to it", "a pipe"])
def test_plans_are_built_where_the_folder_cannot_be_trusted(fake, monkeypatch, tmp_path, trouble):
    rt, _ = fake
    assert again(rt) == (1, 0)
    (place,) = (tmp_path / "attention").iterdir()
    monkeypatch.setattr(env, "_told", set())
    if trouble == "a pipe":
        place.unlink()
        os.mkfifo(place, 0o600)
    else:
        place.parent.chmod(0o777)
    with pytest.warns(UserWarning, match="is ignored") as found:
        assert again(rt) == (2, 0)
    assert len(found) == 1
    assert again(rt) == ((3, 0) if trouble != "a pipe" else (2, 1))  # a file took the pipe's place
