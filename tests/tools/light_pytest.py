"""The process of tools/warm_pytest.py without torch, which a small suite does not import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.warm_pytest import Warm

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = ("numpy", "ml_dtypes", "pytest", "hypothesis", "_pytest.junitxml")


class Light(Warm):
    """Runs of pytest in small trees, each in a fork of one process; `also`: what each of these runs imports."""

    def __init__(self, env: dict[str, str] | None = None, also: tuple[str, ...] = ()) -> None:
        serve = f"from tools import warm_pytest; warm_pytest.IMPORTED = {IMPORTED + also!r}; warm_pytest._serve()"
        given = {**(os.environ if env is None else env)}
        given["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [given.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-c", serve], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=given
        )
