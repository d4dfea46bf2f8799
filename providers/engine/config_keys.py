"""The session config keys ONNX Runtime knows, since it takes any other without a word."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

from rlx_ort.errors import EngineError
from rlx_ort.providers.engine.recipe import names

__all__ = ["KNOWN_CONFIG_KEYS", "check_config", "check_provider_options"]

# https://github.com/microsoft/onnxruntime/blob/main/include/onnxruntime/core/session/onnxruntime_session_options_config_keys.h
# and the strings of the 1.24.4 and 1.31.1 libraries. Keys that are not of this list are typing errors or are
# newer than it; both are worth stopping for.
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
    """Refuse session config entries that ONNX Runtime would ignore or that `rlx_ort` sets itself.

    Raises:
        EngineError: a key is unknown (the closest known one is named) or reserved.
    """
    for key in entries:
        if key in _OURS:
            raise EngineError(f"session config {key!r} cannot be set: {_OURS[key]}")
        if key not in KNOWN_CONFIG_KEYS:
            raise EngineError(f"unknown session config {key!r}; {_suggestion(key, KNOWN_CONFIG_KEYS)}")


def check_provider_options(ep_name: str, given: Mapping[str, str], known: Collection[str] | None) -> None:
    """Refuse provider options that the provider would ignore; `known` is None when its options are not listed.

    Raises:
        EngineError: an option is unknown; the closest known one is named.
    """
    for key in given:
        if known is not None and key not in known:
            raise EngineError(f"{ep_name} has no option {key!r}; {_suggestion(key, known)}")


def _suggestion(key: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
