"""The paged attention as an SGLang backend. Only what SGLang's types need: plans are made once per forward, the arithmetic is `paged`."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.arg_groups.choices import add_attention_backend_choices
from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from aerostat_engine.attention import BACKEND_NAME
from aerostat_engine.attention.paged import Heads, Plan, Slots, attend, build_plan

GET_LAST_LOC = "sglang.srt.mem_cache.allocation.get_last_loc"


class PagedAttention(TorchNativeAttnBackend):  # type: ignore[misc]  # SGLang is untyped
    """Decoder self-attention by `paged`; encoder-only and cross attention stay with SGLang's own torch arithmetic."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._dtype: torch.dtype = model_runner.dtype
        self._tables: list[Slots] = []
        self._n_new: list[int] = []
        self._plans: dict[tuple[int | None, bool], Plan] = {}

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        table = self.req_to_token_pool.req_to_token.numpy()
        lengths = forward_batch.seq_lens.tolist()
        is_decode = forward_batch.forward_mode.is_decode_or_idle()
        self._n_new = [1] * len(lengths) if is_decode else forward_batch.extend_seq_lens.tolist()
        rows = forward_batch.req_pool_indices.tolist()
        self._tables = [table[row, :length].astype("int64") for row, length in zip(rows, lengths, strict=True)]
        self._plans = {}

    def forward_extend(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Tensor:
        if _is_stock(layer):
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any, save_kv_cache: bool = True) -> Tensor:
        if _is_stock(layer):
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        return self._attend(q, k, v, layer, forward_batch, save_kv_cache)

    def _attend(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any, save: bool) -> Tensor:
        pool = self.token_to_kv_pool
        if save and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc), k, v)
        heads = Heads(
            n_query=layer.tp_q_head_num,
            n_key=layer.tp_k_head_num,
            dim=layer.qk_head_dim,
            value_dim=layer.v_head_dim,
            scale=layer.scaling,
            cap=layer.logit_cap,
        )
        query = q.reshape(-1, heads.n_query, heads.dim)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        return attend(query, keys, values, self._plan(layer), heads)

    def _plan(self, layer: Any) -> Plan:
        """The plan for this layer's window and pool: made at its first layer, shared by the others."""
        size = layer.sliding_window_size
        window = size if size is not None and size >= 0 else None
        is_swa = self.use_sliding_window_kv_pool and self.token_to_kv_pool.layers_mapping[layer.layer_id][1]
        plan = self._plans.get((window, is_swa))
        if plan is None:
            plan = self._plans[window, is_swa] = build_plan(self._pool_tables(window, is_swa), self._n_new, window, self._dtype)
        return plan

    def _pool_tables(self, window: int | None, is_swa: bool) -> list[Slots]:
        if not is_swa:
            return self._tables
        translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
        return [translate(torch.from_numpy(table)).numpy().astype("int64") for table in self._tables]


def _is_stock(layer: Any) -> bool:
    return bool(layer.is_cross_attention) or layer.attn_type == AttentionType.ENCODER_ONLY


def register() -> None:
    """Make the backend selectable by name, and keep SGLang from choosing Triton for a name that it does not know."""
    add_attention_backend_choices([BACKEND_NAME])
    register_attention_backend(BACKEND_NAME)(PagedAttention)
    HookRegistry.register(GET_LAST_LOC, allocation.get_last_loc_torch, HookType.REPLACE)
