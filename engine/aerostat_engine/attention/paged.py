"""Attention over paged KV on a CPU: which slots a forward reads (the plan) and the arithmetic over them. Torch and numpy, no SGLang.

Only new queries are computed. Slots of a sequence that lie side by side in the pool are read in place; the rest is gathered. Where a decode
row's keys come in several pieces, the partial results are merged by their log-sum-exp, which is exact up to rounding.
Every slot that is read belongs to the sequence that reads it, padding included: a page that is not mapped is never touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

MIN_RUN_TOKENS = 128
"""Adjacent slots are read in place from this length on; a shorter run costs less to gather than one more kernel call."""
MAX_PADDING_TOKENS = 128
"""Padding that a decode group may accumulate; beyond it one more kernel call is cheaper."""

Slots = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Keys of one decode row that lie side by side in the pool: slots `first` to `first + n_tokens`."""

    row: int
    first: int
    n_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Keys of decode rows that are gathered together: `slots` is [rows, longest], padded with each row's own first slot."""

    rows: Tensor
    slots: Tensor
    bias: Tensor | None
    """[rows, 1, 1, longest], minus infinity over the padding; None where nothing is padded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """The rows with one new token. A piece is a run or a row of a group, numbered in this order."""

    rows: Tensor
    """Their query rows."""
    runs: tuple[Run, ...]
    groups: tuple[Group, ...]
    pieces: Tensor
    """[rows, most pieces of a row]: which pieces make up a row; the number after the last one stands for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One sequence with several new tokens: query rows `start` to `start + n_new`, and the slots of all keys that they may see."""

    start: int
    n_new: int
    slots: Tensor
    first: int | None
    """The first slot, when all of them lie side by side."""
    bias: Tensor | None
    """[new, keys], minus infinity over what a query may not see; None means plain causal over equally many keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    decode: Decode | None
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Shape of one layer's attention. `scale` multiplies the scores, `cap` bounds them by tanh (0: not at all)."""

    n_query: int
    n_key: int
    dim: int
    value_dim: int
    scale: float
    cap: float = 0.0


def build_plan(tables: Sequence[Slots], n_new: Sequence[int], window: int | None, dtype: torch.dtype) -> Plan:
    """Plan one forward. `tables[i]` holds the slots of sequence i in order; its last `n_new[i]` are the new tokens'.

    `window`: a query sees keys at most this many positions before it; None sees all. `dtype` is the queries'.
    """
    spans: list[Span] = []
    singles: list[tuple[int, Slots]] = []
    start = 0
    for table, new in zip(tables, n_new, strict=True):
        past = len(table) - new
        visible = table if window is None else table[max(0, past - window) :]
        if new == 1:
            singles.append((start, visible))
        elif new > 1:
            spans.append(_span(start, new, visible, window, dtype))
        start += new
    return Plan(decode=_decode(singles, dtype) if singles else None, spans=tuple(spans))


def attend(query: Tensor, keys: Tensor, values: Tensor, plan: Plan, heads: Heads) -> Tensor:
    """[tokens, query heads * value dim] for packed queries [tokens, query heads, dim] against the pool's rows [slots, key heads, dim]."""
    decode = plan.decode
    if decode is not None and not plan.spans:
        return _attend_decode(query, keys, values, decode, heads).view(query.shape[0], -1)
    out = query.new_empty((query.shape[0], heads.n_query, heads.value_dim))
    for span in plan.spans:
        _attend_span(query, keys, values, span, heads, out)
    if decode is not None:
        out[decode.rows] = _attend_decode(query, keys, values, decode, heads).view(-1, heads.n_query, heads.value_dim)
    return out.view(query.shape[0], -1)


def _breaks(slots: Slots) -> npt.NDArray[np.intp]:
    """Positions whose slot is not the one after its predecessor's."""
    return np.flatnonzero(np.diff(slots) != 1) + 1


