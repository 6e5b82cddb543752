"""Careless changes, one at a time, and the tests that ought to notice.

    python -m tests.support.mutations              every row, about ten minutes on one core
    python -m tests.support.mutations --only 7     one of them
    python -m tests.support.mutations --unmutated  the tests of all rows, on the tree as it is

A row is applied to a copy of the tree, in which its tests run: they are quick ones, none goes
through Inductor. A row that survives wants a test, unless the change computes the same: then it is
no row. `tests/repository/test_mutations.py` holds the rows to the text that they change.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COPIED = ("cp_inductor", "passes", "tests", "pyproject.toml")

# A change may make ranks wait for each other for ever.
LIMIT_S = 240


@dataclass(frozen=True)
class Mutation:
    """An edit that a careless change could make.

    Attributes:
        path: of the file, from the root.
        old, new: its text, which stands there once, and what is put in its place.
        tests: arguments of pytest: files below tests/, perhaps -k.
        verdict: "killed by" and the test that noticed first; or "open: ", where no test notices
            yet.
    """

    path: str
    old: str
    new: str
    tests: str
    verdict: str = ""


TABLE: tuple[Mutation, ...] = (
    # plan
    Mutation(
        "cp_inductor/plan/tiles.py",
        "middle = 2 * done - weights",
        "middle = 2 * done",
        "plan/test_plan.py -k 'as_much_to_do'",
        "killed by test_stages_have_as_much_to_do",
    ),
    Mutation(
        "cp_inductor/plan/tiles.py",
        "return size % group == 0 or group % size == 0",
        "return size % group == 0",
        "plan/test_plan.py -k share_kv_heads",
        "killed by test_ranks_may_share_kv_heads",
    ),
    Mutation(
        "cp_inductor/plan/transfers.py",
        "return tile.keys, shape.kv_heads(tile.heads)",
        "return tile.keys, tile.heads",
        "plan/test_plan.py -k gqa",
        "killed by test_gqa_moves_kv_heads_once",
    ),
    Mutation(
        "cp_inductor/plan/transfers.py",
        "Transfer(payload, part, heads, tile.rank, owner)",
        "Transfer(payload, part, heads, owner, tile.rank)",
        "plan/test_plan.py -k 'gqa or timeline'",
        "killed by test_a_timeline_hides_what_it_can",
    ),
    Mutation(
        "cp_inductor/plan/transfers.py",
        "breaks = np.flatnonzero(np.diff(lacking) > 1) + 1",
        "breaks = np.flatnonzero(np.diff(lacking) > 1)",
        "plan/test_plan.py -k on_both_sides",
        "killed by test_what_is_missing_on_both_sides_is_fetched_once",
    ),
    Mutation(
        "cp_inductor/plan/planner.py",
        "most = min(MAX_MASKED_CHUNKS_PER_RANK, MAX_MASKED_CHUNKS // recipe.world_size)",
        "most = max(MAX_MASKED_CHUNKS_PER_RANK, MAX_MASKED_CHUNKS // recipe.world_size)",
        "mask/test_rules.py -k chunks_under",
        "killed by test_chunks_under_a_rule_are_no_more_than_calls_of_kernels_may_be",
    ),
    Mutation(
        "cp_inductor/plan/planner.py",
        "it.num_bytes if is_flat",
        "-it.num_bytes if is_flat",
        "plan/test_plan.py -k chosen_by_their_bytes",
        "killed by test_equally_fast_plans_are_chosen_by_their_bytes",
    ),
    Mutation(
        "cp_inductor/plan/strategies/ring.py",
        "for before in [(tile.rank - 1) % grid.world_size]",
        "for before in [(tile.rank + 1) % grid.world_size]",
        "plan/test_plan.py -k test_the_ring_is_the_ring",
        "killed by test_the_ring_is_the_ring",
    ),
    Mutation(
        "cp_inductor/plan/strategies/heads.py",
        "stop = start + left // num_groups * num_groups",
        "stop = start + left",
        "plan/test_plan.py -k 'smaller_groups'",
        "killed by test_heads_that_do_not_divide_are_split_among_smaller_groups",
    ),
    Mutation(
        "cp_inductor/plan/strategies/rows.py",
        "sum(p // 2 != r for p in pair)",
        "sum(p // 2 == r for p in pair)",
        "plan/test_plan.py -k test_traffic",
        "killed by test_traffic",
    ),
    Mutation(
        "cp_inductor/plan/cost.py",
        "program[max(0, index - 1) : index + 1]",
        "program[index : index + 1]",
        "plan/test_plan.py -k memory",
        "killed by test_memory_is_what_has_come_what_is_coming_and_what_goes",
    ),
    Mutation(
        "cp_inductor/plan/ir.py",
        '("do", ("grad_out",), ("lse", "delta"))',
        '("do", ("grad_out",), ("lse",))',
        "plan/test_plan.py -k is_kept",
        "killed by test_what_is_kept_is_not_fetched_again",
    ),
    Mutation(
        "cp_inductor/plan/simulate.py",
        "taboo = added | sent",
        "taboo = sent",
        "plan/test_plan.py -k 'broken or sent_on'",
        "killed by test_broken_plans_are_refused",
    ),
    Mutation(
        "cp_inductor/plan/timeline.py",
        'start = max(network, now)\n                events.append(Event(f"fetch',
        'start = now\n                events.append(Event(f"fetch',
        "plan/test_plan.py -k one_after_another",
        "killed by test_exchanges_come_one_after_another",
    ),
    # mask
    Mutation(
        "cp_inductor/mask/canonical.py",
        "constant = -((-constant) // content)",
        "constant = constant // content",
        "mask/test_rules.py -k 'form or names'",
        "killed by test_one_form_for_each_relation",
    ),
    Mutation(
        "cp_inductor/mask/canonical.py",
        "bounds[rest] = max(bounds.get(rest, constant), constant)",
        "bounds[rest] = min(bounds.get(rest, constant), constant)",
        "mask/test_rules.py -k 'form or names'",
        "killed by test_one_form_for_each_relation",
    ),
    Mutation(
        "cp_inductor/mask/canonical.py",
        "if of_query != of_key or len(signs) != 1 or",
        "if of_query != of_key or",
        "mask/test_rules.py -k test_equal_sums",
        "killed by test_equal_sums_of_steps_up_and_down_say_nothing_of_each",
    ),
    Mutation(
        "cp_inductor/mask/intervals.py",
        "must = (a.low == b.high) & (a.high == b.low)",
        "must = (a.low == b.high) | (a.high == b.low)",
        "mask/test_rules.py -k 'boxes'",
        "killed by test_what_boxes_hold",
    ),
    Mutation(
        "cp_inductor/mask/evaluate.py",
        "if kind is sympy.Le and constant == 1 and rest.is_integer:",
        "if False:",
        "mask/test_rules.py -k at_the_end_of_the_integers",
        "killed by test_a_relation_at_the_end_of_the_integers",
    ),
    Mutation(
        "cp_inductor/mask/intervals.py",
        "return 0 if 0 in (a, b) else a * b",
        "return a * b",
        "mask/test_recognize_mask.py -k ranges",
        "killed by test_ranges_of_products_with_what_may_be_infinite",
    ),
    Mutation(
        "cp_inductor/mask/reader/values.py",
        "return rest if low >= 0 and high < right else sympy.Mod(rest, right)",
        "return rest if low >= 0 and high <= right else sympy.Mod(rest, right)",
        "mask/test_recognize_mask.py -k misread",
        "killed by test_random_programs",
    ),
    Mutation(
        "cp_inductor/mask/reader/values.py",
        "magnitude(other.exact(), tables) + 1 > one.limit",
        "magnitude(other.exact(), tables) > one.limit",
        "mask/test_recognize_mask.py -k misread",
        "killed by test_what_was_misread_once",
    ),
    Mutation(
        "cp_inductor/mask/reader/to_rule.py",
        "return len(shape) >= 2 and shape[-1] >= shape[-2] and canonical",
        "return len(shape) >= 2 and canonical",
        "mask/test_recognize_mask.py -k minima",
        "killed by test_rows_that_see_nothing_but_finite_minima",
    ),
    Mutation(
        "cp_inductor/plan/batch_assign.py",
        "BUSY_PENALTY = 2.0",
        "BUSY_PENALTY = 0.0",
        "plan/test_batch_plan.py -k is_balanced",
        "killed by test_work_is_balanced_and_little_moves",
    ),
    Mutation(
        "cp_inductor/dtensor/rules/attention.py",
        "if query.shape[dim] % ranks or key.shape[dim] % ranks:",
        "if query.shape[dim] % ranks:",
        "run/test_masked_attention.py -k cannot_have",
        "killed by test_ranks_that_cannot_have_a_part_of_a_key_head",
    ),
    Mutation(
        "passes/schedule_exchange.py",
        "is_barrier |= target is WAIT and _start_of(node) is None",
        "is_barrier |= False",
        "passes/test_schedule.py -k another_graph",
        "killed by test_what_another_graph_started_is_not_read_before_its_wait",
    ),
    Mutation(
        "cp_inductor/mask/reader/to_rule.py",
        "at_key.xreplace({KEY: QUERY}) + KEY - QUERY",
        "at_key.xreplace({KEY: QUERY}) + QUERY - KEY",
        "mask/test_recognize_mask.py -k test_masks",
        "killed by test_masks",
    ),
    Mutation(
        "cp_inductor/mask/reader/writes.py",
        "    except Exception:  # a model may call anything, which may raise anything\n"
        "        return {_storage_of(tensor) for tensor in inputs}",
        "    except Exception:  # a model may call anything, which may raise anything\n"
        "        return set()",
        "mask/test_recognize_mask.py -k cannot_be_run",
        "killed by test_what_cannot_be_run_may_write",
    ),
    # run
    Mutation(
        "cp_inductor/run/store.py",
        "            before += self.tokens.of(span, of_keys=of_keys)\n",
        "",
        "run/test_random_attention.py -k test_random_attentions",
        "killed by test_random_attentions",
    ),
    Mutation(
        "cp_inductor/run/records.py",
        "of_keys = is_cross and transfer.payload.is_of_keys",
        "of_keys = False",
        "run/test_random_attention.py -k of_one_span",
        "killed by test_queries_and_keys_of_one_span_and_other_lengths",
    ),
    Mutation(
        "cp_inductor/run/records.py",
        "alignment = ALIGNMENT_BYTES // dtype.itemsize",
        "alignment = 1",
        "run/test_strides.py -k records",
        "killed by test_records_with_statistics_begin_where_kernels_load",
    ),
    Mutation(
        "cp_inductor/run/tile_calls.py",
        "dtype = accumulation_dtype(dk[0]) if len(dk) > 1 else None",
        "dtype = None",
        "run/test_random_attention.py -k test_a_sum",
        "killed by test_a_sum_over_parts_of_a_tile_is_not_rounded_before_it_is_all",
    ),
    Mutation(
        "cp_inductor/tiles/combine.py",
        "total = grads[0].to(accumulation_dtype(grads[0]))",
        "total = grads[0]",
        "tiles/test_numerics.py -k sum_grads",
        "killed by test_sum_grads_sums_in_float32",
    ),
    Mutation(
        "cp_inductor/tiles/stand_in.py",
        "NUM_PLACES = 3",
        "NUM_PLACES = 2",
        "tiles/test_precision.py -k 'stand_in or ends'",
        "killed by test_a_stand_in_has_the_inner_products_of_out",
    ),
    Mutation(
        "cp_inductor/tiles/stand_in.py",
        ".clamp(-limit, limit)",
        "",
        "tiles/test_precision.py -k 'stand_in or ends or finite'",
        "killed by test_numbers_at_the_ends_of_the_range",
    ),
    Mutation(
        "cp_inductor/tiles/tile_masks.py",
        "runs(_local(self, span) for span in tile.queries),",
        "runs(self.token_range(span, of_keys=False) for span in tile.queries),",
        "run/test_random_attention.py -k test_random_attentions",
        "killed by test_random_attentions",
    ),
    Mutation(
        "cp_inductor/tiles/tile_masks.py",
        "BATCH_STRIDE = 1 << 16",
        "BATCH_STRIDE = 1",
        "run/test_masked_attention.py -k drops_its_own",
        "killed by test_every_batch_entry_and_head_drops_its_own",
    ),
    Mutation(
        "cp_inductor/tiles/kernels.py",
        'return lse.masked_fill(lse == -float("inf"), float("inf"))',
        "return lse",
        "run/test_random_attention.py -k test_random_attentions",
        "killed by test_random_attentions",
    ),
    Mutation(
        "cp_inductor/tiles/masked_tiles.py",
        "found[~allowed.any(1)] = Cell.EMPTY",
        "found[~allowed.all(1)] = Cell.EMPTY",
        "tiles/test_block_tables.py",
        "killed by test_masked_tiles",
    ),
    Mutation(
        "cp_inductor/tiles/flex_tiles.py",
        "return place + run[0] if run[0] else place",
        "return place",
        "tiles/test_flex_tiles.py -k test_a_tile",
        "killed by test_a_tile_is_that_of_its_mask",
    ),
    Mutation(
        "cp_inductor/tiles/flex_tiles.py",
        "kinds += [kind.transpose(-1, -2) for kind in kinds]",
        "kinds += [kinds[0].transpose(-1, -2)] * 2",
        "tiles/test_flex_tiles.py -k blocks_hold",
        "killed by test_the_blocks_hold_the_pairs",
    ),
    Mutation(
        "cp_inductor/trust/agreement.py",
        "mode = (claim.kind, has_grad)",
        "mode = (claim.kind, None)",
        "trust/test_agreement.py -k turns_off",
        "killed by test_gradients_that_one_rank_alone_turns_off_later",
    ),
    # passes
    Mutation(
        "passes/find_attention.py",
        "while backends is None and inner.graph in calls:",
        "while False:",
        "tiles/test_refused_kernels.py -k 'disabled or backward'",
        "killed by test_a_kernel_that_is_disabled_is_refused_by_name",
    ),
    Mutation(
        "passes/find_attention.py",
        "for dim, symbol in ((0, BATCH), (1, HEAD)) if dim in sharded",
        "for dim, symbol in ((1, BATCH), (0, HEAD)) if dim in sharded",
        "passes/test_find_attention.py -k counts_what_is_sharded",
        "killed by test_refused_mask_that_counts_what_is_sharded",
    ),
    Mutation(
        "passes/capture_attention.py",
        'if node.meta["example_value"].dtype != site.dtype:',
        "if False:",
        "passes/test_find_attention.py -k autocast",
        "killed by test_autocast_casts_are_written_out",
    ),
    Mutation(
        "passes/capture_attention.py",
        "written | {captured[node] for node in written if node in captured}",
        "set(written)",
        "backend/test_backend.py -k another_saved",
        "killed by test_what_one_attention_made_and_another_saved_is_saved_as_it_was",
    ),
    Mutation(
        "passes/lower_attention.py",
        "start.meta[BYTES_KEY] = batch * num_bytes",
        "start.meta[BYTES_KEY] = num_bytes",
        "passes/test_lower_attention.py -k bytes_are",
        "killed by test_bytes_are_those_of_all_batch_entries",
    ),
    Mutation(
        "passes/schedule_exchange.py",
        "is_barrier = target._schema.is_mutable and target is not WAIT",
        "is_barrier = False",
        "passes/test_schedule.py -k keep_their_order",
        "killed by test_random_numbers_and_writes_keep_their_order",
    ),
    Mutation(
        "passes/schedule_exchange.py",
        "if is_callers and (not self.is_backward or is_input_of_forward(node)):",
        "if is_callers and not self.is_backward:",
        "passes/test_schedule.py -k saved_goes",
        "killed by test_of_what_a_backward_is_given_what_was_saved_goes",
    ),
    Mutation(
        "passes/verify_graph.py",
        "assert len(users) == 1 and users[0].target is WAIT,",
        "assert all(user.target is WAIT for user in users),",
        "passes/test_lower_attention.py -k verify",
        "killed by test_verify_sees_a_start_that_is_not_waited_for",
    ),
    Mutation(
        "passes/check_sequence.py",
        "if [self.typer.types.get(t) for t in self.typer.leaves(other)] != [",
        "if [] and [self.typer.types.get(t) for t in self.typer.leaves(other)] != [",
        "region/test_plain_shards.py -k branches",
        "killed by test_branches_that_differ",
    ),
    Mutation(
        "cp_inductor/dtensor/axis.py",
        "        lengths[dim] = torch.sym_min(most, length - before)\n",
        "",
        "run/test_dropout.py -k begin",
        "killed by test_where_shards_begin",
    ),
    Mutation(
        "cp_inductor/dtensor/recipe.py",
        "return replace(recipe, keep=num_kept)",
        "return replace(recipe, keep=num_kept + 1)",
        "passes/test_find_attention.py -k budget_goes",
        "killed by test_stages_are_kept_as_far_as_the_budget_goes",
    ),
    # region
    Mutation(
        "cp_inductor/region/context.py",
        "(*known, *lengths),",
        "lengths,",
        "region/test_context.py -m 'not slow' -k 'outer_knows'",
        "killed by test_a_length_that_the_outer_knows",
    ),
    Mutation(
        "cp_inductor/region/context.py",
        "for other in (*sharded, *self.buffers[:place])",
        "for other in self.buffers[:place]",
        "region/test_context.py -k nested_and",
        "killed by test_nested_and_entered_again",
    ),
    Mutation(
        "cp_inductor/region/regions.py",
        "if len(set(shards)) < len(lengths):",
        "if len(set(shards)) < len(lengths) - 1:",
        "region/test_context.py -k refused_meshes",
        "killed by test_refused_meshes_and_lengths",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, action="append", help="the number of a row")
    parser.add_argument("--unmutated", action="store_true", help="run the tests on the tree as is")
    given = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="mutations_") as folder:
        tree = Path(folder)
        copy_tree(tree)
        for number, row in enumerate(TABLE):
            if given.only and number not in given.only:
                continue
            start = time.monotonic()
            noticed = run_tests(tree, row.tests) if given.unmutated else run_row(tree, row)
            word = f"killed by {noticed}" if noticed else "SURVIVED"
            if given.unmutated:
                word = f"FAILS unmutated: {noticed}" if noticed else "passes"
            seconds = time.monotonic() - start
            print(f"{number:3} {row.path}: {word} ({seconds:.0f} s)", flush=True)
            wrong += bool(noticed) == given.unmutated
    return wrong


def copy_tree(tree: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, symlinks=True)
        else:
            shutil.copy2(source, tree / name)
    (tree / ".venv").symlink_to((ROOT / ".venv").resolve())


def run_row(tree: Path, row: Mutation) -> str:
    """Return the test that noticed; "" if none did."""
    path = tree / row.path
    text = path.read_text()
    assert text.count(row.old) == 1, f"{row.path}: {row.old!r} stands there {text.count(row.old)}x"
    path.write_text(text.replace(row.old, row.new))
    try:
        return run_tests(tree, row.tests)
    finally:
        shutil.copy2(ROOT / row.path, path)


def run_tests(tree: Path, tests: str) -> str:
    """Return the first test that failed; "" if none did."""
    words = [f"tests/{word}" if ".py" in word else word for word in shlex.split(tests)]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--tail",
        "none",
        "-p",
        "no:cacheprovider",
    ]
    # No byte code: a file that is changed twice within a second would be taken for the other.
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        [*command, *words],
        cwd=tree,
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "a hang"
    if process.returncode == 0:
        return ""
    if process.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
        return f"(no tests: {tests})"
    assert process.returncode in (1, 2), output  # tests failed, or could not be collected
    found = re.search(r"^(?:FAILED|ERROR) tests/(.+?)(?: - |$)", output, re.MULTILINE)
    return found[1] if found else "an import"


if __name__ == "__main__":
    sys.exit(main())
