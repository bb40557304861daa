"""Context parallelism's operations, one token at a time, in float64."""

from __future__ import annotations

import numpy as np

_TOKEN_BATCH_HEAD = {"sbhd": (0, 1, 2), "bshd": (1, 0, 2)}


def by_token(x: np.ndarray, form: str) -> np.ndarray:
    """An output [.., h, d] as [token, batch, h, d]; packed tokens are a batch of one."""
    return {"sbhd": x, "bshd": x.swapaxes(0, 1), "thd": x[:, None]}[form]


def stats_by_token(x: np.ndarray, form: str) -> np.ndarray:
    """Statistics as [token, batch, h]."""
    return x[:, None] if form == "thd" else x.transpose(2, 0, 1)


def merged(parts: list[tuple[np.ndarray, np.ndarray]], form: str, sink: np.ndarray | None) -> tuple[np.ndarray, ...]:
    """(output, statistics), by token, of (output, statistics) over different keys and a sink's logits."""
    outs = [by_token(out.astype(np.float64), form) for out, _ in parts]
    logs = [stats_by_token(stats.astype(np.float64), form) for _, stats in parts]
    made, stats = np.zeros(outs[0].shape), np.full(logs[0].shape, np.inf)
    for at in np.ndindex(logs[0].shape):
        seen = [(out[at], log[at]) for out, log in zip(outs, logs, strict=True) if not np.isinf(log[at])]
        if not seen:
            continue
        terms = [log for _, log in seen] + ([] if sink is None else [float(sink[at[2]])])
        top = max(terms)
        stats[at] = top + np.log(sum(np.exp(term - top) for term in terms))
        made[at] = sum(out * np.exp(log - stats[at]) for out, log in seen)
    return made, stats


def sink_grad(dy: np.ndarray, out: np.ndarray, stats: np.ndarray, sink: np.ndarray, form: str) -> np.ndarray:
    """The gradient of each head's sink."""
    dy, out, logs = by_token(dy.astype(np.float64), form), by_token(out.astype(np.float64), form), stats
    logs = stats_by_token(logs.astype(np.float64), form)
    found = np.zeros(len(sink))
    for at in np.ndindex(logs.shape):
        if not np.isinf(logs[at]):
            found[at[2]] -= np.exp(sink[at[2]] - logs[at]) * (dy[at] @ out[at])
    return found


def chunks_of(length: int, size: int) -> list[list[int]]:
    """The positions in each of 2 * size chunks of a padded sequence."""
    chunk = length // (2 * size)
    return [list(range(i * chunk, (i + 1) * chunk)) for i in range(2 * size)]


def of_rank(length: int, size: int, rank: int) -> list[int]:
    """The positions of a padded sequence that a rank holds, in its order."""
    chunks = chunks_of(length, size)
    return chunks[rank] + chunks[2 * size - 1 - rank]


def places_of_rank(padded: list[int], size: int, rank: int) -> list[int]:
    """The same of packed sequences, among all their tokens; running sums of padded lengths."""
    return [
        begin + place
        for begin, end in zip(padded, padded[1:], strict=False)
        for place in of_rank(end - begin, size, rank)
    ]


def valid(length: int, padded: int, size: int, run: tuple[int, int], before: int = 0) -> int:
    """How many of the first `length` positions lie in a run of chunks; and up to `before` in front of these."""
    held = [position for chunk in chunks_of(padded, size)[slice(*run)] for position in chunk if position < length]
    return len(range(max(held[0] - before, 0), held[-1] + 1)) if held else 0
