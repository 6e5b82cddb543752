"""Generation over a sharded prompt: tokens as on one process, keys where they were computed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._python_dispatch import TorchDispatchMode

import cp_inductor
from cp_inductor import InvalidArgument, RanksDisagree, UnsupportedAttention
from cp_inductor.run.spread_keys import _attend, combine_stack
from cp_inductor.tiles.kernels import TileCall
from cp_inductor.torch_private.dtensor import are_plain_tensors_replicated
from tests.support import models
from tests.support.examples import run_example
from tests.support.ranks import run_ranks, world_mesh

LENGTH, PADDED, NEW = 21, 5, 8
EXPERTS = {"DeepseekV3", "GptOss"}  # which compute in float32

GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True}
BEAMS = {"do_sample": False, "num_beams": 3}
STATIC = {"do_sample": False, "cache_implementation": "static"}


def make(name: str) -> Any:
    """Return a model; `models` gives some of them an attention that transformers cannot cache."""
    model = models.make(name).eval()
    if name in {"GptOss", "Gemma2"}:
        model.set_attn_implementation("eager")
    return model if name in EXPERTS else model.double()


def prompt(is_padded: bool, length: int = LENGTH) -> dict[str, Any]:
    ids = torch.randint(3, 60, (2, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    if is_padded:
        ids[1, :PADDED], mask[1, :PADDED] = 0, 0
    more = {"max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": None}
    return {"inputs": ids, "attention_mask": mask, **more}


def generate(model: Any, how: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    asked = {"return_dict_in_generate": True, "output_logits": "num_beams" not in how}
    return model.generate(**how, **asked)


def check_tokens(name: str, asked: list[tuple[dict[str, Any], bool, int]]) -> None:
    """Tokens and logits; ranks that are seeded otherwise draw what the first draws."""
    model, mesh = make(name), world_mesh()
    given = [{**prompt(is_padded, length), **how} for how, is_padded, length in asked]
    expected = [generate(model, how, 5) for how in given]
    cp_inductor.distribute(model, mesh)
    names = [one for one, _ in model.named_parameters()]
    for number, (how, wanted) in enumerate(zip(given, expected, strict=True)):
        with torch.inference_mode(number % 2 == 0):
            found = generate(model, how, 5 + dist.get_rank())
        assert torch.equal(found.sequences, wanted.sequences), (how, found, wanted)
        for logits, right in zip(found.logits or (), wanted.logits or (), strict=True):
            torch.testing.assert_close(logits, right, rtol=1e-5, atol=1e-5)
        check_share(found.past_key_values, wanted.past_key_values)
    assert model.config._attn_implementation in {"sdpa", "eager"}
    assert [one for one, _ in model.named_parameters()] == names
    assert all(isinstance(one, torch.distributed.tensor.DTensor) for one in model.parameters())


def check_share(found: Any, wanted: Any) -> None:
    """The ranks together hold each key of one process once, and equally many."""
    for layer, whole in zip(found.layers, wanted.layers, strict=True):
        tokens, is_held = layer.tokens_read(0)
        mine = tokens if is_held is None else tokens[is_held]
        mine = mine[mine < int(layer.length)]
        held: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(held, mine.tolist())
        total = sorted(token for part in held for token in part)
        assert total == list(range(int(layer.length)))[-len(total) :]
        assert len(total) >= min(int(layer.length), layer.window or int(layer.length))
        assert max(map(len, held)) - min(map(len, held)) <= 1
        if layer.window is None and layer.most is None:
            slots = torch.arange(len(mine))
            keys = layer.keys.index_select(2, slots)
            torch.testing.assert_close(keys, whole.keys.index_select(2, mine))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "asked"),
    [
        (
            "Llama",
            [
                (GREEDY, True, LENGTH),
                (SAMPLED, False, LENGTH),
                (BEAMS, False, LENGTH),
                (STATIC, True, LENGTH),
                (GREEDY, False, 5),  # too few to be sharded
            ],
        ),
        ("Mistral", [(GREEDY, True, LENGTH), (STATIC, False, LENGTH)]),
        ("DeepseekV3", [(GREEDY, False, LENGTH)]),
        ("GptOss", [(GREEDY, True, LENGTH)]),
        pytest.param("Gemma3", [(GREEDY, True, LENGTH), (BEAMS, True, 30)], marks=pytest.mark.long),
        pytest.param("Gemma2", [(STATIC, False, LENGTH)], marks=pytest.mark.long),
        pytest.param("DeepseekV3", [(STATIC, True, LENGTH)], marks=pytest.mark.long),
        pytest.param("GptOss", [(STATIC, False, 30), (BEAMS, True, 9)], marks=pytest.mark.long),
    ],
)
def test_tokens_are_those_of_one_process(
    name: str, asked: list[tuple[dict[str, Any], bool, int]]
) -> None:
    pytest.importorskip("transformers")
    run_ranks(2, check_tokens, name, asked)


def check_own_cache(name: str) -> None:
    """Padded prompts are computed whole on every rank; ranks draw what the first draws."""
    model = models.make(name).eval()
    given = [{**prompt(is_padded), **how} for is_padded, how in ((True, SAMPLED), (False, GREEDY))]
    expected = [generate(model, how, 5).sequences for how in given]
    cp_inductor.distribute(model, world_mesh())
    for how, wanted in zip(given, expected, strict=True):
        assert torch.equal(generate(model, how, 5 + dist.get_rank()).sequences, wanted)
    assert all(isinstance(one, torch.distributed.tensor.DTensor) for one in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["MiniMax", *(pytest.param(x, marks=pytest.mark.long) for x in ("Zamba2", "FalconH1"))]
)
def test_models_whose_cache_is_not_spread(name: str) -> None:
    pytest.importorskip("transformers")
    run_ranks(2, check_own_cache, name)


def check_states_alone() -> None:
    """A model without attention, in a program that takes plain tensors for replicated."""
    model, how = models.make("Mamba2").eval(), {**prompt(True), **GREEDY}
    expected = generate(model, how, 5).sequences
    cp_inductor.distribute(model, world_mesh())
    with implicit_replication():
        assert torch.equal(generate(model, how, 5).sequences, expected)
        assert are_plain_tensors_replicated()


@pytest.mark.slow
def test_a_model_that_holds_states_and_no_keys() -> None:
    pytest.importorskip("transformers")
    run_ranks(2, check_states_alone)


def check_padded_row() -> None:
    """A padded row goes on as it does alone: one process of Gemma 2 computes NaN for padding."""
    model, how = make("Gemma2"), {**prompt(True), **GREEDY}
    alone = {**how, "inputs": how["inputs"][1:, PADDED:], "attention_mask": None}
    expected = generate(model, alone, 5)
    found = generate(cp_inductor.distribute(model, world_mesh()), how, 5)
    assert torch.equal(found.sequences[1:, PADDED:], expected.sequences)
    for logits, right in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(logits[1:], right, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_padding_under_capped_scores() -> None:
    pytest.importorskip("transformers")
    run_ranks(2, check_padded_row)


@pytest.mark.long
def test_tokens_on_three_ranks() -> None:
    pytest.importorskip("transformers")
    run_ranks(3, check_tokens, "Mistral", [(GREEDY, True, 22), (SAMPLED, True, 25)])


class Sent(TorchDispatchMode):
    """Notes what this rank sends."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_gather_into_tensor.default:
            self.shapes.append(tuple(args[0].shape))
        elif func.namespace in {"c10d", "_c10d_functional"}:
            assert func is torch.ops._c10d_functional.wait_tensor.default, func
        return func(*args, **(kwargs or {}))


