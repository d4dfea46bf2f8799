"""`SessionRecipe`: what a provider decides about a session, and the checks of its option keys."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rlx_ort.errors import EngineError, near_names

if TYPE_CHECKING:
    from rlx_ort.options.compile_options import CompileOptions
    from rlx_ort.providers.engine.replays import Recorder

HOST_MEMORY = ("cpu", 0)
"""ONNX Runtime's name and index of ordinary host memory."""


class Keeps(enum.Enum):
    """What ONNX Runtime can write to the compile cache and open again."""

    NOTHING = "nothing"  # the provider may have a cache folder of its own
    OPTIMIZED = "optimized"  # the optimised model and its weights
    PACKED = "packed"  # its weights in the layout of the kernels too
    CONTEXT = "context"  # the provider's compiled code, in the nodes of an EPContext model


def names(text: str) -> frozenset[str]:
    """Return the words of a text, for tables of option names."""
    return frozenset(text.split())


def nothing_to_hold() -> contextlib.AbstractContextManager[Any]:
    """Return a context that holds nothing, for providers whose sessions may run concurrently."""
    return contextlib.nullcontext()


@dataclass(frozen=True)
class Recording:
    """How a provider's sessions record the launches of their runs.

    `open` returns the driver for one session, or raises `NotRecordedError` with the reason. With `required`, a run that
    cannot be recorded is an error.
    """

    open: Callable[[], Recorder]
    required: bool = False


