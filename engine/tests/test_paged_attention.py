"""The paged arithmetic equals attention by its definition, whatever the layout of the slots, and reads no slot of another sequence."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aerostat_engine.attention.paged import MIN_RUN_TOKENS, Heads, Slots, attend, build_plan

pytestmark = pytest.mark.cpu

PAGE_TOKENS = 16
N_SLOTS = 4096


def reference(
    query: Tensor, keys: Tensor, values: Tensor, tables: list[Slots], n_new: list[int], window: int | None, heads: Heads
) -> Tensor:
    """Every query by itself, in float64."""
    out = []
    start = 0
    for table, new in zip(tables, n_new, strict=True):
        for i in range(new):
            at = len(table) - new + i
            first = 0 if window is None else max(0, at - window)
            slots = torch.from_numpy(table[first : at + 1])
            k = keys[slots].double().repeat_interleave(heads.n_query // heads.n_key, 1)
            v = values[slots].double().repeat_interleave(heads.n_query // heads.n_key, 1)
            scores = torch.einsum("hd,lhd->hl", query[start + i].double(), k) * heads.scale
            if heads.cap:
                scores = heads.cap * torch.tanh(scores / heads.cap)
            out.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), v).reshape(-1))
        start += new
    return torch.stack(out).to(query.dtype)


def paged_tables(lengths: list[int], *, run_pages: int, seed: int) -> list[Slots]:
    """Slots of sequences whose pages are dealt in turn, `run_pages` neighbours at a time, in a shuffled order of the runs."""
    runs = np.arange(N_SLOTS // PAGE_TOKENS - 1) // run_pages
    order = np.random.default_rng(seed).permutation(runs.max() + 1)
    pages = iter(np.concatenate([np.flatnonzero(runs == run) for run in order]) + 1)
    missing = [-(-length // PAGE_TOKENS) for length in lengths]
    owned: list[list[int]] = [[] for _ in lengths]
    for i in itertools.cycle(range(len(lengths))):
        if not any(missing):
            break
        for _ in range(min(run_pages, missing[i])):
            owned[i].append(int(next(pages)))
            missing[i] -= 1
    slots = [(np.array(of)[:, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)).reshape(-1) for of in owned]
    return [of[:length].astype("int64") for of, length in zip(slots, lengths, strict=True)]


def check(lengths: list[int], n_new: list[int], heads: Heads, *, window: int | None = None, run_pages: int = 1, seed: int = 0) -> None:
    torch.manual_seed(seed)
    tables = paged_tables(lengths, run_pages=run_pages, seed=seed)
    keys = torch.full((N_SLOTS, heads.n_key, heads.dim), float("nan"))
    values = torch.full((N_SLOTS, heads.n_key, heads.value_dim), float("nan"))
    for table in tables:  # a slot that no sequence owns poisons whatever reads it
        keys[table] = torch.randn(len(table), heads.n_key, heads.dim)
        values[table] = torch.randn(len(table), heads.n_key, heads.value_dim)
    query = torch.randn(sum(n_new), heads.n_query, heads.dim)
    plan = build_plan(tables, n_new, window, query.dtype)
    got = attend(query, keys, values, plan, heads)
    torch.testing.assert_close(got, reference(query, keys, values, tables, n_new, window, heads), atol=2e-5, rtol=2e-4)


GQA = Heads(n_query=6, n_key=2, dim=16, value_dim=16, scale=0.25)
VARIANTS = {
    "one head each": Heads(n_query=4, n_key=4, dim=16, value_dim=16, scale=0.25),
    "grouped queries": GQA,
    "one key head for all": Heads(n_query=6, n_key=1, dim=16, value_dim=16, scale=0.2),
    "narrow values": Heads(n_query=4, n_key=1, dim=24, value_dim=16, scale=0.2),
    "capped scores": Heads(n_query=6, n_key=2, dim=16, value_dim=16, scale=1.0, cap=2.0),
}


@pytest.mark.parametrize("heads", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("window", [None, 20])
def test_cold_cached_and_decode_rows_in_one_batch_equal_the_definition(heads: Heads, window: int | None) -> None:
    check([40, 70, 33, 200, 17], [40, 6, 1, 1, 1], heads, window=window)


@pytest.mark.parametrize("run_pages", [1, 9, 30])
def test_decode_rows_read_in_place_gathered_and_merged_equal_the_definition(run_pages: int) -> None:
    check([3 * MIN_RUN_TOKENS + 5, 7, 2 * MIN_RUN_TOKENS, 150, 1], [1] * 5, GQA, run_pages=run_pages)


def test_a_lone_sequence_in_adjacent_slots_is_read_without_a_gather() -> None:
    [table] = paged_tables([500], run_pages=40, seed=0)
    plan = build_plan([table], [1], None, torch.float32)
    assert plan.decode is not None
    assert [run.n_tokens for run in plan.decode.runs] == [500]
    assert not plan.decode.groups


def test_a_window_bounds_the_keys_that_are_read() -> None:
    [table] = paged_tables([900], run_pages=1, seed=0)
    plan = build_plan([table, table], [1, 3], 50, torch.float32)
    assert plan.decode is not None
    assert [group.slots.shape[1] for group in plan.decode.groups] == [51]
    assert [len(span.slots) for span in plan.spans] == [53]


def test_rows_of_very_different_length_are_not_padded_to_each_other() -> None:
    tables = paged_tables([600, 590, 20, 19], run_pages=1, seed=0)
    plan = build_plan(tables, [1] * 4, None, torch.float32)
    assert plan.decode is not None
    assert [tuple(group.slots.shape) for group in plan.decode.groups] == [(2, 600), (2, 20)]


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 24)), min_size=1, max_size=6),
    window=st.sampled_from([None, 0, 7, 129]),
    run_pages=st.sampled_from([1, 2, 10]),
    seed=st.integers(0, 3),
)
def test_any_batch_equals_the_definition(rows: list[tuple[int, int]], window: int | None, run_pages: int, seed: int) -> None:
    check([past + new for past, new in rows], [new for _, new in rows], GQA, window=window, run_pages=run_pages, seed=seed)