def check_traffic() -> None:
    model = cp_inductor.distribute(make("Llama"), world_mesh())
    how = {**prompt(False), "do_sample": False}
    found = generate(model, {**how, "max_new_tokens": 1}, 0)
    how["inputs"] = found.sequences
    how["attention_mask"] = torch.ones_like(found.sequences)
    with Sent() as mode:
        model.generate(**{**how, "past_key_values": found.past_key_values, "max_new_tokens": 3})
    heads, head_dim = 4, 8
    assert mode.shapes == [(2, heads, 1, head_dim + 1)] * 3 * 2  # of three tokens, in two layers


@pytest.mark.slow
def test_a_token_costs_one_partial_of_each_rank() -> None:
    pytest.importorskip("transformers")
    run_ranks(2, check_traffic)


class Stop:
    """Stops on one rank at a length, or fails there."""

    def __init__(self, rank: int, length: int, fails: bool = False) -> None:
        self.rank, self.length, self.fails = rank, length, fails

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        is_here = dist.get_rank() == self.rank and input_ids.shape[1] == self.length
        if is_here and self.fails:
            raise ValueError("no more")
        return torch.full((len(input_ids),), is_here)


def check_own_code() -> None:
    model = make("Llama")
    how = {**prompt(False), **GREEDY}
    expected = model.generate(**how)
    cp_inductor.distribute(model, world_mesh())
    length, rank = LENGTH + 3, dist.get_rank()
    for stops in (Stop(1, length), Stop(0, length)):
        found = model.generate(**how, stopping_criteria=[stops])
        assert torch.equal(found, expected[:, :length])
    beams = {**how, "num_beams": 2, "stopping_criteria": [Stop(1, length)]}
    assert model.generate(**beams).shape[1] == length
    assert model.generate(**how, max_time=1e-9).shape[1] == LENGTH + 1
    with pytest.raises((ValueError, RanksDisagree)) as error:
        model.generate(**how, stopping_criteria=[Stop(1, length, fails=True)])
    said = "no more" if rank else f"token {length}: .* got an error on rank 1"
    assert error.match(said)

    def other(batch: int, tokens: Any) -> list[int]:
        return [7 + rank] if len(tokens) == length else list(range(64))

    with pytest.raises(RanksDisagree, match=rf"token {length + 1}: .* got \[\[7, 7\], \[8, 8\]\]"):
        model.generate(**how, prefix_allowed_tokens_fn=other)


