"""The command `te`: its commands, and how each of them ends."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module

import te_core
from te_cli.arguments import UserError
from te_core import hints
from te_core.errors import ArgumentError, LibraryError, UnsupportedError
from te_core.spelling import meant

#: Each command's module has a docstring, which --help prints, `add_arguments(parser)`, and `run(options)`. This returns
#: what it found, for programs and in words, and the exit code.
COMMANDS = {
    "train": ("te_cli.train", "train a small GPT in FP8, and in bf16 beside it, with a plot of both losses"),
    "bench": ("te_cli.bench", "time a layer beside torch and torch.compile on this device"),
    "report": ("te_cli.report", "the precision, the memory and the attention of a model after a step of yours"),
    "warmup": ("te_cli.warmup", "compile what a step of yours needs, and keep it on disk"),
}
DOCTOR = "what te-runtime finds on this machine: libraries, the GPU, which recipes run"
ENDS = """\
examples:
  te doctor
  te train --recipe current --steps 50
  te bench --module LayerNormMLP --hidden 4096
  te report train.py:step

`te COMMAND --help` lists a command's options, with examples. Exit codes: 0 all went well; 1 a fault was found, a step
failed, or the disk is full; 2 a mistake in the command; 130 interrupted.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["doctor"]:  # te_core's own, which needs no torch
        from te_core.tools import doctor

        return doctor.main(given[1:], "te doctor")
    options = _parse(given)
    with _mistakes_end(f"te {options.command}"):
        with redirect_stdout(sys.stderr) if options.json else redirect_stdout(sys.stdout):
            found, words, code = import_module(COMMANDS[options.command][0]).run(options)
        print(json.dumps(found, indent=2) if options.json else words, flush=True)
    return int(code)


def _parse(given: list[str]) -> argparse.Namespace:
    """The options of the chosen command; the others' modules are not imported."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="te",
        description="Low-precision Transformer layers: look, try, measure.",
        epilog=ENDS,
        formatter_class=layout,
    )
    parser.add_argument("--version", action="version", version=f"te-runtime {te_core.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help=DOCTOR)
    chosen = parser
    for name, (place, what) in COMMANDS.items():
        command = commands.add_parser(name, help=what, formatter_class=layout)
        if given[:1] == [name]:
            chosen, module = command, import_module(place)
            command.description = module.__doc__
            command.add_argument("--json", action="store_true", help="print one object of JSON, for programs")
            module.add_arguments(command)
    options, unknown = parser.parse_known_args(given)
    if unknown:  # told with the usage of the command that does not know them
        near = meant([word for word in unknown if word.startswith("-")], chosen._option_string_actions, 0.7)
        chosen.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
    return options


@contextmanager
def _mistakes_end(program: str) -> Iterator[None]:
    """End the program at what a user can mend in a line that says how; other errors are shown whole."""
    try:
        yield
    except UserError as mistake:
        _end(program, mistake, mistake.code)
    except (ArgumentError, LibraryError, UnsupportedError) as error:
        _end(program, error, 1)
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        _end(program, f"{missing}. To do: {hints.install('torch')}", 1)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        _end(program, f"out of memory. Choose smaller sizes, such as a smaller --batch ({_first_line(error)})", 1)
    except KeyboardInterrupt:
        _end(program, "interrupted", 130)
    except BrokenPipeError:  # what read the output has seen enough
        sys.stderr.close()
        raise SystemExit(1) from None


def _end(program: str, why: object, code: int) -> None:
    sys.stderr.write(f"{program}: error: {why}\n")
    raise SystemExit(code) from None


def out_of_memory(error: BaseException) -> bool:
    """Whether torch or NumPy got no memory."""
    torch = sys.modules.get("torch")
    kinds = (MemoryError, torch.OutOfMemoryError) if torch else MemoryError
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
