"""What a recurrence costs a rank: on its own tokens, and on the whole sequence.

    python benchmarks/recurrences.py --ranks 4

Runs the functions of transformers in one process, with one thread: forward and backward of all
tokens, and the form that `cp_inductor` has for them of the tokens of a middle rank, whose gather is
replaced by copies of its own pair. So the times are CPU seconds of one rank, without its waiting.
Functions that go from token to token (`selective_scan`, and `gated`, the loop of RG-LRU) have a
backward that is quadratic in the tokens. They are run on few, and their shares are less than 1/P.
The bytes are those that a rank receives, forward and backward: of pairs and of the tokens before,
counted as they are gathered; of the whole, the hidden states that `whole=` gathers and whose
gradients it scatters; of heads, what an all-to-all of all arguments and of the output would move.

Beyond 64 ranks a second table counts what a rank receives of states, beside a gather of all pairs.

Prints tables and, as its last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from cp_inductor.modules.along_sequence import SharedSequence, pass_states
from cp_inductor.modules.reading import computing_with
from tests.support.ranks import fake_mesh
from tests.support.recurrences import TABLE

HEADS, WIDTH, STATE = 4, 64, 64


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape)


def delta(length: int) -> dict[str, Any]:
    keys = [torch.nn.functional.normalize(normal(1, length, HEADS, WIDTH), dim=-1) for _ in "qk"]
    shape = (1, length, HEADS)
    return {
        **{"query": keys[0], "key": keys[1], "value": normal(*shape, WIDTH)},
        **{"g": -torch.rand(shape) * 0.1, "beta": torch.rand(shape), "chunk_size": 64},
    }


def kda(length: int) -> dict[str, Any]:
    return {**delta(length), "g": -torch.rand(1, length, HEADS, WIDTH) * 0.1}


def mamba2(length: int) -> dict[str, Any]:
    return {
        **{"hidden_states": normal(1, length, HEADS, WIDTH), "dt": normal(1, length, HEADS)},
        **{"B": normal(1, length, 1, STATE), "C": normal(1, length, 1, STATE)},
        **{"A": -torch.rand(HEADS), "D": normal(HEADS), "dt_bias": normal(HEADS)},
        **{"chunk_size": 256, "dt_softplus": True},
    }


def mamba(length: int) -> dict[str, Any]:
    width, size = 256, 16
    return {
        **{"hidden_states": normal(1, width, length), "dt": normal(1, width, length)},
        **{
            "B": normal(1, size, length),
            "C": normal(1, size, length),
            "z": normal(1, width, length),
        },
        **{"A": -torch.rand(width, size), "D": normal(width), "delta_softplus": True},
    }


def gated(length: int) -> dict[str, Any]:
    reset = torch.zeros(1, length, 1, dtype=torch.bool)
    # The model makes the decay by exp, too, which keeps it.
    logs = -torch.rand(1, length, 1024)
    return {"tokens": normal(1, length, 1024), "logs": logs, "reset": reset, "initial": None}


def scan_gated(tokens: Tensor, decay: Tensor, reset: Tensor, initial: Tensor | None = None) -> Any:
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    return RecurrentGemmaRglru._rnn_scan(None, tokens, decay, reset, initial)


def with_decay(given: dict[str, Any]) -> dict[str, Any]:
    """Make decays of their logarithms, if these are given."""
    rest = {name: value for name, value in given.items() if name != "logs"}
    return {**rest, "decay": given["logs"].exp()} if "logs" in given else rest


CASES: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "chunk_gated_delta_rule": (delta, 8192),
    "chunk_kda": (kda, 1024),
    "mamba_chunk_scan": (mamba2, 8192),
    "selective_scan": (mamba, 512),
    "gated": (gated, 512),
}


def leaves_of(given: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for key, value in given.items()
    }


def measure(run: Callable[[], Any], repeats: int) -> tuple[float, int]:
    """Return the median of CPU seconds of a forward and backward, and bytes kept for the latter."""
    seconds, kept = [], 0
    for turn in range(repeats + 1):
        storages: dict[int, int] = {}

        def note(tensor: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        begin = time.process_time()
        if turn == 0:  # warms up, and counts
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                out = run()
            kept = sum(storages.values())
        else:
            out = run()
        out = out[0] if isinstance(out, tuple) else out
        out.sum().backward()
        seconds.append(time.process_time() - begin)
    return statistics.median(seconds[1:]), kept


@contextmanager
def gathering_copies(received: list[int]) -> Iterator[None]:
    original = SharedSequence.gather

    def gather(sequence: SharedSequence, part: Tensor) -> Tensor:
        # Its backward scatters gradients of as many bytes.
        received.append(2 * (sequence.world_size - 1) * part.numel() * part.element_size())
        return part.expand(sequence.world_size, *part.shape)

    SharedSequence.gather = gather  # type: ignore[method-assign]
    try:
        yield
    finally:
        SharedSequence.gather = original  # type: ignore[method-assign]


def compare(name: str, world_size: int, repeats: int, scale: float) -> dict[str, Any]:
    make, most = CASES[name]
    length = int(most * scale)
    case = TABLE[name]
    function = scan_gated if name == "gated" else case.function()
    dims = {**case.dims, "logs": 1}
    torch.manual_seed(0)
    given = make(length)
    whole = leaves_of(given)
    seconds_whole, kept_whole = measure(lambda: function(**with_decay(whole)), repeats)
    size, rank = length // world_size, world_size // 2
    own = leaves_of(
        {
            key: value.narrow(dims[key], rank * size, size).clone() if key in dims else value
            for key, value in given.items()
        }
    )
    received: list[int] = []
    with (
        fake_mesh(rank, world_size) as mesh,
        gathering_copies(received),
        computing_with(sequence=SharedSequence(mesh, (0,), length)),
    ):
        seconds, kept = measure(lambda: case.share(function, **with_decay(own)), repeats)
    tokens = sum(
        value.numel() * value.element_size()
        for key, value in given.items()
        if key in dims and isinstance(value, Tensor)
    )
    out = next(value for value in given.values() if isinstance(value, Tensor))
    out_bytes = out.numel() * out.element_size()
    others = (world_size - 1) / world_size
    return {
        "name": name,
        "tokens": length,
        "seconds_whole": seconds_whole,
        "seconds": seconds,
        "share": seconds / seconds_whole,
        "kept_whole_bytes": kept_whole,
        "kept_bytes": kept,
        "received_bytes": sum(received) // (repeats + 1),
        "whole_bytes": round(2 * others * out_bytes),
        "heads_bytes": round(2 * others * (tokens + out_bytes) / world_size),
    }


def count_received(ranks: int, is_matrix: bool) -> tuple[int, int]:
    """Return the bytes of states that a rank receives in a forward, and those of a gather."""
    state = torch.ones(1, 32, 128, 128)
    kept = {"matrix": state} if is_matrix else {"decay": state[..., :1, :1]}
    received: list[int] = []
    original = SharedSequence.exchange

    def exchange(sequence: SharedSequence, rows: Tensor, *sizes: Any) -> Tensor:
        received.append(rows.numel() * rows.element_size() * (ranks - 1) // ranks)
        return original(sequence, rows, *sizes)

    SharedSequence.exchange = exchange  # type: ignore[method-assign]
    try:
        with (
            fake_mesh(1, ranks) as mesh,
            computing_with(sequence=SharedSequence(mesh, (0,), 4 * ranks)),
        ):
            pass_states(state, **kept)
    finally:
        SharedSequence.exchange = original  # type: ignore[method-assign]
    pair = state.numel() + next(iter(kept.values())).numel()
    return sum(received), (ranks - 1) * pair * state.element_size()


def main() -> None:
    """Measure every function, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the lengths")
    parser.add_argument("--names", nargs="*", default=list(CASES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    import transformers

    rows = [compare(name, args.ranks, args.repeats, args.scale) for name in args.names]
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    versions += f", {datetime.now(timezone.utc):%Y-%m-%d}"
    print(f"{versions}, {args.ranks} ranks, float32, one thread")
    header = ("function", "tokens", "s whole", "s own", "share", "MB kept whole", "MB kept own")
    more = ("kB received: pairs", "whole", "heads")
    table = [
        (
            *(row["name"], row["tokens"], f"{row['seconds_whole']:.3f}", f"{row['seconds']:.3f}"),
            *(f"{row['share']:.3f}", f"{row['kept_whole_bytes'] / 1e6:.1f}"),
            *(f"{row['kept_bytes'] / 1e6:.1f}", f"{row['received_bytes'] / 1e3:.0f}"),
            *(f"{row['whole_bytes'] / 1e3:.0f}", f"{row['heads_bytes'] / 1e3:.0f}"),
        )
        for row in rows
    ]
    print(tabulate(table, headers=(*header, *more), tablefmt="github", disable_numparse=True))
    print("MB of states that a rank receives in a forward, of 32 heads of 128 x 128:")
    many = [
        {"ranks": ranks, "is_matrix": is_matrix, "received_bytes": got, "gather_bytes": gather}
        for is_matrix in (False, True)
        for ranks in (128, 512)
        for got, gather in (count_received(ranks, is_matrix),)
    ]
    lines = [
        (
            *(one["ranks"], "a matrix" if one["is_matrix"] else "a number per head"),
            *(f"{one['received_bytes'] / 1e6:.1f}", f"{one['gather_bytes'] / 1e6:.1f}"),
        )
        for one in many
    ]
    print(tabulate(lines, headers=("ranks", "decay", "exchanged", "gathered"), tablefmt="github"))
    print(json.dumps({"many": many, "rows": rows, "ranks": args.ranks, "versions": versions}))


if __name__ == "__main__":
    main()