@pytest.mark.slow
def test_ranks_stop_where_one_does() -> None:
    pytest.importorskip("transformers")
    run_ranks(2, check_own_code)


def check_compiled(name: str, backend: str) -> None:
    from transformers import CompileConfig

    model, mesh = make(name), world_mesh()
    how = {**prompt(True), **GREEDY}
    expected = model.generate(**how)
    cp_inductor.distribute(model, mesh)
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:  # generate copies objects, but not functions
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    config = CompileConfig(fullgraph=True, dynamic=False, backend=count, mode=None)
    config._compile_all_devices = True
    for _ in range(2):
        found = model.generate(**how, cache_implementation="static", compile_config=config)
        assert torch.equal(found, expected)
        assert len(graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("Mistral", "aot_eager"),
        pytest.param("Llama", "inductor", marks=pytest.mark.long),
        pytest.param("DeepseekV3", "aot_eager", marks=pytest.mark.long),
    ],
)
def test_one_graph_serves_all_fill_levels(name: str, backend: str) -> None:
    pytest.importorskip("transformers")
    run_ranks(2, check_compiled, name, backend)


def check_refusals() -> None:
    model = make("Mistral")
    how = {**prompt(False), **GREEDY}
    guided = {**how, "guidance_scale": 1.5}
    expected = model.generate(**guided)
    cp_inductor.distribute(model, world_mesh())
    assert torch.equal(model.generate(**guided), expected)  # whole on every rank
    with pytest.raises(UnsupportedAttention, match="offloaded DynamicCache"):
        model.generate(**how, cache_implementation="offloaded")
    one = {name: how[name][:1] for name in ("inputs", "attention_mask")}
    with pytest.raises(UnsupportedAttention, match=r"crop\(-?\d+\), as assisted"):
        model.generate(**{**how, **one}, prompt_lookup_num_tokens=3)
    found = generate(model, how, 0)
    longer = torch.cat([found.sequences, found.sequences], 1)
    more = {"past_key_values": found.past_key_values, "attention_mask": torch.ones_like(longer)}
    with pytest.raises(UnsupportedAttention, match="one new token at a time behind a window"):
        model.generate(**{**how, **more, "inputs": longer})
    next_token = distribute_tensor(longer[:, :1], world_mesh(), [Replicate()])
    with implicit_replication(), torch.no_grad():
        for call in (model, torch.compile(model, backend="cp_aot_eager", fullgraph=True)):
            with pytest.raises(UnsupportedAttention, match="got DTensors in a cache that generate"):
                call(next_token, past_key_values=found.past_key_values)
    assert model.config._attn_implementation == "sdpa"
    compressing = cp_inductor.distribute(make("DeepseekV3"), world_mesh())
    with pytest.raises(UnsupportedAttention, match=r"at least 2 tokens, one for each rank.*got 1"):
        compressing.generate(how["inputs"][:, -1:], max_new_tokens=2)
    check_ids_of_one_rank(model)
    how["inputs"][0, 3] += dist.get_rank()
    with pytest.raises(RanksDisagree, match="generate over a sharded prompt"):
        model.generate(**how)