def _bias(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _span(start: int, new: int, visible: Slots, window: int | None, dtype: torch.dtype) -> Span:
    seen = len(visible)
    bias = None
    if seen > new or (window is not None and window < new - 1):
        at = torch.arange(seen - new, seen)[:, None]
        key = torch.arange(seen)
        bias = _bias((key > at) if window is None else (key > at) | (key < at - window), dtype)
    return Span(
        start=start,
        n_new=new,
        slots=torch.from_numpy(visible),
        first=None if _breaks(visible).size else int(visible[0]),
        bias=bias,
    )


def _decode(singles: Sequence[tuple[int, Slots]], dtype: torch.dtype) -> Decode:
    runs: list[Run] = []
    rests: list[tuple[int, Slots]] = []
    for row, slots in singles:
        edges = [0, *_breaks(slots).tolist(), len(slots)]
        short: list[Slots] = []
        for begin, end in itertools.pairwise(edges):
            if end - begin >= MIN_RUN_TOKENS:
                runs.append(Run(row=row, first=int(slots[begin]), n_tokens=end - begin))
            else:
                short.append(slots[begin:end])
        if short:
            rests.append((row, np.concatenate(short)))
    groups = tuple(_group(part, dtype) for part in _by_similar_length(rests))
    owners = [run.row for run in runs] + [row for group in groups for row in group.rows.tolist()]
    of_row: dict[int, list[int]] = {row: [] for row, _ in singles}
    for piece, row in enumerate(owners):
        of_row[row].append(piece)
    most = max(map(len, of_row.values()))
    pieces = [made + [len(owners)] * (most - len(made)) for made in of_row.values()]
    return Decode(rows=torch.tensor(list(of_row)), runs=tuple(runs), groups=groups, pieces=torch.tensor(pieces))


def _by_similar_length(rests: Sequence[tuple[int, Slots]]) -> list[list[tuple[int, Slots]]]:
    """Longest first; a new group begins where the padding of the current one would cost more than a call."""
    parts: list[list[tuple[int, Slots]]] = []
    padding = 0
    for row, slots in sorted(rests, key=lambda rest: (-len(rest[1]), rest[0])):
        padding += len(parts[-1][0][1]) - len(slots) if parts else 0
        if not parts or padding > MAX_PADDING_TOKENS:
            parts.append([])
            padding = 0
        parts[-1].append((row, slots))
    return parts


def _group(part: Sequence[tuple[int, Slots]], dtype: torch.dtype) -> Group:
    lengths = np.array([len(slots) for _, slots in part])
    longest = int(lengths.max())
    table = np.empty((len(part), longest), dtype=np.int64)
    for line, (_, slots) in zip(table, part, strict=True):
        line[: len(slots)] = slots
        line[len(slots) :] = slots[0]
    padded = torch.from_numpy(np.arange(longest) >= lengths[:, None])
    return Group(
        rows=torch.tensor([row for row, _ in part]),
        slots=torch.from_numpy(table),
        bias=_bias(padded[:, None, None, :], dtype) if lengths.min() < longest else None,
    )


def _attend_span(query: Tensor, keys: Tensor, values: Tensor, span: Span, heads: Heads, out: Tensor) -> None:
    rows = slice(span.start, span.start + span.n_new)
    n_keys = span.slots.shape[0]
    if span.first is not None:
        k, v = keys.narrow(0, span.first, n_keys), values.narrow(0, span.first, n_keys)
    else:
        k, v = keys.index_select(0, span.slots), values.index_select(0, span.slots)
    q = query[rows].transpose(0, 1)[None]
    k, v = (part.to(query.dtype).transpose(0, 1)[None] for part in (k, v))
    if heads.cap or heads.dim != heads.value_dim:
        groups = heads.n_query // heads.n_key
        bias = span.bias if span.bias is not None else _bias(torch.ones(span.n_new, n_keys, dtype=torch.bool).triu(1), query.dtype)
        o = _plain(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), bias, heads)[0]
    else:
        o = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=span.bias, is_causal=span.bias is None, scale=heads.scale, enable_gqa=heads.n_query != heads.n_key
        )
    out[rows] = o[0].transpose(0, 1)


def _attend_decode(query: Tensor, keys: Tensor, values: Tensor, decode: Decode, heads: Heads) -> Tensor:
    """[rows of the plan, key heads, queries per key head, value dim]."""
    folded = query.reshape(query.shape[0], heads.n_key, -1, heads.dim)
    outs: list[Tensor] = []
    sums: list[Tensor] = []
    for run in decode.runs:
        k = keys.narrow(0, run.first, run.n_tokens).to(query.dtype).transpose(0, 1)[None]
        v = values.narrow(0, run.first, run.n_tokens).to(query.dtype).transpose(0, 1)[None]
        o, log_sum = _partial(folded.narrow(0, run.row, 1), k, v, None, heads)
        outs.append(o)
        sums.append(log_sum)
    for group in decode.groups:
        shape = (*group.slots.shape, heads.n_key, -1)
        slots = group.slots.view(-1)
        k = keys.index_select(0, slots).to(query.dtype).view(shape).transpose(1, 2)
        v = values.index_select(0, slots).to(query.dtype).view(shape).transpose(1, 2)
        o, log_sum = _partial(folded.index_select(0, group.rows), k, v, group.bias, heads)
        outs.append(o)
        sums.append(log_sum)
    return _merge(decode.pieces, outs, sums)


def _merge(pieces: Tensor, outs: list[Tensor], sums: list[Tensor]) -> Tensor:
    """Put each row's pieces together; a piece weighs by its share of the exponentials."""
    if pieces.numel() == 1:
        return outs[0]
    if pieces.shape[1] == 1:
        return torch.cat(outs).index_select(0, pieces[:, 0])
    none = outs[0].new_zeros((1, *outs[0].shape[1:]))
    absent = sums[0].new_full((1, *sums[0].shape[1:]), float("-inf"))
    shares = torch.cat([*sums, absent])[pieces].softmax(1)
    return (torch.cat([*outs, none])[pieces] * shares[..., None]).sum(1).to(none.dtype)


def _partial(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, heads: Heads) -> tuple[Tensor, Tensor]:
    """Attention over some of a row's keys, and the log of the sum of its exponentials, by which pieces are merged."""
    if heads.cap or heads.dim != heads.value_dim:
        return _plain(q, k, v, bias, heads)
    o, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias, scale=heads.scale)
    return o, log_sum


def _plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, heads: Heads) -> tuple[Tensor, Tensor]:
    """The same by its definition, for what the fused kernel cannot: capped scores, and values of another width than keys."""
    scores = torch.matmul(q.float(), k.float().transpose(-1, -2)) * heads.scale
    if heads.cap:
        scores = heads.cap * torch.tanh(scores / heads.cap)
    if bias is not None:
        scores = scores + bias.float()
    return torch.matmul(scores.softmax(-1), v.float()).to(q.dtype), scores.logsumexp(-1)
