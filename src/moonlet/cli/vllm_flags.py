"""Flags of vLLM launch lines, so that a K3 recipe starts with ``moonlet`` for ``vllm``.

Each of them is answered: the ones that mean something here take effect in `moonlet.cli.serve`,
the rest get one line saying why they are not needed, and values that would change what a client
sees (another parser, a worker without HTTP) are refused. Source of the list: deployment.md
section 5.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Annotated

from cyclopts import Group, Parameter

from moonlet.core.errors import ConfigError

__all__ = ["VllmFlags"]

GROUP = Group(
    "Accepted from vLLM launch lines",
    help="Each prints one line saying why it is not needed here.",
    sort_key=9,
)
PARSER = "kimi_k3"

_ONE_PROCESS = "one process runs the whole model on this machine"
_NATIVE = "moonlet chooses its own kernels; see moonlet env"
_STATE = "recurrent states are float32, one per sequence and one per checkpoint"
_ROWS = "latent rows are kept in the model's dtype"
_TRANSFER = "prefixes are kept in this process"
_NO_GRAPH = "there is no graph capture or compilation to tune"
_MEMORY = "memory follows from --num-pages, --num-checkpoints and --max-num-seqs"
_BUILT_IN = "reasoning and tool calls of K3 are always parsed"
_READER = "shards are memory-mapped and verified while loading"
_TEXT_ONLY = "only text is served; vision tensors are verified and not loaded"

_REASONS = {
    "tensor_parallel_size": _ONE_PROCESS,
    "pipeline_parallel_size": _ONE_PROCESS,
    "data_parallel_size": _ONE_PROCESS,
    "data_parallel_size_local": _ONE_PROCESS,
    "data_parallel_address": _ONE_PROCESS,
    "data_parallel_rpc_port": _ONE_PROCESS,
    "data_parallel_hybrid_lb": _ONE_PROCESS,
    "data_parallel_external_lb": _ONE_PROCESS,
    "data_parallel_backend": _ONE_PROCESS,
    "decode_context_parallel_size": _ONE_PROCESS,
    "dcp_comm_backend": _ONE_PROCESS,
    "enable_expert_parallel": _ONE_PROCESS,
    "enable_eplb": _ONE_PROCESS,
    "all2all_backend": _ONE_PROCESS,
    "disable_custom_all_reduce": _ONE_PROCESS,
    "distributed_executor_backend": _ONE_PROCESS,
    "nnodes": _ONE_PROCESS,
    "node_rank": _ONE_PROCESS,
    "master_addr": _ONE_PROCESS,
    "master_port": _ONE_PROCESS,
    "moe_backend": _NATIVE,
    "attention_backend": _NATIVE,
    "attention_config": _NATIVE,
    "additional_config": _NATIVE,
    "enable_flashinfer_autotune": _NATIVE,
    "kv_cache_dtype": _ROWS,
    "kv_cache_memory_bytes": _MEMORY,
    "kv_offloading_size": _MEMORY,
    "gpu_memory_utilization": _MEMORY,
    "enable_cumem_allocator": _MEMORY,
    "enable_mamba_shared_prefix_checkpoint": "a state is always kept where two prompts part",
    "kv_transfer_config": _TRANSFER,
    "mamba_cache_mode": _STATE,
    "mamba_ssm_cache_dtype": _STATE,
    "mamba_block_size": _STATE,
    "use_replayssm": _STATE,
    "compilation_config": _NO_GRAPH,
    "enforce_eager": _NO_GRAPH,
    "stream_interval": "tokens are streamed as they come",
    "load_format": _READER,
    "safetensors_load_strategy": _READER,
    "enable_ep_weight_filter": _READER,
    "trust_remote_code": "no code from a checkpoint is ever run",
    "language_model_only": _TEXT_ONLY,
    "mm_encoder_tp_mode": _TEXT_ONLY,
    "tool_call_parser": _BUILT_IN,
    "reasoning_parser": _BUILT_IN,
    "enable_auto_tool_choice": _BUILT_IN,
}

Text = Annotated[str | None, Parameter(group=GROUP)]
Count = Annotated[int | None, Parameter(group=GROUP)]
Share = Annotated[float | None, Parameter(group=GROUP)]
Switch = Annotated[bool | None, Parameter(group=GROUP)]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class VllmFlags:
    """Flags that vLLM knows and that have nothing to do here."""

    tensor_parallel_size: Count = None
    pipeline_parallel_size: Count = None
    data_parallel_size: Count = None
    data_parallel_size_local: Count = None
    data_parallel_address: Text = None
    data_parallel_rpc_port: Count = None
    data_parallel_hybrid_lb: Switch = None
    data_parallel_external_lb: Switch = None
    data_parallel_backend: Text = None
    decode_context_parallel_size: Count = None
    dcp_comm_backend: Text = None
    enable_expert_parallel: Switch = None
    enable_eplb: Switch = None
    all2all_backend: Text = None
    disable_custom_all_reduce: Switch = None
    distributed_executor_backend: Text = None
    nnodes: Count = None
    node_rank: Count = None
    master_addr: Text = None
    master_port: Count = None
    headless: Switch = None
    moe_backend: Text = None
    attention_backend: Text = None
    attention_config: Text = None
    additional_config: Text = None
    enable_flashinfer_autotune: Switch = None
    kv_cache_dtype: Text = None
    kv_cache_memory_bytes: Text = None
    kv_offloading_size: Text = None
    gpu_memory_utilization: Share = None
    enable_cumem_allocator: Switch = None
    enable_mamba_shared_prefix_checkpoint: Switch = None
    kv_transfer_config: Text = None
    mamba_cache_mode: Text = None
    mamba_ssm_cache_dtype: Text = None
    mamba_block_size: Count = None
    use_replayssm: Switch = None
    compilation_config: Text = None
    enforce_eager: Switch = None
    stream_interval: Count = None
    load_format: Text = None
    safetensors_load_strategy: Text = None
    enable_ep_weight_filter: Switch = None
    trust_remote_code: Switch = None
    language_model_only: Switch = None
    mm_encoder_tp_mode: Text = None
    tool_call_parser: Text = None
    reasoning_parser: Text = None
    enable_auto_tool_choice: Switch = None

    def check(self) -> None:
        """Refuse values that ask for another behaviour than this server has.

        Raises:
            ConfigError: A foreign parser, or a worker without HTTP.
        """
        for name in ("tool_call_parser", "reasoning_parser"):
            value = getattr(self, name)
            if value not in (None, PARSER):
                raise ConfigError(
                    f"--{name.replace('_', '-')} is {value!r}; this server parses {PARSER} only"
                )
        if self.headless or self.node_rank:
            raise ConfigError(
                "--headless and --node-rank start a worker of another server; moonlet serves a "
                "model from one process, start it once"
            )

    def notes(self) -> Iterator[str]:
        """Yield one line per given flag that is not needed."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or field.name not in _REASONS:
                continue
            prefix = "--no-" if value is False else "--"
            yield f"{prefix}{field.name.replace('_', '-')}: not needed, {_REASONS[field.name]}"
