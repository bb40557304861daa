"""Environment variables: read in one place, described there, and forgiving of what nobody can make out."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from te_core import env
from te_core.errors import ArgumentError
from tools.house import sources

ROOT = Path(__file__).resolve().parents[2]
#: What others read is put there, and taken back: the loader's path while the cuDNN frontend looks for its library, and
#: no multicast while torch maps memory.
WRITES = {"te_core.backends.cuda.cudnn", "te_torch.parallel.peers"}
#: The command `te` sets what NumPy reads at its first import, and is told by the Makefile how its user started it.
COMMAND = {"te_cli", "te_cli.train"}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_told", set())
    for name in (*env.VARIABLES, *env.WITHOUT_EFFECT):
        if name.startswith(("NVTE_", "TE_CORE_AUTO")):
            monkeypatch.delenv(name, raising=False)


def reads(module: str) -> Iterator[int]:
    """The lines that look into the environment."""
    text = sources()[module].read_text()
    if not re.search("environ|getenv|putenv", text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv", "getenvb", "putenv"):
            yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name.startswith(("environ", "getenv")))


def test_the_environment_is_read_in_one_place() -> None:
    found = {module for module in sources() if any(reads(module))}
    assert found == {"te_core.env"} | WRITES | COMMAND


@cache
def named() -> set[str]:
    """Every name of a variable that stands in the code as a text of its own."""
    found = set()
    for module, path in sources().items():
        text = path.read_text()
        if module == "te_core.env" or not re.search("NVTE_|TE_CORE_", text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"\b(?:NVTE|TE_CORE)_\w+", node.value))
    return found


def test_every_variable_is_described_and_read() -> None:
    patterns = {"NVTE_"}  # "(`NVTE_...`)"
    assert named() - patterns <= set(env.VARIABLES), named() - patterns - set(env.VARIABLES)
    here = (ROOT / "te_core" / "env.py").read_text()
    for name in env.VARIABLES:
        family = re.sub(r"_(FWD|BWD|INF)_", "_{short}_", name)
        assert name in named() or len(re.findall(rf'"{name}"', here)) > 1 or family in here, f"{name} is not read"
    assert not set(env.VARIABLES) & env.WITHOUT_EFFECT
    assert all(v.meaning and (isinstance(v.values, str) or v.values) for v in env.VARIABLES.values())


def said_at_import(**variables: str) -> list[str]:
    """The warnings of a fresh process that imports te_core twice, and its recipes."""
    left = {k: v for k, v in os.environ.items() if not k.upper().startswith(("NVTE", "TE_CORE"))}
    code = "import warnings; warnings.simplefilter('always'); import te_core, te_core.env, te_core.recipe"
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**left, **variables}, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    return [line for line in ran.stderr.splitlines() if "Warning" in line]


def test_a_misspelt_name_costs_one_warning() -> None:
    (said,) = said_at_import(NVTE_FLASH_ATTENTION="0", te_core_tapes="first", NVTE_NOBODY="1", NVTE_TORCH_COMPILE="1")
    assert "NVTE_FLASH_ATTENTION (did you mean NVTE_FLASH_ATTN?)" in said and "set in the environment" in said
    assert "te_core_tapes (did you mean TE_CORE_TAPES?)" in said and "NOBODY" not in said and "COMPILE" not in said
    assert said_at_import(NVTE_NOBODY="1", NVTE_FUSED_ATTN="1", TE_TESTS_OF_SOMEBODY="1") == []


# ---------------------------------------------------------------------------------------------- what is understood

SWITCHES = [name for name, v in env.VARIABLES.items() if v.values == "switch"]
NUMBERS = [name for name, v in env.VARIABLES.items() if v.values == "number"]
WORDS = [name for name, v in env.VARIABLES.items() if not isinstance(v.values, str)]
BYTES = os.fsdecode(b"\xff\xfe")


def caught(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, read: Callable[[str], object]
) -> tuple[object, list[str]]:
    """What a variable is read as, twice, and the warnings."""
    monkeypatch.setenv(name, value)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        results = {read(name), read(name)}
    assert len(results) == 1
    return results.pop(), [str(w.message) for w in found]


def test_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        default = env.VARIABLES[name].default == "1"
        assert env.switch(name) is default and env.option(name) is None
        for value, expected in (("1", True), ("0", False), ("", default)):
            assert caught(name, value, monkeypatch, env.switch) == (expected, []), name
        for value in ("yes", "2", "-1", "01", BYTES, "9" * 9999, "\n"):
            found, said = caught(name, value, monkeypatch, env.switch)
            assert found is default and len(said) == 1 and name in said[0] and said[0].isascii(), name
            assert env.option(name) is None


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    default = int(env.VARIABLES[name].default)
    assert env.number(name) == default
    assert caught(name, "17", monkeypatch, env.number) == (17, [])
    assert caught(name, "", monkeypatch, env.number) == (default, [])
    for value in ("many", "-3", "1.5", "0x10", "1e3", BYTES, "9" * 9999, "٣", " ", "1\n"):
        found, said = caught(name, value, monkeypatch, env.number)
        assert found == default and len(said) == 1 and name in said[0] and "whole number" in said[0]
        assert said[0].isascii()


@pytest.mark.parametrize("name", WORDS)
def test_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not allowed is for its taker to refuse; one that is no text is none."""
    monkeypatch.delenv(name, raising=False)  # the suite sets some
    variable = env.VARIABLES[name]
    assert env.word(name) == variable.default
    for word in variable.values:
        assert caught(name, word, monkeypatch, env.word) == (word, []) and env.chosen(name) == word
    assert caught(name, "anything", monkeypatch, env.word) == ("anything", [])
    with pytest.raises(ArgumentError, match=f"^{name}: got 'anything'. Allowed: {variable.values[0]} or"):
        env.chosen(name)
    found, said = caught(name, BYTES, monkeypatch, env.word)
    assert found == variable.default and len(said) == 1 and said[0].isascii()


