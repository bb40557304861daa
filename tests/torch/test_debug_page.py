"""The page of a report in a browser: its program runs without an error and draws; a picture of it is kept."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from te_core.layers.inspector import POINTS
from te_torch.debug import inspect
from te_torch.debug.inspection import ORDER
from te_torch.debug.ledger import Kind
from te_torch.debug.page import BINS, page
from te_torch.debug.report import FIGURES, Report, Series
from tests.torch import planted
from tools import browser

#: Where pictures are kept, to be looked at.
PICTURES = Path(__file__).resolve().parents[2] / "build" / "debug"


def large(layers: int = 200, steps: int = 1000) -> Report:
    """As of a long training of a large model: one layer overflows from the middle on."""
    rng = np.random.default_rng(0)
    series = []
    for layer in range(layers):
        for tensor, gemms in (
            ("activation", ("fprop", "wgrad")), ("weight", ("fprop", "dgrad")), ("gradient", ("dgrad", "wgrad")),
            ("output", ("fprop",)), ("dgrad", ("dgrad",)), ("wgrad", ("wgrad",)),
        ):  # fmt: skip
            quantized = len(gemms) > 1
            kind = Kind("float8_e4m3", "float8_e4m3 per tensor", 448.0) if quantized else None
            amax = np.exp2(rng.normal(0, 0.2, steps).cumsum() * 0.1 + rng.uniform(-6, 4))
            no = np.full(steps, np.nan)
            found: dict[str, Any] = {"count": np.full(steps, 1e6), "amax": amax, "nonfinite": np.zeros(steps)}
            found |= {"underflow": rng.uniform(0, 0.5, steps), "overflow": np.zeros(steps)}
            found |= {"snr": rng.normal(31.5, 0.1, steps), "scale": 448 / amax}
            if layer == 137 and tensor == "activation":
                found["snr"][steps // 2 :] -= 20
                found["overflow"][steps // 2 :] = 3
                found["scale"][steps // 2 :] *= 4
            if not quantized:
                found |= dict.fromkeys(("underflow", "overflow", "snr", "scale"), no)
            part = ("self_attention.qkv", "self_attention.proj", "mlp.fc1", "mlp.fc2")[layer % 4]
            name = f"decoder.layers.{layer // 4}.{part}"
            series.append(Series(name, gemms, tensor, kind, order=len(series), **{n: found[n] for n in FIGURES}))
    return Report(list(range(steps)), series, ["decoder.head"])


@pytest.mark.more
def test_a_large_report_is_light() -> None:
    report = large()
    assert (
        report.worst is not None
        and report.worst.name == "decoder.layers.34.self_attention.proj activation (fprop, wgrad)"
    )
    text = page(report, "large")
    assert len(text) < 6e6
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "") and "https://" not in text
    assert str(report).count("\n") < 30


def wide(layers: int = 32, steps: int = 500) -> Report:
    """Of Transformer layers in a block format: a row for each GEMM that reads a tensor, attention; figures that do not
    compress."""
    rng = np.random.default_rng(1)
    kind = Kind("float8_e4m3", "float8_e4m3 1x128", 448.0)
    places = [(gemm, tensor) for gemm, tensor in ORDER if (gemm, tensor) in POINTS]
    parts = ("self_attention.layernorm_linear_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2")
    rows = [(part, *place) for part in parts for place in places]
    rows += [("self_attention.core_attention", "fprop", t) for t in "qkv"]
    rows += [("self_attention.core_attention", "dgrad", "do")]
    series = []
    for layer in range(layers):
        for part, gemm, tensor in rows:
            found = {name: np.exp2(rng.uniform(-20, 20, steps)) for name in FIGURES}
            found["nonfinite"] = np.zeros(steps)
            series.append(Series(f"decoder.layers.{layer}.{part}", (gemm,), tensor, kind, order=len(series), **found))
    return Report(list(range(steps)), series, [])


@pytest.mark.more
def test_a_page_of_many_layers_opens() -> None:
    report = wide()
    assert len(report.series) == 32 * 40
    text = page(report, "32 layers, 500 steps")
    assert 1e6 < len(text.encode()) <= 10e6


NAMES = (
    "<img src=x onerror=alert(1)>",
    "\"'><b>",
    "&amp;",
    "{0}{title}",
    "</script><!--",
    "</pre>",
    "a\u2028b",
    "${x}`",
)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_text(name: str) -> None:
    """Of a layer, of one that was not seen, in the title: what a page has is the name, and no element more."""
    report = large(1, 2)
    plain = tags(page(Report(report.steps, [s._replace(layer="x") for s in report.series], ["x"]), "x"))
    text = page(Report(report.steps, [s._replace(layer=name) for s in report.series], [name]), name)
    assert tags(text) == plain
    facts = json.loads(re.search(r'id="facts">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert {s["layer"] for s in facts["series"]} == set(facts["unseen"]) == {name}
    assert f"<title>{html.escape(name)}</title>" in text


def tags(text: str) -> list[tuple[str, list[Any]]]:
    """Every element of a page, with its attributes, as a browser parses it."""
    found: list[tuple[str, list[Any]]] = []

    class Elements(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[Any]) -> None:
            found.append((tag, attrs))

        def handle_comment(self, data: str) -> None:
            found.append(("comment", [data]))

    Elements().feed(text)
    return found


def test_no_text_ends_the_script() -> None:
    report = large(1, 2)
    named = Report(report.steps, [s._replace(layer="</script><b>") for s in report.series], ["<!--"])
    text = page(named, "</title>")
    assert text.count("</script>") == 3 and "<b>" not in text and "<!--" not in text and text.count("</title>") == 1


def opened(path: Path, name: str) -> str:
    shown = browser.show(path, PICTURES / f"{name}.png")
    assert not shown.console, shown.console
    assert 'data-drawn="yes"' in shown.dom
    return shown.dom


@pytest.mark.more
@pytest.mark.skipif(browser.find() is None, reason="needs a browser: python tools/browser.py")
def test_the_page_draws(tmp_path: Path) -> None:
    net, step = planted.model(blocks=6), planted.step_of("delayed")
    net[3].down.inspector = planted.overflowing()
    with inspect(net) as seen:
        for _ in range(12):
            step(net)
            net.zero_grad()
            seen.step()
    dom = opened(seen.to_html(tmp_path / "page.html", "A planted fault"), "page")
    assert len(re.findall(r"<canvas[^>]* width=\"12\" height=\"12\"", dom)) == 1
    assert dom.count('class="chart"') == 5 and len(re.findall(r'<path class="curve" stroke="[^"]*" d="M', dom)) > 20
    assert re.search(r'class="name chosen"[^>]*title="3.down"', dom)
    assert "beyond what its scale can hold" in dom


@pytest.mark.more
@pytest.mark.skipif(browser.find() is None, reason="needs a browser: python tools/browser.py")
def test_a_large_page_draws(tmp_path: Path) -> None:
    path = tmp_path / "large.html"
    path.write_text(page(large(), "200 layers over 1000 steps"))
    dom = opened(path, "large")
    assert f'width="{BINS}" height="200"' in dom and "1200" in dom


@pytest.mark.more
@pytest.mark.skipif(browser.find() is None, reason="needs a browser: python tools/browser.py")
def test_a_page_draws_names_as_text(tmp_path: Path) -> None:
    name = "<img src=x onerror=console.error(1)><b>"
    report = large(1, 4)
    path = tmp_path / "names.html"
    path.write_text(page(Report(report.steps, [s._replace(layer=name) for s in report.series], [name]), name))
    dom = opened(path, "names")
    assert "<img" not in dom and "<b>" not in dom and html.escape(name, quote=False) in dom


@pytest.mark.more
@pytest.mark.skipif(browser.find() is None, reason="needs a browser: python tools/browser.py")
@pytest.mark.parametrize("width", [1300, 1000])
def test_the_table_shows_its_last_column(width: int, tmp_path: Path) -> None:
    """Long names of layers take further lines, not the place of the reasons."""
    report = large(140, 16)
    long = [s._replace(layer=f"model.wrapped_by_a_trainer.{s.layer}.with_a_long_name") for s in report.series]
    report = Report(report.steps, long, [])
    measure = "const s = document.querySelector('.scroll'); document.title = `cut: ${s.scrollWidth - s.clientWidth}`"
    script = f"<script>setTimeout(() => {{ {measure} }}, 500)</script>"
    path = tmp_path / "wide.html"
    path.write_text(page(report, "Wide").replace("</body>", f"{script}</body>"))
    shown = browser.show(path, PICTURES / f"wide-{width}.png", (width, 2600))
    assert re.findall("cut: [0-9]+", shown.dom)[0] == "cut: 0"
