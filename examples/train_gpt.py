"""Train a small GPT on a novel, in FP8 and then in bf16 beside it, with a plot of both losses: the command `te train`.

The model is te_cli/gpt.py, the loop is te_cli/training.py. On two CPU cores it takes two to four minutes (--steps 20:
half a minute), on a large GPU some seconds.

    python examples/train_gpt.py --recipe current --steps 300
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a clone that nobody installed, too

from te_cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