@dataclass(frozen=True)
class SessionRecipe:
    """How to open a session on one execution provider.

    Attributes:
        option_keys: the provider options that exist, None if they are not listed here; others are refused, since most
            providers silently ignore an unknown key.
        ep_devices: ONNX Runtime's device objects of a plugin provider; empty for one that is built in.
        helpers: built-in providers that come after the requested one, such as CUDA after TensorRT.
        mem_pattern: whether memory patterns may be planned; DirectML refuses sessions that do.
        run_lock: returns the lock that a run, and opening and closing a session, must hold.
        before_run: raises when a run in this process would hang or crash.
        memory: ONNX Runtime's name and index of the memory in which tensors stay between runs; host memory where the
            provider's own cannot be bound.
        device_graph: whether the provider itself records launches and replays them, over one binding of static shapes.
        any_size: whether kernels are searched for quickly, since each new size of the inputs needs another search.
        recording: how this library records launches; None where it does not.
        pinned: makes an array like another one in pinned host memory; None if there is no such memory, or if bound
            device buffers are as cheap.
        run_config: RunOptions entries for a run within a recording, which must not wait for the device.
        stream_options: provider options of one session in this process, which are no part of a cache key.
        cache_options: takes a folder, of one model with its weights on one device, and returns the provider options
            that make the provider cache there what it compiles.
        rewritten: takes the bytes of a model and returns those to open.
        spelled: takes all provider options and returns them in the provider's spelling.
    """

    ep_name: str
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    option_keys: frozenset[str] | None = None
    ep_devices: tuple[Any, ...] = ()
    helpers: tuple[tuple[str, Mapping[str, str]], ...] = ()
    mem_pattern: bool = True
    run_lock: Callable[[], contextlib.AbstractContextManager[Any]] = nothing_to_hold
    before_run: Callable[[], None] | None = None
    memory: tuple[str, int] = HOST_MEMORY
    device_graph: bool = False
    any_size: bool = False
    recording: Recording | None = None
    pinned: Callable[[Any], Any] | None = None
    run_config: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    stream_options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    keeps: Keeps = Keeps.NOTHING
    cache_options: Callable[[str], Mapping[str, str]] | None = None
    rewritten: Callable[[bytes], bytes] | None = None
    spelled: Callable[[Mapping[str, str]], Mapping[str, str]] | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether ONNX Runtime's own CPU kernels run it, in the process's memory and threads."""
        return self.ep_name == "CPUExecutionProvider"

    def provider_options(self, options: CompileOptions) -> dict[str, str]:
        """Return the provider's options with the caller's on top, all as text."""
        merged = {**self.options, **options.provider_options}
        text = {str(key): str(value) for key, value in merged.items()}
        return text if self.spelled is None else dict(self.spelled(text))


# https://github.com/microsoft/onnxruntime/blob/main/include/onnxruntime/core/session/onnxruntime_session_options_config_keys.h
# and the strings of the 1.24.4 and 1.31.1 libraries. ONNX Runtime ignores unknown keys silently; here they are refused.
KNOWN_CONFIG_KEYS = names(
    """
    ep.context_embed_mode ep.context_enable ep.context_file_path ep.context_model_external_initializers_file_name
    ep.context_node_name_prefix ep.cuda.fpa_intb_gemm ep.cuda.fpa_intb_profile_m
    ep.cuda.gqa_workspace_max_total_sequence_length ep.dml.disable_graph_fusion ep.dml.disable_memory_arena
    ep.dml.enable_cpu_sync_spinning ep.dml.enable_graph_capture ep.dml.enable_graph_serialization
    ep.enable_weightless ep.share_ep_contexts ep.stop_share_ep_contexts
    memory.enable_memory_arena_shrinkage mlas.disable_kleidiai mlas.enable_gemm_fastmath_arm64_bfloat16
    mlas.nchwc_depthwise_sliding mlas.qnbit.force_fp32 mlas.use_lut_gemm
    optimization.constant_folding_max_output_size_in_bytes optimization.disable_specified_optimizers
    optimization.enable_cast_chain_elimination optimization.enable_gelu_approximation
    optimization.minimal_build_optimizations
    session.allow_released_opsets_only session.collect_node_memory_stats_to_file
    session.debug_layout_transformation session.disable_aot_function_inlining session.disable_cpu_ep_fallback
    session.disable_double_qdq_remover session.disable_model_compile session.disable_prepacking
    session.disable_qdq_constant_folding session.disable_quant_qdq session.dynamic_block_base
    session.enable_dq_matmulnbits_fusion session.enable_moe_expert_counting session.enable_moe_expert_statistics
    session.enable_quant_qdq_cleanup session.fail_on_suboptimal_compiled_model session.force_spinning_stop
    session.function_expansion_byte_limit session.function_expansion_node_limit session.gqa_value_layout
    session.graph_optimizations_loop_level session.inter_op.allow_spinning session.inter_op.spin_backoff_max
    session.inter_op.spin_duration_us session.intra_op.allow_spinning session.intra_op.spin_backoff_max
    session.intra_op.spin_duration_us session.intra_op_thread_affinities session.layer_assignment_settings
    session.load_model_format session.max_shape_override session.moe_expert_counter_alpha
    session.moe_expert_counter_beta session.moe_expert_counter_state_file session.name_based_layer_assignment
    session.node_partition_config_file session.optimized_model_external_initializers_file_name
    session.optimized_model_external_initializers_min_size_in_bytes session.prepack.enable_parallel
    session.qdq_matmulnbits_accuracy_level session.qdq_matmulnbits_block_size session.qdqisint8allowed
    session.record_ep_graph_assignment_info session.resource_cuda_partitioning_settings
    session.save_external_prepacked_constant_initializers session.save_model_format session.set_denormal_as_zero
    session.strict_shape_type_inference session.strict_workspace_verification session.use_deterministic_compute
    session.use_device_allocator_for_initializers session.use_env_allocators session.use_ort_model_bytes_directly
    session.use_ort_model_bytes_for_initializers session.x64quantprecision
    """
)

_OURS = {
    "session.compile_only": "such a session cannot run, and opening one can end the process",
    "session.use_external_initializer_file_buffers_directly": "rlx_ort decides how weights reach a session",
    "session.model_external_initializers_file_folder_path": "rlx_ort decides how weights reach a session",
}


def check_config(entries: Mapping[str, str]) -> None:
    """Refuse session config entries that ONNX Runtime would ignore or that `rlx_ort` sets itself."""
    for key in entries:
        if key in _OURS:
            raise EngineError(f"session config {key!r} cannot be set: {_OURS[key]}")
        if key not in KNOWN_CONFIG_KEYS:
            raise EngineError(f"unknown session config {key!r}; {near_names(key, KNOWN_CONFIG_KEYS)}")


def check_provider_options(ep_name: str, given: Mapping[str, str], known: Collection[str] | None) -> None:
    """Refuse provider options that the provider would ignore; `known` is None when its options are not listed."""
    for key in given:
        if known is not None and key not in known:
            raise EngineError(f"{ep_name} has no option {key!r}; {near_names(key, known)}")
