"""Let the small GPT of `te train` go on with some texts, byte by byte, always by the likeliest one.

The keys and values of what was read and written stay in a cache (`te.InferenceParams`), so each step computes one
new token of each text. Texts come and go: when one is finished, the next one that waits takes its place in the batch,
and its whole prompt is read in the same step in which the others go on by a byte.

Some seconds on a CPU core or a GPU.

    te train --recipe none                        # writes build/train/none.pt, once
    python examples/generate.py --prompt "Anne " --paged --check
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path

# Before NumPy is first imported, as te_cli/__init__.py says.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a clone that nobody installed, too

import torch  # noqa: E402

import te_torch as te  # noqa: E402
from te_cli.arguments import UserError, device, mistakes_end, positive, usual_device  # noqa: E402
from te_cli.gpt import GPT  # noqa: E402
from te_cli.progress import Progress  # noqa: E402
from te_cli.settings import GPTConfig, Settings  # noqa: E402
from te_cli.training import model_of, read_checkpoint  # noqa: E402

PROMPTS = ("Anne ", "Captain Wentworth was ", "She had ", "Sir Walter Elliot, of Kellynch Hall, ", "It was ", "The ")
PAGE = 16  # tokens
PROGRAM = "generate.py"
CHECKPOINT = Path("build/train/none.pt")  # of te train --recipe none

Text = list[int]  # its bytes


def precision(place: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """The region of products in the cache's dtype, bf16 or the model's own."""
    return torch.autocast(place.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


class Batch:
    """Texts that are written together, a byte each at a time; they come and go."""

    def __init__(self, model: GPT, params: te.InferenceParams) -> None:
        self.model, self.params = model, params
        self.device = next(model.parameters()).device
        self.new: OrderedDict[int, Text] = OrderedDict()  # what the cache does not have yet of each text

    def room(self) -> int:
        """How many texts may come."""
        return self.params.max_batch_size - len(self.new)

    def add(self, name: int, prompt: Text) -> None:
        """A text begins: the next step reads its prompt."""
        self.new[name] = prompt

    def remove(self, name: int) -> None:
        """A text is finished: the next step frees its place in the cache."""
        del self.new[name]

    @torch.inference_mode()
    def step(self) -> dict[int, int]:
        """The next byte of each text."""
        self.params.pre_step(OrderedDict((name, len(tokens)) for name, tokens in self.new.items()))
        longest = max(map(len, self.new.values()))
        rows = [tokens + [0] * (longest - len(tokens)) for tokens in self.new.values()]
        with precision(self.device, self.params.dtype):
            logits = self.model(torch.tensor(rows, device=self.device), self.params)
        last = torch.tensor([len(tokens) - 1 for tokens in self.new.values()], device=self.device)
        chosen = dict(
            zip(self.new, logits[torch.arange(len(rows), device=self.device), last].argmax(-1).tolist(), strict=True)
        )
        self.new = OrderedDict((name, [token]) for name, token in chosen.items())
        return chosen


def generate(
    model: GPT,
    prompts: list[Text],
    count: int,
    params: te.InferenceParams,
    on_step: Callable[[int], None] | None = None,
) -> list[Text]:
    """Each prompt with up to `count` more bytes, of which a line's end is the last."""
    batch, waiting, texts = Batch(model, params), deque(range(len(prompts))), [list(prompt) for prompt in prompts]
    while batch.new or waiting:
        while waiting and batch.room():
            name = waiting.popleft()
            batch.add(name, prompts[name])
        for name, token in batch.step().items():
            texts[name].append(token)
            if token == ord("\n") or len(texts[name]) == len(prompts[name]) + count:
                batch.remove(name)
        if on_step is not None:
            on_step(sum(map(len, texts)) - sum(map(len, prompts)))
    return texts


@torch.inference_mode()
def generate_uncached(model: GPT, prompt: Text, count: int) -> Text:
    """The same for one prompt, with everything computed again for each byte."""
    text, device = list(prompt), next(model.parameters()).device
    while len(text) < len(prompt) + count and text[-1] != ord("\n"):
        text.append(int(model(torch.tensor([text], device=device))[0, -1].argmax()))
    return text


def load(path: Path | None, place: torch.device) -> GPT:
    """The model of a checkpoint; one that has learnt nothing where none was named and there is none."""
    if path is not None and not path.exists():
        raise UserError(f"--checkpoint {path}: there is no such file (te train writes some)")
    path = CHECKPOINT if path is None else path
    if path.exists():
        return model_of(path, read_checkpoint(path), place).eval()
    print(f"No checkpoint {path}: the model has learnt nothing (te train --recipe none).")
    torch.manual_seed(0)
    untrained = Settings()
    return GPT(GPTConfig(untrained.layers, untrained.hidden, untrained.heads), place).eval()


def cache(model: GPT, texts: int, longest: int, paged: bool) -> te.InferenceParams:
    """A cache for so many texts at a time, of so many bytes, prompt and answer."""
    place, heads = next(model.parameters()).device, model.config.heads
    longest = -(-longest // PAGE) * PAGE
    return te.InferenceParams(
        texts,
        longest,
        heads,
        model.config.hidden // heads,
        torch.bfloat16 if place.type == "cuda" else torch.float32,
        is_paged=paged,
        page_size=PAGE,
        total_num_pages=texts * longest // PAGE,
        device=place,
    )


def readable(text: Text) -> str:
    """What a terminal can show of it."""
    return "".join(c if c.isprintable() else "·" for c in bytes(text).decode(errors="replace").rstrip("\n"))


def some(text: str) -> str:
    """A prompt: there has to be something to go on with."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text has no next byte: give one character at least")
    return text


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt", type=some, action="append", help="a text to go on with; may be given several times")
    parser.add_argument("--count", type=positive, default=60, metavar="N", help="bytes to write at most for each (60)")
    parser.add_argument("--batch", type=positive, default=4, metavar="N", help="texts at a time (4)")
    parser.add_argument("--paged", action="store_true", help=f"keep the cache in pages of {PAGE} tokens")
    parser.add_argument("--check", action="store_true", help="also compute everything without the cache, and compare")
    parser.add_argument("--checkpoint", type=Path, help=f"of te train ({CHECKPOINT})")
    parser.add_argument("--device", type=device, default=usual_device(), help="cpu, cuda ... (CUDA where there is one)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Generate, report."""
    options = parse(arguments)
    place = torch.device(options.device)
    if place.type == "cpu":
        torch.set_num_threads(1)  # as te_cli/train.py says
    with mistakes_end(PROGRAM):
        model = load(options.checkpoint, place)
    prompts = [list(text.encode()) for text in options.prompt or PROMPTS]
    params = cache(model, options.batch, max(map(len, prompts)) + options.count, options.paged)
    bar, start = Progress("bytes", options.count * len(prompts)), time.perf_counter()

    def on_step(done: int) -> None:
        bar.show(done, f"{done / (time.perf_counter() - start):,.0f} a second, {params.batch_size} texts")

    texts = generate(model, prompts, options.count, params, on_step)
    bar.stop()
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"\n[{readable(prompt)}]{readable(text[len(prompt) :])}")
    if options.check:
        with precision(place, params.dtype):
            same = sum(generate_uncached(model, p, options.count) == t for p, t in zip(prompts, texts, strict=True))
        print(f"\n{same} of {len(texts)} texts are the same without the cache.")
        return int(same < len(texts) and place.type == "cpu")  # bf16 may decide a near tie otherwise
    return 0


if __name__ == "__main__":
    sys.exit(main())
