"""The short examples learn; the server writes what each text would be alone; weights of a Llama come and go by Hugging
Face's names."""

from __future__ import annotations

import ast
import asyncio
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import te_torch as te
from examples import curve, encoder_decoder, llama, lora, moe, serve, vit
from examples.generate import generate_uncached
from examples.llama import Llama, LlamaConfig
from examples.loop import learn
from te_cli.arguments import UserError
from te_cli.gpt import GPT
from te_cli.settings import GPTConfig

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = [path for path in sorted(EXAMPLES.glob("*.py")) if "__main__" in path.read_text()]

#: Example -> what is smaller than on a CPU, the steps, and the share of the first loss that may be left.
SHORT: dict[Any, tuple[dict[str, int], int, float]] = {
    moe: ({"layers": 1, "width": 32, "inner": 32, "batch": 4}, 20, 0.8),
    vit: ({"layers": 1, "width": 32, "heads": 2, "batch": 32}, 30, 0.75),
    encoder_decoder: ({"width": 32, "heads": 2, "batch": 32, "longest": 4}, 30, 0.85),
    lora: ({}, 12, 0.9),
}


@pytest.mark.parametrize("example", SHORT, ids=lambda example: example.__name__.split(".")[-1])
def test_short_examples_learn(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (smaller, steps, left), name = SHORT[example], example.__name__.split(".")[-1]
    monkeypatch.setitem(example.SIZES, "cpu", SimpleNamespace(**vars(example.SIZES["cpu"]) | smaller))
    losses = example.main(["--steps", str(steps), "--device", "cpu", "--out", str(tmp_path)])
    assert len(losses) == steps and sum(losses[-4:]) / 4 < left * losses[0], losses
    said = capsys.readouterr()
    assert f"{steps}/{steps}  loss {losses[-1]:.4f}" in said.err and said.out.strip()
    assert (tmp_path / f"{name}.png").read_bytes()[1:4] == b"PNG"
    assert (EXAMPLES / f"{name}.py").read_text().count("\n") <= 120


@pytest.mark.parametrize("path", [p for p in PROGRAMS if p.name != "curve.py"], ids=lambda path: path.stem)
def test_each_example_says_what_how_long_and_on_what(path: Path) -> None:
    said = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert re.search(r"\b(seconds?|minutes?|\d+ s)\b", said) and re.search(r"\b(CPU|GPU|cores?)\b", said), said


def test_a_folder_that_cannot_be_written_is_told_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SystemExit) as ended:
        learn("moe", 3, lambda number: pytest.fail("a step was made"), tmp_path / "file")
    assert ended.value.code == 2 and "moe.py: error: --out" in capsys.readouterr().err


def test_lines_of_losses_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What bindings/c/examples/train.c prints."""
    monkeypatch.setattr("sys.stdin", io.StringIO("step 0 loss 1.5\nsome words\nstep 1 loss 2.5e-1\n"))
    assert curve.main([str(tmp_path / "c.png")]) == 0 and (tmp_path / "c.png").exists()
    assert "some words\n" in (said := capsys.readouterr().out) and "2 losses, 1.5000 to 0.2500" in said
    monkeypatch.setattr("sys.stdin", io.StringIO("no losses\n"))
    assert curve.main([str(tmp_path / "none.png")]) == 1 and not (tmp_path / "none.png").exists()


# ------------------------------------------------------------------------------------------- the server


def small_model() -> GPT:
    torch.manual_seed(3)
    model = GPT(GPTConfig(layers=1, hidden=32, heads=2), torch.device("cpu")).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=0.3)
    return model


def test_each_client_gets_its_own_text() -> None:
    """More clients than rows, prompts of different lengths; one client leaves early, one asks for too much."""
    model = small_model()
    prompts = [b"a", b"some words", b"and", b"many more words", b"x"]

    async def ask() -> list[list[int]]:
        server = serve.Server(model, 2, 32)
        loop = asyncio.create_task(server.run())
        begun = [asyncio.Event() for _ in prompts]

        async def client(number: int) -> list[int]:
            if number > 1:  # it comes in the midst of another one's text
                await begun[number - 2].wait()
            text = []
            async for byte in server.ask(prompts[number], 6):
                text.append(byte)
                begun[number].set()
            return text

        async def leaves() -> None:
            texts = server.ask(b"gone", 28)
            await anext(texts)
            await texts.aclose()

        with pytest.raises(UserError, match="a prompt of 1 to 12 bytes fits"):
            await anext(server.ask(b"x" * 13, 20))
        *texts, _ = await asyncio.gather(*map(client, range(len(prompts))), leaves())
        assert max(server.rows) == 2 and not server.waiting
        assert len(server.rows) < 6 * 3 + 5  # not the 28 steps of who left
        loop.cancel()
        return texts

    written = asyncio.run(ask())
    for prompt, text in zip(prompts, written, strict=True):
        assert list(prompt) + text == generate_uncached(model, list(prompt), 6)


def test_the_server_as_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "load", lambda path, place: small_model())
    monkeypatch.setitem(serve.SIZES, "cpu", (3, 2, 8))
    rows = serve.main(["--device", "cpu", "--out", str(tmp_path)])
    assert 1 <= max(rows) <= 2 and "the first byte after" in capsys.readouterr().out
    monkeypatch.setattr(serve.Batch, "step", lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        serve.main(["--device", "cpu", "--out", str(tmp_path)])


# ------------------------------------------------------------------------------------------- weights of Hugging Face

LONG = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG |= {"original_max_position_embeddings": 32, "rope_theta": 5000.0}
CONFIGS = {
    "plain": LlamaConfig(48, 2, 32, 64, 4, 2),
    "tied": LlamaConfig(48, 1, 32, 64, 4, 4, 1e-6, True, tuple(sorted(LONG.items()))),
}


def weights_of(c: LlamaConfig) -> dict[str, torch.Tensor]:
    """A LlamaForCausalLM's, drawn at random."""
    torch.manual_seed(0)
    head = c.hidden // c.heads
    sizes = {"model.embed_tokens": (c.vocabulary, c.hidden), "model.norm": (c.hidden,)}
    sizes |= {} if c.tied else {"lm_head": (c.vocabulary, c.hidden)}
    for i in range(c.layers):
        layer = {"self_attn.q_proj": (c.hidden, c.hidden), "self_attn.o_proj": (c.hidden, c.hidden)}
        layer |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (c.groups * head, c.hidden))
        layer |= dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (c.ffn, c.hidden))
        layer |= {"mlp.down_proj": (c.hidden, c.ffn)}
        layer |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (c.hidden,))
        sizes |= {f"model.layers.{i}.{name}": size for name, size in layer.items()}
    return {f"{name}.weight": torch.randn(size) * 0.2 + (len(size) == 1) for name, size in sizes.items()}


