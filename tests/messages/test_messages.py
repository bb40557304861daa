"""What wrong calls say: each row of tests/messages/*.py has the text that tests/messages.txt has.

How to add a row, in a file of its area (core.py, or core_gemm.py with a `ROWS` of its own): by
`ROWS.add(te.Linear, 32, 48, parallel_mode="both")` one that is named as its call; by `ROWS.each(te.Linear, 32, 48,
tp_size=(0, -1), bias=("no",))` one for a value; by `ROWS["backward twice"] = lambda: ...` one with a name and a
function that makes what the call needs. Then run `make docs`, and read the diff of tests/messages.txt: that is the
test. A row raises, or only warns; it needs no file, no GPU and no other row, and says the same on every machine
(`stable` in rows.py takes out addresses and paths). State after an error is for a test. Rows of `ON_RANKS: Rows` in
parallel.py are functions of a rank (tests/parallel/ranks.py), where every rank raises.
"""

from __future__ import annotations

import pytest

from tests.messages import rows


@pytest.mark.parametrize("area", rows.AREAS)
def test_messages(area: str) -> None:
    pytest.importorskip(rows.AREAS[area])
    made, golden = rows.made(area), rows.golden(area)
    new, gone = [row for row in made if row not in golden], [row for row in golden if row not in made]
    assert not new and not gone, "\n".join(["now (`make docs` writes it):\n", *new, "tests/messages.txt:\n", *gone])
    assert not [row for row in made if row.endswith("\n    nothing\n")], "these raise nothing"


def test_a_row_by_its_name() -> None:
    """And what is taken out of its text."""
    table = rows.Rows()
    table.each(int, base=(1, 99))
    table.add(float, "x", [("y",)])
    assert list(table) == ["int(base=1)", "int(base=99)", "float('x', [('y',)])"]
    with pytest.raises(ValueError, match="two rows"):
        table.add(int, base=1)
    assert rows.said(lambda: float("x")) == "ValueError: could not convert string to float: 'x'"
    assert rows.said(lambda: 1) == "nothing"
    text = f"<object at 0x7f3a12345678> in {rows.ROOT}/te_core/env.py of torch 2.9.1+cu128, 0x10"
    assert rows.stable(text) == "<object at 0xADDRESS> in ./te_core/env.py of torch VERSION, 0x10"