def check_ids_of_one_rank(model: Any) -> None:
    """What the first rank alone would look up stops all ranks."""
    right, wrong = torch.full((1, LENGTH), 5), torch.full((1, LENGTH), 5)
    for one in (64, -1):
        wrong[0, 2] = one
        sharded = distribute_tensor(wrong, world_mesh(), [Shard(1)])
        said = f"0 to 63, got 1 others, .* is {one}"
        for ids, labels in ((wrong, right), (sharded, right), (right, wrong)):
            with pytest.raises(InvalidArgument, match=said):
                cp_inductor.token_logprobs(model, ids, labels)
        with pytest.raises(InvalidArgument, match=said):
            model.generate(wrong, max_new_tokens=1)


@pytest.mark.slow
def test_what_is_refused() -> None:
    pytest.importorskip("transformers")
    run_ranks(2, check_refusals)


def spread_layers(world_size: int, window: int | None, most: int | None) -> Iterator[Any]:
    spread_cache = pytest.importorskip("cp_inductor.integrations.spread_cache")
    for rank in range(world_size):
        ranks = spread_cache.Ranks("", rank, world_size)
        yield spread_cache.SpreadLayer(ranks, window, most)


def test_ranks_stay_even() -> None:
    spread_cache = pytest.importorskip("cp_inductor.integrations.spread_cache")
    for world_size in (1, 2, 3, 5):
        for length in (0, 4, 7, 11, 15):
            for total in range(length, length + 12):
                ranks = [spread_cache.Ranks("", rank, world_size) for rank in range(world_size)]
                spans = [spread_cache.own_tokens(length, total, one) for one in ranks]
                held = [list(chain.from_iterable(of_rank)) for of_rank in spans]
                assert sorted(chain.from_iterable(held)) == list(range(total))
                assert all(part == sorted(part) for part in held)
                if total >= -(-length // world_size) * world_size:
                    assert max(map(len, held)) - min(map(len, held)) <= 1


@pytest.mark.parametrize("most", [None, 40])
@pytest.mark.parametrize("window", [None, 7])
def test_slots_say_which_tokens_they_hold(window: int | None, most: int | None) -> None:
    every = torch.arange(40.0)
    for layer in spread_layers(3, window, most):
        for token in range(40):
            key = every[token].expand(1, 1, 1, 2)
            tokens, is_held = (None, None) if token == 0 else layer.tokens_read(1)
            keys, values = layer.update(key, -key)
            if tokens is None:
                continue
            is_held = tokens <= token if is_held is None else is_held & (tokens <= token)
            assert torch.equal(keys[0, 0, is_held, 0], every[tokens[is_held]])
            assert torch.equal(values[0, 0, is_held, 0], -every[tokens[is_held]])
            least = 0 if window is None else token - window + 1
            own = {int(one) for one in tokens[is_held]}
            assert own >= {
                one for one in range(max(0, least), token + 1) if one % 3 == layer.ranks.rank
            }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 6])
def test_partials_over_keys_of_ranks(dtype: torch.dtype, width: int) -> None:
    """Ranks with many keys, with few, with none, and with none that is seen."""
    make_one = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 3, 8, generator=make_one, dtype=torch.float64).to(dtype)
    key, value = (
        torch.randn(2, 2, 40, size, generator=make_one, dtype=torch.float64).to(dtype)
        for size in (8, width)
    )
    mask = torch.rand(2, 1, 3, 40, generator=make_one) < 0.8
    mask[..., 30:] = False
    bounds = [0, 25, 25, 30, 40]
    parts = []
    for start, stop in pairwise(bounds):
        own: list[Tensor] = [one[:, :, start:stop] for one in (key, value)]
        parts.append(_attend(query, *own, mask[..., start:stop], 0.3, None))
    outs, lses = (torch.stack([part[at].double() for part in parts]) for at in (0, 1))
    out, _ = combine_stack(outs, lses)
    call = TileCall(query.double(), key.double(), value.double(), scale=0.3)
    scores = call.query @ call.key.repeat_interleave(2, 1).transpose(-1, -2) * 0.3
    weights = scores.masked_fill(~mask, -float("inf")).softmax(-1)
    expected = weights @ call.value.repeat_interleave(2, 1)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-2
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.long
@pytest.mark.parametrize("arguments", ["--prompt 61 --new 5", "--prompt 50 --static --sample"])
def test_the_example(arguments: str) -> None:
    said = run_example("generate", 2, arguments).stdout
    assert "the same tokens as on one process" in said