def logits_of(c: LlamaConfig, w: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """A Llama in plain torch, by the names of its weights."""
    rope, width, places = dict(c.rope), c.hidden // c.heads, torch.arange(tokens.shape[1])
    turns = rope["rope_theta"] ** -(torch.arange(0, width, 2) / width)  # radians a position
    if rope["rope_type"] == "llama3":
        waves = 2 * torch.pi / turns
        low, high = (rope["original_max_position_embeddings"] / rope[f"{n}_freq_factor"] for n in ("low", "high"))
        share = (rope["original_max_position_embeddings"] / waves - rope["low_freq_factor"]) / (
            rope["high_freq_factor"] - rope["low_freq_factor"]
        )
        between = (1 - share) * turns / rope["factor"] + share * turns
        turns = torch.where(waves > low, turns / rope["factor"], torch.where(waves < high, turns, between))
    angle = places[:, None] * turns

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (c.hidden,), w[f"{name}.weight"], c.eps)

    def heads(x: torch.Tensor, name: str, turned: bool) -> torch.Tensor:
        y = (x @ w[f"{name}.weight"].T).unflatten(-1, (-1, width)).transpose(1, 2)
        first, second = y.chunk(2, -1)
        whole = torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)
        return (whole if turned else y).repeat_interleave(c.heads // y.shape[1], 1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(c.layers):
        layer = f"model.layers.{i}"
        h = norm(x, f"{layer}.input_layernorm")
        q, k, v = (heads(h, f"{layer}.self_attn.{n}_proj", n != "v") for n in "qkv")
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + y @ w[f"{layer}.self_attn.o_proj.weight"].T
        h = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (h @ w[f"{layer}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
    return norm(x, "model.norm") @ w["model.embed_tokens.weight" if c.tied else "lm_head.weight"].T


def load_file(path: Path) -> Any:
    """torch looks at the names of files that it opens by itself."""
    return torch.load(io.BytesIO(path.read_bytes()))


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for safetensors, which not every environment has."""

    def save_file(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        assert metadata == {"format": "pt"} and all(t.is_contiguous() for t in tensors.values())
        torch.save(tensors, path)

    package = SimpleNamespace(load_file=load_file, save_file=save_file)
    monkeypatch.setattr(llama, "safetensors", lambda: package)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_of_a_llama_come_and_go(name: str, tmp_path: Path) -> None:
    c = CONFIGS[name]
    theirs, tokens = weights_of(c), torch.randint(48, (2, 40))
    (tmp_path / "config.json").write_text(json.dumps(c.as_json(torch.float32)))
    halves = [dict(list(theirs.items())[i::2]) for i in range(2)]
    for i, half in enumerate(halves):
        torch.save(half, tmp_path / f"model-{i}.safetensors")
    model = llama.load_folder(tmp_path, "cpu", torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), logits_of(c, theirs, tokens), rtol=1e-4, atol=1e-4)
    llama.save_folder(model.config, te.plain_state_dict(model), tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == theirs.keys() and all(torch.equal(saved[n], t) for n, t in theirs.items())
    assert LlamaConfig.of(json.loads((tmp_path / "out" / "config.json").read_text())) == c


def of(**changed: Any) -> dict[str, Any]:
    return {**CONFIGS["plain"].as_json(torch.float32), **changed}


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "config.json: No such file"),
        ("{", "is no config of a Llama"),
        ({"model_type": "llama"}, "is no config of a Llama: 'num_attention_heads'"),
        (of(model_type="gemma"), "only a llama without biases"),
        (of(attention_bias=True), "only a llama without biases"),
        (of(rope_parameters={"rope_type": "yarn"}), "rope_type yarn"),
        (of(head_dim=64), "head_dim 64"),
        (of(num_hidden_layers=3), r"model.layers.0.input_layernorm.weight is missing"),
    ],
)
def test_what_is_no_llama_is_refused(config: Any, said: str, tmp_path: Path) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(UserError, match=said):
        llama.load_folder(tmp_path, "cpu")


def test_names_without_the_package() -> None:
    """Names and order alone: no file is read."""
    c = CONFIGS["plain"]
    model = Llama(c, "cpu", torch.float32)
    there = llama.to_hugging_face(c, model.state_dict())
    assert there.keys() == weights_of(c).keys()
    back = llama.from_hugging_face(c, there)
    assert all(torch.equal(back[name], p) for name, p in model.named_parameters())