def test_margins_of_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.norm_sm_margins() == {}
    monkeypatch.setenv("NVTE_FWD_LAYERNORM_SM_MARGIN", "3")
    monkeypatch.setenv("NVTE_BWD_LAYERNORM_SM_MARGIN", "0")
    monkeypatch.setenv("NVTE_INF_LAYERNORM_SM_MARGIN", "several")
    with pytest.warns(UserWarning, match="NVTE_INF_LAYERNORM_SM_MARGIN=several"):
        assert env.norm_sm_margins() == {"forward": 3, "backward": 0}


def starts_with_nonsense(code: str) -> str:
    """What a fresh process says in which everything is nonsense."""
    nonsense = {name: b"\xff\xfenonsense" for name in (*SWITCHES, *NUMBERS, *WORDS)}
    given = {os.fsencode(k): os.fsencode(v) for k, v in os.environ.items() if not k.startswith("NVTE_")}
    given |= {os.fsencode(k): v for k, v in nonsense.items()}
    ran = subprocess.run([sys.executable, "-c", code], env=given, cwd=ROOT, capture_output=True, timeout=240)
    said = ran.stderr.decode()
    assert ran.returncode == 0, said
    return said


def warnings_of(said: str, name: str) -> int:
    return len(re.findall(rf"Warning: {name}=", said))


def test_the_core_starts_whatever_is_set() -> None:
    """One warning each, and it computes."""
    code = (
        "import warnings; warnings.simplefilter('always')\n"
        "from te_core.recipe import Float8BlockScaling\n"
        "from te_core.runtime import Runtime\n"
        "rt = Runtime.cpu()\n"
        "assert rt.numpy(rt.tensor([1.0, 2.0], 'float32')).tolist() == [1.0, 2.0]\n"
        "assert Float8BlockScaling().use_f32_scales is False\n"
    )
    said = starts_with_nonsense(code)
    assert warnings_of(said, "NVTE_NVFP4_4OVER6") == 1, said


@pytest.mark.more  # imports torch
def test_a_program_starts_whatever_is_set() -> None:
    """One warning each, and it computes."""
    code = (
        "import warnings; warnings.simplefilter('always')\n"
        "import te_torch as te, torch\n"
        "from te_core.recipe import Float8BlockScaling\n"
        "m = te.TransformerLayer(32, 64, 2, device='cpu')\n"
        "for _ in range(2): m(torch.randn(4, 2, 32), None)\n"
        "te.GroupedLinear(2, 32, 32, device='cpu')\n"
        "assert Float8BlockScaling().use_f32_scales is False\n"
    )
    said = starts_with_nonsense(code)
    for name in ("NVTE_FLASH_ATTN", "NVTE_NVFP4_4OVER6", "NVTE_FWD_LAYERNORM_SM_MARGIN", "NVTE_DEBUG_LEVEL"):
        assert warnings_of(said, name) == 1, said


# ---------------------------------------------------------------------------------------------- the doctor


def doctor(*arguments: str, **variables: str) -> str:
    given = {k: v for k, v in os.environ.items() if not k.startswith(("NVTE_", "TE_CORE_", "XDG_"))}
    ran = subprocess.run(
        [sys.executable, "-m", "te_core.doctor", *arguments],
        env={**given, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_the_doctor_shows_what_is_set() -> None:
    said = doctor(
        NVTE_FUSED_ATTN="0",
        NVTE_FLASH_ATTN="yes",
        NVTE_DPA_FP8_RECIPE="FP7",
        NVTE_TORCH_COMPILE="1",
        NVTE_FUSED_ATN="1",
        NVTE_NOBODY="1",
        nvte_fused_attn="1",
        TE_CORE_CACHE_DIR="/tmp/a" + BYTES,
    )
    lines = {line.split("=")[0].strip(): line for line in said.splitlines() if "=" in line}
    assert "no FusedAttention backend" in lines["NVTE_FUSED_ATTN"] and "NOT" not in lines["NVTE_FUSED_ATTN"]
    assert "NOT understood: 0 or 1" in lines["NVTE_FLASH_ATTN"]
    assert "NOT understood: F16 or DelayedScaling" in lines["NVTE_DPA_FP8_RECIPE"]
    assert "documented, without effect here" in lines["NVTE_TORCH_COMPILE"]
    assert "NOT known: NVTE_FUSED_ATTN is" in lines["nvte_fused_attn"]
    assert "NOT known: NVTE_FUSED_ATTN is" in lines["NVTE_FUSED_ATN"] and "NOT known" in lines["NVTE_NOBODY"]
    assert r"/tmp/a\udcff\udcfe" in lines["TE_CORE_CACHE_DIR"]
    assert "NVTE_UNFUSED_ATTN" not in said
    nothing = doctor()
    assert "no variable of ours is set" in nothing
    assert "replays: calls of layers are recorded when their shapes are met again;" in nothing


def test_the_doctor_lists_all() -> None:
    said = doctor("--variables")
    for name, variable in env.VARIABLES.items():
        assert re.search(rf"^  {name} +\S.*; {re.escape(variable.allowed)}$", said, re.MULTILINE), name
    assert "cuDNN is called" not in said and len(said.splitlines()) == len(env.VARIABLES)
